"""Measures how much memory a container's processes hold, for its memory limit, in place of a cgroup."""

from __future__ import annotations

import contextlib
from pathlib import Path

_COUNTED = ("RssAnon:", "RssShmem:")


def resident_bytes(pid: int, root: Path = Path("/proc")) -> int:
    """Returns the bytes of memory that a process and its descendants hold; pages of files, which can be dropped, do not
    count."""
    total, todo, seen = 0, [pid], set()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        folder = root / str(one)
        with contextlib.suppress(OSError):
            for line in (folder / "status").read_text().splitlines():
                if line.startswith(_COUNTED):
                    total += int(line.split()[1]) << 10
            for task in (folder / "task").iterdir():
                with contextlib.suppress(OSError):
                    todo += [int(word) for word in (task / "children").read_text().split()]
    return total
