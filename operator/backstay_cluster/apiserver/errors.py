"""The errors of the Kubernetes API. Each is a `Status` with a code and a machine-readable reason. If the caller's
object was invalid, it has causes that name the fields. Clients and tests use reason and cause; people read the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backstay_cluster.apiserver.objects import Obj


@dataclass(frozen=True)
class StatusCause:
    """One error in a field of an object (metav1.StatusCause)."""

    field: str
    reason: str
    message: str

    def json(self) -> Obj:
        """Returns the form of the cause in `details.causes`."""
        return {"reason": self.reason, "message": self.message, "field": self.field}


def required(field: str, detail: str = "") -> StatusCause:
    """Returns a required field that is missing."""
    return StatusCause(field, "FieldValueRequired", "Required value" + (f": {detail}" if detail else ""))


def invalid_value(field: str, value: Any, detail: str) -> StatusCause:
    """Returns a field whose value breaks a rule; `value` is printed as in Go's validation."""
    return StatusCause(field, "FieldValueInvalid", f"Invalid value: {show(value)}: {detail}")


def forbidden_field(field: str, detail: str) -> StatusCause:
    """Returns a field that may not be set or changed."""
    return StatusCause(field, "FieldValueForbidden", f"Forbidden: {detail}")


def not_supported(field: str, value: Any, supported: list[str]) -> StatusCause:
    """Returns a field whose value is not one of the supported values."""
    listed = ", ".join(show(v) for v in supported)
    return StatusCause(field, "FieldValueNotSupported", f"Unsupported value: {show(value)}: supported values: {listed}")


def show(value: Any) -> str:
    """Returns a value in the form of field errors, with strings quoted and objects as JSON."""
    import json

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


class ApiError(Exception):
    """A request that is answered with a failure `Status`."""

    def __init__(
        self, code: int, reason: str, message: str, *, details: Obj | None = None, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details
        self.headers = headers or {}

    def status(self) -> Obj:
        """Returns the `Status` object that the client gets."""
        body: Obj = {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
        }
        if self.details is not None:
            body["details"] = self.details
        body["code"] = self.code
        return body


class PlainNotFound(Exception):  # noqa: N818  # an answer, not an error of the server
    """A path that nothing serves; the real server answers these requests in plain text."""


def _details(group: str, kind: str, name: str, **more: Any) -> Obj:
    found = {"name": name, "group": group, "kind": kind, **more}
    return {k: v for k, v in found.items() if v}


def qualified(group: str, plural: str) -> str:
    """`pods`, or `gadgets.example.com`."""
    return f"{plural}.{group}" if group else plural


def not_found(group: str, plural: str, name: str) -> ApiError:
    """Returns the error 404 for an object that does not exist."""
    text = f'{qualified(group, plural)} "{name}" not found'
    return ApiError(404, "NotFound", text, details=_details(group, plural, name))


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """Returns the error 409 for a name that an object has already."""
    text = f'{qualified(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", text, details=_details(group, plural, name))


STALE = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(group: str, plural: str, name: str, why: str = STALE) -> ApiError:
    """Returns the error 409 for a request that was made for another version of the object."""
    text = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {why}'
    return ApiError(409, "Conflict", text, details=_details(group, plural, name))


def invalid(group: str, kind: str, name: str, causes: list[StatusCause]) -> ApiError:
    """Returns the error 422 for an object that breaks rules, with one cause for each."""
    texts = [f"{c.field}: {c.message}" for c in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    text = f'{qualified(group, kind)} "{name}" is invalid: {listed}'
    return ApiError(422, "Invalid", text, details=_details(group, kind, name, causes=[c.json() for c in causes]))


class WrongTypeError(ApiError):
    """The error 400 for a field of a built-in type that has another type in the object. In a patch, the real server
    answers with 422.

    Attributes:
        cause: names the field and both types.
    """

    def __init__(self, message: str, cause: Exception) -> None:
        super().__init__(400, "BadRequest", message)
        self.cause = cause


def bad_request(message: str) -> ApiError:
    """Returns the error with status 400."""
    return ApiError(400, "BadRequest", message)


def forbidden(group: str, plural: str, name: str, why: str, causes: list[StatusCause] | None = None) -> ApiError:
    """Returns the error with status 403."""
    text = f'{qualified(group, plural)} "{name}" is forbidden: {why}'
    details = _details(group, plural, name, causes=[c.json() for c in causes or []])
    return ApiError(403, "Forbidden", text, details=details)


def unauthorized() -> ApiError:
    """Returns the error 401 for a missing or invalid token."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> ApiError:
    """Returns the error with status 405."""
    return ApiError(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource", details={}
    )


def unsupported_media_type(message: str, *, details: Obj | None = None) -> ApiError:
    """Returns the error with status 415."""
    return ApiError(415, "UnsupportedMediaType", message, details=details)


def expired(message: str) -> ApiError:
    """Returns the error 410 for a history that no longer exists, so that the client must list again."""
    return ApiError(410, "Expired", message)


def too_large_resource_version(requested: int, current: int) -> ApiError:
    """Returns the error 504 for a version that is newer than this server's, because the server was restarted."""
    details = {
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    }
    return ApiError(
        504, "Timeout", f"Timeout: Too large resource version: {requested}, current: {current}", details=details
    )


def rejected_patch() -> ApiError:
    """Returns the error 422 without a name, which the real server sends for a JSON patch that cannot be applied."""
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request", details={})
