"""O3: the Secret, the NetworkPolicy and the Services come before the pods, and follow the active servers."""

from __future__ import annotations

import json
from datetime import timedelta

from backstay_spec import contract
from backstay_spec.actions import CreateNetworkPolicy, CreatePod, CreateSecret, CreateService, PatchService

TWO_SERVERS = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 3}, "checkpoint": {"uri": "file:///ckpt"}}
SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
SERVER, WORKER = contract.ROLE_SERVER, contract.ROLE_WORKER
SPEC = {"parameterServers": {"replicas": 1}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}}


def test_addresses_come_before_pods(make_cluster):
    cluster = make_cluster(TWO_SERVERS)
    first = cluster.plan()
    assert [type(a) for a in first.actions] == [CreateSecret, CreateNetworkPolicy, CreateService, CreateService]
    assert first.status["phase"] == "Pending"
    assert first.status["startTime"] == "2026-03-01T12:00:00Z"
    cluster.apply(first)
    second = cluster.plan()
    assert [(a.role, a.index, a.incarnation) for a in second.actions if isinstance(a, CreatePod)] == [
        (SERVER, 0, 1),
        (SERVER, 1, 1),
        (WORKER, 0, 1),
        (WORKER, 1, 1),
        (WORKER, 2, 1),
    ]
    env = {e["name"]: e.get("value") for e in second.actions[0].manifest["spec"]["containers"][0]["env"]}
    assert env["BACKSTAY_SERVERS"] == ",".join(
        f"{s['spec']['clusterIP']}:7077" for _, s in sorted(cluster.services.items())
    )
    assert second.status["incarnations"] == {f"{SERVER}-0": 1, f"{SERVER}-1": 1} | {
        f"{WORKER}-{i}": 1 for i in range(3)
    }


def test_pods_wait_for_every_address_and_the_secret(make_cluster):
    """A half-made job makes no pods, and dies of nothing while it waits."""
    cluster = make_cluster(TWO_SERVERS)
    cluster.refuse["mnist-ps-1"] = ("Forbidden", "exceeded quota: services")
    cluster.settle()
    assert not cluster.pods
    cluster.refuse.clear()
    cluster.tick(5)
    cluster.settle()
    assert len(cluster.pods) == 5


def test_a_service_follows_its_server(running):
    """O3: one JSON patch, tested, to the new incarnation."""
    cluster = running(TWO_SERVERS)
    cluster.end(cluster.named(SERVER, 1), 139)
    (patch,) = [a for a in cluster.plan().actions if isinstance(a, PatchService)]
    path = "/spec/selector/backstay.dev~1incarnation"
    assert patch.patch == (
        {"op": "test", "path": path, "value": "1"},
        {"op": "replace", "path": path, "value": "2"},
    )
    cluster.settle()


def test_a_deleted_service_comes_back_under_its_address(running):
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-1"))
    lost = cluster.services.pop(name)
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] == lost["spec"]["clusterIP"]
    assert cluster.services[name]["spec"]["selector"] == lost["spec"]["selector"]


def test_an_address_that_is_being_freed_is_requested_again(running):
    """T8: the API server reports a Service's deletion some milliseconds before it can assign its address again."""
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-0"))
    lost = cluster.services.pop(name)
    cluster.refuse[name] = ("Invalid", "spec.clusterIPs: provided IP is already allocated")
    cluster.apply(cluster.plan())
    cluster.refuse.clear()
    cluster.tick(5)
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] == lost["spec"]["clusterIP"]
    assert cluster.status["roles"]["Worker"]["disruptions"] == 0


def test_if_an_address_is_lost_permanently_the_pods_that_use_it_are_replaced(running):
    """T8: they would call their servers at that address forever."""
    cluster = running(TWO_SERVERS)
    name = next(n for n in cluster.services if n.startswith("mnist-ps-0"))
    lost, before = cluster.services.pop(name), set(cluster.pods)
    cluster.refuse[name] = ("Invalid", "spec.clusterIPs: provided IP is already allocated")
    for _ in range(4):
        cluster.apply(cluster.plan())
        assert name not in cluster.services
        cluster.tick(5)
    cluster.refuse.clear()
    cluster.settle()
    assert cluster.services[name]["spec"]["clusterIP"] != lost["spec"]["clusterIP"]
    cluster.bury()
    cluster.settle()
    assert len(cluster.living()) == 5
    assert not before & cluster.living()
    assert [(role["restarts"], role["disruptions"]) for role in cluster.status["roles"].values()] == [(0, 2), (0, 3)]


def test_what_carries_our_labels_but_another_owner_is_left_alone(running):
    """O2: labels do not make a pod ours; the owner's uid does."""
    cluster = running(TWO_SERVERS)
    stranger = json.loads(json.dumps(cluster.pods[cluster.named(WORKER, 0)]))
    stranger["metadata"] |= {"name": "mnist-worker-0-9-stranger", "uid": "x"}
    stranger["metadata"]["labels"][contract.LABEL_INCARNATION] = "9"
    stranger["metadata"]["ownerReferences"][0]["uid"] = "the uid of this job's predecessor"
    cluster.foreign.append(stranger)
    orphan = json.loads(json.dumps(stranger))
    orphan["metadata"] |= {"name": "orphan", "ownerReferences": []}
    cluster.foreign.append(orphan)
    todo = cluster.plan()
    assert todo.status is None
    assert not todo.actions


def test_a_secret_that_was_deleted_comes_back_when_a_pod_lacks_it(running):
    """O7 forbids a read of the Secret; a pod that waits for it shows that it is missing."""
    cluster = running(SPEC)
    cluster.end(cluster.named(WORKER, 0), 1)
    cluster.settle()
    made = cluster.secrets
    name = cluster.named(WORKER, 0)
    cluster.tick(11)
    cluster.wait(name, "CreateContainerConfigError", 'secret "mnist-abc" not found')
    cluster.settle()
    assert cluster.secrets == made + 1
    cluster.settle()
    assert cluster.secrets == made + 1, "not without end"
    assert timedelta(0) < cluster.settle().requeue_after <= timedelta(seconds=10)
