"""Which workers are reported as hung, slow or lost (the design's `stallSeconds`): time is passed in."""

from __future__ import annotations

import pytest

from backstay._coordination import Liveness, Rate
from backstay._timeouts import Timeouts
from backstay_rpc.control_pb2 import COMPILING, TRAINING, WAITING, Peer
from backstay_spec.silence import worker_silence

TIMES = Timeouts()


def worker(rank: int, incarnation: int = 0) -> Peer:
    return Peer(role="worker", index=rank, incarnation=incarnation)


def ranks(stalled: list) -> list[int]:
    return [entry.rank for entry in stalled]


def test_a_worker_that_waits_for_others_is_not_hung() -> None:
    live = Liveness("Sync")
    for rank in range(2):
        live.joined(0, worker(rank))
        live.beat(0, worker(rank), TRAINING, 0)
    live.moved(1, 1)
    live.handed_in(2, 0, 0, 1)
    for now in range(0, 120, 5):
        for rank in range(2):
            live.beat(now, worker(rank), WAITING, 0)
    assert ranks(live.stalled(115, 100, 2)) == [1]
    assert "no gradient" in live.stalled(115, 100, 2)[0].reason
    assert ranks(live.stalled(115, 100, 1)) == []  # out of the world


def test_a_rank_is_stalled_after_twenty_times_its_median() -> None:
    live = Liveness("Async")
    live.joined(0, worker(0))
    live.beat(0, worker(0), TRAINING, 0)
    for step in range(1, 6):
        live.handed_in(step * 10, 0, 0, step)
    for now in range(50, 260, 5):
        live.beat(now, worker(0), TRAINING, 0)
    assert ranks(live.stalled(249, 1, 1)) == []
    assert ranks(live.stalled(250, 1, 1)) == [0]


def test_silence_and_endless_compiling_are_hung_and_a_replacement_starts_fresh() -> None:
    live = Liveness("Sync")
    live.joined(0, worker(0))
    reported = worker_silence(300).reported
    assert ranks(live.stalled(reported - 1, 300, 1)) == []
    assert ranks(live.stalled(reported, 300, 1)) == [0]
    assert [peer.index for peer in live.lost(TIMES.silent)] == [0]
    live.joined(TIMES.silent, worker(0, 1))
    live.beat(TIMES.silent, worker(0, 0), TRAINING, 0)  # the old one does not count any more
    assert live.stalled(TIMES.silent, 300, 1) == []
    assert live.live(TIMES.silent, "worker") == {0: 1}
    for now in range(12, int(TIMES.compile) + 20, 5):
        live.beat(now, worker(0, 1), COMPILING, 0)
    assert ranks(live.stalled(TIMES.compile, 300, 1)) == []
    assert ranks(live.stalled(TIMES.compile + 12, 300, 1)) == [0]
    # The time for compiling does not count for the first gradient.
    now = TIMES.compile + 20
    live.beat(now, worker(0, 1), TRAINING, 0)
    assert live.stalled(now + 5, 300, 1) == []
    live.left(worker(0, 1))
    assert live.lost(now + 100) == []


@pytest.mark.parametrize(("stall", "limit"), [(1, 3.0), (12, 8.0), (24, 16.0), (300, 22.0), (600, 52.0)])
def test_t8_a_short_limit_for_hung_workers_reports_a_silent_one_sooner(stall: float, limit: float) -> None:
    """Never within one and a half heartbeats. The peer counts as lost after the same time in every job."""
    live = Liveness("Sync")
    live.joined(0, worker(0))
    live.beat(0, worker(0), TRAINING, 0)
    live.moved(0, 1)
    live.handed_in(0, 0, 0, 1)
    assert live.stalled(limit - 0.1, stall, 1) == []
    assert live.stalled(limit, stall, 1)[0].reason.startswith("no heartbeat")
    assert live.lost(TIMES.silent - 0.1) == []
    assert live.lost(TIMES.silent) == [worker(0)]


