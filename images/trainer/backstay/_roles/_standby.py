"""A standby's pod, which follows its shard's active server until the operator promotes it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from backstay_rpc.control_pb2 import (
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    Hello,
    JoinReply,
    Peer,
    ProgressReply,
    ProgressRequest,
)
from backstay_rpc.refusals import FINAL, RefusalCode

from .._process import Environment, Stop
from .._script import Script, ScriptPlan
from .._shard import Follower, HeldState
from .._threaded import ThreadedCoordinator
from .._transport import Agreement, ClientStream, ControlClient, ControlServer, Peers
from .._update import ShardEngine
from ..errors import PeerLost, Refused, Superseded

__all__ = ["Inherited", "Standby"]

_LOG = logging.getLogger(__name__)


@dataclass
class Inherited:
    """The initial state of a server that was a standby.

    Attributes:
        held: the state of its shard; None when it was never filled: then it starts as any other new server.
        promoted: when the operator's call arrived, in seconds of `time.monotonic`.
    """

    held: HeldState | None
    control: ControlServer
    peers: Peers
    promoted: float


class Standby:
    """A control service's `Host` while the standby waits. It answers the operator, and refuses all other calls."""

    def __init__(
        self, environment: Environment, script: Script, plan: ScriptPlan, stop: Stop, applied: Callable[[int], None]
    ) -> None:
        """`applied` is called with the number of updates that it holds."""
        self.shard, self.incarnation = environment.index, environment.incarnation
        self._env, self._script, self._plan, self._stop = environment, script, plan, stop
        self._peer = environment.peer
        self._follower = Follower(plan.partition, self.shard, plan.rule, applied)
        self._wake = threading.Event()
        stop.then(self._wake.set)
        self._promoted = False
        self._error: BaseException | None = None
        self._peers = Peers()
        self._control = ControlServer.of(environment, self, self._peers)

    @property
    def ready(self) -> bool:
        """Whether it holds the state of its shard."""
        return self._follower.held is not None

    def run(self) -> Inherited | None:
        """Follow until this server is promoted; None when SIGTERM arrived instead.

        Raises:
            Superseded: a newer incarnation has replaced it.
            Refused: the active server refuses it permanently.
        """
        threading.Thread(target=self._follow_forever, name="backstay-follower", daemon=True).start()
        self._wake.wait()
        if self._error is not None:
            raise self._error
        if not self._promoted:
            self._control.close()
            return None
        promoted = time.monotonic()
        held = self._follower.take()
        at = "nothing yet" if held is None else f"version {held.engine.version} of term {held.term}"
        _LOG.info("this server is the active one now; it holds %s", at)
        return Inherited(held, self._control, self._peers, promoted)

    # ---- Following ----

    def _follow_forever(self) -> None:
        try:
            # The program of an update is compiled before any peer waits for it. That needs shapes and no values.
            shapes = self._plan.partition.tree
            zeros = shapes.unflatten([np.zeros(leaf.shape, leaf.dtype) for leaf in shapes.leaves])
            engine = ShardEngine(self._plan.partition, self.shard, self._plan.rule, zeros)
            engine.compile((1,), clipped=self._script.clip_norm is not None)
            del engine
            while not self._wake.is_set():
                try:
                    self._follow()
                except PeerLost as lost:
                    _LOG.debug("the active server: %s", lost)
                except Refused as refusal:
                    if refusal.code in FINAL:
                        raise
                    _LOG.debug("the active server refuses: %s", refusal)
                self._wake.wait(self._env.timeouts.reconnect_pause)
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            if not self._promoted:
                self._error = error
                self._wake.set()

    def _follow(self) -> None:
        reply = self._join()
        if reply.incarnation == self.incarnation:
            raise PeerLost("the shard's Service already routes to this standby: waiting for the operator to promote it")
        hello = Hello(
            peer=self._peer,
            shard=self.shard,
            expected_incarnation=reply.incarnation,
            term=reply.term,
            partition_digest=self._plan.agreement.digest,
        )
        stream = ClientStream(reply.data_address, hello, self._env.credentials)
        try:
            self._follower.follow(stream)
        except (PeerLost, Refused):
            stream.close()
            raise

    def _join(self) -> JoinReply:
        """Request the address of the active server's data streams. Raises as `_follow`."""
        # Another connection each time: the Service may have another endpoint since.
        client = ControlClient(self._env.servers, self._env.credentials, self._peer, self._env.timeouts)
        try:
            return client.join(self.shard, self._plan.agreement)
        finally:
            client.close()

    # ---- Host ----

    @property
    def agreement(self) -> Agreement:
        return self._plan.agreement

    @property
    def threaded(self) -> ThreadedCoordinator | None:
        return None

    def other_frozen(self, digests: Sequence[str], source: str, peer: str) -> str:
        """See `Host`."""
        raise AssertionError("a standby lets no pod join")

    @property
    def data_address(self) -> str:
        raise AssertionError("a standby does not coordinate")  # calls that need it are refused earlier

    def not_ready(self) -> str:
        return f"this is the standby of shard {self.shard}"

    def joined(self, peer: Peer) -> JoinReply:
        raise AssertionError(f"{peer.role} {peer.index} joins a standby")  # `not_ready` refuses it earlier

    def beat(self, request: HeartbeatRequest) -> HeartbeatReply:
        del request
        return HeartbeatReply()

    def left(self, peer: Peer, *, trained: bool = False) -> bool:
        del peer
        return not trained  # a standby counts no reports of the end

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        del peer, spans  # the active server has the timeline

    def evaluated(self, request: EvaluatedRequest) -> str:
        del request
        return ""

    def progress(self, request: ProgressRequest) -> ProgressReply:
        serving = request.incarnations.get(self._env.name, 0)
        if serving == self.incarnation:
            self._promoted = True
            self._wake.set()
        elif serving > self.incarnation and self._error is None:
            self._error = Superseded(RefusalCode.REPLACED, f"this standby was replaced by incarnation {serving}")
            self._wake.set()
        held = self._follower.held
        if held is None:
            return ProgressReply(incarnation=self.incarnation)
        return ProgressReply(incarnation=self.incarnation, term=held.term, step=held.engine.version, world=held.world)

    def awaits_operator(self) -> bool:
        return False

    def superseded(self, by: int) -> None:
        pass

    def fence(self, incarnations: Mapping[str, int]) -> None:
        pass
