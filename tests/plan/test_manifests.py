"""The objects of a job follow the contract, O2, O3, O6, O7, and what a template may change."""

from __future__ import annotations

import hashlib
import hmac
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec import contract, manifests, manifests_pod, names
from backstay_spec.names import Slot
from backstay_spec.observed import PlanSettings
from backstay_spec.runtime import RuntimeConfig
from backstay_spec.token import token_for
from backstay_spec.types import TrainingJob

SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
SERVERS = ["10.0.0.1:7077", "10.0.0.2:7077"]
LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


def job(**spec):
    return TrainingJob.model_validate(
        {
            "metadata": {"name": "mnist", "namespace": "lab", "uid": "u-1"},
            "spec": {"image": "train:1", "command": ["python", "train.py"], **spec},
        }
    )


def build(role=WORKER, index=0, incarnation=1, **spec):
    return manifests_pod.pod(job(**spec), Slot(role, index), incarnation, SERVERS)


def trainer(pod):
    (found,) = [c for c in pod["spec"]["containers"] if c["name"] == "trainer"]
    return found


def environment(pod):
    names_seen = [e["name"] for e in trainer(pod)["env"]]
    assert len(names_seen) == len(set(names_seen))
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in trainer(pod)["env"]}


SLOTS = st.builds(Slot, st.sampled_from([SERVER, WORKER, EVALUATOR]), st.integers(0, 9999))


@given(
    st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True),
    st.uuids(),
    st.lists(st.tuples(SLOTS, st.integers(1, 999)), unique=True, min_size=2, max_size=6),
)
def test_names_are_labels_and_unique(name, uid, pods):
    """O2: names are DNS-1035 labels of at most 63 characters; no two objects share one."""
    made = [names.pod_name(name, str(uid), slot, n) for slot, n in pods]
    made += [names.service_name(name, str(uid), i) for i in range(3)]
    made += [names.secret_name(name, str(uid)), names.network_policy_name(name, str(uid))]
    made.append(names.members_policy_name(name, str(uid)))
    assert all(LABEL.fullmatch(n) for n in made)
    assert len(set(made)) == len(made)


def test_another_uid_gives_other_names():
    assert names.pod_name("a", "uid-1", Slot(WORKER, 0), 1) != names.pod_name("a", "uid-2", Slot(WORKER, 0), 1)


