"""Keeps the programs that the pods of a run compiled, so that the next run of the same script starts with them.

JAX's cache of compilations writes its entries in place, so a killed pod may leave an incomplete entry. Only the entries
of a run in which no pod died are kept. The name of each entry is a digest of all inputs of its program, except the
processor: https://docs.jax.dev/en/latest/persistent_compilation_cache.html
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
from pathlib import Path
from typing import Final

__all__ = ["MOST_BYTES", "keep", "seed", "store_in"]

#: Of all entries; the oldest ones are deleted when there are more.
MOST_BYTES: Final = 512 << 20
_PATTERN: Final = "*-cache"
_PROCESSOR: Final = ("model name", "flags", "Features", "CPU implementer", "CPU part")


def store_in(base: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path:
    """Returns the folder for programs of this machine's processor, which need not run on another one.

    Args:
        base: ``.backstay`` or the run's own folder.
        cpuinfo: Linux's file about the processors.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = cpuinfo.read_text(errors="replace").splitlines()
    known = sorted({line for line in lines if line.startswith(_PROCESSOR)})
    digest = hashlib.sha256("\n".join([platform.machine(), *known]).encode()).hexdigest()
    return base / "programs" / digest[:16]


def seed(store: Path, cache: Path) -> int:
    """Put the kept entries into the cache of a new run; returns how many there are."""
    return _link(store, cache)


def keep(cache: Path, store: Path) -> int:
    """Keep the entries of a run's cache. Returns how many are new. Above `MOST_BYTES`, the oldest ones are deleted."""
    new = _link(cache, store)
    entries = []
    for entry in store.glob(_PATTERN):
        with contextlib.suppress(FileNotFoundError):  # another run has deleted it meanwhile
            entries.append((entry, entry.stat()))
    size = sum(found.st_size for _, found in entries)
    for entry, found in sorted(entries, key=lambda one: one[1].st_mtime):
        if size <= MOST_BYTES:
            break
        entry.unlink(missing_ok=True)
        size -= found.st_size
    return new


def _link(source: Path, target: Path) -> int:
    """Create a link, which needs no space; across file systems, or where links are not supported, keep nothing."""
    count = 0
    with contextlib.suppress(OSError):
        target.mkdir(parents=True, exist_ok=True)
        for entry in source.glob(_PATTERN):
            with contextlib.suppress(FileExistsError):
                os.link(entry, target / entry.name)
                count += 1
    return count
