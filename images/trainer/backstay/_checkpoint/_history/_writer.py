"""Writes a shard's file of each checkpoint beside the training (T7)."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import File, Range, Written

from ... import _instrument
from ..._coordination import Coordination
from ..._update import Snapshot
from ...errors import StorageError
from .._manifest import FileInfo
from .._probe import probe
from .._store import CheckpointStore
from ._patience import READ_SECONDS, patiently

if TYPE_CHECKING:
    from ..._process import Environment

__all__ = ["CheckpointWriter", "file_of", "open_store"]

_LOG = logging.getLogger(__name__)


def open_store(environment: Environment, *, probes: bool) -> CheckpointStore | None:
    """Returns the job's checkpoint folder; None when the job stores nothing.

    Args:
        probes: check now whether this process can write and read it. A replacement continues with a failing storage: it
            trains, and reports checkpoints that cannot be stored. The first server of a shard does not.

    Raises:
        CheckpointFolderUnusable: this process may not write or read the folder.
        StorageError: the storage fails, and this is the first server of its shard.
    """
    if environment.checkpoint_uri is None:
        return None
    store, first = CheckpointStore(environment.checkpoint_uri), environment.incarnation <= 1
    if probes:
        try:
            patiently(lambda: probe(store.folder), seconds=READ_SECONDS if first else 0.0)
        except StorageError as error:
            if first:
                raise
            _LOG.warning("checkpoints cannot be stored now, and training continues without them: %s", error)
    return store


class CheckpointWriter:
    """Writes snapshots of one shard in a separate thread, and reports to the coordinator: a `CheckpointHook`."""

    def __init__(
        self,
        store: CheckpointStore,
        coordination: Coordination,
        *,
        shard: int,
        shards: int,
        incarnation: int,
        stored: Callable[[float, int], None],
        history: Callable[[], str],
    ) -> None:
        """
        Args:
            stored: called with the seconds and the bytes of each file that is stored.
            history: returns the history of the term in force, which is a part of the files' names.
        """
        self._history, self._stored = history, stored
        self._store, self._coordination = store, coordination
        self._shard, self._shards, self._incarnation = shard, shards, incarnation
        self._queue: queue.SimpleQueue[tuple[Snapshot, int, int, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="backstay-checkpoint", daemon=True)
        self._thread.start()

    def __call__(self, snapshot: object, term: int, version: int) -> None:
        """Queue; the snapshot's arrays never change."""
        assert isinstance(snapshot, Snapshot)
        self._queue.put((snapshot, term, version, self._history()))

    def close(self) -> None:
        """Write the queued snapshots, and no more."""
        self._queue.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            snapshot, term, version, history = item
            del item
            began = time.monotonic()
            try:
                with _instrument.span("checkpoint", version):
                    info = self._store.write_shard(
                        snapshot.entries,
                        history=history,
                        version=version,
                        term=term,
                        shard=self._shard,
                        shards=self._shards,
                        incarnation=self._incarnation,
                    )
            except Exception as error:  # noqa: BLE001  # training continues after any error, and reports it
                _LOG.error("this shard's part of the checkpoint of step %d could not be stored: %s", version, error)
                written = Written(term=term, version=version, error=str(error))
            else:
                self._stored(time.monotonic() - began, info.size)
                written = Written(term=term, version=version, files=[file_of(info)])
            del snapshot
            self._coordination.report(written)


def file_of(info: FileInfo) -> File:
    """Returns a stored file, as the coordinator gets it."""
    ranges = [Range(key=part.key, start=part.start, stop=part.stop) for part in info.ranges]
    return File(name=info.name, size=info.size, sha256=info.sha256, ranges=ranges)
