"""The docs print the table AFTER_TRAINING. Each of its cells is reached, and the job does what the cell says."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from backstay_spec import contract
from backstay_spec.actions import LookUpPod
from backstay_spec.planner import after_training
from backstay_spec.planner.after_training import AFTER_TRAINING, Act, HasResult, Worker0Pod

WORKER = contract.ROLE_WORKER
SPEC = {
    "parameterServers": {"replicas": 1},
    "workers": {"replicas": 1},
    "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}},
    "runPolicy": {"afterTrainingSeconds": 100},
}
RETURNED = {"result": "Trained", "step": 9, "checkpoint": "file:///ckpt/9"}
RAISED = {"result": "AfterTrainingFailed", "reason": "KeyError", "message": "'model'"}
GROUP_LOST = {"result": "Trained", "step": 9, "reason": "GroupLost", "message": "pod 1 of worker 0 is lost"}

# Whether shard 0 names incarnation 1 as the one that has the result.
NAMED, NOT_KNOWN, NONE_HAS_IT = 1, None, 0


def leader(cluster: Any) -> str:
    name: str = min(name for name in cluster.pods if "-worker-0-" in name)
    return name


def ends(code: int, message: dict[str, Any] | None = None) -> Callable[[Any], None]:
    return lambda cluster: cluster.end(leader(cluster), code, json.dumps(message) if message else "")


def runs(cluster: Any) -> None:
    pass


def is_evicted(cluster: Any) -> None:
    cluster.disrupt(leader(cluster), "EvictionByEvictionAPI")


def vanishes(cluster: Any) -> None:
    cluster.vanish(leader(cluster))


def is_gone(cluster: Any) -> None:
    """It vanished, and the operator has read it by its name."""
    vanishes(cluster)
    cluster.apply(cluster.plan())


def backs_off(cluster: Any) -> None:
    """It was killed before it contributed, and the operator has counted that."""
    cluster.answer(step=8)
    cluster.end(leader(cluster), 137)
    cluster.settle()
    cluster.tick(30)


def ended_before(cluster: Any) -> None:
    """It ended with code 0, and no message has come in the time for one."""
    cluster.end(leader(cluster), 0)
    cluster.tick(15)


def ends_during_suspension(cluster: Any) -> None:
    """It ends in order after the operator wrote that it suspends the job, and before it deleted the pod. The messages
    of a job that is suspended do not count, so none names the pod."""
    cluster.settle()
    cluster.edit(runPolicy={"suspend": True})
    cluster.write(cluster.plan())
    cluster.end(leader(cluster), 0, json.dumps(RETURNED))


PRESENT, UNCERTAIN, ABSENT = HasResult.PRESENT, HasResult.UNCERTAIN, HasResult.ABSENT
CELLS = [
    (Worker0Pod.DUE, UNCERTAIN, NOT_KNOWN, backs_off, Act.REPLACE),
    (Worker0Pod.DUE, ABSENT, NONE_HAS_IT, backs_off, Act.REPLACE),
    (Worker0Pod.UNSEEN, UNCERTAIN, NOT_KNOWN, vanishes, Act.LOOK_UP),
    (Worker0Pod.UNSEEN, ABSENT, NONE_HAS_IT, vanishes, Act.REPLACE),
    (Worker0Pod.GONE, UNCERTAIN, NOT_KNOWN, is_gone, Act.LOSE),
    (Worker0Pod.GONE, ABSENT, NONE_HAS_IT, is_gone, Act.REPLACE),
    (Worker0Pod.RUNS, UNCERTAIN, NOT_KNOWN, runs, Act.WAIT),
    (Worker0Pod.RUNS, ABSENT, NONE_HAS_IT, runs, Act.REPLACE),
    (Worker0Pod.ENDS, PRESENT, NAMED, ends(contract.GROUP_LOST_EXIT, GROUP_LOST), Act.WAIT),
    (Worker0Pod.ENDS, UNCERTAIN, NOT_KNOWN, ends(contract.GROUP_LOST_EXIT), Act.WAIT),
    (Worker0Pod.ENDS, ABSENT, NONE_HAS_IT, ends(contract.GROUP_LOST_EXIT), Act.WAIT),
    (Worker0Pod.DONE, PRESENT, NOT_KNOWN, ends_during_suspension, Act.COMPLETE),
    (Worker0Pod.DONE, UNCERTAIN, NOT_KNOWN, ends(0), Act.COMPLETE),
    (Worker0Pod.DONE, ABSENT, NONE_HAS_IT, ended_before, Act.REPLACE),
    (Worker0Pod.LOST, PRESENT, NAMED, is_evicted, Act.LOSE),
    (Worker0Pod.LOST, UNCERTAIN, NOT_KNOWN, is_evicted, Act.LOSE),
    (Worker0Pod.LOST, ABSENT, NONE_HAS_IT, is_evicted, Act.REPLACE),
    (Worker0Pod.FAILED, PRESENT, NAMED, ends(1, RAISED), Act.FAIL),
    (Worker0Pod.FAILED, UNCERTAIN, NOT_KNOWN, ends(137), Act.REPLACE),
    (Worker0Pod.FAILED, ABSENT, NONE_HAS_IT, ends(137), Act.REPLACE),
]


class AskedRow(dict[HasResult, Act]):
    """A row of the table that records which cells the planner reads."""

    def __init__(self, pod: Worker0Pod, asked: list[tuple[Worker0Pod, HasResult]]) -> None:
        super().__init__(AFTER_TRAINING[pod])
        self.pod, self.asked = pod, asked

    def __getitem__(self, result: HasResult) -> Act:
        self.asked.append((self.pod, result))
        return super().__getitem__(result)


def done(cluster: Any) -> Act:
    """Plan and carry out. Returns what was done about worker 0."""
    before = cluster.status["incarnations"]["worker-0"]
    first = cluster.plan()
    cluster.apply(first)
    cluster.settle()
    after, complete = cluster.status, cluster.condition("AfterTrainingComplete")
    if any(isinstance(action, LookUpPod) for action in first.actions):
        return Act.LOOK_UP
    if after["incarnations"]["worker-0"] > before or "died before it had the result" in complete["message"]:
        return Act.REPLACE
    return {
        ("Running", "ScriptRuns"): Act.WAIT,
        ("Succeeded", "Completed"): Act.COMPLETE,
        ("Succeeded", "PodLost"): Act.LOSE,
        ("Failed", "AfterTrainingFailed"): Act.FAIL,
    }[after["phase"], complete["reason"]]


def test_each_cell_has_a_scenario():
    assert {(pod, result) for pod, result, *_ in CELLS} == {
        (pod, r) for pod, row in AFTER_TRAINING.items() for r in row
    }


@pytest.mark.parametrize(
    ("pod", "result", "named", "happens", "act"), CELLS, ids=[f"{pod.name}-{result.name}" for pod, result, *_ in CELLS]
)
def test_the_job_does_what_the_cell_says(running, monkeypatch, pod, result, named, happens, act):
    """T8, O1."""
    spec, trained = SPEC, {"returned": named}
    if pod is Worker0Pod.ENDS:
        spec = spec | {"workers": {"replicas": 1, "podsPerRank": 2}}
    if pod in (Worker0Pod.ENDS, Worker0Pod.UNSEEN):
        # A replacement also begins with a wait and a look-up, but not where it could not get the result.
        spec, trained = spec | {"checkpoint": {}}, trained | {"checkpoint": ""}
    cluster = running(spec)
    cluster.train(**trained)
    happens(cluster)
    asked: list[tuple[Worker0Pod, HasResult]] = []
    monkeypatch.setattr(after_training, "AFTER_TRAINING", {one: AskedRow(one, asked) for one in Worker0Pod})
    assert done(cluster) is act
    assert asked[0] == (pod, result)


@pytest.mark.parametrize("is_gone", [False, True])
def test_t8_a_pod_that_had_the_result_is_not_replaced_while_its_slot_backs_off(running, is_gone):
    """T8: it was counted as dead before shard 0 named it. A replacement would do the work of the script again."""
    cluster = running(SPEC)
    cluster.tick(1)
    cluster.answer(step=8)  # it has not contributed
    cluster.end(leader(cluster), 137)
    cluster.settle()
    assert cluster.status["backoff"]["worker-0"]["notBefore"]
    if is_gone:
        cluster.vanish(leader(cluster))
    cluster.train(returned=1)
    cluster.settle()
    cluster.tick(70)
    cluster.settle()
    reason = "PodLost" if is_gone else "AfterTrainingFailed"
    assert cluster.condition("AfterTrainingComplete")["reason"] == reason
    assert cluster.status["incarnations"]["worker-0"] == 1
