"""O8: when progress alone changes the status, and how numbers are rounded."""

from __future__ import annotations

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}


def test_progress_alone_changes_the_status_every_10_s(running):
    """O8."""
    cluster = running(TWO_SERVERS)
    cluster.tick(10)
    for second in range(30):
        cluster.answer(step=second + 1, loss=1.0, examples_per_second=float("inf"), term=1)
        before = cluster.writes
        cluster.settle()
        assert cluster.writes - before == (1 if second % 10 == 0 else 0)
        cluster.tick(1)
    assert cluster.status["step"] == 21
    assert cluster.status["world"] == 3
    assert "examplesPerSecond" not in cluster.status


def test_numbers_are_as_people_read_them(running):
    """O2: `kubectl get` prints a number with all the digits that it has."""
    cluster = running()
    cluster.tick(11)
    cluster.answer(step=9, examples_per_second=567.0988497772483, loss=0.013751725666224957, local_steps=24)
    cluster.settle()
    assert (cluster.status["examplesPerSecond"], cluster.status["loss"]) == (567.1, 0.0137517)
    assert cluster.status["localSteps"] == 24
    cluster.tick(11)
    cluster.answer(step=10, examples_per_second=1234567.8, loss=float("nan"))
    cluster.settle()
    assert cluster.status["examplesPerSecond"] == 1235000
    assert "loss" not in cluster.status
    assert "metrics" not in cluster.status, "nothing empty"
