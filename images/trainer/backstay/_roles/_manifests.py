"""The checkpoints of shard 0: the manifests of one history, and the start of that history (T6, T7)."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .. import _instrument
from .._checkpoint import (
    Best,
    CheckpointStore,
    Claim,
    Contents,
    Evaluation,
    FileInfo,
    FileRange,
    FolderLease,
    Interrupted,
    Job,
    Manifest,
    ManifestLeaf,
    Newest,
    Origin,
    describe_structure,
    parse_manifest,
    same_place,
)
from .._coordination import CoordinatorState, WriteManifest
from ..errors import BackstayError, CheckpointError, CheckpointInUse, CheckpointOfAnotherJob, StorageError, Superseded
from ._continued import Continued, changes_of
from ._storing import check_fits, patiently

if TYPE_CHECKING:
    from .._checkpoint import ManifestName
    from .._report import Reports
    from .._update import Partition, TreeSpec

__all__ = ["Identity", "ManifestStorage", "NoStorage"]

_TERMS_OF_ONE_SERVER = 1_000_000  # more rollbacks than one server process can have
_SHOWN = 3
_LOG = logging.getLogger(__name__)

KNOWN_SECONDS = 2.0
"""How long a server that takes over waits for the name of the newest checkpoint."""

EVALUATION_SECONDS = 2.0
"""How long the report of an evaluation waits for the folder."""

CLOSE_SECONDS = 10.0
"""How long a server that ends waits for a manifest that is being stored."""


@dataclass(frozen=True)
class Identity:
    """The run that writes checkpoints.

    Attributes:
        seed: the script's seed.
        settings: settings that may change between two runs, as text.
        any_history: whether a history of another job or seed may be continued.
        start_from: the place of the initial parameters, as the script names it; empty: `init` returns them.
        best: how the best checkpoint is chosen, which is kept; None: only the newest ones are.
        stops: whether the script may end training early: then a history that it has ended stays ended.
    """

    job: Job
    incarnation: int
    seed: int
    steps: int
    settings: Mapping[str, str]
    any_history: bool = False
    start_from: str = ""
    stops: bool = False
    best: Best | None = None


class ManifestStorage:
    """The coordinator's `Storage`: manifests, and the point to start from. It writes only while it holds the lease."""

    def __init__(
        self,
        store: CheckpointStore,
        lease: FolderLease,
        partition: Partition,
        identity: Identity,
        *,
        keep: Callable[[], int],
        world: Callable[[], int],
        metrics: Callable[[], dict[str, float]],
        examples: Callable[[], int | None] = lambda: None,
        fixed_start: Callable[..., str] = lambda *skip: "",
    ) -> None:
        """
        Args:
            keep: how many checkpoints to keep, as the operator requested last.
            world: `workers.replicas` as the operator requested last.
            metrics: returns the metrics of the newest evaluation.
            examples: returns the number of examples of one contribution of the newest update; None: contributions had
                different numbers.
            fixed_start: see `Script.fixed_start`.
        """
        self._store, self._lease, self._partition = store, lease, partition
        self._identity = identity
        self._keep, self._world, self._metrics, self._examples = keep, world, metrics, examples
        self._fixed_start, self._start_from = fixed_start, ""
        self.stored_at = 0.0  # Unix time of the newest checkpoint that `newest` or `known` found; 0: none
        self._lock = threading.Lock()
        self._term = 0
        self._history = ""
        self._base: Manifest | None = None
        self._begun = False  # `_base` is the manifest at which the term began
        self._up_to: tuple[int, int] | None = None  # taken over: the (term, version) that this server held then
        self._taking_over = threading.Lock()  # for `_base` and `_begun`, while `known` waits
        self._claimed: tuple[int, int] = (0, 0)  # (lease, term) of the newest claim
        self._pinned: ManifestName | None = None  # the checkpoint that is being evaluated
        self._last: Manifest | None = None  # the newest one that this process stored
        self.continued: Continued | None = None
        self.reports: Reports | None = None  # closed with this storage

    def write_manifest(self, order: WriteManifest) -> str:
        """See `Storage.write_manifest`."""
        with self._lock:
            self._hold()
            self._lease.check()
            manifest = self._store.write_manifest(self._manifest(order))
            # Another process that took the lease before the manifest existed does not count it.
            self._lease.check()
        _instrument.reach("manifest", manifest.version)
        self._last = manifest
        self._prune(manifest)
        return self._store.uri_of(manifest)

    def _manifest(self, order: WriteManifest) -> Manifest:
        tree = self._partition.tree
        examples = self._examples()
        settings = {**self._identity.settings, **({} if examples is None else {"examples": str(examples)})}
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
            metrics=self._metrics(),
            unix_seconds=time.time(),
        )

    def _origin(self, settings: Mapping[str, str]) -> Origin:
        return Origin(
            history=self._history,
            job=self._identity.job,
            seed=self._identity.seed,
            digest=self._partition.digest.hex(),
            structure=self._partition.structure_digest.hex(),
            settings=dict(settings),
        )

    def _prune(self, newest: Manifest) -> None:
        try:
            self._store.prune(keep=self._keep(), newest=newest, best=self._identity.best, pinned=self._pinned)
        except CheckpointError as error:
            _LOG.warning("old checkpoints could not be deleted: %s", error)

    def pin(self, manifest: str) -> None:
        """Keep this checkpoint until `evaluated` is called with it, or another one is pinned."""
        self._pinned = parse_manifest(manifest)

    def evaluated(self, manifest: str, metrics: Mapping[str, float]) -> None:
        """Store the evaluation of a checkpoint. A failure costs the evaluation, and not the training.

        Args:
            manifest: the name of the checkpoint's manifest, of any history.
        """
        name = parse_manifest(manifest)
        if name is None or name.history != self._history:
            return
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        best = self._identity.best
        record = Evaluation(manifest=manifest, metrics=finite, best=best, unix_seconds=time.time())
        if not self._lock.acquire(timeout=EVALUATION_SECONDS):
            _LOG.warning("the evaluation of %s could not be stored: the folder does not answer", manifest)
            return
        try:
            self._hold()
            self._lease.check()
            self._pinned = None
            if self._store.write_evaluation(record) and best is not None and self._last is not None:
                self._prune(self._last)  # another checkpoint may be the best one now
        except BackstayError as error:
            _LOG.warning("the evaluation of %s could not be stored: %s", manifest, error)
        finally:
            self._lock.release()
        if best is not None and best.metric not in finite:
            _LOG.warning(
                "the evaluation of step %d has no finite number %r, which spec.checkpoint.keepBest names; it has: %s",
                name.version,
                best.metric,
                ", ".join(sorted(finite)) or "none",
            )

    def known(self, state: CoordinatorState) -> tuple[str, tuple[int, int]]:
        """Take the folder over in the middle of a term, from memory.

        Args:
            state: as this server held it while it was a standby.

        Returns:
            The newest checkpoint by names and sizes, and its (term, version). ('', (0, -1)) when there is none, or
            when the storage does not answer immediately: training does not wait for it.
        """
        continues = threading.Event()
        self._up_to = state.term, state.version

        def look() -> None:
            try:
                with self._lock:
                    self._term, self._history = state.term, state.history
                    self._lease.acquire()
                    manifest = self._store.newest(verify=False).manifest
                    with self._taking_over:
                        if not continues.is_set():
                            self._base, self._begun, self._up_to = manifest, True, None
                    self._hold()
            except (CheckpointInUse, Superseded) as error:
                _LOG.debug("the checkpoint folder is lost: %s", error)  # the lease has reported it
            except BackstayError as error:
                _LOG.warning("cannot read the newest checkpoint: %s", error)

        thread = threading.Thread(target=look, name="backstay-newest", daemon=True)
        thread.start()
        thread.join(KNOWN_SECONDS)
        with self._taking_over:
            continues.set()  # this server does not continue from a checkpoint that is found later: see `_hold`
            manifest = self._base if self._begun else None
        if manifest is None:
            return "", (0, -1)
        self.stored_at = manifest.unix_seconds
        return self._store.uri_of(manifest), (manifest.term, manifest.version)

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `Storage.newest`.

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
                self._identify(contents)
                self._acquire(contents)
                contents = patiently(self._store.contents)
            newest = patiently(lambda: self._store.newest(contents=contents, up_to=self._up_to))
            for line in newest.skipped:
                _LOG.warning("skipped a checkpoint: %s", line)
            # Also above the skipped ones: no term has two beginnings (T6).
            term = contents.next_term(above_term, self._store.uri)
            manifest = newest.manifest
            if manifest is not None and self._starts_beside(manifest.origin):
                manifest = None
            elif manifest is None:
                self._refuse_unusable(newest)
            if manifest is None:
                state = self._first_state(term, contents)
            else:
                state = self._continue(manifest)
                state.term = term
            self._term, self._history, self._base = term, state.history, manifest
            self._start_from = state.start_from if manifest is None else ""
            self._begun, self._up_to = True, None
            self.stored_at = 0.0 if manifest is None else manifest.unix_seconds
            try:
                self._claim()
            except CheckpointError as error:
                # The claim is written before the first manifest; until then only this run can read another one.
                _LOG.warning("the start of term %d could not be stored; the server stores it later: %s", term, error)
            return state, "" if manifest is None else self._store.uri_of(manifest)

    def taken_over(self) -> tuple[str, ...]:
        """The leases that were not renewed, so that this process took the folder over, as text."""
        return tuple(self._lease.taken_over)

    def closing(self) -> None:
        """Prepare for the last checkpoint: this process received SIGTERM."""
        self._lease.closing()

    def close(self) -> None:
        """Release the folder, unless a manifest is being stored for longer than this process can wait."""
        if self.reports is not None:
            self.reports.close()
        if self._lock.acquire(timeout=CLOSE_SECONDS):
            try:
                self._lease.release()
            finally:
                self._lock.release()

    # ---- The lease and the claim ----

    def _hold(self) -> None:
        """Make sure that this process has the lease, and the claim of the term. Earlier failed writes are repeated.

        The claim names the manifest at which this term began, because an older incarnation may have stored more in the
        meantime (T6). A takeover may not have waited for the storage. Then a checkpoint that is newer than this
        server's state at the takeover is not in the history.
        """
        if not self._lease.number:
            self._lease.acquire()
        if not self._begun:
            self._base, self._begun = self._store.newest(verify=False, up_to=self._up_to).manifest, True
        if self._claimed != (self._lease.number, self._term):
            self._claim()

    def _claim(self) -> None:
        if not self._lease.number:
            return  # it is acquired before the first manifest
        claim = Claim(
            origin=self._origin(self._identity.settings),
            lease=self._lease.number,
            term=self._term,
            incarnation=self._identity.incarnation,
            base="" if self._base is None else self._base.name,
            start_from=self._start_from,
        )
        self._store.write_claim(claim)
        self._claimed = claim.lease, claim.term

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

    # ---- The owner of the history ----

    def _identify(self, contents: Contents) -> None:
        """Refuse a history of another job, or an unreadable one, before anything is written into its folder."""
        newest = patiently(lambda: self._store.newest(verify=False, contents=contents))
        try:
            if newest.manifest is not None:
                self._check_owner(newest.manifest)
            else:
                self._refuse_unusable(newest)
                self._check_claim(newest, contents)
        except CheckpointOfAnotherJob:
            patiently(self._lease.observe)  # a running writer is the better reason
            raise

    def _refuse_unusable(self, newest: Newest) -> None:
        """
        Raises:
            CheckpointError: the folder has checkpoints, and none can be used. To begin with the initial parameters
                would drop them silently.
        """
        if newest.unusable:
            shown = "".join(f"\n  {line}" for line in newest.unusable[:_SHOWN])
            more = f"\n  and {len(newest.unusable) - _SHOWN} more" if len(newest.unusable) > _SHOWN else ""
            raise CheckpointError(
                f"{self._store.uri} holds checkpoints, and this version of Backstay can use none of them. Restore the "
                "files, use another checkpoint.uri, or delete these files to begin again at the initial parameters:"
                f"{shown}{more}"
            )

    def _check_owner(self, manifest: Manifest) -> None:
        """
        Raises:
            CheckpointOfAnotherJob: `manifest` belongs to another job, or to another seed, and that was not allowed.
        """
        identity, origin = self._identity, manifest.origin
        if self._is_own(origin) or self._starts_beside(origin):
            return
        theirs = f"job {origin.job} with seed {origin.seed}"
        mine = f"job {identity.job} with seed {identity.seed}"
        if not identity.any_history:
            raise CheckpointOfAnotherJob(
                f"the checkpoints in {self._store.uri} belong to {theirs} (step {manifest.version}), this is {mine}. "
                "Use another checkpoint.uri, or set checkpoint.continueFrom: Any (--continue-from Any of backstay run) "
                "to continue them in a new history. In one process, use StoreTo(continue_from='Any')"
            )
        if manifest.version >= identity.steps:
            raise CheckpointOfAnotherJob(
                f"the checkpoint of {theirs} is of step {manifest.version}, {mine} has only {identity.steps} steps: "
                f"set steps to more than {manifest.version}, or use another checkpoint.uri"
            )

    def _check_claim(self, newest: Newest, contents: Contents) -> None:
        """
        Raises:
            CheckpointOfAnotherJob: another job has begun a history in the folder, so the checkpoints of this job no
                longer count. To begin with the initial parameters would drop them silently.
        """
        claim = self._store.newest_claim(contents)
        if claim is None or self._is_own(claim.origin) or self._identity.start_from or self._identity.any_history:
            return
        mine = [name for name in contents.manifests if name.history != claim.origin.history]
        if newest.skipped and mine:
            raise CheckpointOfAnotherJob(
                f"job {claim.origin.job} with seed {claim.origin.seed} has begun a history in {self._store.uri}, and "
                f"has stored no checkpoint yet. The older checkpoints there, such as {mine[0]}, no longer count. Use "
                f"another checkpoint.uri, or copy the files with {mine[0].history} in their names into another folder"
            )

    def _is_own(self, origin: Origin) -> bool:
        return origin.job.same_job(self._identity.job) and origin.seed == self._identity.seed

    def _starts_beside(self, origin: Origin) -> bool:
        """Whether `start_from` names this folder, and this checkpoint of another job or seed must not be continued.
        Then a new history begins beside it."""
        beside = self._identity.start_from and same_place(self._identity.start_from, self._store.uri)
        return bool(beside) and not self._identity.any_history and not self._is_own(origin)

    def _first_state(self, term: int, contents: Contents) -> CoordinatorState:
        """Version 0 of a history without any checkpoint: the one that this job has begun already, or a new one.

        Raises:
            CheckpointError: the place that `start_from` names cannot be read.
        """
        claim = self._store.newest_claim(contents)
        begun = claim if claim is not None and self._is_own(claim.origin) and not claim.base else None
        # A run keeps its first start. The next run may name another place, or find other files there.
        same_run = begun is not None and begun.origin.job == self._identity.job
        start = begun.start_from if begun is not None and same_run else ""
        if self._identity.start_from and not start:
            beside = same_place(self._identity.start_from, self._store.uri)
            start = self._fixed_start(self._is_own) if beside else self._fixed_start()
        return CoordinatorState(
            term=term,
            version=0,
            world=self._world(),
            history=secrets.token_hex(8) if begun is None else begun.origin.history,
            start_from=start if self._identity.start_from else "",
        )

    def _continue(self, manifest: Manifest) -> CoordinatorState:
        """The state in `manifest`, in this job's history.

        Raises:
            CheckpointError: the checkpoint belongs to another job, or does not fit.
        """
        self._check_owner(manifest)
        check_fits(manifest, self._partition)
        try:
            state = CoordinatorState.from_json(manifest.state)
        except ValueError as error:
            raise CheckpointError(f"{manifest.name} in {self._store.uri}: {error}") from None
        origin, own = manifest.origin, self._is_own(manifest.origin)
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
        fixed_start: see `Script.fixed_start`.
    """

    stored_at = 0.0

    def __init__(self, world: Callable[[], int], incarnation: int, fixed_start: Callable[[], str] = lambda: "") -> None:
        self._world, self._fixed_start = world, fixed_start
        self._start = ""
        self._least = _TERMS_OF_ONE_SERVER * max(0, incarnation - 1)
        self.continued: Continued | None = None
        self.reports: Reports | None = None

    def write_manifest(self, order: WriteManifest) -> str:
        raise CheckpointError(f"version {order.version} cannot be stored: the job has no checkpoint")

    def known(self, state: CoordinatorState) -> tuple[str, tuple[int, int]]:
        """See `ManifestStorage.known`."""
        del state
        return "", (0, -1)

    def newest(self, above_term: int) -> tuple[CoordinatorState, str]:
        """See `Storage.newest`."""
        self._start = self._start or self._fixed_start()
        term = max(above_term, self._least) + 1
        return CoordinatorState(term=term, version=0, world=self._world(), start_from=self._start), ""

    def pin(self, manifest: str) -> None:
        """See `ManifestStorage.pin`."""

    def evaluated(self, manifest: str, metrics: Mapping[str, float]) -> None:
        """See `ManifestStorage.evaluated`."""

    def taken_over(self) -> tuple[str, ...]:
        """See `ManifestStorage.taken_over`."""
        return ()

    def closing(self) -> None:
        """See `ManifestStorage.closing`."""

    def close(self) -> None:
        """See `ManifestStorage.close`."""
        if self.reports is not None:
            self.reports.close()


def _manifest_leaves(tree: TreeSpec) -> tuple[ManifestLeaf, ...]:
    return tuple(ManifestLeaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in tree.leaves)
