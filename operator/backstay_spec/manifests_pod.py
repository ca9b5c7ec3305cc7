"""Builds the pod of one slot from the contract with the trainer, with the user's template merged over it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from backstay_spec import contract, gpus, names
from backstay_spec.grace import grace_seconds
from backstay_spec.manifests import owner_reference
from backstay_spec.merge import merged
from backstay_spec.runtime import BestConfig, CheckpointConfig, RuntimeConfig, Trained, WireConfig
from backstay_spec.types import (
    KUEUE_GROUP,
    Json,
    QueueGroup,
    TrainingJob,
    TrainingJobSpec,
)

CODE_VOLUME: Final = "backstay-code"
CHECKPOINT_VOLUME: Final = "backstay-checkpoints"
SERVER_GRACE: Final = 60  # seconds: a server that gets SIGTERM writes a checkpoint first
WORKER_GRACE: Final = 30
# After this long a pod leaves a node that does not answer, instead of Kubernetes' five minutes (O2).
NODE_TOLERANCE: Final = 5
# A group for the files of a volume, so that a container that is not root may write there.
FILES_GROUP: Final = 65532

# By default, glibc returns every large buffer to the kernel and allocates it again in every step, with page faults.
# Keeping the buffers makes the wire 40 % faster. `0` keeps large blocks on the heap; the others keep the heap.
ALLOCATOR: Final = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "2147483647",
    "MALLOC_TOP_PAD_": "67108864",
}
# gRPC prints a line for each connection that a leaving server closes. Failed calls raise errors, which Backstay logs.
GRPC_LOG: Final = {"GRPC_VERBOSITY": "NONE"}
_SERVES: Final = (contract.ROLE_SERVER, contract.ROLE_EVALUATOR)


def runtime_config(spec: TrainingJobSpec, log_format: str = "text") -> RuntimeConfig:
    """Returns the part of the spec that the job's pods get."""
    return RuntimeConfig(
        shards=spec.parameter_servers.replicas,
        workers=spec.workers.replicas,
        pods_per_rank=spec.workers.pods_per_rank,
        mode=spec.update.mode,
        backups=spec.update.backups,
        grace_seconds=grace_seconds(spec.update.grace),
        weighting=spec.update.weighting,
        max_non_finite=spec.update.max_non_finite,
        max_staleness=spec.update.max_staleness,
        staleness_damping=spec.update.staleness_damping,
        overlap=spec.update.overlap,
        wire=WireConfig(
            gradients=spec.wire.gradients,
            parameters=spec.wire.parameters,
            error_feedback=spec.wire.error_feedback,
        ),
        stall_seconds=spec.workers.stall_seconds,
        standbys=spec.parameter_servers.standbys,
        evaluator=spec.evaluator is not None,
        checkpoint=_checkpoint_config(spec),
        trace_megabytes=spec.trace.megabytes,
        log_format="json" if log_format == "json" else "text",
    )


def _checkpoint_config(spec: TrainingJobSpec) -> CheckpointConfig | None:
    checkpoint = spec.checkpoint
    best = checkpoint.keep_best
    uri = checkpoint.uri if checkpoint.volume is None else contract.CHECKPOINT_MOUNT
    if uri is None:
        return None
    return CheckpointConfig(
        uri=uri,
        every_steps=checkpoint.every_steps,
        every_seconds=checkpoint.every_seconds or None,
        keep=checkpoint.keep,
        keep_best=None if best is None else BestConfig(metric=best.metric, mode=best.mode),
        continue_from=checkpoint.continue_from,
    )


def template_of(spec: TrainingJobSpec, role: str) -> Json:
    """Returns the user's template for a role; empty when there is none."""
    if role == contract.ROLE_SERVER:
        return spec.parameter_servers.template or {}
    if role == contract.ROLE_WORKER:
        return spec.workers.template or {}
    return (spec.evaluator.template if spec.evaluator is not None else None) or {}


def is_grouped(spec: TrainingJobSpec, role: str) -> bool:
    """Returns whether the queue may admit pods of this role together. A template may name another queue, remove the
    labels, or have a group of Kueue that is the user's.
    """
    queue, metadata = spec.scheduling.queue, template_of(spec, role).get("metadata", {})
    if queue is None or metadata is None:
        return False
    labels, annotations = metadata.get("labels", {}), metadata.get("annotations", {})
    if labels is None or annotations is None or labels.get(contract.LABEL_QUEUE, queue) != queue:
        return False
    return KUEUE_GROUP.isdisjoint(labels) and KUEUE_GROUP.isdisjoint(annotations)


