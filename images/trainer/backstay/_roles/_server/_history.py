"""Starts the history for shard 0's server, which is new, at a checkpoint, or at the state of its predecessor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..._checkpoint import (
    Best,
    Continued,
    FolderLease,
    Holder,
    Identity,
    JobIdentity,
    ManifestStorage,
    NoStorage,
    log_continued,
)
from ..._coordination import MODES, Coordinator, Intervals, Rules
from ..._process import SIGTERM_EXIT
from ..._script import epochs_of
from ..._threaded import ThreadedCoordinator
from ...errors import BackstayError

if TYPE_CHECKING:
    from ..._process import Environment
    from ..._script import Script
    from .._observers import JobHistoryObserver
    from ._context import ServerContext

__all__ = ["begin_history", "rules_of"]

_LOG = logging.getLogger(__name__)


def _open_storage(
    context: ServerContext, observer: JobHistoryObserver, lost: Callable[[BackstayError], None]
) -> ManifestStorage | NoStorage:
    """Returns the storage; nothing is read or written yet."""
    environment, script, plan, live = context.environment, context.script, context.plan, context.live
    if context.store is None:
        return NoStorage(lambda: live.world, environment.incarnation, script.beginning.fixed_start)
    job = JobIdentity(namespace=environment.namespace, name=environment.job, uid=environment.uid)
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
        context.store,
        FolderLease(context.store, holder, lost=lost, wait=context.stop.requested.wait),
        plan.partition,
        identity,
        live,
        observer,
        script.beginning.fixed_start,
    )


def begin_history(
    context: ServerContext, observer: JobHistoryObserver, lost: Callable[[BackstayError], None]
) -> tuple[ManifestStorage | NoStorage, ThreadedCoordinator]:
    """Returns the storage, and the coordinator, which is not started yet.

    Args:
        lost: see `FolderLease`.

    Raises:
        CheckpointInUse: another run writes into the folder.
        CheckpointOfAnotherJob: the checkpoints in it are not this job's.
        CheckpointError: the newest checkpoint does not fit, or the folder cannot be read.
        SystemExit: SIGTERM arrived while the process waited for the folder.
    """
    storage = _open_storage(context, observer, lost)
    try:
        threaded = _begin(context, observer, storage)
        observer.stop_with(partial(threaded.do, Coordinator.stop_early))
    except BaseException:
        observer.close()
        storage.close()
        if context.stop.requested.is_set():
            raise SystemExit(SIGTERM_EXIT) from None
        raise
    return storage, threaded


def _begin(
    context: ServerContext, observer: JobHistoryObserver, storage: ManifestStorage | NoStorage
) -> ThreadedCoordinator:
    environment, script, held = context.environment, context.script, context.held
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
        return ThreadedCoordinator(successor, storage, observer)
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
        rules, state, checkpoint=checkpoint, desired_world=context.live.world, intervals=intervals, now=now
    )
    return ThreadedCoordinator(coordinator, storage, observer)


def _report(continued: Continued, observer: JobHistoryObserver) -> None:
    """Log which run stored the checkpoint that training continues from, and the user's changes since."""
    log_continued(continued)
    observer.continues(continued.changes, None if continued.same_run else continued.examples)


def rules_of(environment: Environment, script: Script) -> Rules:
    """Returns the settings of this job's updates."""
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
