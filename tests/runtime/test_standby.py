"""Real processes continue training in the same term when the active server is killed (T3, T4, T6)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from backstay.testing import Pod, Supervisor
from backstay_spec import contract


@pytest.fixture
def operated(job) -> Iterator[Callable[..., Supervisor]]:
    made: list[Supervisor] = []

    def make(shards: int, workers: int, **config: object) -> Supervisor:
        made.append(Supervisor(job(shards, workers, standbys=1, **config)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def started(operator: Supervisor) -> list[Pod]:
    """Returns the two workers once they run, because then each of the two standbys holds the state of its server."""
    operator.until(lambda: operator.processes.has_started)
    return [operator.processes.pod(contract.ROLE_WORKER, rank) for rank in range(2)]


def server(operator: Supervisor, shard: int, incarnation: int) -> Pod:
    return operator.processes.pod(contract.ROLE_SERVER, shard, incarnation)


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual["step"] == expected["step"]
    for name, value in expected.items():
        if name.isdigit():
            np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12)


def test_standbys_continue_where_the_active_servers_were_killed(operated) -> None:
    """T3, T4: of shard 0, then of the other one; with model state; no checkpoint, no rollback, no step made again."""
    operator = operated(2, 2)
    tiny = operator.processes.job
    tiny.environment |= {"X64": "1", "STEPS": "20", "CLIP": "0.5", "HOLD_AT": "4", "STATE": "1"}
    workers = started(operator)
    for shard, step, until in ((0, 5, 9), (1, 12, 16)):
        tiny.let(until)
        operator.until(lambda step=step: f"step {step}/20" in workers[0].output())
        server(operator, shard, 1).process.send_signal(signal.SIGKILL)
        operator.until(lambda shard=shard: operator.processes.active(shard) == 2)
    tiny.let()
    operator.until(lambda: operator.ended)
    assert [pod.wait() for pod in workers] == [0, 0]
    expected = tiny.reference()
    for pod in workers:
        assert_same(tiny.params(pod), expected)
    (leader,) = (pod for pod in tiny.pods if (pod.role, pod.index, pod.incarnation) == (contract.ROLE_SERVER, 0, 2))
    assert leader.wait() == 0
    assert leader.final_message()["result"] == "Succeeded"
    assert "starts again" not in tiny.logs()


def test_t8_updates_continue_while_a_standby_is_stopped_and_it_is_filled_again(operated) -> None:
    """T3, T4: the server continues once the operator has reported that it is still the active one."""
    operator = operated(2, 2)
    tiny = operator.processes.job
    tiny.environment |= {"X64": "1", "STEPS": "12", "HOLD_AT": "4"}
    workers = started(operator)
    standby = server(operator, 1, 2).process
    standby.send_signal(signal.SIGSTOP)
    tiny.let(8)
    operator.until(lambda: "step 8/12" in workers[0].output())
    operator.until(lambda: operator.processes.standby(1) == 0)
    assert "the standby (incarnation 2) did not answer for " in server(operator, 1, 1).output()
    standby.send_signal(signal.SIGCONT)
    operator.until(lambda: operator.processes.standby(1) == 2)
    server(operator, 1, 1).process.send_signal(signal.SIGKILL)
    operator.until(lambda: operator.processes.active(1) == 2)
    tiny.let()
    operator.until(lambda: operator.ended)
    assert [pod.wait() for pod in workers] == [0, 0]
    expected = tiny.reference()
    for pod in workers:
        assert_same(tiny.params(pod), expected)
    assert "starts again" not in tiny.logs()
