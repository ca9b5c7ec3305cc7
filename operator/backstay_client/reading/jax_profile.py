"""Joins a timeline with the trace that `jax.profiler` made of one worker.

A worker annotates each computation for the profiler (`jax.profiler.StepTraceAnnotation`), inside its own span of the
same step. Each step that both have therefore bounds the offset of the two clocks from both sides.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from backstay_client.errors import BadInput
from backstay_client.reading.records import unpacked
from backstay_client.reading.timeline import JobTimeline, PodClock, TimelinePod, in_order
from backstay_rpc.spans import PodSpan
from backstay_spec import contract

__all__ = ["joined", "read_profile"]

_ANNOTATION: Final = "train"
_LATEST: Final = 1e15
"""The unit is microseconds, because no clock of a profiler shows more."""
_TOLERATED: Final = 0.001
"""Seconds by which the bounds of two steps may contradict each other: the profiler's clock may drift."""


def read_profile(place: Path) -> list[dict[str, Any]]:
    """Returns the events of a Chrome trace that `jax.profiler` has written.

    Args:
        place: the file, such as ``host.trace.json.gz``, or the folder that was given to the profiler: the newest file
            in it is read.

    Returns:
        Slices (``X``), which have the times `ts` and `dur`, and names (``M``). Others are left out.

    Raises:
        BadInput: the file does not exist, or cannot be read.
    """
    found = [place]
    if place.is_dir():
        found = sorted(place.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        if not found:
            raise BadInput(f"--jax-profile: {place} has no *.trace.json.gz, which jax.profiler.stop_trace writes")
    try:
        text = unpacked(found[-1].read_bytes())
        events = json.loads(text, parse_float=_finite, parse_constant=_finite)["traceEvents"]
        return [event for event in events if isinstance(event, dict) and _is_valid(event)]
    except (BadInput, OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise BadInput(f"--jax-profile: {found[-1]} is not a trace of jax.profiler: {error!r}") from None


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _is_valid(event: Mapping[str, Any]) -> bool:
    arguments = event.get("args", {})
    known = isinstance(event.get("pid"), (int, str)) and isinstance(event.get("tid", 0), (int, str))
    if not known or not isinstance(arguments, dict):
        return False
    if event.get("ph") == "M":
        return "name" in arguments
    began, lasted = event.get("ts"), event.get("dur")
    if event.get("ph") != "X" or not isinstance(began, (int, float)) or not isinstance(lasted, (int, float)):
        return False
    return -_LATEST < began < _LATEST and 0 <= lasted < _LATEST


def joined(job: JobTimeline, events: Sequence[Mapping[str, Any]], rank: int) -> tuple[JobTimeline, float]:
    """Returns the job with the profile of the worker `rank`, on its clock; and the largest error of that, in seconds.

    Args:
        events: the events that `read_profile` returned.

    Raises:
        BadInput: the two have no step in common.
    """
    steps = dict(_annotated(events))
    pods = [pod for pod in job.pods if (pod.role, pod.index) == (contract.ROLE_WORKER, rank)]
    fits = [(clock, pod) for pod in pods if (clock := _aligned(pod, steps)) is not None]
    if not fits:
        ranks = sorted({pod.index for pod in job.pods if pod.role == contract.ROLE_WORKER})
        span = f"the steps {min(steps)} to {max(steps)}" if steps else "no step"
        raise BadInput(
            f"--jax-profile: the profile has {span}, and the timeline has none of them for worker {rank}. "
            f"--rank is one of {', '.join(map(str, ranks)) or 'no worker'}"
        )
    own, worker = max(fits, key=lambda fit: fit[1].incarnation)
    clock = own.after(worker.clock)
    added = [
        TimelinePod("jax", rank, worker.incarnation, "", spans, clock=clock, title=f"{worker.shown}: JAX {name}")
        for name, spans in _processes(events)
    ]
    at = job.pods.index(worker) + 1
    return replace(job, pods=(*job.pods[:at], *added, *job.pods[at:])), own.error or 0.0


def _annotated(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[float, float]]]:
    """Yields when each annotated step began and ended, in seconds of the profile."""
    for event in events:
        step = str(event.get("args", {}).get("step_num"))
        if event.get("name") == _ANNOTATION and event["ph"] == "X" and step.isdecimal() and len(step) < 19:
            began = event["ts"] / 1e6
            yield int(step), (began, began + event["dur"] / 1e6)


def _aligned(worker: TimelinePod, steps: Mapping[int, tuple[float, float]]) -> PodClock | None:
    """Returns the relation of the profile's clock to the worker's, or None if no step fits."""
    own = {span.step: span for span in worker.spans if span.point in ("compute", "compile") and span.step in steps}
    if not own:
        return None
    low = max(span.began / 1e9 - steps[step][0] for step, span in own.items() if step is not None)
    high = min(span.ended / 1e9 - steps[step][1] for step, span in own.items() if step is not None)
    return PodClock((low + high) / 2, abs(high - low) / 2) if high - low > -_TOLERATED else None


def _processes(events: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[PodSpan]]]:
    """Yields the spans of each process of a profile, with its name."""
    names: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    found: dict[Any, list[PodSpan]] = defaultdict(list)
    for event in events:
        if event["ph"] == "M" and event.get("name") == "process_name":
            names[event["pid"]] = str(event["args"]["name"])
        elif event["ph"] == "M" and event.get("name") == "thread_name":
            threads[event["pid"], event.get("tid")] = str(event["args"]["name"])
    for event in events:
        if event["ph"] != "X":
            continue
        thread = threads.get((event["pid"], event.get("tid")), f"thread {event.get('tid')}")
        at = round(event["ts"] * 1000)
        span = PodSpan(str(event.get("name")), thread, at, at + round(event["dur"] * 1000), None, event.get("args", {}))
        found[event["pid"]].append(span)
    for process, spans in sorted(found.items(), key=lambda item: str(item[0])):
        yield names.get(process, f"process {process}"), in_order(spans)
