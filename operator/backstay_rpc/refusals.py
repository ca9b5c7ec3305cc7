"""The list of reasons for which a pod refuses a call or a stream, and what the caller does then."""

from __future__ import annotations

import enum
from typing import Final

__all__ = ["FINAL", "JOIN_AGAIN", "AfterRefusal", "RefusalCode"]


class AfterRefusal(enum.Enum):
    """The next action of a caller after a refusal."""

    STOP = enum.auto()
    """It stops, because each further call would be refused too."""

    JOIN = enum.auto()
    """It joins all servers again, which corrects the cause."""

    RETRY = enum.auto()
    """It calls again later."""


class RefusalCode(enum.StrEnum):
    """Why a pod refuses. The value is sent: in the frame `Refused`, and as the status of a gRPC call of this name."""

    def __new__(cls, value: str, after: AfterRefusal) -> RefusalCode:
        code = str.__new__(cls, value)
        code._value_ = value
        code.after = after
        return code

    after: AfterRefusal

    NOT_AUTHENTICATED = "UNAUTHENTICATED", AfterRefusal.STOP
    """The caller does not have the token of this job."""

    INVALID = "INVALID_ARGUMENT", AfterRefusal.STOP
    """The message breaks the rules, or the caller trains another model, or with other settings."""

    REPLACED = "PERMISSION_DENIED", AfterRefusal.STOP
    """A newer incarnation of the caller exists, and the caller is `Superseded`."""

    JOB_FAILED = "ABORTED", AfterRefusal.STOP
    """The job has failed; the message is ``reason: text``. The caller raises `JobFailed`."""

    MOVED = "FAILED_PRECONDITION", AfterRefusal.JOIN
    """The server has another shard, incarnation, term or version than the caller expects."""

    FULL = "RESOURCE_EXHAUSTED", AfterRefusal.JOIN
    """The message is too large, or the caller sends too much at the same time."""

    REPEATED = "ALREADY_EXISTS", AfterRefusal.JOIN
    """The contribution is on the server already."""

    NOT_READY = "UNAVAILABLE", AfterRefusal.JOIN
    """The server has not started, or is shutting down."""

    BROKEN = "INTERNAL", AfterRefusal.JOIN
    """The call has no valid message, or the server has a defect."""

    LATE = "DEADLINE_EXCEEDED", AfterRefusal.RETRY
    """The message of a call did not arrive in time."""


FINAL: Final = frozenset(
    code for code in RefusalCode if code.after is AfterRefusal.STOP and code is not RefusalCode.JOB_FAILED
)
"""The refusals that end the caller. A failed job ends it too, as `JobFailed`."""

JOIN_AGAIN: Final = frozenset(code for code in RefusalCode if code.after is AfterRefusal.JOIN)
