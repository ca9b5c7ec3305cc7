"""The page `/status` of shard 0's server."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import Mock

from backstay._report._job import JobObserver
from backstay._report._status_page import StatusPage
from backstay_rpc.control_pb2 import TRAINING, WAITING, Doing, HeartbeatRequest, Peer


def beat(rank: int, incarnation: int = 1, **more: Any) -> HeartbeatRequest:
    peer = Peer(role="worker", index=rank, incarnation=incarnation, pod=f"job-worker-{rank}-{incarnation}")
    return HeartbeatRequest(peer=peer, **more)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_pod_is_shown_with_what_it_does_and_for_how_long() -> None:
    clock = Clock()
    observer = Mock(spec=JobObserver)
    observer.status.return_value = {"step": 3, "loss": float("nan"), "nested": {"x": [float("inf"), -float("inf")]}}
    page = StatusPage(observer, clock=clock)
    page.beat(beat(1, activity=TRAINING, doing=Doing(point="compute", step=0, has_step=True, seconds=2.0, member=2)))
    clock.now = 105.0
    page.beat(beat(0, activity=WAITING))
    shown = page.page()
    json.dumps(shown, allow_nan=False)
    assert (shown["step"], shown["loss"], shown["nested"]) == (3, None, {"x": ["Infinity", "-Infinity"]})
    first, second = shown["pods"]
    assert (first["index"], first["doing"], first["step"], first["activity"]) == (0, "", None, "WAITING")
    assert (second["doing"], second["step"], second["seconds"], second["heartbeatSeconds"]) == ("compute", 0, 7.0, 5.0)
    assert (first["member"], second["member"]) == (0, 2)


def test_a_replaced_pod_and_one_that_left_are_not_shown() -> None:
    clock = Clock()
    page = StatusPage(clock=clock)
    page.beat(beat(0, 2))
    page.beat(beat(0, 1))  # it was stopped, and sends an old heartbeat
    page.left(beat(0, 1).peer)
    assert [pod["incarnation"] for pod in page.page()["pods"]] == [2]
    page.left(beat(0, 2).peer)
    assert page.page()["pods"] == []
    page.beat(beat(0, 3))
    clock.now += 601
    assert page.page()["pods"] == []
