"""The start of the history for shard 0's server: new, at a checkpoint, or at the state of its predecessor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from .._checkpoint import Best, FolderLease, Holder, Job, PosixFolder
from .._control import Driving
from .._coordination import MODES, Coordinator, Intervals, Rules
from .._process import SIGTERM_EXIT
from .._report import FLUSH_REMOTE_SECONDS, FLUSH_SECONDS, EventFiles, Reports
from ..errors import BackstayError
from ._continued import Continued, log_continued
from ._epochs import epochs_of
from ._manifests import Identity, ManifestStorage, NoStorage

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._process import Environment, Stop
    from .._report import JobObserver
    from .._shard import Held
    from ._live_settings import LiveSettings
    from ._script import Plan, Script

__all__ = ["begin_history", "rules_of"]

_LOG = logging.getLogger(__name__)


def _open_storage(
    environment: Environment,
    script: Script,
    plan: Plan,
    observer: JobObserver,
    store: CheckpointStore | None,
    stop: Stop,
    lost: Callable[[BackstayError], None],
    desired: LiveSettings,
) -> ManifestStorage | NoStorage:
    """The storage; nothing is read or written yet."""
    if store is None:
        return NoStorage(lambda: desired.world, environment.incarnation, script.fixed_start)
    job = Job(namespace=environment.namespace, name=environment.job, uid=environment.uid)
    holder = Holder(job, environment.incarnation, environment.pod_name)
    checkpoint = environment.config.checkpoint
    best = None if checkpoint is None else checkpoint.keep_best
    identity = Identity(
        job=job,
        incarnation=environment.incarnation,
        seed=script.seed,
        steps=script.steps,
        settings=script.settings(plan, environment.config),
        any_history=checkpoint is not None and checkpoint.continue_from == "Any",
        stops=script.stop_when is not None,
        best=None if best is None else Best(metric=best.metric, mode=best.mode),
        start_from="" if script.start_from is None else script.start_from.uri,
    )
    return ManifestStorage(
        store,
        FolderLease(store, holder, lost=lost, wait=stop.requested.wait),
        plan.partition,
        identity,
        keep=lambda: desired.keep,
        world=lambda: desired.world,
        metrics=observer.evaluation,
        examples=observer.examples,
        fixed_start=script.fixed_start,
    )


def begin_history(
    environment: Environment,
    script: Script,
    plan: Plan,
    observer: JobObserver,
    store: CheckpointStore | None,
    held: Held | None,
    stop: Stop,
    lost: Callable[[BackstayError], None],
    desired: LiveSettings,
) -> tuple[ManifestStorage | NoStorage, Driving]:
    """The storage, and the coordinator, which is not started yet.

    Args:
        store: None for a job that stores nothing.
        held: what this server held as its shard's standby.
        lost: see `FolderLease`.

    Raises:
        CheckpointInUse: another run writes into the folder.
        CheckpointOfAnotherJob: the checkpoints in it are not this job's.
        CheckpointError: the newest checkpoint does not fit, or the folder cannot be read.
        SystemExit: SIGTERM arrived while the process waited for the folder.
    """
    config, mode = environment.config, MODES[environment.config.mode]
    observer.watch_waits(config.shards, lambda ranks: mode.quorum(config.backups, ranks), sync=mode.waits_for_ranks())
    storage = _open_storage(environment, script, plan, observer, store, stop, lost, desired)
    observer.reports = storage.reports = _reports(environment, script, store)
    try:
        driving = _begin(environment, script, observer, storage, held, desired)
        observer.reports.stop = partial(driving.do, Coordinator.stop_early)
    except BaseException:
        storage.close()
        if stop.requested.is_set():
            raise SystemExit(SIGTERM_EXIT) from None
        raise
    return storage, driving


def _begin(
    environment: Environment,
    script: Script,
    observer: JobObserver,
    storage: ManifestStorage | NoStorage,
    held: Held | None,
    desired: LiveSettings,
) -> Driving:
    now = time.monotonic()
    rules, intervals = rules_of(environment, script), _intervals(environment)
    if held is not None and held.coordinator is not None and held.start is not None:
        checkpoint, at = storage.known(held.coordinator)
        observer.start(held.coordinator, checkpoint, at[1], held.infos, checkpoint_time=storage.stored_at)
        successor = Coordinator.resume(
            rules,
            held.coordinator,
            held.start,
            last=held.last,
            prepared=held.contributions,
            incarnation=environment.incarnation,
            infos=() if held.prepared is None else held.prepared.infos,
            checkpoint=checkpoint,
            checkpoint_at=at,
            since_checkpoint=now - held.checkpoint_at,
            desired_world=held.coordinator.world,
            intervals=intervals,
            now=now,
        )
        return Driving(successor, storage, observer)
    state, checkpoint = storage.newest(0)
    observer.takes_over(storage.taken_over())
    first = epochs_of(script)
    state.samples = None if first is None else MODES[environment.config.mode].account(first, state)
    if checkpoint:
        _LOG.info("continuing from the checkpoint of step %d: %s", state.version, checkpoint)
    if storage.continued is not None:
        _report(storage.continued, observer)
    observer.start(state, checkpoint, state.version, checkpoint_time=storage.stored_at)
    coordinator = Coordinator(
        rules, state, checkpoint=checkpoint, desired_world=desired.world, intervals=intervals, now=now
    )
    return Driving(coordinator, storage, observer)


def _reports(environment: Environment, script: Script, store: CheckpointStore | None) -> Reports:
    files = None
    if store is not None:
        files = EventFiles(store.folder, f"{environment.job}.{environment.uid or 0}.{environment.incarnation}")
    remote = store is not None and not isinstance(store.folder, PosixFolder)
    seconds = FLUSH_REMOTE_SECONDS if remote else FLUSH_SECONDS
    return Reports(script.on_update, files, script.stop_when, flush_seconds=seconds)


def _report(continued: Continued, observer: JobObserver) -> None:
    """Log which run stored the checkpoint that training continues from, and the user's changes since."""
    log_continued(continued)
    observer.continues(continued.changes, None if continued.same_run else continued.examples)


def rules_of(environment: Environment, script: Script) -> Rules:
    """The settings of this job's updates."""
    config = environment.config
    return Rules(
        mode=config.mode,
        shards=config.shards,
        steps=script.steps,
        backups=config.backups,
        grace=config.grace_seconds,
        weighting=config.weighting,
        max_non_finite=config.max_non_finite,
        max_staleness=config.max_staleness,
        staleness_damping=script.damping(config),
        clip_norm=script.clip_norm,
        stores=environment.checkpoint_uri is not None,
        evaluates=script.evaluate is not None,
        replicates=config.standbys > 0,
        batches=script.batches_of_update,
        timeouts=environment.timeouts,
    )


def _intervals(environment: Environment) -> Intervals:
    checkpoint = environment.config.checkpoint
    return Intervals() if checkpoint is None else Intervals(checkpoint.every_steps, checkpoint.every_seconds)
