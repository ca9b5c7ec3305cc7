"""Where the job's history begins for shard 0's server: anew, at a checkpoint, or where its predecessor was."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from .._control import Driving
from .._coordination import Coordinator, Intervals, Rules
from ._storing import ManifestStorage, NoStorage

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._process._environment import Environment
    from .._shard._follower import Held
    from ._leader import Leader
    from ._script import Plan, Script

__all__ = ["begin_history"]

_LOG = logging.getLogger(__name__)


def begin_history(
    environment: Environment,
    script: Script,
    plan: Plan,
    leader: Leader,
    store: CheckpointStore | None,
    held: Held | None,
    *,
    keep: Callable[[], int],
    world: Callable[[], int],
) -> tuple[Driving, bool]:
    """The coordinator, not started yet; and whether the job was complete before it.

    Args:
        store: None for a job that stores nothing.
        held: what this server held as its shard's standby.
        keep: how many checkpoints to keep, as the operator wishes now.
        world: `workers.replicas` as the operator wishes now.

    Raises:
        CheckpointError: the newest checkpoint does not fit, or the folder cannot be read.
    """
    storage: ManifestStorage | NoStorage
    if store is None:
        storage = NoStorage(world)
    else:
        storage = ManifestStorage(
            store,
            plan.partition,
            plan.rule,
            job=environment.job,
            incarnation=environment.incarnation,
            steps=script.steps,
            keep=keep,
            world=world,
            metrics=leader.evaluation,
        )
    now = time.monotonic()
    rules, intervals = _rules(environment, script, stores=store is not None), _intervals(environment)
    if held is not None and held.coordinator is not None and held.start is not None:
        checkpoint, at = storage.known()
        leader.start(held.coordinator, checkpoint, at[1], held.infos)
        successor = Coordinator.resume(
            rules,
            held.coordinator,
            held.start,
            last=held.last,
            prepared=() if held.prepared is None else held.prepared.contributions,
            infos=() if held.prepared is None else held.prepared.infos,
            checkpoint=checkpoint,
            checkpoint_at=at,
            since_checkpoint=now - held.checkpoint_at,
            wished_world=held.coordinator.world,
            intervals=intervals,
            now=now,
        )
        return Driving(successor, storage, leader), False
    state, checkpoint = storage.newest(0)
    if checkpoint:
        _LOG.info("continuing from the checkpoint of step %d: %s", state.version, checkpoint)
    leader.start(state, checkpoint, state.version)
    coordinator = Coordinator(rules, state, checkpoint=checkpoint, wished_world=world(), intervals=intervals, now=now)
    return Driving(coordinator, storage, leader), bool(checkpoint) and state.version >= script.steps


def _rules(environment: Environment, script: Script, *, stores: bool) -> Rules:
    config = environment.config
    return Rules(
        mode=config.mode,
        shards=config.shards,
        steps=script.steps,
        backups=config.backups,
        max_non_finite=config.max_non_finite,
        max_staleness=config.max_staleness,
        staleness_damping=config.staleness_damping,
        clip_norm=script.clip_norm,
        stores=stores,
        evaluates=script.evaluate is not None,
        replicates=config.standbys > 0,
        timeouts=environment.timeouts,
    )


def _intervals(environment: Environment) -> Intervals:
    wished = environment.config.checkpoint
    return Intervals() if wished is None else Intervals(wished.every_steps, wished.every_seconds)
