"""O2, O4: the pods of a rank are created together, and replaced together when one of them dies."""

from __future__ import annotations

import json

import pytest

from backstay_spec import contract
from backstay_spec.actions import CreatePod, DeletePod
from backstay_spec.observed import Stalled

WORKER = contract.ROLE_WORKER
GROUPS = {
    "parameterServers": {"replicas": 1},
    "workers": {"replicas": 2, "podsPerRank": 3},
    "checkpoint": {"uri": "file:///c"},
}


def pods_of(cluster, rank, incarnation=1):
    """Returns the names of a rank's pods, in the order of members."""
    found = {}
    for name, pod in cluster.pods.items():
        labels = pod["metadata"]["labels"]
        own = labels[contract.LABEL_ROLE], labels[contract.LABEL_INDEX], labels[contract.LABEL_INCARNATION]
        if own == (WORKER, str(rank), str(incarnation)):
            found[int(labels[contract.LABEL_MEMBER])] = name
    return [found[member] for member in sorted(found)]


def end(cluster, name, code, message=""):
    cluster.run(name)
    cluster.end(name, code, message)


def ready_of(cluster):
    (condition,) = (one for one in cluster.status["conditions"] if one["type"] == "PodsReady")
    return condition["message"]


def created(todo):
    return [action.manifest["metadata"]["name"] for action in todo.actions if isinstance(action, CreatePod)]


def deleted(todo):
    return [action.name for action in todo.actions if isinstance(action, DeletePod)]


def test_a_rank_has_its_pods_and_counts_once(running):
    cluster = running(GROUPS)
    names = pods_of(cluster, 1)
    assert [name.rpartition("-")[0] for name in names] == [f"mnist-worker-1-{member}-1" for member in range(3)]
    for member, name in enumerate(names):
        (container,) = cluster.pods[name]["spec"]["containers"]
        variables = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert variables[contract.ENV_MEMBER] == str(member)
        assert json.loads(variables[contract.ENV_CONFIG])["pods_per_rank"] == 3
    status = cluster.status
    assert status["roles"]["Worker"] == {"desired": 2, "ready": 2, "restarts": 0, "disruptions": 0}
    assert status["incarnations"] == {"parameter-server-0": 1, "worker-0": 1, "worker-1": 1}
    assert status["replicas"] == 2
    assert status["selector"].endswith("backstay.dev/role=worker,backstay.dev/member=0"), "for autoscalers"
    assert len(cluster.policies) == 2
    opens = [policy for policy in cluster.policies.values() if any("ports" not in r for r in policy["spec"]["ingress"])]
    (policy,) = opens
    (rule,) = policy["spec"]["ingress"]
    assert list(rule) == ["from"], "JAX chooses its ports"
    workers = {"matchLabels": {contract.LABEL_ROLE: WORKER} | policy["spec"]["podSelector"]["matchLabels"]}
    assert policy["spec"]["podSelector"] == workers, "servers stay closed"
    assert rule["from"] == [{"podSelector": workers}]


def test_a_gang_has_a_group_for_each_rank(running):
    cluster = running(GROUPS | {"scheduling": {"gang": {"podGroup": "mnist", "by": "Rank"}}})
    label = "scheduling.x-k8s.io/pod-group"

    def groups(rank, incarnation):
        return {cluster.pods[name]["metadata"]["labels"][label] for name in pods_of(cluster, rank, incarnation)}

    end(cluster, pods_of(cluster, 0)[1], 137)
    cluster.settle()
    assert (groups(0, 1), groups(1, 1), groups(0, 2)) == ({"mnist-0"}, {"mnist-1"}, {"mnist-0"})
    (server,) = (pod for pod in cluster.pods.values() if pod["metadata"]["labels"][contract.LABEL_ROLE] != WORKER)
    assert label not in server["metadata"]["labels"]


