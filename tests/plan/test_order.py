"""O9: servers first, then the quorum, then the rest; and a server never waits for the quota that a worker holds."""

from __future__ import annotations

import pytest

from backstay_spec import contract
from backstay_spec.actions import CreatePod
from backstay_spec.observed import HELD
from backstay_spec.status_model import format_time

SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
QUOTA = ("Forbidden", "exceeded quota: two, requested: pods=1, used: pods=2, limited: pods=2")


class Quota:
    """A ResourceQuota that refuses the creation of more pods than `limit`."""

    def __init__(self, cluster, limit):
        self.cluster, self.limit = cluster, limit
        self.refuses = cluster.refuses
        cluster.refuses = self

    def __call__(self, manifest):
        pods = [p for p in self.cluster.pods.values() if p["status"]["phase"] in ("Pending", "Running")]
        full = manifest["kind"] == "Pod" and len(pods) >= self.limit
        self.cluster.refuse = {manifest["metadata"]["name"]: QUOTA} if full else {}
        return self.refuses(manifest)


def roles(cluster):
    return sorted(cluster.pods[name]["metadata"]["labels"][contract.LABEL_ROLE] for name in cluster.living())


def test_pods_are_created_in_order(make_cluster):
    spec = {
        "parameterServers": {"replicas": 2, "standbys": 1},
        "workers": {"replicas": 3},
        "update": {"backups": 1},
        "evaluator": {},
    }
    cluster = make_cluster(spec)
    cluster.apply(cluster.plan())
    created = [(a.stage, a.role, a.index, a.incarnation) for a in cluster.plan().actions if isinstance(a, CreatePod)]
    assert created == [
        (0, SERVER, 0, 1),
        (0, SERVER, 1, 1),
        (1, WORKER, 0, 1),
        (1, WORKER, 1, 1),
        (2, SERVER, 0, 2),
        (2, SERVER, 1, 2),
        (2, WORKER, 2, 1),
        (2, "evaluator", 0, 1),
    ]


def test_a_quota_of_two_pods_gives_the_server_its_place(make_cluster):
    cluster = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 3}})
    Quota(cluster, 2)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER]


def test_servers_that_are_refused_hold_the_workers_back(make_cluster):
    cluster = make_cluster({"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}})
    quota = Quota(cluster, 1)
    cluster.settle()
    for _ in range(4):
        cluster.tick(5)
        cluster.settle()
    assert roles(cluster) == [SERVER]
    assert "exceeded quota" in cluster.condition("PodsCreated")["message"]
    quota.limit = 10
    cluster.tick(5)
    cluster.settle()
    assert roles(cluster) == [SERVER, SERVER, WORKER, WORKER, WORKER]
    assert set(cluster.status["incarnations"].values()) == {1}
    assert not cluster.deaths


def test_a_worker_makes_room_for_a_server_that_the_quota_refuses(running):
    """A server was lost, and meanwhile the quota was lowered: without it the workers train nothing."""
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 3}})
    quota = Quota(cluster, 3)
    cluster.vanish(cluster.named(SERVER, 0))
    todo = None
    for _ in range(4):
        todo = cluster.plan()
        cluster.apply(todo)
    deleted = [pod for pod in cluster.pods.values() if pod["metadata"].get("deletionTimestamp")]
    assert [pod["metadata"]["labels"][contract.LABEL_INDEX] for pod in deleted] == ["2"], "one for one server"
    for _ in range(3):
        cluster.tick(5)
        cluster.settle()  # the deleted pod uses the quota while it terminates
    assert len([p for p in cluster.pods.values() if p["metadata"].get("deletionTimestamp")]) == 1
    cluster.bury()
    cluster.settle()
    assert roles(cluster) == [WORKER, WORKER], "no new worker takes the place"
    cluster.tick(5)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER, WORKER]
    quota.limit = 4
    cluster.tick(5)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER, WORKER, WORKER]
    assert all(not death.charged for death in cluster.deaths)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_server_has_its_own_time_after_another_pod_was_refused_for_hours(running, restarts):
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "update": {"backups": 1}})
    quota = Quota(cluster, 2)
    cluster.disrupt(cluster.named(WORKER, 1), "EvictionByEvictionAPI")
    cluster.end(cluster.named(WORKER, 1), 143)
    for _ in range(5):
        cluster.tick(3600)
        cluster.settle()
    assert cluster.condition("PodsCreated")["status"] == "False"
    quota.limit = 0
    cluster.disrupt(cluster.named(SERVER, 0), "EvictionByEvictionAPI")
    cluster.end(cluster.named(SERVER, 0), 143)
    cluster.settle()
    cluster.tick(6)
    if restarts:
        cluster.restart_operator()
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    cluster.tick(700)
    cluster.settle()
    assert cluster.status["phase"] == "Failed"


