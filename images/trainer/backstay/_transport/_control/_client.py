"""The calls of workers and evaluators: joining every shard, heartbeats to all of them, reports to shard 0."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from backstay_rpc.channels import open_channel
from backstay_rpc.control_pb2 import (
    STARTING,
    Activity,
    EvaluatedReply,
    EvaluatedRequest,
    HangReport,
    HeartbeatReply,
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    MeetReply,
    MeetRequest,
    Peer,
    WorkerSeconds,
)
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_rpc.credentials import Credentials
from backstay_rpc.limits import MAX_MESSAGE_BYTES
from backstay_rpc.refusals import RefusalCode
from backstay_spec import contract

from ... import _instrument
from ..._instrument import Doing
from ..._timeouts import Timeouts
from ...errors import JobFailed, PeerLost, Refused, Superseded, WaitedTooLong
from ._agreement import Agreement
from ._auth import refusal_of
from ._spans import Kept, Outbox

__all__ = ["ControlClient", "Heartbeats", "JobState"]

_LOG = logging.getLogger(__name__)


# The points of the timeline that measure those parts of a worker's step that shard 0 compares between ranks.
_COMPARED = ("batch_wait", "compute", "pull")
_LONGEST_ERROR = 2000


class Moved(PeerLost):
    """Another incarnation of the server answers, so the caller must join again."""


@dataclass(frozen=True)
class JobState:
    """The results of the last heartbeats."""

    done: bool = False
    failed: str = ""
    checkpoint: str = ""
    checkpoint_step: int = 0
    evaluation: Mapping[str, float] = field(default_factory=dict)
    world: int = 0
    already_complete: bool = False  # with `done`: nothing was left to train


class ControlClient:
    """The control services of all shards. Thread-safe."""

    def __init__(
        self,
        servers: Sequence[str],
        credentials: Credentials,
        peer: Peer,
        timeouts: Timeouts | None = None,
        doing: Callable[[], Doing | None] = _instrument.doing,
    ) -> None:
        """
        Args:
            servers: ``host:port`` of the control service of each shard.
            credentials: the credentials of this pod.
            peer: the pod that calls.
            timeouts: None for the usual ones.
            doing: returns what heartbeats report as the activity of this pod's rank.
        """
        self._doing = doing
        self.peer = peer
        self.timeouts = timeouts or Timeouts()
        self._servers = tuple(servers)
        self._metadata = credentials.metadata
        self._lock = threading.Lock()
        self._outbox, self._kept = Outbox(peer), Kept()
        self._beaten = 0  # the incarnation of shard 0's server that the last heartbeat went to
        self._opened: dict[int, tuple[grpc.Channel, ControlStub]] = {}  # of the shards that were called

    @property
    def shards(self) -> int:
        return len(self._servers)

    def join_all(
        self,
        agreement: Agreement,
        stopped: Callable[[], bool],
        *,
        at: tuple[int, int] = (0, 0),
        seconds: float | None = None,
    ) -> list[JoinReply]:
        """Join every shard in one term; waits for servers that are not ready yet.

        While it waits for others, it does not call a server again that has answered, unless the answer may be old.

        Args:
            agreement: what must be the same in every pod.
            at: the term and the version that the caller holds, if any.
            stopped: called between attempts; when it returns true the wait ends.
            seconds: how long to try; None: `Timeouts.join`.

        Raises:
            Refused: a server refuses permanently. `Superseded`: a newer incarnation of this pod runs.
            JobFailed: the job has failed.
            WaitedTooLong: no success within that time; the message names the shard and its last answer.
            PeerLost: `stopped`.
        """
        times = self.timeouts
        limit = times.join if seconds is None else seconds
        began = logged = failed_at = time.monotonic()
        replies: dict[int, tuple[float, JoinReply]] = {}  # by shard, with the time of the answer
        attempt = 0
        while True:
            why = ""
            for shard in range(self.shards):
                if shard in replies:
                    continue
                try:
                    replies[shard] = time.monotonic(), self.join(shard, agreement, at)
                except PeerLost as error:
                    why, failed_at = str(error), time.monotonic()
                    break
            now = time.monotonic()
            if not why:
                failed = next((reply.failed for _, reply in replies.values() if reply.failed), "")
                if failed:
                    raise JobFailed.from_text(failed)
                term = max(reply.term for _, reply in replies.values())
                behind = [shard for shard, (_, reply) in replies.items() if reply.term < term]
                old = [shard for shard, (answered, _) in replies.items() if failed_at - answered > times.join_stale]
                if not behind and not old:
                    return [replies[shard][1] for shard in range(self.shards)]
                for shard in {*behind, *old}:
                    del replies[shard]
                if not behind:
                    continue  # these have answered before: call them without a pause
                why, failed_at = f"shard {behind[0]} is in an older term than the others", now
            # A pod that joins sends no heartbeats yet, so a server that it has joined could treat it as lost.
            replies = {s: found for s, found in replies.items() if now - found[0] <= times.silent / 2}
            if stopped():
                raise PeerLost(f"stopped while joining: {why}")
            if now - began >= limit:
                raise WaitedTooLong(f"could not join within {limit:.0f} s: {why}")
            if now - logged >= times.silent:
                logged = now
                _LOG.warning("waiting for the servers: %s", why)
            time.sleep(times.join_pauses[min(attempt, len(times.join_pauses) - 1)])
            attempt += 1

    def join(self, shard: int, agreement: Agreement, at: tuple[int, int] = (0, 0)) -> JoinReply:
        """Introduce this pod to one shard, once; the arguments are those of `join_all`. Raises as `_call` does."""
        request = JoinRequest(
            peer=self.peer,
            shard=shard,
            leaves=agreement.leaves,
            settings=agreement.settings,
            term=at[0],
            version=at[1],
            frozen=agreement.frozen,
            frozen_from=agreement.frozen_from,
        )
        reply: JoinReply = self._call(shard, "Join", request)
        return reply

    def beat(
        self,
        shard: int,
        incarnation: int,
        activity: Activity,
        step_seconds: float,
        worker_seconds: WorkerSeconds | None = None,
        hang_report: HangReport | None = None,
    ) -> HeartbeatReply:
        """Send one heartbeat. Raises as `_call` does."""
        request = HeartbeatRequest(
            peer=self.peer,
            shard=shard,
            expected_incarnation=incarnation,
            activity=activity,
            step_seconds=step_seconds,
            worker_seconds=worker_seconds,
            hang_report=hang_report,
        )
        began = time.monotonic()
        if (doing := self._doing()) is not None:
            doing.write(request.doing, began)
        if shard == 0:
            self._beaten = incarnation
            for point, seconds in _instrument.means(_COMPARED).items():
                request.parts[contract.STEP_PARTS[point]] = seconds
            request.spans = self._spans(incarnation)
            request.kept.extend(self._kept.of_previous(incarnation))
        reply: HeartbeatReply = self._call(shard, "Heartbeat", request)
        if shard == 0:
            self._kept.answered(incarnation, reply.spans)
        if reply.clock:
            _instrument.clocks.observe((shard, incarnation), began, reply.clock, time.monotonic())
        return reply

    def _spans(self, incarnation: int) -> bytes:
        """Returns the spans that shard 0's server does not have yet; none before the offset of its clock is known."""
        if (0, incarnation) not in _instrument.clocks.offsets():
            return b""
        spans = self._outbox.take(incarnation)
        return b"" if spans is None else spans.SerializeToString()

    def evaluated(self, step: int, metrics: Mapping[str, float], error: str = "", checkpoint: str = "") -> None:
        """Report the result of `evaluate` to shard 0.

        Args:
            checkpoint: the name of the manifest of the evaluated checkpoint; empty: the last parameters were evaluated.
        """
        error = error[:_LONGEST_ERROR].encode(errors="backslashreplace").decode()
        request = EvaluatedRequest(peer=self.peer, step=step, metrics=dict(metrics), error=error, checkpoint=checkpoint)
        self._call(0, "Evaluated", request)

    def evaluates(self, step: int, checkpoint: str = "") -> str:
        """Report to shard 0 that the evaluation of this checkpoint, or of the last parameters, begins.

        Returns:
            Why this pod must not evaluate; empty: it may.
        """
        request = EvaluatedRequest(peer=self.peer, step=step, checkpoint=checkpoint, begins=True)
        reply: EvaluatedReply = self._call(0, "Evaluated", request)
        return reply.give_up

    def leave(self, *, trained: bool = False) -> None:
        """Report to every shard that this pod leaves. A shard that does not answer notices the silence.

        Args:
            trained: whether `train` returns in this pod.
        """
        for shard in range(self.shards):
            try:
                request = LeaveRequest(peer=self.peer, trained=trained)
                if shard == 0:
                    request.spans = self._spans(self._beaten)
                self._call(shard, "Leave", request, self.timeouts.leave)
            except (PeerLost, Refused):
                continue

    def confirm(self) -> None:
        """Report to shard 0 that `train` returns here. Raises as `_call` does: then shard 0 may not have counted it."""
        self._call(0, "Leave", LeaveRequest(peer=self.peer, trained=True))

    def meet(self, address: str = "") -> str:
        """Returns the address of member 0 of this pod's rank, or an empty text if it reported none. Raises as `_call`
        does.

        Args:
            address: the address of this pod, if it is member 0.
        """
        reply: MeetReply = self._call(0, "Meet", MeetRequest(peer=self.peer, address=address))
        return str(reply.address)

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

    def _call(self, shard: int, method: str, request: Any, seconds: float | None = None) -> Any:
        """
        Raises:
            Refused: trying again does not help.
            PeerLost: the call failed, and another try may succeed.
        """
        if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:
            raise Refused(
                RefusalCode.FULL,
                f"a {type(request).__name__} of {size} bytes is too large: at most {MAX_MESSAGE_BYTES} are sent; "
                "the tree of parameters has too many leaves",
            )
        deadline = self.timeouts.call if seconds is None else seconds
        try:
            return getattr(self._stub(shard), method)(request, timeout=deadline, metadata=self._metadata)
        except grpc.RpcError as error:
            refusal = refusal_of(error)
            if refusal is not None:
                raise refusal from None
            code = getattr(error, "code", lambda: None)()
            why = f"shard {shard} at {self._servers[shard]}: {getattr(error, 'details', lambda: '')()}"
            raise (Moved if getattr(code, "name", "") == RefusalCode.MOVED else PeerLost)(why) from None


