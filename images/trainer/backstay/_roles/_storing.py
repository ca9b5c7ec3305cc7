"""A server's part in checkpoints: its own file, written beside the training; on shard 0 also the manifest (T7)."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from backstay_rpc.control_pb2 import File, Range, Written

from .. import _faults
from .._checkpoint import (
    CheckpointStore,
    Entry,
    FileInfo,
    FileRange,
    Manifest,
    ManifestLeaf,
    Reader,
    describe_structure,
    order_of_manifest,
)
from .._coordination import CoordinatorState, WriteManifest
from .._coordination.seam import Coordination
from .._update._engine import ShardEngine, Snapshot, array_specs
from ..errors import CheckpointError, StorageError
from ._metrics import Metrics

if TYPE_CHECKING:
    from .._update._partition import Partition
    from .._update._rules import Rule

__all__ = ["CheckpointWriter", "ManifestStorage", "NoStorage", "restore"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

KNOWN_SECONDS = 2.0
"""How long a server that takes over waits to hear which checkpoint is the newest."""

READ_SECONDS = 60.0
"""How long a storage that errs is asked again. After that the process ends, and its replacement asks anew."""


class CheckpointWriter:
    """Writes snapshots of one shard in a thread of its own, and tells the coordinator. The `on_checkpoint` hook."""

    def __init__(
        self,
        store: CheckpointStore,
        coordination: Coordination,
        *,
        shard: int,
        shards: int,
        incarnation: int,
        metrics: Metrics,
    ) -> None:
        self._store, self._coordination = store, coordination
        self._shard, self._shards, self._incarnation = shard, shards, incarnation
        self._metrics = metrics
        self._queue: queue.SimpleQueue[tuple[Snapshot, int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="backstay-checkpoint", daemon=True)
        self._thread.start()

    def __call__(self, snapshot: object, term: int, version: int) -> None:
        """Queue; the snapshot's arrays never change."""
        assert isinstance(snapshot, Snapshot)
        self._queue.put((snapshot, term, version))

    def close(self) -> None:
        """What is queued is written; nothing more."""
        self._queue.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            snapshot, term, version = item
            del item
            began = time.monotonic()
            try:
                info = self._store.write_shard(
                    [Entry(e.key, e.start, e.stop, e.value) for e in snapshot.entries],
                    version=version,
                    term=term,
                    shard=self._shard,
                    shards=self._shards,
                    incarnation=self._incarnation,
                )
            except Exception as error:  # noqa: BLE001  # training goes on whatever the store raises, and says so
                _LOG.error("this shard's part of the checkpoint of step %d could not be stored: %s", version, error)
                written = Written(term=term, version=version, error=str(error))
            else:
                self._metrics.checkpoint_seconds.observe(time.monotonic() - began)
                self._metrics.checkpoint_bytes.inc(info.size)
                ranges = [Range(key=part.key, start=part.start, stop=part.stop) for part in info.ranges]
                file = File(name=info.name, size=info.size, sha256=info.sha256, ranges=ranges)
                written = Written(term=term, version=version, files=[file])
            del snapshot
            self._coordination.written(self._shard, written)


