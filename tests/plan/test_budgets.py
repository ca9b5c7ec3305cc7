"""O4: what a crash costs, when the next pod waits, and when the budget ends the job."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest

from backstay_spec import contract
from backstay_spec.planner.budgets import wait_after

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


def test_the_budget_ends_the_job(running):
    cluster = running(SPEC | {"workers": {"replicas": 2, "maxRestarts": 2}})
    for _ in range(3):
        for _ in range(2):
            cluster.run_all()
            cluster.tick(2)
        cluster.end(cluster.named(WORKER, 0), 1, "ValueError: boom")
        cluster.settle()
    assert cluster.condition("Failed")["reason"] == "MaxRestartsExceeded"
    assert "ValueError: boom" in cluster.condition("Failed")["message"]
    assert "spec.workers.maxRestarts of 2" in cluster.condition("Failed")["message"]
    assert cluster.status["roles"]["Worker"]["restarts"] == 2
    assert [d.charged for d in cluster.deaths] == [True, True, False]


def test_the_waits_double_up_to_a_minute():
    assert [wait_after(n).total_seconds() for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    assert wait_after(10**9) == timedelta(seconds=60)


def test_a_rank_that_crashes_before_its_first_gradient_backs_off(running):
    cluster = running(SPEC)
    waits = []
    for _ in range(4):
        cluster.end(cluster.named(WORKER, 0), 1)
        cluster.settle()
        if not cluster.status.get("backoff"):
            continue
        waited = 0
        while cluster.status["backoff"]["worker-0"].get("notBefore"):
            assert cluster.condition("PodsReady")["reason"] == "BackingOff"
            cluster.tick(1)
            waited += 1
            cluster.settle()
        waits.append(waited)
    assert waits == [1, 2, 4], "the first had been ready"
    assert len(cluster.deaths) == 4
    cluster.run_all()
    cluster.tick(2)
    cluster.run_all()
    cluster.settle()
    assert "backoff" not in cluster.status or cluster.status["backoff"] == {}


def test_o4_a_rank_that_is_ready_and_crashes_in_its_first_step_backs_off(running):
    """A pod is Ready before its first step; an answer of the servers from before its start says nothing about
    it."""
    cluster = running(SPEC)
    cluster.answer(step=0)
    waits = []
    for _ in range(4):
        cluster.tick(1)
        cluster.run_all()
        cluster.settle()
        cluster.answer(step=0)
        cluster.end(cluster.named(WORKER, 0), 1)
        cluster.settle()
        waits.append(cluster.status["backoff"]["worker-0"]["failures"])
        cluster.tick(10)
        cluster.settle()
    assert waits == [1, 2, 3, 4]
    cluster.tick(1)
    cluster.run_all()
    cluster.answer(step=1, contributed={0: cluster.status["roles"]["Worker"]["restarts"] + 1})
    cluster.settle()
    assert not cluster.status.get("backoff")


def test_o4_crashes_between_two_answers_of_the_servers_continue_the_count(running):
    """A pod that is Ready, and crashes before the servers can report what it did, has not worked."""
    cluster = running(SPEC)
    cluster.answer(step=0)
    for crashes in range(1, 7):
        cluster.run_all()
        cluster.tick(1)
        cluster.settle()
        cluster.end(cluster.named(WORKER, 0), 1)
        cluster.settle()
        if crashes < 6:
            assert cluster.status["backoff"]["worker-0"]["failures"] == crashes
        cluster.tick(61)
        cluster.answer(step=0)
        cluster.settle()
        cluster.tick(1)
    assert cluster.condition("Failed")["reason"] == "CrashLoop"


def test_a_wait_survives_the_operator(running):
    """O5: no count lost, and no crash counted twice."""
    cluster = running(SPEC)
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    restarts = cluster.status["roles"]["Worker"]["restarts"]
    cluster.restart_operator()
    cluster.vanish(cluster.named(WORKER, 0))
    cluster.settle()
    assert cluster.status["roles"]["Worker"] | {"ready": 0} == {
        "desired": 2,
        "ready": 0,
        "restarts": restarts,
        "disruptions": 0,
    }


def test_the_servers_report_which_ranks_contributed(running):
    """A contribution counts more than a probe that never ran."""
    cluster = running(SPEC)
    name = cluster.named(WORKER, 0)
    cluster.run(name, ready=False)
    cluster.pods[name]["status"]["conditions"][0]["lastTransitionTime"] = "2026-03-01T12:00:00Z"
    cluster.answer(step=3, contributed={0: 1})
    cluster.end(name, 1)
    cluster.settle()
    assert cluster.named(WORKER, 0) != name, "replaced without a wait"


@pytest.mark.parametrize(("step", "fails"), [(0, True), (7, False)])
def test_o4_a_rank_that_crashes_again_and_again_fails_a_job_that_has_not_trained(running, step, fails):
    """O4: six times in a row before the first update; a job that trains spends its budget instead."""
    cluster = running(SPEC | {"workers": {"replicas": 2, "maxRestarts": 100}})
    for _ in range(6):
        cluster.answer(step=step)
        cluster.end(cluster.named(WORKER, 1), 1, "ValueError: not today")
        cluster.settle()
        cluster.tick(61)
        cluster.answer(step=step)
        cluster.settle()
        if cluster.status["phase"] != "Failed":
            cluster.run_all()
    assert (cluster.status["phase"] == "Failed") is fails
    if fails:
        assert cluster.condition("Failed")["reason"] == "CrashLoop"
        assert "not today" in cluster.condition("Failed")["message"]


def refused(reason: str) -> dict:
    """Returns the status of a pod that its node did not admit, or lost before a container started."""
    return {"phase": "Failed", "reason": reason, "message": "no room"}


def disrupted(reason: str) -> dict:
    condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": "higher priority"}
    return {"phase": "Failed", "conditions": [condition]}


def init_failed() -> dict:
    ended = {"exitCode": 3, "reason": "Error", "message": "no such bucket"}
    return {
        "phase": "Failed",
        "initContainerStatuses": [{"name": "download", "state": {"terminated": ended}}],
        "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
    }


KILLERS = {
    "UnexpectedAdmissionError": lambda: refused("UnexpectedAdmissionError"),
    "OutOfcpu": lambda: refused("OutOfcpu"),
    "NodeAffinity": lambda: refused("NodeAffinity"),
    "Evicted": lambda: refused("Evicted"),
    "NodeShutdown": lambda: refused("NodeShutdown"),
    "preempted": lambda: disrupted("PreemptionByScheduler"),
    "drained": lambda: disrupted("EvictionByEvictionAPI"),
    "init container": init_failed,
    "force-deleted": lambda: None,
    "lost container": lambda: {
        "phase": "Failed",
        "containerStatuses": [
            {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "ContainerStatusUnknown"}}}
        ],
    },
}


def storm(cluster, slot, status, seconds: int) -> list[float]:
    """Let every pod of a slot die as soon as it exists. Returns the times of the pods that were created."""
    created, known, began = [], set(cluster.pods), cluster.now
    for _ in range(2 * seconds):
        for name in [name for name in cluster.living() if f"-{slot}-" in name]:
            if status is None:
                del cluster.pods[name]
            else:
                cluster.pods[name]["status"] = status
        cluster.settle()
        created += [(cluster.now - began).total_seconds() for name in cluster.pods if name not in known]
        known |= set(cluster.pods)
        if "Failed" in cluster.status.get("phase", ""):
            break
        cluster.tick(0.5)
    return created


SLOTS = [("ps-0", 0), ("ps-0", 1), ("worker-0", 0)]
# The planner finds what ended a pod in the same way in each slot. So each killer has one, and one of each kind all.
STORMS = {(killer, *SLOTS[number % 3]) for number, killer in enumerate(KILLERS)}
STORMS |= {(killer, *slot) for killer in ("OutOfcpu", "preempted", "init container", "force-deleted") for slot in SLOTS}


@pytest.mark.parametrize(("killer", "slot", "standbys"), sorted(STORMS))
def test_no_cause_of_death_makes_pods_without_limit(make_cluster, killer: str, slot: str, standbys: int) -> None:
    """O4: from the third death in a row on, a slot gets at most one pod a second, and the waits grow."""
    servers = {"replicas": 1, "standbys": standbys}
    cluster = make_cluster({**SPEC, "parameterServers": servers})
    cluster.settle()
    created = storm(cluster, slot, KILLERS[killer](), 60)
    assert len(created) <= 3 + 6 * (1 + (standbys and slot == "ps-0"))
    if not standbys:
        assert all(later - earlier >= 1 for earlier, later in itertools.pairwise(created[2:]))


@pytest.mark.parametrize(
    ("killer", "slot"),
    [
        ("UnexpectedAdmissionError", "ps-0"),
        ("OutOfcpu", "worker-0"),
        ("preempted", "ps-0"),
        ("force-deleted", "worker-0"),
    ],
)
def test_a_slot_whose_pods_never_start_counts_towards_the_deadline(running, killer: str, slot: str) -> None:
    policy = {"pendingDeadlineSeconds": 120}
    cluster = running({**SPEC, "workers": {"replicas": 1}, "runPolicy": policy})
    storm(cluster, slot, KILLERS[killer](), 60)
    ready = cluster.condition("PodsReady")
    assert ready["reason"] == "NeverStarted"
    assert "pods in a row ended before they started, the last with" in ready["message"]
    assert cluster.status["phase"] != "Failed"
    storm(cluster, slot, KILLERS[killer](), 70)
    failed = cluster.condition("Failed")
    assert failed["reason"] == "NeverStarted"
    assert "within spec.runPolicy.pendingDeadlineSeconds (120 s)" in failed["message"]


def test_an_init_container_that_fails_is_charged_and_ends_the_job_with_its_name(make_cluster) -> None:
    cluster = make_cluster(SPEC)
    cluster.settle()
    created = storm(cluster, "worker-0", init_failed(), 60)
    assert len(created) == 5
    failed = cluster.condition("Failed")
    assert failed["reason"] == "CrashLoop"
    assert "the init container download failed with exit code 3: no such bucket" in failed["message"]


@pytest.mark.parametrize("role", [WORKER, SERVER])
def test_pods_that_work_for_an_instant_make_no_pods_without_limit(running, role: str) -> None:
    """O4: each pod is ready, and a worker has contributed, when it is evicted."""
    cluster = running(SPEC)
    created = [cluster.now]
    for _ in range(80):
        name = cluster.named(role, 0)
        if cluster.pods[name]["status"].get("phase") != "Failed":
            cluster.run(name)
            cluster.settle()
            cluster.pods[name]["status"] = disrupted("PreemptionByScheduler")
        before = set(cluster.pods)
        cluster.settle()
        created += [cluster.now for name in set(cluster.pods) - before]
        cluster.tick(0.25)
    gaps = [(later - earlier).total_seconds() for earlier, later in itertools.pairwise(created)]
    assert all(gap >= 1 for gap in gaps[3:])
    assert len(created) > 4


def test_two_preemptions_in_a_row_cost_no_time_and_work_ends_the_row(running) -> None:
    cluster = running(SPEC)
    for _ in range(2):
        name = cluster.named(WORKER, 0)
        cluster.pods[name]["status"] = disrupted("PreemptionByScheduler")
        cluster.settle()
        assert cluster.named(WORKER, 0) != name
    cluster.run_all()
    cluster.tick(2)
    cluster.run_all()
    cluster.settle()
    assert not cluster.status.get("backoff")
