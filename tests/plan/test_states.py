"""The table of states has the phases that follow each other in a job, and no others."""

from __future__ import annotations

from typing import Any

from backstay_spec import contract, states


def begun(cluster: Any) -> Any:
    """Returns the cluster, in which the container of the first server runs, and is not ready."""
    cluster.settle()
    cluster.tick(5)
    cluster.run(cluster.named(contract.ROLE_SERVER, 0), ready=False)
    cluster.settle()
    return cluster


def suspend(cluster: Any) -> None:
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(4):  # the workers are deleted first, and the servers when those are gone
        cluster.settle()
        cluster.bury()
    cluster.settle()


def refuse(cluster: Any) -> None:
    """A worker's image has no valid name, which ends the job."""
    name = cluster.named(contract.ROLE_WORKER, 0)
    cluster.pods[name]["status"] = {"phase": "Pending"}
    cluster.wait(name, "InvalidImageName", "couldn't parse image name")
    cluster.settle()


def lose(cluster: Any) -> None:
    """The server ends, of a running job after an update, and its replacement does not start for some time."""
    if cluster.status["phase"] == "Running":
        cluster.answer(step=1)
        cluster.settle()
    cluster.end(cluster.named(contract.ROLE_SERVER, 0))
    for _ in range(8):
        cluster.settle()
        cluster.tick(5)
    cluster.settle()


def resume(cluster: Any) -> None:
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()


def start(cluster: Any) -> None:
    cluster.run_all()
    cluster.settle()


def complete(cluster: Any) -> None:
    cluster.complete()
    for _ in range(4):
        cluster.settle()
        cluster.tick(30)
    cluster.settle()


def test_the_phases_of_the_table_follow_each_other(running, make_cluster):
    def settled() -> Any:
        cluster = make_cluster()
        cluster.settle()
        return cluster

    def suspended() -> Any:
        cluster = running()
        suspend(cluster)
        return cluster

    jobs = {
        "Pending": (settled, (begun, suspend, refuse)),
        "Starting": (lambda: begun(make_cluster()), (lose, start, suspend, refuse)),
        "Running": (running, (lose, complete, suspend, refuse)),
        "Suspended": (suspended, (resume,)),
    }
    found = set()
    for phase, (make, events) in jobs.items():
        for happens in events:
            cluster = make()
            assert cluster.status["phase"] == phase
            happens(cluster)
            found.add((phase, cluster.status["phase"]))
    follows = {
        (phase, after) for phase, row in states.JOBS.items() for after in row.next.split(", ") if after != "final"
    }
    assert found == follows
