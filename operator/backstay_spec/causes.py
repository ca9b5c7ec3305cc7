"""Why a pod died, or why it cannot start, read from its status alone (O4).

The table is complete and pure. One place decides which deaths are charged to a budget, which are replaced without
charge, and which fail the job immediately. Sources: the pod lifecycle and the pod disruption conditions of Kubernetes,
https://kubernetes.io/docs/concepts/workloads/pods/disruptions/#pod-disruption-conditions, and the kubelet's reasons.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final

from backstay_spec import contract
from backstay_spec.contract import AFTER_TRAINING_FAILED, ALREADY_COMPLETE, TRAINED
from backstay_spec.events import shortened
from backstay_spec.job_report import MOST, JobReport
from backstay_spec.observed import Manifest


class Cause(StrEnum):
    """Why a pod is dead: the reason in events and metrics."""

    CRASHED = "Crashed"
    OUT_OF_MEMORY = "OutOfMemory"
    EXITED_EARLY = "ExitedEarly"
    STALLED = "Stalled"
    UNRESPONSIVE = "Unresponsive"
    EVICTED = "Evicted"
    PREEMPTED = "Preempted"
    NODE_LOST = "NodeLost"
    NODE_SHUTDOWN = "NodeShutdown"
    NOT_ADMITTED = "NotAdmitted"
    DELETED = "Deleted"
    VANISHED = "Vanished"

    @property
    def charged(self) -> bool:
        """Whether the program is to blame, so that the death is charged to its role's `maxRestarts`."""
        return self in _CHARGED


_CHARGED: Final = frozenset({Cause.CRASHED, Cause.OUT_OF_MEMORY, Cause.EXITED_EARLY, Cause.STALLED})

# The reason of the condition DisruptionTarget.
_DISRUPTIONS: Final = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.EVICTED,
    "DeletionByTaintManager": Cause.NODE_LOST,
    "DeletionByPodGC": Cause.NODE_LOST,
    "TerminationByKubelet": Cause.EVICTED,
}
# `status.reason` of a pod; all that begin with OutOf mean that the node lacks a resource.
_REASONS: Final = {
    "Evicted": Cause.EVICTED,
    "Preempting": Cause.PREEMPTED,
    "NodeLost": Cause.NODE_LOST,
    "Terminated": Cause.NODE_SHUTDOWN,
    "NodeShutdown": Cause.NODE_SHUTDOWN,
    "Shutdown": Cause.NODE_SHUTDOWN,
    "NodeAffinity": Cause.NOT_ADMITTED,
    "UnexpectedAdmissionError": Cause.NOT_ADMITTED,
    "AdmissionError": Cause.NOT_ADMITTED,
}


class Blocked(StrEnum):
    """Why a pod does not start: the reason in the condition PodsReady."""

    IMAGE_INVALID = "InvalidImageName"
    POD_INVALID = "InvalidPod"
    IMAGE_PULL = "ImagePullFailed"
    CONFIG = "ContainerConfigFailed"
    UNSCHEDULABLE = "Unschedulable"
    GATED = "SchedulingGated"
    REFUSED = "PodRefused"
    HELD = "PodHeldBack"
    NOT_STARTED = "NotStarted"
    NEVER_STARTED = "NeverStarted"
    GIVEN_BACK = "GivenBack"
    NOT_JOINED = "NotJoined"

    @property
    def permanent(self) -> bool:
        """Whether another attempt would fail too."""
        return self in (Blocked.IMAGE_INVALID, Blocked.POD_INVALID)


