"""O8: the operator calls every server, sends the desired values, and receives the progress of training."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import pytest
from between import LONG, until_async

from backstay_operator.bus import Bus, Called, Progressed
from backstay_operator.clocks import Clocks
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.progress import CallTimes, Poll, PolledServer, Poller, Round, address_of
from backstay_operator.record import record_id, record_of
from backstay_rpc import control_pb2 as pb
from backstay_rpc import control_pb2_grpc
from backstay_rpc.answers import carried, combine, urgent
from backstay_spec.goodput import MEASURED, SecondsReport
from backstay_spec.job_report import MOST_BYTES, CheckpointStatus, JobReport, TermStart
from backstay_spec.observed import Contact, Progress, Stalled

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TOKEN = "secret"
KEY = ("ns", "job")
AT = JobReport(step=8, world=4, term=1)


class FakeServer(control_pb2_grpc.ControlServicer):
    """A shard's server that checks the token and the incarnation as a real one does."""

    def __init__(self, incarnation: int, reply: pb.ProgressReply) -> None:
        self.incarnation = incarnation
        self.reply = reply
        self.asked: list[pb.ProgressRequest] = []
        self.free = asyncio.Event()
        self.free.set()
        self.pings: grpc.StatusCode | None = grpc.StatusCode.OK  # None: no answer

    async def Ping(self, _: pb.PingRequest, context: Any) -> pb.PingReply:  # noqa: N802
        if self.pings is None:
            await asyncio.Event().wait()
        elif self.pings is not grpc.StatusCode.OK:
            await context.abort(self.pings, "no")
        return pb.PingReply()

    async def Progress(self, request: pb.ProgressRequest, context: Any) -> pb.ProgressReply:  # noqa: N802
        if dict(context.invocation_metadata()).get("authorization") != f"Bearer {TOKEN}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "wrong token")
        if request.expected_incarnation not in (0, self.incarnation):
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another incarnation")
        self.asked.append(request)
        await self.free.wait()
        return self.reply


