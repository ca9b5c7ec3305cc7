"""What workers and evaluators call: joining every shard, heartbeats to all of them, reports to shard 0."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from backstay_rpc import bearer
from backstay_rpc.control_pb2 import (
    STARTING,
    Activity,
    EvaluatedRequest,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    Peer,
)
from backstay_rpc.control_pb2_grpc import ControlStub

from ..errors import JobFailed, PeerLost, Refused, Superseded, WaitedTooLong
from ._agreement import Agreement
from ._auth import open_channel, refusal_of

__all__ = ["HEARTBEAT_SECONDS", "JOIN_SECONDS", "ControlClient", "Heartbeats", "News"]

_LOG = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 10.0
JOIN_SECONDS = 3600.0
"""How long a pod tries to join: servers may wait for nodes, and their operator ends what takes too long."""

_BACK_OFF_SECONDS = 0.25
_CALL_SECONDS = 5.0


class Moved(PeerLost):
    """Another incarnation of the server answers: join again."""


@dataclass(frozen=True)
class News:
    """What heartbeats told last."""

    done: bool = False
    failed: str = ""
    checkpoint: str = ""
    checkpoint_step: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    world: int = 0


class ControlClient:
    """The control services of all shards. Thread-safe."""

    def __init__(self, servers: Sequence[str], token: str, peer: Peer) -> None:
        self.peer = peer
        self._servers = tuple(servers)
        self._metadata = bearer(token)
        self._lock = threading.Lock()
        self._opened: dict[int, tuple[grpc.Channel, ControlStub]] = {}  # of the shards that were called

    @property
    def shards(self) -> int:
        return len(self._servers)

    def join_all(
        self,
        agreement: Agreement,
        stopped: Callable[[], bool],
        *,
        seconds: float = JOIN_SECONDS,
        at: tuple[int, int] = (0, 0),
    ) -> list[JoinReply]:
        """Join every shard in one term; waits for servers that are not there yet.

        Args:
            agreement: what must be the same in every pod.
            at: the term and the version that the caller holds, if any.
            stopped: asked between attempts; when it is true the wait ends.

        Raises:
            Refused: a server refuses for good. `Superseded`: a newer incarnation of this pod lives.
            JobFailed: the job has failed.
            WaitedTooLong: after `seconds`; the message names the shard and what it last answered.
            PeerLost: `stopped`.
        """
        began = told = time.monotonic()
        while True:
            why = ""
            replies: list[JoinReply] = []
            for shard in range(self.shards):
                try:
                    replies.append(self.join(shard, agreement, at))
                except PeerLost as error:
                    why = str(error)
                    break
            if not why:
                failed = next((reply.failed for reply in replies if reply.failed), "")
                if failed:
                    raise JobFailed.told(failed)
                if len({reply.term for reply in replies}) == 1:
                    return replies
                why = "the shards are in different terms"
            if stopped():
                raise PeerLost(f"stopped while joining: {why}")
            now = time.monotonic()
            if now - began >= seconds:
                raise WaitedTooLong(f"could not join within {seconds:.0f} s: {why}")
            if now - told >= SILENT_SECONDS:
                told = now
                _LOG.warning("waiting for the servers: %s", why)
            time.sleep(_BACK_OFF_SECONDS / 2)

    def join(self, shard: int, agreement: Agreement, at: tuple[int, int] = (0, 0)) -> JoinReply:
        """Introduce this pod to one shard, once; the arguments are those of `join_all`. Raises as `_call` does."""
        request = JoinRequest(
            peer=self.peer,
            shard=shard,
            leaves=agreement.leaves,
            settings=agreement.settings,
            term=at[0],
            version=at[1],
        )
        reply: JoinReply = self._call(shard, "Join", request)
        return reply

    def beat(
        self, shard: int, incarnation: int, term: int, version: int, activity: Activity, step_seconds: float
    ) -> HeartbeatReply:
        """One heartbeat. Raises as `_call` does."""
        request = HeartbeatRequest(
            peer=self.peer,
            shard=shard,
            expected_incarnation=incarnation,
            term=term,
            version=version,
            activity=activity,
            step_seconds=step_seconds,
        )
        reply: HeartbeatReply = self._call(shard, "Heartbeat", request)
        return reply

    def evaluated(self, term: int, step: int, metrics: Mapping[str, float], error: str = "") -> None:
        """Tell shard 0 what `evaluate` returned."""
        request = EvaluatedRequest(peer=self.peer, term=term, step=step, metrics=dict(metrics), error=error)
        self._call(0, "Evaluated", request)

    def leave(self, reason: str) -> None:
        """Tell every shard; those that do not answer find out by themselves."""
        for shard in range(self.shards):
            try:
                self._call(shard, "Leave", LeaveRequest(peer=self.peer, reason=reason), seconds=1.0)
            except (PeerLost, Refused):
                continue

    def close(self) -> None:
        with self._lock:
            for channel, _ in self._opened.values():
                channel.close()

    def _stub(self, shard: int) -> ControlStub:
        with self._lock:
            if shard not in self._opened:
                channel = open_channel(self._servers[shard])
                self._opened[shard] = channel, ControlStub(channel)  # type: ignore[no-untyped-call]
            return self._opened[shard][1]

    def _call(self, shard: int, method: str, request: Any, seconds: float = _CALL_SECONDS) -> Any:
        """
        Raises:
            Refused: trying again does not help.
            PeerLost: it may.
        """
        try:
            return getattr(self._stub(shard), method)(request, timeout=seconds, metadata=self._metadata)
        except grpc.RpcError as error:
            refusal = refusal_of(error)
            if refusal is not None:
                raise refusal from None
            code = getattr(error, "code", lambda: None)()
            why = f"shard {shard} at {self._servers[shard]}: {getattr(error, 'details', lambda: '')()}"
            raise (Moved if code is grpc.StatusCode.FAILED_PRECONDITION else PeerLost)(why) from None


class Heartbeats:
    """Threads that tell every shard that this pod lives, also while it compiles, and watches that they do.

    Attributes:
        activity, step_seconds, term, version: what is told; set by whoever works.
        superseded: set when a newer incarnation of this pod lives.
    """

    def __init__(self, client: ControlClient, silent: Callable[[int, str], None]) -> None:
        """
        Args:
            client: to call.
            silent: ``silent(shard, why)``, called when a server has not answered for 10 s or is another incarnation.
        """
        self.activity: Activity = STARTING
        self.step_seconds = 0.0
        self.term = 0
        self.version = 0
        self.superseded: Superseded | None = None
        self._client = client
        self._silent = silent
        self._incarnations = [0] * client.shards
        self._answered = [time.monotonic()] * client.shards
        self._news = News()
        self._changed = threading.Condition()
        self._closed = False
        self._interval = HEARTBEAT_SECONDS
        # One for each shard, so that one that does not answer makes this pod silent to no other.
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"backstay-heartbeat-{shard}", daemon=True)
            for shard in range(client.shards)
        ]

    def start(self) -> None:
        """Beat until `close`; once is enough."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def expect(self, incarnations: Sequence[int]) -> None:
        """The servers that were joined."""
        with self._changed:
            self._incarnations = list(incarnations)
            self._answered = [time.monotonic()] * self._client.shards

    def hurry(self, seconds: float) -> None:
        """Beat this often from now on: the end is near and is waited for."""
        with self._changed:
            self._interval = seconds
            self._changed.notify_all()

    @property
    def news(self) -> News:
        """What was told last."""
        with self._changed:
            return self._news

    def wait(self, enough: Callable[[News], bool], seconds: float) -> News:
        """Wait until the news are `enough`, or for `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: enough(self._news) or self.superseded is not None, seconds)
            return self._news

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, shard: int) -> None:
        while True:
            self._beat(shard)
            began = time.monotonic()
            with self._changed:
                # The interval may become shorter meanwhile.
                while not self._closed and (left := began + self._interval - time.monotonic()) > 0:
                    self._changed.wait(left)
                if self._closed:
                    return

    def _beat(self, shard: int) -> None:
        with self._changed:
            expected = self._incarnations[shard]
            if self._closed:
                return
        try:
            reply = self._client.beat(shard, expected, self.term, self.version, self.activity, self.step_seconds)
        except Superseded as error:
            self._stop(error)
            return
        except (PeerLost, Refused) as error:
            since = time.monotonic() - self._answered[shard]
            if isinstance(error, Moved):
                self._silent(shard, str(error))
            elif since >= SILENT_SECONDS:
                self._silent(shard, f"no answer to heartbeats for {since:.0f} s: {error}")
            return
        self._answered[shard] = time.monotonic()
        newest = reply.incarnations.get(f"{self._client.peer.role}-{self._client.peer.index}", 0)
        if newest > self._client.peer.incarnation:
            self._stop(Superseded("PERMISSION_DENIED", f"this pod was replaced by incarnation {newest}"))
            return
        with self._changed:
            news = self._news
            self._news = News(
                done=news.done or (reply.done and shard == 0),  # who leads knows the last checkpoint too
                failed=news.failed or reply.failed,
                checkpoint=reply.checkpoint or news.checkpoint,
                checkpoint_step=reply.checkpoint_step if reply.checkpoint else news.checkpoint_step,
                evaluation=dict(reply.evaluation) or news.evaluation,
                world=reply.world,
            )
            self._changed.notify_all()

    def _stop(self, error: Superseded) -> None:
        with self._changed:
            self.superseded = error
            self._changed.notify_all()
        self._silent(0, str(error))