_WAITING: Final = {
    "InvalidImageName": Blocked.IMAGE_INVALID,
    "ErrImagePull": Blocked.IMAGE_PULL,
    "ImagePullBackOff": Blocked.IMAGE_PULL,
    "ErrImageNeverPull": Blocked.IMAGE_PULL,
    "ImageInspectError": Blocked.IMAGE_PULL,
    "RegistryUnavailable": Blocked.IMAGE_PULL,
    "SignatureValidationFailed": Blocked.IMAGE_PULL,
    "CreateContainerConfigError": Blocked.CONFIG,
    "CreateContainerError": Blocked.CONFIG,
    "RunContainerError": Blocked.CONFIG,
    "PreStartHookError": Blocked.CONFIG,
    "PostStartHookError": Blocked.CONFIG,
}
# In the last lines of a process that JAX aborts because another one of its rank has ended.
_JAX_LOST: Final = "another task died"
#: Exit codes above it are 128 + the signal that ended the process: the convention of shells and container runtimes.
SIGNALLED: Final = 128
UNKNOWN_STATE: Final = "ContainerStatusUnknown"
"""The reason of a container's end that its node does not know."""
FAILED: Final = "Failed"
_RESULTS: Final = ("Succeeded", ALREADY_COMPLETE, FAILED, "Refused", TRAINED, AFTER_TRAINING_FAILED)
_PERMANENT_REFUSALS: Final = frozenset({"Invalid", "BadRequest"})


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a pod is dead.

    Attributes:
        cause: the cause.
        text: the cause in words, without the pod's name, such as ``exit code 137 (SIGKILL)``.
    """

    cause: Cause
    text: str


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a pod does not start, with what Kubernetes says about it."""

    blocked: Blocked
    text: str


@dataclass(frozen=True, slots=True)
class PodOutcome:
    """The termination message of a pod.

    Attributes:
        result: ``Succeeded``, ``AlreadyComplete`` or ``Failed``, of a server; the first two also of an evaluator;
            ``Refused``, of a pod that the servers
            refused, because its parameters differ; ``Trained``, of a worker in which `train` has returned, and
            ``AfterTrainingFailed``, of a worker whose script raised an exception later.
        reason, message: the cause of a failure; ``StoppedEarly`` where training ended before its last step, and
            ``AlreadyComplete`` where it had ended before this run.
        step, term, checkpoint: the state that it reached; None or empty where the message has none.
        returned: the incarnation of rank 0 that has the result, as shard 0 reported; 0: none; None: not known.
        traceback: the exception's traceback; empty if there is none.
        content: the whole message.
    """

    result: str
    reason: str = ""
    message: str = ""
    step: int | None = None
    term: int | None = None
    checkpoint: str = ""
    returned: int | None = None
    traceback: str = ""
    content: Mapping[str, Any] = field(default_factory=dict)

    def report(self) -> JobReport:
        """Returns the rows of the report that the message has."""
        return JobReport.in_message(self.content)

    @property
    def refused(self) -> bool:
        """Whether this pod was refused for a reason that also applies to its replacement."""
        return self.result == "Refused"

    @property
    def succeeded(self) -> bool:
        """Whether the job has reached its last step."""
        return self.result in ("Succeeded", ALREADY_COMPLETE)

    @property
    def returned_from_train(self) -> bool:
        """Whether it is the message of a worker in which `train` has returned."""
        return self.result in (TRAINED, AFTER_TRAINING_FAILED)


def terminated_state(pod: Manifest) -> Mapping[str, Any] | None:
    """Returns the `terminated` state of the container `trainer`, or None while it has not ended."""
    for status in _statuses(pod, "containerStatuses"):
        if status.get("name") == contract.CONTAINER:
            state: Mapping[str, Any] | None = (status.get("state") or {}).get("terminated")
            return state
    return None


def condition_of(manifest: Manifest, kind: str) -> Mapping[str, Any]:
    """Returns the condition of this type of a pod or a TrainingJob; empty if it has none."""
    conditions: Iterable[Mapping[str, Any]] = (manifest.get("status") or {}).get("conditions") or ()
    return next((condition for condition in conditions if condition.get("type") == kind), {})


def has_ended(pod: Manifest) -> bool:
    """Returns whether all containers of a pod have ended. The kubelet may report the phase seconds later. A pod with
    sidecars ends when its phase is terminal."""
    states = [(container.get("state") or {}).get("terminated") for container in _statuses(pod, "containerStatuses")]
    ended = all(state is not None and state.get("reason") != UNKNOWN_STATE for state in states)
    return bool(states) and ended and not _sidecars(pod)


