"""The context of the parts of a server has its pod, its settings, and the records that its threads share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import Peer, ProgressRequest

from ..._checkpoint import open_store
from ..._coordination import PeerTable
from ..._transport import Link
from .._ending import Ending
from ._arbiter import Arbiter

if TYPE_CHECKING:
    from backstay_spec.runtime import RuntimeConfig

    from ..._checkpoint import CheckpointStore
    from ..._process import Environment, Stop
    from ..._script import Script, ScriptPlan
    from ..._shard import HeldState
    from .._standby import Inherited

__all__ = ["LiveSettings", "ServerContext"]


@dataclass
class LiveSettings:
    """The settings that the operator sent last.

    Attributes:
        world: `workers.replicas`.
        stall_seconds: `workers.stallSeconds`.
        keep: `checkpoint.keep`.
    """

    world: int
    stall_seconds: float
    keep: int

    @classmethod
    def of(cls, config: RuntimeConfig) -> LiveSettings:
        """Returns the settings with which this pod was created."""
        return cls(config.workers, config.stall_seconds, config.checkpoint.keep if config.checkpoint else 1)

    def update(self, request: ProgressRequest) -> None:
        """A call of the operator; a setting that it lacks stays unchanged."""
        self.world = request.world or self.world
        self.stall_seconds = request.stall_seconds or self.stall_seconds
        if request.HasField("checkpoint"):
            self.keep = request.checkpoint.keep or self.keep


@dataclass(frozen=True)
class ServerContext:
    """A server's pod. Each part of the server gets it.

    Attributes:
        live: the settings that may change while the job trains.
        peers: the workers and evaluators that call this server.
        peer: this server.
        arbiter: the operator's reports about the active server of the shard.
        store: the checkpoint folder; None: the job stores nothing.
        link: the link to the coordinator, which is not started yet; None: this is shard 0's server.
        held: the state that this server held as its shard's standby; None: it held none.
    """

    environment: Environment
    script: Script
    plan: ScriptPlan
    stop: Stop
    ending: Ending
    live: LiveSettings
    peers: PeerTable
    peer: Peer
    arbiter: Arbiter
    store: CheckpointStore | None
    link: Link | None
    held: HeldState | None

    @classmethod
    def of(
        cls,
        environment: Environment,
        script: Script,
        plan: ScriptPlan,
        stop: Stop,
        inherited: Inherited | None = None,
    ) -> ServerContext:
        """Returns the context of a new server.

        Args:
            inherited: the state that the server held as its shard's standby; None for a server that starts as one.

        Raises:
            CheckpointFolderUnusable, StorageError: see `open_store`.
        """
        config, times, ending = environment.config, environment.timeouts, Ending()
        stop.then(ending.notice)
        peer = environment.peer
        store = open_store(environment, probes=inherited is None)
        link = None
        if environment.index != 0:
            link = Link(environment.servers[0], environment.credentials, peer, plan.agreement, config.mode, times)
        return cls(
            environment=environment,
            script=script,
            plan=plan,
            stop=stop,
            ending=ending,
            live=LiveSettings.of(config),
            peers=PeerTable(config.mode, times),
            peer=peer,
            arbiter=Arbiter(environment.index, times, ending),
            store=store,
            link=link,
            held=None if inherited is None else inherited.held,
        )
