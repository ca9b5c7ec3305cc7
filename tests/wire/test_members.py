"""The members of a rank send and receive their own blocks, and a contribution is all its parts (T1)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay._coordination import Rules
from backstay._shard import Admission, ShardRuntime
from backstay._transport import connect
from backstay._transport._streams._interfaces import Refusal
from backstay._transport._tensors._client import Push
from backstay._transport._tensors._memory import aligned_empty
from backstay._update import ShardWire
from backstay.errors import PeerLost, Refused
from backstay_rpc.control_pb2 import Examine, GradientId, GradientInfo, Hello, Part, Peer, Reject

Make = Callable[..., Any]
ALIVE = lambda: True  # noqa: E731

SENDERS = (0, 1, 1, 2, 0)  # the member of each block
MEMBERS = 3
BIG = 300_000


def wire_of(sizes: Sequence[int], members: int = MEMBERS) -> ShardWire:
    """Blocks of float32."""
    blocks = [SimpleNamespace(size=size, dtype=np.float32) for size in sizes]
    return replace(ShardWire.exactly(blocks), members=members, member_of=tuple(min(s, members - 1) for s in SENDERS))


def hello_of(kit: SimpleNamespace, member: int, rank: int = 0) -> Hello:
    return kit.hello(rank, peer=Peer(role="worker", index=rank, incarnation=1, member=member))


def fill(incoming: Any, value: float) -> None:
    for block in incoming.blocks:
        block.view(np.float32)[:] = value


def begin(kit: SimpleNamespace, shard: Any, member: int, gradient: GradientId, **more: Any) -> Any:
    """Returns a part that begins to arrive; all its elements are 1."""
    part = Part(contribution=gradient, member=member)
    incoming = shard.runtime.begin(hello_of(kit, member, gradient.rank), part, **more)
    fill(incoming, 1.0)
    return incoming


@pytest.fixture
def shard(make_shard: Make) -> Any:
    return make_shard((4, 3, 2, 5, 6), wire=wire_of((4, 3, 2, 5, 6)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(MEMBERS))))
def test_t1_a_contribution_is_staged_when_all_its_parts_are_complete(
    kit: SimpleNamespace, shard: Any, order: tuple[int, ...]
) -> None:
    gradient = kit.gid(0)
    parts = {member: begin(kit, shard, member, gradient) for member in order}
    for member, incoming in parts.items():
        fill(incoming, float(member + 1))
    for member in reversed(order):
        assert not shard.coordination.of("staged")
        shard.runtime.complete(parts[member], GradientInfo(finite=True, examples=8))
    assert shard.coordination.of("staged") == [gradient]
    shard.runtime.deliver(kit.commit(0, [gradient]))
    shard.coordination.wait_for("applied")
    assert [set(value) for value in shard.engine.values] == [{1.0}, {2.0}, {2.0}, {3.0}, {1.0}]
    for incoming in parts.values():
        shard.runtime.lose(incoming)
        assert shard.runtime.answer(incoming, 0, ALIVE).outcome == kit.reasons.REJECT_UNSPECIFIED
    assert not shard.coordination.of("lost")
    assert shard.runtime.memory.taken == 0


@pytest.mark.parametrize("sizes", [(40, 30, 20, 50, 60), (BIG, 30, BIG, 50, BIG)])
def test_t1_each_member_sends_and_receives_its_own_blocks(
    kit: SimpleNamespace, make_shard: Make, stack: ExitStack, background: Any, sizes: tuple[int, ...]
) -> None:
    """Over TCP, in one frame and in many."""
    shard = make_shard(sizes, wire=wire_of(sizes), serve=True)
    shard.coordination.decide = lambda staged: shard.runtime.deliver(kit.commit(staged.id.version, [staged.id]))
    wire = shard.runtime.wire
    carried: list[list[tuple[int, int]]] = [[] for _ in range(MEMBERS)]
    clients = []
    into = [[aligned_empty(one.nbytes) for one in wire.of_member(member).exact] for member in range(MEMBERS)]
    for member in range(MEMBERS):
        client = connect(
            [shard.address],
            [shard.layout],
            [hello_of(kit, member)],
            credentials=kit.credentials,
            mode="Sync",
            wires=[wire.of_member(member)],
            carried=lambda sent, received, at=member: carried[at].append((sent, received)),
        )
        stack.callback(client.close)
        clients.append(client)
        client.exchange_all(None, 0, [into[member]])
    for version in range(3):
        futures = []
        for member in range(MEMBERS):
            blocks = [np.full(size, 10.0 * member + block, np.float32) for block, size in enumerate(sizes)]
            push = Push(kit.gid(0, version), [blocks], lambda: GradientInfo(finite=True, examples=8), member)
            futures.append(background(lambda at=member, push=push: clients[at].exchange_all(push, 0, [into[at]])))
        for future in futures:
            assert future.result(kit.wait).version == version + 1
    wanted = [3.0 * (10.0 * sender + block) for block, sender in enumerate(SENDERS)]
    for member in range(MEMBERS):
        held = {block for block, sender in enumerate(SENDERS) if sender == member}
        for block in held:
            assert set(into[member][block].view(np.float32)) == {wanted[block]}
        counts = [sum(count) for count in zip(*carried[member], strict=True)]
        assert counts == [times * 4 * sum(sizes[block] for block in held) for times in (3, 4)]


@pytest.mark.parametrize("waiting", [True, False])
def test_t1_a_part_that_is_lost_loses_the_contribution_and_ends_the_other_streams(
    kit: SimpleNamespace, shard: Any, background: Any, waiting: bool
) -> None:
    """The memory is free when no stream writes into it any more."""
    gradient = kit.gid(0)
    first, second = begin(kit, shard, 0, gradient), begin(kit, shard, 1, gradient)
    shard.runtime.complete(first, GradientInfo())
    answer = background(lambda: shard.runtime.answer(first, 0, ALIVE)) if waiting else None
    third = begin(kit, shard, 2, gradient)
    shard.runtime.lose(second)
    assert shard.coordination.of("lost") == [gradient]
    assert shard.runtime.moved_on(third)
    assert shard.runtime.memory.taken == 1
    fill(third, 7.0)
    shard.runtime.complete(third, GradientInfo())
    assert shard.runtime.memory.taken == 0
    if answer is None:
        answer = background(lambda: shard.runtime.answer(first, 0, ALIVE))
    with pytest.raises(Refusal, match=r"the part of another member in the gradient of rank 0 .* was lost") as refusal:
        answer.result(kit.wait)
    assert refusal.value.code == "FAILED_PRECONDITION", "the worker joins again"
    assert shard.coordination.of("lost") == [gradient]
    assert not shard.coordination.of("staged")
    again = kit.gid(0, attempt=9)
    for member in range(MEMBERS):
        shard.runtime.complete(begin(kit, shard, member, again), GradientInfo())
    assert shard.coordination.of("staged") == [again]


def test_t2_parts_that_come_after_the_update_are_late(kit: SimpleNamespace, shard: Any) -> None:
    """A rank whose last part is missing when the update is made does not count in it."""
    late, used = kit.gid(1), kit.gid(0)
    parts = [begin(kit, shard, member, late) for member in (0, 1)]
    shard.runtime.complete(parts[0], GradientInfo())
    for member in range(MEMBERS):
        shard.runtime.complete(begin(kit, shard, member, used), GradientInfo())
    shard.runtime.deliver(kit.commit(0, [used]))
    shard.coordination.wait_for("applied")
    parts.append(begin(kit, shard, 2, late))
    assert shard.runtime.moved_on(parts[2])
    for incoming in parts:
        shard.runtime.lose(incoming)
        answer = shard.runtime.answer(incoming, 0, ALIVE)
        assert (answer.version, answer.outcome) == (1, kit.reasons.LATE)
    assert shard.coordination.of("lost") == [late]
    assert shard.runtime.memory.taken == 0


def test_t8_a_part_that_begins_after_the_others_were_rejected_is_answered(
    kit: SimpleNamespace, make_shard: Make
) -> None:
    """The record ends with the stream of the part that is here. A new one would wait for parts that have come."""
    timeouts = kit.Timeouts(peer_check=0.01)
    shard = make_shard((4, 3, 2, 5, 6), wire=wire_of((4, 3, 2, 5, 6)), mode="Async", timeouts=timeouts)
    gradient = kit.gid(0)
    found = []
    for member in range(MEMBERS):
        incoming = begin(kit, shard, member, gradient)
        if member == 0:
            shard.runtime.deliver(Reject(id=gradient, reason=kit.reasons.STALE, next_key_step=9))
        assert shard.runtime.moved_on(incoming)
        shard.runtime.complete(incoming, GradientInfo())
        found.append(shard.runtime.answer(incoming, 0, lambda: False))
    assert [(answer.outcome, answer.next_key_step) for answer in found] == [(kit.reasons.STALE, 9)] * MEMBERS
    assert not shard.coordination.of("staged")
    assert shard.runtime.memory.taken == 0


def test_a_part_whose_member_is_gone_loses_the_contribution(kit: SimpleNamespace, make_shard: Make) -> None:
    """T8: the stream that waits for the answer ends, and with it the memory."""
    timeouts = kit.Timeouts(peer_check=0.01)
    shard = make_shard((4, 3, 2, 5, 6), wire=wire_of((4, 3, 2, 5, 6)), timeouts=timeouts)
    incoming = begin(kit, shard, 1, kit.gid(0))
    shard.runtime.complete(incoming, GradientInfo())
    assert shard.runtime.answer(incoming, 0, lambda: False) is None
    assert shard.coordination.of("lost") == [kit.gid(0)]
    assert shard.runtime.memory.taken == 0


def test_t8_a_part_that_never_begins_is_lost_while_others_wait_for_its_memory(
    kit: SimpleNamespace, make_shard: Make
) -> None:
    timeouts = kit.Timeouts(peer_check=0.0)
    shard = make_shard((4, 3, 2, 5, 6), wire=wire_of((4, 3, 2, 5, 6)), timeouts=timeouts)
    gradient, examined = kit.gid(0), []
    for member in (0, 1):
        incoming = begin(kit, shard, member, gradient)
        incoming.examine = lambda at=member: examined.append(at)
    for check in range(3):
        assert shard.coordination.of("lost") == [], check
        shard.runtime.deliver(Examine(id=gradient))
    assert shard.coordination.of("lost") == [gradient]
    assert examined == [0, 1] * 3


def test_members_disagree_about_a_contribution_and_the_job_fails(kit: SimpleNamespace, shard: Any) -> None:
    """The summaries of members are of one computation, so they cannot differ."""
    for member in range(MEMBERS):
        incoming = begin(kit, shard, member, kit.gid(0))
        shard.runtime.complete(incoming, GradientInfo(finite=member != 1, examples=8))
    (why,) = shard.coordination.wait_for("failed")
    assert not shard.coordination.of("staged")
    assert "the members of rank 0 disagree about one gradient: member 0 reports finite=True and 8 examples" in why
    assert "member 1 reports finite=False and 8" in why


def test_the_traffic_of_a_contribution_is_that_of_all_members(kit: SimpleNamespace, shard: Any) -> None:
    """Each member counts its own bytes."""
    gradient = kit.gid(0)
    parts = [begin(kit, shard, member, gradient) for member in range(MEMBERS)]
    for member, incoming in enumerate(parts):
        shard.runtime.complete(
            incoming, GradientInfo(finite=True, examples=8, carried=10**member, exact=2 * 10**member)
        )
    info = parts[1].gradient.info
    assert (info.finite, info.examples, info.carried, info.exact) == (True, 8, 111, 222)


def test_parts_that_are_refused(kit: SimpleNamespace, shard: Any) -> None:
    gradient = kit.gid(0)
    with pytest.raises(Refusal, match="worker-0 has no member 3: the members of a rank are 0 to 2"):
        shard.runtime.admit(hello_of(kit, 3))
    shard.runtime.admit(hello_of(kit, 2))
    with pytest.raises(Refusal, match="worker 0, member 1, of incarnation 1 pushes the gradient"):
        shard.runtime.begin(hello_of(kit, 1), Part(contribution=gradient, member=2))
    begin(kit, shard, 1, gradient)
    with pytest.raises(Refusal, match="is here already"):
        begin(kit, shard, 1, gradient)
    begin(kit, shard, 2, gradient)
    for attempt in (6, 7):
        act = lambda attempt=attempt: begin(kit, shard, 0, kit.gid(0, attempt=attempt))  # noqa: E731
        if attempt == 6:
            act()
        else:
            with pytest.raises(Refusal, match="rank 0 has 2 contributions here"):
                act()


def test_a_rank_of_one_pod_has_no_other_members(kit: SimpleNamespace, make_shard: Make) -> None:
    shard = make_shard((4,))
    with pytest.raises(Refusal, match="worker-0 has no member 1: the members of a rank are 0 to 0"):
        shard.runtime.admit(hello_of(kit, 1))


def test_a_stream_receives_the_blocks_of_its_member_only(
    kit: SimpleNamespace, make_shard: Make, stack: ExitStack
) -> None:
    """The server selects by the stream's own name, and not by what a request says."""
    sizes = (40, 30, 20, 50, 60)
    shard = make_shard(sizes, wire=wire_of(sizes), serve=True)
    client = connect(
        [shard.address], [shard.layout], [hello_of(kit, 1)], credentials=kit.credentials, mode="Sync"
    )  # it expects the blocks of all members
    stack.callback(client.close)
    with pytest.raises((PeerLost, Refused), match="bytes"):
        client.exchange_all(None, 0, [shard.buffers()])


