"""Reads the curve of a job: loss and metrics over the steps, from shard 0's server or from the record that it left."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.reading.records import (
    all_of,
    checkpoint_places,
    newest_of_each_server,
    places_of,
    read_file,
    servers_of_shard_0,
)
from backstay_spec import contract

__all__ = ["TrainingCurve", "curve_of_job", "curve_of_page"]

_SECONDS = 10.0


@dataclass(frozen=True)
class TrainingCurve:
    """Loss and metrics over the steps, with at most 1,000 points; a longer training has every second step, or fewer.

    Attributes:
        steps: the number of the update of each point, from 1.
        loss: the loss of each update, the weighted mean over its contributions; NaN where it is not finite.
        metrics: the metrics that `loss` returned, by name; each as long as `steps`.
        evaluations: the metrics that `evaluate` returned, by the step of its parameters.
    """

    steps: tuple[int, ...] = ()
    loss: tuple[float, ...] = ()
    metrics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    evaluations: Mapping[int, Mapping[str, float]] = field(default_factory=dict)

    def values(self, name: str) -> list[tuple[int, float]]:
        """Returns the finite values of the loss, of a metric of `loss`, or else of a metric of `evaluate`, with their
        steps."""
        points = self.trained(name) or self.evaluated(name)
        return [(step, value) for step, value in points if math.isfinite(value)]

    def evaluated(self, name: str) -> list[tuple[int, float]]:
        """Returns the values of a metric of `evaluate`, with their steps. NaN: it was not finite."""
        return [(step, metrics[name]) for step, metrics in sorted(self.evaluations.items()) if name in metrics]

    def trained(self, name: str) -> list[tuple[int, float]]:
        """Returns the values of the loss or of a metric of `loss`, with their steps. NaN: it was not finite."""
        values = self.loss if name == "loss" else self.metrics.get(name, ())
        return list(zip(self.steps, values, strict=False))

    def before(self, newer: TrainingCurve) -> TrainingCurve:
        """This curve up to the first step of a newer server's curve, and that curve from there.

        A newer server also has evaluations of earlier steps, because an evaluator repeats its newest one.
        """
        first = newer.steps[0] if newer.steps else math.inf
        kept = [place for place, step in enumerate(self.steps) if step < first]
        names = [*self.metrics, *(name for name in newer.metrics if name not in self.metrics)]

        def joined(old: tuple[float, ...] | None, new: tuple[float, ...] | None) -> tuple[float, ...]:
            head = [math.nan if old is None else old[place] for place in kept]
            return (*head, *([math.nan] * len(newer.steps) if new is None else new))

        return TrainingCurve(
            (*(self.steps[place] for place in kept), *newer.steps),
            joined(self.loss, newer.loss),
            {name: joined(self.metrics.get(name), newer.metrics.get(name)) for name in names},
            {step: found for step, found in self.evaluations.items() if step < first} | dict(newer.evaluations),
        )


def curve_of_page(data: bytes) -> TrainingCurve | None:
    """Returns the curve on the page `/curve`, or in a record, or None if it is not one."""
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        found = json.loads(data)
        steps = tuple(int(step) for step in found["steps"])
        metrics = {str(name): _numbers(values) for name, values in found["metrics"].items()}
        curve = TrainingCurve(
            steps,
            _numbers(found["loss"]),
            metrics,
            {
                int(one["step"]): {str(name): _number(value) for name, value in one["metrics"].items()}
                for one in found["evaluations"]
            },
        )
        if all(len(values) == len(steps) for values in (curve.loss, *metrics.values())):
            return curve
    return None


def _numbers(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(_number(value) for value in values)


def _number(value: Any) -> float:
    """JSON has no NaN: pages have null for it."""
    return math.nan if value is None else float(value)


async def curve_of_job(cluster: FoundCluster, job: dict[str, Any], pods: list[dict[str, Any]]) -> TrainingCurve:
    """Returns the curve of a job, over all its servers, as far as they run or their records can be read; else an empty
    one.

    Args:
        job: the TrainingJob.
        pods: its pods.
    """
    curve = TrainingCurve()
    # The event loop may be a notebook's.
    for data in await asyncio.to_thread(_stored, cluster, job):
        if (stored := curve_of_page(data)) is not None:
            curve = curve.before(stored)
    for pod in servers_of_shard_0(pods):
        page = await cluster.api.pod_page(pod, "/curve", timeout=_SECONDS)
        if page and (current := curve_of_page(page)) is not None:
            return curve.before(current)
    return curve


def _stored(cluster: FoundCluster, job: dict[str, Any]) -> list[bytes]:
    """Returns the stored curves of a job, oldest first.

    A job whose training was complete before it began has none. Then it is that of the newest job in its checkpoint
    folder.
    """
    conditions = (job.get("status") or {}).get("conditions") or ()
    if not any(one.get("reason") == contract.ALREADY_COMPLETE for one in conditions):
        return [data for _, data in all_of(places_of(cluster, job), "curve", job["metadata"]["uid"])]
    newest_first = newest_of_each_server(checkpoint_places(job), "curve")
    found = []
    for place in reversed(newest_first):
        with contextlib.suppress(BadInput):  # deleted meanwhile
            found.append(read_file(place))
    return found
