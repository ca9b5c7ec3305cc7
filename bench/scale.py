"""Measures memory, time of an update and fairness with many workers on one server, side by side.

    python bench/scale.py [--workers 8 32 128] [--updates 3] [--mib 64] [--backups 0]

One server process holds one shard of 64 MiB of float32 and its coordinator. The workers are simulated: threads with
real streams (one connection each) and one gradient that all share. The server is the one of a pod, with the real
coordinator. `all in memory` is the server as it is where memory for every worker is allowed (`held` above the number of
workers).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

from _common import TOKEN, BenchProcess, commands, float_tree, processes, reply, table

from backstay_rpc.credentials import Credentials

ARRAYS = 4
THREADS_OF_A_PROCESS = 32


def memory() -> dict[str, float]:
    """Returns the resident memory of this process in MiB, now and at most so far."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {"now": int(fields["VmRSS"].split()[0]) / 1024, "most": int(fields["VmHWM"].split()[0]) / 1024}


def partitioned(mib: int) -> tuple[Any, Any, Any]:
    import optax

    from backstay._update._partition import partition
    from backstay._update._rules import analyse
    from backstay._update._tree import describe

    params = float_tree(ARRAYS, (mib << 20) // 4 // ARRAYS)
    tree = describe(params)
    rule = analyse(optax.sgd(1e-3), tree)
    return params, rule, partition(tree, rule, 1)


class Loop:
    """The coordinator of one shard in the server's process."""

    def __init__(self, rules: Any, world: int) -> None:
        from backstay._coordination import Coordinator, CoordinatorState

        self._coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=world))
        self._lock = threading.RLock()
        self.sink: Any = None

    def start(self) -> None:
        from backstay._coordination import ServerPosition

        self._send(self._coordinator.start(0.0))
        self._send(self._coordinator.hello(0.0, ServerPosition(0, 1, 0)))

    def report(self, report: Any) -> None:
        with self._lock:
            self._send(self._coordinator.report(time.monotonic(), 0, report))

    def _send(self, decisions: list[Any]) -> None:
        from backstay._coordination import Finished, Send

        for decision in decisions:
            if isinstance(decision, Send):
                self.sink.deliver(decision.message)
            elif isinstance(decision, Finished) and decision.why:
                print(decision.why, file=sys.stderr)
                os._exit(1)


def server(world: int, mib: int, backups: int, held: int) -> None:
    from backstay._coordination import Rules
    from backstay._shard import Admission, ShardRuntime
    from backstay._transport._tensors._server import DataServer
    from backstay._update._codecs import ShardWire
    from backstay._update._engine import ShardEngine

    params, rule, layout = partitioned(mib)
    engine = ShardEngine(layout, 0, rule, params)
    del params
    engine.compile([world - backups])
    given: dict[str, Any] = {"held": held} if held else {}
    rules = Rules(mode="Sync", shards=1, steps=1 << 30, backups=backups, **given)
    loop = Loop(rules, world)
    wire = ShardWire.exactly(layout.shards[0].blocks)
    shard = ShardRuntime(wire, Admission(0, 1, layout.digest), loop, rules)
    loop.sink = shard
    shard.fence({f"worker-{rank}": 1 for rank in range(world)})  # as after their joins
    data = DataServer(shard, host="127.0.0.1", port=0, credentials=Credentials(TOKEN))
    shard.reset(1, engine, world)
    loop.start()
    Path("/proc/self/clear_refs").write_text("5")  # `VmHWM` begins again: compiling needs memory too
    reply(port=data.port, **memory())
    for _ in commands():
        reply(**memory(), cpu=time.process_time())