def test_the_environment_is_the_contracts():
    spec = {"parameterServers": {"replicas": 2}, "workers": {"replicas": 4}, "checkpoint": {"uri": "file:///c"}}
    said = environment(build(SERVER, 1, 3, **spec))
    assert said["BACKSTAY_ROLE"] == "parameter-server"
    assert said["BACKSTAY_INDEX"] == "1"
    assert said["BACKSTAY_INCARNATION"] == "3"
    assert said["BACKSTAY_SERVERS"] == "10.0.0.1:7077,10.0.0.2:7077"
    assert said["BACKSTAY_POD_IP"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert said["BACKSTAY_TOKEN"] == {"secretKeyRef": {"name": names.secret_name("mnist", "u-1"), "key": "token"}}
    of_kubelets = {contract.ENV_BIND, contract.ENV_KEEP, contract.ENV_MOST_STEPS, contract.ENV_CHECKPOINT}
    every = {v for k, v in vars(contract).items() if k.startswith("ENV_")} - {"BACKSTAY_", *of_kubelets}
    of_some = {contract.ENV_ACTIVE, contract.ENV_TRAINED, contract.ENV_GPUS, contract.ENV_MEMBER}
    assert every - of_some <= set(said)
    assert contract.ENV_ACTIVE not in said, "only with standbys"
    config = RuntimeConfig.model_validate_json(said["BACKSTAY_CONFIG"])
    assert config == RuntimeConfig(shards=2, workers=4, checkpoint={"uri": "file:///c", "every_seconds": 60})


def test_the_runtime_configuration_has_the_whole_spec():
    spec = job(
        parameterServers={"replicas": 3},
        workers={"replicas": 7, "stallSeconds": 20},
        evaluator={},
        update={"mode": "Sync", "backups": "5%", "maxNonFinite": 9, "grace": "1500ms", "weighting": "Examples"},
        wire={"gradients": "Int8", "parameters": "BFloat16", "errorFeedback": True},
        checkpoint={"volume": {"emptyDir": {}}, "everySteps": 5, "everySeconds": 0, "keep": 2},
        trace={"megabytes": 3},
    ).spec
    config = manifests_pod.runtime_config(spec, "json")
    assert config.model_dump(exclude_none=True) == {
        "shards": 3,
        "workers": 7,
        "pods_per_rank": 1,
        "mode": "Sync",
        "backups": "5%",
        "max_non_finite": 9,
        "grace_seconds": 1.5,
        "weighting": "Examples",
        "wire": {"gradients": "Int8", "parameters": "BFloat16", "error_feedback": True},
        "staleness_damping": False,
        "overlap": False,
        "stall_seconds": 20,
        "standbys": 0,
        "evaluator": True,
        "checkpoint": {"uri": "/backstay/checkpoints", "every_steps": 5, "keep": 2, "continue_from": "SameJob"},
        "trace_megabytes": 3,
        "log_format": "json",
    }


def test_a_dollar_in_a_uri_reaches_the_trainer():
    """The kubelet expands $(NAME) in values, but not after $$."""
    assert "$$(HOME)" in environment(build(checkpoint={"uri": "file:///a$(HOME)"}))["BACKSTAY_CONFIG"]


def test_a_pod_has_no_rights_and_little_patience():
    """O2, O6."""
    spec = build()["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    assert {(t["key"], t["tolerationSeconds"]) for t in spec["tolerations"]} == {
        ("node.kubernetes.io/not-ready", 5),
        ("node.kubernetes.io/unreachable", 5),
    }
    assert spec["terminationGracePeriodSeconds"] == 30
    assert spec["shareProcessNamespace"] is True, "as process 1 a script without a handler would never hear SIGTERM"
    assert build(SERVER)["spec"]["terminationGracePeriodSeconds"] == 60
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert trainer(build())["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_server_and_its_standby_would_rather_be_on_two_nodes():
    """The loss of a node must not end both; but one node is enough, and a template's own rule counts."""
    mine = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}
    spec = {"parameterServers": {"replicas": 2, "standbys": 1, "template": {"spec": {"affinity": mine}}}}
    pod = build(SERVER, 1, 4, **spec)
    assert set(pod["spec"]["affinity"]) == {"podAntiAffinity", "nodeAffinity"}
    (kind,) = pod["spec"]["affinity"]["podAntiAffinity"]
    assert kind == "preferredDuringSchedulingIgnoredDuringExecution"
    (preference,) = pod["spec"]["affinity"]["podAntiAffinity"][kind]
    assert preference["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    selector = preference["podAffinityTerm"]["labelSelector"]["matchLabels"]
    carried = [selector.items() <= build(*who, **spec)["metadata"]["labels"].items() for who in
               ((SERVER, 1, 3), (SERVER, 1, 5), (SERVER, 0, 4), (WORKER, 1, 4))]  # fmt: skip
    assert carried == [True, True, False, False]
    assert "affinity" not in build(WORKER, 1, **spec)["spec"]
    assert "affinity" not in build(SERVER, 1)["spec"]


def test_the_owner_collects_but_does_not_block():
    (owner,) = build()["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"], owner["blockOwnerDeletion"]) == ("u-1", True, False)


def test_readiness_is_asked_of_those_who_train():
    assert trainer(build(SERVER))["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9400}
    assert trainer(build(WORKER))["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": 9400}
    assert "readinessProbe" not in trainer(build(EVALUATOR, evaluator={}))


def test_the_volume_is_mounted_where_checkpoints_are_used():
    def mounts(role):
        pod = build(role, checkpoint={"volume": {"persistentVolumeClaim": {"claimName": "c"}}}, evaluator={})
        return [m["mountPath"] for m in trainer(pod).get("volumeMounts", ())]

    assert mounts(SERVER) == mounts(EVALUATOR) == ["/backstay/checkpoints"]
    assert mounts(WORKER) == []


def test_code_is_the_working_directory():
    pod = build(code={"configMap": "script"})
    assert trainer(pod)["workingDir"] == "/backstay/code"
    assert pod["spec"]["volumes"] == [{"name": "backstay-code", "configMap": {"name": "script"}}]
    assert trainer(build(workingDir="/app"))["workingDir"] == "/app"
    assert "workingDir" not in trainer(build())


def test_scheduling_reaches_the_pod():
    scheduling = {
        "priorityClassName": "low",
        "schedulerName": "volcano",
        "gang": {"podGroup": "g", "kind": "Volcano"},
        "queue": "q",
    }
    pod = build(scheduling=scheduling)
    assert pod["spec"]["priorityClassName"] == "low"
    assert pod["spec"]["schedulerName"] == "volcano"
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] == "g"


def test_allocator_settings_are_defaults():
    assert environment(build())["MALLOC_MMAP_MAX_"] == "0"
    assert environment(build(env=[{"name": "MALLOC_MMAP_MAX_", "value": "9"}]))["MALLOC_MMAP_MAX_"] == "9"
    assert "MALLOC_MMAP_MAX_" not in environment(build(EVALUATOR, evaluator={}))


def test_a_template_adds_and_overrides():
    template = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"a": "b"}},
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "containers": [
                {
                    "name": "trainer",
                    "image": "gpu:1",
                    "resources": {"limits": {"nvidia.com/gpu": 1}},
                    "env": [{"name": "MALLOC_TOP_PAD_", "value": "1"}, {"name": "MINE", "value": "$(BACKSTAY_INDEX)"}],
                },
                {"name": "side", "image": "side:1"},
            ],
        },
    }
    pod = build(workers={"template": template})
    assert trainer(pod)["image"] == "gpu:1"
    assert trainer(pod)["command"] == ["python", "train.py"]
    assert len(pod["spec"]["tolerations"]) == 3
    assert [c["name"] for c in pod["spec"]["containers"]] == ["trainer", "side"]
    assert environment(pod)["MALLOC_TOP_PAD_"] == "1"
    order = [e["name"] for e in trainer(pod)["env"]]
    assert order.index("BACKSTAY_INDEX") < order.index("MINE")
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert trainer(build(SERVER, workers={"template": template}))["image"] == "train:1"