class Heartbeats:
    """Threads that send heartbeats to every shard, even while this pod compiles, and watch the answers.

    Attributes:
        activity, step_seconds: what heartbeats report; set by the worker or evaluator.
        superseded: set when a newer incarnation of this pod runs.
    """

    def __init__(
        self,
        client: ControlClient,
        silent: Callable[[int, str], None],
        worker_seconds: Callable[[int], WorkerSeconds] | None = None,
    ) -> None:
        """
        Args:
            client: the client that sends the heartbeats.
            silent: ``silent(shard, why)``, called when a server has not answered for `Timeouts.silent` or is another
                incarnation.
            worker_seconds: a function that returns the parts of a worker's time, given the version of the newest
                checkpoint; None in other pods.
        """
        self.activity: Activity = STARTING
        self.step_seconds = 0.0
        self._worker_seconds = worker_seconds
        self.superseded: Superseded | None = None
        self._client = client
        self._silent = silent
        self._incarnations = [0] * client.shards
        self._answered = [time.monotonic()] * client.shards
        self._missed = [0] * client.shards
        self._job = JobState()
        self._changed = threading.Condition()
        self._closed = False
        self._interval = client.timeouts.heartbeat
        # One thread for each shard, so that a shard that does not answer does not delay heartbeats to others.
        self._threads = [
            threading.Thread(target=self._run, args=(shard,), name=f"backstay-heartbeat-{shard}", daemon=True)
            for shard in range(client.shards)
        ]

    def start(self) -> None:
        """Send heartbeats until `close`; call it once."""
        for thread in self._threads:
            if thread.ident is None:
                thread.start()

    def expect(self, incarnations: Sequence[int]) -> None:
        """Set the servers that were joined: those of the first shards, or of all."""
        with self._changed:
            self._incarnations[: len(incarnations)] = incarnations
            self._answered = [time.monotonic()] * self._client.shards
            self._missed = [0] * self._client.shards

    def incarnation_of(self, shard: int) -> int:
        """Returns the incarnation of the server that was joined, or 0 if none was."""
        with self._changed:
            return self._incarnations[shard]

    def set_interval(self, seconds: float) -> None:
        """Send heartbeats at this interval from now on, because the pod waits for the end of the job."""
        with self._changed:
            self._interval = seconds
            self._changed.notify_all()

    def peers(self) -> dict[int, tuple[float, int]]:
        """shard -> seconds since its server last answered a heartbeat, and how many it left unanswered since then."""
        now = time.monotonic()
        with self._changed:
            return {
                shard: (now - answered, missed)
                for shard, (answered, missed) in enumerate(zip(self._answered, self._missed, strict=True))
            }

    @property
    def job(self) -> JobState:
        """The results of the last heartbeats."""
        with self._changed:
            return self._job

    def wait(self, enough: Callable[[JobState], bool], seconds: float) -> JobState:
        """Wait until `enough` is true of the results, or for `seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: enough(self._job) or self.superseded is not None, seconds)
            return self._job

    def report_hang(self, report: HangReport) -> None:
        """Send to shard 0's server that this pod hangs; the message may get lost."""
        with self._changed:
            expected = self._incarnations[0]
        with contextlib.suppress(PeerLost, Refused):
            self._client.beat(0, expected, self.activity, self.step_seconds, hang_report=report)

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
        began = time.monotonic()
        try:
            measure = self._worker_seconds if shard == 0 else None
            seconds = None if measure is None else measure(self._job.checkpoint_step)
            reply = self._client.beat(shard, expected, self.activity, self.step_seconds, seconds)
        except Superseded as error:
            self._stop(error)
            return
        except (PeerLost, Refused) as error:
            ended = time.monotonic()
            since = ended - self._answered[shard]
            # A call that ended late shows that this pod was paused, and nothing about the server.
            in_time = ended - began < self._client.timeouts.call + 1
            self._missed[shard] = self._missed[shard] + 1 if in_time else 0
            if isinstance(error, Moved):
                self._silent(shard, str(error))
            elif since >= self._client.timeouts.silent:
                self._silent(shard, f"no answer to heartbeats for {since:.0f} s: {error}")
            return
        self._answered[shard] = time.monotonic()
        self._missed[shard] = 0
        newest = reply.incarnations.get(f"{self._client.peer.role}-{self._client.peer.index}", 0)
        if newest > self._client.peer.incarnation:
            self._stop(Superseded(RefusalCode.REPLACED, f"this pod was replaced by incarnation {newest}"))
            return
        with self._changed:
            before = self._job
            self._job = JobState(
                done=before.done or (reply.done and shard == 0),  # shard 0 reports the last checkpoint too
                already_complete=before.already_complete or reply.already_complete,
                failed=before.failed or reply.failed,
                checkpoint=reply.checkpoint or before.checkpoint,
                checkpoint_step=reply.checkpoint_step if reply.checkpoint else before.checkpoint_step,
                evaluation=dict(reply.evaluation) or before.evaluation,
                world=reply.world,
            )
            self._changed.notify_all()

    def _stop(self, error: Superseded) -> None:
        with self._changed:
            self.superseded = error
            self._changed.notify_all()
        self._silent(0, str(error))