def workers(first: int, count: int, mib: int, port: int) -> None:
    """`count` ranks, each with its own connection and thread."""
    import numpy as np

    from backstay._transport._tensors._client import Push, connect
    from backstay._transport._tensors._memory import aligned_empty
    from backstay_rpc.control_pb2 import GradientId, GradientInfo, Hello, Peer

    _, _, layout = partitioned(mib)
    blocks = [np.full(block.size, 1e-3, block.dtype) for block in layout.shards[0].blocks]
    # The content of an answer does not matter here, so all ranks receive into the same memory.
    into = [[aligned_empty(block.nbytes) for block in blocks]]
    clients = {}
    versions = dict.fromkeys(range(first, first + count), 0)
    for rank in versions:
        hello = Hello(peer=Peer(role="worker", index=rank, incarnation=1), term=1, partition_digest=layout.digest)
        clients[rank] = connect(
            [f"127.0.0.1:{port}"], layout.shards, [hello], credentials=Credentials(TOKEN), mode="Sync"
        )
        versions[rank] = clients[rank].exchange_all(None, 0, into).version
    reply(ready=True)

    def step(rank: int, delay: float, out: dict[int, tuple[float, float]]) -> None:
        time.sleep(delay)
        begin = time.monotonic()
        gradient = GradientId(
            term=1, version=versions[rank], rank=rank, key_step=versions[rank], incarnation=1, attempt=versions[rank]
        )
        pulled = clients[rank].exchange_all(Push(gradient, [blocks], lambda: GradientInfo(finite=True)), 0, into)
        versions[rank] = pulled.version
        out[rank] = (time.monotonic() - begin, pulled.answered_at - begin)

    for command in commands():
        out: dict[int, tuple[float, float]] = {}
        slow = command["slow"]
        threads = [
            threading.Thread(target=step, args=(rank, command["delay"] if rank == slow else 0.0, out))
            for rank in versions
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if len(out) != count:
            raise RuntimeError(f"{count - len(out)} ranks failed")
        reply(whole=[own[0] for own in out.values()], waits=[own[1] for own in out.values()])


def measure(world: int, mib: int, updates: int, backups: int, held: int) -> dict[str, float]:
    """Returns memory and time of `updates` updates, after one warm-up update."""
    script = Path(__file__).name
    shape = ("--mib", str(mib))
    with processes() as running:
        started = BenchProcess(
            script, "server", "--world", str(world), "--backups", str(backups), "--held", str(held), *shape
        )
        running.append(started)
        first = started.receive()
        groups = []
        for at in range(0, world, THREADS_OF_A_PROCESS):
            count = min(THREADS_OF_A_PROCESS, world - at)
            group = BenchProcess(
                script, "worker", "--rank", str(at), "--count", str(count), "--port", str(first["port"]), *shape
            )
            running.append(group)
            groups.append(group)
        for group in groups:
            group.receive()
        times, spreads, cpu = [], [], 0.0
        for update in range(updates + 1):
            if update == 1:
                cpu = started.ask()["cpu"]
            begin = time.perf_counter()
            for group in groups:
                group.send(delay=0.0, slow=-1)
            answers = [group.receive() for group in groups]
            if update:
                times.append(time.perf_counter() - begin)
                waits = [wait for answer in answers for wait in answer["waits"]]
                spreads.append((max(waits) - min(waits)) / statistics.median(waits))
        last = started.ask()
    return {
        "before": first["now"],
        "most": last["most"],
        "seconds": statistics.median(times),
        "spread": statistics.median(spreads),
        "cpu": (last["cpu"] - cpu) / updates,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--mib", type=int, default=64, help="MiB of the shard")
    parser.add_argument("--backups", type=int, default=0)
    parser.add_argument("--held", type=int, default=0, help="`Rules.held`; 0: the default")
    parser.add_argument("--role", choices=("server", "worker"), help=argparse.SUPPRESS)
    for name in ("--world", "--rank", "--count", "--port"):
        parser.add_argument(name, type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "server":
        return server(given.world, given.mib, given.backups, given.held)
    if given.role == "worker":
        return workers(given.rank, given.count, given.mib, given.port)
    rows = [
        (
            "workers",
            "server, MiB",
            "of which before",
            "an update, s",
            "of one worker, ms",
            "server CPU, s",
            "spread of waits",
        )
    ]
    for world in given.workers:
        found = measure(world, given.mib, given.updates, given.backups, given.held)
        rows.append(
            (
                str(world),
                f"{found['most']:.0f}",
                f"{found['before']:.0f}",
                f"{found['seconds']:.2f}",
                f"{found['seconds'] / world * 1e3:.0f}",
                f"{found['cpu']:.2f}",
                f"{found['spread']:.0%}",
            )
        )
        print(table([rows[0], rows[-1]]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    return None


if __name__ == "__main__":
    main()
