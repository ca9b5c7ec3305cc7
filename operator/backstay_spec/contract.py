"""The names that the operator writes into pods and the trainer reads out of them.

This module is the only place where the two meet besides the control messages of `backstay_rpc`;
it exists so that neither has to import the other.
"""

from __future__ import annotations

from typing import Final

GROUP: Final = "backstay.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "TrainingJob"
PLURAL: Final = "trainingjobs"
SINGULAR: Final = "trainingjob"
SHORT_NAME: Final = "tj"

# Labels. https://kubernetes.io/docs/concepts/overview/working-with-objects/common-labels/
LABEL_JOB: Final = f"{GROUP}/job"
LABEL_ROLE: Final = f"{GROUP}/role"
LABEL_INDEX: Final = f"{GROUP}/index"
LABEL_INCARNATION: Final = f"{GROUP}/incarnation"
LABEL_MEMBER: Final = f"{GROUP}/member"  # of a worker: the pod's index inside its rank, if a rank has several
LABEL_QUEUE: Final = "kueue.x-k8s.io/queue-name"  # Kueue's; the name of a LocalQueue
# The numbers of servers and workers that Kueue admits together with this pod, such as 3.8.
LABEL_TOGETHER: Final = f"{GROUP}/admitted-together"

# Labels of a TrainingJob that is a trial of a sweep.
LABEL_SWEEP: Final = f"{GROUP}/sweep"  # the sweep's name
LABEL_SWEEP_ID: Final = f"{GROUP}/sweep-id"  # another sweep of this name has another id
LABEL_TRIAL: Final = f"{GROUP}/trial"  # the number of the trial, from 0

# The values of LABEL_ROLE and of BACKSTAY_ROLE.
ROLE_SERVER: Final = "parameter-server"
ROLE_WORKER: Final = "worker"
ROLE_EVALUATOR: Final = "evaluator"

CONTAINER: Final = "trainer"

MAX_INCARNATION: Final = 10**6 - 1
"""The largest incarnation of a pod. The names of checkpoint files have six digits for it."""

# Ports inside a pod. Each pod has its own address, so they are the same in every pod.
PORT_CONTROL: Final = 7077  # gRPC, the control service of backstay_rpc
PORT_DATA: Final = 7078  # tensors, over TCP
PORT_METRICS: Final = 9400  # HTTP: /metrics, /healthz, /readyz, /status, /curve, /trace
PORT_NAME_CONTROL: Final = "rpc"
PORT_NAME_DATA: Final = "data"
PORT_NAME_METRICS: Final = "metrics"

CHECKPOINT_MOUNT: Final = "/backstay/checkpoints"
CODE_MOUNT: Final = "/backstay/code"
TERMINATION_LOG: Final = "/dev/termination-log"

# The environment of a pod. None of these can be overridden by a template.
ENV_PREFIX: Final = "BACKSTAY_"
ENV_JOB: Final = "BACKSTAY_JOB"
ENV_NAMESPACE: Final = "BACKSTAY_NAMESPACE"
ENV_JOB_UID: Final = "BACKSTAY_JOB_UID"
ENV_ROLE: Final = "BACKSTAY_ROLE"  # ROLE_SERVER | ROLE_WORKER | ROLE_EVALUATOR
ENV_INDEX: Final = "BACKSTAY_INDEX"  # shard, rank, or 0
# The reason and the exit code of a pod that ends because another pod of its rank is lost.
GROUP_LOST: Final = "GroupLost"
GROUP_LOST_EXIT: Final = 81
ENV_MEMBER: Final = "BACKSTAY_MEMBER"  # the index of a worker's pod inside its rank; absent: 0
ENV_INCARNATION: Final = "BACKSTAY_INCARNATION"
# The incarnation of the shard's active server when this pod was made: a newer pod of the shard is its standby.
ENV_ACTIVE: Final = "BACKSTAY_ACTIVE"
# In a worker that was created after training: how it ended, JSON, `Trained` of backstay_spec.runtime.
ENV_TRAINED: Final = "BACKSTAY_TRAINED"
ENV_SERVERS: Final = "BACKSTAY_SERVERS"  # host:port of each shard's Service (control), by shard, comma-separated
ENV_PORT: Final = "BACKSTAY_PORT"  # PORT_CONTROL
ENV_DATA_PORT: Final = "BACKSTAY_DATA_PORT"  # PORT_DATA
ENV_METRICS_PORT: Final = "BACKSTAY_METRICS_PORT"  # PORT_METRICS
ENV_POD_NAME: Final = "BACKSTAY_POD_NAME"  # fieldRef metadata.name
ENV_POD_IP: Final = "BACKSTAY_POD_IP"  # fieldRef status.podIP: what other pods connect to
ENV_TOKEN: Final = "BACKSTAY_TOKEN"  # noqa: S105  # secretKeyRef: hex, the job's token (O7)
ENV_CONFIG: Final = "BACKSTAY_CONFIG"  # JSON, `RuntimeConfig` of backstay_spec.runtime
ENV_TERMINATION_LOG: Final = "BACKSTAY_TERMINATION_LOG"  # where to write the termination message
ENV_GPUS: Final = "BACKSTAY_GPUS"  # how many GPUs JAX must find; absent: any number
# Set by a kubelet, not by the operator: the address to bind (default: all of the pod's).
ENV_BIND: Final = "BACKSTAY_BIND"
# The same: a folder that outlives the pod, for records (default: they are beside the checkpoints alone).
ENV_KEEP: Final = "BACKSTAY_KEEP"

# Set by an embedded cluster for a dry run: `train` makes at most this number of updates.
ENV_MOST_STEPS: Final = "BACKSTAY_MOST_STEPS"

# Set by a user for one process, not in a pod: the folder of its checkpoints.
ENV_CHECKPOINT: Final = "BACKSTAY_CHECKPOINT"

SECRET_KEY_TOKEN: Final = "token"  # noqa: S105  # the key inside the job's Secret

# How a server's report of a worker begins whose heartbeats have stopped.
NO_HEARTBEAT: Final = "no heartbeat"

TRAINED: Final = "Trained"
AFTER_TRAINING_FAILED: Final = "AfterTrainingFailed"
ALREADY_COMPLETE: Final = "AlreadyComplete"
"""Results in the termination messages of workers whose training has ended. The last one is also one of servers."""
STOPPED_EARLY: Final = "StoppedEarly"
"""A reason in the termination message of a server, beside its result."""

DOES: Final = {
    "batch_wait": "waits for its input batch",
    "compute": "computes",
    "compile": "compiles",
    "evaluate": "evaluates",
    "exchange": "sends its contribution, or waits for the servers",
    "join": "tries to join the servers",
    "first_pull": "receives the parameters",
    "frozen": "reads the frozen arrays",
    "script": "runs other code of the script",
}
"""The activity of a worker or an evaluator at each point of the timeline, as the words after its name."""

STEP_PARTS: Final = {
    "batch_wait": "data",
    "compute": "compute",
    "push": "send",
    "update_wait": "wait",
    "pull": "receive",
}
"""The parts of a worker's step, by the point of the timeline that measures each; they add up to the step. `send` ends
when the slowest shard's stream has taken the contribution. `wait` ends when the first new parameters of the slowest
shard arrive: it contains the wait for the quorum and the update. `receive` is the rest."""

SLOW_PARTS: Final = {
    "data": "its input batches",
    "compute": "its computation",
    "send": "sending its contributions",
    "receive": "receiving the parameters",
}
"""The parts of a rank's step that other ranks may wait for, and how to name them to people."""

ANNOTATION_PREFIX: Final = f"{GROUP}"
