"""The control channel between operator, servers and workers, with generated messages and the proof of a caller's
identity."""

from __future__ import annotations

from typing import Final

AUTHORIZATION: Final = "authorization"


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the gRPC call metadata that carries the job's token (O7)."""
    return ((AUTHORIZATION, f"Bearer {token}"),)