def pod(
    job: TrainingJob,
    slot: names.Slot,
    incarnation: int,
    servers: Sequence[str],
    log_format: str = "text",
    active: int = 0,
    trained: Trained | None = None,
    member: int | None = None,
    group: QueueGroup | None = None,
) -> dict[str, Any]:
    """Returns the manifest of one pod.

    Args:
        job: the job.
        slot: the slot that the pod fills.
        incarnation: the number of the pod in its slot.
        servers: ``host:port`` of each shard's Service, by shard.
        log_format: ``text`` or ``json``.
        active: the incarnation that serves the shard, for a server with standbys.
        trained: how training ended, for a worker that is created after training.
        member: the index of the pod inside its rank; None: the rank has one pod.
        group: the pods that the queue admits together with this one; None: none.
    """
    meta = job.metadata
    name = names.pod_name(meta.name, meta.uid, slot, incarnation, member)
    labels = {
        **names.object_labels(meta.name, meta.uid, slot.role),
        **names.slot_labels(meta.name, meta.uid, slot, incarnation),
    }
    if member is not None:
        labels[contract.LABEL_MEMBER] = str(member)
    environment = _environment(job, slot, incarnation, servers, log_format, active)
    if member is not None:
        environment.insert(0, {"name": contract.ENV_MEMBER, "value": str(member)})
    if trained is not None:
        value = trained.model_dump_json().replace("$(", "$$(")
        environment.insert(0, {"name": contract.ENV_TRAINED, "value": value})
    rank = slot.index if slot.role == contract.ROLE_WORKER else None
    built = {
        "metadata": {
            "labels": {**job.spec.scheduling.pod_labels(rank, group), **labels},
            "annotations": {
                "kubectl.kubernetes.io/default-container": contract.CONTAINER,
                **job.spec.scheduling.pod_annotations(slot.role, rank, group),
            },
        },
        "spec": _pod_spec(job.spec, slot.role, environment, reads_checkpoint=trained is not None),
    }
    if slot.role == contract.ROLE_SERVER and job.spec.parameter_servers.standbys:
        built["spec"]["affinity"] = _apart(names.slot_selector(meta.name, meta.uid, slot))
    if member is not None and (key := job.spec.scheduling.group_topology_key) is not None:
        own = names.slot_labels(meta.name, meta.uid, slot, incarnation)
        built["spec"]["affinity"] = _near(own, key, required=job.spec.scheduling.group_topology == "Required")
    result = merged(built, template_of(job.spec, slot.role))
    metadata, spec = result.setdefault("metadata", {}), result.setdefault("spec", {})
    metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    metadata.update(name=name, namespace=meta.namespace, ownerReferences=[owner_reference(meta)])
    metadata.pop("generateName", None)
    spec["restartPolicy"] = "Never"
    ours = _protect_container(spec, built["spec"]["containers"][0], environment)
    gpus.prepare(spec, ours, slot.role, 1 if member is None else job.spec.workers.pods_per_rank)
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _apart(selector: dict[str, str]) -> dict[str, Any]:
    """Prefer another node than that of the selector's pods, so that the loss of a node does not stop a server and its
    standby. This is a preference: one node is enough.
    """
    term = {"labelSelector": {"matchLabels": selector}, "topologyKey": "kubernetes.io/hostname"}
    return {
        "podAntiAffinity": {
            "preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]
        }
    }


def _near(labels: dict[str, str], key: str, *, required: bool) -> dict[str, Any]:
    """Place a pod near those with these labels, on nodes with the same value of the label `key`.

    The labels have the incarnation: terminating pods of a lost node do not hold the new ones there.
    """
    term = {"labelSelector": {"matchLabels": labels}, "topologyKey": key}
    if required:
        return {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }


