"""Decides which answers to a control call are final, and after which the caller tries again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc

from backstay_rpc.channels import REFUSAL
from backstay_rpc.refusals import FINAL, RefusalCode

from ...errors import Refused, Superseded

__all__ = ["final_error", "is_final", "refusal_of"]


def is_final(code: Any, trailing: Iterable[tuple[str, str | bytes]] | None) -> bool:
    """Returns whether further calls would get the same answer.

    Only a Backstay server gives such answers, and it marks them. While a server is being replaced, other answers come
    from a proxy, another program at its address, a server that is not ready, or gRPC.

    Args:
        code: a `grpc.StatusCode`.
        trailing: the metadata that came with it.
    """
    return getattr(code, "name", "") in FINAL and any(key == REFUSAL for key, _ in trailing or ())


def refusal_of(error: grpc.RpcError) -> Refused | None:
    """Returns the error that a failed call means, if its answer is final; else None."""
    code: Any = getattr(error, "code", lambda: None)()
    if not is_final(code, getattr(error, "trailing_metadata", lambda: ())()):
        return None
    return final_error(code.name, str(getattr(error, "details", lambda: "")()))


def final_error(code: str, message: str) -> Refused | None:
    """Returns the error for a Backstay server's refusal with this code, if further calls would get it too; else
    None."""
    if code not in FINAL:
        return None
    return Superseded(code, message) if code == RefusalCode.REPLACED else Refused(code, message)
