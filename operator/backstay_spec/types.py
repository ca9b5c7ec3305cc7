"""Defines the TrainingJob as typed models, with the names, types, defaults and meaning of the fields of its spec.

The other rules about a spec are in `backstay_spec.rules`. `backstay_spec.crd` generates the CustomResourceDefinition
from both, and `backstay_spec.validation` turns untrusted JSON into these models. Attributes are snake_case, and their
JSON names are camelCase. The docstring under a field is its description in the CRD and in ``kubectl explain``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from backstay_spec import contract
from backstay_spec.quorum import quorum_of
from backstay_spec.runtime import BestMode, ContinueFrom, GradientCodec, ParameterCodec, UpdateMode, Weighting
from backstay_spec.template import EnvFrom, EnvVar, PodTemplate, Shape, Volume
from backstay_spec.types_status import TrainingJobStatus

__all__ = [
    "KUEUE_FINALIZER",
    "KUEUE_GATE",
    "KUEUE_GROUP",
    "KUEUE_GROUP_NAME",
    "CheckpointSpec",
    "CleanPods",
    "Code",
    "EvaluatorSpec",
    "Gang",
    "GradientCodec",
    "Json",
    "KeepBest",
    "ObjectMeta",
    "ParameterCodec",
    "ParameterServers",
    "QueueGroup",
    "RunPolicy",
    "Scheduling",
    "TrainingJob",
    "TrainingJobSpec",
    "TrainingJobStatus",
    "UpdateMode",
    "UpdateSpec",
    "Weighting",
    "WireSpec",
    "Workers",
]

Json: TypeAlias = dict[str, Any]
"""A Kubernetes object that we pass on, such as a pod template, a volume or an environment variable."""

GroupTopology: TypeAlias = Literal["Preferred", "Required"]
CleanPods: TypeAlias = Literal["Running", "All", "None"]


class SpecModel(BaseModel):
    """A part of the spec, which is immutable, without unknown fields and without coercion (``"3"`` is not a number, as
    for the API server)."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        populate_by_name=True,
        alias_generator=to_camel,
        use_attribute_docstrings=True,
    )


class Code(SpecModel):
    """Where the training script comes from when it is not in the image."""

    config_map: str
    """Name of a ConfigMap in the job's namespace; its files become the working directory of every pod.
    `backstay run` uses the folder of the YAML file instead."""


class ParameterServers(SpecModel):
    """The pods that hold the parameters and apply the updates, one active pod for each shard."""

    replicas: int = 1
    """Number of shards that the parameters are split over."""

    standbys: int = 0
    """Hot standbys for each shard, 0 or 1. A standby holds the same state and takes over when the active
    server dies."""

    template: Annotated[Json | None, Shape(PodTemplate)] = None
    """PodTemplateSpec that the operator merges (strategic merge) into the pod that it builds. The name of the training
    container is `trainer`."""

    max_restarts: int = 10
    """The job fails after more crashes of this role than this number. Disruptions (eviction, preemption, node loss) do
    not count."""


class Workers(SpecModel):
    """The pods that compute gradients."""

    replicas: int = 1
    """Number of ranks, backups included. A rank is a worker pod, or `podsPerRank` of them. `kubectl scale` and
    autoscalers set this field."""

    pods_per_rank: int = 1
    """Number of pods of a rank. JAX uses the devices of all its pods as one mesh, so that a model may be larger than
    the devices of one pod. The pods of a rank are created and replaced together. Quorum, backups, `maxRestarts` and
    `kubectl scale` count ranks."""

    stall_seconds: int = 300
    """The operator replaces a worker that sends no gradient for this many seconds, or for 20 times its own median step
    if that is longer. Compiling has another limit. A silent worker, which also answers no call, is replaced after
    30 s, or after a tenth of this time if that is longer. That limit is never longer than this time."""

    template: Annotated[Json | None, Shape(PodTemplate)] = None
    """PodTemplateSpec that the operator merges (strategic merge) into the pod that it builds. The name of the training
    container is `trainer`."""

    max_restarts: int = 100
    """The job fails after more crashes of this role than this number. Disruptions (eviction, preemption, node loss) do
    not count."""


class EvaluatorSpec(SpecModel):
    """One pod that runs `evaluate` on new parameters; `{}` selects the defaults."""

    template: Annotated[Json | None, Shape(PodTemplate)] = None
    """PodTemplateSpec that the operator merges (strategic merge) into the pod that it builds. The name of the training
    container is `trainer`."""

    max_restarts: int = 10
    """The job fails after more crashes of this role than this number. Disruptions (eviction, preemption, node loss) do
    not count."""