HOSTILE = [
    {"metadata": {"labels": {"backstay.dev/job": "other", "backstay.dev/incarnation": "9"}}},
    {"metadata": {"labels": None}},
    {"metadata": {"$patch": "replace", "name": "mine", "namespace": "kube-system", "generateName": "x-"}},
    {"metadata": {"ownerReferences": [], "name": "x"}},
    {"spec": {"restartPolicy": "Always"}},
    {"spec": None},
    {"spec": {"$patch": "replace", "hostNetwork": True}},
    {"spec": {"containers": [{"name": "trainer", "$patch": "delete"}]}},
    {"spec": {"containers": None}},
    {"spec": {"containers": [{"name": "trainer", "env": [{"name": "BACKSTAY_TOKEN", "value": "x"}]}]}},
    {"spec": {"containers": [{"name": "trainer", "env": [{"name": "BACKSTAY_INDEX", "$patch": "delete"}]}]}},
    {"spec": {"containers": [{"name": "trainer", "env": None, "terminationMessagePath": "/tmp/x"}]}},
]


@pytest.mark.parametrize("template", HOSTILE, ids=json.dumps)
def test_what_is_ours_a_template_cannot_change(template):
    """restartPolicy, our labels and BACKSTAY_* cannot be overridden."""
    plain, pod = build(), build(workers={"template": template})
    assert pod["metadata"]["name"] == plain["metadata"]["name"]
    assert pod["metadata"]["namespace"] == "lab"
    assert "generateName" not in pod["metadata"]
    assert pod["metadata"]["ownerReferences"] == plain["metadata"]["ownerReferences"]
    assert pod["metadata"]["labels"].items() >= plain["metadata"]["labels"].items()
    assert pod["spec"]["restartPolicy"] == "Never"
    assert trainer(pod)["terminationMessagePath"] == "/dev/termination-log"

    def ours(p):
        return {k: v for k, v in environment(p).items() if k.startswith("BACKSTAY_")}

    assert ours(pod) == ours(plain)


def test_the_specs_own_env_cannot_change_ours_either():
    assert environment(build(env=[{"name": "BACKSTAY_ROLE", "value": "x"}]))["BACKSTAY_ROLE"] == "worker"


def test_a_service_selects_one_incarnation_of_one_job():
    """O3; the uid keeps a dead namesake's pods out."""
    meta = job().metadata
    service = manifests.service(meta, 1, 4, "10.0.0.9")
    pod = manifests_pod.pod(job(parameterServers={"replicas": 2}), Slot(SERVER, 1), 4, SERVERS)
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    assert set(service["spec"]["selector"]) == {
        "backstay.dev/job",
        "backstay.dev/job-uid",
        "backstay.dev/role",
        "backstay.dev/index",
        "backstay.dev/incarnation",
    }
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["clusterIP"] == "10.0.0.9"


