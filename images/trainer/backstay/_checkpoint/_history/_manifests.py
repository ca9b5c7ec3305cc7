"""Writes and reads the manifests of one history on shard 0, and begins that history (T6, T7)."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from ... import _instrument
from ..._coordination import CoordinatorState, WriteManifest
from ...errors import BackstayError, CheckpointError, CheckpointInUse, CheckpointOfAnotherJob, StorageError, Superseded
from .._files import same_place
from .._manifest import Evaluation, FileInfo, FileRange, Manifest, ManifestLeaf, Origin
from .._names import ManifestName, parse_manifest
from .._store import CheckpointStore, Contents
from .._structure import describe_structure
from ._continuation import Continued, changes_of
from ._frozen import AgreedFrozen
from ._lease import FolderLease, Interrupted
from ._ownership import Denied, Identity, NewHistory, Own, ownership
from ._patience import patiently
from ._restore import check_fits
from ._tenure import Begun, Claimed, TakenOver, Tenure, Unclaimed

if TYPE_CHECKING:
    from ..._update import Partition, TreeSpec

__all__ = ["ManifestStorage", "NoStorage"]

_TERMS_OF_ONE_SERVER = 1_000_000  # more rollbacks than one server process can have
_LOG = logging.getLogger(__name__)

KNOWN_SECONDS = 2.0
"""How long a server that takes over waits for the name of the newest checkpoint."""

EVALUATION_SECONDS = 2.0
"""How long the report of an evaluation waits for the folder."""

CLOSE_SECONDS = 10.0
"""How long a server that ends waits for a manifest that is being stored."""


class Requested(Protocol):
    """The settings that the operator requested last."""

    @property
    def keep(self) -> int:
        """Number of checkpoints to keep."""

    @property
    def world(self) -> int:
        """`workers.replicas`."""


class ManifestFacts(Protocol):
    """The facts about training that a manifest records."""

    def evaluation(self) -> tuple[int | None, dict[str, float]]:
        """Returns the step and the metrics of the newest evaluation; before the first, None and no metrics."""

    def examples(self) -> int | None:
        """Returns the number of examples of each contribution to the newest update; None if the contributions
        differed."""


class ManifestStorage:
    """The coordinator's `CheckpointStorage` for manifests and the point to start from. It writes only while it holds
    the lease."""

    def __init__(
        self,
        store: CheckpointStore,
        lease: FolderLease,
        partition: Partition,
        identity: Identity,
        requested: Requested,
        facts: ManifestFacts,
        fixed_start: Callable[..., str] = lambda *skip: "",
    ) -> None:
        """
        Args:
            requested: read at each use, because the operator may change it.
            facts: read at each manifest.
            fixed_start: see `Beginning.fixed_start`.
        """
        self._store, self._lease, self._partition = store, lease, partition
        self._identity, self._requested, self._facts = identity, requested, facts
        self._fixed_start = fixed_start
        self.stored_at = 0.0  # Unix time of the newest checkpoint that `newest` or `known` found; 0: none
        self._lock = threading.Lock()
        self._tenure: Tenure = Unclaimed()  # guarded by the lock
        self._pinned: ManifestName | None = None  # the checkpoint that is being evaluated
        self._last: Manifest | None = None  # the newest one that this process stored
        self._reported = threading.Lock()  # for `_evaluation`, while a slow folder holds `_lock`
        self._evaluation: tuple[int, str, dict[str, float]] | None = None  # step, manifest, metrics; not stored yet
        self.continued: Continued | None = None
        self.frozen = AgreedFrozen()

    def write_manifest(self, order: WriteManifest) -> str:
        """See `CheckpointStorage.write_manifest`."""
        with self._lock:
            self._hold()
            self._lease.check()
            if order.term != self._tenure.term:
                raise CheckpointError(f"step {order.version} of term {order.term} is not stored: the term has ended")
            manifest = self._store.write_manifest(self._manifest(order))
            # A process that took the lease meanwhile ignores this manifest, so it must not be reported (decision 0075).
            self._lease.check()
            self._last = manifest
            self._store_evaluation()
        _instrument.reach("manifest", manifest.version)
        self._prune(manifest)
        return self._store.uri_of(manifest)

    def _manifest(self, order: WriteManifest) -> Manifest:
        tree = self._partition.tree
        examples = self._facts.examples()
        settings = {**self._identity.settings, **({} if examples is None else {"examples": str(examples)})}
        evaluated, metrics = self._facts.evaluation()
        return Manifest(
            origin=self._origin(settings),
            lease=self._lease.number,
            version=order.version,
            term=order.term,
            incarnation=self._identity.incarnation,
            shards=len(order.files),
            steps=self._identity.steps,
            leaves=_manifest_leaves(tree.parameters),
            structure=describe_structure(tree.parameters.shapes()),
            state_leaves=() if tree.state is None else _manifest_leaves(tree.state),
            state_structure=None if tree.state is None else describe_structure(tree.state.shapes()),
            files=tuple(
                FileInfo(
                    name=file.name,
                    size=file.size,
                    sha256=file.sha256,
                    ranges=tuple(FileRange(key=part.key, start=part.start, stop=part.stop) for part in file.ranges),
                )
                for of_shard in order.files
                for file in of_shard
            ),
            state=dict(order.state),
            metrics=metrics,
            metrics_step=evaluated,
            unix_seconds=time.time(),
            frozen=self.frozen.record,
        )

    def _origin(self, settings: Mapping[str, str]) -> Origin:
        return Origin(
            history=self._tenure.history,
            job=self._identity.job,
            seed=self._identity.seed,
            digest=self._partition.digest.hex(),
            structure=self._partition.structure_digest.hex(),
            settings=dict(settings),
        )

    def _prune(self, newest: Manifest) -> None:
        try:
            self._store.prune(keep=self._requested.keep, newest=newest, best=self._identity.best, pinned=self._pinned)
        except CheckpointError as error:
            _LOG.warning("old checkpoints could not be deleted, and are deleted after the next one: %s", error)

    def pin(self, manifest: str) -> None:
        """Keep this checkpoint until `evaluated` is called, or another one is pinned."""
        name = parse_manifest(manifest)
        if name is not None and name != self._pinned:
            _LOG.info("the checkpoint of step %d is kept until it is evaluated", name.version)
        self._pinned = name

    def evaluated(self, step: int, metrics: Mapping[str, float], manifest: str = "") -> None:
        """Store the evaluation of a checkpoint. A failure costs the evaluation, and not the training.

        Args:
            step: the version that was evaluated.
            manifest: the name of the checkpoint's manifest, of any history. Empty: worker 0 evaluated its parameters.
                Their manifest may not exist yet. Then `write_manifest` stores the evaluation.
        """
        with self._reported:
            self._evaluation = step, manifest, dict(metrics)
        if not self._lock.acquire(timeout=EVALUATION_SECONDS):
            _LOG.warning("the evaluation of step %d is stored later: the folder does not answer", step)
            return
        try:
            self._store_evaluation()
        finally:
            self._lock.release()

    def _store_evaluation(self) -> None:
        """Store the newest evaluation, if its checkpoint is known. The caller has the lock."""
        newest = _base_of(self._tenure) if self._last is None else self._last.name
        with self._reported:
            if self._evaluation is None:
                return
            step, manifest, metrics = self._evaluation
            if not manifest and (found := parse_manifest(newest)) is not None and found.version == step:
                manifest = newest
            if not manifest:
                return
            self._evaluation = None
        name = parse_manifest(manifest)
        if name is None or name.history != self._tenure.history:
            return
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        best = self._identity.best
        record = Evaluation(manifest=manifest, metrics=finite, best=best, unix_seconds=time.time())
        try:
            self._hold()
            self._lease.check()
            if self._pinned == name:  # the evaluator may have begun with the next one
                self._pinned = None
            if self._store.write_evaluation(record) and best is not None and self._last is not None:
                self._prune(self._last)  # another checkpoint may be the best one now
        except BackstayError as error:
            _LOG.warning("the evaluation of %s could not be stored: %s", manifest, error)
        if best is not None and best.metric not in finite:
            _LOG.warning(
                "the evaluation of step %d has no finite number %r, which spec.checkpoint.keepBest names; it has: %s",
                name.version,
                best.metric,
                ", ".join(sorted(finite)) or "none",
            )

    def known(self, state: CoordinatorState, *, seconds: float = KNOWN_SECONDS) -> tuple[str, tuple[int, int]]:
        """Take the folder over in the middle of a term, from memory.

        Args:
            state: as this server held it while it was a standby.
            seconds: how long to wait for the name of the newest checkpoint.

        Returns:
            The newest checkpoint by names and sizes, and its (term, version). ('', (0, -1)) when there is none, or
            when the storage does not answer immediately: training does not wait for it.
        """
        with self._lock:
            taken = self._tenure = TakenOver(state.term, state.history, (state.term, state.version))
        found: Future[Manifest | None] = Future()

        def look() -> None:
            try:
                with self._lock:
                    self._lease.acquire()
                    manifest = self._store.newest(verify=False).manifest
                    # False: this server continues already, and not from a manifest that is found later (see `_hold`).
                    if found.set_running_or_notify_cancel():
                        self._tenure = taken.found(_name_of(manifest))
                        found.set_result(manifest)
                    self._hold()
            except (CheckpointInUse, Superseded) as error:
                _LOG.debug("the checkpoint folder is lost: %s", error)  # the lease has reported it
            except BackstayError as error:
                _LOG.warning("cannot read the newest checkpoint, so the status has none until the next one: %s", error)

        # Workers wait for this server: the name of a checkpoint is not worth a gap in training (decision 0075).
        thread = threading.Thread(target=look, name="backstay-newest", daemon=True)
        thread.start()
        thread.join(seconds)
        manifest = None if found.cancel() else found.result()
        if manifest is None:
            return "", (0, -1)
        self.stored_at = manifest.unix_seconds
        self.frozen.continues(manifest.frozen, manifest.name)
        return self._store.uri_of(manifest), (manifest.term, manifest.version)

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `CheckpointStorage.newest`.

        Raises:
            CheckpointInUse, CheckpointOfAnotherJob: the folder is not this run's.
            CheckpointError: the newest checkpoint does not fit.
        """
        with self._lock:
            contents = patiently(self._store.contents)
            contents.next_term(above_term, self._store.uri)  # refused before anything is written
            if self._lease.number:
                self._lease.check()
            else:
                contents.next_lease(self._store.uri)
                self._check_owner(contents)
                self._acquire(contents)
                contents = patiently(self._store.contents)
            up_to = self._tenure.up_to if isinstance(self._tenure, TakenOver) else None
            newest = patiently(lambda: self._store.newest(contents=contents, up_to=up_to))
            for line in newest.skipped:
                _LOG.warning("skipped a checkpoint: %s", line)
            # Also above the skipped ones: no term has two beginnings (T6).
            term = contents.next_term(above_term, self._store.uri)
            found = ownership(self._identity, self._store.uri, newest)
            if isinstance(found, Denied):
                raise found.error
            manifest = None if isinstance(found, NewHistory) else found.manifest
            if manifest is None:
                state = self._first_state(term, contents)
            else:
                state = self._continue(manifest, own=isinstance(found, Own))
                state.term = term
            start_from = state.start_from if manifest is None else ""
            self._tenure = Begun(term, state.history, _name_of(manifest), start_from)
            self._last = None
            with self._reported:
                self._evaluation = None  # of the term that ended
            self.stored_at = 0.0 if manifest is None else manifest.unix_seconds
            try:
                if self._lease.number:  # otherwise it is acquired before the first manifest
                    self._claim()
            except CheckpointError as error:
                # The claim is written before the first manifest; until then only this run can read another one.
                _LOG.warning("the start of term %d could not be stored; the server stores it later: %s", term, error)
            return state, "" if manifest is None else self._store.uri_of(manifest)

    def taken_over(self) -> tuple[str, ...]:
        """Returns the leases that were not renewed, so that this process took the folder over, as text."""
        return tuple(self._lease.taken_over)

    def closing(self) -> None:
        """Prepare for the last checkpoint after this process received SIGTERM."""
        self._lease.closing()

    def close(self) -> None:
        """Release the folder, unless a manifest is being stored for longer than this process can wait."""
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._lease.release()
            finally:
                self._lock.release()

    # ---- The lease and the claim ----

    def hold(self) -> None:
        """Take the folder now, and not only with the next manifest. See `_hold`."""
        with self._lock:
            self._hold()

    def _hold(self) -> None:
        """Make sure that this process has the lease, and the claim of the term. Earlier failed writes are repeated.

        The claim names the manifest at which this term began, because an older incarnation may have stored more in the
        meantime (T6). A takeover may not have waited for the storage. Then a checkpoint that is newer than this
        server's state at the takeover is not in the history.
        """
        if not self._lease.number:
            self._lease.acquire()
        self._claim()

    def _claim(self) -> None:
        """Store the claim of the term, unless it is stored under this lease. The caller has the lock."""
        tenure = self._tenure
        if isinstance(tenure, TakenOver):
            tenure = tenure.found(_name_of(self._store.newest(verify=False, up_to=tenure.up_to).manifest))
        elif isinstance(tenure, Claimed):
            if tenure.lease == self._lease.number:
                return
            tenure = tenure.begun
        assert not isinstance(tenure, Unclaimed), "`newest` or `known` begins a term before anything is stored"
        # Until the claim is stored, a takeover keeps its limit: a later `newest` must not read newer manifests.
        lease = self._lease.number
        self._store.write_claim(tenure.claim(self._origin(self._identity.settings), lease, self._identity.incarnation))
        self._tenure = Claimed(tenure, lease)

    def _acquire(self, contents: Contents) -> None:
        def acquire() -> None:
            try:
                self._lease.acquire()
            except (CheckpointInUse, Interrupted, StorageError):
                raise
            except CheckpointError as error:
                raise StorageError(str(error)) from error  # such as a full disk, which may pass

        claim = self._store.newest_claim(contents)
        if claim is None or claim.origin.job != self._identity.job:
            patiently(acquire)
            return
        # This run has the folder already: its next incarnation trains, even while every write fails.
        try:
            acquire()
        except StorageError as error:
            _LOG.warning("the lease of the checkpoint folder could not be acquired; the server tries again: %s", error)

    # ---- The start of a term ----

    def _check_owner(self, contents: Contents) -> None:
        newest = patiently(lambda: self._store.newest(verify=False, contents=contents))
        claim = self._store.newest_claim(contents)
        found = ownership(self._identity, self._store.uri, newest, claim, contents.manifests)
        if isinstance(found, Denied):
            if isinstance(found.error, CheckpointOfAnotherJob):
                patiently(self._lease.observe)  # a running writer is the better reason
            raise found.error

    def _first_state(self, term: int, contents: Contents) -> CoordinatorState:
        """Returns version 0 of a history without any checkpoint, which this job has begun already or begins now.

        Raises:
            CheckpointError: the place that `start_from` names cannot be read.
        """
        claim = self._store.newest_claim(contents)
        begun = claim if claim is not None and self._identity.made(claim.origin) and not claim.base else None
        # A run keeps its first start. The next run may name another place, or find other files there.
        same_run = begun is not None and begun.origin.job == self._identity.job
        start = begun.start_from if begun is not None and same_run else ""
        if self._identity.start_from and not start:
            beside = same_place(self._identity.start_from, self._store.uri)
            start = self._fixed_start(self._identity.made) if beside else self._fixed_start()
        return CoordinatorState(
            term=term,
            version=0,
            world=self._requested.world,
            history=secrets.token_hex(8) if begun is None else begun.origin.history,
            start_from=start if self._identity.start_from else "",
        )

    def _continue(self, manifest: Manifest, *, own: bool) -> CoordinatorState:
        """Returns the state in `manifest`, in this job's history.

        Args:
            own: whether the checkpoint is of this history; otherwise a new one begins.

        Raises:
            CheckpointError: the checkpoint does not fit.
        """
        check_fits(manifest, self._partition)
        try:
            state = CoordinatorState.from_json(manifest.state)
        except ValueError as error:
            raise CheckpointError(f"{manifest.name} in {self._store.uri}: {error}") from None
        self.frozen.continues(manifest.frozen, manifest.name)
        origin = manifest.origin
        if not (own and self._identity.stops and state.version < (manifest.steps or 0)):
            state.last = 0  # the end by the number of steps, which may be another one now
        state.history = origin.history if own else secrets.token_hex(8)
        examples = origin.settings.get("examples", "")
        self.continued = Continued(
            step=manifest.version,
            origin=origin,
            own=own,
            same_run=own and origin.job == self._identity.job,
            changes=changes_of(origin.settings, self._identity.settings),
            examples=int(examples) if examples.isascii() and examples.isdigit() else None,
        )
        return state


