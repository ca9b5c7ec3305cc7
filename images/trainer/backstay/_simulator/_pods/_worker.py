"""Runs a worker's real protocol and the real account of its seconds in simulated time. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from backstay_rpc.control_pb2 import GradientInfo, RejectReason
from backstay_spec.goodput import SecondsReport

from ..._coordination import Coordinator
from ..._report import WorkerSeconds
from ..._roles import Exchange, WorkerProtocol
from ..._transport import Pulled, flow_of
from ._shard import TimedShard
from ._streams import PartOnWay
from ._world import SimulatedMachine, SimulatedWorld

if TYPE_CHECKING:
    from ..._shard import Turn
    from ._host import CoordinatorHost

__all__ = ["ServerTable", "TimedWorker"]

_NONE = RejectReason.REJECT_UNSPECIFIED


class ServerTable(Protocol):
    """The active servers of a job, as its workers reach them.

    Attributes:
        shards: the active server of each shard; None: it does not serve.
        host: the coordinator; None: shard 0 does not serve.
    """

    shards: list[TimedShard | None]
    host: CoordinatorHost | None

    @property
    def is_done(self) -> bool:
        """Whether the job has ended."""


class TimedWorker:
    """One worker's pod or pods, from the start of its process.

    Args:
        world: the simulation.
        servers: the job's servers.
        pod: the role, index (the rank), incarnation and name of its first pod.
        machine: the machine of that pod.
        joined: called when it has joined.
        ended: called with the exit code when its process ends by itself.

    Attributes:
        alive: whether its process works.
        seconds: its account.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        servers: ServerTable,
        pod: tuple[str, int, int, str],
        machine: SimulatedMachine,
        joined: Callable[[], None],
        ended: Callable[[int], None],
    ) -> None:
        self._world, self._servers, self.pod, self._machine = world, servers, pod, machine
        self._on_joined, self._on_ended = joined, ended
        self._heap, self._assumed = world.heap, world.assumed
        self.rank, self.incarnation = pod[1], pod[2]
        self._protocol = WorkerProtocol(world.config.mode, self.rank, self.incarnation)
        self.seconds = WorkerSeconds(clock=lambda: world.heap.now)
        self._draws = world.draws("steps", self.rank, self.incarnation)
        self._pauses = world.draws("pauses", self.rank, self.incarnation)
        step = world.assumed.step
        machine_draws = world.draws("machine", self.rank, self.incarnation)
        self._factor = step.factors.get(self.rank) or machine_draws.around(1.0, step.machine_sigma)
        self.alive = True
        self._is_compiled = False
        self._has_joined = self._has_parameters = False
        self._tries = 0
        self._connected: list[TimedShard] = []
        self._parts: list[PartOnWay] = []
        self._answers: dict[int, PartOnWay] = {}
        self._first: dict[int, PartOnWay] = {}
        self._remaining = 0
        self._turn: Turn | None = None
        self._asks = False
        self._exchange: Exchange | None = None
        self._at = Pulled(term=0, version=0, world=0)
        self._began = self._pulling = 0.0
        self._receive: Callable[[Pulled], None] = self._step
        self._is_finishing = False
        self._flow = ""
        self._beat: SecondsReport | None = None

    # ---- Life ----

    def start(self) -> None:
        """The process has done what it does before it joins."""
        if self.alive:
            self._tries = 0
            self._join()

    def kill(self) -> None:
        """The process is killed: its streams end."""
        self.alive = False
        self._hang_up()
        if self._has_joined and self._servers.host is not None:
            self._servers.host.do(Coordinator.disconnected, self.rank, self.incarnation)

    def leave(self) -> None:
        """The process leaves after SIGTERM."""
        self.alive = False
        self._hang_up()
        if self._has_joined and self._servers.host is not None:
            self._servers.host.do(Coordinator.left, self.rank, self.incarnation)

    def beat(self, unix: float, saved: int) -> None:
        """Send the account, as with a heartbeat.

        Args:
            unix: the Unix time that stands for now.
            saved: the version of the newest checkpoint.
        """
        sent = self.seconds.report(saved)
        self._beat = SecondsReport(unix, tuple(sent.seconds), sent.unsaved, sent.version)

    @property
    def last_beat(self) -> SecondsReport | None:
        """The newest account that a server has, or None if there is none."""
        return self._beat if self._has_joined else None

    # ---- Joining ----

    def _join(self) -> None:
        if not self.alive:
            return
        host = self._servers.host
        shards = [shard for shard in self._servers.shards if shard is not None and shard.alive]
        ready = (
            host is not None
            and host.alive
            and len(shards) == self._world.config.shards
            and all(shard.term == host.state.term and host.linked(shard) for shard in shards)
        )
        if not ready or host is None:
            pauses = self._world.times.join_pauses
            pause = pauses[min(self._tries, len(pauses) - 1)]
            self._tries += 1
            self._heap.after(pause, self._join)
            return
        self._heap.after(2 * self._world.latency, self._joined, host, shards)

    def _joined(self, host: CoordinatorHost, shards: list[TimedShard]) -> None:
        if not self.alive:
            return
        if not host.alive or host is not self._servers.host or not all(shard.alive for shard in shards):
            self._join()
            return
        reply = host.join(self.rank, self.incarnation, self._protocol.term, self._protocol.version)
        if self._protocol.joined(reply):
            self.seconds.rolled_back(reply.began)
        self._connected, self._has_joined, self._asks = shards, True, False
        self._on_joined()
        if self._is_compiled:
            self._pull_first()
            return
        self._is_compiled = True
        self.seconds.ended("starting")
        starts = self._assumed.starts
        seconds = starts.compile_seconds if self.incarnation == 1 else starts.compile_again_seconds
        began = self._heap.now

        def compiled() -> None:
            if self.alive:
                self.seconds.ended("compiling")
                self._span("compile", began, self._heap.now, None)
                self._pull_first()

        draws = self._world.draws("compile", self.rank, self.incarnation)
        self._machine.processor.add(draws.around(seconds, starts.sigma), compiled)

    def _pull_first(self) -> None:
        self._pulling = self._heap.now
        self._receive = self._arrived
        self._request(range(len(self._connected)), 0)

    def _arrived(self, pulled: Pulled) -> None:
        """The first parameters after a join."""
        self._span("first_pull", self._pulling, self._heap.now, None)
        self.seconds.ended("reconnecting" if self._has_parameters else "starting")
        self._has_parameters = True
        exchange = self._exchange
        if exchange is None:
            self._step(pulled)
            return
        if exchange.repeats(pulled):
            self._send()
            return
        self._exchange = None
        fate = exchange.lost(pulled, finite=lambda: True)
        if fate.applied_at is None:
            self.seconds.abandoned()
        else:
            self.seconds.applied(fate.applied_at)
        self._step(pulled)

    # ---- A step ----

    def _step(self, pulled: Pulled) -> None:
        if not self.alive:
            return
        self._at = pulled
        if pulled.done or pulled.version >= self._world.rules.steps:
            self._finish()
            return
        if self.rank >= pulled.world:
            self._receive = self._waited
            self._request(range(len(self._connected)), pulled.version + 1)
            return
        seconds = self._assumed.step.data_seconds * self._assumed.step.local_steps
        if seconds:
            self._heap.after(seconds, self._compute, self._heap.now)
        else:
            self._compute(self._heap.now)

    def _waited(self, pulled: Pulled) -> None:
        self.seconds.ended("wait")
        self._step(pulled)

    def _compute(self, began: float) -> None:
        if not self.alive:
            return
        now, step = self._heap.now, self._assumed.step
        if now > began:
            self._span("batch_wait", began, now, self._at.version)
        self.seconds.ended("data")
        count = step.local_steps
        total = count * self._factor * self._draws.around(step.seconds, step.sigma / math.sqrt(count))
        # Each step draws both numbers, so that one more pause does not change the later ones.
        chance, pause = self._pauses.uniform(), self._pauses.exponential(step.pause_seconds)
        if chance < total * step.pauses_per_hour / 3600:
            total += pause
        own = min(total, count * step.processor_seconds)

        def rest() -> None:
            self._heap.after(total - own, self._computed, now)

        if own:
            self._machine.processor.add(own, rest)
        else:
            rest()

    def _computed(self, began: float) -> None:
        if not self.alive:
            return
        self.seconds.computed()
        self._span("compute", began, self._heap.now, self._at.version)
        self._exchange = self._protocol.exchange(self._at, self._protocol.next(self._at.version))
        self._send()

    def _send(self) -> None:
        exchange, step = self._exchange, self._assumed.step
        assert exchange is not None
        self._began = self._heap.now
        gradient = exchange.attempt()
        self._flow = flow_of(gradient)
        info = GradientInfo(finite=True, examples=round(step.examples * step.local_steps), loss=1.0)
        self._parts = [PartOnWay(self, shard, gradient, info=info) for shard in range(len(self._connected))]
        self._answers, self._remaining = {}, len(self._parts)
        self._receive = self._exchanged
        if any(not shard.alive for shard in self._connected):
            self._lost()
            return
        costs = self._assumed.costs
        total = self._world.gradient_bytes * len(self._parts)
        parts = self._parts

        def read() -> None:
            if not self.alive or self._parts is not parts:
                return
            if self._asks:
                self._turn = self._connected[0].enter(self.rank, lambda: begin(parts))
            else:
                begin(parts)

        def begin(wanted: list[PartOnWay]) -> None:
            self._turn = None
            if self.alive and self._parts is wanted:
                self._heap.after(self._world.latency, self._open, wanted)

        own = total / self._world.config.pods_per_rank  # each pod of a rank sends its own blocks
        self._machine.processor.add(costs.exchange_seconds + own / costs.send_bytes_per_second, read)

    def _request(self, shards: range | list[int], min_version: int) -> None:
        self._parts = [PartOnWay(self, shard, None, min_version) for shard in shards]
        self._remaining = len(self._parts)
        self._heap.after(self._world.latency, self._open, self._parts)

    def _open(self, parts: list[PartOnWay]) -> None:
        """The first bytes of streams arrive at the servers."""
        for part in parts:
            self._connected[part.shard].receive(part)

    def answered(self, part: PartOnWay) -> None:
        """All of a shard's answer has arrived."""
        if not self.alive or part not in self._parts:
            return
        self._answers[part.shard] = part
        self._remaining -= 1
        if self._remaining:
            return
        answers = self._answers
        if self._parts[0].gradient is not None or not self._first:
            self._first = dict(answers)
        # The shards answered at different times, and parameters of two versions must not be mixed.
        behind = list(self._world.mode.behind({shard: each.version for shard, each in answers.items()}))
        if behind:
            self._request(behind, max(each.version for each in answers.values()))
            return
        first, self._first = self._first, {}
        self._parts = []
        if len({each.term for each in answers.values()}) > 1:
            self._lost()
            return
        newest = max(answers.values(), key=lambda each: each.version)
        about = first if any(each.gradient is not None for each in first.values()) else answers
        self._asks = answers[0].ask
        self._answers = {}
        self._receive(
            Pulled(
                term=newest.term,
                version=min(each.version for each in answers.values()),
                world=newest.world,
                outcome=next((each.outcome for _, each in sorted(about.items()) if each.outcome), _NONE),
                next_key_step=max(each.next_key_step for each in about.values()),
                done=all(each.done for each in answers.values()),
                pushed_at=max(each.pushed for each in first.values()),
                answered_at=max(each.answered for each in first.values()),
            )
        )

    def _exchanged(self, pulled: Pulled) -> None:
        exchange, now, began = self._exchange, self._heap.now, self._began
        assert exchange is not None
        self._exchange = None
        step, flow = self._at.version, self._flow
        fate = exchange.answered(pulled, finite=True)
        sent, answered = max(began, pulled.pushed_at), max(began, pulled.answered_at)
        self.seconds.exchanged(sent - began, answered - began, applied_at=fate.applied_at)
        self._world.tally.exchange_waits.append(answered - sent)
        self._span("exchange", began, now, step)
        self._span("push", began, sent, step, flow=flow)
        self._span("update_wait", sent, answered, step, outcome=fate.label, flow=flow)
        self._span("pull", answered, now, step)
        self._step(pulled)

    # ---- Lost servers ----

    def lost_server(self, part: PartOnWay) -> None:
        """A stream broke, or a server refused it."""
        if self.alive and part in self._parts:
            self._lost()

    def server_ended(self) -> None:
        """A server ended while this worker waits for the end of the job."""
        if self.alive and self._is_finishing and not self._servers.is_done:
            self._is_finishing = False
            self._lost()

    def _hang_up(self) -> None:
        parts, self._parts = self._parts, []
        if self._turn is not None and self._connected[0].alive:
            self._connected[0].leave(self._turn)
        self._turn = None
        for part in parts:
            self._connected[part.shard].drop(part)
            part.is_open = False

    def _lost(self) -> None:
        self._hang_up()
        self._answers, self._first = {}, {}
        self._tries = 0
        self._heap.after(self._world.times.reconnect_pause, self._join)

    # ---- The end ----

    def _finish(self) -> None:
        self.seconds.abandoned()
        self._is_finishing = True
        if self._servers.is_done:
            self.job_done()

    def job_done(self) -> None:
        """The job has ended; a worker that has the last version ends."""
        if not (self.alive and self._is_finishing):
            return
        self._is_finishing = False
        self.seconds.ended("checkpoint")
        self._heap.after(self._assumed.starts.end_seconds, self._end)

    def _end(self) -> None:
        if self.alive:
            self.seconds.ended("ending")
            self.alive = False
            self._on_ended(0)

    def _span(self, point: str, began: float, ended: float, step: int | None, **notes: str) -> None:
        self._world.spans.record(self.pod, point, began, ended, step, **notes)
