"""The table of phases has those that follow each other in a job, and no others.

`Cluster.write` compares each status of the planner's tests with the table. This module holds that the table has nothing
else: it tries each event in each phase.
"""

from __future__ import annotations

import json
from itertools import product
from typing import Any

from backstay_spec import contract
from backstay_spec.plan import refuse

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER


def living(cluster: Any, role: str) -> str | None:
    """Returns the name of the slot's living pod, or None if there is none."""
    return next((name for name in sorted(cluster.living()) if f"-{role}-0-" in name), None)


# Events between two plans of the operator.


def nothing(cluster: Any) -> None:
    pass


def begin(cluster: Any) -> None:
    """The container of the first server runs, and is not ready."""
    if (name := living(cluster, "ps")) is not None:
        cluster.run(name, ready=False)


def start(cluster: Any) -> None:
    cluster.run_all()


def lose(cluster: Any) -> None:
    """The server ends."""
    if (name := living(cluster, "ps")) is not None:
        cluster.end(name)


def lose_all(cluster: Any) -> None:
    """All pods are deleted, and are gone."""
    for name in cluster.living():
        cluster.delete(name)
    cluster.bury()


def complete(cluster: Any) -> None:
    if living(cluster, "ps") is not None:
        cluster.complete()


def fail(cluster: Any) -> None:
    """The server reports the failure of the job."""
    if (name := living(cluster, "ps")) is not None:
        cluster.end(name, 1, json.dumps({"result": "Failed", "reason": "ValueError", "message": "no rows"}))


def suspend(cluster: Any) -> None:
    cluster.edit(runPolicy={"suspend": True})


def resume(cluster: Any) -> None:
    cluster.edit(runPolicy={"suspend": False})


def become_invalid(cluster: Any) -> None:
    """The spec breaks a rule that the API server did not enforce."""
    job = cluster.job
    cluster.apply(refuse(job.metadata, job.status, "spec.image is missing", cluster.now, tuple(cluster.pods.values())))


def resume_without_services(cluster: Any) -> None:
    """The first plan cannot create pods, so that those of before the suspension stay the newest."""
    cluster.services.clear()
    resume(cluster)


EVENTS = (
    nothing,
    begin,
    start,
    lose,
    lose_all,
    complete,
    fail,
    suspend,
    resume,
    become_invalid,
    resume_without_services,
)


def later(cluster: Any) -> Any:
    """Returns the cluster some time after an event. Pods that are deleted are gone, and no other pod starts."""
    for _ in range(4):  # of a suspended job, the servers are deleted when the workers are gone
        cluster.settle()
        cluster.bury()
        cluster.tick(30)
    return cluster


def test_the_phases_of_the_table_follow_each_other(running, make_cluster):
    def after(*events: Any) -> Any:
        def make() -> Any:
            cluster = make_cluster()
            cluster.settle()
            cluster.tick(5)
            for event in events:
                event(cluster)
                cluster.settle()
            return cluster

        return make

    def updated() -> Any:
        cluster = running()
        cluster.answer(step=1)
        cluster.settle()
        return cluster

    def trained() -> Any:
        cluster = running()
        cluster.train()
        cluster.settle()
        return cluster

    def suspended(how: Any) -> Any:
        def make() -> Any:
            cluster = how()
            suspend(cluster)
            return later(cluster)

        return make

    phases = {
        "Pending": (after(),),
        "Starting": (after(begin),),
        "Running": (running, updated, trained, after(start, suspend)),
        "Suspended": (suspended(running), suspended(trained)),
        "Succeeded": (after(start, complete),),
        "Failed": (after(start, fail),),
    }
    found = set()
    for event in (nothing, suspend, become_invalid):
        cluster = make_cluster()
        event(cluster)
        found |= later(cluster).followed
    for phase, makers in phases.items():
        for make, event in product(makers, EVENTS):
            cluster = make()
            assert cluster.status["phase"] == phase
            event(cluster)
            found |= later(cluster).followed
    assert found == {(phase, after) for phase, after in make_cluster.FOLLOWS if after != "final"}