class ManifestStorage:
    """The coordinator's `Storage`: manifests, and where to start from."""

    def __init__(
        self,
        store: CheckpointStore,
        partition: Partition,
        rule: Rule,
        *,
        job: str,
        incarnation: int,
        steps: int,
        keep: Callable[[], int],
        world: Callable[[], int],
        metrics: Callable[[], dict[str, float]],
    ) -> None:
        """
        Args:
            keep: how many checkpoints to keep, as the operator wishes now.
            world: `workers.replicas` as the operator wishes now.
            metrics: of the newest evaluation.
        """
        self._store, self._partition, self._rule = store, partition, rule
        self._job, self._incarnation, self._steps = job, incarnation, steps
        self._keep, self._world, self._metrics = keep, world, metrics

    def write_manifest(self, order: WriteManifest) -> str:
        """See `Storage.write_manifest`."""
        tree = self._partition.tree
        files = [file for of_shard in order.files for file in of_shard]
        manifest = Manifest(
            job=self._job,
            version=order.version,
            term=order.term,
            incarnation=self._incarnation,
            shards=len(order.files),
            steps=self._steps,
            optimizer=fingerprint(self._rule),
            leaves=tuple(ManifestLeaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in tree.leaves),
            structure=describe_structure(tree.shapes()),
            files=tuple(
                FileInfo(
                    name=file.name,
                    size=file.size,
                    sha256=file.sha256,
                    ranges=tuple(FileRange(key=part.key, start=part.start, stop=part.stop) for part in file.ranges),
                )
                for file in files
            ),
            state=dict(order.state),
            metrics=self._metrics(),
            unix_seconds=time.time(),
        )
        self._store.write_manifest(manifest)
        _faults.reach("manifest", manifest.version)
        try:
            self._store.prune(keep=self._keep(), term=order.term)
        except CheckpointError as error:
            _LOG.warning("old checkpoints could not be deleted: %s", error)
        return f"{self._store.uri.rstrip('/')}/{manifest.name}"

    def known(self) -> tuple[str, tuple[int, int]]:
        """The newest checkpoint as far as names and sizes tell, and its (term, version); ('', (0, -1)) when there is
        none, or when the storage does not answer at once: whoever goes on from memory does not wait for it."""
        found: list[Manifest | None] = []

        def look() -> None:
            try:
                found.append(self._store.newest(verify=False).manifest)
            except CheckpointError as error:
                _LOG.warning("the newest checkpoint is not known: %s", error)

        thread = threading.Thread(target=look, name="backstay-newest", daemon=True)
        thread.start()
        thread.join(KNOWN_SECONDS)
        manifest = found[0] if found else None
        if manifest is None:
            return "", (0, -1)
        return f"{self._store.uri.rstrip('/')}/{manifest.name}", manifest.order[:2]

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `Storage.newest`."""
        newest = patiently(self._store.newest)
        for line in newest.skipped:
            _LOG.warning("passed over a checkpoint that is not whole: %s", line)
        # Also above those that were passed over: their names must not be written again (T6).
        orders = [order_of_manifest(name) for name in patiently(self._store.manifests)]
        term = max([above_term, *(order[0] for order in orders if order is not None)]) + 1
        manifest = newest.manifest
        if manifest is None:
            return CoordinatorState(term=term, version=0, world=self._world()), ""
        check_fits(manifest, self._partition, self._rule)
        try:
            state = CoordinatorState.from_json(manifest.state)
        except ValueError as error:
            raise CheckpointError(f"{manifest.name} in {self._store.uri}: {error}") from None
        state.term = term
        return state, f"{self._store.uri.rstrip('/')}/{manifest.name}"


class NoStorage:
    """A job that stores nothing starts again from its seed."""

    def __init__(self, world: Callable[[], int]) -> None:
        self._world = world

    def write_manifest(self, order: WriteManifest) -> str:
        raise CheckpointError(f"version {order.version} cannot be stored: the job has no checkpoint")

    def known(self) -> tuple[str, tuple[int, int]]:
        """See `ManifestStorage.known`."""
        return "", (0, -1)

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `Storage.newest`."""
        return CoordinatorState(term=above_term + 1, version=0, world=self._world()), ""


def fingerprint(rule: Rule) -> str:
    """What the optimizer's state looks like; another optimizer's checkpoint cannot be continued."""
    import hashlib

    specs = [f"{spec.key} {spec.dtype.name} {spec.shape}" for spec in array_specs(rule)]
    return hashlib.sha256("\n".join(specs).encode()).hexdigest()


def check_fits(manifest: Manifest, partition: Partition, rule: Rule) -> None:
    """
    Raises:
        CheckpointError: the checkpoint is of other parameters or of another optimizer; the message names the leaf.
    """
    own = {leaf.path: (tuple(leaf.shape), leaf.dtype.name) for leaf in partition.tree.leaves}
    stored = {leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.leaves}
    for path in [*own, *stored]:
        if own.get(path) != stored.get(path):
            raise CheckpointError(
                f"the checkpoint {manifest.name} does not fit init: {path} is {_shown(stored.get(path))} in it and "
                f"{_shown(own.get(path))} here; use another checkpoint.uri, or the parameters it was made with"
            )
    if manifest.optimizer and manifest.optimizer != fingerprint(rule):
        raise CheckpointError(
            f"the checkpoint {manifest.name} does not fit the optimizer: its state has other arrays than this one's; "
            "use another checkpoint.uri, or the optimizer it was made with"
        )


def _shown(kind: tuple[Any, str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]}{list(kind[0])}"


def restore(uri: str, partition: Partition, shard: int, rule: Rule) -> ShardEngine:
    """This shard's part of a checkpoint, whatever number of shards wrote it.

    Args:
        uri: of the manifest.

    Raises:
        CheckpointError: it cannot be read, is damaged, or does not fit.
    """
    folder, _, name = uri.rpartition("/")

    def read() -> ShardEngine:
        store = CheckpointStore(folder or ".")
        manifest = store.open(name, verify=False)  # the reader compares the checksums of what it reads
        check_fits(manifest, partition, rule)
        return ShardEngine.restore(partition, shard, rule, Reader(store, manifest).read, manifest.version)

    return patiently(read)


def patiently(
    read: Callable[[], _T],
    *,
    seconds: float = READ_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """What `read` returns, however often the storage errs within `seconds` (T8).

    Raises:
        StorageError: it erred to the end.
        Whatever else `read` raises, at once.
    """
    began, wait = clock(), 0.5
    while True:
        try:
            return read()
        except StorageError as error:
            left = seconds - (clock() - began)
            if left <= 0:
                raise
            wait = min(2 * wait, 15.0, left)
            _LOG.warning("the checkpoints cannot be read, trying again in %.0f s: %s", wait, error)
            sleep(wait)
