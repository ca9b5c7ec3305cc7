"""The conditions of a job and the one word that sums them up; also the form of every condition that is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final, Literal

from backstay_spec.events import shortened
from backstay_spec.types_status import Condition, Phase

SUCCEEDED: Final = "Succeeded"
FAILED: Final = "Failed"
SUSPENDED: Final = "Suspended"
RUNNING: Final = "Running"
TRAINING: Final = "Training"
PODS_CREATED: Final = "PodsCreated"
PODS_READY: Final = "PodsReady"
CHECKPOINTING: Final = "Checkpointing"
TRAINED: Final = "Trained"
AFTER_TRAINING_COMPLETE: Final = "AfterTrainingComplete"
STANDBYS_IN_SYNC: Final = "StandbysInSync"

# Reasons of RUNNING=False that distinguish two phases.
REASON_PENDING: Final = "PodsPending"
REASON_STARTING: Final = "PodsStarting"
REASON_SERVERS: Final = "ServersNotReady"
REASON_WORKERS: Final = "WorkersNotReady"

_MAX_MESSAGE: Final = 2000
# https://github.com/kubernetes/apimachinery: metav1.Condition.reason
_REASON: Final = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")


def whole_seconds(now: datetime) -> datetime:
    """`now` as a status can hold it, so that what is written equals what is read again."""
    return now.astimezone(UTC).replace(microsecond=0)


def reason_or(text: str, default: str) -> str:
    """`text` if it may be the reason of a condition, else `default`: it may come from a training script."""
    return text if len(text) <= 128 and _REASON.fullmatch(text) else default


def conditioned(
    before: Condition | None,
    kind: str,
    status: Literal["True", "False", "Unknown"],
    reason: str,
    message: str,
    now: datetime,
    generation: int,
) -> Condition:
    """Returns the condition now. The same object as `before` when nothing changed; `lastTransitionTime` changes only
    with `status`."""
    message = shortened(message, _MAX_MESSAGE)
    if before is not None and (before.status, before.reason, before.message, before.observed_generation) == (
        status,
        reason,
        message,
        generation,
    ):
        return before
    since = before.last_transition_time if before is not None and before.status == status else whole_seconds(now)
    return Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message,
        last_transition_time=since,
        observed_generation=generation,
    )


def holds(conditions: Mapping[str, Condition], kind: str) -> bool:
    """Returns whether the condition exists and is True."""
    found = conditions.get(kind)
    return found is not None and found.status == "True"


def has_ended(conditions: Mapping[str, Condition]) -> bool:
    """Returns whether the conditions say that the job has ended."""
    return holds(conditions, FAILED) or holds(conditions, SUCCEEDED)


def phase_of(conditions: Mapping[str, Condition]) -> Phase:
    """Returns the phase of a job, one word."""
    if holds(conditions, FAILED):
        return "Failed"
    if holds(conditions, SUCCEEDED):
        return "Succeeded"
    if holds(conditions, SUSPENDED):
        return "Suspended"
    if holds(conditions, RUNNING):
        return "Running"
    running = conditions.get(RUNNING)
    starting = (REASON_STARTING, REASON_SERVERS, REASON_WORKERS)
    return "Starting" if running is not None and running.reason in starting else "Pending"
