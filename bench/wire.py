"""Push + update + pull of 64 MiB float32 as a share of the one-way rate of a raw TCP socket, in the same run.

    python bench/wire.py [--rounds 15]

The rate is the bytes of both directions, divided by the time. The table shows the median of rounds that are measured
in turns, because the machine may do other work. With codecs, the bytes are those on the wire. `of exact` is the time as
a share of the time of SGD with one worker.
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

CASES = ("sgd", "adam", "sgd2", "bfloat16", "int8", "int4")
NAMES = {
    "sgd": "SGD, 1 worker",
    "adam": "Adam, 1 worker",
    "sgd2": "SGD, 2 workers, Sync",
    "bfloat16": "SGD, BFloat16 both ways",
    "int8": "SGD, Int8 and BFloat16",
    "int4": "SGD, Int4 and BFloat16",
}
GOALS = {"sgd": "0.75", "adam": "0.65", "sgd2": "0.80"}
ARRAYS, ELEMENTS = 4, (16 << 20) // 4


WIRES = {"bfloat16": ("BFloat16", "BFloat16"), "int8": ("Int8", "BFloat16"), "int4": ("Int4", "BFloat16")}
OF_EXACT = {"bfloat16": "0.60", "int8": "0.50", "int4": ""}


def wire_of(case: str) -> Any:
    import backstay

    gradients, parameters = WIRES.get(case, ("Exact", "Exact"))
    return backstay.Wire(gradients=gradients, parameters=parameters)


def optimizer(case: str) -> Any:
    import optax

    return optax.adam(1e-3) if case == "adam" else optax.sgd(1e-3)


def server() -> None:
    params = float_tree(ARRAYS, ELEMENTS)
    raw = RawServer()
    servers = {case: Server(params, optimizer(case), 2 if case == "sgd2" else 1, wire_of(case)) for case in CASES}
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
            workers = {
                case: Worker(params, optimizer(case), command["ports"][case], rank, wire_of(case)) for case in cases
            }
            reply(nbytes={case: worker.nbytes for case, worker in workers.items()})
        elif command["do"] == "raw":
            assert raw is not None
            reply(seconds=[raw.seconds() for _ in range(command["steps"])])
        else:
            reply(seconds=workers[command["do"]].seconds(command["steps"]))


def measure(rounds: int, steps: int) -> tuple[dict[str, float], dict[str, int]]:
    """Median seconds of one step by case and of the raw socket, and the bytes of a step of one worker."""
    times: dict[str, list[float]] = {name: [] for name in ("raw", *CASES)}
    with processes() as running:
        running.append(server_process := Process("wire.py", "server"))
        workers = [Process("wire.py", "worker", "--rank", str(rank)) for rank in range(2)]
        running.extend(workers)
        ports = server_process.receive()
        for process in workers:
            process.send(do="connect", **ports)
        nbytes = [process.receive()["nbytes"] for process in workers]
        for turn in range(rounds + 1):
            for case in CASES:
                for name in ("raw", case):
                    asked = workers if name == "sgd2" else workers[:1]
                    for process in asked:
                        process.send(do=name, steps=steps)
                    answers = [process.receive()["seconds"] for process in asked]
                    if turn:  # the first turn warms up
                        times[name].append(max(sum(answer) / len(answer) for answer in answers))
    return {name: median(values) for name, values in times.items()}, nbytes[0]


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
    seconds, nbytes = measure(arguments.rounds, arguments.steps)
    raw = RAW_BYTES / seconds["raw"] / 1e9
    rows = [("64 MiB float32", "ms", "MB", "GB/s", "of raw", "goal", "of exact", "goal")]
    size = f"{RAW_BYTES / 1e6:.1f}"
    rows.append(("raw TCP socket, one way", f"{seconds['raw'] * 1e3:.1f}", size, f"{raw:.2f}", "1.00", "", "", ""))
    for case in CASES:
        sent = nbytes[case] * (2 if case == "sgd2" else 1)
        rate = sent / seconds[case] / 1e9
        of_exact = f"{seconds[case] / seconds['sgd']:.2f}" if case in WIRES else ""
        times = (f"{seconds[case] * 1e3:.1f}", f"{sent / 1e6:.1f}", f"{rate:.2f}", f"{rate / raw:.2f}")
        rows.append((NAMES[case], *times, GOALS.get(case, ""), of_exact, OF_EXACT.get(case, "")))
    print(table(rows))
    return None


if __name__ == "__main__":
    sys.exit(main())
