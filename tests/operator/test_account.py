"""The account of worker seconds in the status of a job survives pods and operators, and counts nothing twice."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_operator.bus import LeadChanged, Progressed
from backstay_operator.rights import JOBS, PODS
from backstay_spec.goodput import MEASURED, SecondsReport
from backstay_spec.observed import Progress

from .fake_pods import KEY, Json, MakeJob, crash, names, of_role, run_all, status


def test_the_account_of_worker_seconds_survives_pods_and_operators(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """O5: the second operator continues from the status; what a dead worker had measured is not lost."""
    kube.put(JOBS, "team", make_job(workers={"replicas": 2}))
    operator = operator_on(kube)
    operator.settle()

    def start(pod: Json) -> None:
        began = operator.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change(PODS, "team", pod["metadata"]["name"], {"status": {"phase": "Running", "startTime": began}})

    def receive(**seconds: tuple[int, float]) -> None:
        at, applied = operator.now().timestamp(), MEASURED.index("applied")
        reports = {
            (rank, 1): SecondsReport(at, tuple(spent * (i == applied) for i in range(len(MEASURED))))
            for rank, spent in seconds.values()
        }
        operator.bus.send(Progressed(KEY, Progress(operator.now(), reached=frozenset({0}), worker_seconds=reports)))

    assert "workerSeconds" not in status(kube), "nothing is paid yet"
    run_all(kube)
    for pod in of_role(kube, "worker"):
        start(pod)
    operator.settle()
    operator.seconds += 20
    receive(first=(0, 20.0), second=(1, 20.0))
    operator.settle()
    assert (status(kube)["goodput"], status(kube)["workerSeconds"]) == (1.0, {"applied": 40.0})
    killed, other = of_role(kube, "worker")
    kube.remove(PODS, "team", killed["metadata"]["name"])
    died = operator.seconds
    operator.settle()
    operator.seconds = died + 20
    receive(second=(1, 40.0))
    operator.reconcile()
    assert status(kube)["workerSeconds"] == {"applied": 60.0, "missing": 20.0}
    assert status(kube)["goodput"] == 0.75

    after = operator_on(kube)
    after.seconds = died + 40
    after.show()
    after.reconcile()
    after.seconds += 11
    operator = after
    receive(second=(1, 71.0))
    after.reconcile()
    assert status(kube)["workerSeconds"] == {"applied": 91.0, "missing": 51.0}
    assert other["metadata"]["name"] in names(kube)


def test_an_operator_that_acts_again_counts_no_second_twice(kube: Any, operator_on: Any, make_job: MakeJob) -> None:
    """A worker died and was replaced while another operator acted."""
    kube.put(JOBS, "team", make_job(workers={"replicas": 1}))
    first = operator_on(kube)
    first.settle()
    start = first.seconds

    def at(operator: Any, seconds: float) -> None:
        operator.seconds = start + seconds
        operator.show()
        operator.reconcile()

    def run(operator: Any) -> None:
        run_all(kube)
        (pod,) = of_role(kube, "worker")
        began = operator.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        kube.change(PODS, "team", pod["metadata"]["name"], {"status": {"phase": "Running", "startTime": began}})

    def receive(operator: Any, incarnation: int, applied: float) -> None:
        seconds = tuple(applied * (part == "applied") for part in MEASURED)
        report = {(0, incarnation): SecondsReport(operator.now().timestamp(), seconds)}
        operator.bus.send(Progressed(KEY, Progress(operator.now(), reached=frozenset({0}), worker_seconds=report)))

    run(first)
    at(first, 0)
    first.seconds = start + 300
    receive(first, 1, 300.0)
    at(first, 300)
    second = operator_on(kube)
    at(second, 300)
    kube.remove(PODS, "team", of_role(kube, "worker")[0]["metadata"]["name"])
    at(second, 301)
    run(second)
    at(second, 302)
    second.seconds = start + 350
    receive(second, 2, 48.0)
    at(second, 350)
    first.bus.send(LeadChanged(True))
    at(first, 400)
    first.seconds = start + 411
    receive(first, 2, 109.0)
    at(first, 411)
    assert sum(status(kube)["workerSeconds"].values()) == pytest.approx(411, abs=2)
    assert status(kube)["phase"] == "Running"


def test_a_new_operator_keeps_the_account_of_a_job_that_has_ended(
    kube: Any, operator_on: Any, make_job: MakeJob
) -> None:
    """The pod of the job's worker still exists, without a termination message, and no server reports any more."""
    kube.put(JOBS, "team", make_job(workers={"replicas": 1}))
    operator_on(kube).settle()
    run_all(kube)
    (pod,) = of_role(kube, "worker")
    kube.change(PODS, "team", pod["metadata"]["name"], {"status": {"startTime": "2026-01-01T00:00:00Z"}})
    over = {"type": "Failed", "status": "True", "reason": "Crashed", "lastTransitionTime": "2026-01-01T00:01:00Z"}
    account = {
        "goodput": 0.9836,
        "workerSeconds": {"applied": 60.0, "missing": 1.0},
        "workerSecondsUntil": "2026-01-01T00:01:01.000Z",
    }
    kube.change(JOBS, "team", "digits", {"status": {"phase": "Failed", "conditions": [over], **account}})
    crash(kube, pod["metadata"]["name"])
    after = operator_on(kube)
    after.seconds = 100.0
    for _ in range(3):
        after.show()
        after.reconcile()
        after.seconds += 20
    assert status(kube)["phase"] == "Failed"
    assert {name: status(kube)[name] for name in account} == account
    assert pod["metadata"]["name"] in names(kube)
