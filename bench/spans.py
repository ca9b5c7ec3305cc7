"""Measures the cost of a step's spans without instrumentation, with spans that are not kept, and with spans that are
kept.

A worker makes empty steps with a real server, with all spans of a job's step. The worker records the spans of both
pods, so their whole cost is in the time of the step. The states take turns, in blocks of steps. Then the benchmark
measures the processor time that a worker needs every 2 s for the message with its newest spans.

    python bench/spans.py [--blocks 300] [--steps 60]
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import BenchProcess, BenchServer, BenchWorker, commands, float_tree, median, processes, reply, table

STATES = ("none", "off", "on")
STEP = 10e-3
"""Seconds of the step that the cost is compared with."""

PERIOD = 2.0
"""Seconds between two heartbeats."""

SPANS_OF_WORKER = 8
ALONE = 200
"""Steps without an exchange in a block."""


def server() -> None:
    import optax

    from backstay import _instrument

    one = BenchServer(float_tree(3, 10), optax.sgd(1e-3), 1)
    _instrument.keep(0)
    reply(port=one.server.port)
    for _ in commands():
        pass


def traced(step: Callable[[], None], number: int) -> None:
    """A step with the points of a job's worker and of the server of shard 0."""
    from jax.profiler import StepTraceAnnotation

    from backstay import _instrument

    with _instrument.span("batch_wait", number):
        pass
    with _instrument.span("compute", number), StepTraceAnnotation("train", step_num=number):
        pass
    with _instrument.span("exchange", number):
        at = time.monotonic()
        step()
        ended = time.monotonic()
    flow = f"1.{number}.0.1.{number}"
    _instrument.record("push", at, ended, number, flow=flow)
    _instrument.record("update_wait", at, ended, number, outcome="applied", flow=flow)
    _instrument.record("pull", at, ended, number, version=number)
    _instrument.record("receive", at, ended, number, rank=0, complete=True, flow=flow)
    for point in ("quorum_wait", "apply"):
        _instrument.record(point, at, ended, number)
    _instrument.record("blame", at, ended, number, rank=0, part="compute")


def switch(state: str, of_module: dict[str, Callable[..., Any]]) -> None:
    """Change the instrumentation of this process.

    Args:
        of_module: `_instrument`'s own functions.
    """
    from backstay import _instrument

    _instrument.keep(_instrument.CAPACITY if state == "on" else 0)
    if state == "none":
        nothing = contextlib.nullcontext()
        _instrument.span = lambda *_, **__: nothing
        _instrument.record = lambda *_, **__: None
    else:
        _instrument.span, _instrument.record = of_module["span"], of_module["record"]


def packing(spans: int) -> float:
    """Processor seconds for one message with this number of spans."""
    from backstay import _instrument
    from backstay._transport import Outbox
    from backstay_rpc.control_pb2 import Peer

    _instrument.keep(_instrument.CAPACITY)
    outbox, times = Outbox(Peer(role="worker")), []
    for _ in range(20):
        for number in range(spans // 2):
            _instrument.record("compute", 1.0 * number, 2.0 * number, number)
            _instrument.record("push", 1.0 * number, 2.0 * number, number, flow=f"1.{number}.0.1.{number}")
        began = time.thread_time()
        message = outbox.take(1)
        assert message is not None
        message.SerializeToString()
        times.append(time.thread_time() - began)
    return median(times)


def worker() -> None:
    import optax

    from backstay import _instrument

    of_module: dict[str, Callable[..., Any]] = {"span": _instrument.span, "record": _instrument.record}
    number = 0
    for command in commands():
        if "spans" in command:
            reply(seconds=packing(command["spans"]))
            continue
        if number == 0:
            one = BenchWorker(float_tree(3, 10), optax.sgd(1e-3), command["port"], 0)
            one.seconds(500)
        switch(command["state"], of_module)
        times = []
        for _ in range(command["steps"]):
            number += 1
            began = time.perf_counter()
            traced(one.step, number)
            times.append(time.perf_counter() - began)
        began = time.thread_time()
        for _ in range(ALONE):
            traced(lambda: None, number)
        reply(seconds=times, alone=(time.thread_time() - began) / ALONE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=300)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--role", choices=("server", "worker"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role is not None:
        return server() if arguments.role == "server" else worker()
    times: dict[str, list[float]] = {state: [] for state in STATES}
    alone: dict[str, list[float]] = {state: [] for state in STATES}
    spans = round(PERIOD / STEP) * SPANS_OF_WORKER
    with processes() as running:
        running.append(server_process := BenchProcess("spans.py", "server"))
        running.append(worker_process := BenchProcess("spans.py", "worker"))
        port = server_process.receive()["port"]
        for _ in range(arguments.blocks):
            for state in STATES:
                found = worker_process.ask(port=port, state=state, steps=arguments.steps)
                times[state].append(median(found["seconds"]))
                alone[state].append(found["alone"])
        packed = worker_process.ask(spans=spans)["seconds"]
    # Of neighbouring blocks: the machine is as busy in all three.
    more = {s: median([b - a for a, b in zip(times["none"], times[s], strict=True)]) for s in STATES}
    spent = {s: median(alone[s]) - median(alone["none"]) for s in STATES}
    names = {"none": "no instrumentation", "off": "spec.trace.megabytes: 0", "on": "the timeline is kept"}
    share = f"of {STEP * 1e3:.0f} ms"
    rows = [("empty step", "median µs", "more, µs", "processor for spans, µs", share)]
    rows += [
        (
            names[state],
            f"{median(times[state]) * 1e6:.0f}",
            f"{more[state] * 1e6:.1f}",
            f"{spent[state] * 1e6:.1f}",
            f"{100 * spent[state] / STEP:.2f} %",
        )
        for state in STATES
    ]
    print(table(rows))
    print(f"the message of {spans} spans: {packed * 1e3:.1f} ms every {PERIOD:.0f} s, {100 * packed / PERIOD:.2f} %")
    cost = {state: spent[state] / STEP for state in STATES}
    print(f"off: {100 * cost['off']:.2f} %; on: {100 * (cost['on'] + packed / PERIOD):.2f} % (goal: under 1 %)")
    return None


if __name__ == "__main__":
    sys.exit(main())
