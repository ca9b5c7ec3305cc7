"""The shard of a server's pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import ReplicaState, Rollback

from ..._checkpoint import CheckpointWriter
from ..._shard import Admission, Replication, ShardEvents, ShardRuntime
from ._history import rules_of
from ._loading import Loader, build

if TYPE_CHECKING:
    from ..._shard import HeldState
    from ..._update import ShardEngine
    from .._observers import ServerObserver
    from ._context import ServerContext
    from ._coordinators import CoordinatorAccess

__all__ = ["ServedShard"]


class ServedShard:
    """A server's shard with its loading, its checkpoints and its standby. Thread-safe.

    Attributes:
        runtime: applies updates; the coordinator's `ShardSink`.
        replication: sends the state to the standby; None: the job has no standbys.
        ready: whether the state of the term is loaded.
    """

    def __init__(self, context: ServerContext, observer: ServerObserver, coordinator: CoordinatorAccess) -> None:
        environment, plan, store = context.environment, context.plan, context.store
        config, shard = environment.config, environment.index
        self._context, self._observer, self._coordinator = context, observer, coordinator
        self.ready = False
        self._history = ""
        self._writer: CheckpointWriter | None = None
        if store is not None:
            self._writer = CheckpointWriter(
                store,
                coordinator,
                shard=shard,
                shards=config.shards,
                incarnation=environment.incarnation,
                stored=observer.shard_stored,
                history=lambda: self._history,
            )
        self.replication: Replication | None = None
        if config.standbys:
            self.replication = Replication(
                plan.agreement.digest,
                incarnation=environment.incarnation,
                admitted=lambda: self.runtime.admit_replica(),  # noqa: PLW0108  # it is made below
                standby_lost=self._standby_lost,
                coordinator=self._describe,
                timeouts=environment.timeouts,
            )
        self.runtime = ShardRuntime(
            plan.wires[shard],
            Admission(shard, environment.incarnation, plan.agreement.digest),
            coordinator,
            rules_of(environment, context.script),
            events=ShardEvents(self._writer, self._rolled_back, context.ending.end),
            standbys=self.replication,
        )
        self._staged_bytes = sum(block.nbytes for block in plan.wires[shard].gradients)
        self._loader = Loader(self._load, context.ending.fail)

    @property
    def world(self) -> int:
        """The world in the newest commit."""
        return self.runtime.world or self._context.environment.config.workers

    # ---- Life ----

    def inherit(self, held: HeldState) -> None:
        """Continue at the state of the previous active server, in the same term. Call before `start`."""
        self._begin(held.term, held.engine, held.world, held.offset, held.history)
        self.runtime.inherit(held.prepared, held.last)
        self.ready = True

    def start(self) -> None:
        """Load the state that the coordinator sends."""
        self._loader.start()

    def staged(self) -> tuple[int, int]:
        """Returns the most bytes of contributions in memory since the previous call, and the most that may be."""
        memory = self.runtime.memory
        return memory.most() * self._staged_bytes, memory.bound * self._staged_bytes

    def close(self) -> None:
        """Finish the update that is running, and write the snapshots that are queued."""
        self._loader.close()
        self.runtime.close()
        if self._writer is not None:
            self._writer.close()

    # ---- The shard's calls ----

    def _rolled_back(self, rollback: Rollback) -> None:
        self.ready = False
        self._loader.put(rollback)

    def _describe(self, state: ReplicaState) -> bool:
        state.history = self._history
        return self._coordinator.describe(state)

    def _standby_lost(self, when: float, closed: bool) -> None:
        replication = self.replication
        assert replication is not None
        self._context.arbiter.standby_lost(when, closed, lambda: replication.dialled)

    # ---- Loading ----

    def _load(self, rollback: Rollback) -> None:
        if rollback.term < self.runtime.term:
            return
        version = rollback.version
        if rollback.term == self.runtime.term:
            # The coordinator sent it again, because the link broke before the shard's report had arrived.
            version = self.runtime.version
        else:
            engine = build(rollback, self._context)
            self._begin(rollback.term, engine, rollback.world, rollback.offset, rollback.history)
        self._coordinator.loaded(rollback.term, version)
        self.ready = True

    def _begin(self, term: int, engine: ShardEngine, world: int, offset: int, history: str) -> None:
        self._history = history
        self.runtime.reset(term, engine, world, offset)
        self._observer.term_began(term, engine, lambda: self.runtime.version)
