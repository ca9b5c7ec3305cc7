"""Stores records of a job beside its checkpoints: its timeline, its curve, its history, and reports about dead pods.

A record is for people and is never read by training. Its name matches no pattern of a checkpoint's files. So no code
takes it for a part of a checkpoint, and `prune` of the store never deletes it. This module deletes the oldest records
of a kind, so their number is bounded. A folder that fails costs records, and never the training.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from backstay_spec.records import RECORD_NAME

from ..errors import CheckpointError
from ._files import Folder

__all__ = ["KEPT", "Records", "record_name"]

_LOG = logging.getLogger(__name__)

KEPT: Final = {"trace": 8, "report": 50, "history": 20, "curve": 20}
"""How many records of each kind a folder keeps."""

_SUFFIX: Final = {"trace": "pb.gz", "report": "json", "history": "json", "curve": "json"}
_WAITING: Final = 16


def record_name(kind: str, unix_seconds: float, what: str) -> str:
    """Returns the name of a record's file, by which records of a kind sort by time.

    Args:
        kind: a key of `KEPT`.
        unix_seconds: when the record was made.
        what: makes the name unique; other characters than lower-case letters, digits and ``-`` are left out.
    """
    clean = re.sub(r"[^a-z0-9-]", "", what.lower())[:100] or "job"
    return f"{kind}-{int(unix_seconds):012d}-{clean}.{_SUFFIX[kind]}"


class Records:
    """Writes records in its own thread, into each of some folders. Thread-safe."""

    def __init__(self, folders: Sequence[Folder]) -> None:
        """`folders` are those into which each record is written, and nothing is kept if there are none."""
        self._folders = tuple(folders)
        self._queue: queue.Queue[tuple[str, Callable[[Folder], None]] | None] = queue.Queue(_WAITING)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backstay-records", daemon=True)
        if self._folders:
            self._thread.start()

    def put(
        self, kind: str, name: str, content: Callable[[], bytes], stored: Callable[[str], None] = lambda uri: None
    ) -> bool:
        """Write a record soon, unless a folder has one with this name.

        A record for which the queue has no room is left out: the folder is too slow.

        Args:
            kind: a key of `KEPT`.
            name: what `record_name` returns.
            content: makes the file, in the thread that writes.
            stored: called with the URI of the file in the first folder, once it exists.

        Returns:
            Whether the queue had room for it.
        """

        def write(folder: Folder) -> None:
            if folder.size(name) is None:
                folder.write(name, content())
                _prune(folder, kind)
            if folder is self._folders[0]:
                stored(f"{folder.uri.rstrip('/')}/{name}")

        return self._add(name, write)

    def update(self, kind: str, name: str, change: Callable[[bytes | None], bytes]) -> None:
        """Change a record, or make it, soon.

        Args:
            change: returns the new content, of the existing file; None: there is no such file.
        """

        def write(folder: Folder) -> None:
            before = None if folder.size(name) is None else folder.read(name)
            folder.replace(name, change(before))
            if before is None:
                _prune(folder, kind)

        self._add(name, write)

    def _add(self, name: str, write: Callable[[Folder], None]) -> bool:
        if not self._folders or self._closed.is_set():
            return True
        try:
            self._queue.put_nowait((name, write))
        except queue.Full:
            _LOG.warning("the record %s is not written now: the folder is too slow", name)
            return False
        return True

    def lost(self) -> None:
        """The folder belongs to another process now: nothing more is written."""
        self._closed.set()

    def close(self, seconds: float) -> None:
        """Write what waits, for at most this time, and nothing more."""
        if not self._folders:
            return
        deadline = time.monotonic() + seconds
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._closed.is_set():
                continue
            name, write = item
            for folder in self._folders:
                try:
                    write(folder)
                except CheckpointError as error:
                    _LOG.warning("the record %s could not be stored: %s", name, error)
                except Exception:  # noqa: BLE001  # a record is not worth more
                    _LOG.exception("the record %s could not be made", name)


def _prune(folder: Folder, kind: str) -> None:
    names = (RECORD_NAME.fullmatch(name) for name in folder.names())
    found = sorted(name[0] for name in names if name is not None and name[1] == kind)
    for name in found[: -KEPT[kind]]:
        folder.delete(name)
