"""A queue admits the servers and the quorum of a job together, and each later pod in the place of a dead one (O9).

`Queue` is a model of Kueue 0.19, as its source code has it (pkg/controller/jobs/pod).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.actions import Action, CreatePod

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
NAME, COUNT = "kueue.x-k8s.io/pod-group-name", "kueue.x-k8s.io/pod-group-total-count"
ROLE, RETRIABLE = "kueue.x-k8s.io/role-hash", "kueue.x-k8s.io/retriable-in-group"
FINALIZER = "kueue.x-k8s.io/managed"
JOB = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "scheduling": {"queue": "gpus"}}
SIZE = 5


class Workload:
    """An object of Kueue, for one group or for one pod of no group."""

    def __init__(self, roles: dict[str, int]) -> None:
        self.roles, self.admitted, self.finished = roles, False, False

    @property
    def size(self) -> int:
        return sum(self.roles.values())


class Queue:
    """Kueue with one quota, in pods, for several jobs."""

    def __init__(self, quota: int, *jobs: Any) -> None:
        self.quota, self.jobs = quota, jobs
        self.workloads: dict[tuple[int, str], Workload] = {}
        self.excess: list[str] = []  # pods that Kueue deleted because their group was full

    def groups(self) -> Iterator[tuple[tuple[int, str], Any, dict[str, Any]]]:
        for number, job in enumerate(self.jobs):
            found: dict[str, dict[str, Any]] = {}
            for name, pod in job.pods.items():
                labels = pod["metadata"]["labels"]
                if "kueue.x-k8s.io/queue-name" in labels:
                    found.setdefault(labels.get(NAME, name), {})[name] = pod
            for key, pods in found.items():
                yield (number, key), job, pods

    def used(self) -> int:
        return sum(w.size for w in self.workloads.values() if w.admitted and not w.finished)

    def step(self) -> None:
        there = set()
        for key, job, pods in list(self.groups()):
            there.add(key)
            self._look_at(key, job, pods)
        for key in set(self.workloads) - there:
            self.workloads[key].finished = True

    def _look_at(self, key: tuple[int, str], job: Any, pods: dict[str, Any]) -> None:
        workload = self.workloads.get(key)
        notes = [pod["metadata"].get("annotations") or {} for pod in pods.values()]
        is_group = COUNT in notes[0]
        counted = [name for name, pod in pods.items() if _is_counted(pod)]
        if not is_group and any("deletionTimestamp" in pod["metadata"] for pod in pods.values()):
            _finalize(pods.values())
        if workload is None:
            total = int(notes[0].get(COUNT, "1"))
            assert {note.get(COUNT, "1") for note in notes} == {str(total)}, "Kueue refuses the group"
            _finalize(pod for name, pod in pods.items() if name not in counted)
            if len(counted) < total:
                return
            assert len(counted) == total, "too many pods at the start"
            roles: dict[str, int] = {}
            for name in counted:
                roles[role_of(pods[name])] = roles.get(role_of(pods[name]), 0) + 1
            workload = self.workloads[key] = Workload(roles)
        if all(pod["status"]["phase"] in ("Failed", "Succeeded") for pod in pods.values()):
            # `Finished` also needs that a pod is not retriable, which holds for all of ours.
            assert not is_group or {note[RETRIABLE] for note in notes} == {"false"}
            workload.finished = True
        if workload.finished:
            _finalize(pods.values())
            return
        for role, count in workload.roles.items():
            mine = sorted(
                (n for n in counted if role_of(pods[n]) == role), key=lambda n: (is_gated(pods[n]), age(pods[n]))
            )
            for name in mine[count:]:
                self.excess.append(name)
                job.vanish(name)
            replaced = [pod for n, pod in pods.items() if n not in counted and role_of(pod) == role]
            replaced = [pod for pod in sorted(replaced, key=age) if FINALIZER in pod["metadata"]["finalizers"]]
            _finalize(replaced[: max(0, len(replaced) + len(mine) - count)])
        if not workload.admitted and self.used() + workload.size <= self.quota:
            workload.admitted = True
        if workload.admitted:
            for name, pod in pods.items():
                if is_gated(pod) and name in job.pods and "deletionTimestamp" not in pod["metadata"]:
                    pod["spec"]["schedulingGates"] = []
                    pod["status"]["conditions"] = []
                    pod["spec"]["nodeName"] = "node-1"

    def preempt(self, number: int) -> None:
        """Kueue takes the room of a job's groups back, and deletes their pods."""
        for key, job, pods in list(self.groups()):
            if key[0] == number and key in self.workloads and self.workloads[key].admitted:
                self.workloads[key].admitted = False
                for name, pod in pods.items():
                    if not is_gated(pod) and pod["status"]["phase"] in ("Pending", "Running"):
                        job.delete(name)