@asynccontextmanager
async def serving(servicer: FakeServer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def round_of(*servers: PolledServer, token: str = TOKEN) -> Round:
    return Round(
        servers=servers,
        token=token,
        world=5,
        incarnations={"worker-0": 2},
        checkpoint=pb.CheckpointSettings(every_steps=10, every_seconds=60, keep=3),
        stall_seconds=300,
        grace=pb.Grace(auto=True),
    )


class Received:
    def __init__(self) -> None:
        self.rounds: list[Progress] = []
        self.news = asyncio.Event()

        self.bus = Bus()
        self.bus.subscribe(Progressed, self._progressed)

    def _progressed(self, event: Progressed) -> None:
        assert event.key == KEY
        self.rounds.append(event.progress)
        self.news.set()

    async def more(self, count: int) -> None:
        while len(self.rounds) < count:
            self.news.clear()
            await asyncio.wait_for(self.news.wait(), LONG)


def poller(what: Callable[[Any], Round | None], received: Received, metrics: OperatorMetrics, **options: Any) -> Poller:
    clock, contacts = options.pop("clock", lambda: 0.0), options.pop("contacts", [])
    received.bus.subscribe(Called, lambda event: contacts.append(event.contact))
    times = CallTimes(**{"period": 0.02, **options})
    return Poller(what, received.bus, metrics, clocks=Clocks(clock, lambda: NOW), draw=lambda: 0.0, times=times)


def outcome(metrics: OperatorMetrics, code: str) -> float:
    return metrics.registry.get_sample_value("backstay_operator_progress_calls_total", {"code": code}) or 0.0


def test_all_shards_are_called_and_their_replies_are_merged() -> None:
    async def story() -> None:
        zero = FakeServer(
            1,
            pb.ProgressReply(
                incarnation=1,
                term=2,
                step=7,
                world=4,
                report=JobReport(loss=0.5, steps_redone=9, local_steps=24).encoded(),
            ),
        )
        one = FakeServer(4, pb.ProgressReply(incarnation=4, step=6, stalled=[pb.Stalled(rank=2, incarnation=3)]))
        received, metrics = Received(), OperatorMetrics()
        async with serving(zero) as first, serving(one) as second:
            todo = round_of(PolledServer(0, 1, "u0", first), PolledServer(1, 4, "u1", second))
            it = poller(lambda _: todo, received, metrics)
            it.follow(KEY)
            it.follow(KEY)
            await received.more(2)
            await it.close()
        progress = received.rounds[0]
        assert progress == Progress(
            taken=NOW,
            reached=frozenset({0, 1}),
            coordinator=1,
            report=JobReport(term=2, step=7, loss=0.5, local_steps=24, world=4, steps_redone=9),
            stalled=(Stalled(2, 3),),
        )
        asked = one.asked[0]
        assert (asked.shard, asked.expected_incarnation, asked.world) == (1, 4, 5)
        assert dict(asked.incarnations) == {"worker-0": 2}
        assert (asked.checkpoint.every_steps, asked.checkpoint.keep, asked.stall_seconds) == (10, 3, 300)

    asyncio.run(story())


def test_a_server_that_hangs_refuses_or_is_not_there_costs_only_its_own_answer() -> None:
    async def story() -> None:
        good = FakeServer(1, pb.ProgressReply(incarnation=1, step=1))
        stuck = FakeServer(1, pb.ProgressReply())
        stuck.free.clear()
        old = FakeServer(2, pb.ProgressReply())
        received, metrics = Received(), OperatorMetrics()
        async with serving(good) as a, serving(stuck) as b, serving(old) as c:
            todo = round_of(
                PolledServer(0, 1, "u0", a),
                PolledServer(1, 1, "u1", b),
                PolledServer(2, 1, "u2", c),
                PolledServer(3, 1, "u3", "127.0.0.1:1"),
            )
            contacts: list[Contact] = []
            it = poller(lambda _: todo, received, metrics, deadline=0.3, contacts=contacts)
            it.follow(KEY)
            await until_async(lambda: contacts and set(contacts[-1].silent) == {"u1", "u2", "u3"})
            await received.more(1)
            assert received.rounds[0].reached == frozenset({0})
            stuck.free.set()
            await until_async(lambda: set(contacts[-1].silent) == {"u2", "u3"})
            await until_async(lambda: received.rounds[-1].reached == frozenset({0, 1}))
            await until_async(lambda: set(contacts[-1].silent) == {"u2", "u3"})
            await it.close()
        assert contacts[-1].silent["u2"].calls == len(contacts), "each call counts: the operator was not late"
        assert set(contacts[-1].answered_at) == {"u0", "u1"}
        assert outcome(metrics, "DEADLINE_EXCEEDED") >= 1
        assert outcome(metrics, "FAILED_PRECONDITION") >= 2
        assert outcome(metrics, "UNAVAILABLE") >= 1

    asyncio.run(story())


def test_an_answer_has_the_token_of_its_job() -> None:
    """The job may be deleted during the round, and another one may have its name then."""

    async def story() -> None:
        server = FakeServer(1, pb.ProgressReply(incarnation=1, term=7, step=100))
        received, metrics, tokens = Received(), OperatorMetrics(), []
        received.bus.subscribe(Called, lambda event: tokens.append(event.token))
        received.bus.subscribe(Progressed, lambda event: tokens.append(event.token))
        async with serving(server) as address:
            todo = round_of(PolledServer(0, 1, "u", address))
            it = poller(lambda _: None, received, metrics)
            await it.round(KEY, Poll(), todo)
            await it.close()
        assert tokens == [TOKEN, TOKEN]

    asyncio.run(story())


def test_a_wrong_token_is_counted_and_reports_nothing() -> None:
    async def story() -> None:
        server = FakeServer(1, pb.ProgressReply(incarnation=1))
        received, metrics = Received(), OperatorMetrics()
        async with serving(server) as address:
            it = poller(lambda _: None, received, metrics)
            await it.round(KEY, Poll(), round_of(PolledServer(0, 1, "u", address), token="guess"))
            await it.close()
        assert received.rounds == []
        assert server.asked == []
        assert outcome(metrics, "UNAUTHENTICATED") == 1

    asyncio.run(story())


def test_a_replaced_pod_gets_its_own_channel_and_a_job_without_servers_is_left() -> None:
    async def story() -> None:
        server = FakeServer(1, pb.ProgressReply(incarnation=1))
        received = Received()
        todo: list[Round | None] = []
        async with serving(server) as address:
            todo.append(round_of(PolledServer(0, 1, "old", address)))
            it = poller(lambda _: todo[-1], received, OperatorMetrics())
            it.follow(KEY)
            await received.more(1)
            lines = it._polls[KEY].lines
            assert set(lines) == {"old"}
            todo.append(round_of(PolledServer(0, 1, "new", address)))
            await received.more(len(received.rounds) + 2)
            assert set(lines) == {"new"}
            task = it._polls[KEY].task
            todo.append(None)
            await asyncio.wait_for(task, LONG)
            assert not it._polls
            await it.close()

    asyncio.run(story())


def test_what_workers_measured_is_of_the_time_at_which_they_sent_it() -> None:
    said = pb.WorkerSeconds(rank=2, incarnation=3, seconds=[1.0, 2.0], version=7, unsaved=0.5, ago=1.5)
    both = combine({0: pb.ProgressReply(worker_seconds=[said])}, NOW)
    assert both is not None
    assert both.worker_seconds == {(2, 3): SecondsReport(NOW.timestamp() - 1.5, (1.0, 2.0), 0.5, 7)}


def test_what_is_combined() -> None:
    assert combine({}, NOW) is None
    only_one = combine({1: pb.ProgressReply(step=3, contributed={0: 2}, beating={1: 3})}, NOW)
    assert only_one == Progress(taken=NOW, reached=frozenset({1}), contributed={0: 2}, beating={1: 3})
    replies = {
        0: pb.ProgressReply(
            contributed={0: 1, 1: 5},
            report=JobReport(
                checkpoint=CheckpointStatus(step=7, uri="file:///c/7"),
                checkpoint_error="disk full",
                metrics={"accuracy": 0.5},
            ).encoded(),
            done=True,
        ),
        1: pb.ProgressReply(contributed={0: 2}),
    }
    both = combine(replies, NOW)
    assert both is not None
    assert both.contributed == {0: 2, 1: 5}
    report = both.report
    assert (report.checkpoint, report.checkpoint_error) == (CheckpointStatus(step=7, uri="file:///c/7"), "disk full")
    assert (report.loss, report.world, both.done, report.metrics) == (None, None, True, {"accuracy": 0.5})
    assert (report.term, report.step) == (None, None), "a server that is still loading is at no step"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"report": AT.model_copy(update={"step": 9, "loss": 0.1, "examples_per_second": 3.0})}, False),
        ({"stalled": (Stalled(1, 1),)}, True),
        ({"done": True}, True),
        ({"report": AT.model_copy(update={"world": 3})}, True),
        ({"report": AT.model_copy(update={"term": 2})}, True),
        ({"reached": frozenset()}, True),
        ({"report": AT.model_copy(update={"checkpoint_error": "disk full"})}, True),
    ],
)
def test_only_changes_other_than_progress_are_urgent(change: dict[str, Any], expected: bool) -> None:
    """O8: progress alone changes a status at most every 10 s."""
    before = Progress(taken=NOW, reached=frozenset({0}), report=AT)
    after = Progress(**{"taken": NOW, "reached": frozenset({0}), "report": AT, **change})
    assert urgent(before, after) is expected
    assert urgent(None, after)