def test_a_rank_that_is_wanted_again_has_its_own_time(running):
    """The job was scaled down while a quota refused the rank, and up again an hour later."""
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}})
    quota = Quota(cluster, 3)
    for workers in (3, 2):
        cluster.edit(workers={"replicas": workers})
        cluster.settle()
        cluster.answer(world=2, step=3)
        cluster.settle()
    cluster.tick(3600)
    cluster.settle()
    quota.limit = 4
    cluster.edit(workers={"replicas": 3})
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    assert roles(cluster) == [SERVER, WORKER, WORKER, WORKER]


@pytest.mark.parametrize("more", [{"evaluator": {}}, {"parameterServers": {"replicas": 1, "standbys": 1}}])
def test_the_rest_does_not_take_the_room_of_the_quorum(make_cluster, more):
    """A hold lasts until the refused pod was created, and not only until the next attempt."""
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, **more}
    cluster = make_cluster(spec)
    quota = Quota(cluster, 2)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER]
    first = cluster.refuses
    cluster.refuses = quota.refuses
    cluster.refuse = {"mnist-worker-1-": QUOTA}  # it needs more than the rest, which would fit
    for _ in range(4):
        cluster.tick(6)
        cluster.settle()
    assert roles(cluster) == [SERVER, WORKER]
    cluster.refuse, cluster.refuses, quota.limit = {}, first, 3
    cluster.tick(6)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER, WORKER]


@pytest.mark.parametrize("prefix", ["mnist-ps-1-", "mnist-token-"])
def test_an_object_that_pods_need_and_that_is_refused_is_named_and_ends_the_job(make_cluster, prefix):
    """T8: the job was Pending without a reason, and without an end."""
    cluster = make_cluster({"parameterServers": {"replicas": 2}, "workers": {"replicas": 2}})
    cluster.refuse = {prefix: ("Forbidden", "exceeded quota: services=1")}
    cluster.settle()
    assert "exceeded quota: services=1" in cluster.condition("PodsCreated")["message"]
    assert "exceeded quota: services=1" in str(cluster.events)
    cluster.tick(300)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    cluster.tick(301)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "PodRefused"
    assert "exceeded quota: services=1" in cluster.condition("Failed")["message"]


@pytest.mark.parametrize("how", ["ends", "vanishes", "deleted"])
@pytest.mark.parametrize("prefix", ["mnist-ps-0-", "mnist-token-"])
def test_a_job_that_trains_does_not_end_for_an_object_that_it_has_no_need_of(running, prefix, how):
    """An operator that has started again creates the Secret, whose quota may be full by it. Pods need it later."""
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "update": {"backups": 1}})
    cluster.answer(world=2, step=9)
    cluster.settle()
    cluster.restart_operator()
    cluster.refuse = {prefix: ("Forbidden", "exceeded quota: secrets=1")}
    cluster.services = {name: found for name, found in cluster.services.items() if not name.startswith(prefix)}
    for _ in range(5):
        cluster.answer(world=2, step=9)
        cluster.settle()
        cluster.tick(300)
    assert cluster.status["phase"] == "Running"
    assert cluster.condition("PodsCreated")["status"] == "True"
    cluster.end(cluster.named(WORKER, 1), 137)
    cluster.answer(world=2, step=9)
    cluster.settle()
    assert "secrets=1" in cluster.condition("PodsReady")["message"]
    assert cluster.status["phase"] == "Running", "the quorum is complete"
    server = cluster.named(SERVER, 0)
    {"ends": cluster.end, "vanishes": cluster.vanish, "deleted": cluster.delete}[how](server)
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    cluster.tick(660)  # with the grace period of a pod that is being deleted
    cluster.settle()
    assert cluster.status["phase"] == "Failed"