class UpdateSpec(SpecModel):
    """How gradients become updates."""

    mode: UpdateMode = "Sync"
    """With `Sync`, an update is the mean of one gradient each of (workers - backups) workers, computed on the same
    version. With `Async`, every gradient is a separate update."""

    backups: int | str = 0
    """Sync only: workers that an update does not wait for. A number of pods, or whole percents: with "5%", an update of
    N gradients has N + N*5% workers."""

    grace: str = "0s"
    """Sync only: how long an update still waits for more gradients when (workers - backups) of them are complete. It is
    a duration such as `500ms` or `2s`, or `Auto`: the wait that gives the most applied gradients a second. An update
    never waits for a worker that is dead, replaced or stalled. May change while the job runs."""

    weighting: Weighting = "Equal"
    """Sync only: `Equal` gives all gradients of an update the same weight, `Examples` their numbers of examples."""

    max_non_finite: int = 3
    """The job fails after this many updates in a row that have a gradient with NaN or infinity. Such an update is
    skipped and counted, and does not change the parameters."""

    max_staleness: int | None = None
    """Async only: a gradient computed more than this many versions ago is rejected and computed again.
    Absent: no bound."""

    staleness_damping: bool = False
    """Async only: scale a gradient by 1/(1+staleness)."""

    overlap: bool = False
    """Async only: a worker computes its next gradient while the last one is in flight. Each gradient is then computed
    from parameters without the worker's last one, which counts in its staleness, so `maxStaleness` must be at least 1.
    Local steps have `LocalSteps(overlap=...)` instead."""

    def quorum(self, world: int) -> int:
        """Returns how many gradients make one update, with `world` workers."""
        return quorum_of(self.backups, world) if self.mode == "Sync" else 1


class WireSpec(SpecModel):
    """How tensors are encoded between workers and servers. Small leaves (fewer than 4,096 elements) always travel
    exactly, and so do checkpoints."""

    gradients: GradientCodec = "Exact"
    """The encoding of gradients. `BFloat16` needs half of the bytes, `Int8` about a quarter, and `Int4` about an
    eighth."""

    parameters: ParameterCodec = "Exact"
    """The encoding of parameters. With `BFloat16` the servers keep full precision."""

    error_feedback: bool | None = None
    """Whether a worker adds the rounding error of a contribution to its next contribution. Needs `gradients: Int8` or
    `Int4`, and 4 bytes of host memory on each worker for each encoded element. Absent: only with local steps."""


class KeepBest(SpecModel):
    """Which checkpoint is the best one: the one whose evaluation has the largest or the smallest value of a metric."""

    metric: str
    """The name of a number that `evaluate` returns. Evaluations without this name do not count."""

    mode: BestMode
    """With `Max`, the largest value is the best, such as an accuracy. With `Min`, the smallest value is the best,
    such as a loss. It has no default: the wrong one would keep the worst checkpoint."""


class CheckpointSpec(SpecModel):
    """Where and how often the job's state is stored; with neither `uri` nor `volume` nothing is stored."""

    uri: str | None = None
    """A folder that every server can reach, as an fsspec URI: `s3://bucket/folder`, `gs://bucket/folder`,
    `file:///shared/folder`."""

    volume: Annotated[Json | None, Shape(Volume)] = None
    """A Volume source without its name, such as `persistentVolumeClaim: {claimName: ckpt}`. The operator mounts it at
    /backstay/checkpoints in servers and evaluator. Servers on several nodes need a volume that they can share
    (ReadWriteMany)."""

    every_steps: int | None = None
    """Number of updates between two checkpoints. `everySeconds` also applies, and the earlier of both counts."""

    every_seconds: int = 60
    """Number of seconds between two checkpoints, or 0 for none by time. The last step of a job is always stored."""

    keep: int = 3
    """How many complete checkpoints of the job are kept. Files of another history are never deleted."""

    keep_best: KeepBest | None = None
    """Keep the best checkpoint of the job in addition to the newest ones. Needs an evaluator, which evaluates the
    checkpoints. `backstay.load(uri, best=True)` reads the best one. Absent: only the newest ones are kept."""

    continue_from: ContinueFrom = "SameJob"
    """The checkpoints in the folder from which training may continue. `SameJob`: those of a job with this namespace,
    name and seed; the job fails if the folder has other checkpoints. `Any`: the newest one of any job."""