def test_the_report_of_a_server_about_its_standby_stays_after_the_servers_death() -> None:
    """O4, T6: the operator sends the request when the server is dead."""
    before = Progress(taken=NOW, reached=frozenset({0, 1}), in_sync={0: 2, 1: 2})
    assert carried(None, before) == before  # it has no term yet
    assert carried(before, Progress(taken=NOW, reached=frozenset({1}))).in_sync == {0: 2}
    assert carried(before, Progress(taken=NOW, reached=frozenset({0, 1}), in_sync={1: 3})).in_sync == {1: 3}


def test_addresses() -> None:
    assert address_of("10.0.0.1") == "10.0.0.1:7077"
    assert address_of("fd00::1") == "[fd00::1]:7077"


def test_the_step_before_a_new_term_is_carried_over_rounds_without_the_coordinator() -> None:
    """The new coordinator does not have the number, and the old one is gone."""

    def answer(before: Progress | None, **rows: Any) -> Progress:
        return carried(before, Progress(taken=NOW, report=JobReport(**rows)))

    seen = answer(None, term=1, step=150)
    seen = answer(seen, term=1, step=157)
    seen = answer(seen)  # shard 0 did not answer
    seen = answer(seen, term=2, step=105)
    assert seen.step_before_term == 157
    seen = answer(seen)
    assert answer(seen, term=2, step=110).step_before_term == 157
    assert answer(seen, term=3, step=100).step_before_term == 105


