"""Writes files of which no reader sees a part."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file. A reader finds the old content or the new one, and never less than one of them.

    Args:
        path: the file, whose folder exists.
        content: all of its bytes.
        mode: its permissions; None: those that the process gives to new files.
    """
    part = path.with_name(f".{uuid.uuid4().hex}.part")
    try:
        new = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(new, "wb") as file:
            file.write(content)
            if mode is not None:
                os.fchmod(new, mode)
        part.replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
