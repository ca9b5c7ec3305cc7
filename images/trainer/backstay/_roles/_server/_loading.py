"""Builds the state of a shard for a term, from a checkpoint or from the script's `init`."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import Rollback

from ... import _instrument
from ..._checkpoint import restore
from ..._coordination import MODES
from ..._process import one_compiles
from ..._update import ShardEngine
from ...errors import CheckpointError

if TYPE_CHECKING:
    from ._context import ServerContext

__all__ = ["Loader", "build"]


class Loader:
    """A thread that begins terms, one after another. Loading may take long, and only the newest term counts."""

    def __init__(self, begin: Callable[[Rollback], None], failed: Callable[[BaseException], None]) -> None:
        """
        Args:
            begin: begins a term; called by the thread.
            failed: called with an exception of `begin`; the thread has ended then.
        """
        self._begin, self._failed = begin, failed
        self._terms: queue.SimpleQueue[Rollback | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="backstay-loading", daemon=True)

    def start(self) -> None:
        """Call once."""
        self._thread.start()

    def put(self, term: Rollback) -> None:
        """Begin this term; it replaces those that wait."""
        self._terms.put(term)

    def close(self) -> None:
        """Begin no more terms. The thread ends after the term that it begins now."""
        self._terms.put(None)

    def _run(self) -> None:
        while True:
            term = self._terms.get()
            while term is not None and not self._terms.empty():
                term = self._terms.get()
            if term is None:
                return
            try:
                self._begin(term)
            except BaseException as error:  # noqa: BLE001  # the server raises it
                self._failed(error)
                return


def build(term: Rollback, context: ServerContext) -> ShardEngine:
    """Returns the state of this pod's shard at the beginning of a term, compiled for the updates of the term.

    Raises:
        CheckpointError: the checkpoint cannot be read, or is of another version.
    """
    environment, script, plan = context.environment, context.script, context.plan
    config, shard = environment.config, environment.index
    if term.checkpoint:
        uri = term.checkpoint
        if environment.checkpoint_uri:  # the folder may have another name in this pod
            uri = f"{environment.checkpoint_uri.rstrip('/')}/{uri.rpartition('/')[2]}"
        engine = restore(uri, plan.partition, shard, plan.rule)
        if engine.version != term.version:
            raise CheckpointError(f"{uri} is of version {engine.version}: the term begins at version {term.version}")
    else:
        with one_compiles("init", plan.agreement.digest, seconds=environment.timeouts.compiling):
            needed = ShardEngine.needs(plan.partition, shard, plan.rule)
            parameters = script.beginning.trained(term.start_from, needed)
        engine = ShardEngine(plan.partition, shard, plan.rule, parameters)
    world = min(term.world, context.live.world)
    least = MODES[config.mode].quorum(config.backups, world)
    with _instrument.span("compile"):
        engine.compile(
            (least,) if config.grace_seconds == 0.0 else range(least, world + 1),
            weighted=script.damping(config) or config.weighting == "Examples",
            clipped=script.clip_norm is not None,
            wires=plan.wires[shard].gradients,
            parameters=plan.wires[shard].parameters,
        )
    return engine