def test_where_a_term_began_and_evaluations_are_the_coordinators() -> None:
    report = JobReport(
        term_start=TermStart(2, 105, "/ck", 52), failed_evaluation=100, evaluation_error="no", loss=math.inf
    )
    reply = pb.ProgressReply(term=2, step=106, report=report.encoded())
    other = pb.ProgressReply(term=2, report=JobReport(loss=1.0).encoded())
    seen = combine({0: reply, 1: other}, NOW)
    assert seen is not None
    assert seen.report == report.model_copy(update={"term": 2, "step": 106}), "the loss is not finite, which is news"
    silent = combine({0: pb.ProgressReply(term=2, step=106)}, NOW)
    assert silent is not None
    assert silent.report == JobReport(term=2, step=106), "a standby that takes over has no report"


@pytest.mark.parametrize(
    "data",
    [
        b"\xff",
        b"[]",
        b'{"loss": 1.0',
        b'{"loss": "high"}',
        b'{"step": -1}',
        b'{"goal_steps": 9223372036854775808}',
        b'{"metrics": {"a": "high"}}',
        b'{"term_start": {"term": 1}}',
        b'{"waited_for": [{"rank": 1}]}',
        b'{"metrics": ' * 10_000,
        b'{"waits_for": "' + b"x" * MOST_BYTES + b'"}',
    ],
    ids=lambda data: data[:24].decode(errors="replace"),
)
def test_o7_a_report_that_cannot_be_read_costs_only_the_report(data: bytes) -> None:
    seen = combine({0: pb.ProgressReply(term=2, step=106, report=data, contributed={0: 2}, standby=3)}, NOW)
    assert seen is not None
    assert seen.report == JobReport(term=2, step=106)
    assert (seen.contributed, seen.in_sync) == ({0: 2}, {0: 3})
    assert 0 < len(seen.unreadable) <= 300


@pytest.mark.parametrize("position", [{"term": 2, "step": 1 << 63}, {"term": 1 << 63, "step": 1}])
def test_o7_a_position_that_the_api_server_cannot_store_is_ignored(position: dict[str, int]) -> None:
    """The status of the job could not be written again."""
    seen = combine({0: pb.ProgressReply(report=JobReport(loss=1.0).encoded(), **position)}, NOW)
    assert seen is not None
    assert (seen.report.term, seen.report.step, seen.report.loss) == (None, None, 1.0)
    assert "not both in 0 .. 2^63-1" in seen.unreadable