def outcome_of(pod: Manifest) -> PodOutcome | None:
    """Returns the outcome in a pod's termination message. Returns None if the pod has not ended, or the message is not
    from the trainer.

    ``Succeeded`` counts only with exit code 0: otherwise the message may be the last lines of a log.
    """
    state = terminated_state(pod)
    if state is None:
        return None
    message = parsed(state.get("message") or "")
    if message is None or message.get("result") not in _RESULTS:
        return None
    if message.get("evaluates") is True and state.get("exitCode") != 0:
        return None  # a worker that was created after training died in `evaluate`, before `train` returned
    if message["result"] in ("Succeeded", ALREADY_COMPLETE) and state.get("exitCode") != 0:
        return None
    return PodOutcome(
        result=message["result"],
        reason=_text(message.get("reason")),
        message=_text(message.get("message")),
        step=_count(message.get("step")),
        term=_count(message.get("term")),
        checkpoint=_text(message.get("checkpoint")),
        returned=_count(message.get("returned")),
        traceback=_text(message.get("traceback")),
        content=message,
    )


def reached_by(pod: Manifest) -> tuple[int | None, int] | None:
    """Term and step of the newest version in the message of a pod that has ended; the term may be missing. Returns None
    if the message has no step."""
    state = terminated_state(pod)
    message = None if state is None else parsed(state.get("message") or "")
    step = None if message is None else _count(message.get("step"))
    return None if message is None or step is None else (_count(message.get("term")), step)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MOST else None