def role_of(pod: Any) -> str:
    role: str = pod["metadata"]["annotations"].get(ROLE, "one")
    return role


def age(pod: Any) -> int:
    return int(pod["metadata"]["uid"][4:])


def _is_counted(pod: Any) -> bool:
    is_gone = "deletionTimestamp" in pod["metadata"] and "nodeName" not in pod["spec"]
    return pod["status"]["phase"] != "Failed" and not is_gone


def _finalize(pods: Iterable[Any]) -> None:
    for pod in pods:
        pod["metadata"]["finalizers"] = []


def is_gated(pod: Any) -> bool:
    return bool(pod["spec"].get("schedulingGates"))


@pytest.fixture
def make_job(make_cluster):
    class Queued(make_cluster):
        """A job whose new pods have the scheduling gate of Kueue, as its webhook sets it."""

        def act(self, action: Action) -> None:
            super().act(action)
            if isinstance(action, CreatePod) and (name := action.manifest["metadata"]["name"]) in self.pods:
                self.gate(name)
                self.pods[name]["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
                self.pods[name]["metadata"]["finalizers"] = [FINALIZER]

    def make(spec: dict[str, Any] | None = None, name: str = "mnist") -> Any:
        return Queued(JOB if spec is None else spec, name=name)

    return make


def pods_of(job: Any, *, running: bool) -> list[str]:
    return sorted(name for name in job.living() if is_gated(job.pods[name]) is not running)


def slots_that_run(job: Any) -> set[tuple[str, str]]:
    labels = [job.pods[name]["metadata"]["labels"] for name in pods_of(job, running=True)]
    return {(each[contract.LABEL_ROLE], each[contract.LABEL_INDEX]) for each in labels}


def kubelet(job: Any, lost: Collection[str] = ()) -> None:
    """Starts the admitted pods, and ends those that are deleted. A pod exists while it has a finalizer."""
    for name, pod in list(job.pods.items()):
        if name in lost:
            continue
        if "deletionTimestamp" in pod["metadata"]:
            if is_gated(pod):
                pod["status"]["phase"] = "Failed"  # by the garbage collector of pods, because it has no node
            elif pod["status"]["phase"] in ("Pending", "Running"):
                job.end(name, 143)
            if not pod["metadata"]["finalizers"]:
                job.vanish(name)
        elif pod["status"]["phase"] == "Pending" and not is_gated(pod):
            job.run(name)


def turn(queue: Queue, rounds: int = 4, lost: Collection[str] = ()) -> None:
    """The operator, Kueue and the kubelets do what is to do."""
    for _ in range(rounds):
        for job in queue.jobs:
            job.settle()
        queue.step()
        for job in queue.jobs:
            kubelet(job, lost)
            job.tick(3)


def groups_of(job: Any) -> set[str]:
    return {job.pods[name]["metadata"]["labels"].get(NAME, "none") for name in job.living()}


def test_two_jobs_never_hold_a_part_of_the_room(make_job):
    """Each of them alone fits. If each server and worker were admitted by itself, both could wait forever."""
    one, two = make_job(name="one"), make_job(name="two")
    queue = Queue(SIZE + 2, one, two)
    turn(queue)
    assert (len(pods_of(one, running=True)), len(pods_of(two, running=True))) == (SIZE, 0)
    one.edit(runPolicy={"suspend": True})
    turn(queue)
    assert (len(pods_of(one, running=True)), len(pods_of(two, running=True))) == (0, SIZE)


def test_the_group_has_the_servers_and_the_quorum(make_job):
    spec = {**JOB, "update": {"mode": "Sync", "backups": 1}, "evaluator": {}}
    spec["parameterServers"] = {"replicas": 2, "standbys": 1}
    job = make_job(spec | {"workers": {"replicas": 3}})
    turn(Queue(20, job))
    grouped = {name: pod for name, pod in job.pods.items() if NAME in pod["metadata"]["labels"]}
    roles = [name.split("-")[1:3] for name in sorted(grouped)]
    assert roles == [["ps", "0"], ["ps", "1"], ["worker", "0"], ["worker", "1"]]
    assert {pod["metadata"]["annotations"][COUNT] for pod in grouped.values()} == {"4"}
    assert {pod["metadata"]["annotations"][ROLE] for pod in grouped.values()} == {SERVER, WORKER}
    assert len(job.living()) == 4 + 2 + 1 + 1, "standbys, the evaluator and the backup worker are admitted one by one"


@pytest.mark.parametrize("role", [SERVER, WORKER])
def test_a_dead_pod_gives_its_place_to_the_next_one(make_job, role):
    job = make_job()
    queue = Queue(SIZE, job)
    turn(queue)
    (group,) = groups_of(job)
    job.end(job.named(role, 1), 137)
    turn(queue)
    assert (len(pods_of(job, running=True)), groups_of(job), queue.excess) == (SIZE, {group}, [])


def test_a_new_pod_waits_until_the_old_one_has_ended(make_job):
    """Kueue would delete it, because its group has as many pods as it may have."""
    job = make_job()
    queue = Queue(SIZE, job)
    turn(queue)
    old = job.named(WORKER, 1)
    job.disrupt(old, "EvictionByEvictionAPI")
    job.settle()
    queue.step()
    assert (job.named(WORKER, 1), queue.excess) == (old, [])
    assert f"the queue counts pod {old} of this job until it has ended" in job.condition("PodsReady")["message"]
    turn(queue)
    assert job.named(WORKER, 1) != old
    assert (len(pods_of(job, running=True)), queue.excess) == (SIZE, [])


def with_lost_worker(make_job, quota: int) -> tuple[Any, Queue, str]:
    """Returns a job with a worker whose node is lost, its queue, and the name of that pod."""
    job = make_job()
    queue = Queue(quota, job)
    turn(queue)
    lost = job.named(WORKER, 2)
    job.disrupt(lost, "DeletionByTaintManager")
    turn(queue, 30, {lost})
    return job, queue, lost


def test_a_pod_on_a_lost_node_holds_no_place_forever(make_job):
    job, queue, lost = with_lost_worker(make_job, SIZE + 1)
    assert job.named(WORKER, 2) != lost
    assert NAME not in job.pods[job.named(WORKER, 2)]["metadata"]["labels"], "its group has no place"
    assert (len(pods_of(job, running=True)), queue.excess) == (SIZE, [])


def test_a_pod_that_waits_by_itself_gets_the_place_of_a_lost_one_that_has_ended(make_job):
    job, queue, _ = with_lost_worker(make_job, SIZE)
    assert len(pods_of(job, running=True)) == SIZE - 1, "there is no room for the next pod"
    turn(queue, 8)
    assert (len(pods_of(job, running=True)), len(groups_of(job)), queue.excess) == (SIZE, 1, [])


@pytest.mark.parametrize("admitted", [True, False])
def test_the_pods_of_an_earlier_operator_were_admitted_one_by_one(make_job, admitted):
    job = make_job()
    queue = Queue(SIZE if admitted else 0, job)
    job.settle()
    for pod in job.pods.values():
        for part in ("labels", "annotations"):
            kept = pod["metadata"][part].items()
            pod["metadata"][part] = {k: v for k, v in kept if "group" not in k and k != contract.LABEL_TOGETHER}
        pod["metadata"]["annotations"].pop(ROLE)
    if admitted:
        queue.step()
        turn(queue)
        assert groups_of(job) == {"none"}
        for index in (0, 1):
            job.end(job.named(WORKER, index), 137)
    queue.quota = SIZE
    turn(queue, 8)
    assert len(pods_of(job, running=True)) == SIZE
    assert job.status["roles"]["Worker"]["restarts"] == (2 if admitted else 0)
    assert job.status["roles"]["Worker"]["disruptions"] == 0


def test_the_next_pods_of_a_job_are_another_group(make_job):
    """Kueue ends a group when all its pods have ended, and admits none of its pods afterwards."""
    job = make_job()
    queue = Queue(SIZE, job)
    turn(queue)
    (first,) = groups_of(job)
    queue.preempt(0)
    turn(queue)
    (second,) = groups_of(job)
    assert second != first
    assert (len(pods_of(job, running=True)), queue.excess) == (SIZE, [])


def test_a_pod_that_came_too_late_for_its_group_is_created_again(make_job):
    job = make_job()
    queue = Queue(SIZE, job)
    turn(queue)
    job.end(job.named(WORKER, 0), 137)
    job.settle()  # another worker is created, and all other pods end before Kueue observes it
    late = job.named(WORKER, 0)
    for name in set(job.living()) - {late}:
        job.end(name, 137)
    queue.workloads[0, job.pods[late]["metadata"]["labels"][NAME]].finished = True
    turn(queue, 12)
    assert late not in job.living()
    assert (len(pods_of(job, running=True)), len(groups_of(job))) == (SIZE, 1)


def test_waiting_is_not_a_death_however_often_the_job_is_scaled(make_job):
    job = make_job(JOB | {"runPolicy": {"pendingDeadlineSeconds": 60}})
    queue = Queue(0, job)
    for replicas in (2, 3, 4, 2, 5, 3):
        job.edit(workers={"replicas": replicas})
        turn(queue, 3)
        job.tick(100)
    assert job.deaths == []
    queue.quota = SIZE
    turn(queue)
    assert len(pods_of(job, running=True)) == SIZE


def test_a_job_in_the_queue_can_be_scaled(make_job):
    job = make_job()
    queue = Queue(SIZE - 1, job)
    turn(queue)
    assert pods_of(job, running=True) == []
    job.edit(workers={"replicas": 2})
    turn(queue, 6)
    assert (len(pods_of(job, running=True)), len(groups_of(job))) == (SIZE - 1, 1)
    job.edit(workers={"replicas": 3})
    turn(queue, 6)
    assert len(pods_of(job, running=True)) == SIZE - 1, "the third worker is admitted by itself, and has no room"
    queue.quota += 1
    turn(queue)
    assert len(pods_of(job, running=True)) == SIZE


def test_a_role_whose_template_has_another_queue_is_in_no_group(make_job):
    template = {"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "cpus"}}}
    job = make_job({**JOB, "parameterServers": {"replicas": 2, "template": template}})
    turn(Queue(20, job))
    for name in job.living():
        labels = job.pods[name]["metadata"]["labels"]
        assert (NAME in labels, labels["kueue.x-k8s.io/queue-name"]) == (
            (True, "gpus") if "worker" in name else (False, "cpus")
        )


def test_a_rank_of_several_pods_keeps_its_places(make_job):
    job = make_job(JOB | {"workers": {"replicas": 2, "podsPerRank": 2}})
    queue = Queue(6, job)
    turn(queue)
    assert len(pods_of(job, running=True)) == 6
    job.end(next(name for name in job.living() if "-worker-1-0-" in name), 137)
    turn(queue, 8)
    assert (len(pods_of(job, running=True)), queue.excess, len(groups_of(job))) == (6, [], 1)


def test_a_rank_that_is_not_in_force_gives_its_room_to_one_that_is(make_job):
    """Kueue gives the room of a worker that was admitted by itself to the pod that has waited longest."""
    job = make_job(JOB | {"workers": {"replicas": 1}})
    queue = Queue(4, job)
    turn(queue)
    job.edit(workers={"replicas": 2})
    turn(queue)
    job.answer(world=2, step=3, coordinator=1)
    job.settle()
    job.edit(workers={"replicas": 3})
    turn(queue)
    job.answer(world=2, step=4, coordinator=1)
    job.end(job.named(WORKER, 1), 137)
    queue.step()
    assert (WORKER, "2") in slots_that_run(job)
    turn(queue, 12)
    assert (WORKER, "1") in slots_that_run(job)


def test_other_pods_wait_for_what_the_job_needs(make_job):
    """Otherwise the standbys and evaluators of two jobs could hold the room that both need."""
    extras = {"parameterServers": {"replicas": 2, "standbys": 1}, "evaluator": {}}
    one, two = make_job(JOB | extras, "one"), make_job(JOB | extras, "two")
    queue = Queue(SIZE + 3, one, two)
    queue.quota = 0
    turn(queue)
    assert (len(one.living()), len(two.living())) == (SIZE, SIZE)
    assert any("must first admit the servers" in refusal.message for refusal in one.memory.refused.values())
    queue.quota = SIZE + 3
    turn(queue, 8)
    assert (len(pods_of(one, running=True)), len(pods_of(two, running=True))) == (SIZE + 3, 0)


def test_the_standby_of_a_promoted_server_gets_the_place_of_the_old_one(make_job):
    job = make_job(JOB | {"parameterServers": {"replicas": 2, "standbys": 1}})
    queue = Queue(SIZE + 2, job)
    turn(queue, 8)
    job.answer(in_sync={0: 2, 1: 2}, step=3, coordinator=1)
    job.disrupt(job.named(SERVER, 0, 1), "EvictionByEvictionAPI")
    turn(queue, 8)
    assert job.status["active"]["parameter-server-0"] == 2
    standby = job.named(SERVER, 0)
    assert NAME in job.pods[standby]["metadata"]["labels"]
    assert (len(pods_of(job, running=True)), queue.excess) == (SIZE + 2, [])


def test_other_pods_give_their_room_when_the_job_waits_again(make_job):
    job = make_job(JOB | {"evaluator": {}})
    queue = Queue(SIZE + 1, job)
    turn(queue, 8)
    evaluator = job.named(contract.ROLE_EVALUATOR, 0)
    for name in set(job.living()) - {evaluator}:
        job.end(name, 137)
    queue.quota = SIZE
    turn(queue, 8)
    assert evaluator not in job.living()
    assert set(pods_of(job, running=True)) == job.living() - {job.named(contract.ROLE_EVALUATOR, 0)}
    assert len(pods_of(job, running=True)) == SIZE


def test_pods_that_left_after_training_are_not_waited_for(make_job):
    """The worker of a group ends in order, and Kueue would wait for another one."""
    job = make_job()
    queue = Queue(SIZE, job)
    turn(queue)
    for index in (1, 2):
        job.end(job.named(WORKER, index), 0)
    for name in job.living():
        job.end(name, 137)
    job.answer(done=True)
    turn(queue, 8)
    living = job.living()
    assert living, "its servers, and the leading worker"
    assert set(pods_of(job, running=True)) == living


_FAULTS = "kill kill kill delete delete lose find preempt suspend resume scale turn turn turn settle restart queue"
FAULTS = st.sampled_from(_FAULTS.split())


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(FAULTS, st.integers(0, 1), st.integers(0, 40)), max_size=25),
    st.sampled_from(["Sync", "Async"]),
    st.booleans(),
    st.integers(1, 2),
)
def test_the_jobs_of_a_queue_always_get_on(make_job, steps, mode, extras, pods_per_rank):
    """After any faults, a job that fits trains, and no pod was created for a place that was not free."""
    spec = {**JOB, "update": {"mode": mode}}
    spec["workers"] = {"replicas": 3, "maxRestarts": 1000, "podsPerRank": pods_per_rank}
    spec["parameterServers"] = {"replicas": 2, "maxRestarts": 1000, "standbys": int(extras)}
    if extras:
        spec |= {"evaluator": {}}
    jobs = [make_job(spec, "one"), make_job(spec, "two")]
    queue = Queue(2 + 3 * pods_per_rank, *jobs)
    lost: set[str] = set()
    for what, number, choice in steps:
        job = jobs[number]
        running = [name for name in pods_of(job, running=True) if job.pods[name]["status"]["phase"] == "Running"]
        living = sorted(job.living())
        if what == "kill" and running:
            job.end(running[choice % len(running)], 137)
        elif what == "delete" and living:
            job.delete(living[choice % len(living)])
        elif what == "lose" and running:
            lost.add(running[choice % len(running)])
            job.disrupt(running[choice % len(running)], "DeletionByTaintManager")
        elif what == "find":
            lost.clear()
        elif what == "preempt":
            queue.preempt(number)
        elif what in ("suspend", "resume"):
            job.edit(runPolicy={"suspend": what == "suspend"})
        elif what == "scale":
            job.edit(workers={"replicas": 1 + choice % 4})
        elif what == "turn":
            turn(queue, 1 + choice % 8, lost)
        elif what == "settle":
            job.settle()
        elif what == "restart":
            job.restart_operator()
        else:
            queue.step()
    for job in jobs:
        job.edit(workers={"replicas": 3}, runPolicy={"suspend": False})
    turn(queue, 30)
    quorum = {(SERVER, "0"), (SERVER, "1")} | {(WORKER, str(n)) for n in range(3 if mode == "Sync" else 1)}
    whole = [job for job in jobs if quorum <= slots_that_run(job)]
    assert whole, [(sorted(job.living()), job.condition("PodsReady")) for job in jobs]
    assert queue.excess == []
    whole[0].edit(runPolicy={"suspend": True})
    turn(queue, 30)
    (other,) = (job for job in jobs if job is not whole[0])
    assert quorum <= slots_that_run(other), (sorted(other.living()), other.condition("PodsReady"))
