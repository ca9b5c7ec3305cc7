"""Updates a second of a job while thousands of slow callers without its token hold connections to one of its ports.

    python bench/strangers.py [--ports http control data] [--pods ps-0 worker-0] [--callers 5000] [--sources 1]

A caller sends the beginning of a request, and then one byte a second. It connects again when its connection is closed.
With `--sources 5000` each caller has its own address. `--eager` callers send whole requests without a pause.

One line for each attack shows the updates a second during the attack, and their share of those before it. It also shows
the longest time without an update, and the pods that the operator has replaced.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import resource
import struct
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from typing import Final

from _cluster import NAMESPACE, BenchCluster, BenchJob, BenchUpdate, cluster, gaps, row

from backstay_spec import contract

PORTS: Final = {
    "http": contract.PORT_METRICS,
    "control": contract.PORT_CONTROL,
    "data": contract.PORT_DATA,
}
HTTP2: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
BEGINNINGS: Final = {
    "http": b"GET /metrics HTTP/1.1\r\nx-slow: ",
    # The settings of HTTP/2, and the beginning of the headers of a call.
    "control": HTTP2 + bytes((0, 0, 200, 1, 4, 0, 0, 0, 1)),
    "data": struct.pack("<8sHI", b"backsty1", 1024, 100),
}
WHOLE: Final = {
    "http": b"GET /metrics HTTP/1.1\r\nhost: stranger\r\n\r\n",
    "control": HTTP2 + bytes((0, 0, 0, 1, 4, 0, 0, 0, 1)),
    "data": struct.pack("<8sHI", b"backsty1", 5, 0) + b"wrong",
}


async def caller(host: str, port: str, source: str, eager: bool) -> None:
    """One caller, until it is cancelled."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, PORTS[port], local_addr=(source, 0))
            try:
                if eager:
                    writer.write(WHOLE[port])
                    while await reader.read(1 << 16):
                        pass
                    continue
                writer.write(BEGINNINGS[port])
                while True:
                    with contextlib.suppress(TimeoutError):
                        if not await asyncio.wait_for(reader.read(1 << 16), 1.0):
                            break
                    writer.write(b"x")
            finally:
                writer.transport.abort()
        await asyncio.sleep(0.1)


async def attack(host: str, port: str, sources: Sequence[str], callers: int, eager: bool) -> None:
    tasks = [
        asyncio.create_task(caller(host, port, source, eager))
        for source in itertools.islice(itertools.cycle(sources), callers)
    ]
    await asyncio.gather(*tasks)


def attacker(host: str, port: str, callers: int, sources: int, eager: bool, begun: Event) -> None:
    """The process of the callers."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    names = ["127.0.0.1", *(f"127.255.{number >> 8}.{number & 255}" for number in range(1, sources))][:sources]
    begun.set()
    asyncio.run(attack(host, port, names, callers, eager))


async def address_of(on: BenchCluster, pod: str) -> str:
    """The address of a pod."""
    found = await on.api.request("GET", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}")
    return str(found["status"]["podIP"])


def rate(job: BenchJob, began: float, ended: float) -> float:
    """Updates a second in an interval."""
    return sum(began <= update.at < ended for update in job.updates()) / (ended - began)


async def measure(on: BenchCluster, job: BenchJob, slot: str, port: str, args: argparse.Namespace) -> None:
    """One attack, and its row."""
    before = set(job.processes())
    pod = job.newest(slot)
    if pod is None:
        raise SystemExit(f"no pod runs in {slot}")
    host = await address_of(on, pod)
    quiet = time.time()
    await asyncio.sleep(args.seconds)
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    process = context.Process(
        target=attacker, args=(host, port, args.callers, args.sources, args.eager, begun), daemon=True
    )
    process.start()
    await asyncio.to_thread(begun.wait)
    start = time.time()
    await asyncio.sleep(args.seconds)
    end = time.time()
    process.kill()
    process.join()
    await asyncio.sleep(3.0)
    await job.look()
    first, during = rate(job, quiet, start), rate(job, start, end)
    # The gap may last until now.
    longest = gaps([*job.updates(), BenchUpdate(end, 0, "")], start, end)
    lost = ", ".join(sorted(before - set(job.processes()))) or "no pod replaced"
    row(
        f"{port} of {slot}: {during:.1f} updates a second instead of {first:.1f}",
        f"{100 * during / first:.0f} %" if first else "no updates",
        f"longest gap {longest:.1f} s; {lost}",
    )


async def run(args: argparse.Namespace) -> None:
    """All attacks on one job."""
    async with cluster(args.keep) as on:
        job = BenchJob(
            on, "strangers", steps=100_000, workers=2, servers=2, standbys=args.standbys, pause=0.05, every_steps=100,
        )  # fmt: skip
        await job.submit()
        await job.wait("the first updates", lambda: len(job.updates()) > 20)
        for slot, port in itertools.product(args.pods, args.ports):
            if port == "http" or slot.startswith("ps"):
                await measure(on, job, slot, port, args)
        for entry in job.history:
            print(entry)
        await job.delete()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ports", nargs="+", choices=PORTS, default=list(PORTS))
    parser.add_argument("--pods", nargs="+", default=["ps-0", "worker-0"], metavar="SLOT")
    parser.add_argument("--callers", type=int, default=5000)
    parser.add_argument("--sources", type=int, default=1, help="addresses of the callers (default: 1)")
    parser.add_argument("--eager", action="store_true", help="whole requests, one after the other")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each interval (default: 20)")
    parser.add_argument("--standbys", type=int, default=0)
    parser.add_argument("--keep", help="a folder that is kept")
    args = parser.parse_args()
    print(f"{args.callers} callers from {args.sources} addresses", flush=True)
    asyncio.run(run(args))


if __name__ == "__main__":
    main()
