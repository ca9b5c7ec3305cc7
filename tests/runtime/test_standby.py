"""Standbys as real processes: the active server is killed, and training continues in the same term (T3, T4, T6)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from backstay.testing import Supervisor


@pytest.fixture
def operated(job) -> Iterator[Callable[..., Supervisor]]:
    made: list[Supervisor] = []

    def make(shards: int, workers: int, **config: object) -> Supervisor:
        made.append(Supervisor(job(shards, workers, standbys=1, **config)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual["step"] == expected["step"]
    for name, value in expected.items():
        if name.isdigit():
            np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12)


def test_standbys_continue_where_the_active_servers_were_killed(operated) -> None:
    """T3, T4: of shard 0, then of the other one; with model state; no checkpoint, no rollback, no step made again."""
    operator = operated(2, 2)
    tiny = operator.job
    tiny.environment |= {"JAX_ENABLE_X64": "1", "STEPS": "20", "CLIP": "0.5", "HOLD_AT": "4", "STATE": "1"}
    for shard in range(2):
        operator.server(shard, 1)
    workers = [tiny.worker(rank) for rank in range(2)]
    for shard in range(2):
        operator.server(shard, 2)
    operator.wait(lambda said: all((s, 1) in said and said[s, 1].standby == 2 for s in range(2)))
    for shard, step, until in ((0, 5, 9), (1, 12, 16)):
        tiny.let(until)
        tiny.wait_for(workers[0], f"step {step}/20")
        operator.pods[shard, 1].process.send_signal(signal.SIGKILL)
        operator.pods[shard, 1].wait()
        operator.promote(shard, 2)
    tiny.let()
    assert [pod.wait() for pod in workers] == [0, 0]
    expected = tiny.reference()
    for pod in workers:
        assert_same(tiny.params(pod), expected)
    leader = operator.pods[0, 2]
    assert leader.wait() == 0
    assert leader.final_message()["result"] == "Succeeded"
    assert "starts again" not in tiny.logs()


def test_t8_updates_continue_while_a_standby_is_stopped_and_it_is_filled_again(operated) -> None:
    """T3, T4: the server continues once the operator has reported that it is still the active one."""
    operator = operated(2, 2)
    tiny = operator.job
    tiny.environment |= {"JAX_ENABLE_X64": "1", "STEPS": "12", "HOLD_AT": "4"}
    for shard in range(2):
        operator.server(shard, 1)
    workers = [tiny.worker(rank) for rank in range(2)]
    for shard in range(2):
        operator.server(shard, 2)
    operator.wait(lambda said: all((s, 1) in said and said[s, 1].standby == 2 for s in range(2)))
    standby = operator.pods[1, 2].process
    standby.send_signal(signal.SIGSTOP)
    tiny.let(8)
    tiny.wait_for(workers[0], "step 8/12")
    operator.wait(lambda said: (1, 1) in said and said[1, 1].standby == 0)
    assert "the standby (incarnation 2) did not answer for " in operator.pods[1, 1].output()
    standby.send_signal(signal.SIGCONT)
    operator.wait(lambda said: (1, 1) in said and said[1, 1].standby == 2)
    operator.pods[1, 1].process.send_signal(signal.SIGKILL)
    operator.pods[1, 1].wait()
    operator.promote(1, 2)
    tiny.let()
    assert [pod.wait() for pod in workers] == [0, 0]
    expected = tiny.reference()
    for pod in workers:
        assert_same(tiny.params(pod), expected)
    assert "starts again" not in tiny.logs()
