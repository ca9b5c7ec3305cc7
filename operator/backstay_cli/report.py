"""What is said when a job has ended: for people, or as one JSON object for programs."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backstay_cli.follow import JobView
from backstay_cli.view import number
from backstay_cli.words import count, on_one_line, plain, printable

_TAIL_LINES = 15
_TAIL_BYTES = 64_000
_LINE_LENGTH = 400  # a program may print megabytes without a line break


def summary(view: JobView, seconds: float) -> dict[str, Any]:
    """The object that ``--output json`` prints."""
    return {
        "job": view.name,
        "phase": view.phase,
        "step": view.step,
        "seconds": round(seconds, 3),
        "examplesPerSecond": _finite(view.examples_per_second),
        "loss": _finite(view.loss),
        "metrics": {name: _finite(value) for name, value in view.metrics.items()},
        "restarts": view.restarts,
        "disruptions": view.disruptions,
        "checkpoint": view.checkpoint,
    }


def as_json(view: JobView, seconds: float) -> str:
    """`summary` on one line."""
    return json.dumps(summary(view, seconds), allow_nan=False)


def shortened(place: str) -> str:
    """A path relative to the current folder when it lies in it; anything else as it is."""
    with contextlib.suppress(ValueError):
        return str(Path(place).relative_to(Path.cwd()))
    return place


def _finite(value: float | None) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not math.isfinite(value) else value


def lines(view: JobView, seconds: float, logs: Path) -> Iterator[str]:
    """What was seen, for people."""
    desired = {role: values.desired for role, values in view.roles.items()}
    shape = f"{count(desired.get('ParameterServer', 0), 'server')}, {count(desired.get('Worker', 0), 'worker')}"
    if view.step or view.phase == "Succeeded":
        when = f"after {number(view.step)} updates in {seconds:.1f} s"
    else:
        when = f"before its first update, after {seconds:.1f} s"
    yield f"{view.name} {view.phase.lower()} {when} ({shape})"
    if view.message and (view.phase != "Succeeded" or "AlreadyComplete" in view.message):
        for line in plain(view.message):
            yield f"  {line}"
    if view.loss is not None or view.examples_per_second is not None:
        yield f"  loss {number(view.loss)}, {number(view.examples_per_second, 3)} examples/s"
    for name, value in sorted(view.metrics.items()):
        yield f"  {name} {number(value)}"
    if view.evaluation_error:
        yield f"  the evaluation failed: {on_one_line(view.evaluation_error)}"
    if view.restarts or view.disruptions:
        yield f"  pods replaced: {view.restarts} after crashes, {view.disruptions} after disruptions"
    if view.checkpoint:
        place = shortened(view.checkpoint)
        yield f"  checkpoint {place}"
        yield f"    backstay.load({place.rpartition('/')[0] or '.'!r})  # the newest"
    yield f"  logs of every pod in {shortened(str(logs))}"
    if view.phase == "Failed":
        yield from _failures(view, logs)


def _failures(view: JobView, logs: Path) -> Iterator[str]:
    """How each pod ended; those that ended alike together, with what they printed last."""
    alike: dict[tuple[str, tuple[str, ...]], list[tuple[str, Path]]] = {}
    for pod in view.pods:
        meta, status = pod["metadata"], pod.get("status", {})
        for container in status.get("containerStatuses", []):
            ended = container.get("state", {}).get("terminated")
            if ended is None or ended.get("exitCode") == 0:
                continue
            log = logs / meta["namespace"] / meta["name"] / f"{container['name']}.log"
            how = f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
            alike.setdefault((how, tuple(tail(log))), []).append((meta["name"], log))
    for (how, said), ends in alike.items():
        first, log = ends[0]
        yield f"  {first} ended with {how}: {shortened(str(log))}"
        yield from said or ("    | (it printed nothing)",)
        if len(ends) > 1:
            yield f"    so did {', '.join(name for name, _ in ends[1:])}"


def tail(log: Path) -> Iterator[str]:
    """The last lines of a pod's log, whatever it printed."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            content = file.read()
    except OSError:
        return
    for line in content.decode(errors="backslashreplace").splitlines()[-_TAIL_LINES:]:
        text = printable(line)
        yield "    | " + (text if len(text) <= _LINE_LENGTH else "... " + text[-_LINE_LENGTH:])
