"""Pods of one machine that share JAX's cache of compilations do not compile the same program at the same time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

__all__ = ["one_compiles"]

_PAUSE_SECONDS = 0.02


@contextlib.contextmanager
def one_compiles(
    program: str,
    digest: bytes,
    *,
    seconds: float,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[None]:
    """Wait until no other process compiles the same program; its result is in the cache then.

    Without a cache in a local folder, no process waits. The lock ends with the process that holds it.

    Args:
        program: what is compiled, as a file name.
        digest: the digest of everything that the program depends on.
        seconds: the longest wait; a paused holder does not delay the others for longer.
        environ: where the cache's folder is named.
        clock, sleep: the clock and the sleep function of the wait, in seconds.
    """
    folder = environ.get("JAX_COMPILATION_CACHE_DIR", "")
    descriptor = -1
    if folder and "://" not in folder:
        # A folder that cannot be written has no cache to share: then each process compiles for itself.
        with contextlib.suppress(OSError):
            Path(folder).mkdir(parents=True, exist_ok=True)
            lock = Path(folder, f"{program}-{digest.hex()[:32]}.lock")
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if descriptor >= 0:
            deadline = clock() + seconds
            while not _locked(descriptor) and clock() < deadline:
                sleep(_PAUSE_SECONDS)
        yield
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True
