"""Ranks of several pods, of which only some have room, do not keep each other from training (O9)."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.actions import CreatePod
from backstay_spec.planner.pods import is_deleting

from .conftest import Cluster

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
REASON = ("Forbidden", "exceeded quota: gpus")


class Quota:
    """Room for some pods of workers, of one job or of several. A pod needs it until it is gone."""

    def __init__(self, room):
        self.room, self.jobs = room, []

    def is_full(self):
        return sum(is_worker(pod) for job in self.jobs for pod in job.pods.values()) >= self.room


def is_worker(manifest):
    return manifest["metadata"].get("labels", {}).get(contract.LABEL_ROLE) == WORKER


def rank_of(manifest):
    return manifest["metadata"]["labels"][contract.LABEL_INDEX]


def limited(quota, order, ranks, pods, name="mnist", pending=600, **update):
    """Returns a job that trains with one rank, and whose creates of one stage come in any order."""

    class Limited(Cluster):
        def refuses(self, manifest):
            self.refuse = {manifest["metadata"]["name"]: REASON} if is_worker(manifest) and quota.is_full() else {}
            return super().refuses(manifest)

        def apply(self, todo):
            groups = itertools.groupby(todo.actions, lambda action: (type(action), getattr(action, "stage", 0)))
            actions = []
            for (kind, _), group in groups:
                found = list(group)
                actions += order.sample(found, len(found)) if kind is CreatePod else found
            super().apply(replace(todo, actions=tuple(actions)))

    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": ranks, "podsPerRank": pods}}
    job = Limited(
        {**spec, "runPolicy": {"pendingDeadlineSeconds": pending}, "update": update or {"mode": "Async"}}, name
    )
    quota.jobs.append(job)
    return job


def passes(jobs, seconds):
    for _ in range(seconds // 6):
        for job in jobs:
            job.settle()
            job.run_all()
            job.bury()
            job.tick(6)


def complete(job, pods):
    """Returns how many ranks have all their pods, and how many pods are of other ranks."""
    ranks = [rank_of(pod) for pod in job.pods.values() if is_worker(pod)]
    counts = [ranks.count(rank) for rank in set(ranks)]
    return counts.count(pods), sum(count for count in counts if count < pods)


@settings(max_examples=25)  # of 80 rooms and shapes
@given(st.integers(0, 9), st.integers(1, 4), st.integers(2, 3), st.randoms(use_true_random=False))
def test_as_many_ranks_are_complete_as_have_room(room, ranks, pods, order):
    job = limited(Quota(room), order, ranks, pods)
    passes([job], 150)
    assert complete(job, pods)[0] == min(ranks, room // pods)
    assert max(job.status["incarnations"].values()) <= 2, "no rank takes a part of the room again and again"
    assert not job.deaths
    assert job.status["roles"]["Worker"]["restarts"] == 0


@pytest.mark.parametrize("deadline", [60, 600])
@pytest.mark.parametrize("seed", range(4))
def test_of_two_jobs_that_each_hold_half_of_a_rank_one_trains_before_its_deadline(deadline, seed):
    """The planner of a job does not see what other jobs need. So each gives its half back, at another time."""
    quota, order = Quota(0), random.Random(seed)
    jobs = [limited(quota, order, 1, 2, f"{name}{seed}", deadline) for name in ("one", "two")]
    for job in jobs:
        quota.room += 1
        job.settle()
    assert [complete(job, 2) for job in jobs] == [(0, 1), (0, 1)]
    passes(jobs, deadline * 9 // 10)
    assert sorted(complete(job, 2) for job in jobs) == [(0, 0), (1, 0)]
    assert {job.condition("PodsCreated")["reason"] for job in jobs} == {"AllCreated", "PodRefused"}
    assert not any(job.deaths for job in jobs)
    assert not any(job.status["phase"] == "Failed" for job in jobs)
    assert any(reason == "GivenBack" for job in jobs for reason, _ in job.events)
    quota.room = 4
    passes(jobs, 36)
    assert [complete(job, 2) for job in jobs] == [(1, 0), (1, 0)]
    assert all(job.condition("PodsCreated")["status"] == "True" for job in jobs)


def test_while_a_rank_leaves_its_room_to_others_a_refused_pod_is_not_created():
    quota = Quota(1)
    job = limited(quota, random.Random(0), 1, 2)
    for _ in range(70):
        job.settle(40)
        job.bury()
        assert job.condition("PodsCreated")["reason"] == "PodRefused"
        if not any(map(is_worker, job.pods.values())):
            break
        job.tick(5)
    assert job.condition("PodsReady")["reason"] == "GivenBack"
    assert "created again 30 s later" in job.condition("PodsReady")["message"]
    quota.room = 2
    job.tick(31)
    job.settle(40)
    assert job.condition("PodsCreated")["status"] == "True"


def test_the_end_of_a_job_completes_the_condition_of_a_pod_that_was_refused(make_cluster):
    workers = {"replicas": 2, "podsPerRank": 2}
    job = make_cluster({"parameterServers": {"replicas": 1}, "workers": workers, "update": {"backups": 1}})
    job.refuse["mnist-worker-1"] = REASON
    job.settle(40)
    job.run_all()
    job.answer(world=2, step=5, contributed={0: 1})
    job.settle(40)
    assert job.condition("PodsCreated")["reason"] == "PodRefused"
    job.refuse.clear()
    job.tick(6)
    job.apply(job.plan())  # the pods are created
    job.answer(world=2, step=9, contributed={0: 1}, done=True)
    for name in job.living():
        job.end(name, 0, message=json.dumps({"result": "Trained", "step": 9}))
    job.settle(40)
    assert job.status["phase"] == "Succeeded"
    assert job.condition("PodsCreated")["status"] == "True"


def test_the_pod_with_the_same_index_replaces_a_pod_of_a_rank(running):
    cluster = running({"workers": {"replicas": 2, "podsPerRank": 2}})
    cluster.answer(world=2, step=5, contributed={0: 1, 1: 1})
    cluster.settle()
    names = [name for name in cluster.living() if "-worker-1-1-1-" in name]
    cluster.end(*names, 139)
    cluster.settle()
    (said,) = (text for _, text in cluster.events if f"(pod {names[0]}) died" in text)
    assert f"replaced by {names[0].replace('-worker-1-1-1-', '-worker-1-1-2-')}" in said


@pytest.mark.parametrize("lacking", [[2], [1, 2]])
def test_a_rank_whose_other_pod_finds_no_node_gives_its_node_back(running, lacking):
    """The lowest one keeps its node for longer, so that a node that is added completes it."""
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 3, "podsPerRank": 2}}
    cluster = running({**spec, "update": {"mode": "Async"}})
    cluster.answer(world=3, step=9)
    for rank in lacking:
        cluster.delete(cluster.named(WORKER, rank))
    cluster.settle()
    gone = {}
    for second in range(0, 400, 5):
        for name in cluster.living():
            labels = cluster.pods[name]["metadata"]["labels"]
            if labels[contract.LABEL_INCARNATION] != "1" and labels[contract.LABEL_MEMBER] == "0":
                cluster.pods[name]["spec"]["nodeName"] = "n1"
            elif labels[contract.LABEL_INCARNATION] != "1":
                cluster.gate(name, gated=False)
        cluster.answer(world=3, step=9)
        cluster.settle()
        cluster.bury()
        alive = {int(rank_of(cluster.pods[n])) for n in cluster.living()}
        gone |= {rank: second for rank in lacking if rank not in alive and rank not in gone}
        cluster.tick(5)
    assert cluster.status["phase"] == "Running"
    assert 150 < gone[lacking[0]] <= 300
    assert all(gone[rank] == 150 for rank in lacking[1:])


class Nodes(Cluster):
    """A cluster whose nodes have room for some pods of workers. The scheduler binds them in any order."""

    def schedule(self, room, order):
        bound = sum(is_worker(pod) and "nodeName" in pod["spec"] for pod in self.pods.values())
        waiting = [name for name in self.living() if is_worker(self.pods[name])]
        waiting = [name for name in waiting if "nodeName" not in self.pods[name]["spec"]]
        for number, name in enumerate(order.sample(waiting, len(waiting))):
            if bound + number < room:
                self.pods[name]["spec"]["nodeName"] = "n1"
                self.pods[name]["status"].pop("conditions", None)
            else:
                self.gate(name, gated=False)


def begins_again(job, until):
    """The job begins again, with other random numbers, until the condition holds."""
    while not until():
        job.manifest.pop("status", None)
        job.pods, job.memory = {}, type(job.memory)(job.uid)
        job.settle()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("room", "ranks", "pods", "update"), [(2, 3, 3, {"mode": "Async"}), (3, 4, 2, {"mode": "Sync", "backups": 2})]
)
@pytest.mark.parametrize(("lacks", "died"), [("quota", False), ("nodes", False), ("nodes", True)])
def test_a_job_with_room_for_too_few_ranks_ends(lacks, died, room, ranks, pods, update, seed):
    """The time to start continues while ranks give their parts back and take others, even after preemptions."""
    order, spec = random.Random(seed), {"parameterServers": {"replicas": 1}, "update": update}
    if lacks == "quota":
        job = limited(Quota(room), order, ranks, pods, **update)
    else:
        job = Nodes({**spec, "workers": {"replicas": ranks, "podsPerRank": pods}})
    seconds = 0
    while "completionTime" not in job.status and seconds < 1200:
        job.settle()
        if lacks == "nodes":
            job.schedule(room, order)
        for name in job.living():
            if not is_worker(job.pods[name]):
                job.run(name)
            elif lacks == "quota":
                job.run(name, ready=False)
        if died and seconds == 6:
            for rank in range(ranks):
                job.disrupt(job.named(WORKER, rank), "DeletionByTaintManager")
        job.bury()
        job.tick(6)
        seconds += 6
    assert job.condition("Failed")["message"].startswith("worker ")
    assert 600 <= seconds <= 660


def test_a_rank_that_has_found_room_has_its_whole_time_to_start():
    """The pods may pull an image for minutes."""
    quota = Quota(2)
    job = limited(quota, random.Random(0), 2, 2, mode="Sync")
    begins_again(job, until=lambda: job.status.get("backoff"))  # each rank has got one pod
    for seconds in range(0, 1140, 6):
        quota.room = 2 if seconds < 540 else 4
        for name in job.living():
            if not is_worker(job.pods[name]) or rank_of(job.pods[name]) == "0":
                job.run(name)
            else:
                job.pods[name]["spec"]["nodeName"] = "n1"
        job.settle()
        job.bury()
        assert job.status["phase"] != "Failed", (seconds, job.condition("Failed"))
        job.tick(6)
    job.tick(60)
    job.settle()
    assert job.condition("Failed")["reason"] == "NotStarted"


@pytest.mark.parametrize("reason", ["Conflict", "InternalError", "Forbidden"])
def test_a_refusal_that_lasts_for_seconds_deletes_no_pod(make_cluster, reason):
    """A ResourceQuota that many creates change, and a webhook that does not answer."""
    job = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 4, "podsPerRank": 2}})
    job.refuse = {f"mnist-worker-{rank}-1-": (reason, "the object has been modified") for rank in range(4)}
    job.settle()
    job.refuse = {}
    job.tick(5)
    job.settle()
    assert len(job.living()) == 9
    assert set(job.status["incarnations"].values()) == {1}


def test_pods_that_die_before_they_start_after_a_part_was_given_back_end_the_job():
    quota, order = Quota(2), random.Random(0)
    job = limited(quota, order, 2, 2, mode="Sync")
    begins_again(job, until=lambda: job.status.get("backoff"))  # each rank has got one pod
    quota.room = 99
    seconds = 0
    while "completionTime" not in job.status and seconds < 1200:
        for name in job.living():
            if is_worker(job.pods[name]) and rank_of(job.pods[name]) == "1":
                job.pods[name]["status"] = {
                    "phase": "Failed",
                    "reason": "UnexpectedAdmissionError",
                    "message": "no gpu",
                }
            else:
                job.run(name)
        job.settle(40)
        job.bury()
        job.tick(10)
        job.settle(40)
        seconds += 10
    assert job.condition("Failed")["reason"] == "NeverStarted"
    assert seconds <= 660


def test_a_deletion_that_fails_is_repeated():
    quota, order = Quota(2), random.Random(0)
    job = limited(quota, order, 2, 2, mode="Sync")
    begins_again(job, until=lambda: any(map(is_deleting, job.pods.values())))
    held = [pod for pod in job.pods.values() if is_deleting(pod)]
    for pod in held:
        del pod["metadata"]["deletionTimestamp"]
    job.settle()
    assert all(map(is_deleting, held))


def test_a_rank_that_was_held_back_behind_another_one_gives_its_part_back():
    """The refusal then names the pod for which it waits, and the quota only in its text."""
    quota, order = Quota(5), random.Random(0)
    job = limited(quota, order, 3, 2, mode="Sync", backups=1)
    passes([job], 36)
    job.answer(world=3, step=9, contributed={0: 1, 1: 1})
    job.settle()
    assert complete(job, 2) == (2, 1)
    job.tick(6)  # the pod that was refused is due again
    for name in job.living():
        if rank_of(job.pods[name]) == "1" and is_worker(job.pods[name]):
            job.disrupt(name, "DeletionByTaintManager")
    job.settle()
    job.bury()
    quota.room = 4  # another job takes one place
    for step in range(10, 20):
        job.answer(world=3, step=step, contributed={0: 1})
        job.settle()
        job.run_all()
        job.bury()
        job.tick(6)
    assert complete(job, 2) == (2, 0)


@pytest.mark.parametrize("is_running", [True, False])
def test_preemptions_of_ranks_without_room_do_not_begin_the_time_again(is_running):
    """The containers of the pods that have nodes wait for the others of their rank."""
    spec = {"parameterServers": {"replicas": 1}, "update": {"mode": "Async"}}
    job, order = Nodes({**spec, "workers": {"replicas": 3, "podsPerRank": 3}}), random.Random(1)
    seconds = 0
    while "completionTime" not in job.status and seconds < 1200:
        job.settle(40)
        job.schedule(2, order)
        for name in job.living():
            if not is_worker(job.pods[name]):
                job.run(name)
            elif "nodeName" in job.pods[name]["spec"] and is_running:
                job.run(name, ready=False)
        if seconds and seconds % 300 == 0:
            for name in job.living():
                if is_worker(job.pods[name]) and "nodeName" in job.pods[name]["spec"]:
                    job.disrupt(name, "PreemptionByScheduler")
        job.settle(40)
        job.bury()
        job.tick(6)
        seconds += 6
    assert job.condition("Failed")["message"].startswith("worker ")
    assert 600 <= seconds <= 660


def in_part(job, rank):
    """Member 0 of the rank has a node, and member 1 finds none."""
    for name in job.living():
        if is_worker(job.pods[name]) and rank_of(job.pods[name]) == str(rank):
            if job.pods[name]["metadata"]["labels"][contract.LABEL_MEMBER] == "0":
                job.pods[name]["spec"]["nodeName"] = "n1"
            else:
                job.gate(name, gated=False)


@pytest.mark.parametrize("deaths", [0, 3])
def test_a_rank_gives_its_node_back_after_deaths_in_a_row_too(make_cluster, deaths):
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2, "podsPerRank": 2}}
    job = make_cluster({**spec, "update": {"mode": "Async"}})
    for step in range(1, 220):
        job.settle(40)
        in_part(job, 1)
        for name in job.living():
            is_short = is_worker(job.pods[name]) and rank_of(job.pods[name]) == "1"
            if not is_short:
                job.run(name)
            elif step in range(10, 10 * (deaths + 1), 10) and "nodeName" in job.pods[name]["spec"]:
                job.disrupt(name, "PreemptionByScheduler")
        job.answer(world=2, step=step, contributed={0: 1})
        job.settle(40)
        job.bury()
        job.tick(6)
    assert job.status["incarnations"]["worker-1"] > deaths + 1
    assert job.status["phase"] == "Running"


def test_the_time_in_a_queue_does_not_count_for_a_rank_that_gave_its_node_back(make_cluster):
    """When the queue admits it, an autoscaler adds the nodes."""
    job = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2, "podsPerRank": 2}})
    for _ in range(34):  # rank 0 keeps its node, so rank 1 gives its own back after a quarter of the time
        job.settle(40)
        job.bury()
        job.run(job.named(SERVER, 0))
        in_part(job, 0)
        if job.status["incarnations"]["worker-1"] == 1:
            in_part(job, 1)
        job.tick(6)
    assert job.status["incarnations"]["worker-1"] == 2
    mine = [name for name in job.living() if is_worker(job.pods[name])]
    for name in mine:
        if rank_of(job.pods[name]) == "0":
            job.pods[name]["spec"]["nodeName"] = "n1"
            job.run(name)
        else:
            job.gate(name)
    job.settle(40)
    job.tick(3600)
    job.settle(40)
    in_part(job, 1)
    job.settle(40)
    assert job.status["phase"] != "Failed", job.condition("Failed")


@pytest.mark.parametrize("pods", [2, 3])
@pytest.mark.parametrize("obstacle", ["no node", "a full quota"])
@pytest.mark.parametrize("observed", [True, False])
def test_a_rank_that_loses_a_pod_after_hours_has_its_whole_time_to_start(pods, obstacle, observed):
    """The pod is not there any more. That it lacked room was found by its absence, since it was created."""
    quota = Quota(2 * pods)
    cluster = limited(quota, random.Random(0), 2, pods, mode="Sync")
    passes([cluster], 60)

    def trains(step):
        cluster.answer(world=2, step=step, contributed={0: 1, 1: 1}, beating={0: 1, 1: 1})

    for hour in range(3):
        trains(hour + 1)
        cluster.settle()
        cluster.tick(3600)
    trains(9)
    if not observed:
        cluster.restart_operator()
        trains(9)
    lost = max(name for name, pod in cluster.pods.items() if is_worker(pod) and rank_of(pod) == "1")
    cluster.vanish(lost)
    quota.room = 10 * pods if obstacle == "no node" else 2 * pods - 1
    for _ in range(50):
        cluster.settle()
        cluster.bury()
        for name, pod in cluster.pods.items():
            if pod["status"].get("phase", "Pending") == "Pending":
                cluster.gate(name, gated=False)
        trains(9)
        cluster.tick(6)
    assert cluster.status["phase"] != "Failed", cluster.condition("Failed")
    assert cluster.status["incarnations"]["worker-1"] > 1
