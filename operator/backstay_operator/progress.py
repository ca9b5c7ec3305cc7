"""Sends each server the settings of its job every 2 s, and reads its state (the control channel, O8).

One task for each job, so a slow job does not delay the others. Their starts are spread at random, and the number of
calls is bounded. A channel belongs to one pod (by uid): a replacement at the same address gets a new channel.

A server that does not answer also gets a call and a health request with a long deadline. A process without enough CPU
time answers one of them. Reports of workers show whether the server answers them. `contact` counts the calls that
prove something.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
import grpc
import grpc.aio

from backstay_operator.bus import Bus, Called, Progressed, Serves
from backstay_operator.clocks import Clocks
from backstay_operator.contact import TICK, Attention, Calls
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.watching import JobKey
from backstay_rpc import bearer, control_pb2, control_pb2_grpc
from backstay_rpc.answers import combine
from backstay_rpc.channels import open_aio_channel
from backstay_spec import contract, silence
from backstay_spec.observed import Progress

log = logging.getLogger(__name__)

# A worker calls each server every 2 s; a server that answered within this time is not hung.
RECENT_SECONDS: Final = 6.0
MOST_MISSING: Final = 16
_LONGEST_REPORT: Final = 64 << 10


@dataclass(frozen=True)
class PolledServer:
    """A server pod that can be called."""

    shard: int
    incarnation: int
    pod_uid: str
    address: str  # host:port
    serves: bool = True  # whether its answers are about the job; a standby's are not
    health: str = ""  # URL of its health port; empty: it has none


@dataclass(frozen=True)
class Round:
    """The calls to make for one job, and their content.

    Attributes:
        servers: its running servers, including standbys and replaced servers: they must receive the serving
            incarnations.
        token: the job's token.
        world, incarnations, checkpoint, stall_seconds, grace: what is sent to the servers.
        record: returns the job's history as JSON, for shard 0.
        record_id: another text whenever something happened to the job.
        job_seconds: returns the account of goodput until now, by `backstay_spec.goodput.PARTS`, for shard 0.
        workers: URLs of the health ports of some running workers, by uid of the pod.
        worker: (rank, incarnation) -> uid and health URL of that running worker's pod; None: no such pod exists.
    """

    servers: Sequence[PolledServer]
    token: str
    world: int
    incarnations: Mapping[str, int]
    checkpoint: control_pb2.CheckpointSettings
    stall_seconds: float
    grace: control_pb2.Grace
    record: Callable[[], str] = str
    record_id: str = ""
    job_seconds: Callable[[], Iterable[float]] = tuple
    workers: Mapping[str, str] = field(default_factory=dict)
    worker: Callable[[int, int], tuple[str, str] | None] = lambda *_: None

    def missing(self, progress: Progress) -> set[tuple[int, int]]:
        """(rank, incarnation) of the workers without a heartbeat at shard 0, which may be a promoted standby.

        Many of them do not show hung workers: the job starts, or grows.
        """
        if 0 not in progress.reached or progress.report.term is None or progress.done:
            return set()
        ranks = ((rank, self.incarnations.get(f"{contract.ROLE_WORKER}-{rank}", 0)) for rank in range(self.world))
        found = {(rank, newest) for rank, newest in ranks if newest and progress.beating.get(rank) != newest}
        return found if len(found) <= MOST_MISSING else set()

    def request(self, server: PolledServer, recorded: str = "") -> control_pb2.ProgressRequest:
        """Returns the request to one server.

        Args:
            recorded: the id of the record that shard 0's server has.
        """
        leads = server.serves and server.shard == 0
        changed = leads and self.record_id != recorded
        return control_pb2.ProgressRequest(
            shard=server.shard,
            expected_incarnation=server.incarnation,
            world=self.world,
            incarnations=dict(self.incarnations),
            checkpoint=self.checkpoint,
            stall_seconds=self.stall_seconds,
            grace=self.grace,
            record=self.record() if changed else "",
            record_id=self.record_id if changed else "",
            job_seconds=self.job_seconds() if leads else (),
        )


@dataclass
class _Line:
    """The channel to one server's pod.

    Attributes:
        recorded: the id of the record that it has; empty: none.
        unreadable: why its report could not be read, as it was logged last; empty: never.
    """

    channel: grpc.aio.Channel
    stub: control_pb2_grpc.ControlStub
    long_call: asyncio.Task[None] | None = None
    recorded: str = ""
    unreadable: str = ""


@dataclass
class Poll:
    """The calls to one job's servers."""

    task: asyncio.Task[None] | None = None
    now: asyncio.Event = field(default_factory=asyncio.Event)
    lines: dict[str, _Line] = field(default_factory=dict)
    calls: Calls = field(default_factory=Calls)
    since: float = float("-inf")  # when its newest round began
    checks: dict[str, asyncio.Task[None]] = field(default_factory=dict)  # by uid of a worker without heartbeats
    hung: set[str] = field(default_factory=set)  # those of them that left the request unanswered
    reported: set[str] = field(default_factory=set)  # those of them that the coordinator reported


