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

_TAIL_LINES = 15


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
    shape = f"{desired.get('ParameterServer', 0)} servers, {desired.get('Worker', 0)} workers"
    yield f"{view.name} {view.phase.lower()} after {number(view.step)} updates in {seconds:.1f} s ({shape})"
    if view.message and view.phase != "Succeeded":
        yield f"  {view.message}"
    if view.loss is not None or view.examples_per_second is not None:
        yield f"  loss {number(view.loss)}, {number(view.examples_per_second, 3)} examples/s"
    for name, value in sorted(view.metrics.items()):
        yield f"  {name} {number(value)}"
    if view.restarts or view.disruptions:
        yield f"  {view.restarts} pods replaced after crashes, {view.disruptions} after disruptions"
    if view.checkpoint:
        yield f"  checkpoint {view.checkpoint}"
        yield f"    python -c 'import backstay; print(backstay.load(\"{view.checkpoint}\").step)'"
    yield f"  logs of every pod in {shortened(str(logs))}"
    if view.phase == "Failed":
        yield from _failures(view, logs)


def _failures(view: JobView, logs: Path) -> Iterator[str]:
    for pod in view.pods:
        meta, status = pod["metadata"], pod.get("status", {})
        for container in status.get("containerStatuses", []):
            ended = container.get("state", {}).get("terminated")
            if ended is None or ended.get("exitCode") == 0:
                continue
            log = logs / meta["namespace"] / meta["name"] / f"{container['name']}.log"
            how = f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
            yield f"  {meta['name']} ended with {how}: {shortened(str(log))}"
            yield from tail(log)


def tail(log: Path) -> Iterator[str]:
    """The last lines of a pod's log, whatever it printed."""
    try:
        content = log.read_bytes()[-64_000:]
    except OSError:
        return
    for line in content.decode(errors="backslashreplace").splitlines()[-_TAIL_LINES:]:
        yield "    | " + "".join(c if c.isprintable() or c == "\t" else f"\\x{ord(c):02x}" for c in line)
