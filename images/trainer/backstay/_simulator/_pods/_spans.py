"""Keeps what simulated pods did as spans, and writes them in the format of a job's timeline. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from backstay_rpc.control_pb2 import ClockOffset, Peer, Spans, Timeline
from backstay_spec import contract

__all__ = ["SpanLog"]

_THREADS: Final = {"apply": 1, "checkpoint": 2, "quorum_wait": 3}
_NAMES: Final = ("MainThread", "apply", "storing", "coordinator")


@dataclass
class _SpanColumns:
    points: list[str] = field(default_factory=list)
    spans: list[tuple[int, int, int, int, int, Mapping[str, Any]]] = field(default_factory=list)


class SpanLog:
    """The spans of all pods.

    Args:
        most: the most spans that are kept; later ones are dropped. 0: none are kept.
    """

    def __init__(self, most: int) -> None:
        self._left = most
        self._lost = 0
        self._pods: dict[tuple[str, int, int, str], _SpanColumns] = {}

    def record(
        self,
        pod: tuple[str, int, int, str],
        point: str,
        began: float,
        ended: float,
        step: int | None = None,
        **notes: Any,
    ) -> None:
        """Keep a span.

        Args:
            pod: the role, index, incarnation and name of the pod.
            point: what it did, such as ``compute``; see `backstay_spec.contract.STEP_PARTS`.
            began, ended: simulated times in seconds.
            step: the step of the span; None: it belongs to no step.
            notes: more about the span, as JSON.
        """
        if self._left <= 0:
            self._lost += 1
            return
        self._left -= 1
        columns = self._pods.setdefault(pod, _SpanColumns())
        if point not in columns.points:
            columns.points.append(point)
        at, end = round(began * 1e9), round(ended * 1e9)
        thread = _THREADS.get(point, 0)
        number = 0 if step is None else step + 1
        columns.spans.append((columns.points.index(point), thread, at, end - at, number, notes))

    def timeline(self, job: str, namespace: str, uid: str, now: float, unix_seconds: float) -> bytes:
        """Returns the serialized `Timeline`, as shard 0's server has it.

        Args:
            job, namespace, uid: the job.
            now: the simulated time.
            unix_seconds: the Unix time that stands for `now`.
        """
        servers = [key for key in self._pods if key[:2] == (contract.ROLE_SERVER, 0)]
        role, index, incarnation, name = max(servers, default=(contract.ROLE_SERVER, 0, 1, ""), key=lambda key: key[2])
        offset = ClockOffset(shard=index, incarnation=incarnation, seconds=0.0, error=0.0)
        messages = []
        for key, columns in self._pods.items():
            made = Spans(
                peer=Peer(role=key[0], index=key[1], incarnation=key[2], pod=key[3]),
                clock=now,
                unix_seconds=unix_seconds,
                offsets=[offset],
                points=columns.points,
                threads=_NAMES,
            )
            at = 0
            for position, (point, thread, began, lasted, step, notes) in enumerate(columns.spans):
                if notes:
                    made.notes[position] = json.dumps(notes)
                made.point.append(point)
                made.thread.append(thread)
                made.began.append(began - at)
                made.lasted.append(max(0, lasted))
                made.step.append(step)
                at = began
            messages.append(made.SerializeToString(deterministic=True))
        return Timeline(
            job=job,
            namespace=namespace,
            uid=uid,
            server=Peer(role=role, index=index, incarnation=incarnation, pod=name),
            clock=now,
            unix_seconds=unix_seconds,
            spans=messages,
        ).SerializeToString(deterministic=True)
