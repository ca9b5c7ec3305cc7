"""The control channel (O8): every 2 s each server of each job is told what is wished, and asked how it goes.

One task for a job, so that a slow one delays nobody; their starts are spread by chance and the calls of all of them are
bounded. A channel belongs to one pod (by uid): a replacement at the same address gets a new one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

import grpc
import grpc.aio

from backstay_operator.metrics import Metrics
from backstay_operator.watching import JobKey
from backstay_rpc import bearer, control_pb2, control_pb2_grpc
from backstay_rpc.channels import open_aio_channel
from backstay_spec import contract
from backstay_spec.observed import Progress, Stalled, TermStart

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Server:
    """One server pod that can be called."""

    shard: int
    incarnation: int
    pod_uid: str
    address: str  # host:port
    serves: bool = True  # its answers are the job's; a standby's are not


@dataclass(frozen=True)
class Round:
    """What to call for one job, and with what.

    Attributes:
        servers: its servers that run now, standbys and those that were replaced included: they must hear who serves.
        token: the job's.
        generation, world, incarnations, checkpoint, stall_seconds: what the servers are told.
    """

    servers: Sequence[Server]
    token: str
    generation: int
    world: int
    incarnations: Mapping[str, int]
    checkpoint: control_pb2.CheckpointSettings
    stall_seconds: float

    def request(self, server: Server) -> control_pb2.ProgressRequest:
        """The request to one server."""
        return control_pb2.ProgressRequest(
            shard=server.shard,
            expected_incarnation=server.incarnation,
            generation=self.generation,
            world=self.world,
            incarnations=dict(self.incarnations),
            checkpoint=self.checkpoint,
            stall_seconds=self.stall_seconds,
        )


def combine(
    replies: Mapping[int, control_pb2.ProgressReply],
    taken: datetime,
    *,
    heard: Mapping[str, datetime] | None = None,
    asked: Mapping[str, datetime] | None = None,
) -> Progress | None:
    """One round's answers as the planner wants them.

    What the whole job does is said by the coordinator (shard 0); that a worker is stalled, has handed in a gradient, or
    lives, by any shard. None when no server answered.

    Args:
        heard, asked: as in `Progress`; the replies do not tell.
    """
    if not replies:
        return None
    stalled: dict[tuple[int, int], str] = {}
    contributed: dict[int, int] = {}
    beating: dict[int, int] = {}
    for _, reply in sorted(replies.items()):
        for worker in reply.stalled:
            stalled.setdefault((worker.rank, worker.incarnation), worker.reason)
        for found, told in ((contributed, reply.contributed), (beating, reply.beating)):
            for rank, incarnation in told.items():
                found[rank] = max(incarnation, found.get(rank, 0))
    said: dict[str, Any] = {}
    coordinator = replies.get(0)
    if coordinator is not None:
        stored = coordinator.checkpoint if coordinator.HasField("checkpoint") else None
        said = {
            # A server that is still loading is in no term, and at no step.
            "term": coordinator.term or None,
            "step": coordinator.step if coordinator.term else None,
            "loss": coordinator.loss if coordinator.has_loss else None,
            "examples_per_second": coordinator.examples_per_second,
            "world": coordinator.world or None,
            "metrics": dict(coordinator.metrics),
            "train_metrics": dict(coordinator.train_metrics),
            "evaluated_step": coordinator.evaluation_step or None,
            "evaluation_error": coordinator.evaluation_error,
            "term_start": _term_start(coordinator),
            "done": coordinator.done,
        }
        if stored is not None:
            said["checkpoint_error"] = stored.error
            if stored.uri:
                said |= {"checkpoint_step": stored.step, "checkpoint_uri": stored.uri}
    return Progress(
        taken=taken,
        reached=frozenset(replies),
        in_sync={shard: reply.standby for shard, reply in sorted(replies.items()) if reply.standby},
        stalled=tuple(Stalled(rank, incarnation, why) for (rank, incarnation), why in sorted(stalled.items())),
        contributed=contributed,
        beating=beating,
        heard=heard or {},
        asked=asked or {},
        **said,
    )


def carried(before: Progress | None, after: Progress) -> Progress:
    """`after`, and of `before` what servers that `after` did not reach have left: their standbys, and the last step."""
    here = (after.term, after.step) if after.term is not None and after.step is not None else None
    if before is None:
        return replace(after, last=here)
    left = {shard: standby for shard, standby in before.in_sync.items() if shard not in after.reached}
    began_now = here is not None and before.last is not None and before.last[0] < here[0]
    return replace(
        after,
        in_sync={**left, **after.in_sync},
        last=here or before.last,
        step_before_term=before.last[1] if began_now and before.last else before.step_before_term,
    )


def _term_start(reply: control_pb2.ProgressReply) -> TermStart | None:
    if not reply.HasField("term_start"):
        return None
    start = reply.term_start
    return TermStart(start.term, start.step, start.checkpoint, start.redone)


def urgent(before: Progress | None, after: Progress) -> bool:
    """Does `after` say more than that training goes on: something to plan for now, and not in ten seconds?"""
    if before is None:
        return True
    fields = ("reached", "term", "world", "stalled", "contributed", "in_sync", "checkpoint_error", "done")
    return any(getattr(before, name) != getattr(after, name) for name in fields)


@dataclass
class _Line:
    """To one server's pod."""

    channel: grpc.aio.Channel
    stub: control_pb2_grpc.ControlStub
    asked: datetime  # first
    heard: datetime | None = None  # last


