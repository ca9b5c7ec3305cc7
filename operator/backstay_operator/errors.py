"""Divides the errors of requests to the API server into branches that need different reactions.

::

    KubeError
      Unreachable     no answer: connection refused, reset, timed out      try again
      Answered        an answer with a status of 400 or more
        Unauthorized  401: the credentials were refused                    load them again, try again
        Forbidden     403: no right, or over a quota                       try again later
        NotFound      404: the object, its kind or its namespace is gone
        Conflict      409: a stale resourceVersion, or a failed test       read again
          AlreadyExists 409 on create: the name is taken
        Gone          410: a continue token or resourceVersion is too old  list again
            Invalid       422, and 400 on a create: this body can never be accepted
            Busy          429 and 5xx: temporarily unavailable                 try again, after `retry_after`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KubeError(Exception):
    """A request to the API server did not succeed."""

    #: a short word for metrics
    kind = "unknown"


class Unreachable(KubeError):  # noqa: N818  the names say what happened
    """The API server did not answer."""

    kind = "unreachable"


class Answered(KubeError):  # noqa: N818
    """The API server answered with an error.

    Attributes:
        code: the HTTP status.
        reason: the `reason` of the Status object, such as ``AlreadyExists``; "" when there was none.
        message: the server's message.
        retry_after: seconds to wait, from the server's answer; 0 if it has none.
    """

    kind = "refused"

    def __init__(self, what: str, code: int, reason: str, message: str, retry_after: float = 0.0) -> None:
        super().__init__(f"{what}: {code} {reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def reason_and_message(self) -> tuple[str, str]:
        """The reason and the message of the answer."""
        return self.reason or str(self.code), self.message

    @property
    def is_certain(self) -> bool:
        """Whether the server certainly did not do what was requested. A webhook is called before."""
        return self.code < 500 or "failed calling webhook" in self.message


class Unauthorized(Answered):
    """The API server answered with status 401."""

    kind = "unauthorized"


class Forbidden(Answered):
    """The API server answered with status 403."""

    kind = "forbidden"


class NotFound(Answered):
    """The API server answered with status 404."""

    kind = "not_found"


class Conflict(Answered):
    """The API server answered with status 409."""

    kind = "conflict"


class AlreadyExists(Conflict):
    """409 on a create."""

    kind = "already_exists"


class Gone(Answered):
    """The API server answered with status 410."""

    kind = "gone"


class Invalid(Answered):
    """The error 422 or 400, with which the server can never accept this body."""

    kind = "invalid"


class Busy(Answered):
    """The API server answered with status 429 or 5xx."""

    kind = "busy"


_BY_CODE: Mapping[int, type[Answered]] = {
    400: Invalid,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: Busy,
}


def answered(what: str, code: int, status: Mapping[str, Any], retry_after: str | None) -> Answered:
    """Returns the exception for an answer that is an error.

    Args:
        what: the request, for the message.
        code: the HTTP status, 400 or more.
        status: the body, if it was a Status object.
        retry_after: the header of that name.
    """
    reason = str(status.get("reason") or "")
    message = str(status.get("message") or "the answer had no message")
    details = status.get("details") or {}
    wait = retry_after if retry_after is not None else details.get("retryAfterSeconds")
    try:
        seconds = max(0.0, float(wait)) if wait is not None else 0.0
    except (TypeError, ValueError):
        seconds = 0.0
    kind = _BY_CODE.get(code, Busy if code >= 500 else Answered)
    if kind is Conflict and reason == "AlreadyExists":
        kind = AlreadyExists
    return kind(what, code, reason, message, seconds)
