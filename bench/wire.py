"""Push + update + pull of 64 MiB float32 as a share of what a raw TCP socket does one way, in the same run.

    python bench/wire.py [--rounds 15]

Bytes both ways over time; the median of rounds taken in turns, because the machine may be busy with other things.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from _common import (
    RAW_BYTES,
    Process,
    RawClient,
    RawServer,
    Server,
    Worker,
    commands,
    float_tree,
    median,
    processes,
    reply,
    table,
)

CASES = ("sgd", "adam", "sgd2")
NAMES = {
    "sgd": "SGD, 1 worker",
    "adam": "Adam, 1 worker",
    "sgd2": "SGD, 2 workers, Sync",
}
GOALS = {"sgd": "0.50 (0.60 wished)", "adam": "0.40", "sgd2": "0.60"}
ARRAYS, ELEMENTS = 4, (16 << 20) // 4


def optimizer(case: str) -> Any:
    import optax

    return optax.adam(1e-3) if case == "adam" else optax.sgd(1e-3)


def server() -> None:
    params = float_tree(ARRAYS, ELEMENTS)
    raw = RawServer()
    servers = {case: Server(params, optimizer(case), 2 if case == "sgd2" else 1) for case in CASES}
    reply(raw=raw.port, ports={case: s.server.port for case, s in servers.items()})
    for _ in commands():
        pass


def worker(rank: int) -> None:
    params = float_tree(ARRAYS, ELEMENTS)
    raw: RawClient | None = None
    workers: dict[str, Worker] = {}
    for command in commands():
        if command["do"] == "connect":
            raw = RawClient(command["raw"])
            cases = CASES if rank == 0 else ("sgd2",)
            workers = {case: Worker(params, optimizer(case), command["ports"][case], rank) for case in cases}
            reply()
        elif command["do"] == "raw":
            assert raw is not None
            reply(seconds=[raw.seconds() for _ in range(command["steps"])])
        else:
            reply(seconds=workers[command["do"]].seconds(command["steps"]))


def measure(rounds: int, steps: int) -> dict[str, float]:
    """Median seconds of one step by case, and of the raw socket."""
    times: dict[str, list[float]] = {name: [] for name in ("raw", *CASES)}
    with processes() as running:
        running.append(server_process := Process("wire.py", "server"))
        workers = [Process("wire.py", "worker", "--rank", str(rank)) for rank in range(2)]
        running.extend(workers)
        ports = server_process.receive()
        for process in workers:
            process.send(do="connect", **ports)
        for process in workers:
            process.receive()
        for turn in range(rounds + 1):
            for case in CASES:
                for name in ("raw", case):
                    asked = workers if name == "sgd2" else workers[:1]
                    for process in asked:
                        process.send(do=name, steps=steps)
                    answers = [process.receive()["seconds"] for process in asked]
                    if turn:  # the first warms up
                        times[name].append(max(sum(answer) / len(answer) for answer in answers))
    return {name: median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2, help="steps of a case in each round")
    parser.add_argument("--role", choices=("server", "worker"), help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server()
    if arguments.role == "worker":
        return worker(arguments.rank)
    seconds = measure(arguments.rounds, arguments.steps)
    raw = RAW_BYTES / seconds["raw"] / 1e9
    rows = [("64 MiB float32", "ms", "GB/s", "of raw", "goal")]
    rows.append(("raw TCP socket, one way", f"{seconds['raw'] * 1e3:.1f}", f"{raw:.2f}", "1.00", ""))
    for case in CASES:
        nbytes = 2 * ARRAYS * ELEMENTS * 4 * (2 if case == "sgd2" else 1)
        rate = nbytes / seconds[case] / 1e9
        rows.append((NAMES[case], f"{seconds[case] * 1e3:.1f}", f"{rate:.2f}", f"{rate / raw:.2f}", GOALS[case]))
    print(table(rows))
    return None


if __name__ == "__main__":
    sys.exit(main())