class TraceSpec(SpecModel):
    """The timeline of what each pod did: `backstay trace`."""

    megabytes: int = 16
    """Memory of shard 0's server for the newest spans of all pods, or 0 to keep none. The spans are stored
    beside the checkpoints when the job ends or a pod dies."""


class RunPolicy(SpecModel):
    """When the job runs, how long it may run, and which of its objects stay afterwards."""

    suspend: bool = False
    """Delete the job's pods, workers first, and keep its state in its checkpoint. A suspended job may be
    edited freely."""

    active_deadline_seconds: int | None = None
    """The job fails when it has run this long since its start, or since it was last resumed. Absent: no limit."""

    pending_deadline_seconds: int = 600
    """The job fails when a pod that an update needs has not started for this long. Updates need each server, and with
    backups or in Async mode only some of the workers. They need a worker by which the job was scaled up once it has
    joined. Before the first update, the limit includes a pod that started and did not join the others. After the first
    update, the operator replaces such a pod."""

    after_training_seconds: int = 600
    """Time limit for the code after `train` in worker 0, which may export or upload the model. If the script has not
    ended by then, the job fails. The last checkpoint stays."""

    ttl_seconds_after_finished: int | None = None
    """Delete the TrainingJob this long after it ended. Absent: never."""

    clean_pods: CleanPods = "Running"
    """Which pods the operator deletes when the job has ended: those that still run (`Running`), `All`, or `None`."""


class Gang(SpecModel):
    """Pods join a PodGroup, so that a gang scheduler starts them together. The PodGroup is yours: the
    job names it."""

    pod_group: str
    """Name of a PodGroup in the job's namespace."""

    by: Literal["Job", "Rank"] = "Job"
    """With `Job`, all pods join the PodGroup. With `Rank`, the worker pods of rank 3 join the one with the name of
    `podGroup` and `-3`, and other pods join none."""

    kind: Literal["Coscheduling", "Volcano"] = "Coscheduling"
    """The API of the PodGroup, which is the scheduler plug-in Coscheduling (scheduling.x-k8s.io), or Volcano."""


class Scheduling(SpecModel):
    """Passed on to the pods' scheduler, for every role."""

    priority_class_name: str | None = None
    """The pods' PriorityClass."""

    scheduler_name: str | None = None
    """The pods' scheduler. Absent: the cluster's default."""

    gang: Gang | None = None
    """Start all pods together or none."""

    queue: str | None = None
    """Name of a Kueue LocalQueue that admits the job's pods (label `kueue.x-k8s.io/queue-name`). It admits the servers
    and the quorum of workers together, then the pods of each other rank, and all others one by one."""

    group_topology_key: str | None = None
    """Place the pods of a rank (`workers.podsPerRank`) on nodes with the same value of this label, such as
    `topology.kubernetes.io/zone` or the label of a rack. Different ranks may lie anywhere. Absent: anywhere."""

    group_topology: GroupTopology = "Preferred"
    """With `Required`, the pods of a rank start only on such nodes, and otherwise stay pending."""

    def pod_labels(self, rank: int | None = None, group: QueueGroup | None = None) -> dict[str, str]:
        """Labels that a pod gets so that `queue` and `gang` take effect.

        Args:
            rank: the rank of a worker; None: it is another pod.
            group: the pods that the queue admits together with this one; None: it admits this one alone.
        """
        labels = {}
        if self.queue is not None:
            labels[contract.LABEL_QUEUE] = self.queue
            if group is not None:
                labels[KUEUE_GROUP_NAME] = group.name
                if group.is_of_job:
                    labels[contract.LABEL_TOGETHER] = f"{group.servers}.{group.workers}"
        pod_group = self._pod_group_of(rank)
        if self.gang is not None and self.gang.kind == "Coscheduling" and pod_group:
            labels["scheduling.x-k8s.io/pod-group"] = pod_group
        return labels

    def pod_annotations(self, role: str, rank: int | None = None, group: QueueGroup | None = None) -> dict[str, str]:
        """Annotations for the same purpose. See `pod_labels`; `role` is the value of the pod's role label."""
        annotations = {}
        if self.queue is not None and group is not None:
            annotations[_GROUP_COUNT] = str(group.servers + group.workers)
            # The group ends when all its pods have ended. Without this, it keeps the quota of pods that are never
            # created again, and its finalizers keep the pods of a deleted job.
            annotations[_RETRIABLE] = "false"
            # A pod of an old incarnation that is still alive is refused by all others, so nothing waits for its end.
            annotations[_FORCEFULLY] = "true"
            if group.is_of_job:
                # Kueue would give a role to each set of pods with another affinity, and it accepts eight roles.
                annotations[_ROLE] = role
        pod_group = self._pod_group_of(rank)
        if self.gang is not None and self.gang.kind == "Volcano" and pod_group:
            annotations["scheduling.k8s.io/group-name"] = pod_group
        return annotations

    def _pod_group_of(self, rank: int | None) -> str:
        """Returns the PodGroup of a gang scheduler that a pod joins, or an empty text if it joins none."""
        if self.gang is None:
            return ""
        if self.gang.by == "Job":
            return self.gang.pod_group
        return "" if rank is None else f"{self.gang.pod_group}-{rank}"


