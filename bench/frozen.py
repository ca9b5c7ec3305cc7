"""Measures what frozen parameters cost in traffic, memory, the time of an update, and the start of a replacement.

    python bench/frozen.py [--frozen-mb 1024] [--trained-mb 8] [--only traffic|memory|update|replacement]

Jobs have one or two servers, and one or two workers, on this machine. The base is a file in the page cache. All values
are zeros, which are read and sent as any others.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from _common import allocator_environment, table

from backstay.testing import Forker, Job, Pod

SCRIPT: Final = Path(__file__).resolve().parent / "scripts" / "frozen.py"
Rows = list[tuple[str, ...]]


@contextmanager
def job(forker: Forker, shards: int = 1, workers: int = 2, **settings: Any) -> Iterator[Job]:
    with tempfile.TemporaryDirectory(prefix="backstay-frozen-") as folder:
        made = Job([sys.executable, str(SCRIPT)], Path(folder), forker, shards=shards, workers=workers, **settings)
        try:
            yield made
        finally:
            made.end()


def sent_on_loopback() -> int:
    """Returns the bytes that this machine has sent to itself, by the counter of the kernel."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def highest_memory(pod: Pod) -> int:
    """Returns the highest resident memory of a pod's process, in bytes. It has its own pages and those of its
    parent."""
    lines = Path(f"/proc/{pod.process.pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) << 10


def traffic(forker: Forker, base: str, frozen: int, trained: int) -> Rows:
    """Returns the traffic of an update and worker, by the kernel and by the job's own report, against the trained
    bytes."""
    del base
    rows: Rows = [("codec", "frozen MB", "expected MB", "kernel", "report")]
    workers = 2
    # The first parameters travel exactly, and belong to no update: two jobs differ in their updates only.
    few, many = 20, 80
    codecs = (("Exact", "Exact", 2.0), ("BFloat16", "BFloat16", 1.0), ("Int8", "BFloat16", 0.75))
    for gradients, parameters, share in codecs:
        for size in (0, min(frozen, 256 << 20)):
            sent = []
            for steps in (few, many):
                with job(forker, 2, workers, wire={"gradients": gradients, "parameters": parameters}) as running:
                    running.environment = {"FROZEN": str(size), "TRAINED": str(trained), "STEPS": str(steps)}
                    before = sent_on_loopback()
                    running.start_all()
                    assert all(pod.wait() == 0 for pod in running.pods), running.logs()
                    sent.append(sent_on_loopback() - before)
                    report = running.pods[0].final_message()["traffic"]["carried"]
            kernel = (sent[1] - sent[0]) / workers / (many - few)
            expected = share * trained
            ratios = (f"{kernel / expected:.3f}", f"{report / expected:.3f}")
            rows.append((f"{gradients}, {parameters}", str(size >> 20), f"{expected / 1e6:.2f}", *ratios))
    return rows


def memory(forker: Forker, base: str, frozen: int, trained: int) -> Rows:
    """Returns the highest memory of a server and a worker, with and without the frozen part."""
    found: dict[str, dict[int, int]] = {"server": {}, "worker": {}}
    for size in (0, frozen):
        with job(forker, 1, 1) as running:
            running.environment = {"FROZEN": str(size), "TRAINED": str(trained), "STEPS": "100000"}
            if size:
                running.environment["BASE"] = base
            running.start_all()
            running.wait_for(running.pods[0], "step ")
            time.sleep(2)  # a few updates more
            for pod, name in zip(running.pods, found, strict=True):
                found[name][size] = highest_memory(pod)
    rows: Rows = [("process", "without MB", "with MB", "difference of the frozen bytes")]
    for name, most in found.items():
        share = (most[frozen] - most[0]) / frozen
        rows.append((name, f"{most[0] / 1e6:.0f}", f"{most[frozen] / 1e6:.0f}", f"{share:.3f}"))
    return rows


def update(forker: Forker, base: str, frozen: int, trained: int) -> Rows:
    """Returns the time of an update with the frozen part and of a model of the trained size alone, in turns."""
    times: dict[int, list[float]] = {0: [], frozen: []}
    steps = 150
    for _ in range(3):
        for size, seconds in times.items():
            with job(forker, 1, 2) as running:
                running.environment = {"FROZEN": str(size), "TRAINED": str(trained), "STEPS": str(steps)}
                if size:
                    running.environment["BASE"] = base
                running.start_all()
                assert all(pod.wait() == 0 for pod in running.pods), running.logs()
                seconds.append(1 / running.pods[0].final_message()["updatesPerSecond"])
    alone, beside = (1e3 * statistics.median(seconds) for seconds in times.values())
    return [
        ("update of 2 workers", "ms"),
        ("trained part alone", f"{alone:.2f}"),
        ("with the frozen part", f"{beside:.2f}"),
        ("ratio", f"{beside / alone:.2f}"),
    ]


def read(base: str) -> float:
    """Returns the seconds to read the base by the library of the format, into arrays of JAX."""
    import jax
    import safetensors.numpy

    began = time.perf_counter()
    jax.block_until_ready([jax.device_put(array) for array in safetensors.numpy.load_file(base).values()])
    return time.perf_counter() - began


def replacement(forker: Forker, base: str, frozen: int, trained: int) -> Rows:
    """Returns the time from the start of a replacement to its first step, with and without a base to read."""
    times: dict[int, list[float]] = {0: [], frozen: []}
    for size, seconds in times.items():
        with job(forker, 1, 1) as running:
            running.environment = {"FROZEN": str(size), "TRAINED": str(trained), "STEPS": "100000", "HOLD": "0.05"}
            if size:
                running.environment["BASE"] = base
            server, worker = running.server(0), running.worker(0)
            running.wait_for(server, "step ")
            for number in range(1, 4):
                worker.process.kill()
                known, began = len(server.output()), time.perf_counter()
                worker = running.worker(0, number)
                running.wait_for(server, "step ", known)
                seconds.append(time.perf_counter() - began)
    alone, whole = (statistics.median(seconds) for seconds in times.values())
    plain = statistics.median(read(base) for _ in range(3))
    return [
        ("replacement of a worker", "seconds"),
        ("first update without a base", f"{alone:.2f}"),
        ("first update with the base", f"{whole:.2f}"),
        ("difference", f"{whole - alone:.2f}"),
        ("reading the file by its library into arrays", f"{plain:.2f}"),
        ("difference of that", f"{(whole - alone) / plain:.2f}"),
    ]


PARTS: Final[dict[str, Callable[[Forker, str, int, int], Rows]]] = {
    "traffic": traffic,
    "memory": memory,
    "update": update,
    "replacement": replacement,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frozen-mb", type=int, default=1024)
    parser.add_argument("--trained-mb", type=int, default=8)
    parser.add_argument("--only", nargs="*", choices=tuple(PARTS), default=tuple(PARTS))
    options = parser.parse_args()
    frozen, trained = options.frozen_mb << 20, options.trained_mb << 20
    import safetensors.numpy

    with tempfile.TemporaryDirectory(prefix="backstay-base-") as folder:
        base = str(Path(folder) / "base.safetensors")
        pieces = range(frozen // (64 << 20))
        safetensors.numpy.save_file({f"base.{n:03}": np.zeros(16 << 20, np.float32) for n in pieces}, base)
        forker = Forker({**os.environ, **allocator_environment(), "JAX_PLATFORMS": "cpu"})
        try:
            for name in options.only:
                print(table(PARTS[name](forker, base, frozen, trained)), flush=True)
                print(flush=True)
        finally:
            forker.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