def test_no_member_waits_for_memory_that_its_rank_has(kit: SimpleNamespace, make_shard: Make, background: Any) -> None:
    """T8: only a few of many ranks have memory. A member that waits begins as soon as another of its rank does."""
    rules = Rules("Sync", shards=1, steps=0)
    shard = make_shard((4, 3, 2, 5, 6), wire=wire_of((4, 3, 2, 5, 6)), rules=rules, world=40)
    limit = shard.runtime.memory.limit(40)
    assert 0 < limit < 30
    held = [[begin(kit, shard, 0, kit.gid(rank), alive=ALIVE)] for rank in range(limit)]
    waits = [background(lambda at=member: begin(kit, shard, at, kit.gid(39), alive=ALIVE)) for member in (0, 1)]
    for rank, parts in enumerate(held):
        parts.append(begin(kit, shard, 1, kit.gid(rank), alive=ALIVE))
    assert shard.runtime.memory.taken == limit
    assert not any(future.done() for future in waits)
    for part in held[-1]:  # what is lost has memory while a stream may write into it
        assert shard.runtime.memory.taken == limit
        shard.runtime.lose(part)
    assert {id(future.result(kit.wait).gradient) for future in waits} == {id(waits[0].result().gradient)}
    assert shard.runtime.memory.taken == limit


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "begin", "complete", "complete", "lose", "answer", "commit", "reject"]),
        st.integers(0, 2),
        st.integers(0, 1),
    ),
    max_size=40,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS)
