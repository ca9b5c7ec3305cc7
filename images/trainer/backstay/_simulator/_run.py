"""Runs simulations of a job, and sums up what they found. Pure."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from backstay_spec.goodput import goodput
from backstay_spec.manifests_pod import runtime_config
from backstay_spec.types import TrainingJob

from ._assumptions import Assumptions
from ._pods import BEGAN, FailureSource, SimulatedPods, SimulatedWorld, SpanLog

__all__ = ["SimulatedRun", "percentile", "simulate", "summary"]

_MOST_SPANS: Final = 500_000


@dataclass(frozen=True)
class SimulatedRun:
    """The result of one simulation.

    Attributes:
        seed: its seed.
        facts: numbers by name, such as ``updatesPerSecond``; see docs/simulator.md.
        worker_seconds: the seconds of workers by part, as in `status.workerSeconds`.
        counts: other counts by name.
        phase: ``Succeeded``, ``Failed``, or ``Running`` where the simulated time ended first.
        reason: why it failed; empty: it did not.
        events: how many events the simulation had.
        timeline: a serialized `Timeline`; empty: it was not requested.
    """

    seed: int
    facts: Mapping[str, float]
    worker_seconds: Mapping[str, float]
    counts: Mapping[str, Mapping[str, int]]
    phase: str
    reason: str
    events: int
    timeline: bytes = field(default=b"", repr=False)

    def to_json(self) -> dict[str, Any]:
        """Returns the result for `--output json`."""
        return {
            "seed": self.seed,
            "phase": self.phase,
            "reason": self.reason,
            **self.facts,
            "workerSeconds": dict(self.worker_seconds),
            **{name: dict(count) for name, count in self.counts.items()},
        }


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which this share of the values is; NaN: there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def simulate(job: TrainingJob, assumed: Assumptions, seed: int = 0, *, trace: bool = False) -> SimulatedRun:
    """Simulate a job once.

    Args:
        job: a valid TrainingJob.
        assumed: what the job does not say.
        seed: the same seed gives the same result, bit for bit.
        trace: whether the result has a timeline.
    """
    spans = SpanLog(_MOST_SPANS if trace else 0)
    world = SimulatedWorld(runtime_config(job.spec), assumed, seed, spans)
    pods = SimulatedPods(world, job)
    for number, failure in enumerate(assumed.failures):
        FailureSource(world, pods, number, failure)
    world.heap.run(assumed.seconds, lambda: pods.operator.has_ended)
    seconds = pods.operator.seconds()
    pods.close()
    tally, now = world.tally, world.heap.now
    roles = pods.objects.status.get("roles", {})
    failed = pods.objects.condition("Failed")
    succeeded = pods.objects.condition("Succeeded").get("status") == "True"
    reason = failed.get("reason", "") if failed.get("status") == "True" else ""
    timeline = b""
    if trace:
        metadata = pods.objects.manifest["metadata"]
        timeline = spans.timeline(
            metadata["name"], metadata.get("namespace", "default"), metadata["uid"], now, BEGAN.timestamp() + now
        )
    return SimulatedRun(
        seed=seed,
        facts=_facts(world, seconds, now),
        worker_seconds={part: value for part, value in seconds.items() if value},
        counts={
            "outcomes": tally.outcomes,
            "failures": tally.failures,
            "created": _created(pods),
            "restarts": {role: found.get("restarts", 0) for role, found in roles.items()},
            "disruptions": {role: found.get("disruptions", 0) for role, found in roles.items()},
        },
        phase="Succeeded" if succeeded else "Failed" if reason else "Running",
        reason=reason,
        events=world.heap.called,
        timeline=timeline,
    )


def _created(pods: SimulatedPods) -> dict[str, int]:
    found: dict[str, int] = {}
    for key, incarnation in pods.objects.status.get("incarnations", {}).items():
        role = key.rpartition("-")[0]
        found[role] = found.get(role, 0) + incarnation
    return found


def _facts(world: SimulatedWorld, seconds: Mapping[str, float], now: float) -> dict[str, float]:
    tally, prices = world.tally, world.assumed.pod_price_per_hour
    updates = tally.updates
    first, last = (updates[0], updates[-1]) if updates else ((0.0, 0), (0.0, 0))
    lasted = last[0] - first[0]
    made = last[1] - first[1]
    pace = made / lasted if lasted > 0 else 0.0
    per_update = tally.examples / last[1] if last[1] else 0.0
    staleness = sorted(tally.staleness.items())
    applied = sum(count for _, count in staleness)
    gaps = [after[0] - before[0] for before, after in itertools.pairwise(updates)]
    hours = {role: tally.pod_seconds.get(role, 0.0) / 3600 for role in ("worker", "server")}
    return {
        "seconds": now,
        "updates": float(last[1]),
        "firstUpdateSeconds": first[0],
        "updatesPerSecond": pace,
        "examplesPerSecond": per_update * pace,
        "goodput": goodput(seconds) or 0.0,
        "updateSecondsMedian": percentile(gaps, 0.5) if gaps else 0.0,
        "updateSeconds95": percentile(gaps, 0.95) if gaps else 0.0,
        "updateSecondsMost": max(gaps, default=0.0),
        "waitSecondsMedian": percentile(tally.exchange_waits, 0.5) if tally.exchange_waits else 0.0,
        "waitSeconds95": percentile(tally.exchange_waits, 0.95) if tally.exchange_waits else 0.0,
        "stalenessMean": sum(value * count for value, count in staleness) / applied if applied else 0.0,
        "stalenessMost": float(staleness[-1][0]) if staleness else 0.0,
        "sentBytes": tally.sent,
        "receivedBytes": tally.received,
        "replicatedBytes": tally.replicated,
        "updatesRedone": float(tally.redone),
        "checkpoints": float(tally.checkpoints),
        "workerHours": hours["worker"],
        "serverHours": hours["server"],
        "cost": hours["worker"] * prices.worker + hours["server"] * prices.server,
    }


def summary(runs: Sequence[SimulatedRun]) -> dict[str, dict[str, float]]:
    """Returns the percentiles of each fact over several runs.

    Args:
        runs: simulations that differ in their seeds.
    """
    facts = {name: [run.facts[name] for run in runs] for name in runs[0].facts}
    parts = {part for run in runs for part in run.worker_seconds}
    for part in sorted(parts):
        shares = [run.worker_seconds.get(part, 0.0) / (sum(run.worker_seconds.values()) or 1.0) for run in runs]
        facts[f"share/{part}"] = shares
    return {
        name: {"p10": percentile(values, 0.1), "p50": percentile(values, 0.5), "p90": percentile(values, 0.9)}
        for name, values in facts.items()
    }