def _protect_container(
    spec: dict[str, Any], built: dict[str, Any], environment: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """Restore what a template may not change: our environment, and where the termination message is read. Returns the
    container."""
    containers = spec.setdefault("containers", [])
    ours: dict[str, Any] | None = next((c for c in containers if c.get("name") == contract.CONTAINER), None)
    if ours is None:
        ours = built
        containers.insert(0, ours)
    theirs = [e for e in ours.get("env") or () if not str(e.get("name", "")).startswith(contract.ENV_PREFIX)]
    # Our variables first: `$(BACKSTAY_INDEX)` in a user's variable refers only to variables before it.
    ours["env"] = [*environment, *theirs]
    ours["terminationMessagePath"] = contract.TERMINATION_LOG
    return ours


def _environment(
    job: TrainingJob, slot: names.Slot, incarnation: int, servers: Sequence[str], log_format: str, active: int
) -> list[dict[str, Any]]:
    meta = job.metadata
    config = runtime_config(job.spec, log_format).model_dump(mode="json", exclude_none=True)
    variables = {
        contract.ENV_JOB: meta.name,
        contract.ENV_NAMESPACE: meta.namespace,
        contract.ENV_JOB_UID: meta.uid,
        contract.ENV_ROLE: slot.role,
        contract.ENV_INDEX: str(slot.index),
        contract.ENV_INCARNATION: str(incarnation),
        contract.ENV_SERVERS: ",".join(servers),
        contract.ENV_PORT: str(contract.PORT_CONTROL),
        contract.ENV_DATA_PORT: str(contract.PORT_DATA),
        contract.ENV_METRICS_PORT: str(contract.PORT_METRICS),
        contract.ENV_TERMINATION_LOG: contract.TERMINATION_LOG,
        # The kubelet expands $(NAME) in values, and a URI may hold one.
        contract.ENV_CONFIG: json.dumps(config, separators=(",", ":")).replace("$(", "$$("),
    }
    if slot.role == contract.ROLE_SERVER and job.spec.parameter_servers.standbys:
        variables[contract.ENV_ACTIVE] = str(active)
    token = {"name": names.secret_name(meta.name, meta.uid), "key": contract.SECRET_KEY_TOKEN}
    return [
        *({"name": name, "value": value} for name, value in variables.items()),
        {"name": contract.ENV_POD_NAME, "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": contract.ENV_POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": contract.ENV_TOKEN, "valueFrom": {"secretKeyRef": token}},
    ]


def _pod_spec(
    spec: TrainingJobSpec, role: str, environment: Sequence[dict[str, Any]], *, reads_checkpoint: bool
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if spec.code is not None:
        volumes.append({"name": CODE_VOLUME, "configMap": {"name": spec.code.config_map}})
        mounts.append({"name": CODE_VOLUME, "mountPath": contract.CODE_MOUNT, "readOnly": True})
    if spec.checkpoint.volume is not None and (role in _SERVES or reads_checkpoint):
        volumes.append({"name": CHECKPOINT_VOLUME, **spec.checkpoint.volume})
        mounts.append({"name": CHECKPOINT_VOLUME, "mountPath": contract.CHECKPOINT_MOUNT})
    built: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        # Otherwise the script is process 1 of a namespace. The kernel does not deliver signals without a handler to
        # process 1. SIGTERM during imports would be lost, and the SIGKILL and SIGSTOP of a fault script.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": SERVER_GRACE if role == contract.ROLE_SERVER else WORKER_GRACE,
        "securityContext": {
            "runAsNonRoot": True,
            "fsGroup": FILES_GROUP,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [
            {
                "key": f"node.kubernetes.io/{taint}",
                "operator": "Exists",
                "effect": "NoExecute",
                "tolerationSeconds": NODE_TOLERANCE,
            }
            for taint in ("not-ready", "unreachable")
        ],
        "containers": [_container(spec, role, environment, mounts)],
    }
    if volumes:
        built["volumes"] = volumes
    if spec.scheduling.priority_class_name is not None:
        built["priorityClassName"] = spec.scheduling.priority_class_name
    if spec.scheduling.scheduler_name is not None:
        built["schedulerName"] = spec.scheduling.scheduler_name
    return built


def _container(
    spec: TrainingJobSpec, role: str, environment: Sequence[dict[str, Any]], mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    defaults = GRPC_LOG | (ALLOCATOR if role != contract.ROLE_EVALUATOR else {})
    named = {str(item.get("name")) for item in spec.env}
    container: dict[str, Any] = {
        "name": contract.CONTAINER,
        "image": spec.image,
        "env": [
            *environment,
            *({"name": name, "value": value} for name, value in defaults.items() if name not in named),
            *(item for item in spec.env if not str(item.get("name", "")).startswith(contract.ENV_PREFIX)),
        ],
        "ports": [
            {"name": name, "containerPort": port, "protocol": "TCP"}
            for name, port in (
                (contract.PORT_NAME_CONTROL, contract.PORT_CONTROL),
                (contract.PORT_NAME_DATA, contract.PORT_DATA),
                (contract.PORT_NAME_METRICS, contract.PORT_METRICS),
            )
        ],
        "terminationMessagePath": contract.TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    working_dir = spec.working_dir if spec.working_dir is not None or spec.code is None else contract.CODE_MOUNT
    optional = {
        "command": list(spec.command),
        "args": list(spec.args),
        "envFrom": list(spec.env_from),
        "workingDir": working_dir,
        "volumeMounts": mounts,
    }
    container.update({field: value for field, value in optional.items() if value})
    if role != contract.ROLE_EVALUATOR:
        container["readinessProbe"] = {
            "httpGet": {"path": "/readyz", "port": contract.PORT_METRICS},
            "periodSeconds": 2,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        }
    return container