def finite(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Returns the metrics that JSON can hold: finite numbers under names."""
    kept = {}
    for name, value in metrics.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < float("inf"):
            kept[str(name)] = float(value)
    return kept


def verdict_of(pod: Manifest) -> Verdict:
    """Returns why this pod, which is dead, died.

    A disruption takes precedence over an exit code: the exit code of an evicted or deleted container depends on how
    its program handles SIGTERM.
    """
    status: Mapping[str, Any] = pod.get("status") or {}
    disruption = condition_of(pod, "DisruptionTarget")
    reason = status.get("reason") or ""
    reported = status.get("message") or ""
    state = terminated_state(pod)
    if disruption.get("status") == "True":
        why = disruption.get("reason") or ""
        cause = _DISRUPTIONS.get(why, Cause.EVICTED)
        if why == "TerminationByKubelet" and reason in _REASONS:
            cause = _REASONS[reason]
        return Verdict(cause, _joined(why, disruption.get("message") or reported))
    if reason in _REASONS or reason.lower().startswith("outof"):
        return Verdict(_REASONS.get(reason, Cause.NOT_ADMITTED), _joined(reason, reported))
    if _deleted_before_it_ended(pod, state):
        queue = condition_of(pod, "TerminationTarget")  # set by Kueue
        if queue.get("status") == "True":
            return Verdict(Cause.EVICTED, _joined(queue.get("reason") or "", queue.get("message") or ""))
        return Verdict(Cause.DELETED, "deleted")
    return _exit_verdict(pod, state, reason, reported)


def _exit_verdict(pod: Manifest, state: Mapping[str, Any] | None, reason: str, reported: str) -> Verdict:
    status: Mapping[str, Any] = pod.get("status") or {}
    if (failed := _failed_init(pod, state)) is not None:
        return failed
    states = [(s.get("state") or {}).get("terminated") for s in status.get("containerStatuses") or ()]
    if any(s is not None and s.get("reason") == "OOMKilled" for s in states):
        return Verdict(Cause.OUT_OF_MEMORY, "a container needed more memory than its limit (OOMKilled)")
    if state is None:
        return Verdict(Cause.CRASHED, _joined(reason or "its container has no exit status", reported))
    if state.get("reason") == UNKNOWN_STATE:
        return Verdict(Cause.NODE_LOST, f"the node lost its container ({UNKNOWN_STATE})")
    if is_group_lost({"status": status}):
        why = _final_message(str(state.get("message") or ""), 0)
        return Verdict(Cause.UNRESPONSIVE, f"the pods of its rank lost each other{why}")
    if state.get("exitCode") == 0:
        why = "exit code 0 before the job was done: the script must call backstay.train, and wait for what it returns"
        return Verdict(Cause.EXITED_EARLY, why)
    return Verdict(Cause.CRASHED, _end_text(state))


def is_group_lost(pod: Manifest) -> bool:
    """Returns whether a pod ended because another pod of its rank was lost. Then that pod has the cause."""
    state = terminated_state(pod) or {}
    if state.get("exitCode") == contract.GROUP_LOST_EXIT:
        return True
    # JAX may abort the process before it ends. If it has not written its message, the message is the end of its log.
    message = str(state.get("message") or "")
    is_lost = (parsed(message) or {}).get("reason") == contract.GROUP_LOST or _JAX_LOST in message.lower()
    return is_lost and is_aborted(pod)


def may_have_left(pod: Manifest) -> bool:
    """Returns whether a pod ended by SIGTERM and has no mark of a deletion or an eviction. In a rank, another one may
    have it: the pods of a rank leave together."""
    is_deleted = bool((pod.get("metadata") or {}).get("deletionTimestamp"))
    is_marked = is_deleted or bool(condition_of(pod, "DisruptionTarget"))
    return not is_marked and (terminated_state(pod) or {}).get("exitCode") == SIGNALLED + signal.SIGTERM


def is_aborted(pod: Manifest) -> bool:
    """Returns whether a pod ended by SIGABRT."""
    return (terminated_state(pod) or {}).get("exitCode") == SIGNALLED + signal.SIGABRT


def _sidecars(pod: Manifest) -> set[str]:
    """Returns the names of the init containers that run beside the trainer. They are restarted, and end after it."""
    containers = (pod.get("spec") or {}).get("initContainers") or ()
    return {container.get("name", "") for container in containers if container.get("restartPolicy") == "Always"}


def _failed_init(pod: Manifest, state: Mapping[str, Any] | None) -> Verdict | None:
    """Returns the verdict about a pod whose trainer never ran because an init container failed, or None if none did."""
    if state is not None and state.get("reason") != UNKNOWN_STATE:
        return None
    sidecars = _sidecars(pod)
    for container in _statuses(pod, "initContainerStatuses"):
        ended = (container.get("state") or {}).get("terminated")
        if container.get("name") in sidecars or ended is None:
            continue
        if ended.get("exitCode") == 0 or ended.get("reason") == UNKNOWN_STATE:
            continue
        name = f"the init container {container.get('name', '')}"
        if ended.get("reason") == "OOMKilled":
            return Verdict(Cause.OUT_OF_MEMORY, f"{name} needed more memory than its limit (OOMKilled)")
        return Verdict(Cause.CRASHED, f"{name} failed with {_end_text(ended)}")
    return None


def _end_text(state: Mapping[str, Any]) -> str:
    """Returns the exit code of a container that has ended, with its reason and its final message."""
    code, named = state.get("exitCode"), state.get("reason") or ""
    number = code if isinstance(code, int) else -1
    text = exit_text(number)
    if named not in ("", "Error"):
        text = f"{text}, {named}"
    return text + _final_message(state.get("message") or "", number)


def exit_text(code: int) -> str:
    """Returns an exit code in words, with the name of the signal that it stands for."""
    if code > SIGNALLED:
        try:
            return f"exit code {code} ({signal.Signals(code - SIGNALLED).name})"
        except ValueError:
            pass
    return f"exit code {code}"


def obstacle_of(pod: Manifest) -> Obstacle | None:
    """Returns why this pod, which lives, has not started; None once a container of it that is not an init container
    runs or ran."""
    status: Mapping[str, Any] = pod.get("status") or {}
    started, initializes = any(map(_has_started, _statuses(pod, "containerStatuses"))), ""
    sidecars = _sidecars(pod)
    # Once a container has started, a sidecar that ends and restarts does not keep the pod from starting.
    for kind in ("containerStatuses",) if started else ("initContainerStatuses", "containerStatuses"):
        for container in _statuses(pod, kind):
            state = container.get("state") or {}
            waiting = state.get("waiting") or {}
            ended = (container.get("lastState") or {}).get("terminated")
            if waiting.get("reason") == "CrashLoopBackOff" and ended is not None:
                text = f"the container {container.get('name', '')} ends again and again: {_end_text(ended)}"
                return Obstacle(Blocked.NOT_STARTED, text)
            blocked = _WAITING.get(waiting.get("reason") or "")
            if blocked is not None:
                reported = _joined(waiting["reason"], waiting.get("message") or container.get("image") or "")
                return Obstacle(blocked, reported)
            if kind == "initContainerStatuses" and "running" in state:
                if container.get("name") not in sidecars:
                    initializes = f"the init container {container.get('name', '')} runs"
                elif container.get("started") is False:
                    initializes = f"the startup probe of the sidecar {container.get('name', '')} has not succeeded"
    if started or status.get("phase") not in (None, "Pending"):
        return None
    scheduled = condition_of(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        why = scheduled.get("message") or scheduled.get("reason") or ""
        if scheduled.get("reason") == Blocked.GATED:
            return Obstacle(Blocked.GATED, _joined(Blocked.GATED, why))
        return Obstacle(Blocked.UNSCHEDULABLE, _joined(Blocked.UNSCHEDULABLE, why))
    if initializes:
        return Obstacle(Blocked.NOT_STARTED, f"its containers have not started: {initializes}")
    # Kubernetes reports a volume that cannot be mounted, such as the code's ConfigMap, only in the pod's events.
    metadata = pod.get("metadata") or {}
    command = f"kubectl --namespace {metadata.get('namespace', '')} events --for pod/{metadata.get('name', '')}"
    why = (
        f"`{command}` shows the reason: an image that is being pulled, or a ConfigMap, Secret or volume that is missing"
    )
    return Obstacle(Blocked.NOT_STARTED, f"its containers have not started; {why}")


def _has_started(container: Mapping[str, Any]) -> bool:
    state = container.get("state") or {}
    return "running" in state or "terminated" in state


def refusal_obstacle(reason: str, message: str) -> Obstacle:
    """Returns why a pod could not be created, from the API server's refusal, or from what the pod waits for."""
    if reason == Blocked.HELD:
        return Obstacle(Blocked.HELD, message)
    blocked = Blocked.POD_INVALID if reason in _PERMANENT_REFUSALS else Blocked.REFUSED
    return Obstacle(blocked, _joined(reason, message))


def parse_time(text: Any) -> datetime | None:
    """Returns a metav1.Time, aware; None when there is none."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def _deleted_before_it_ended(pod: Manifest, state: Mapping[str, Any] | None) -> bool:
    metadata = pod.get("metadata") or {}
    deadline = parse_time(metadata.get("deletionTimestamp"))
    if deadline is None:
        return False
    ended = parse_time(state.get("finishedAt")) if state is not None else None
    if ended is None:
        return (pod.get("status") or {}).get("phase") not in ("Failed", "Succeeded")
    # deletionTimestamp is the end of the grace period, not the time of the request.
    requested = deadline - timedelta(seconds=metadata.get("deletionGracePeriodSeconds") or 0)
    return ended >= requested


def _statuses(pod: Manifest, field: str) -> Iterable[Mapping[str, Any]]:
    return (pod.get("status") or {}).get(field) or ()


# The kubelet may have cut the first line at its beginning.
_PROGRESS = re.compile(r"step \d+/\d+  loss |^[^:]*  [\d.]+ examples/s$|^\[Gloo\] Rank \d+ is connected ")


def _final_message(message: str, code: int) -> str:
    """Returns the text that a termination message adds to an exit code: its JSON's `message`, or the last lines of a
    log.

    A process that a signal ended printed nothing about its end. The last lines of its log may be old, and the lines
    with its progress do not explain the end.
    """
    found = parsed(message)
    if found is not None:
        reason, text = _text(found.get("reason")), _text(found.get("message"))
        words = shortened(text, 600) if text.startswith(f"{reason}: ") else _joined(reason, text)
        errors = shortened("\n".join(_text(found.get("stderr")).strip().splitlines()[-5:]), 400)
        if errors and not words:
            return f"; its standard error ends: {errors}"
        return f": {words}" if words else ""
    printed = message.strip().splitlines()
    if code > SIGNALLED:
        printed = [line for line in printed if not _PROGRESS.search(line)]
    lines = [_log_line(line) for line in printed[-5:]]
    words = shortened("\n".join(lines), 400)
    if not words:
        return ""
    return f"; its log ends: {words}" if code > SIGNALLED else f": {words}"


def _log_line(line: str) -> str:
    """Returns a line of a log without what only machines need of it, where it is one of JSON."""
    found = parsed(line)
    return _text(found.get("message")) or line if found is not None else line


def parsed(text: str) -> dict[str, Any] | None:
    """Returns the object in a text that is one JSON object, such as a pod's termination message, or None if it is not
    one."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _joined(head: str, tail: str) -> str:
    return f"{head}: {shortened(tail, 600)}" if head and tail else head or shortened(tail, 600)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
