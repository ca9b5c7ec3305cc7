"""One shard stages gradients, and applies commits in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay._coordination import Rules
from backstay._shard import Admission, ShardRuntime
from backstay._shard._standbys import NoStandbys
from backstay._transport._streams._interfaces import Refusal
from backstay._update import ShardWire
from backstay_rpc.control_pb2 import Done, GradientInfo, NormRequest, Part, Reject, Save

Make = Callable[..., Any]
ALIVE = lambda: True  # noqa: E731


def test_an_update_is_the_mean_of_the_set_in_order_of_rank(kit: SimpleNamespace, make_shard: Make) -> None:
    """T1: the gradients that the commit names, in its order, and no other staged gradient."""
    shard = make_shard()
    for rank, value in ((2, 30.0), (0, 10.0), (1, 20.0)):
        shard.fill(kit.gid(rank), value)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0), kit.gid(2)]))
    shard.coordination.wait_for("applied")
    assert shard.engine.applied == [[10.0, 30.0]]
    assert all((v == 20.0).all() for v in shard.engine.values)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_commits_are_applied_in_order_of_version(
    kit: SimpleNamespace, make_shard: Make, order: tuple[int, ...]
) -> None:
    """T3: early commits wait, repeated ones change nothing."""
    shard = make_shard((4,), mode="Async")
    ids = [kit.gid(0, 0, attempt=0), kit.gid(1, 0, attempt=0), kit.gid(2, 0, attempt=0)]
    for version, gradient in enumerate(ids):
        shard.fill(gradient, float(version + 1))
    for version in order:
        for _ in range(2):
            shard.runtime.deliver(kit.commit(version, [ids[version]]))
    shard.coordination.wait_for("applied", 3)
    assert shard.coordination.of("applied") == [1, 2, 3]
    assert shard.engine.applied == [[1.0], [2.0], [3.0]]
    assert not shard.coordination.of("failed")


def test_t3_a_shard_never_goes_back(kit: SimpleNamespace, make_shard: Make) -> None:
    """Orders for an earlier version, which come again after a broken link, are not kept."""
    shard = make_shard((4,), mode="Async")
    shard.fill(gradient := kit.gid(0, attempt=1), 1.0)
    commit = kit.commit(0, [gradient])
    shard.runtime.deliver(commit)
    shard.coordination.wait_for("applied")
    shard.runtime.deliver(commit)
    shard.runtime.deliver(NormRequest(term=1, version=0, contributions=commit.contributions))
    assert shard.runtime._orders.take(SimpleNamespace(version=0)) is None


def test_a_gap_in_the_commits_waits(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,), mode="Async")
    first, second = kit.gid(0, attempt=1), kit.gid(1, attempt=1)
    shard.fill(first, 1.0)
    shard.fill(second, 2.0)
    shard.runtime.deliver(kit.commit(1, [second]))
    shard.runtime.deliver(NormRequest(term=1, version=0, contributions=kit.commit(0, [first]).contributions))
    assert shard.coordination.wait_for("norm")[0].sum_of_squares == 4.0
    assert shard.engine.applied == []
    shard.runtime.deliver(kit.commit(0, [first]))
    shard.coordination.wait_for("applied", 2)
    assert shard.engine.applied == [[1.0], [2.0]]


@pytest.mark.parametrize("held", ["nothing", "a part", "another version"])
def test_a_commit_of_what_is_not_here_fails_the_shard(kit: SimpleNamespace, make_shard: Make, held: str) -> None:
    """T1: never a partial apply."""
    shard = make_shard((4,))
    shard.fill(kit.gid(1), 1.0)
    if held == "a part":
        shard.runtime.begin(kit.hello(0), Part(contribution=kit.gid(0)))
    wanted = kit.gid(0, 0)
    if held == "another version":
        wanted = kit.gid(1, 0)
        wanted.version = 5
    shard.runtime.deliver(kit.commit(0, [wanted, kit.gid(1)]))
    (why,) = shard.coordination.wait_for("failed")
    assert "version 0 names the gradient of rank" in why
    assert ("holds only in part" if held == "a part" else "does not hold") in why
    assert shard.engine.applied == []
    with pytest.raises(Refusal, match="cannot continue"):
        shard.runtime.answer(None, 0, ALIVE)


def test_a_commit_that_names_a_gradient_twice_fails_the_shard(kit: SimpleNamespace, make_shard: Make) -> None:
    """T3."""
    shard = make_shard((4,))
    shard.fill(kit.gid(0), 1.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0), kit.gid(0)]))
    assert "twice" in shard.coordination.wait_for("failed")[0]
    assert shard.engine.applied == []


def test_an_engine_that_fails_fails_the_shard_and_the_waiting_streams(
    kit: SimpleNamespace, make_shard: Make, background: Any
) -> None:
    """T8."""
    shard = make_shard((4,))
    incoming = shard.fill(kit.gid(0), 1.0)
    waiting = background(lambda: shard.runtime.answer(incoming, 0, ALIVE))
    shard.engine.fail = ValueError("out of memory")
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    assert "out of memory" in shard.coordination.wait_for("failed")[0]
    with pytest.raises(Refusal, match="out of memory"):
        waiting.result(kit.wait)


def test_outcomes_in_sync(kit: SimpleNamespace, make_shard: Make) -> None:
    """T2: a contribution after the quorum is late; the answer with the new version contains this outcome."""
    shard = make_shard((4,))
    used, late = shard.fill(kit.gid(0), 1.0), shard.fill(kit.gid(1), 2.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)], world=7))
    for incoming, outcome in ((used, kit.reasons.REJECT_UNSPECIFIED), (late, kit.reasons.LATE)):
        answer = shard.runtime.answer(incoming, 0, ALIVE)
        assert (answer.version, answer.outcome, answer.world, answer.term) == (1, outcome, 7, 1)
        assert (answer.block(0) == 1.0).all()


@pytest.mark.parametrize("skip", [False, True])
def test_t4_a_worker_that_lost_its_answer_receives_the_outcome(
    kit: SimpleNamespace, make_shard: Make, skip: bool
) -> None:
    """The residual of the newest update follows with the parameters. Another process of the rank has another one."""
    shard = make_shard((4,))
    for rank in range(2):
        shard.fill(kit.gid(rank), 1.0)
    again = shard.runtime.begin(kit.hello(0), Part(contribution=kit.gid(0, attempt=7)))
    shard.runtime.fence({"worker-1": 2})
    other = shard.runtime.begin(kit.hello(1, incarnation=2), Part(contribution=kit.gid(1, incarnation=2)))

    def pulled(rank: int, version: int, incarnation: int = 1) -> tuple[int, int]:
        peer = kit.hello(rank, incarnation=incarnation).peer
        answer = shard.runtime.answer(None, version, ALIVE, peer)
        return answer.outcome, answer.next_key_step

    assert pulled(0, 0) == (kit.reasons.REJECT_UNSPECIFIED, 0), "there is no update yet"
    shard.runtime.deliver(kit.commit(0, [kit.gid(0), kit.gid(1)], skip=skip))
    outcome = kit.reasons.SKIPPED if skip else kit.reasons.REJECT_UNSPECIFIED
    assert pulled(0, 1) == (outcome, 1)
    assert pulled(2, 1) == pulled(1, 1, incarnation=2) == (kit.reasons.REJECT_UNSPECIFIED, 0)
    assert shard.runtime.answer(again, 0, ALIVE).outcome == outcome
    assert shard.runtime.answer(other, 0, ALIVE).outcome == kit.reasons.LATE
    shard.fill(kit.gid(2, 1), 1.0)
    shard.runtime.deliver(kit.commit(1, [kit.gid(2, 1)]))
    assert pulled(0, 2) == (kit.reasons.REJECT_UNSPECIFIED, 0), "the newest update has none of rank 0"
    assert pulled(2, 2) == (kit.reasons.REJECT_UNSPECIFIED, 2)


def test_a_push_that_comes_after_its_version_is_lost_and_late(kit: SimpleNamespace, make_shard: Make) -> None:
    """T1, T2: it never counts, and is reported once."""
    shard = make_shard((4,))
    slow = shard.runtime.begin(kit.hello(1), Part(contribution=kit.gid(1)))
    assert not shard.runtime.moved_on(slow)
    shard.fill(kit.gid(0), 1.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    shard.coordination.wait_for("applied")
    assert shard.runtime.moved_on(slow)
    shard.runtime.complete(slow, GradientInfo())
    shard.runtime.lose(slow)
    assert shard.coordination.of("lost") == [kit.gid(1)]
    assert shard.coordination.of("staged") == [kit.gid(0)]
    assert shard.runtime.answer(slow, 0, ALIVE).outcome == kit.reasons.LATE


def test_outcomes_in_async(kit: SimpleNamespace, make_shard: Make) -> None:
    """T5: the answer to a refused gradient has the reason, the newest parameters, and the step to compute again."""
    shard = make_shard((4,), mode="Async")
    stale, used = shard.fill(kit.gid(0), 1.0), shard.fill(kit.gid(1), 2.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(1)]))
    shard.runtime.deliver(Reject(id=kit.gid(0), reason=kit.reasons.STALE, next_key_step=9))
    answer = shard.runtime.answer(used, 0, ALIVE)
    assert (answer.version, answer.outcome) == (1, kit.reasons.REJECT_UNSPECIFIED)
    answer = shard.runtime.answer(stale, 0, ALIVE)
    assert (answer.outcome, answer.next_key_step) == (kit.reasons.STALE, 9)
    assert shard.engine.applied == [[2.0]]


def test_async_keeps_what_is_not_decided(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,), mode="Async")
    first, second = kit.gid(0, attempt=1), kit.gid(1, attempt=1)
    shard.fill(first, 1.0)
    shard.fill(second, 2.0)
    shard.runtime.deliver(kit.commit(0, [first]))
    shard.coordination.wait_for("applied")
    shard.runtime.deliver(kit.commit(1, [second]))
    shard.coordination.wait_for("applied", 2)
    assert shard.engine.applied == [[1.0], [2.0]]


def test_weights_go_to_the_engine(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,), mode="Async")
    shard.fill(kit.gid(0), 8.0)
    decision = kit.commit(0, [kit.gid(0)])
    decision.contributions[0].weight = 0.25
    shard.runtime.deliver(decision)
    shard.coordination.wait_for("applied")
    assert shard.engine.weights == [[0.25]]
    assert (shard.engine.values[0] == 2.0).all()


def test_skip_moves_the_version_and_nothing_else(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,))
    incoming = shard.fill(kit.gid(0), np.nan)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)], skip=True))
    answer = shard.runtime.answer(incoming, 0, ALIVE)
    assert (answer.version, answer.outcome) == (1, kit.reasons.SKIPPED)
    assert (answer.block(0) == 0.0).all()
    assert shard.engine.applied == []


def test_a_snapshot_is_of_the_requested_version(kit: SimpleNamespace, make_shard: Make) -> None:
    """T7: taken before the next update, even when that is queued already."""
    shard = make_shard((2,), mode="Async")
    ids = [kit.gid(rank, attempt=1) for rank in range(3)]
    for gradient in ids:
        shard.fill(gradient, 1.0)
    shard.engine.gate.clear()
    shard.runtime.deliver(kit.commit(0, [ids[0]], checkpoint=True))
    shard.runtime.deliver(kit.commit(1, [ids[1]]))
    shard.runtime.deliver(Save(term=1, version=2))
    shard.runtime.deliver(kit.commit(2, [ids[2]]))
    shard.engine.gate.set()
    shard.coordination.wait_for("applied", 3)
    assert [(term, version, snapshot[0], snapshot[1][0][0]) for snapshot, term, version in shard.saved] == [
        (1, 1, 1, 1.0),
        (1, 2, 2, 2.0),
    ]


def test_at_most_two_gradients_a_rank(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,))
    for attempt in (1, 2):
        shard.fill(kit.gid(0, attempt=attempt), 1.0)
    with pytest.raises(Refusal, match="rank 0 has 2 contributions") as refusal:
        shard.fill(kit.gid(0, attempt=3), 1.0)
    assert refusal.value.code == "RESOURCE_EXHAUSTED"
    shard.fill(kit.gid(1), 1.0)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0, attempt=2), kit.gid(1)]))
    shard.coordination.wait_for("applied")
    shard.fill(kit.gid(0, 1, attempt=3), 1.0)


def test_the_same_attempt_twice_is_refused(kit: SimpleNamespace, make_shard: Make) -> None:
    """T3."""
    shard = make_shard((4,))
    shard.fill(kit.gid(0), 1.0)
    with pytest.raises(Refusal, match="is here already"):
        shard.fill(kit.gid(0), 1.0)


@pytest.mark.parametrize(
    ("change", "code", "why"),
    [
        ({"shard": 3}, "FAILED_PRECONDITION", "this is shard 0, not shard 3"),
        ({"expected_incarnation": 2}, "FAILED_PRECONDITION", "shard 0 has incarnation 1, not incarnation 2"),
        ({"partition_digest": b"x" * 32}, "INVALID_ARGUMENT", "the digest of worker-0 is 7878787878787878"),
        ({"partition_digest": b""}, "INVALID_ARGUMENT", "the digest of worker-0 is missing"),
        ({"term": 2}, "FAILED_PRECONDITION", "in term 1, not in term 2"),
    ],
)
def test_hellos_that_are_refused(kit: SimpleNamespace, make_shard: Make, change: Any, code: str, why: str) -> None:
    shard = make_shard((4,))
    with pytest.raises(Refusal, match=why) as refusal:
        shard.runtime.admit(kit.hello(0, **change))
    assert refusal.value.code == code
    shard.runtime.admit(kit.hello(0))


def test_an_older_incarnation_is_refused_once_a_newer_was_seen(kit: SimpleNamespace, make_shard: Make) -> None:
    """T6."""
    shard = make_shard((4,))
    shard.runtime.admit(kit.hello(0, incarnation=1))
    shard.runtime.fence({"worker-0": 2})
    shard.runtime.admit(kit.hello(0, incarnation=2))
    for act in (
        lambda: shard.runtime.admit(kit.hello(0, incarnation=1)),
        lambda: shard.runtime.begin(kit.hello(0, incarnation=1), Part(contribution=kit.gid(0))),
    ):
        with pytest.raises(Refusal, match="replaced by incarnation 2") as refusal:
            act()
        assert refusal.value.code == "PERMISSION_DENIED"
    shard.runtime.fence({"worker-1": 4})
    with pytest.raises(Refusal, match="replaced by incarnation 4"):
        shard.runtime.admit(kit.hello(1, incarnation=3))


def test_t6_a_stream_without_a_join_replaces_no_worker(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,))
    for rank, incarnation in ((0, 2), (0, 2**31), (64, 0), (64, 2**31)):
        with pytest.raises(Refusal, match=f"worker-{rank} of incarnation {incarnation} has not joined") as refusal:
            shard.runtime.admit(kit.hello(rank, incarnation=incarnation))
        assert refusal.value.code == "FAILED_PRECONDITION"
    shard.runtime.admit(kit.hello(0, incarnation=1))


@pytest.mark.parametrize(
    ("gradient", "why"),
    [
        ({"rank": 1}, "must be its own"),
        ({"incarnation": 2}, "must be its own"),
        ({"version": 1}, "ahead of shard 0, which is at version 0"),
        ({"term": 9}, "not in term 9"),
    ],
)
def test_gradients_that_are_not_the_callers(
    kit: SimpleNamespace, make_shard: Make, gradient: dict[str, int], why: str
) -> None:
    shard = make_shard((4,))
    with pytest.raises(Refusal, match=why):
        shard.runtime.begin(kit.hello(0), Part(contribution=kit.gid(**gradient)))


def test_a_new_term_drops_everything_of_the_old(kit: SimpleNamespace, make_shard: Make, background: Any) -> None:
    """T6: gradients, decisions and streams of an older term have no effect."""
    shard = make_shard((4,))
    incoming = shard.fill(kit.gid(0), 1.0)
    waiting = background(lambda: shard.runtime.answer(incoming, 0, ALIVE))
    engine = kit.FakeEngine(shard.layout, version=40)
    shard.runtime.reset(2, engine, 3)
    with pytest.raises(Refusal, match="in term 2, not in term 1"):
        waiting.result(kit.wait)
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)]))
    assert shard.runtime.answer(None, 40, ALIVE).version == 40
    shard.runtime.deliver(kit.commit(40, [], skip=True, term=2, world=5))
    answer = shard.runtime.answer(None, 41, ALIVE)
    assert (answer.version, answer.term, answer.world) == (41, 2, 5)
    assert shard.engine.applied == []
    with pytest.raises(ValueError, match="cannot start in term 2"):
        shard.runtime.reset(2, engine, 3)


def test_a_decision_of_a_term_that_did_not_begin_fails_the_shard(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,))
    shard.runtime.deliver(kit.commit(0, [kit.gid(0)], term=3))
    assert "of term 3" in shard.coordination.wait_for("failed")[0]


def test_done_answers_waiting_streams(kit: SimpleNamespace, make_shard: Make, background: Any) -> None:
    """T8."""
    shard = make_shard((4,))
    waiting = background(lambda: shard.runtime.answer(None, 99, ALIVE))
    shard.runtime.deliver(Done(version=0))
    answer = waiting.result(kit.wait)
    assert (answer.version, answer.done) == (0, True)


def test_a_failed_job_refuses_waiting_streams(kit: SimpleNamespace, make_shard: Make, background: Any) -> None:
    """T8."""
    shard = make_shard((4,))
    waiting = background(lambda: shard.runtime.answer(None, 99, ALIVE))
    shard.runtime.deliver(Done(version=0, failed="the loss is not finite"))
    with pytest.raises(Refusal, match="the loss is not finite") as refusal:
        waiting.result(kit.wait)
    assert refusal.value.code == "ABORTED"
    assert not shard.coordination.of("failed")


def test_nothing_waits_for_a_peer_that_is_gone(kit: SimpleNamespace, make_shard: Make) -> None:
    """T8."""
    assert make_shard((4,), timeouts=kit.Timeouts(peer_check=0.01)).runtime.answer(None, 99, lambda: False) is None


def test_closing_refuses_waiting_streams(kit: SimpleNamespace, make_shard: Make, background: Any) -> None:
    """T8: for a version, and for a block of one."""
    shard = make_shard((4,))
    waiting = background(lambda: shard.runtime.answer(None, 99, ALIVE))
    shard.runtime.close("the test stops it")
    with pytest.raises(Refusal, match="the test stops it") as refusal:
        waiting.result(kit.wait)
    assert refusal.value.code == "UNAVAILABLE"
    with pytest.raises(Refusal, match="the test stops it"):
        shard.runtime.admit(kit.hello(0))
    shard.runtime.close()


def test_no_stream_is_answered_before_the_shard_starts(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,), start=False)
    with pytest.raises(Refusal, match="has not started yet") as refusal:
        shard.runtime.admit(kit.hello(0))
    assert refusal.value.code == "UNAVAILABLE"


def test_a_waiting_stream_gets_its_version_even_if_the_next_update_begins_immediately(
    kit: SimpleNamespace, make_shard: Make, background: Any
) -> None:
    shard = make_shard((4,), mode="Async")
    ids = [kit.gid(rank, attempt=1) for rank in range(6)]
    incoming = [shard.fill(gradient, 1.0) for gradient in ids]
    waiting = [background(lambda i=i: shard.runtime.answer(i, 0, ALIVE)) for i in incoming]
    for version, gradient in enumerate(ids):
        shard.runtime.deliver(kit.commit(version, [gradient]))
    for version, future in enumerate(waiting):
        assert future.result(kit.wait).version > version


@pytest.mark.parametrize(
    ("fragments", "count", "before"),
    [
        ((0, 0, 0), 1, [0, 1]),
        ((0,), 1, []),
        ((0, 1), 2, []),
        ((0, 0, 1), 2, [0]),
        ((1, 0, 0, 1), 2, [0, 1]),
        ((0, 1, None), 2, [0, 1]),
        ((0, 0), 2, []),  # fragment 1 is in other shards
    ],
)
def test_t3_t6_no_answer_is_complete_before_the_standby_holds_the_commit(
    kit: SimpleNamespace, make_shard: Make, fragments: tuple[int | None, ...], count: int, before: list[int]
) -> None:
    """Also the answer that brings only one fragment. `before`: the blocks that streams get while the standby waits."""
    computed: list[int] = []
    seen: list[list[int]] = []

    class Held(NoStandbys):
        def send_commit(self, commit: Any) -> Callable[[], None]:
            computed.clear()
            return lambda: seen.append(list(computed))

    blocks = [SimpleNamespace(size=4, dtype=np.float32, fragment=fragment) for fragment in fragments]
    wire = ShardWire.exactly(blocks, count)
    shard = make_shard((4,) * len(blocks), wire=wire, standbys=Held(), start=False)
    block = shard.engine.block

    def compute(b: int) -> np.ndarray:
        computed.append(b)
        return block(b)

    shard.engine.block = compute
    shard.runtime.reset(1, shard.engine, 1)
    shard.runtime.deliver(kit.commit(0, [], skip=True))
    shard.coordination.wait_for("applied")
    assert seen == [before]
    for fragment in range(count):
        answer = {b for b, own in enumerate(fragments) if own in (fragment, None)}
        assert not before or not answer <= set(before)
    assert computed == list(range(len(blocks)))


STEPS = st.lists(st.tuples(st.sampled_from(["begin", "complete", "lose", "commit", "reject"]), st.integers(0, 2)))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(STEPS)
def test_each_gradient_is_reported_exactly_once(kit: SimpleNamespace, steps: list[tuple[str, int]]) -> None:
    """T1: for any order of calls of streams and the coordinator: either staged or lost, once."""
    layout, recorder = kit.Layout(0, (kit.Block(3),)), kit.Recorder()
    engine = kit.FakeEngine(layout)
    runtime = ShardRuntime(
        kit.exact_wire(layout), Admission(0, 1, kit.digest), recorder, Rules("Sync", shards=1, steps=0)
    )
    try:
        runtime.reset(1, engine, 1)
        open_: dict[int, Any] = {}
        complete: list[Any] = []
        begun: list[Any] = []
        for attempt, (what, rank) in enumerate(steps):
            if what == "begin" and rank not in open_:
                gradient = kit.gid(rank, runtime.version, attempt=attempt)
                try:
                    open_[rank] = runtime.begin(kit.hello(rank), Part(contribution=gradient))
                except Refusal:
                    continue
                begun.append(gradient)
            elif what == "complete" and rank in open_:
                incoming = open_.pop(rank)
                runtime.complete(incoming, GradientInfo())
                runtime.lose(incoming)
                if incoming.complete:
                    complete.append(incoming.gradient.id)
            elif what == "lose" and rank in open_:
                runtime.lose(open_.pop(rank))
            elif what == "commit":
                chosen = [g for g in complete if g.rank == rank and g.version == runtime.version][:1]
                if chosen:
                    count = len(recorder.of("applied"))
                    runtime.deliver(kit.commit(runtime.version, chosen))
                    recorder.wait_for("applied", count + 1)
            elif what == "reject" and complete:
                runtime.deliver(Reject(id=complete[0], reason=kit.reasons.DUPLICATE))
                complete = complete[1:]
        for incoming in open_.values():
            runtime.lose(incoming)
        reported = [g.SerializeToString() for g in recorder.of("staged") + recorder.of("lost")]
        assert sorted(reported) == sorted(g.SerializeToString() for g in begun)
        assert not recorder.of("failed")
    finally:
        runtime.close()