@dataclass
class _Poll:
    task: asyncio.Task[None]
    now: asyncio.Event = field(default_factory=asyncio.Event)
    lines: dict[str, _Line] = field(default_factory=dict)


class Poller:
    """Calls the servers of every job that it was told to follow.

    Args:
        what: the round to make for a job now; None when it has none to be called.
        heard: is given each round's answers: the combined one, and the steps redone as the coordinator counts them.
        metrics: counts calls by outcome.
        now: the time of day.
        draw: a number in [0, 1): where in the period a job's first call falls.
        period: seconds between two rounds of a job.
        deadline: seconds that one call may take.
        at_once: how many calls, of all jobs, are under way.
        port: of the control service in a pod.
    """

    def __init__(
        self,
        what: Callable[[JobKey], Round | None],
        heard: Callable[[JobKey, Progress, int], None],
        metrics: Metrics,
        *,
        now: Callable[[], datetime],
        draw: Callable[[], float],
        period: float = 2.0,
        deadline: float = 1.5,
        at_once: int = 64,
    ) -> None:
        self._what = what
        self._heard = heard
        self._metrics = metrics
        self._now = now
        self._draw = draw
        self._period = period
        self._deadline = deadline
        self._slots = asyncio.Semaphore(at_once)
        self._polls: dict[JobKey, _Poll] = {}

    def follow(self, key: JobKey) -> None:
        """Call this job's servers from now on, for as long as it has any."""
        if key not in self._polls:
            task = asyncio.get_running_loop().create_task(self._run(key), name=f"progress {key}")
            self._polls[key] = _Poll(task)

    def hurry(self, key: JobKey) -> None:
        """Another server serves: begin the next round at once."""
        if key in self._polls:
            self._polls[key].now.set()

    async def close(self) -> None:
        """Stop calling, and close every channel."""
        polls = list(self._polls.values())
        for poll in polls:
            poll.task.cancel()
        await asyncio.gather(*(poll.task for poll in polls), return_exceptions=True)

    async def _run(self, key: JobKey) -> None:
        await asyncio.sleep(0)
        poll = self._polls[key]
        try:
            delay = min(self._period, 0.25) * self._draw()
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(poll.now.wait(), delay)
                poll.now.clear()
                todo = self._what(key)
                if todo is None:
                    return
                try:
                    await self.round(key, poll.lines, todo)
                except Exception:  # a reply that cannot be read must not end the calls
                    log.exception("job %s/%s: a round of progress calls failed", *key)
                    self._metrics.errors.labels("progress").inc()
                delay = self._period * (0.9 + 0.2 * self._draw())
        finally:
            self._polls.pop(key, None)
            await asyncio.gather(*(line.channel.close(None) for line in poll.lines.values()), return_exceptions=True)

    async def round(self, key: JobKey, lines: dict[str, _Line], todo: Round) -> None:
        """Call all servers of a job once; `lines` are kept from round to round, by the uid of the pod."""
        for uid in lines.keys() - {server.pod_uid for server in todo.servers}:
            await lines.pop(uid).channel.close(None)
        answers = await asyncio.gather(*(self._call(lines, todo, server) for server in todo.servers))
        answered = [(server, reply) for server, reply in zip(todo.servers, answers, strict=True) if reply is not None]
        replies = {server.shard: reply for server, reply in answered if server.serves}
        now = self._now()
        for server, _ in answered:
            lines[server.pod_uid].heard = now
        combined = combine(
            replies,
            now,
            heard={uid: line.heard for uid, line in lines.items() if line.heard is not None},
            asked={uid: line.asked for uid, line in lines.items() if line.heard is None},
        )
        if combined is not None:
            self._heard(key, combined, replies[0].steps_redone if 0 in replies else 0)

    async def _call(self, lines: dict[str, _Line], todo: Round, server: Server) -> control_pb2.ProgressReply | None:
        line = lines.get(server.pod_uid)
        if line is None:
            channel = open_aio_channel(server.address)
            stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            line = lines[server.pod_uid] = _Line(channel, stub, self._now())
        async with self._slots:
            try:
                reply = await line.stub.Progress(
                    todo.request(server), metadata=bearer(todo.token), timeout=self._deadline
                )
            except grpc.aio.AioRpcError as error:
                self._metrics.progress_calls.labels(error.code().name).inc()
                log.debug("server %s at %s: %s: %s", server.shard, server.address, error.code().name, error.details())
                return None
        self._metrics.progress_calls.labels("OK").inc()
        if reply.incarnation not in (0, server.incarnation):
            return None
        found: control_pb2.ProgressReply = reply
        return found


def address_of(pod_ip: str) -> str:
    """Where a pod's control service listens, as gRPC writes it."""
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"{host}:{contract.PORT_CONTROL}"