def test_t1_each_contribution_is_reported_once_in_any_order_of_its_parts(
    kit: SimpleNamespace, steps: list[tuple[str, int, int]]
) -> None:
    """For any order of calls, it is staged once or lost, and never both; then its memory is free.

    A part that begins after the others were lost is lost too.
    """
    sizes, recorder = (4, 3, 2, 5, 6), kit.Recorder()
    engine = kit.FakeEngine(kit.Layout(0, tuple(kit.Block(size) for size in sizes)))
    rules = Rules("Sync", shards=1, steps=0, timeouts=kit.Timeouts(peer_check=0.001))
    runtime = ShardRuntime(wire_of(sizes, 2), Admission(0, 1, kit.digest), recorder, rules)
    runtime.fence({f"worker-{rank}": 1 for rank in range(3)})

    def leave(part: Any) -> None:
        """The stream of a complete part waits for the answer, and its worker disconnects."""
        try:
            runtime.answer(part, 0, lambda: False)
        except Refusal as refusal:
            assert "the part of another member" in str(refusal)  # noqa: PT017  # most calls raise nothing

    try:
        runtime.reset(1, engine, 3)
        open_: dict[tuple[int, int], Any] = {}
        begun: dict[int, GradientId] = {}
        done: list[Any] = []
        for attempt, (what, rank, member) in enumerate(steps):
            key = rank, member
            if what == "begin" and key not in open_:
                gradient = begun.get(rank, kit.gid(rank, runtime.version, attempt=attempt))
                try:
                    open_[key] = begin(kit, SimpleNamespace(runtime=runtime), member, gradient)
                except Refusal:
                    begun.pop(rank, None)  # the worker names another attempt
                    continue
                begun[rank] = gradient
            elif what == "complete" and key in open_:
                part = open_.pop(key)
                runtime.complete(part, GradientInfo(finite=True, examples=1))
                runtime.lose(part)
                done.append(part)
            elif what == "lose" and key in open_:
                runtime.lose(open_.pop(key))
            elif what == "answer" and done:
                leave(done.pop())
            elif what in ("commit", "reject"):
                ready = [g for g in runtime._gradients if g.complete and g.id.version == runtime.version]
                if ready and what == "reject":
                    runtime.deliver(Reject(id=ready[0].id, reason=kit.reasons.DUPLICATE))
                elif ready:
                    count = len(recorder.of("applied"))
                    runtime.deliver(kit.commit(runtime.version, [ready[0].id]))
                    recorder.wait_for("applied", count + 1)
        for part in open_.values():
            runtime.lose(part)
        for part in done:
            leave(part)
        staged, lost = ([gradient.attempt for gradient in recorder.of(kind)] for kind in ("staged", "lost"))
        assert len(set(staged)) == len(staged)
        assert not set(staged) & set(lost)
        assert not recorder.of("failed")
        held = list(runtime._gradients)
        assert all(gradient.complete for gradient in held)
        assert runtime.memory.taken == len(held)
    finally:
        runtime.close()
