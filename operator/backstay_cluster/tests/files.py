"""Writes files that other processes of a test read."""

from __future__ import annotations

from pathlib import Path

from backstay_cluster.whole import write_whole

__all__ = ["put"]


def put(path: Path, content: str | bytes) -> None:
    """Write a file that another process may read at any time: it finds the old content or the new one."""
    write_whole(path, content.encode() if isinstance(content, str) else content)
