"""The errors of the Kubernetes API: each is a `Status` with a code, a machine-readable reason and, if the caller's
object was at fault, causes that name the field. Clients and tests decide by reason and cause, people read the message.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backstay_cluster.apiserver.objects import Obj


@dataclass(frozen=True)
class Cause:
    """One thing that is wrong with a field of an object (metav1.StatusCause)."""

    field: str
    reason: str
    message: str

    def json(self) -> Obj:
        """As it stands in `details.causes`."""
        return {"reason": self.reason, "message": self.message, "field": self.field}


def required(field: str, detail: str = "") -> Cause:
    """A field that must be there and is not."""
    return Cause(field, "FieldValueRequired", "Required value" + (f": {detail}" if detail else ""))


def invalid_value(field: str, value: Any, detail: str) -> Cause:
    """A field whose value breaks a rule; `value` is shown as Go's validation shows it."""
    return Cause(field, "FieldValueInvalid", f"Invalid value: {show(value)}: {detail}")


def forbidden_field(field: str, detail: str) -> Cause:
    """A field that may not be set, or not be changed."""
    return Cause(field, "FieldValueForbidden", f"Forbidden: {detail}")


def not_supported(field: str, value: Any, supported: list[str]) -> Cause:
    """A field whose value is none of the values it can take."""
    listed = ", ".join(show(v) for v in supported)
    return Cause(field, "FieldValueNotSupported", f"Unsupported value: {show(value)}: supported values: {listed}")


def show(value: Any) -> str:
    """A value as field errors print it: strings quoted, objects by their JSON."""
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
        """The `Status` object that the client gets."""
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


class PlainNotFound(Exception):  # noqa: N818  # it is an answer, not a fault
    """A path that nothing serves; the real server answers these in plain text."""


def _details(group: str, kind: str, name: str, **more: Any) -> Obj:
    found = {"name": name, "group": group, "kind": kind, **more}
    return {k: v for k, v in found.items() if v}


def qualified(group: str, plural: str) -> str:
    """`pods`, or `gadgets.example.com`."""
    return f"{plural}.{group}" if group else plural


def not_found(group: str, plural: str, name: str) -> ApiError:
    """404: there is no such object."""
    text = f'{qualified(group, plural)} "{name}" not found'
    return ApiError(404, "NotFound", text, details=_details(group, plural, name))


def already_exists(group: str, plural: str, name: str) -> ApiError:
    """409: an object of that name exists."""
    text = f'{qualified(group, plural)} "{name}" already exists'
    return ApiError(409, "AlreadyExists", text, details=_details(group, plural, name))


STALE = "the object has been modified; please apply your changes to the latest version and try again"


def conflict(group: str, plural: str, name: str, why: str = STALE) -> ApiError:
    """409: the request was made for another version of the object."""
    text = f'Operation cannot be fulfilled on {qualified(group, plural)} "{name}": {why}'
    return ApiError(409, "Conflict", text, details=_details(group, plural, name))


def invalid(group: str, kind: str, name: str, causes: list[Cause]) -> ApiError:
    """422: the object breaks rules; one cause for each."""
    texts = [f"{c.field}: {c.message}" for c in causes]
    listed = texts[0] if len(texts) == 1 else "[" + ", ".join(texts) + "]"
    text = f'{qualified(group, kind)} "{name}" is invalid: {listed}'
    return ApiError(422, "Invalid", text, details=_details(group, kind, name, causes=[c.json() for c in causes]))


def bad_request(message: str) -> ApiError:
    """400."""
    return ApiError(400, "BadRequest", message)


def forbidden(group: str, plural: str, name: str, why: str, causes: list[Cause] | None = None) -> ApiError:
    """403."""
    text = f'{qualified(group, plural)} "{name}" is forbidden: {why}'
    details = _details(group, plural, name, causes=[c.json() for c in causes or []])
    return ApiError(403, "Forbidden", text, details=details)


def unauthorized() -> ApiError:
    """401: no token, or not ours."""
    return ApiError(401, "Unauthorized", "Unauthorized")


def method_not_allowed() -> ApiError:
    """405."""
    return ApiError(
        405, "MethodNotAllowed", "the server does not allow this method on the requested resource", details={}
    )


def unsupported_media_type(message: str, *, details: Obj | None = None) -> ApiError:
    """415."""
    return ApiError(415, "UnsupportedMediaType", message, details=details)


def expired(message: str) -> ApiError:
    """410: the history that was asked for is gone; list again."""
    return ApiError(410, "Expired", message)


def too_large_resource_version(asked: int, current: int) -> ApiError:
    """504: the caller has seen a version that this server has not (it was started anew)."""
    details = {
        "causes": [{"reason": "ResourceVersionTooLarge", "message": "Too large resource version"}],
        "retryAfterSeconds": 1,
    }
    return ApiError(
        504, "Timeout", f"Timeout: Too large resource version: {asked}, current: {current}", details=details
    )


def rejected_patch() -> ApiError:
    """422 without a name: what the real server says of a JSON patch that cannot be applied."""
    return ApiError(422, "Invalid", "the server rejected our request due to an error in our request", details={})
