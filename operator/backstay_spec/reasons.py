"""Lists every condition, event and reason of a TrainingJob, with its meaning and the action of a person.

`docs/generate.py` makes the reference page from these tables. `tests/docs/test_reasons.py` compares them with the code
that sends events and writes conditions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["CONDITIONS", "EVENTS", "FAILURES", "ConditionDoc", "EventDoc", "FailureDoc"]


@dataclass(frozen=True, slots=True)
class ConditionDoc:
    """The documentation of one condition.

    Attributes:
        type: type of the condition.
        when_true: the state in which its status is True.
        reasons: reason -> meaning, for each reason that the planner writes itself.
        action: advice for a person.
    """

    type: str
    when_true: str
    reasons: dict[str, str]
    action: str


@dataclass(frozen=True, slots=True)
class EventDoc:
    """The documentation of one event.

    Attributes:
        reason: reason of the event.
        type: ``Normal`` or ``Warning``.
        meaning: the occurrence that it reports.
        action: advice for a person; ``None.`` where nothing has to be done.
    """

    reason: str
    type: Literal["Normal", "Warning"]
    meaning: str
    action: str


@dataclass(frozen=True, slots=True)
class FailureDoc:
    """The documentation of one reason of the condition Failed.

    Attributes:
        reason: reason of the condition.
        meaning: the cause of the failure.
        action: advice for a person.
    """

    reason: str
    meaning: str
    action: str


_POD_START: Final = {
    "InvalidImageName": "The name of an image is invalid. The job fails immediately.",
    "InvalidPod": "The API server refused a pod as invalid. The job fails immediately.",
    "ImagePullFailed": "The node cannot pull an image.",
    "ContainerConfigFailed": "A ConfigMap, Secret or key that a container uses does not exist.",
    "Unschedulable": "No node that the pod may use has enough free resources.",
    "SchedulingGated": "A queue or a person has set scheduling gates on a pod. The deadline does not count this time.",
    "PodRefused": "A quota or an admission webhook refused a pod.",
    "PodHeldBack": "The queue must first admit other pods of the job, or still counts an old pod. The deadline does "
    "not count this time.",
    "NeverStarted": "Pods of a slot end before they start. The message has the newest reason.",
    "GivenBack": "A rank has room for some of its pods only. They are deleted, and the rank is tried again.",
    "NotStarted": "The kubelet has not started a container after 30 seconds.",
    "NotJoined": "A container runs, but its script has not called `train`, or `train` cannot reach the servers.",
}
_POD_WAITS: Final = {**_POD_START, "PodRefused": f"{_POD_START['PodRefused']} The operator tries again."}
_POD_START_ACTION: Final = (
    "Remove the cause that the message names. The pod then starts, unless `runPolicy.pendingDeadlineSeconds` "
    "has passed."
)
_FAILED_ACTION: Final = "Remove the cause that the message names. Delete the job and apply it again."
_FAILS_IMMEDIATELY: Final = ("InvalidImageName", "InvalidPod")

CONDITIONS: Final[tuple[ConditionDoc, ...]] = (
    ConditionDoc(
        "PodsCreated",
        "Every pod of the job has been created.",
        {
            "AllCreated": "Every pod has been created.",
            "Creating": "The operator creates pods. The status is Unknown until it has observed all of them.",
            "Preparing": "The operator creates the Secret and the Services.",
            "PodRefused": "The API server refused a pod. The message has the reason.",
            "PodHeldBack": "The queue must first admit other pods of the job, or still counts an old pod.",
            "InvalidPod": "The API server refused a pod as invalid. The job fails.",
            "Suspended": "The job is suspended.",
            "Finished": "The job ended before the operator had observed all pods.",
        },
        "For `PodRefused`: raise the quota, or correct what the message names.",
    ),
    ConditionDoc(
        "PodsReady",
        "All pods of the job are ready, standbys included.",
        {
            "AllReady": "All pods are ready.",
            "NotReady": "Some pods are starting.",
            "BackingOff": "The operator waits before it creates the replacement of a pod that crashed.",
            **_POD_WAITS,
            "Suspended": "The job is suspended.",
            "Trained": "Training is complete, and the other pods are ending.",
            "Finished": "The job has ended.",
        },
        _POD_START_ACTION,
    ),
    ConditionDoc(
        "Running",
        "All servers and at least one worker are ready, or were ready and updates continue.",
        {
            "Training": "All servers and at least one worker are ready.",
            "AfterTraining": "Training is complete. The script of worker 0 still runs.",
            "PodsPending": "No pod has started. The phase is Pending.",
            "PodsStarting": "Pods are starting. The phase is Starting.",
            "ServersNotReady": "A server is not ready, and no updates are applied.",
            "WorkersNotReady": "No worker is ready, and no updates are applied.",
            "Suspended": "The job is suspended.",
            "Finished": "The job has ended.",
        },
        "For a job that stays in `PodsPending` or `PodsStarting`: see the condition PodsReady.",
    ),
    ConditionDoc(
        "Training",
        "Updates are applied.",
        {
            "Updating": "Updates are applied. The message has the newest step that the operator observed.",
            "NotStarted": "No update has been applied yet.",
            "ServersNotReady": "A server is not ready.",
            "WorkersNotReady": "No worker is ready.",
            "NoUpdate": "All pods are ready, but no update was applied for 30 seconds or for five usual updates.",
            "Ending": "The last update is made. The job stores and evaluates its result.",
            "Trained": "Training is complete.",
            "Suspended": "The job is suspended.",
            "Finished": "The job has ended.",
        },
        "For `NoUpdate`: look for a slow worker in the logs and in `backstay_straggler_delay_seconds`.",
    ),
    ConditionDoc(
        "Checkpointing",
        "Checkpoints are configured, and the newest one was stored.",
        {
            "Configured": "Checkpoints are written.",
            "NotConfigured": "`spec.checkpoint` has neither `uri` nor `volume`.",
            "WriteFailed": "The newest checkpoint could not be written. Training continues.",
        },
        "For `WriteFailed`: free space or correct the rights. The last checkpoint must succeed within 10 minutes.",
    ),
    ConditionDoc(
        "StandbysInSync",
        "The standby of each shard holds everything that its active server holds.",
        {
            "AllInSync": "Every standby is in sync.",
            "Starting": "Not all servers have answered the operator yet.",
            "Filling": "A standby is starting, or receives the state of its shard.",
            "BudgetSpent": "No further standby is created, because `parameterServers.maxRestarts` is used up.",
            "Suspended": "The job is suspended.",
            "Finished": "The job has ended.",
            **_POD_WAITS,
        },
        "Only jobs with `standbys: 1` have this condition. While it is False, the loss of a named shard's server "
        "causes a rollback.",
    ),
    ConditionDoc(
        "Trained",
        "The last update is stored, or applied where no checkpoints are configured.",
        {
            "Completed": "The job trained to its last step.",
            "AlreadyComplete": "The checkpoint already had the last step. Nothing was trained.",
            "StoppedEarly": "`stop_when` ended training before the last step.",
            "Suspended": "The job was suspended, and training starts again from the checkpoint.",
        },
        "None.",
    ),
    ConditionDoc(
        "AfterTrainingComplete",
        "The script of worker 0 has ended with exit code 0.",
        {
            "Completed": "The script of worker 0 has ended with exit code 0.",
            "ScriptRuns": "The script still runs. The status is Unknown.",
            "PodLost": "The pod of worker 0 was evicted or lost. The job is Succeeded.",
            "AfterTrainingFailed": "The script failed, or ran longer than `runPolicy.afterTrainingSeconds`.",
            "Suspended": "The job is suspended.",
        },
        "For `PodLost`: check whether the export is complete. To run it again, delete the job and apply it again.",
    ),
    ConditionDoc(
        "Suspended",
        "`runPolicy.suspend` is true, and no pod runs. The step and the checkpoint in the status are the last ones.",
        {
            "Suspending": "`runPolicy.suspend` is true, and pods still run. Servers store a checkpoint.",
            "Suspended": "`runPolicy.suspend` is true, and no pod runs.",
            "Resumed": "`runPolicy.suspend` is false again.",
        },
        "Set `runPolicy.suspend` to false to continue.",
    ),
    ConditionDoc(
        "Succeeded",
        "Training is complete, and the script of worker 0 has ended.",
        {
            "Completed": "The job trained to its last step.",
            "AlreadyComplete": "The checkpoint already had the last step. Nothing was trained.",
            "StoppedEarly": "`stop_when` ended training before the last step.",
        },
        "None.",
    ),
    ConditionDoc(
        "Failed",
        "The job has ended with an error. The reasons are in the next table.",
        {},
        "See the reason.",
    ),
)

_CHARGED: Final = "The death counts against `maxRestarts` of the role."
_FREE: Final = "The death does not count against `maxRestarts`."

EVENTS: Final[tuple[EventDoc, ...]] = (
    EventDoc("Running", "Normal", "Training has begun, or has begun again after an interruption.", "None."),
    EventDoc("Continued", "Normal", "Training continues from a checkpoint of an earlier run.", "None."),
    EventDoc("Evaluated", "Normal", "`evaluate` returned the numbers in the message.", "None."),
    EventDoc("Scaled", "Normal", "`workers.replicas` changed.", "None."),
    EventDoc("Suspending", "Normal", "The operator deletes the pods of a job that is being suspended.", "None."),
    EventDoc("Suspended", "Normal", "The pods of a suspended job have ended.", "None."),
    EventDoc("Resumed", "Normal", "The operator creates the pods of a resumed job.", "None."),
    EventDoc(
        "Superseded",
        "Normal",
        "The operator deletes a pod, because a newer pod fills its slot. This is part of a replacement, not a fault.",
        "None.",
    ),
    EventDoc("Trained", "Normal", "The last update is stored. The script of worker 0 may still run.", "None."),
    EventDoc("Succeeded", "Normal", "The job has succeeded.", "None."),
    EventDoc(
        "Failed", "Warning", "The job has failed. The message begins with the reason.", "See *Reasons of failure*."
    ),
    EventDoc(
        "NotConfigured",
        "Warning",
        "The job has no checkpoints.",
        "Set `checkpoint.uri` or `checkpoint.volume`, if the job must survive the loss of a server.",
    ),
    EventDoc(
        "CheckpointFailed",
        "Warning",
        "A checkpoint could not be written. Training continues.",
        "Free space, or correct the rights of the folder.",
    ),
    EventDoc(
        "ArgsWithoutCommand",
        "Warning",
        "`spec.args` is given without `spec.command`. It replaces the command of an image without an entrypoint.",
        'Write `spec.command`, such as `["python", "train.py"]`.',
    ),
    EventDoc(
        "LabelIgnored",
        "Warning",
        "The job has a label or annotation that queues, schedulers or meshes read from pods. The pods do not get it.",
        "Write it where the message says. For Kueue that is `spec.scheduling.queue`.",
    ),
    EventDoc(
        "UnusualContainerName",
        "Warning",
        "A template has a container whose name is similar to `trainer`. It runs beside the training container.",
        "Correct the name, if the container was meant to train.",
    ),
    EventDoc(
        "RolledBack",
        "Warning",
        "All shards went back to a checkpoint. The message has the number of updates that are computed again.",
        "If this is frequent, use `standbys: 1` or store checkpoints more often.",
    ),
    EventDoc(
        "LeaseTakenOver",
        "Warning",
        "The folder of the checkpoints had a lease that was not renewed: of a run that was killed, or an unreadable "
        "file. This run took the folder over.",
        "None, if the other run has ended. Otherwise use another folder for one of the two.",
    ),
    EventDoc(
        "SettingsChanged",
        "Warning",
        "This run has other settings than the run that stored the checkpoint.",
        "None, if you changed them on purpose.",
    ),
    EventDoc(
        "ReportStored",
        "Normal",
        "A report about a pod that died is stored: its last spans, and its stacks and output where it could send them.",
        "Read the report, or use `backstay history`.",
    ),
    EventDoc(
        "EvaluationFailed",
        "Warning",
        "`evaluate` raised an exception. Training continues.",
        "Correct `evaluate`. The message has the exception.",
    ),
    EventDoc(
        "ZeroGradients",
        "Warning",
        "The gradient of the named parameters was exactly zero in the first updates of every worker.",
        "Freeze or remove these parameters, correct `loss`, or make them model state with `has_state=True`.",
    ),
    EventDoc(
        "UnchangedParameters",
        "Warning",
        "More than half of the bytes that each update sends did not change in the first updates.",
        "Freeze them with `train(frozen=...)` or `train(frozen_state=...)`. See the page about fine-tuning.",
    ),
    EventDoc(
        "NonFiniteLoss",
        "Warning",
        "The loss of an update was NaN or infinite although its gradients were finite. The update was applied.",
        "Look for an empty batch, a division by zero or a logarithm of zero in `batches` and `loss`.",
    ),
    EventDoc(
        "NonFiniteMetrics",
        "Warning",
        "`evaluate` or `loss` returned NaN or infinity for the named metrics. Training continues.",
        "Look for an empty batch, a division by zero or a logarithm of zero in these functions.",
    ),
    EventDoc(
        "SameBatches",
        "Warning",
        "The losses of all workers were equal bit for bit in 20 updates in a row, so all workers compute the same "
        "batch. Sync mode only.",
        "Make the batch from the key, such as with `from_dataset`, and not from a global generator.",
    ),
    EventDoc(
        "ImpureBatches",
        "Warning",
        "`batches` returned two different batches for the first key of a worker.",
        "Make the batch from the key, such as with `from_dataset` or `from_iterator`.",
    ),
    EventDoc(
        "TrainingInterrupted",
        "Warning",
        "No updates are applied any more. The message names the pods that are not ready.",
        "See the condition Training.",
    ),
    EventDoc(
        "AfterTrainingLost",
        "Warning",
        "The pod of worker 0 was lost after training. Its script may be incomplete.",
        "Check whether the export is complete.",
    ),
    EventDoc(
        "BudgetSpent",
        "Warning",
        "No further standby is created. Training continues without.",
        "Read the log of the standby, and raise `parameterServers.maxRestarts`.",
    ),
    EventDoc("Crashed", "Warning", f"A container ended with an error. {_CHARGED}", "Read the traceback and the log."),
    EventDoc(
        "OutOfMemory",
        "Warning",
        f"A container reached its memory limit. {_CHARGED}",
        "Raise the limit in the role's template, or reduce `batch_size`.",
    ),
    EventDoc(
        "ExitedEarly",
        "Warning",
        f"A script ended with exit code 0 before training was complete. {_CHARGED}",
        "Check that the script calls `train` in every pod.",
    ),
    EventDoc(
        "Stalled",
        "Warning",
        "A pod sent no heartbeat and did not answer the operator, or a worker sent no gradient for `stallSeconds`. "
        f"{_CHARGED}",
        "If the steps are that long, raise `workers.stallSeconds`.",
    ),
    EventDoc(
        "Unresponsive",
        "Warning",
        f"All servers of the job were silent for five minutes, or the pods of a rank lost each other. {_FREE}",
        "Check the nodes and the network.",
    ),
    EventDoc("Evicted", "Warning", f"Kubernetes evicted a pod. {_FREE}", "None."),
    EventDoc("Preempted", "Warning", f"Kubernetes preempted a pod for a pod of higher priority. {_FREE}", "None."),
    EventDoc("NodeLost", "Warning", f"The node of a pod is lost. {_FREE}", "None."),
    EventDoc("NodeShutdown", "Warning", f"The node of a pod stopped. {_FREE}", "None."),
    EventDoc(
        "NotAdmitted",
        "Warning",
        f"The kubelet of the chosen node refused a pod, or the pods of a rank do not fit near each other. {_FREE}",
        "None. The scheduler chooses again for the replacement.",
    ),
    EventDoc("Deleted", "Warning", f"A person or another controller deleted a pod. {_FREE}", "None."),
    EventDoc("Vanished", "Warning", f"A pod no longer exists, and no deletion was observed. {_FREE}", "None."),
    *(
        EventDoc(reason, "Warning", meaning, _FAILED_ACTION if reason in _FAILS_IMMEDIATELY else _POD_START_ACTION)
        for reason, meaning in _POD_WAITS.items()
        if reason != "PodHeldBack"
    ),
)

_SCRIPT: Final = "Correct the script. `python train.py` makes these checks in one process."

FAILURES: Final[tuple[FailureDoc, ...]] = (
    FailureDoc("InvalidSpec", "The TrainingJob is invalid.", "Run `backstay validate`. It names each mistake."),
    FailureDoc(
        "ScriptFailed",
        "Most pods of a role raised the same exception before the first update, or all workers after it. Or a worker "
        "that each update needs raised it three times in a row without a contribution. Or most pods ended twice with "
        'the same last line of their logs before the first update, such as after `sys.exit("no data")`.',
        _SCRIPT,
    ),
    FailureDoc(
        "BatchesEnded",
        "`batches` raised StopIteration, because its iterator ended.",
        "Use `from_dataset` or `from_iterator`. `batches` must return a batch for every key.",
    ),
    FailureDoc(
        "EmptyBatch",
        "`batches` returned a batch without rows. The message has the step and the rank.",
        "Return at least one row for every key, or use `from_dataset`.",
    ),
    FailureDoc("CrashLoop", "A pod crashed six times in a row before the first update.", "Read the log of that pod."),
    FailureDoc(
        "MaxRestartsExceeded",
        "A role crashed more often than its `maxRestarts`.",
        "Read the events for the causes. Raise `maxRestarts` for a long job.",
    ),
    FailureDoc("DeadlineExceeded", "The job ran for `runPolicy.activeDeadlineSeconds`.", "Raise the limit."),
    FailureDoc(
        "AfterTrainingFailed",
        "Code after `train` failed in worker 0, or took longer than `runPolicy.afterTrainingSeconds`.",
        "Correct the code. Delete the job and apply it again: the new job runs only this code.",
    ),
    FailureDoc(
        "Refused",
        "The servers refused a pod whose parameters or settings differ.",
        "Use one image and one script for all pods. The message names the difference.",
    ),
    FailureDoc("TrainingFailed", "A server reported a failure without a reason.", "Read the server's log."),
    FailureDoc(
        "NonFiniteGradients",
        "`update.maxNonFinite` updates in a row had a gradient with NaN or infinity.",
        "Lower the learning rate, or set `clip_norm`. The message names step and rank.",
    ),
    FailureDoc(
        "CheckpointFailed",
        "The checkpoint of the last update could not be stored for 10 minutes.",
        "Free space or correct the rights. Delete the job and apply it again: it continues from the newest checkpoint.",
    ),
    FailureDoc("ShardFailed", "A server could not apply an update.", "Read the log of that server."),
    FailureDoc("ConfigurationError", "An argument of `train` or a function of the script is invalid.", _SCRIPT),
    FailureDoc("TreeError", "The parameters are not a pytree of arrays.", _SCRIPT),
    FailureDoc("OptimizerError", "The servers cannot compute the optimizer on their shards.", _SCRIPT),
    FailureDoc(
        "CheckpointInUse",
        "Another run writes into the checkpoint folder.",
        "Wait until it ends, or use another folder.",
    ),
    FailureDoc(
        "CheckpointOfAnotherJob",
        "The checkpoints in the folder belong to another job or seed.",
        "Use another folder, or set `checkpoint.continueFrom: Any`.",
    ),
    FailureDoc(
        "CheckpointFolderUnusable",
        "A server cannot write or read the checkpoint folder.",
        "Make the user of the containers the owner of the folder.",
    ),
    FailureDoc(
        "CheckpointError",
        "The newest checkpoint has another structure or format, or the last one could not be stored.",
        "Use another folder, or the script that wrote the checkpoint.",
    ),
    FailureDoc("StorageError", "The checkpoint storage did not answer for 10 minutes.", "Check the storage."),
    *(
        FailureDoc(reason, f"{meaning} `runPolicy.pendingDeadlineSeconds` has passed.", _FAILED_ACTION)
        for reason, meaning in _POD_START.items()
        if reason not in (*_FAILS_IMMEDIATELY, "SchedulingGated", "PodHeldBack")
    ),
    FailureDoc("InvalidImageName", "The name of an image is invalid.", "Correct `image`."),
    FailureDoc(
        "InvalidPod", "The API server refused a pod as invalid.", "Correct the template that the message names."
    ),
)
