"""A server's part in checkpoints: it writes its own file beside the training, and reads its part of one (T7)."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from backstay_rpc.control_pb2 import File, Range, Written

from .. import _instrument
from .._checkpoint import CheckpointStore, FileInfo, Manifest, Reader, forbidden, probe
from .._coordination import Coordination
from .._report import Metrics
from .._update import MODEL_STATE, ShardEngine, Snapshot
from ..errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from .._process import Environment
    from .._update import Partition, Rule

__all__ = ["CheckpointWriter", "check_fits", "file_of", "open_store", "patiently", "restore"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

READ_SECONDS = 60.0
"""How long failing reads of the storage are repeated. After that the process ends, and its replacement reads again."""


def open_store(environment: Environment, *, probes: bool) -> CheckpointStore | None:
    """The job's checkpoint folder; None when the job stores nothing.

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
            _LOG.warning("checkpoints cannot be stored now: %s", error)
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
        metrics: Metrics,
        history: Callable[[], str],
    ) -> None:
        """`history`: of the term in force, a part of the files' names."""
        self._history = history
        self._store, self._coordination = store, coordination
        self._shard, self._shards, self._incarnation = shard, shards, incarnation
        self._metrics = metrics
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
                self._metrics.checkpoint_seconds.observe(time.monotonic() - began)
                self._metrics.checkpoint_bytes.inc(info.size)
                written = Written(term=term, version=version, files=[file_of(info)])
            del snapshot
            self._coordination.report(written)


def file_of(info: FileInfo) -> File:
    """A stored file, as the coordinator gets it."""
    ranges = [Range(key=part.key, start=part.start, stop=part.stop) for part in info.ranges]
    return File(name=info.name, size=info.size, sha256=info.sha256, ranges=ranges)


def check_fits(manifest: Manifest, partition: Partition) -> None:
    """
    Raises:
        CheckpointError: the checkpoint is of other parameters or of another optimizer; the message names the leaf.
    """
    own = {leaf.name: (tuple(leaf.shape), leaf.dtype.name) for leaf in partition.tree.leaves}
    stored = {leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.leaves}
    stored |= {MODEL_STATE + leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.state_leaves}
    if (manifest.state_structure is not None) != partition.tree.has_state:
        has = "no model state" if partition.tree.has_state else "a model state"
        raise CheckpointError(
            f"the checkpoint {manifest.name} does not fit init: it has {has}, and train was called with "
            f"has_state={partition.tree.has_state}; use another checkpoint.uri, or the model of the checkpoint"
        )
    for path in [*own, *stored]:
        if own.get(path) != stored.get(path):
            raise CheckpointError(
                f"the checkpoint {manifest.name} does not fit init: {path} is {_shown(stored.get(path))} in the "
                f"checkpoint and {_shown(own.get(path))} in init; use another checkpoint.uri, or the parameters "
                "of the checkpoint"
            )
    if manifest.origin.structure != partition.structure_digest.hex():
        raise CheckpointError(
            f"the checkpoint {manifest.name} does not fit the optimizer, whose state has other arrays; "
            "use another checkpoint.uri, or the optimizer of the checkpoint"
        )


def _shown(kind: tuple[Any, str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]}{list(kind[0])}"


def restore(uri: str, partition: Partition, shard: int, rule: Rule) -> ShardEngine:
    """This shard's part of a checkpoint, for any number of shards that wrote it.

    Args:
        uri: the manifest's URI.

    Raises:
        CheckpointError: the checkpoint cannot be read, is damaged, or does not fit.
    """
    folder, _, name = uri.rpartition("/")

    def read() -> ShardEngine:
        store = CheckpointStore(folder or ".")
        manifest = store.open(name, verify=False)  # the reader compares the checksums of what it reads
        check_fits(manifest, partition)
        return ShardEngine.restore(partition, shard, rule, Reader(store, manifest).read, manifest.version)

    with _instrument.span("restore"):
        return patiently(read)


def patiently(
    read: Callable[[], _T],
    *,
    seconds: float = READ_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """The result of `read`; a read that fails with `StorageError` is repeated for `seconds` (T8).

    Raises:
        CheckpointFolderUnusable: this user may not read a file; another read does not help.
        StorageError: the last read failed too.
        Exception: any other that `read` raises, immediately.
    """
    began, wait = clock(), 0.5
    while True:
        try:
            return read()
        except StorageError as error:
            if (refused := forbidden(error)) is not None:
                raise refused from error
            left = seconds - (clock() - began)
            if left <= 0:
                raise
            wait = min(2 * wait, 15.0, left)
            _LOG.warning("the checkpoints cannot be read, trying again in %.0f s: %s", wait, error)
            sleep(wait)