@pytest.mark.parametrize(
    "wrong",
    [
        {"ago": math.inf},
        {"ago": math.nan},
        {"ago": 1e300},
        {"unsaved": math.nan},
        {"unsaved": -1.0},
        {"seconds": [math.nan] * len(MEASURED)},
        {"seconds": [1e300] * len(MEASURED)},
    ],
    ids=str,
)
def test_o7_seconds_of_workers_that_cannot_be_true_are_ignored(wrong: dict[str, Any]) -> None:
    """The sum would be infinite, which JSON does not have: the status of the job could not be written again."""
    fields = {"seconds": [1.0] * len(MEASURED), **wrong}
    bad, good = (
        pb.WorkerSeconds(rank=0, incarnation=1, **fields),
        pb.WorkerSeconds(rank=1, seconds=[1.0] * len(MEASURED)),
    )
    seen = combine({0: pb.ProgressReply(term=1, worker_seconds=[bad, good])}, NOW)
    assert seen is not None
    assert set(seen.worker_seconds) == {(1, 0)}


def test_o7_a_place_of_a_report_that_is_too_long_for_the_status_is_ignored() -> None:
    reports = [pb.StoredReport(slot="worker-0", uri="x" * size) for size in (2_000, 2_001)]
    seen = combine({0: pb.ProgressReply(term=1, death_reports=reports)}, NOW)
    assert seen is not None
    assert [len(one.uri) for one in seen.death_reports] == [2_000]


def test_o7_a_report_that_cannot_be_read_is_logged_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """The operator calls every 2 s, for weeks. Another reason is another line."""

    async def story() -> None:
        shard = FakeServer(1, pb.ProgressReply(incarnation=1, term=2, step=7, report=b"[]"))
        received, metrics = Received(), OperatorMetrics()
        async with serving(shard) as address:
            it = poller(lambda _: round_of(PolledServer(0, 1, "u0", address)), received, metrics)
            it.follow(KEY)
            await received.more(5)
            assert all((seen.report.step, seen.report.loss) == (7, None) for seen in received.rounds)
            shard.reply.step = 1 << 63
            await until_async(lambda: received.rounds[-1].report.step is None)
            await received.more(len(received.rounds) + 2)
            counted = metrics.registry.get_sample_value("backstay_operator_errors_total", {"kind": "report"})
            assert counted is not None
            assert counted >= len(received.rounds) - 1
            await it.close()

    asyncio.run(story())
    lines = [record.getMessage() for record in caplog.records if "cannot be read" in record.getMessage()]
    assert len(lines) == 2
    assert lines[0].startswith("job ns/job: the report of shard 0's server #1 cannot be read, so it is ignored")


def test_rows_of_a_newer_server_are_ignored() -> None:
    seen = combine({0: pb.ProgressReply(term=1, report=b'{"loss": 1.5, "colour": "red"}')}, NOW)
    assert seen is not None
    assert seen.report.loss == 1.5


