"""How values and errors travel between the members of a rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from backstay_rpc.control_pb2 import MemberMessage

from ...errors import BackstayError, ConfigurationError, JobFailed, PeerLost, Refused, Superseded, WaitedTooLong

__all__ = ["FLAG", "FOLLOWS", "TEXT", "Form", "error_in", "follows", "messages", "travels", "with_error"]

_T = TypeVar("_T")

_ERRORS: Final[dict[str, Callable[[str, str], BackstayError]]] = {
    "Superseded": Superseded,
    "Refused": Refused,
    "JobFailed": JobFailed,
    "WaitedTooLong": lambda code, text: WaitedTooLong(text),
    "PeerLost": lambda code, text: PeerLost(text),
    "ConfigurationError": lambda code, text: ConfigurationError(text),
}

FOLLOWS: Final = "follows"
"""The code of an error that a member has because another one had an error before."""


@dataclass(frozen=True)
class Form(Generic[_T]):
    """A value as bytes, and back."""

    encode: Callable[[_T], bytes]
    decode: Callable[[bytes], _T]


FLAG: Final[Form[bool]] = Form(lambda value: b"1" if value else b"", bool)
TEXT: Final[Form[str]] = Form(str.encode, bytes.decode)


def messages(kind: Any) -> Form[Sequence[Any]]:
    """Returns the form of several messages of one class of protocol buffers."""

    def encode(values: Sequence[Any]) -> bytes:
        parts = [value.SerializeToString() for value in values]
        return b"".join(len(part).to_bytes(4, "little") + part for part in parts)

    def decode(data: bytes) -> Sequence[Any]:
        found, at = [], 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 4], "little")
            found.append(kind.FromString(data[at + 4 : at + 4 + size]))
            at += 4 + size
        return found

    return Form(encode, decode)


def travels(error: BaseException) -> bool:
    """Returns whether an error counts for all members of a rank. Any other ends its process, and with it the rank."""
    return type(error).__name__ in _ERRORS and isinstance(error, BackstayError)


def with_error(message: MemberMessage, error: BaseException) -> MemberMessage:
    """Returns the message with an error instead of a value."""
    message.error = type(error).__name__
    message.code = str(getattr(error, "code", "") or getattr(error, "reason", ""))
    message.text = str(getattr(error, "message", "") or error)
    return message


def follows(message: MemberMessage) -> tuple[bool, bool]:
    """Returns a key that sorts a message with the error of a member before those whose errors follow from it."""
    return message.error == PeerLost.__name__, message.code == FOLLOWS


def error_in(message: MemberMessage) -> BackstayError | None:
    """Returns the error of a message, or None if it has a value."""
    return _ERRORS[message.error](message.code, message.text) if message.error else None
