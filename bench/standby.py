"""Measures the cost of a hot standby by push, update and pull with 4 workers and 1 server.

The benchmark measures with and without a standby, in turns.

    python bench/standby.py [--rounds 10] [--mib 64]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from typing import Any

from _common import (
    HOST,
    TOKEN,
    BenchProcess,
    BenchServer,
    BenchWorker,
    Quorum,
    commands,
    float_tree,
    median,
    processes,
    reply,
    table,
)

from backstay_rpc.credentials import Credentials

CASES = ("sgd", "sgd+standby", "adam", "adam+standby")
WORKERS = 4
ARRAYS = 4


def optimizer(case: str) -> Any:
    import optax

    return optax.adam(1e-3) if case.startswith("adam") else optax.sgd(1e-3)


def tree(mib: int) -> Any:
    return float_tree(ARRAYS, (mib << 20) // 4 // ARRAYS)


class TwoSteps(Quorum):
    """A minimal coordinator of a shard with a standby. It commits when the standby has the mean."""

    def __init__(self, quorum: int) -> None:
        super().__init__(quorum)
        self._commit: Any = None
        self._shard: Any = None

    def lead(self, shard: Any) -> None:
        self._shard, self.sink = shard, self

    def deliver(self, commit: Any) -> None:
        from backstay_rpc.control_pb2 import NormRequest

        self._commit = commit
        self._shard.deliver(
            NormRequest(
                term=commit.term,
                version=commit.version,
                contributions=commit.contributions,
                replicate=True,
                unclipped=True,
            )
        )

    def report(self, report: Any) -> None:
        from backstay_rpc.control_pb2 import Norm

        super().report(report)
        if isinstance(report, Norm):
            self._shard.deliver(self._commit)


class Replicated:
    """A shard with a standby, as in the pod of an active server."""

    def __init__(self, params: Any, rule_of: Any) -> None:
        from backstay._coordination import Rules
        from backstay._shard import Admission, ShardRuntime
        from backstay._shard._replication import Replication
        from backstay._transport._tensors._server import DataServer, StreamHandlers
        from backstay._update._codecs import ShardWire
        from backstay._update._engine import ShardEngine
        from backstay._update._partition import partition
        from backstay._update._rules import analyse
        from backstay._update._tree import describe

        described = describe(params)
        rule = analyse(rule_of, described)
        layout = partition(described, rule, 1)
        engine = ShardEngine(layout, 0, rule, params)
        engine.compile([1])
        coordination = TwoSteps(WORKERS)
        self.replication = Replication(
            layout.digest,
            incarnation=1,
            admitted=self._admit,
            standby_lost=lambda when, closed: None,
            coordinator=lambda state: True,
        )
        self.shard = ShardRuntime(
            ShardWire.exactly(layout.shards[0].blocks),
            Admission(0, 1, layout.digest),
            coordination,
            Rules("Sync", shards=1, steps=0),
            standbys=self.replication,
        )
        coordination.lead(self.shard)
        self.shard.fence({f"worker-{rank}": 1 for rank in range(WORKERS)})  # as after their joins
        self.server = DataServer(
            self.shard,
            host=HOST,
            port=0,
            credentials=Credentials(TOKEN),
            handlers=StreamHandlers(self.replication.serve),
        )
        self.shard.reset(1, engine, WORKERS)

    def _admit(self) -> None:
        self.shard.admit_replica()


def server(mib: int) -> None:
    params = tree(mib)
    servers: dict[str, Any] = {
        case: Replicated(params, optimizer(case))
        if "standby" in case
        else BenchServer(params, optimizer(case), WORKERS)
        for case in CASES
    }
    reply(ports={case: one.server.port for case, one in servers.items()})
    for _ in commands():
        reply(followed=all(one.replication.standby == 2 for case, one in servers.items() if "standby" in case))


def standby(mib: int) -> None:
    from backstay._shard._follower import Follower
    from backstay._transport._streams._tcp import ClientStream
    from backstay._update._partition import partition
    from backstay._update._rules import analyse
    from backstay._update._tree import describe
    from backstay_rpc.control_pb2 import Hello, Peer

    described = describe(tree(mib))
    for command in commands():
        for case, port in command["ports"].items():
            if "standby" in case:
                rule = analyse(optimizer(case), described)
                layout = partition(described, rule, 1)
                peer = Peer(role="parameter-server", incarnation=2)
                hello = Hello(peer=peer, expected_incarnation=1, term=1, partition_digest=layout.digest)
                stream = ClientStream(f"{HOST}:{port}", hello, Credentials(TOKEN))
                follower = Follower(layout, 0, rule)
                threading.Thread(target=follow, args=(follower, stream), daemon=True).start()
        reply()


def follow(follower: Any, stream: Any) -> None:
    from backstay.errors import PeerLost

    with contextlib.suppress(PeerLost):  # the end of the benchmark
        follower.follow(stream)


def worker(rank: int, mib: int) -> None:
    params = tree(mib)
    workers: dict[str, BenchWorker] = {}
    for command in commands():
        if command["do"] == "connect":
            workers = {
                case: BenchWorker(params, optimizer(case), port, rank) for case, port in command["ports"].items()
            }
            reply()
        else:
            reply(seconds=workers[command["do"]].seconds(command["steps"]))


def measure(rounds: int, steps: int, mib: int) -> dict[str, float]:
    """Median seconds of one step by case."""
    times: dict[str, list[float]] = {case: [] for case in CASES}
    size = ("--mib", str(mib))
    with processes() as running:
        running.append(server_process := BenchProcess("standby.py", "server", *size))
        running.append(standby_process := BenchProcess("standby.py", "standby", *size))
        workers = [BenchProcess("standby.py", "worker", "--rank", str(rank), *size) for rank in range(WORKERS)]
        running.extend(workers)
        ports = server_process.receive()["ports"]
        standby_process.ask(ports=ports)
        for process in workers:
            process.send(do="connect", ports=ports)
        for process in workers:
            process.receive()
        for turn in range(rounds + 1):
            for case in CASES:
                for process in workers:
                    process.send(do=case, steps=steps)
                answers = [process.receive()["seconds"] for process in workers]
                if turn:  # the first turn warms up, and sends the state to the standby
                    times[case].append(max(sum(answer) / len(answer) for answer in answers))
            if turn == 0 and not server_process.ask()["followed"]:
                raise RuntimeError("the standby does not follow: nothing would be measured")
    return {case: median(values) for case, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=3, help="steps of a case in each round")
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--role", choices=("server", "standby", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server(arguments.mib)
    if arguments.role == "standby":
        return standby(arguments.mib)
    if arguments.role == "worker":
        return worker(arguments.rank, arguments.mib)
    seconds = measure(arguments.rounds, arguments.steps, arguments.mib)
    rows = [(f"{arguments.mib} MiB float32, {WORKERS} workers", "ms without", "ms with", "rate lost", "goal")]
    for case in ("sgd", "adam"):
        alone, replicated = seconds[case], seconds[f"{case}+standby"]
        lost = 1 - alone / replicated
        rows.append((case.upper(), f"{alone * 1e3:.1f}", f"{replicated * 1e3:.1f}", f"{lost:.0%}", "at most 35 %"))
    print(table(rows))
    return None


if __name__ == "__main__":
    sys.exit(main())