@pytest.mark.parametrize(
    ("pings", "hung"),
    [(grpc.StatusCode.OK, False), (grpc.StatusCode.UNIMPLEMENTED, False), (None, True)],
    ids=["answers", "an earlier trainer", "hangs"],
)
def test_o7_strangers_on_the_health_port_are_not_the_silence_of_a_server(
    pings: grpc.StatusCode | None, hung: bool
) -> None:
    """A server that answers a call without content, on the connection with the token, is not hung."""

    async def story() -> None:
        async def full(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await reader.read(-1)
            writer.close()

        shard = FakeServer(1, pb.ProgressReply(incarnation=1))
        shard.pings = pings
        shard.free.clear()  # progress calls take too long
        contacts: list[Contact] = []
        health = await asyncio.start_server(full, "127.0.0.1", 0)
        async with serving(shard) as address:
            url = f"http://127.0.0.1:{health.sockets[0].getsockname()[1]}"
            it = poller(
                lambda _: round_of(PolledServer(0, 1, "u0", address, health=url)),
                Received(),
                OperatorMetrics(),
                contacts=contacts,
                clock=time.monotonic,
                deadline=0.05,
                patience=0.3,
            )
            it.follow(KEY)
            await until_async(lambda: contacts and contacts[-1].silent["u0"].calls > 20)
            await until_async(lambda: (contacts[-1].silent["u0"].long_calls > 0) is hung)
            await it.close()
        health.close()

    asyncio.run(story())


def test_o5_a_worker_without_heartbeats_gets_a_health_request() -> None:
    """One that answers its health port is not reported as hung, one that leaves the request unanswered is."""

    async def story() -> None:
        async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(asyncio.CancelledError):
                await reader.read(-1)
            writer.close()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
            await writer.drain()
            writer.close()

        stalled = [pb.Stalled(rank=rank, incarnation=1, reason="no heartbeat for 11 s") for rank in (0, 1, 2)]
        stalled.append(pb.Stalled(rank=3, incarnation=1, reason="no gradient for 300 s"))
        shard = FakeServer(1, pb.ProgressReply(incarnation=1, step=6, stalled=stalled))
        contacts: list[Contact] = []
        ports = [await asyncio.start_server(handler, "127.0.0.1", 0) for handler in (hang, answer, hang)]
        urls = [f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}" for server in ports]
        pods = {(0, 1): ("hangs", urls[0]), (1, 1): ("answers", urls[1]), (3, 1): ("slow", urls[2])}
        async with serving(shard) as address:
            todo = replace(round_of(PolledServer(0, 1, "u0", address)), worker=lambda *who: pods.get(who))
            it = poller(
                lambda _: todo,
                Received(),
                OperatorMetrics(),
                contacts=contacts,
                clock=time.monotonic,
                patience=0.3,
            )
            it.follow(KEY)
            await until_async(lambda: contacts and contacts[-1].hung_workers == {"hangs"})
            del shard.reply.stalled[:]
            await until_async(lambda: not contacts[-1].hung_workers)
            await it.close()
        for server in ports:
            server.close()

    asyncio.run(story())


def test_t8_workers_that_a_new_coordinator_misses_are_found() -> None:
    """There are only a few, because no worker sends heartbeats while a job starts."""
    todo = replace(
        round_of(), world=3, incarnations={"worker-0": 2, "worker-1": 1, "worker-2": 1, "parameter-server-0": 4}
    )

    def seen(**more: object) -> Progress:
        fields = {"taken": NOW, "reached": frozenset({0}), "report": AT, "beating": {0: 2, 1: 1}} | more
        return Progress(**fields)  # type: ignore[arg-type]

    assert todo.missing(seen()) == {(2, 1)}
    assert todo.missing(seen(beating={0: 1, 1: 1, 2: 1})) == {(0, 2)}, "heartbeats of an older incarnation"
    assert todo.missing(seen(reached=frozenset({1}))) == set(), "the coordinator did not answer"
    assert todo.missing(seen(report=JobReport())) == set(), "it is loading"
    assert todo.missing(seen(done=True)) == set(), "workers leave"
    many = replace(todo, world=17, incarnations={f"worker-{rank}": 1 for rank in range(17)})
    assert todo.missing(seen(beating={})) == {(0, 2), (1, 1), (2, 1)}
    assert many.missing(seen(beating={})) == set()


@pytest.mark.parametrize(("stall", "patience"), [(600, 8.0), (300, 8.0), (12, 4.0), (1, 3.0)])
def test_t8_a_job_with_a_short_limit_gives_a_silent_worker_less_time(stall: int, patience: float) -> None:
    """And a result is a reason for the next round, which reports it to the planner."""

    async def story() -> None:
        given: list[float] = []

        class Hasty(Poller):
            async def _health(self, url: str, patience: float) -> bool | None:
                given.append(patience)
                return False

        poll = Poll()
        it = Hasty(lambda _: None, Bus(), OperatorMetrics(), clocks=Clocks(now=lambda: NOW), draw=lambda: 0.5)
        todo = replace(round_of(), stall_seconds=stall, worker=lambda rank, incarnation: (f"u{rank}", "http://x"))
        silent = (Stalled(1, 1, "no heartbeat for 4 s"),)
        await it._check_workers(poll, todo, Progress(taken=NOW, reached=frozenset(), stalled=silent))
        await asyncio.gather(*poll.checks.values())
        assert given == [patience]
        assert poll.hung == {"u1"}
        assert poll.now.is_set()

    asyncio.run(story())


def test_o4_a_worker_that_was_missing_before_it_was_reported_gets_another_health_request() -> None:
    """A coordinator misses a worker after 10 s, and reports it later. The first request ended before the report, so its
    result would end the worker before the limit of its silence."""

    async def story() -> None:
        requests = 0

        class Hasty(Poller):
            async def _health(self, url: str, patience: float) -> bool | None:
                nonlocal requests
                requests += 1
                return False

        poll = Poll()
        it = Hasty(lambda _: None, Bus(), OperatorMetrics(), clocks=Clocks(now=lambda: NOW), draw=lambda: 0.5)
        todo = replace(
            round_of(), world=1, incarnations={"worker-0": 1}, worker=lambda rank, incarnation: (f"u{rank}", "http://x")
        )
        missing = Progress(taken=NOW, reached=frozenset({0}), report=AT)
        reported = replace(missing, stalled=(Stalled(0, 1, "no heartbeat for 22 s"),))
        for number, progress in enumerate((missing, missing, reported, reported)):
            await it._check_workers(poll, todo, progress)
            assert ("u0" in poll.hung) == (number in (1, 3))
            await asyncio.gather(*poll.checks.values())
        assert requests == 2

    asyncio.run(story())


def test_the_history_goes_to_shard_0_alone_and_only_when_something_happened() -> None:
    async def story() -> None:
        zero, one = FakeServer(1, pb.ProgressReply(incarnation=1)), FakeServer(1, pb.ProgressReply(incarnation=1))
        received, metrics = Received(), OperatorMetrics()
        async with serving(zero) as first, serving(one) as second:
            servers = PolledServer(0, 1, "u0", first), PolledServer(1, 1, "u1", second)
            todo = [
                replace(round_of(*servers), record=lambda: "the status", record_id="a", job_seconds=lambda: (3.0, 1.0))
            ]
            it = poller(lambda _: todo[0], received, metrics)
            it.follow(KEY)
            await received.more(2)
            assert {(request.record, request.record_id) for request in zero.asked} == {("the status", "a")}
            zero.reply = pb.ProgressReply(incarnation=1, recorded="a")
            known = len(zero.asked)
            await received.more(len(received.rounds) + 3)
            assert [request.record for request in zero.asked[known + 1 :]] == [""] * len(zero.asked[known + 1 :])
            todo[0] = replace(todo[0], record_id="b")
            known = len(zero.asked)
            await received.more(len(received.rounds) + 2)
            assert "b" in {request.record_id for request in zero.asked[known:]}
            await it.close()
        assert {request.record for request in one.asked} == {""}
        assert {tuple(request.job_seconds) for request in zero.asked} == {(3.0, 1.0)}, "the account is in each request"
        assert {tuple(request.job_seconds) for request in one.asked} == {()}

    asyncio.run(story())


def test_the_id_of_a_record_changes_with_what_happens_and_not_with_progress() -> None:
    status: dict[str, Any] = {"phase": "Running", "step": 1, "conditions": [1], "history": [{"time": "t", "slot": "w"}]}
    before = record_id(status)
    assert record_id({**status, "step": 2, "loss": 0.1}) == before
    assert record_id({}) == record_id({"history": []}) != before
    for change in ({"phase": "Failed"}, {"history": [{"time": "t", "slot": "w", "recovered": "u"}]}, {"history": []}):
        assert record_id({**status, **change}) != before
    assert json.loads(record_of(status)) == {"phase": "Running", "step": 1, "history": status["history"]}
