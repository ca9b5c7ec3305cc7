"""Fits the assumptions about steps to a timeline that `backstay trace` wrote, and states the error of the fit. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, pstdev
from typing import Any, Final

from ._assumptions import Assumptions, StepAssumptions

__all__ = ["FittedSteps", "fitted"]

_PAUSE: Final = 3.0
"""A step that takes this many times the median of its rank has a pause in it."""
_LEAST: Final = 5
"""Fewer steps of a rank than this do not show the speed of its machine."""
_SHORTEST: Final = 1e-9
_MOST: Final = 1e15
"""Microseconds, of which a timeline has less."""


@dataclass(frozen=True)
class FittedSteps:
    """The steps in a timeline, and how well the fitted distribution agrees with them.

    Attributes:
        assumed: the assumptions, with the fitted values.
        steps, ranks: how many steps and ranks were read.
        distance: the largest difference between the cumulative distributions of the measured and of the fitted times
            of computation, from 0 to 1 (Kolmogorov and Smirnov).
        mean_error: how far the mean of the fitted distribution is from the measured mean, as a share.
        seconds: the mean seconds of each part of a step in the timeline, for comparison.
        unknown: what the timeline cannot say, one sentence each.
    """

    assumed: Assumptions
    steps: int
    ranks: int
    distance: float
    mean_error: float
    seconds: Mapping[str, float]
    updates_per_second: float
    unknown: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Returns the fit for `--output json`."""
        return {
            "steps": self.steps,
            "ranks": self.ranks,
            "distance": self.distance,
            "meanError": self.mean_error,
            "partSeconds": dict(self.seconds),
            "updatesPerSecond": self.updates_per_second,
            "step": self.assumed.step.model_dump(by_alias=True),
            "unknown": list(self.unknown),
        }


@dataclass
class _Spans:
    compute: dict[str, list[tuple[float, float]]]
    parts: dict[str, list[float]]
    starts: list[float]
    compiles: list[float]
    versions: dict[int, float]


def fitted(trace: Any, assumed: Assumptions) -> FittedSteps:
    """Fit the distribution of steps.

    Args:
        trace: the JSON object of a Chrome trace.
        assumed: the assumptions for everything that the trace does not say.

    Raises:
        ValueError: the JSON object is not a trace that `backstay trace` wrote, or has too few steps.
    """
    spans = _read(trace)
    by_rank = {pod: [seconds for _, seconds in found] for pod, found in spans.compute.items() if len(found) >= _LEAST}
    if not by_rank:
        raise ValueError(
            f"the trace has no worker with at least {_LEAST} spans `compute`: write it with backstay trace"
        )
    medians = {pod: median(seconds) for pod, seconds in by_rank.items()}
    typical = median(medians.values())
    quiet, pauses, busy = [], [], 0.0
    for pod, seconds in by_rank.items():
        for each in seconds:
            busy += each
            # Pauses would widen the distribution of all steps, so they are counted apart.
            if each > _PAUSE * medians[pod]:
                pauses.append(each - medians[pod])
            else:
                quiet.append(math.log(each / medians[pod]))
    sigma = pstdev(quiet) if len(quiet) > 1 else 0.0
    machines = [math.log(each / typical) for each in medians.values()]
    data = spans.parts.get("batch_wait", [])
    found = {
        "seconds": typical / assumed.step.local_steps,
        "sigma": sigma * math.sqrt(assumed.step.local_steps),
        "machine_sigma": pstdev(machines) if len(machines) > 1 else 0.0,
        "data_seconds": (fmean(data) if data else 0.0) / assumed.step.local_steps,
        "pauses_per_hour": len(pauses) / busy * 3600,
        "pause_seconds": fmean(pauses) if pauses else assumed.step.pause_seconds,
    }
    step = StepAssumptions(**{**assumed.step.model_dump(), **found})
    measured = sorted(each for seconds in by_rank.values() for each in seconds if each <= _PAUSE * typical)
    spread = math.hypot(sigma, step.machine_sigma)
    made = typical * math.exp(spread * spread / 2) + step.pauses_per_hour / 3600 * typical * step.pause_seconds
    mean = busy / sum(len(seconds) for seconds in by_rank.values())
    return FittedSteps(
        assumed=assumed.model_copy(update={"step": step}),
        steps=sum(len(seconds) for seconds in by_rank.values()),
        ranks=len(by_rank),
        distance=_distance(measured, typical, spread),
        mean_error=made / mean - 1,
        seconds={point: fmean(found) for point, found in spans.parts.items() if found},
        updates_per_second=_pace(spans.versions),
        unknown=_unknown(spans, pauses),
    )


def _read(trace: Any) -> _Spans:
    events = trace.get("traceEvents", []) if isinstance(trace, Mapping) else []
    if not isinstance(events, list) or not events:
        raise ValueError("the trace has no traceEvents: it must be a file that backstay trace wrote")
    names: dict[Any, str] = {}
    found = _Spans({}, {}, [], [], {})
    compiled: set[str] = set()
    for event in events:
        arguments = event.get("args") if isinstance(event, Mapping) else None
        if not isinstance(arguments, Mapping) or not isinstance(pid := event.get("pid"), int | str):
            continue  # another program may have added it
        if event.get("ph") == "M" and event.get("name") == "process_name":
            names[pid] = str(arguments.get("name", "")).partition(" (")[0]
        lasted, began, point = _number(event.get("dur")), _number(event.get("ts")), arguments.get("point")
        if event.get("ph") != "X" or lasted is None or began is None or not isinstance(point, str):
            continue
        seconds, at, pod = lasted / 1e6, began / 1e6, names.get(pid, str(pid))
        step = arguments.get("step")
        if point == "apply" and isinstance(step, int) and _number(step) is not None:
            found.versions[step] = at + seconds
        if event.get("cat") != "worker":
            continue
        if point == "compile":
            found.compiles.append(seconds)
        elif point == "compute" and pod not in compiled:
            compiled.add(pod)  # the first step of a pod may compile
        elif point == "compute" and seconds > _SHORTEST:
            found.compute.setdefault(pod, []).append((at, seconds))
        if point in {"batch_wait", "compute", "push", "update_wait", "pull"}:
            found.parts.setdefault(point, []).append(seconds)
    return found


def _number(value: Any) -> float | None:
    """Returns a number that a trace can have, or None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST:
        return None
    return float(value)


def _distance(measured: Sequence[float], typical: float, sigma: float) -> float:
    if not measured or sigma == 0.0:
        return 0.0
    count, most = len(measured), 0.0
    for position, value in enumerate(measured):
        expected = 0.5 * (1 + math.erf(math.log(value / typical) / (sigma * math.sqrt(2))))
        most = max(most, abs(expected - position / count), abs(expected - (position + 1) / count))
    return most


def _pace(versions: Mapping[int, float]) -> float:
    if len(versions) < 2:
        return 0.0
    first, last = min(versions), max(versions)
    lasted = versions[last] - versions[first]
    return (last - first) / lasted if lasted > 0 else 0.0


def _unknown(spans: _Spans, pauses: Sequence[float]) -> tuple[str, ...]:
    found = [
        "The rates of failures and preemptions: a timeline shows the last minutes, and failures are rare.",
        "The size of the parameters, and the rates of the network without this job's traffic.",
        "Which part of a computation uses a processor that other pods need too.",
        "The prices of pods.",
    ]
    if not pauses:
        found.append("Rare pauses: the timeline has none.")
    if not spans.compiles:
        found.append("The time to start and to compile: no pod started in the timeline.")
    return tuple(found)
