"""The control channel between operator, servers and workers: generated messages, and what proves who a call is from."""

from __future__ import annotations

from typing import Final

AUTHORIZATION: Final = "authorization"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """The gRPC call metadata that carries the job's token (O7)."""
    return ((AUTHORIZATION, f"Bearer {token}"),)
