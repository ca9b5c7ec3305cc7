"""Push + update + pull of 64 MiB float32 as a share of the one-way rate of a raw TCP socket, in the same run.

    python bench/wire.py [--rounds 15] [--gigabits 1] [--tensorflow PYTHON]

The rate is the bytes of both directions, divided by the time. The table shows the median of rounds that are measured
in turns, because the machine may do other work. With codecs, the bytes are those on the wire. `of exact` is the time as
a share of the time with exact codecs and as many workers. `jax.distributed` is what a JAX user would use instead: data
parallelism of 2 processes, whose gradients XLA adds with Gloo. `of gloo` is the time as a share of its time.

With `--tensorflow`, the table also has a parameter server of TensorFlow with one worker, and with two workers and
`SyncReplicasOptimizer` (bench/_tensorflow.py). The value is the interpreter of an environment that has TensorFlow.

With `--gigabits`, the kernel limits the link of the servers in each direction (bench/_link.py, needs root). `of exact`
should then be the ratio of the bytes. Gloo, TensorFlow and the raw socket are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from functools import partial
from itertools import chain
from typing import Any

import _link
from _common import (
    RAW_BYTES,
    BenchProcess,
    BenchServer,
    BenchWorker,
    RawClient,
    RawServer,
    commands,
    float_tree,
    free_address,
    median,
    processes,
    reply,
    table,
)

CASES = ("sgd", "adam", "bfloat16", "int8", "int4", "sgd2", "bfloat16x2")
TWO_WORKERS = ("sgd2", "bfloat16x2")
TENSORFLOW = {"sgd": "tensorflow", "sgd2": "tensorflow2"}
NAMES = {
    "sgd": "SGD, 1 worker",
    "adam": "Adam, 1 worker",
    "sgd2": "SGD, 2 workers, Sync",
    "bfloat16": "SGD, BFloat16 both ways",
    "int8": "SGD, Int8 and BFloat16",
    "int4": "SGD, Int4 and BFloat16",
    "bfloat16x2": "SGD, 2 workers, BFloat16 both ways",
}
GOALS = {"sgd": "0.95", "adam": "0.85", "sgd2": "1.20"}
ARRAYS, ELEMENTS = 4, (16 << 20) // 4
HALF = ("BFloat16", "BFloat16")
WIRES = {"bfloat16": HALF, "int8": ("Int8", "BFloat16"), "int4": ("Int4", "BFloat16"), "bfloat16x2": HALF}
OF_EXACT = {"bfloat16": "0.60", "int8": "0.50"}
OF_GLOO = {"sgd2": "0.60", "bfloat16x2": ""}


def wire_of(case: str) -> Any:
    import backstay

    gradients: Any
    parameters: Any
    gradients, parameters = WIRES.get(case, ("Exact", "Exact"))
    return backstay.Wire(gradients=gradients, parameters=parameters)


def optimizer(case: str) -> Any:
    import optax

    return optax.adam(1e-3) if case == "adam" else optax.sgd(1e-3)


def server() -> None:
    params = float_tree(ARRAYS, ELEMENTS)
    raw = RawServer()
    servers = {
        case: BenchServer(params, optimizer(case), 2 if case in TWO_WORKERS else 1, wire_of(case)) for case in CASES
    }
    reply(raw=raw.port, ports={case: s.server.port for case, s in servers.items()})
    for _ in commands():
        pass


def worker(rank: int) -> None:
    params = float_tree(ARRAYS, ELEMENTS)
    raw: RawClient | None = None
    workers: dict[str, BenchWorker] = {}
    for command in commands():
        if command["do"] == "connect":
            raw = RawClient(command["raw"])
            cases = CASES if rank == 0 else TWO_WORKERS
            workers = {
                case: BenchWorker(params, optimizer(case), command["ports"][case], rank, wire_of(case))
                for case in cases
            }
            reply(nbytes={case: worker.nbytes for case, worker in workers.items()})
        elif command["do"] == "raw":
            assert raw is not None
            reply(seconds=[raw.seconds() for _ in range(command["steps"])])
        else:
            reply(seconds=workers[command["do"]].seconds(command["steps"]))


def gloo(rank: int, coordinator: str) -> None:
    """One of two processes of data parallelism in JAX, with the mean of both gradients by Gloo, and SGD."""
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Gloo writes to the standard output
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(coordinator, num_processes=2, process_id=rank)
    mesh = Mesh(jax.devices(), "rank")
    everywhere, apart = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rank"))
    params = {name: jax.device_put(leaf, everywhere) for name, leaf in float_tree(ARRAYS, ELEMENTS).items()}
    gradients = {
        name: jax.make_array_from_process_local_data(apart, jnp.full((1, *leaf.shape), 1e-3, leaf.dtype))
        for name, leaf in params.items()
    }

    @partial(jax.jit, donate_argnums=0, out_shardings=everywhere)
    def step(params: Any, gradients: Any) -> Any:
        return jax.tree.map(lambda leaf, each: leaf - 1e-3 * each.mean(axis=0), params, gradients)

    params = jax.block_until_ready(step(params, gradients))
    reply(ready=True)
    for command in commands():
        seconds = []
        for _ in range(command["steps"]):
            begin = time.perf_counter()
            params = jax.block_until_ready(step(params, gradients))
            seconds.append(time.perf_counter() - begin)
        reply(seconds=seconds)


def started_gloo(running: list[BenchProcess]) -> list[BenchProcess]:
    """Returns the two processes of `gloo`, started."""
    coordinator = free_address()
    both = [BenchProcess("wire.py", "gloo", "--rank", str(rank), "--coordinator", coordinator) for rank in range(2)]
    running.extend(both)
    for process in both:
        process.receive()
    return both


def started_tensorflow(running: list[BenchProcess], python: str, workers: int) -> list[BenchProcess]:
    """Returns the workers of a parameter server of TensorFlow, which runs beside them."""
    cluster = {"ps": [free_address()], "worker": [free_address() for _ in range(workers)]}
    size = ("--cluster", json.dumps(cluster), "--arrays", str(ARRAYS), "--elements", str(ELEMENTS))
    running.append(BenchProcess("_tensorflow.py", "ps", *size, python=python))
    started = [
        BenchProcess("_tensorflow.py", "worker", "--rank", str(rank), *size, python=python) for rank in range(workers)
    ]
    running.extend(started)
    for process in started:
        process.receive()
    return started


def measure(rounds: int, steps: int, limited: bool, tensorflow: str | None) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds of one step, and the bytes of a step of one worker.

    Args:
        rounds: how often each case is measured.
        steps: how many steps of a case follow each other in a round.
        limited: whether the link of the servers is slow: our own cases only.
        tensorflow: the interpreter of an environment that has TensorFlow.

    Returns:
        The seconds by case, and of what is measured beside them: ``raw``, ``gloo``, and the names in `TENSORFLOW`; the
        bytes by case.
    """
    times: dict[str, list[float]] = defaultdict(list)
    with processes() as running:
        running.append(server_process := BenchProcess("wire.py", "server"))
        workers = [BenchProcess("wire.py", "worker", "--rank", str(rank)) for rank in range(2)]
        running.extend(workers)
        ports = server_process.receive()
        for process in workers:
            process.send(do="connect", **ports)
        nbytes = [process.receive()["nbytes"] for process in workers]
        asked = {case: workers if case in TWO_WORKERS else workers[:1] for case in CASES}
        beside: dict[str, list[str]] = {case: [] for case in CASES}
        if not limited:
            asked |= {"raw": workers[:1], "gloo": started_gloo(running)}
            beside = {case: ["gloo" if case in TWO_WORKERS else "raw"] for case in CASES}
        if tensorflow and not limited:
            for count, (case, name) in enumerate(TENSORFLOW.items(), 1):
                asked[name] = started_tensorflow(running, tensorflow, count)
                beside[case].append(name)
        for turn in range(rounds + 1):
            for name in chain.from_iterable((*beside[case], case) for case in CASES):
                for process in asked[name]:
                    process.send(do=name, steps=steps)
                answers = [process.receive()["seconds"] for process in asked[name]]
                if turn:  # the first turn warms up
                    times[name].append(max(sum(answer) / len(answer) for answer in answers))
    return {name: median(values) for name, values in times.items()}, nbytes[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a case in each round")
    parser.add_argument("--gigabits", type=float, help="gigabits a second on the servers' link; default: no limit")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="the Python of an environment that has TensorFlow")
    parser.add_argument("--role", choices=("server", "worker", "gloo"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server()
    if arguments.role == "worker":
        return worker(arguments.rank)
    if arguments.role == "gloo":
        return gloo(arguments.rank, arguments.coordinator)
    if arguments.gigabits is not None:
        _link.enter(arguments.gigabits)
    seconds, nbytes = measure(arguments.rounds, arguments.steps, arguments.gigabits is not None, arguments.tensorflow)
    columns = [
        "64 MiB float32",
        "ms",
        "MB",
        "GB/s",
        "of raw",
        "goal",
        "of exact",
        "goal",
        "of bytes",
        "of gloo",
        "goal",
    ]
    rows = [(*columns, "of tensorflow") if arguments.tensorflow else tuple(columns)]
    size, raw = RAW_BYTES / 1e6, seconds.get("raw", 0.0)
    if raw:
        rows.append(("raw TCP socket, one way", f"{raw * 1e3:.1f}", f"{size:.1f}", f"{size / raw / 1e3:.2f}", "1.00"))
        rows.append(("jax.distributed, 2 processes", f"{seconds['gloo'] * 1e3:.1f}"))
    for case, name in TENSORFLOW.items():
        if name in seconds:
            rows.append((f"TensorFlow's parameter server, {NAMES[case]}", f"{seconds[name] * 1e3:.1f}"))
    for case in CASES:
        workers, exact = (2, "sgd2") if case in TWO_WORKERS else (1, "sgd")
        sent = workers * nbytes[case] / 1e6
        rate, of_exact, of_bytes = (
            sent / seconds[case] / 1e3,
            seconds[case] / seconds[exact],
            nbytes[case] / nbytes[exact],
        )
        rows.append(
            (
                NAMES[case],
                f"{seconds[case] * 1e3:.1f}",
                f"{sent:.1f}",
                f"{rate:.2f}",
                f"{rate * raw / size * 1e3:.2f}" if raw else "",
                GOALS.get(case, "") if raw else "",
                f"{of_exact:.2f}" if case in WIRES else "",
                OF_EXACT.get(case, "") if raw else "",
                f"{of_exact / of_bytes:.2f}" if case in WIRES else "",
                f"{seconds[case] / seconds['gloo']:.2f}" if raw and workers == 2 else "",
                OF_GLOO.get(case, "") if raw else "",
                *(f"{seconds[case] / seconds[name]:.2f}" for name in (TENSORFLOW.get(case, ""),) if name in seconds),
            )
        )
    print(table([(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]))
    return None


if __name__ == "__main__":
    sys.exit(main())