# https://kueue.sigs.k8s.io/docs/reference/labels-and-annotations/
KUEUE_GROUP_NAME: Final = "kueue.x-k8s.io/pod-group-name"
_GROUP_COUNT: Final = "kueue.x-k8s.io/pod-group-total-count"
_RETRIABLE: Final = "kueue.x-k8s.io/retriable-in-group"
KUEUE_GATE: Final = "kueue.x-k8s.io/admission"
KUEUE_FINALIZER: Final = "kueue.x-k8s.io/managed"
_FORCEFULLY: Final = "kueue.x-k8s.io/safe-to-forcefully-delete"
_ROLE: Final = "kueue.x-k8s.io/role-hash"

KUEUE_GROUP: Final = frozenset({KUEUE_GROUP_NAME, _GROUP_COUNT, _RETRIABLE, _FORCEFULLY, _ROLE})
"""The labels and annotations that make a pod a part of a group of Kueue."""


@dataclass(frozen=True)
class QueueGroup:
    """The pods that Kueue admits together.

    Attributes:
        name: a name that no other group has.
        servers, workers: how many pods of the two roles there are.
        is_of_job: whether these are the pods that a job needs, and not those of one rank.
    """

    name: str
    servers: int
    workers: int
    is_of_job: bool = True


class TrainingJobSpec(SpecModel):
    """The training, its pods, and how gradients become updates."""

    image: str
    """Container image of every role. The template of a role may name another image."""

    command: list[str] = Field(default_factory=list)
    """Command of every role, such as `[python, train.py]`. Absent: the image's entrypoint."""

    args: list[str] = Field(default_factory=list)
    """Arguments of the command."""

    env: Annotated[list[Json], Shape(EnvVar)] = Field(default_factory=list)
    """Environment variables of every role, as in a container. The prefix `BACKSTAY_` is reserved."""

    env_from: Annotated[list[Json], Shape(EnvFrom)] = Field(default_factory=list)
    """Sources of environment variables of every role, as in a container."""

    working_dir: str | None = None
    """Working directory of every role. For `backstay run`, a relative path begins at the folder of the YAML file, and
    the default is that folder."""

    code: Code | None = None
    """Files to mount as the working directory."""

    parameter_servers: ParameterServers = Field(default_factory=ParameterServers)
    """The parameter servers."""

    workers: Workers = Field(default_factory=Workers)
    """The workers."""

    evaluator: EvaluatorSpec | None = None
    """The evaluator. Absent: the job has none, and worker 0 evaluates once at the end."""

    update: UpdateSpec = Field(default_factory=UpdateSpec)
    """How gradients become updates."""

    wire: WireSpec = Field(default_factory=WireSpec)
    """How tensors are encoded between workers and servers."""

    checkpoint: CheckpointSpec = Field(default_factory=CheckpointSpec)
    """Where and how often the job's state is stored."""

    trace: TraceSpec = Field(default_factory=TraceSpec)
    """The timeline of what each pod did."""

    run_policy: RunPolicy = Field(default_factory=RunPolicy)
    """When the job runs, and which of its objects stay afterwards."""

    scheduling: Scheduling = Field(default_factory=Scheduling)
    """Where the pods run."""


class ObjectMeta(BaseModel):
    """The metadata of an object, as far as Backstay reads it; everything else is kept as it is."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True, alias_generator=to_camel)

    name: str = ""
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class TrainingJob(BaseModel):
    """A job that trains a JAX model with parameter servers and keeps training when pods die."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, alias_generator=to_camel)

    api_version: Literal["backstay.dev/v1alpha1"] = "backstay.dev/v1alpha1"
    kind: Literal["TrainingJob"] = "TrainingJob"
    metadata: ObjectMeta
    spec: TrainingJobSpec
    status: TrainingJobStatus = Field(default_factory=TrainingJobStatus)

    def to_dict(self) -> Json:
        """Returns the job as JSON for the API server, in camelCase and without absent values."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
