"""The empty step: a few parameters, 1 server, 1 worker; what is left is the runtime's own time.

python bench/step.py [--steps 2000]
"""

from __future__ import annotations

import argparse
import sys

from _common import Process, Server, Worker, commands, float_tree, processes, reply, table


def server() -> None:
    import optax

    one = Server(float_tree(3, 10), optax.sgd(1e-3), 1)
    reply(port=one.server.port)
    for _ in commands():
        pass


def worker() -> None:
    import optax

    for command in commands():
        one = Worker(float_tree(3, 10), optax.sgd(1e-3), command["port"], 0)
        one.seconds(200)
        reply(seconds=one.seconds(command["steps"]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--role", choices=("server", "worker"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server()
    if arguments.role == "worker":
        return worker()
    with processes() as running:
        running.append(server_process := Process("step.py", "server"))
        running.append(worker_process := Process("step.py", "worker"))
        seconds = sorted(worker_process.ask(port=server_process.receive()["port"], steps=arguments.steps)["seconds"])
    quantiles = [seconds[int(q * (len(seconds) - 1))] * 1e3 for q in (0.5, 0.9, 0.99)]
    rows = [("empty step", "median ms", "90 %", "99 %", "goal")]
    rows.append(("1 server, 1 worker", *(f"{q:.2f}" for q in quantiles), "1 ms"))
    print(table(rows))
    return None


if __name__ == "__main__":
    sys.exit(main())