class NoStorage:
    """A job that stores nothing starts again from the initial parameters.

    Args:
        world: the number of ranks to begin with.
        incarnation: the incarnation of shard 0's server. No file records the terms of previous servers, so each server
            has its range of terms.
        fixed_start: see `Beginning.fixed_start`.
    """

    stored_at = 0.0

    def __init__(self, world: Callable[[], int], incarnation: int, fixed_start: Callable[[], str] = lambda: "") -> None:
        self._world, self._fixed_start = world, fixed_start
        self._start = ""
        self._least = _TERMS_OF_ONE_SERVER * max(0, incarnation - 1)
        self.continued: Continued | None = None
        self.frozen = AgreedFrozen()

    def write_manifest(self, order: WriteManifest) -> str:
        raise CheckpointError(f"version {order.version} cannot be stored: the job has no checkpoint")

    def known(self, state: CoordinatorState, *, seconds: float = 0.0) -> tuple[str, tuple[int, int]]:
        """See `ManifestStorage.known`."""
        del state, seconds
        return "", (0, -1)

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `CheckpointStorage.newest`."""
        self._start = self._start or self._fixed_start()
        term = max(above_term, self._least) + 1
        return CoordinatorState(term=term, version=0, world=self._world(), start_from=self._start), ""

    def pin(self, manifest: str) -> None:
        """See `ManifestStorage.pin`."""

    def evaluated(self, step: int, metrics: Mapping[str, float], manifest: str = "") -> None:
        """See `ManifestStorage.evaluated`."""

    def taken_over(self) -> tuple[str, ...]:
        """See `ManifestStorage.taken_over`."""
        return ()

    def closing(self) -> None:
        """See `ManifestStorage.closing`."""

    def close(self) -> None:
        """See `ManifestStorage.close`."""


def _manifest_leaves(tree: TreeSpec) -> tuple[ManifestLeaf, ...]:
    return tuple(ManifestLeaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in tree.leaves)


def _base_of(tenure: Tenure) -> str:
    """Returns the name of the manifest that the term continues from. It is empty if there is none, or if it is not read
    yet."""
    match tenure:
        case Claimed():
            return tenure.begun.base
        case Begun():
            return tenure.base
        case _:
            return ""


def _name_of(manifest: Manifest | None) -> str:
    return "" if manifest is None else manifest.name
