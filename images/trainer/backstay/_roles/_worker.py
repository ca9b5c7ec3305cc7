"""A worker's pod, which pulls, computes and pushes until the job is done, and reconnects to servers that were lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import jax

from backstay_rpc.control_pb2 import (
    COMPILING,
    LEAVING,
    WAITING,
    GradientInfo,
    Hello,
    JoinReply,
)
from backstay_spec.contract import ALREADY_COMPLETE

from .. import _instrument
from .._compute import ComputedContribution, Encoder
from .._process import SIGTERM_EXIT, Environment, Stop, end_after_script, hang_report
from .._result import Result
from .._script import FrozenPart, Script, ScriptPlan
from .._transport import (
    ALONE,
    FLAG,
    TEXT,
    ControlClient,
    DividedArrangement,
    DividedSlot,
    Heartbeats,
    Members,
    ParamBuffers,
    Pulled,
    Push,
    ShardedClient,
    connect,
    messages,
    pulled_together,
    record_exchange,
)
from .._update import ALL, ALL_AVERAGED, ALL_EXACT, Selection
from ..errors import BackstayError, PeerLost, Refused
from ._contributions import Contributions
from ._ending import Stopped, WorkerEnd
from ._observers import SecondsObserver, WorkerObserver
from ._same_script import check_same_script
from ._worker_protocol import AfterLoss, Fate, WorkerProtocol, after_loss, may_be_result

__all__ = ["Worker"]

_LOG = logging.getLogger(__name__)
_REPLIES: Final = messages(JoinReply)


class _Once:
    """A function of no arguments that is called once, by the first thread that needs its result."""

    def __init__(self, function: Callable[[], GradientInfo]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._result: GradientInfo | None = None

    def __call__(self) -> GradientInfo:
        with self._lock:
            if self._result is None:
                self._result = self._function()
            return self._result


class Worker:
    """Runs one rank, as a loop around `WorkerProtocol`.

    Attributes:
        ready: whether it is connected to the servers, or has the result.
        returned: whether `run` has returned a result, so that the pod continues.
    """

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: ScriptPlan,
        stop: Stop,
        observer: WorkerObserver,
        members: Members = ALONE,
    ) -> None:
        """
        Args:
            members: the pods of this rank. They take the same decisions, and only the first one calls the servers'
                control services.
        """
        self._env, self._script, self._plan, self._stop = environment, script, plan, stop
        self._members = members
        self._wires = [wire.of_member(members.member) for wire in plan.wires]
        self._rank = environment.index
        self._peer = environment.peer
        self.ready = self.returned = False
        self._control = ControlClient(
            environment.servers, environment.credentials, self._peer, environment.timeouts, members.doing
        )
        self._streams: ShardedClient | None = None
        self._observer = observer
        self._protocol = WorkerProtocol(environment.config.mode, self._rank, environment.incarnation)
        self._heart = Heartbeats(self._control, self._silent, self.seconds.report)
        self.peers = self._heart.peers
        self._encoder = Encoder(self._wires, script.seed, error_feedback=bool(plan.wire.error_feedback))
        self._contributions = Contributions(
            environment, script, plan, self._protocol, self._observer, self._heart, self._encoder
        )
        arrangement = self._contributions.arrangement
        if isinstance(arrangement, DividedArrangement):
            self._buffers = ParamBuffers(partial(DividedSlot, arrangement))
        else:
            self._buffers = ParamBuffers.of(arrangement, jax.local_devices()[0])
        self._frozen = FrozenPart(script.beginning, plan.agreement, lambda: script.placement)
        self._received: Selection | None = None  # `Start.received` of the next contribution
        self._spent: Sequence[Any] = ()  # parameters on an accelerator that nothing uses any more
        self._moved = False  # a joined server was lost
        self._already_complete = False  # nothing was left to train
        self._end = WorkerEnd(environment, script, self._control, self._heart, self.seconds, stop, members)
        self._gone = threading.Event()
        stop.then(lambda: threading.Thread(target=self._leave, name="backstay-leaving", daemon=True).start())

    def run(self) -> Result:
        """Work until the job is done.

        Raises:
            Stopped: the process received SIGTERM.
            JobFailed: the job has failed.
            Refused: a server refuses this worker; `Superseded`: it was replaced.
            WaitedTooLong: servers were away for too long.
            Exception: any that `batches` and `loss` raise.
        """
        _instrument.follow_this_thread()
        have_failed = False  # whether all members of the rank have the error
        try:
            return self._run()
        except BackstayError as error:
            have_failed = self._members.has_raised(error)
            raise
        except Stopped:  # the pods of the rank have agreed on it
            raise
        except Exception as error:
            self._members.settle(error)
            raise
        finally:
            self._close(have_failed=have_failed)

    @property
    def seconds(self) -> SecondsObserver:
        """The parts of the time of this process."""
        return self._observer.seconds

    @property
    def position(self) -> dict[str, int]:
        """The newest version that the servers reported, for the termination message; empty before the first join."""
        found = self._protocol
        return {"term": found.term, "step": found.version} if found.term else {}

    @property
    def last_message(self) -> dict[str, Any]:
        """This worker's part of the termination message."""
        fields: dict[str, Any] = {"workerSeconds": self.seconds.rounded}
        return fields | ({"reason": ALREADY_COMPLETE} if self._already_complete else {})

    def _leave(self) -> None:
        """Drop the contribution after SIGTERM, and leave although the script may still be computing it."""
        doing, others = self._members.doing(), self._members.stacks()
        if self._leads and (found := hang_report(doing, time.monotonic(), others)) is not None:
            self._heart.report_hang(found)
        self._silent(0, "this pod received SIGTERM")
        if not self._gone.wait(self._env.timeouts.stop):
            if self._leads:
                self._control.leave()
            end_after_script(SIGTERM_EXIT, self._stop)

    def _run(self) -> Result:
        check_same_script(self._members, self._script, self._plan, self._peer)
        pulled, params = self._start()
        self.seconds.ended("starting")
        while True:
            while not (pulled.done or pulled.version >= self._script.steps):
                if self._is_stopped():
                    raise Stopped
                if self._rank >= pulled.world:
                    pulled, params = self._wait_for_world(pulled, params)
                    continue
                contribution, at = self._contributions.compute(pulled, params, self._received)
                self._spent = params if self._buffers.pinned else ()
                del params  # on the host its memory receives the next ones but one
                pulled, params = self._exchange(at, contribution)
                del contribution  # or its memory on a device would lie between the pieces that the next one needs
            result = self._finish(pulled, params)
            if result is not None:
                self.returned = True
                return result
            pulled, params = self._reconnect(PeerLost("a server was lost before the job was done"))

    @property
    def _leads(self) -> bool:
        """Whether this pod decides for its rank."""
        return self._members.member == 0

    def _is_stopped(self) -> bool:
        """Returns whether a pod of the rank has received SIGTERM."""
        return self._members.agree("stop", FLAG, self._stop.requested.is_set, any)

    # ---- A step ----

    def _exchange(self, at: Pulled, contribution: ComputedContribution) -> tuple[Pulled, Sequence[Any]]:
        """Push a contribution until its fate is known; returns the newest parameters."""
        self._heart.activity = WAITING
        info = _Once(partial(self._contributions.info, contribution, self._observer.measured()))
        key_step = contribution.key.step
        _instrument.reach("push", key_step)
        with self._encoder.sending(contribution) as sending:
            pulled, params, fate = self._send(at, key_step, sending.blocks, info)
            if fate.residuals is not None:
                (sending.applied if fate.residuals else sending.dropped)()
        return pulled, params

    def _send(
        self, at: Pulled, key_step: int, blocks: Sequence[Sequence[Any]], info: Callable[[], GradientInfo]
    ) -> tuple[Pulled, Sequence[Any], Fate]:
        """Like `_exchange`, and also return the fate of the contribution."""
        exchange = self._protocol.exchange(at, key_step)
        while True:
            identity = exchange.attempt()
            try:
                with _instrument.span("exchange", key_step):
                    began = time.monotonic()
                    pulled, params = self._pull(Push(identity, blocks, info, self._members.member), 0)
                    record_exchange(pulled, identity, began, ended := time.monotonic())
            except (PeerLost, Refused) as error:
                pulled, params = self._reconnect(error)
                if exchange.repeats(pulled):
                    continue
                # As with the lost answer: other fragments did not change, and this worker keeps its own of them.
                if (exchanged := exchange.exchanged(pulled)) is not None:
                    self._received = self._plan.wires[0].selection(exchanged)
                fate = exchange.lost(pulled, finite=lambda: info().finite)
                self._observer.lost(fate)
                return pulled, params, fate
            fate = exchange.answered(pulled, finite=info().finite)
            self._observer.answered(fate, pulled, info(), began=began, ended=ended)
            return pulled, params, fate

    def _wait_for_world(self, pulled: Pulled, params: Sequence[Any]) -> tuple[Pulled, Sequence[Any]]:
        """Wait for the next version, because this rank is not in force. The next version may be of a larger world."""
        self._heart.activity = WAITING
        del params
        try:
            at = self._pull(None, pulled.version + 1)
            self.seconds.ended("wait")
            return at
        except (PeerLost, Refused) as error:
            return self._reconnect(error)

    # ---- Connections ----

    def _pull(self, push: Push | None, min_version: int, wanted: Selection = ALL) -> tuple[Pulled, Sequence[Any]]:
        streams, slot = self._streams, self._buffers.take()
        if streams is None:
            raise PeerLost("not connected")
        pulled = pulled_together(
            self._members,
            self._env.config.mode,
            partial(streams.exchange_all, push, min_version, slot.blocks, wanted),
            lambda version: streams.exchange_all(None, version, slot.blocks, wanted),
            partial(streams.cancel, "another pod of this rank lost a server"),
            pushed=push is not None,
        )
        self._received = pulled.selection
        spent, self._spent = self._spent, ()
        return pulled, slot.host() if self._contributions.on_host else slot.params(spent)

    def _start(self) -> tuple[Pulled, Sequence[Any]]:
        while True:
            try:
                return self._join()
            except (PeerLost, Refused) as error:
                self._judge(error)

    def _reconnect(self, error: PeerLost | Refused) -> tuple[Pulled, Sequence[Any]]:
        """Join again and again, until this worker has parameters."""
        while True:
            self._judge(error)
            self._observer.reconnects(error)
            try:
                return self._join()
            except (PeerLost, Refused) as again:
                error = again
            finally:
                self.seconds.ended("reconnecting")

    def _judge(self, error: PeerLost | Refused) -> None:
        """Raise the error that ends this worker after a failed call, or wait until it may join again."""
        self._disconnect()
        stopped = self._is_stopped()
        after = partial(after_loss, error, self._heart.superseded, stopped=stopped)
        match self._members.share("reconnect", TEXT, after):  # only the leader has heartbeats
            case AfterLoss.STOP:
                raise Stopped
            case AfterLoss.RAISE:
                raise error
        self._stop.requested.wait(self._env.timeouts.reconnect_pause)

    def _join(self) -> tuple[Pulled, Sequence[Any]]:
        self._heart.activity = WAITING if self._contributions.compiled else COMPILING
        with _instrument.span("join"):
            replies = self._members.share("join", _REPLIES, self._joined_all)
        self._moved = False
        if self._protocol.joined(replies[0]):
            self.seconds.rolled_back(replies[0].began)
        if self._leads:
            self._heart.expect([reply.incarnation for reply in replies])
            self._heart.start()  # from the first join on: the first pull waits for parameters that are being prepared
        if not self._frozen.known:
            with _instrument.span("frozen"):
                self._frozen.read(replies[0].frozen_from)
            return self._join()  # with their digests
        # A server may be lost before each member of the rank has connected to it.
        self._members.agree("connect", FLAG, partial(self._connect, replies), all)
        self.ready = True
        self._contributions.use(self._frozen.arrays)
        self._contributions.compile()
        with _instrument.span("first_pull"):
            return self._pull(None, 0)

    def _connect(self, replies: Sequence[JoinReply]) -> bool:
        self._streams = connect(
            [reply.data_address for reply in replies],
            self._plan.partition.shards,
            [self._hello(shard, reply) for shard, reply in enumerate(replies)],
            credentials=self._env.credentials,
            mode=self._env.config.mode,
            wires=self._wires,
            carried=self._observer.carried,
        )
        return True

    def _joined_all(self) -> Sequence[JoinReply]:
        return self._control.join_all(
            self._frozen.agreement,
            self._stop.requested.is_set,
            at=(self._protocol.term, self._protocol.version),
            # Servers that have reported the end leave; the operator then replaces rank 0 where it has no result.
            seconds=self._env.timeouts.confirm if self._heart.job.done else None,
        )

    def _hello(self, shard: int, reply: JoinReply) -> Hello:
        return Hello(
            peer=self._peer,
            shard=shard,
            expected_incarnation=reply.incarnation,
            term=reply.term,
            partition_digest=self._plan.agreement.digest,
        )

    def _disconnect(self) -> None:
        self.ready = False
        streams, self._streams = self._streams, None
        if streams is not None:
            streams.close()

    def _silent(self, shard: int, why: str) -> None:
        """Heartbeats show that a server is lost: end the wait for it."""
        self._moved = True
        streams = self._streams
        if streams is not None:
            streams.cancel(f"shard {shard}: {why}")

    # ---- The end ----

    def _finish(self, pulled: Pulled, params: Sequence[Any]) -> Result | None:
        """Wait until the job is done; None when a server was lost meanwhile, and the last version may have changed."""
        self._heart.activity = LEAVING
        self.seconds.abandoned()  # what was computed early, for an update after the last
        if self._plan.wire.parameters != "Exact" or self._plan.partition.fragments > 1:
            # The result has the precision of the servers, and all fragments.
            try:
                pulled, params = self._pull(None, pulled.version, ALL_EXACT)
            except (PeerLost, Refused) as error:
                if not may_be_result(pulled.selection, done=self._is_done()):
                    return None
                _LOG.warning("the result has the precision of wire.parameters: %s", error)  # the servers have left
        average: Any = None
        # Another pull: the result has both models, and an answer has one value of each block (`Answer.values`).
        if self._script.average is not None:
            try:
                last, received = self._pull(None, pulled.version, ALL_AVERAGED)
            except (PeerLost, Refused):
                if not self._is_done():
                    return None
                raise  # the servers have left: the operator replaces worker 0, which then reads the last checkpoint
            if (last.term, last.version) != (pulled.term, pulled.version):
                return None
            average = self._model(received)[0]
        params, state = self._model(params)
        with self._joins_replaced_servers(pulled) as went_back:
            evaluated = params if average is None else average
            metrics = self._end.evaluate(self._protocol.term, pulled.version, evaluated, state)
            job = self._end.wait(pulled.version, went_back=went_back, moved=lambda: self._moved)
        if job is None:
            return None
        self._already_complete = job.already_complete
        return Result(
            params=params,
            state=state,
            step=pulled.version,
            loss=self._contributions.loss,
            metrics=job.evaluation or metrics,
            checkpoint=job.checkpoint or None,
            train_metrics=self._contributions.train_metrics,
            rank=self._rank,
            member=self._members.member,
            average=average,
            history=self._contributions.history,
        )

    def _is_done(self) -> bool:
        """Returns whether the servers have reported the end of the job."""
        return self._members.share("done", FLAG, lambda: self._heart.job.done)

    @contextlib.contextmanager
    def _joins_replaced_servers(self, last: Pulled) -> Iterator[Callable[[], bool]]:
        """Join servers that replace lost ones until the end of the block.

        Servers send the end of the job only to pods that have joined, and then leave.

        Args:
            last: the last version, which this worker has.

        Yields:
            A function that returns whether training continues at an earlier version.
        """
        ended, back = threading.Event(), threading.Event()
        if not self._leads:
            yield back.is_set
            return

        def over() -> bool:
            return ended.is_set() or self._heart.job.done or self._stop.requested.is_set()

        def join() -> None:
            while not ended.wait(self._env.timeouts.reconnect_pause) and not over():
                if not self._moved:
                    continue
                at = self._protocol.term, self._protocol.version
                try:
                    # A server that found the training complete has no version, and nothing to agree on with others.
                    first = self._control.join(0, self._frozen.agreement, at)
                    replies = [first] if first.done else self._control.join_all(self._frozen.agreement, over, at=at)
                except BackstayError as error:
                    _LOG.debug("the servers cannot be joined while this worker evaluates: %s", error)
                    continue
                # Training may go back while `join_all` waits for a server. Its replies are of one term (T6).
                newest = replies[0]
                again = newest.term > last.term and newest.began < last.version
                if not first.done and (newest.version < last.version or again):
                    back.set()  # the worker joins after the evaluation
                    return
                self._moved = False
                self._heart.expect([reply.incarnation for reply in replies])

        thread = threading.Thread(target=join, name="backstay-join", daemon=True)
        thread.start()
        try:
            yield back.is_set
        finally:
            ended.set()
            thread.join()

    def _model(self, leaves: Sequence[Any]) -> tuple[Any, Any]:
        """Parameters and model state."""
        model = self._script.placement.for_script(self._plan.partition.tree.unflatten(leaves))
        params, state = model if self._script.has_state else (model, None)
        return self._frozen.whole_model(params, state)

    def _close(self, *, have_failed: bool) -> None:
        """
        Args:
            have_failed: whether all members of the rank have the error that ends this one. They wait for each other
                then. Otherwise the end of the process ends their connections.
        """
        self._heart.activity = LEAVING
        self._observer.close()
        self._disconnect()
        self._heart.close()
        self._contributions.close()
        if self._leads:
            self._control.leave(trained=self.returned)
        self._control.close()
        if have_failed:
            self._members.close()
        self.ready = self.returned  # the pod stays ready while the script continues
        self._gone.set()