def test_the_slow_one_is_a_straggler_with_its_delay() -> None:
    live = Liveness("Sync")
    for rank, seconds in enumerate([0.1, 0.1, 0.1, 0.4]):
        live.joined(0, worker(rank))
        for _ in range(3):
            live.beat(0, worker(rank), TRAINING, seconds)
    assert live.stragglers(0, 4) == {3: pytest.approx(0.3)}
    assert not live.stragglers(0, 3), "it is not in force"
    assert not live.stragglers(11, 4), "it is silent: lost, not slow"


def test_the_rate_is_that_of_the_window_and_falls_when_nothing_happens() -> None:
    rate = Rate(window=10)
    assert rate.per_second(0) is None
    for second in range(101):
        rate.add(second, 5)
    assert rate.per_second(100) == pytest.approx(5)
    assert rate.per_second(200) < 1


def test_a_burst_at_the_start_is_not_a_rate() -> None:
    """Gradients that waited for a server are applied within milliseconds: their rate was shown as 11,169 examples/s."""
    rate = Rate()
    for now in (0.0, 0.002, 0.004, 0.9):
        rate.add(now, 20)
        assert rate.per_second(now) is None
    rate.add(1.5, 20)
    assert rate.per_second(1.5) == pytest.approx(80 / 1.5)


def test_a_job_of_less_than_a_second_has_a_rate_at_its_end() -> None:
    """The result of such a job had ``"examplesPerSecond": null``."""
    rate = Rate()
    assert rate.at_end(start=-2.0) is None
    for number in range(9):
        rate.add(0.01 * number, 20)
        few = 20 * (number + 1) / (2.0 + 0.01 * number)
        assert rate.at_end(start=-2.0) == pytest.approx(few), "a burst has no rate: the mean since the start"
    rate.add(0.09, 20)
    assert rate.at_end(start=-2.0) == pytest.approx(20 / 0.01)
    assert rate.per_second(0.09) is None


def test_a_paused_server_does_not_count_its_pause_as_silence() -> None:
    """A server that was paused, or had no processor, received no heartbeats: no worker is replaced for that."""
    live = Liveness("Sync")
    for rank in range(2):
        live.joined(0, worker(rank))
        live.beat(0, worker(rank), TRAINING, 0)
    live.moved(0, 1)
    for now in range(10):
        live.tick(now)
        live.beat(now, worker(0), TRAINING, 0)
    assert [peer.index for peer in live.lost(10)] == [1], "the process ran all the time: this silence is rank 1's"
    assert len(live.live(60, "worker")) == 2, "it was paused from 9 to 60: no peer was silent"
    for now in range(61, 73):
        live.tick(now)
    assert [stalled.rank for stalled in live.stalled(73, 30, 2)] == [1]
    for now in range(73, 82):
        live.tick(now)
    assert [stalled.rank for stalled in live.stalled(82, 300, 2)] == [0, 1]


def test_t8_a_call_that_read_the_clock_before_a_pause_does_not_hide_a_dead_worker() -> None:
    """The thread that ticks read the clock, was paused for 60 s, and got the lock after a heartbeat."""
    live = Liveness("Sync")
    live.joined(0, worker(0))
    live.tick(0)
    live.beat(61, worker(0), TRAINING, 0)  # corrects for the pause
    live.tick(1)
    for now in range(62, 62 + int(TIMES.silent)):
        live.tick(now)
    assert [peer.index for peer in live.lost(61 + TIMES.silent)] == [0]


def test_t8_a_heartbeat_that_read_the_clock_before_a_pause_counts() -> None:
    live = Liveness("Sync")
    live.joined(0, worker(0))
    live.tick(1)
    live.tick(61)
    live.beat(1.2, worker(0), TRAINING, 0)
    live.tick(62)
    assert live.lost(62) == []