def test_the_network_policy_admits_the_pods_of_the_job():
    """O7: RPC from the job's pods and the operator; health and metrics from every client; ingress only."""
    (policy,) = manifests.network_policies(job().metadata, PlanSettings("backstay-system", {"app": "backstay"}), 1)
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    peers, operator, everyone = policy["spec"]["ingress"]
    assert [p["port"] for p in peers["ports"]] == [7077, 7078]
    assert peers["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    assert [p["port"] for p in operator["ports"]] == [7077]
    assert operator["from"][0]["podSelector"] == {"matchLabels": {"app": "backstay"}}
    assert everyone == {"ports": [{"port": 9400, "protocol": "TCP"}]}


@pytest.mark.parametrize("ip", ["10.0.0.1", "fd00::12"])
def test_addresses_there_and_back(ip):
    assert manifests.host_of(manifests.address(ip)) == ip


def test_an_ipv6_address_is_bracketed():
    assert manifests.address("fd00::12") == "[fd00::12]:7077"


def test_the_token_is_the_uid_under_the_key():
    """O7."""
    key = bytes(range(32))
    assert token_for(key, "u-1") == hmac.new(key, b"u-1", hashlib.sha256).hexdigest()
    with pytest.raises(ValueError, match="32 random bytes"):
        token_for(b"short", "u-1")
    with pytest.raises(ValueError, match="no uid"):
        token_for(key, "")


def with_gpus(limits, **spec):
    container = {"name": "trainer", "resources": {"limits": limits}, **spec.pop("container", {})}
    return build(workers={"template": {"spec": {"containers": [container], **spec}}})


def test_a_worker_on_a_gpu_that_others_use_takes_no_memory_at_its_start():
    """MIG gives each pod its own memory."""
    name = "XLA_PYTHON_CLIENT_PREALLOCATE"
    for limit, value in (
        ("gpu.shared", "false"),
        ("mig-1g.10gb.shared", "false"),
        ("gpu", None),
        ("mig-1g.10gb", None),
    ):
        assert environment(with_gpus({f"nvidia.com/{limit}": 1})).get(name) == value
    own = with_gpus({"nvidia.com/gpu.shared": 1}, container={"env": [{"name": name, "value": "true"}]})
    assert environment(own)[name] == "true"


@pytest.mark.parametrize("limits", [{"nvidia.com/gpu": 1}, {"nvidia.com/gpu": "1"}, {"nvidia.com/mig-1g.10gb": 1}])
def test_a_worker_with_a_gpu_needs_only_the_limit(limits):
    pod = with_gpus(limits)
    found = environment(pod)
    assert (found["BACKSTAY_GPUS"], found["JAX_PLATFORMS"]) == ("1", "cuda,cpu")
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    assert "/dev/shm" not in str(pod)


@pytest.mark.parametrize(("limit", "visible"), [("gpu", "4"), ("gpu.shared", "1"), ("mig-1g.10gb", "1")])
def test_the_trainer_must_find_as_many_gpus_as_cuda_shows(limit, visible):
    assert environment(with_gpus({f"nvidia.com/{limit}": 4}))["BACKSTAY_GPUS"] == visible


def test_several_gpus_have_shared_memory():
    pod = with_gpus({"nvidia.com/gpu": 4})
    (mount,) = [mount for mount in trainer(pod)["volumeMounts"] if mount["mountPath"] == "/dev/shm"]
    (volume,) = [volume for volume in pod["spec"]["volumes"] if volume["name"] == mount["name"]]
    assert volume["emptyDir"]["medium"] == "Memory"


def test_the_template_says_what_a_pod_with_gpus_gets():
    mine = {"name": "shm", "mountPath": "/dev/shm"}
    container = {"env": [{"name": "JAX_PLATFORMS", "value": "cpu"}], "volumeMounts": [mine]}
    volumes, own = [{"name": "shm", "emptyDir": {}}], {"key": "nvidia.com/gpu", "operator": "Equal", "value": "x"}
    pod = with_gpus({"nvidia.com/gpu": 2}, container=container, volumes=volumes, tolerations=[own])
    assert environment(pod)["JAX_PLATFORMS"] == "cpu"
    assert trainer(pod)["volumeMounts"] == [mine]
    assert pod["spec"]["volumes"] == volumes
    assert [t for t in pod["spec"]["tolerations"] if t["key"] == "nvidia.com/gpu"] == [own]


def test_pods_without_gpus_are_as_before():
    asking = {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 1}}}
    server = build(SERVER, parameterServers={"template": {"spec": {"containers": [asking]}}})
    for pod in (build(), with_gpus({"cpu": "4"}), with_gpus({"nvidia.com/gpu": 0, "nvidia.com/hostdev": 1}), server):
        assert not {"BACKSTAY_GPUS", "JAX_PLATFORMS", "NVIDIA_VISIBLE_DEVICES"} & set(environment(pod))
        assert len(pod["spec"]["tolerations"]) == 2


@pytest.mark.parametrize("role", [SERVER, EVALUATOR])
def test_a_server_or_evaluator_without_a_gpu_does_not_see_those_of_its_node(role):
    assert environment(build(role, evaluator={}))["NVIDIA_VISIBLE_DEVICES"] == "void"
    mine = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]
    assert environment(build(role, evaluator={}, env=mine))["NVIDIA_VISIBLE_DEVICES"] == "all"


@pytest.mark.parametrize("other", [{"operator": "Exists", "effect": "NoExecute"}, {"key": "x", "operator": "Exists"}])
def test_a_toleration_of_something_else_does_not_replace_ours(other):
    pod = with_gpus({"nvidia.com/gpu": 1}, tolerations=[other])
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    anything = with_gpus({"nvidia.com/gpu": 1}, tolerations=[{"operator": "Exists"}])
    assert not any(t.get("key") == "nvidia.com/gpu" for t in anything["spec"]["tolerations"])
