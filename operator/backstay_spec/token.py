"""Derives the token of a job (O7), so that a Secret is created once and never has to be read back."""

from __future__ import annotations

import hashlib
import hmac


def token_for(key: bytes, uid: str) -> str:
    """Returns the token of the job with this uid, HMAC-SHA256 of the uid under the operator's key, in hex (64
    characters).

    Raises:
        ValueError: the key is shorter than 32 bytes, or the uid is empty.
    """
    if len(key) < 32:
        raise ValueError(f"the operator's key has {len(key)} bytes: at least 32 random bytes are needed")
    if not uid:
        raise ValueError("the job has no uid: a token is made only for a job that the API server has stored")
    return hmac.new(key, uid.encode(), hashlib.sha256).hexdigest()
