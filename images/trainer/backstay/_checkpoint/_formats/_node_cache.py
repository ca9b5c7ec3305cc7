"""Keeps what pods of a node have read from an object store in a folder of the node, for the pods that follow them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np

from ..._update import digest_of
from .._files import Folder, PosixFolder

__all__ = ["ReadInto", "cached"]

_LOG = logging.getLogger(__name__)

ReadInto = Callable[[str, int, memoryview], None]
"""Reads a part of a file, as `Folder.read_into` does."""

_DIGEST: Final = 16
"""Characters of `digest_of`, which stand behind the content in each file of a cache."""
_PATIENCE: Final = 120.0
_POLL: Final = 0.05


@contextlib.contextmanager
def cached(folder: Folder, place: str, identity: str) -> Iterator[ReadInto]:
    """Reads parts of the files in a remote folder. Each is read from there once, and then from the cache.

    If the context ends with an error, the cache has no part that this process wrote: the files may have changed.

    Args:
        place: the folder of the cache, which is made; empty: there is no cache, as for a local `folder`.
        identity: text that differs for files of the same names with other contents.
    """
    if not place or isinstance(folder, PosixFolder):
        yield folder.read_into
        return
    name = hashlib.sha256(f"{folder.uri}\0{identity}".encode()).hexdigest()[:32]
    cache = _NodeCache(folder, Path(place).expanduser() / name)
    try:
        yield cache.read_into
    except BaseException:
        cache.forget()
        raise


class _NodeCache:
    """The parts of one folder's files. A part is a file, which appears under its name when it is complete.

    A cache that cannot be used, such as one on a full disk, costs time and nothing else.
    """

    def __init__(self, folder: Folder, place: Path) -> None:
        self._folder, self._place = folder, place
        self._works = True
        self._written: list[Path] = []

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start`. Raises as the method of `Folder`."""
        part = self._place / f"{name}.{start}-{start + len(buffer)}"
        filled = False
        if self._works:
            try:
                if _read(part, buffer):
                    return
                self._place.mkdir(parents=True, exist_ok=True)
                beside = part.with_name(f"{part.name}.part")
                with _locked(beside) as file:
                    if _read(part, buffer):  # another pod has written it
                        return
                    self._folder.read_into(name, start, buffer)
                    filled = True
                    _write(file, beside, buffer, part)
                    self._written.append(part)
            except OSError as error:
                self._works = False
                _LOG.warning("the cache %s is not used: %s", self._place.parent, error.strerror or error)
        if not filled:
            self._folder.read_into(name, start, buffer)

    def forget(self) -> None:
        """Delete the parts that this process wrote."""
        for part in self._written:
            with contextlib.suppress(OSError):
                part.unlink()


def _read(part: Path, buffer: memoryview) -> bool:
    """Returns whether `buffer` has the content of a complete and undamaged file now."""
    try:
        with part.open("rb") as file:
            if os.fstat(file.fileno()).st_size != len(buffer) + _DIGEST:
                return False
            if file.readinto(buffer) != len(buffer):
                return False
            return file.read() == _digest(buffer)
    except FileNotFoundError:
        return False


def _write(file: IO[bytes], beside: Path, buffer: memoryview, part: Path) -> None:
    try:
        file.truncate(0)  # of a process that died
        file.write(buffer)
        file.write(_digest(buffer))
        file.flush()
        os.fsync(file.fileno())
        beside.replace(part)
    except OSError:
        with contextlib.suppress(OSError):
            beside.unlink()  # a full disk needs the space
        raise


def _digest(buffer: memoryview) -> bytes:
    return digest_of(np.frombuffer(buffer, np.uint8)).encode()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[bytes]]:
    """A file that only this process writes. The system releases the lock of a process that dies.

    Raises:
        OSError: the folder cannot be written, or another process has held the lock for two minutes.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        # Not through a link, which may name a file outside the cache.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
        with os.fdopen(descriptor, "ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"another process has written {path} for {_PATIENCE:.0f} s") from None
            else:
                yield file
                return
        time.sleep(_POLL)
