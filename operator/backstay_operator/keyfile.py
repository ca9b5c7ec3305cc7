"""The operator's key, from which every job's token is derived (O7).

It must outlive the operator: the Secrets made from it are never read back or replaced. So it comes from a file, which
in a cluster is a mounted Secret, and which is made when it is missing.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Final

LENGTH: Final = 32


class KeyFileError(Exception):
    """The key cannot be read or made; the message has the file and the reason."""


def read_key(path: str) -> bytes:
    """Read the key, or make one where there is no file yet (mode 0600).

    Returns:
        At least 32 bytes; white space around them is not part of the key.

    Raises:
        KeyFileError: the file cannot be read or made, or holds too little.
    """
    file = Path(path)
    try:
        if not file.exists():
            _make(file)
        key = file.read_bytes().strip()
    except OSError as error:
        raise KeyFileError(f"the key file {path} cannot be used: {error.strerror or error}") from error
    if len(key) < LENGTH:
        raise KeyFileError(f"the key file {path} holds {len(key)} bytes: at least {LENGTH} random bytes are needed")
    return key


def _make(file: Path) -> None:
    """Make the key. It is written to another file and then linked, so that two operators never use different keys."""
    beside = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(secrets.token_hex(LENGTH) + "\n")
        try:
            os.link(beside, file)
        except FileExistsError:
            return
    finally:
        beside.unlink()