@dataclass(frozen=True)
class CallTimes:
    """The times of the calls, in seconds.

    Attributes:
        period: the time between two rounds of a job.
        deadline: the limit of one call.
        patience: the limit of a health request to a pod that does not answer. A worker has less time if
            `stallSeconds` is short.
    """

    period: float = silence.PERIOD
    deadline: float = silence.CALL
    patience: float = silence.HEALTH


class Poller:
    """Calls the servers of the jobs that `follow` was called for.

    Args:
        what: returns the round for a job; None: it has no servers to call.
        bus: has `Serves`, and gets `Called` and `Progressed`: each round's result about which pods answer, and their
            answers, combined.
        metrics: counts calls by outcome.
        clocks: the operator's clocks.
        draw: returns a random number in [0, 1): where in the period a job's first call is.
        times: the times of the calls.
        parallel: the number of calls, of all jobs, that are in progress at the same time.
    """

    def __init__(
        self,
        what: Callable[[JobKey], Round | None],
        bus: Bus,
        metrics: OperatorMetrics,
        *,
        clocks: Clocks,
        draw: Callable[[], float],
        times: CallTimes | None = None,
        parallel: int = 64,
    ) -> None:
        self._what = what
        self._bus = bus
        self._metrics = metrics
        self._clock, self._now = clocks.seconds, clocks.now
        self._draw = draw
        self._times = times or CallTimes()
        self._slots = asyncio.Semaphore(parallel)
        self._polls: dict[JobKey, Poll] = {}
        self._attention = Attention(clocks.seconds)
        self._ticking: asyncio.Task[None] | None = None
        self._http: aiohttp.ClientSession | None = None
        bus.subscribe(Serves, self._serves)

    def _serves(self, event: Serves) -> None:
        self.follow(event.key)
        if event.now:
            self.poll_now(event.key)

    def follow(self, key: JobKey) -> None:
        """Call this job's servers from now on, for as long as it has any."""
        if self._ticking is None:
            self._attention.start()
            self._ticking = asyncio.get_running_loop().create_task(self._tick(), name="attention")
        if key not in self._polls:
            task = asyncio.get_running_loop().create_task(self._run(key), name=f"progress {key}")
            self._polls[key] = Poll(task)

    def poll_now(self, key: JobKey) -> None:
        """Begin the next round immediately, because another server serves the job."""
        if key in self._polls:
            self._polls[key].now.set()

    async def close(self) -> None:
        """Stop calling, and close every channel."""
        tasks = [poll.task for poll in self._polls.values() if poll.task is not None]
        if self._ticking is not None:
            tasks.append(self._ticking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.close()

    async def _tick(self) -> None:
        while True:
            self._attention.tick()
            await asyncio.sleep(TICK)

    async def _run(self, key: JobKey) -> None:
        await asyncio.sleep(0)
        poll = self._polls[key]
        try:
            delay = min(self._times.period, 0.25) * self._draw()
            while True:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(poll.now.wait(), delay)
                poll.now.clear()
                todo = self._what(key)
                if todo is None:
                    return
                began = self._clock()
                try:
                    await self.round(key, poll, todo)
                except Exception:  # a reply that cannot be read must not end the calls
                    log.exception("job %s/%s: a round of progress calls failed", *key)
                    self._metrics.errors.labels("progress").inc()
                # A server that uses up its deadline must not reduce the rate of the calls to the others.
                delay = max(
                    self._times.period / 4, self._times.period * (0.9 + 0.2 * self._draw()) - (self._clock() - began)
                )
        finally:
            self._polls.pop(key, None)
            for line in poll.lines.values():
                await self._close(line)
            for task in poll.checks.values():
                await _cancel(task)

    async def round(self, key: JobKey, poll: Poll, todo: Round) -> None:
        """Call all servers of a job once; their channels are kept from round to round, by the uid of the pod."""
        for uid in poll.lines.keys() - {server.pod_uid for server in todo.servers}:
            await self._close(poll.lines.pop(uid))
        poll.calls.keep(server.pod_uid for server in todo.servers)
        if self._attention.paused_since(poll.since):
            poll.calls.reset()
            poll.hung.clear()
        began = poll.since = self._clock()
        suspects = {s.shard for s in todo.servers if s.serves and s.pod_uid in poll.calls.silent()}
        reports, answers = await asyncio.gather(
            asyncio.gather(*(self._witness(url) for url in todo.workers.values() if suspects)),
            asyncio.gather(*(self._call(poll, todo, server) for server in todo.servers)),
        )
        reachable, unreachable = reported(reports, suspects)
        if self._attention.paused_since(began):
            poll.calls.reset()
            poll.hung.clear()
            return  # the counts were reset: calls during the pause prove nothing
        now = self._now()
        answered = [(server, reply) for server, reply in zip(todo.servers, answers, strict=True) if reply is not None]
        self._bus.send(Called(key, poll.calls.contact(now, reachable, unreachable, frozenset(poll.hung)), todo.token))
        replies = {server.shard: reply for server, reply in answered if server.serves}
        combined = combine(replies, now)
        if combined is not None:
            if combined.unreadable:
                self._unreadable(
                    key, poll, next(server for server, _ in answered if server.serves and not server.shard), combined
                )
            await self._check_workers(poll, todo, combined)
            self._bus.send(Progressed(key, combined, todo.token))

    async def _call(self, poll: Poll, todo: Round, server: PolledServer) -> control_pb2.ProgressReply | None:
        line = poll.lines.get(server.pod_uid)
        if line is None:
            # A channel tries to connect also between two calls. With thousands of servers that cannot be reached,
            # attempts every 250 ms would take the operator a whole processor.
            channel = open_aio_channel(server.address, reconnect_within=self._times.period)
            stub = control_pb2_grpc.ControlStub(channel)  # type: ignore[no-untyped-call]
            line = poll.lines[server.pod_uid] = _Line(channel, stub)
        async with self._slots:
            began = self._clock()
            reply: control_pb2.ProgressReply | None = None
            try:
                reply = await line.stub.Progress(
                    todo.request(server, line.recorded),
                    metadata=bearer(todo.token),
                    timeout=self._times.deadline,
                )
            except grpc.aio.AioRpcError as error:
                self._metrics.progress_calls.labels(error.code().name).inc()
                log.debug("server %s at %s: %s: %s", server.shard, server.address, error.code().name, error.details())
        if reply is not None:
            self._metrics.progress_calls.labels("OK").inc()
        if reply is None or reply.incarnation not in (0, server.incarnation):
            poll.calls.missed(server.pod_uid, self._now(), proves=self._attention.awake_since(began))
            self._call_longer(poll, line, server, todo.token)
            return None
        poll.calls.answered(server.pod_uid, self._now())
        line.recorded = reply.recorded
        return reply

    def _unreadable(self, key: JobKey, poll: Poll, server: PolledServer, progress: Progress) -> None:
        """Count a report that could not be read. It is logged once for each pod and reason, and not every 2 s."""
        self._metrics.errors.labels("report").inc()
        line = poll.lines[server.pod_uid]
        if line.unreadable != progress.unreadable:
            line.unreadable = progress.unreadable
            log.warning(
                "job %s/%s: the report of shard 0's server #%d cannot be read, so it is ignored: %s; training "
                'continues, and backstay_operator_errors_total{kind="report"} counts further ones',
                *key,
                server.incarnation,
                progress.unreadable,
            )

    # Workers without heartbeats.

    async def _check_workers(self, poll: Poll, todo: Round, progress: Progress) -> None:
        """Send a health request to each worker whose heartbeats have stopped; drop the results of the others."""
        silent = {(s.rank, s.incarnation) for s in progress.stalled if s.reason.startswith(contract.NO_HEARTBEAT)}
        pods = {who: pod for who in silent | todo.missing(progress) if (pod := todo.worker(*who)) is not None}
        found, reported = dict(pods.values()), {pods[who][0] for who in silent & pods.keys()}
        # The request follows the report, so that both times count: a worker is missing before it is reported.
        again = reported - poll.reported
        poll.hung -= again
        poll.reported = reported
        for uid in poll.checks.keys() - (found.keys() - again):
            await _cancel(poll.checks.pop(uid))
        poll.hung &= found.keys()
        for uid, url in found.items():
            if uid not in poll.hung and (uid not in poll.checks or poll.checks[uid].done()):
                patience = min(self._times.patience, silence.worker_silence(todo.stall_seconds).health)
                check = self._check_worker(poll, uid, url, patience)
                poll.checks[uid] = asyncio.get_running_loop().create_task(check)

    async def _check_worker(self, poll: Poll, uid: str, url: str, patience: float) -> None:
        if await self._health(url, patience) is False:
            poll.hung.add(uid)
            poll.now.set()

    # Servers that do not answer.

    def _call_longer(self, poll: Poll, line: _Line, server: PolledServer, token: str) -> None:
        if server.health and (line.long_call is None or line.long_call.done()):
            line.long_call = asyncio.get_running_loop().create_task(self._long_call(poll, line, server, token))

    async def _long_call(self, poll: Poll, line: _Line, server: PolledServer, token: str) -> None:
        """Two requests with a long deadline, of which one answer is enough.

        Strangers may fill the health port, but not a connection that has carried the token (docs/decisions/0068).
        """
        found = [
            asyncio.create_task(self._pinged(line, token)),
            asyncio.create_task(self._health(server.health, self._times.patience)),
        ]
        results: list[bool | None] = []
        generation = poll.calls.generation
        try:
            for each in asyncio.as_completed(found):
                results.append(await each)
                if results[-1]:
                    break
        finally:
            await asyncio.gather(*(_cancel(task) for task in found))
        if results[-1]:
            poll.calls.long_answered(server.pod_uid)
        elif None not in results:
            poll.calls.long_missed(server.pod_uid, generation)

    async def _pinged(self, line: _Line, token: str) -> bool | None:
        """Returns whether a server answers a call without content on its control connection. Returns None as `_health`
        does."""
        began = self._clock()
        try:
            await line.stub.Ping(
                control_pb2.PingRequest(), metadata=bearer(token), timeout=self._times.patience, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:  # a trainer of an earlier version
                return True
            return False if self._attention.awake_since(began) else None
        return True

    async def _health(self, url: str, patience: float) -> bool | None:
        """Returns whether a pod answers one health request; a refused connection is tried again until the time has
        passed. Returns None if this process was late, so the result is unknown."""
        began = self._clock()
        while (left := began + patience - self._clock()) > 0:
            if await self._get(f"{url}/healthz", left) is not None:
                return True
            await asyncio.sleep(min(0.5, max(0.0, began + patience - self._clock())))
        return False if self._attention.awake_since(began) else None

    async def _witness(self, url: str) -> str | None:
        """Returns the report of a worker about the servers that it calls; None without an answer."""
        return await self._get(f"{url}/peers", self._times.deadline)

    async def _get(self, url: str, seconds: float) -> str | None:
        if self._http is None:
            self._http = aiohttp.ClientSession(trust_env=False)
        try:
            async with self._http.get(url, timeout=aiohttp.ClientTimeout(seconds), allow_redirects=False) as answer:
                return (await answer.content.read(_LONGEST_REPORT)).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None

    @staticmethod
    async def _close(line: _Line) -> None:
        if line.long_call is not None:
            await _cancel(line.long_call)
        await line.channel.close(None)


async def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def reported(reports: Sequence[str | None], shards: Collection[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Returns which of `shards` answer a worker's heartbeats, and which do not.

    The reports have the form ``{"0": {"answered": 1.2, "missed": 0}}``: seconds since the last answer, and calls of 5 s
    without an answer since then. A worker that was paused has an old answer and no missed calls, which prove nothing.
    """
    reachable, unreachable = set(), set()
    for report in reports:
        try:
            found = json.loads(report or "{}")
            peers = {int(shard): (float(times["answered"]), int(times["missed"])) for shard, times in found.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            continue  # an older trainer, which has no such report
        for shard in shards:
            answered, missed = peers.get(shard, (float("inf"), 0))
            if answered < RECENT_SECONDS:
                reachable.add(shard)
            elif missed:
                unreachable.add(shard)
    return frozenset(reachable), frozenset(unreachable)


def health_of(pod_ip: str) -> str:
    """Returns the URL of a pod's health port."""
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"http://{host}:{contract.PORT_METRICS}"


def address_of(pod_ip: str) -> str:
    """Returns the address of a pod's control service, in gRPC's form."""
    host = f"[{pod_ip}]" if ":" in pod_ip else pod_ip
    return f"{host}:{contract.PORT_CONTROL}"