def test_a_job_that_is_resumed_without_the_object_ends(running):
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}})
    cluster.answer(world=2, step=9)
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(6):
        cluster.settle()
        cluster.bury()
    cluster.restart_operator()
    cluster.refuse = {"mnist-token-": ("Forbidden", "exceeded quota: secrets=1")}
    cluster.edit(runPolicy={"suspend": False})
    for _ in range(5):
        cluster.settle()
        assert cluster.status["phase"] != "Failed"
        cluster.tick(130)
    cluster.settle()
    assert cluster.status["phase"] == "Failed"


@pytest.mark.parametrize(("update", "workers"), [({"mode": "Async"}, 3), ({"backups": 2}, 4)])
def test_a_rank_that_the_quota_has_refused_leaves_no_room_for_a_server(running, update, workers):
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": workers}, "update": update})
    cluster.answer(term=1, step=5, world=workers)
    cluster.settle()
    quota = Quota(cluster, workers)
    cluster.vanish(cluster.named(WORKER, workers - 1))
    cluster.settle()
    for step in range(5):
        cluster.tick(60)
        cluster.answer(term=1, step=6 + step, world=workers)
        cluster.settle()
    quota.limit = workers - 1
    cluster.vanish(cluster.named(SERVER, 0))
    for _ in range(60):
        cluster.settle()
        cluster.tick(5)
        cluster.bury()
    assert roles(cluster) == [SERVER, *[WORKER] * (workers - 2)]


def test_standbys_are_replaced_while_a_rank_beyond_the_need_is_refused(running):
    """The updates of enough other ranks continue, so nothing waits for its room."""
    spec = {"parameterServers": {"replicas": 1, "standbys": 1}, "workers": {"replicas": 3}, "update": {"backups": 1}}
    cluster = running(spec)
    cluster.answer(world=3, step=9, in_sync={0: 2})
    cluster.settle()
    cluster.refuse = {"mnist-worker-0-": QUOTA}
    cluster.end(cluster.named(WORKER, 0), 137)
    cluster.settle()
    cluster.end(cluster.named(SERVER, 0), 137)  # the standby
    for _ in range(3):
        cluster.tick(10)
        cluster.answer(world=3, step=9)
        cluster.settle()
    assert roles(cluster) == [SERVER, SERVER, WORKER, WORKER]


PENDING = {"pendingDeadlineSeconds": 20}
WEBHOOK = ("InternalError", 'failed calling webhook "gone.example.com"')


def test_the_time_without_a_webhook_does_not_count_for_the_pods_that_it_held_back(make_cluster):
    """The server is refused, and the worker waits for it. Both are created when the webhook answers again."""
    cluster = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}, "runPolicy": PENDING})
    cluster.refuse = {"mnist-ps-0-1-": WEBHOOK}
    cluster.settle()
    assert HELD in {refusal.reason for refusal in cluster.memory.refused.values()}
    for _ in range(10):
        cluster.tick(10)
        cluster.settle()
    assert roles(cluster) == []
    cluster.refuse = {}
    cluster.tick(6)
    cluster.settle()
    assert roles(cluster) == [SERVER, WORKER]
    assert cluster.status["phase"] == "Pending"


