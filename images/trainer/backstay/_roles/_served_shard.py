"""The shard of a server's pod."""

from __future__ import annotations

from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import ReplicaState, Rollback

from .._report import LearningRate
from .._shard import Replication, ShardRuntime
from ._history import rules_of
from ._loading import Loader, build
from ._storing import CheckpointWriter

if TYPE_CHECKING:
    from .._checkpoint import CheckpointStore
    from .._control import Link
    from .._process import Environment
    from .._report import Metrics
    from .._shard import Held
    from .._update import ShardEngine
    from ._arbiter import Arbiter
    from ._coordinators import CoordinatorAccess
    from ._ending import Ending
    from ._live_settings import LiveSettings
    from ._script import Plan, Script

__all__ = ["ServedShard"]


class ServedShard:
    """A server's shard with its loading, its checkpoints and its standby. Thread-safe.

    Attributes:
        runtime: applies updates; the coordinator's `ShardSink`.
        replication: sends the state to the standby; None: the job has no standbys.
        ready: whether the state of the term is loaded.
    """

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: Plan,
        metrics: Metrics,
        coordinator: CoordinatorAccess,
        link: Link | None,
        *,
        ending: Ending,
        desired: LiveSettings,
        arbiter: Arbiter,
        store: CheckpointStore | None,
    ) -> None:
        """`link`: to the coordinator; None: the coordinator is in this process."""
        config, shard = environment.config, environment.index
        self._env, self._script, self._plan, self._metrics = environment, script, plan, metrics
        self._coordinator, self._link, self._desired, self._arbiter = coordinator, link, desired, arbiter
        self.ready = False
        self._history = ""
        self._learning_rate = LearningRate(metrics)
        self._writer: CheckpointWriter | None = None
        if store is not None:
            self._writer = CheckpointWriter(
                store,
                coordinator,
                shard=shard,
                shards=config.shards,
                incarnation=environment.incarnation,
                metrics=metrics,
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
            plan.partition.shards[shard],
            plan.agreement.digest,
            coordinator,
            incarnation=environment.incarnation,
            mode=config.mode,
            on_checkpoint=self._writer,
            on_rollback=self._rolled_back,
            on_done=ending.end,
            standbys=self.replication,
            timeouts=environment.timeouts,
            wire=plan.wires[shard],
            rules=rules_of(environment, script),
        )
        self._staged_bytes = sum(block.nbytes for block in plan.wires[shard].gradients)
        self._loader = Loader(self._load, ending.fail)

    @property
    def world(self) -> int:
        """The world in the newest commit."""
        return self.runtime.world or self._env.config.workers

    # ---- Life ----

    def inherit(self, held: Held) -> None:
        """Continue at the state of the previous active server, in the same term. Call before `start`."""
        self._begin(held.term, held.engine, held.world, held.offset, held.history)
        self.runtime.inherit(held.prepared, held.last)
        self.ready = True

    def start(self) -> None:
        """Load the state that the coordinator sends."""
        self._loader.start()

    def tick(self) -> None:
        """Show the state in metrics. Call it about once a second."""
        memory = self.runtime.memory
        self._metrics.staged_bytes.set(memory.most() * self._staged_bytes)
        self._metrics.staged_bytes_limit.set(memory.bound * self._staged_bytes)
        self._learning_rate.tick()

    def close(self) -> None:
        """Finish the update that is running, and write the snapshots that are queued."""
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
        self._arbiter.standby_lost(when, closed, lambda: replication.dialled)

    # ---- Loading ----

    def _load(self, rollback: Rollback) -> None:
        if rollback.term < self.runtime.term:
            return
        version = rollback.version
        if rollback.term == self.runtime.term:
            # The coordinator sent it again, because the link broke before the shard's report had arrived.
            version = self.runtime.version
        else:
            engine = build(rollback, self._env, self._script, self._plan, self._desired.world)
            self._begin(rollback.term, engine, rollback.world, rollback.offset, rollback.history)
        if self._link is not None:
            self._link.started(rollback.term, version)
        self.ready = True

    def _begin(self, term: int, engine: ShardEngine, world: int, offset: int, history: str) -> None:
        self._history = history
        self._metrics.term.set(term)
        self._learning_rate.watch(engine)
        self.runtime.reset(term, engine, world, offset)
        self._metrics.step.set_function(lambda: self.runtime.version)
