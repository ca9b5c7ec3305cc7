"""Ranks of several pods, of which only some have room, do not keep each other from training (O9)."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.actions import CreatePod

from .conftest import Cluster

WORKER = contract.ROLE_WORKER
REASON = ("Forbidden", "exceeded quota: gpus")


class Quota:
    """Room for some pods of workers, of one job or of several. A pod needs it until it is gone."""

    def __init__(self, room):
        self.room, self.jobs = room, []

    def is_full(self):
        return sum(is_worker(pod) for job in self.jobs for pod in job.pods.values()) >= self.room


def is_worker(manifest):
    return manifest["metadata"].get("labels", {}).get(contract.LABEL_ROLE) == WORKER


def limited(quota, order, ranks, pods):
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
    job = Limited({**spec, "update": {"mode": "Async"}})
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
    ranks = [pod["metadata"]["labels"][contract.LABEL_INDEX] for pod in job.pods.values() if is_worker(pod)]
    counts = [ranks.count(rank) for rank in set(ranks)]
    return counts.count(pods), sum(count for count in counts if count < pods)


@given(st.integers(0, 9), st.integers(1, 4), st.integers(2, 3), st.randoms(use_true_random=False))
def test_as_many_ranks_are_complete_as_have_room(room, ranks, pods, order):
    job = limited(Quota(room), order, ranks, pods)
    passes([job], 150)
    assert complete(job, pods)[0] == min(ranks, room // pods)
    assert max(job.status["incarnations"].values()) <= 2, "no rank takes a part of the room again and again"
    assert not job.deaths
    assert job.status["roles"]["Worker"]["restarts"] == 0


def test_of_two_jobs_that_each_hold_half_of_a_rank_one_gets_it():
    """The planner of a job does not see what other jobs need, so each gives its half back after the time to start."""
    quota, order = Quota(4), random.Random(1)
    jobs = [limited(quota, order, 1, 2) for _ in range(2)]
    passes(jobs, 60)
    for job in jobs:
        quota.room += 1
        job.answer(world=1, step=9)
        job.edit(workers={"replicas": 2})
        job.settle()
    assert [complete(job, 2) for job in jobs] == [(1, 1), (1, 1)]
    passes(jobs, 540)
    assert [complete(job, 2) for job in jobs] == [(1, 1), (1, 1)]
    jobs[0].tick(45)  # the jobs were not scaled at the same time
    passes(jobs, 180)
    assert sorted(complete(job, 2)[0] for job in jobs) == [1, 2]
    assert not any(job.deaths for job in jobs)
    assert any(reason == "GivenBack" for job in jobs for reason, _ in job.events)


@pytest.mark.parametrize(
    ("lacking", "expected"), [([2], [[2], [2], [2], [], [2]]), ([1, 2], [[1, 2], [1], [1, 2], [2], [1, 2]])]
)
def test_a_rank_whose_other_pod_finds_no_node_gives_its_node_back(running, lacking, expected):
    """The lowest one keeps its node, until the time to start has passed."""
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 3, "podsPerRank": 2}}
    cluster = running({**spec, "update": {"mode": "Async"}})
    cluster.answer(world=3, step=9)

    def place():
        """Member 0 of a new rank finds a node, and member 1 does not."""
        for name in cluster.living():
            labels, spec = cluster.pods[name]["metadata"]["labels"], cluster.pods[name]["spec"]
            if labels[contract.LABEL_INCARNATION] != "1" and labels[contract.LABEL_MEMBER] == "0":
                spec["nodeName"] = "n1"
            elif labels[contract.LABEL_INCARNATION] != "1":
                cluster.gate(name, gated=False)

    for rank in lacking:
        cluster.delete(cluster.named(WORKER, rank))
    cluster.settle()
    place()
    found = []
    for seconds in (145, 10, 440, 10, 40):
        cluster.answer(world=3, step=9)
        cluster.settle()
        cluster.bury()
        cluster.tick(seconds)
        cluster.answer(world=3, step=9)
        cluster.settle()
        place()
        alive = {int(cluster.pods[n]["metadata"]["labels"][contract.LABEL_INDEX]) for n in cluster.living()}
        found.append([rank for rank in lacking if rank in alive])
    assert cluster.status["phase"] == "Running"
    assert found == expected
