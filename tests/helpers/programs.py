"""The programs that JAX compiles in the tests, for all processes of a run and for the next runs.

A change of the code changes few programs. An entry is never out of date: its name is a digest of its program, of the
version of JAX and of XLA's flags.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path

from tiers import STORE

from backstay_client.embedded.program_store import keep, seed, store_in
from backstay_cluster.cluster import NAMES_ENV

FOLDER = "JAX_COMPILATION_CACHE_DIR"
SHORT_ONES_TOO = {
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}
SETTINGS = {**NAMES_ENV, **SHORT_ONES_TOO}


def share_programs(store: Path | None = None) -> Callable[[], None]:
    """Let this process and its children share a new folder of programs, before any of them has imported JAX.

    Args:
        store: where the programs of earlier runs are; by default the folder that `STORE` names, or one of the user's
            cache.

    Returns:
        A function that keeps the new programs in the store, and deletes the folder and the variables.
    """
    if store is None and (given := os.environ.get(STORE)):
        store = Path(given)
    if store is None:
        home = os.environ.get("HOME") or tempfile.gettempdir()
        cache = os.environ.get("XDG_CACHE_HOME") or Path(home, ".cache")
        store = store_in(Path(cache, "backstay-tests"))
    top = Path(tempfile.mkdtemp(prefix="backstay-tests-", dir=os.environ.get("BACKSTAY_TEST_STATE")))
    folder = top / "compiled"
    before = {name: os.environ.get(name) for name in (FOLDER, *SETTINGS)}
    seed(store, folder)
    os.environ.update({FOLDER: str(folder), **SETTINGS})

    def end() -> None:
        with contextlib.suppress(OSError):  # a store that this user may not use
            delete_incomplete(folder, store)
            keep(folder, store)
        shutil.rmtree(top, ignore_errors=True)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value

    return end


def delete_incomplete(folder: Path, store: Path) -> None:
    """Delete the entries of processes that a test killed while they wrote; those of the store are complete."""
    for entry in folder.glob("*-cache"):
        if not (store / entry.name).exists() and not _complete(entry.read_bytes()):
            entry.unlink()


def _complete(entry: bytes) -> bool:
    """Returns whether the bytes are what `zlib.compress` made, as JAX does without the package zstandard."""
    reader = zlib.decompressobj()
    try:
        reader.decompress(entry)
    except zlib.error:
        return False
    return reader.eof
