"""A rank that is slow is named with its delay: in the metrics and, not too often, in the log."""

from __future__ import annotations

import logging

import pytest
from prometheus_client import generate_latest

from backstay._coordination import CoordinatorState, PeerTable
from backstay._report._job import JobObserver
from backstay._report._metrics import PodMetrics
from backstay_rpc.control_pb2 import TRAINING, Peer, ProgressReply


def test_a_slow_rank_is_reported_until_it_is_no_longer_slow(caplog: pytest.LogCaptureFixture) -> None:
    live, metrics = PeerTable("Sync"), PodMetrics("job", "ParameterServer", 0)
    observer = JobObserver(live, metrics, 10, 0)
    state = CoordinatorState(term=1, version=3, world=3)
    peers = [Peer(role="worker", index=rank, incarnation=1) for rank in range(3)]

    def reported(now: float, *seconds: float) -> list[str]:
        for peer, each in zip(peers, seconds, strict=True):
            live.joined(now, peer)
            for _ in range(20):
                live.beat(now, peer, TRAINING, each)
        with caplog.at_level(logging.WARNING):
            observer.fill(now, ProgressReply(), state, 300)
        lines = generate_latest(metrics.registry).decode().splitlines()
        return [line for line in lines if line.startswith("backstay_straggler_delay_seconds{")]

    series = 'backstay_straggler_delay_seconds{index="0",rank="2",role="ParameterServer",training_job="job"} 0.4'
    assert reported(0, 0.1, 0.1, 0.5) == [series]
    assert reported(5, 0.1, 0.1, 0.5) == [series]
    assert [record.getMessage() for record in caplog.records] == [
        "rank 2 is slow: its gradient takes 0.4 s longer than the others' median"
    ]
    assert reported(8, 0.1, 0.1, 0.1) == []
