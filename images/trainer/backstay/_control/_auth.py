"""Which answers to a control call are final, and which only say that a connection is in transition."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from backstay_rpc.channels import REFUSAL

from ..errors import Refused, Superseded

__all__ = ["is_final", "refusal_of"]

_FINAL = {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED}


def is_final(code: Any, trailing: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Whether an answer stays the same however often the call is repeated.

    Only a Backstay server gives such answers, and it marks them. Everything else may come from whatever has the address
    while a server is being replaced: a proxy, another program, a server that is not ready, or gRPC itself.

    Args:
        code: a `grpc.StatusCode`.
        trailing: the metadata that came with it.
    """
    return code in _FINAL and any(key == REFUSAL for key, _ in trailing or ())


def refusal_of(error: grpc.RpcError) -> Refused | None:
    """The error that a failed call means, if its answer is final; else None."""
    code: Any = getattr(error, "code", lambda: None)()
    if not is_final(code, getattr(error, "trailing_metadata", lambda: ())()):
        return None
    details = str(getattr(error, "details", lambda: "")())
    kind = Superseded if code is grpc.StatusCode.PERMISSION_DENIED else Refused
    return kind(code.name, details)