@pytest.mark.parametrize("restarts", [False, True])
def test_gates_do_not_count_against_the_pending_deadline(make_cluster, restarts):
    """A queue may keep a pod for hours, in which nothing changes. The time begins when the gates are gone."""
    cluster = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}, "runPolicy": PENDING})
    cluster.settle()
    names = sorted(cluster.pods)
    for name in names:
        cluster.gate(name)
    cluster.settle()
    cluster.tick(600)
    if restarts:
        cluster.restart_operator()
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    assert cluster.condition("PodsReady")["reason"] == "SchedulingGated"
    cluster.tick(600)
    for name in names:
        cluster.gate(name, gated=False)
    cluster.settle()
    cluster.tick(19)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    cluster.tick(2)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "Unschedulable"


def test_the_time_of_a_queue_is_known_to_an_operator_that_starts_later(make_cluster):
    """The pods were scheduled after an hour in the queue, and pull their image."""
    spec = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}, "runPolicy": PENDING}
    cluster = make_cluster({**spec, "scheduling": {"queue": "gpus"}})
    cluster.settle()
    for name in cluster.pods:
        cluster.gate(name)
    cluster.settle()
    cluster.tick(3600)
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": format_time(cluster.now)}
    for pod in cluster.pods.values():
        pod["status"]["conditions"] = [scheduled]
    cluster.restart_operator()
    cluster.tick(19)
    cluster.settle()
    assert cluster.status["phase"] == "Pending"
    cluster.tick(2)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "NotStarted"


def test_a_worker_cannot_join_while_its_server_waits_in_a_queue(make_cluster):
    """The queue admits the worker first. Its time to join begins when the server may start."""
    cluster = make_cluster({"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}, "runPolicy": PENDING})
    cluster.settle()
    server, worker = cluster.named(SERVER, 0), cluster.named(WORKER, 0)
    cluster.gate(server)
    cluster.run(worker, ready=False)
    cluster.settle()
    cluster.tick(600)
    cluster.settle()
    assert cluster.status["phase"] == "Starting"
    cluster.run(server)
    cluster.settle()
    cluster.tick(19)
    cluster.settle()
    assert cluster.status["phase"] != "Failed"
    cluster.tick(2)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "NotJoined"


def test_a_server_cannot_join_while_another_one_waits_in_a_queue(make_cluster):
    cluster = make_cluster({"parameterServers": {"replicas": 2}, "workers": {"replicas": 1}, "runPolicy": PENDING})
    cluster.settle()
    cluster.gate(cluster.named(SERVER, 0))
    for name in (cluster.named(SERVER, 1), cluster.named(WORKER, 0)):
        cluster.run(name, ready=False)
    cluster.settle()
    cluster.tick(600)
    cluster.settle()
    assert cluster.status["phase"] == "Starting"
    cluster.run(cluster.named(SERVER, 0), ready=False)
    cluster.settle()
    cluster.tick(21)
    cluster.settle()
    assert cluster.condition("Failed")["reason"] == "NotJoined"


def test_a_worker_that_waits_for_a_server_in_a_queue_is_not_charged(running):
    """Both were replaced; the queue admits the worker first."""
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 1}, "runPolicy": PENDING})
    cluster.answer(step=5, contributed={0: 1})
    cluster.settle()
    for role in (SERVER, WORKER):
        cluster.disrupt(cluster.named(role, 0), "EvictionByEvictionAPI")
    cluster.settle()
    cluster.gate(cluster.named(SERVER, 0))
    worker = cluster.named(WORKER, 0)
    cluster.run(worker, ready=False)
    for _ in range(5):
        cluster.tick(30)
        cluster.settle()
    assert cluster.named(WORKER, 0) == worker
    assert cluster.status["roles"]["Worker"]["restarts"] == 0


def test_no_other_pod_is_created_while_a_server_is_refused(running):
    cluster = running({"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}})
    Quota(cluster, 2)
    cluster.vanish(cluster.named(SERVER, 0))
    cluster.settle()
    cluster.edit(workers={"replicas": 4})
    assert not [a for a in cluster.plan().actions if isinstance(a, CreatePod)]