def test_a_queue_has_a_group_for_each_incarnation_of_a_rank_beyond_the_quorum(running):
    """Kueue waits for the pods of one name, so the pods of another incarnation have another one."""
    cluster = running(GROUPS | {"update": {"mode": "Async"}, "scheduling": {"queue": "gpus"}})

    def group(incarnation):
        made = [cluster.pods[name]["metadata"] for name in pods_of(cluster, 1, incarnation)]
        counts = {pod["annotations"]["kueue.x-k8s.io/pod-group-total-count"] for pod in made}
        assert (len(made), counts) == (3, {"3"})
        (found,) = {pod["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in made}
        return found

    end(cluster, pods_of(cluster, 1)[1], 137)
    cluster.settle()
    assert group(1) != group(2)


@pytest.mark.parametrize("labels", [None, {"kueue.x-k8s.io/queue-name": None}])
def test_a_template_that_removes_the_queue_removes_the_group(running, labels):
    workers = GROUPS["workers"] | {"template": {"metadata": {"labels": labels}}}
    cluster = running(GROUPS | {"workers": workers, "scheduling": {"queue": "gpus"}})
    for name in pods_of(cluster, 0):
        metadata = cluster.pods[name]["metadata"]
        assert not [key for key in (*metadata["labels"], *metadata["annotations"]) if key.startswith("kueue")]


def test_a_group_of_kueue_in_the_template_stays(running):
    labels, annotations = {"kueue.x-k8s.io/pod-group-name": "mine"}, {"kueue.x-k8s.io/pod-group-total-count": "6"}
    workers = GROUPS["workers"] | {"template": {"metadata": {"labels": labels, "annotations": annotations}}}
    cluster = running(GROUPS | {"workers": workers})
    for name in pods_of(cluster, 0):
        metadata = cluster.pods[name]["metadata"]
        found = {**metadata["labels"], **metadata["annotations"]}
        assert {key: value for key, value in found.items() if key.startswith("kueue")} == labels | annotations


def test_the_pods_of_a_rank_are_counted_one_by_one(running):
    cluster = running(GROUPS)
    assert ready_of(cluster) == "7 of 7 pods are ready"
    cluster.pods[pods_of(cluster, 1)[2]]["status"]["conditions"] = []
    cluster.settle()
    assert ready_of(cluster).startswith("6 of 7 pods are ready")


def test_a_rank_of_one_pod_is_named_and_guarded_as_before(running):
    cluster = running({**GROUPS, "workers": {"replicas": 1}})
    (name,) = [name for name in cluster.pods if "-worker-" in name]
    assert name.startswith("mnist-worker-0-1-")
    assert contract.LABEL_MEMBER not in cluster.pods[name]["metadata"]["labels"]
    (policy,) = cluster.policies.values()
    assert all("ports" in rule for rule in policy["spec"]["ingress"])


@pytest.mark.parametrize("how", ["Preferred", "Required"])
def test_the_pods_of_a_rank_lie_near_each_other(running, how):
    """A new incarnation may lie elsewhere: the pods of the old one may still terminate on a lost node."""
    scheduling = {"groupTopologyKey": "example.com/rack", "groupTopology": how}
    cluster = running({**GROUPS, "scheduling": scheduling})
    for name in pods_of(cluster, 1):
        affinity = cluster.pods[name]["spec"]["affinity"]["podAffinity"]
        if how == "Required":
            (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]
        else:
            (preferred,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
            term = preferred["podAffinityTerm"]
        assert term["topologyKey"] == "example.com/rack"
        labels = cluster.pods[name]["metadata"]["labels"]
        assert {contract.LABEL_INDEX, contract.LABEL_INCARNATION} < set(term["labelSelector"]["matchLabels"])
        assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    assert all("affinity" not in pod["spec"] for name, pod in cluster.pods.items() if "-worker-" not in name)


def test_the_pods_of_a_rank_with_gpus_can_use_nccl(running):
    """They may share a node, and NCCL connects them there by shared memory."""
    container = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    workers = {"replicas": 1, "podsPerRank": 2, "template": {"spec": {"containers": [container]}}}
    cluster = running({**GROUPS, "workers": workers})
    for name in pods_of(cluster, 0):
        (trainer,) = cluster.pods[name]["spec"]["containers"]
        assert "/dev/shm" in [mount["mountPath"] for mount in trainer["volumeMounts"]]
        assert {"name": "NCCL_DEBUG", "value": "WARN"} in trainer["env"]


@pytest.mark.parametrize("first", [0, 2])
def test_the_death_of_one_pod_replaces_its_rank_and_is_charged_once(running, first):
    cluster = running(GROUPS)
    names = pods_of(cluster, 1)
    cluster.end(names[first], 137)
    todo = cluster.plan()
    assert [name.rpartition("-")[0] for name in created(todo)] == [f"mnist-worker-1-{member}-2" for member in range(3)]
    assert sorted(deleted(todo)) == sorted(set(names) - {names[first]})
    (event,) = todo.events
    assert event.reason == "Crashed"
    assert f"(pod {names[first]}) died: exit code 137 (SIGKILL)" in event.message
    (death,) = todo.deaths
    assert (death.pod, death.charged) == (names[first], True)
    cluster.apply(todo)
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == 1
    assert cluster.status["incarnations"]["worker-1"] == 2
    assert cluster.status["incarnations"]["worker-0"] == 1


def test_a_rank_of_which_one_pod_hangs_is_replaced_and_charged_once(running):
    """A server reports the rank, and none of its pods. The others wait for the one that hangs."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 1)
    cluster.answer(step=3, contributed={0: 1, 1: 1}, stalled=(Stalled(1, 1, "no gradient for 300 s"),))
    assert set(deleted(cluster.plan())) == set(names)
    cluster.settle()
    assert [(death.cause, death.charged) for death in cluster.deaths] == [("Stalled", True)]
    assert cluster.status["roles"]["Worker"]["restarts"] == 1
    assert len(pods_of(cluster, 1, 2)) == 3
    assert cluster.status["incarnations"]["worker-0"] == 1
    cluster.settle()
    assert len(cluster.deaths) == 1, "the old answer is about the old incarnation"


LOST = json.dumps({"reason": "GroupLost", "message": "pod 2 of worker 0 is lost: the connection was closed"})


@pytest.mark.parametrize(
    "aborted",
    ["JAX distributed service detected fatal errors: another task died", LOST, "[Gloo] Rank 1 is connected to 2", ""],
)
def test_a_pod_that_ended_because_of_another_one_is_not_the_cause(running, aborted):
    """The operator may see its end first. JAX may abort a pod after it wrote its message, or with no word."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 0)
    cluster.end(names[0], contract.GROUP_LOST_EXIT, LOST)
    cluster.end(names[1], 134, aborted)
    cluster.end(names[2], 1, json.dumps({"reason": "ValueError", "message": "bad batch"}))
    (event,) = cluster.plan().events
    assert f"(pod {names[2]}) died: exit code 1: ValueError: bad batch" in event.message


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("cause", ["OutOfMemory", "NodeLost"])
def test_a_pod_that_is_lost_is_the_cause_of_another_ones_exception(running, number, cause):
    """Gloo raises in the others, and the link to the lost pod may break later."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 0)
    broken = json.dumps({"reason": "ValueError", "message": "UNKNOWN: Gloo AllGather failed"})
    cluster.end(names[1 - number], 1, broken)
    if cause == "OutOfMemory":
        cluster.end(names[number], 137, reason="OOMKilled")
    else:
        cluster.end(names[number], 143)
        cluster.disrupt(names[number], "DeletionByTaintManager")
    (death,) = cluster.plan().deaths
    assert (death.pod, death.cause, death.charged) == (names[number], cause, cause == "OutOfMemory")


def test_the_pod_with_the_cause_stays_for_its_log(running):
    """A kubelet may report the end of its container seconds before its phase. The others of its rank are
    deleted."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 0)
    cluster.end(names[0], 137)
    cluster.pods[names[0]]["status"]["phase"] = "Running"
    deleted = {action.name for action in cluster.plan().actions if isinstance(action, DeletePod)}
    assert deleted == set(names[1:])
    sidecar = {"name": "proxy", "image": "proxy", "restartPolicy": "Always"}
    cluster.pods[names[0]]["spec"]["initContainers"] = [sidecar]
    assert names[0] in {action.name for action in cluster.plan().actions if isinstance(action, DeletePod)}


def test_a_rank_whose_pod_was_evicted_while_the_operator_was_away_is_not_charged(running):
    """The others ended in order. The pod that was evicted no longer exists, or still has its mark."""
    for is_there in (True, False):
        cluster = running(GROUPS)
        names = pods_of(cluster, 0)
        cluster.disrupt(names[2], "EvictionByEvictionAPI")
        for name in names:
            cluster.end(name, 143)
        if not is_there:
            cluster.vanish(names[2])
            cluster.plan()
        cluster.settle()
        assert cluster.status["roles"]["Worker"]["restarts"] == 0
        assert cluster.status["incarnations"]["worker-0"] == 2
        assert cluster.deaths[-1].cause == ("Evicted" if is_there else "Vanished")


def test_a_rank_that_ends_by_sigterm_without_a_deletion_is_charged(running):
    """A probe of the kubelet, or the script, ended it."""
    cluster = running(GROUPS)
    for name in pods_of(cluster, 0):
        cluster.end(name, 143)
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == 1


def test_a_rank_that_fits_in_part_is_created_again(running):
    """With `Required`, the pods that have nodes bind the others to a place that has no room for them."""
    scheduling = {"groupTopologyKey": "topology.kubernetes.io/zone", "groupTopology": "Required"}
    cluster = running({**GROUPS, "scheduling": scheduling, "runPolicy": {"pendingDeadlineSeconds": 400}})
    for name in pods_of(cluster, 0):
        cluster.disrupt(name, "EvictionByEvictionAPI")
        cluster.end(name, 143)
    cluster.settle()
    names = pods_of(cluster, 0, 2)
    cluster.run(names[0], ready=False)
    cluster.pods[names[0]]["spec"]["nodeName"] = "node-1"
    for name in names[1:]:
        cluster.gate(name, gated=False)
    cluster.tick(99)
    cluster.settle()
    assert cluster.status["incarnations"]["worker-0"] == 2
    cluster.tick(102)
    cluster.settle()
    assert cluster.status["incarnations"]["worker-0"] == 3
    assert all(cluster.pods[name]["metadata"]["deletionTimestamp"] for name in names)
    assert cluster.status["roles"]["Worker"]["restarts"] == 0
    assert "do not fit on nodes with one value of topology.kubernetes.io/zone" in str(cluster.events)


@pytest.mark.parametrize("comes", [True, False])
def test_the_pod_that_has_the_cause_may_be_seen_last(running, comes):
    """It was not charged when the kubelet reported the other pods first. On a lost node nothing is reported."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 0)
    for name in names[:2]:
        cluster.end(name, contract.GROUP_LOST_EXIT)
    todo = cluster.plan()
    assert not todo.events
    assert not todo.actions
    assert 0 < todo.requeue_after.total_seconds() <= 5
    if comes:
        cluster.end(names[2], 137)
    else:
        cluster.tick(todo.requeue_after.total_seconds())
    (event,) = cluster.plan().events
    assert event.reason == ("Crashed" if comes else "Unresponsive")
    assert (f"(pod {names[2]}) died" in event.message) == comes
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == int(comes)


@pytest.mark.parametrize("code", [143, 134])
@pytest.mark.parametrize("comes", [True, False])
def test_the_pod_that_was_evicted_may_be_seen_last(running, code, comes):
    """O4: the pods leave together, but the kubelet reports an eviction when the pod has ended. JAX may abort others."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 1)
    for name in names[:2]:
        cluster.end(name, code)
    todo = cluster.plan()
    assert not todo.events
    assert not todo.actions
    assert 0 < todo.requeue_after.total_seconds() <= 5
    if comes:
        cluster.pods[names[2]]["status"]["conditions"].append(
            {"type": "DisruptionTarget", "status": "True", "reason": "TerminationByKubelet", "message": "shutdown"}
        )
        cluster.end(names[2], 143)
    else:
        cluster.tick(todo.requeue_after.total_seconds())
    (death,) = cluster.plan().deaths
    assert (death.pod, death.charged) == ((names[2], False) if comes else (names[0], True))


def test_pods_that_lost_each_other_are_a_disruption(running):
    cluster = running(GROUPS)
    for name in pods_of(cluster, 0):
        cluster.end(name, contract.GROUP_LOST_EXIT)
    (event,) = cluster.plan().events
    assert event.reason == "Unresponsive"
    assert "the pods of its rank lost each other" in event.message
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == 0
    assert cluster.status["roles"]["Worker"]["disruptions"] == 1


def test_a_deleted_pod_is_a_disruption_of_its_rank(running):
    cluster = running(GROUPS)
    cluster.delete(pods_of(cluster, 1)[1])
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["disruptions"] == 1
    assert cluster.status["incarnations"]["worker-1"] == 2


def test_a_pod_that_cannot_be_created_is_an_obstacle_and_no_death(make_cluster):
    """A quota lets only some pods of a rank start. The others are tried again, with the same names."""
    cluster = make_cluster(GROUPS)
    cluster.refuse = {"mnist-worker-1-2-": ("Forbidden", "exceeded quota: gpus")}
    cluster.settle()
    assert len(pods_of(cluster, 1)) == 2
    for _ in range(20):
        cluster.tick(6)
        cluster.settle()
    assert cluster.status["incarnations"]["worker-1"] == 1
    assert not cluster.deaths
    assert "exceeded quota" in ready_of(cluster)
    cluster.refuse = {}
    cluster.tick(6)
    cluster.settle()
    assert len(pods_of(cluster, 1)) == 3
    assert cluster.status["incarnations"]["worker-1"] == 1


def test_a_rank_of_which_several_pods_are_refused_is_missing_once(running):
    """The quorum is complete without this rank."""
    cluster = running(GROUPS | {"workers": {"replicas": 4, "podsPerRank": 3}, "update": {"backups": 1}})
    cluster.answer(world=4, step=9)
    cluster.refuse = {f"mnist-worker-3-{member}-2": ("Forbidden", "exceeded quota") for member in (1, 2)}
    end(cluster, pods_of(cluster, 3)[0], 137)
    for _ in range(4):
        cluster.settle()
        cluster.tick(200)
        cluster.answer(world=4, step=9)
    cluster.settle()
    assert len(pods_of(cluster, 3, 2)) == 1
    assert cluster.status["phase"] == "Running"


def test_a_vanished_pod_replaces_its_rank_once(running):
    cluster = running(GROUPS)
    gone = pods_of(cluster, 0)[1]
    cluster.vanish(gone)
    cluster.settle()
    assert cluster.deaths[-1].pod == gone
    assert f"(pod {gone}) died: it no longer exists" in str(cluster.events)
    assert cluster.status["incarnations"]["worker-0"] == 2
    assert cluster.status["roles"]["Worker"]["disruptions"] == 1
    assert len(pods_of(cluster, 0, 2)) == 3


def test_scaling_down_removes_whole_ranks(running):
    cluster = running(GROUPS)
    cluster.edit(workers={"replicas": 1})
    cluster.answer(world=1, step=3)
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["desired"] == 1
    assert not [name for name in pods_of(cluster, 1) if name in cluster.living()]
    assert len([name for name in pods_of(cluster, 0) if name in cluster.living()]) == 3


@pytest.mark.parametrize("message", ['{"result": "Trained", "step": 9}', "the script's own words"])
def test_a_pod_that_ends_in_order_before_the_first_one_has_not_died(running, message):
    """After training, the pods of a rank end in any order."""
    cluster = running(GROUPS)
    cluster.end(pods_of(cluster, 1)[2], 0, message)
    for _ in range(2):
        todo = cluster.plan()
        assert not created(todo)
        assert not todo.deaths
        cluster.tick(60)


@pytest.mark.parametrize("how", ["exit", "signal", "deleted"])
def test_after_training_the_first_pod_decides_although_another_is_seen_before(running, how):
    """O10: its exit code is that of the rank. The others may end in another way, once `train` has returned in them."""
    cluster = running({**GROUPS, "workers": {"replicas": 1, "podsPerRank": 2}})
    first, second = pods_of(cluster, 0)
    cluster.train()
    cluster.settle()
    trained = json.dumps({"result": "Trained", "step": 9})
    cluster.end(second, {"exit": 3, "signal": 139, "deleted": 0}[how], trained)
    if how == "deleted":
        cluster.delete(second)
    cluster.settle()
    assert cluster.status["phase"] == "Running"
    cluster.tick(1)
    cluster.end(first, 0, trained)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"


def test_a_pod_that_fails_after_training_fails_the_job_when_the_first_one_does_not_end(running):
    cluster = running({**GROUPS, "workers": {"replicas": 1, "podsPerRank": 2}})
    cluster.train()
    cluster.end(pods_of(cluster, 0)[1], 3, json.dumps({"result": "Trained", "step": 9}))
    cluster.settle()
    cluster.tick(6)
    cluster.settle()
    assert cluster.status["phase"] == "Failed"


@pytest.mark.parametrize("late", ["refused", "operator"])
def test_after_training_a_restored_rank_gets_all_its_pods(running, late):
    """A quota that old pods still use refused one of them, or the operator ended between two creates."""
    cluster = running({**GROUPS, "workers": {"replicas": 1, "podsPerRank": 2}})
    cluster.refuse = {"mnist-worker-0-1-2-": ("Forbidden", "exceeded quota")}
    for name in pods_of(cluster, 0):
        cluster.end(name, 137)
    cluster.train(returned=0)
    cluster.settle()
    assert len(pods_of(cluster, 0, 2)) == 1
    cluster.run(pods_of(cluster, 0, 2)[0], ready=False)
    cluster.refuse = {}
    if late == "operator":
        cluster.restart_operator()
    cluster.tick(10)
    cluster.settle()
    newest = cluster.status["incarnations"]["worker-0"]
    assert len(pods_of(cluster, 0, newest)) == 2
    for name in pods_of(cluster, 0, newest):
        cluster.run(name)
        cluster.end(name, 0, json.dumps({"result": "Trained", "step": 9}))
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"


@pytest.mark.parametrize("gated", [True, False])
def test_the_time_to_join_begins_when_the_last_pod_of_a_rank_has_started(make_cluster, gated):
    """The last one waits for a node or in a queue, and the others for it. They do not hang."""
    spec = GROUPS | {"update": {"mode": "Async"}, "runPolicy": {"pendingDeadlineSeconds": 600}}
    cluster = make_cluster(spec)
    cluster.settle()
    cluster.run_all()
    names = pods_of(cluster, 1)
    for name in names:
        cluster.run(name, ready=False)
    cluster.pods[names[2]]["status"] = {"phase": "Pending"}
    cluster.gate(names[2], gated=gated)
    cluster.answer(world=2, step=3, contributed={0: 1})
    cluster.settle()
    for _ in range(7):
        cluster.tick(100)
        cluster.answer(world=2, step=3, contributed={0: 1})
        cluster.settle()
    cluster.run(names[2], ready=False)
    cluster.settle()
    cluster.tick(590)
    cluster.answer(world=2, step=3, contributed={0: 1})
    cluster.settle()
    assert (cluster.status["phase"], cluster.status["incarnations"]["worker-1"]) == ("Running", 1)
    assert cluster.status["roles"]["Worker"]["restarts"] == 0
    cluster.tick(20)
    cluster.answer(world=2, step=3, contributed={0: 1})
    cluster.settle()
    assert cluster.status["roles"]["Worker"]["restarts"] == 1


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)])
def test_the_policy_follows_the_pods_of_a_rank(running, counts):
    """O7: only where ranks have several pods, workers reach each other at all ports."""
    cluster = running({**GROUPS, "workers": {"replicas": 1, "podsPerRank": counts[0]}})
    assert len(cluster.policies) == counts[0]
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(6):
        cluster.settle()
        cluster.bury()
    cluster.edit(runPolicy={"suspend": False}, workers={"podsPerRank": counts[1]})
    cluster.settle()
    rules = [rule for policy in cluster.policies.values() for rule in policy["spec"]["ingress"]]
    assert len(cluster.policies) == counts[1]
    assert any("ports" not in rule for rule in rules) == (counts[1] > 1)


@pytest.mark.parametrize("lost", [True, False])
def test_a_pod_that_ends_before_training_is_charged_although_its_exit_code_is_zero(running, lost):
    """The first pod may not have noticed it: it waits for that pod to connect."""
    cluster = running(GROUPS)
    names = pods_of(cluster, 1)
    if lost:
        cluster.end(names[0], contract.GROUP_LOST_EXIT)
    cluster.end(names[2], 0)
    cluster.tick(60)
    (death,) = cluster.plan().deaths
    assert (death.pod, death.cause, death.charged) == (names[2], "ExitedEarly", True)


def test_a_suspended_job_has_no_pods(running):
    cluster = running(GROUPS)
    cluster.edit(runPolicy={"suspend": True})
    for _ in range(6):
        cluster.settle()
        cluster.bury()
    assert not cluster.living()
    cluster.edit(runPolicy={"suspend": False})
    cluster.settle()
    assert len(pods_of(cluster, 0, 2)) == len(pods_of(cluster, 1, 2)) == 3
