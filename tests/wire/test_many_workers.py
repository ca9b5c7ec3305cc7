"""T1, T3, T8: a shard that does not hold the contributions of all workers at the same time."""

from __future__ import annotations

import itertools
import threading
from random import Random

import numpy as np
import pytest
from between import until

from backstay._coordination import MODES, Coordinator, CoordinatorState, Rules, Send, ServerPosition
from backstay._shard._credits import Credits
from backstay._timeouts import Timeouts
from backstay._transport._streams._tcp import ClientStream
from backstay._transport._streams.frames import kind_of
from backstay._transport._tensors._client import Push
from backstay._transport._tensors._server import QuietPushes
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import (
    Contribution,
    Examine,
    Frame,
    Gather,
    GradientInfo,
    Part,
    PushBegin,
    Reject,
    RejectReason,
)

BLOCKS = (300_000, 7)  # more than one frame


class Driven:
    """A coordinator whose shards are in this process; reports come from any thread."""

    def __init__(self, rules: Rules, world: int) -> None:
        self.coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=world))
        self.lock = threading.RLock()
        self.shards = []
        self.late: list[int] = []

    def attach(self, shards) -> None:
        self.shards = shards
        for number, shard in enumerate(shards):
            shard.coordination.report = lambda report, number=number: self.report(number, report)
        for number in range(len(shards)):
            self.carry_out(self.coordinator.hello(0.0, ServerPosition(number, 1, 0)))

    def report(self, shard: int, report) -> None:
        with self.lock:
            self.carry_out(self.coordinator.report(0.0, shard, report))

    def carry_out(self, decisions) -> None:
        for decision in decisions:
            if isinstance(decision, Send):
                for shard in self.shards if decision.shard is None else [self.shards[decision.shard]]:
                    shard.runtime.deliver(decision.message)


def push_all(kit, dial, background, shards, mode: str, ranks, attempt: int = 1, *, again: bool = False) -> list:
    """Push the number plus 1 of every rank once, each in its own thread. Returns the answers.

    Args:
        again: as a worker does, a rank whose connection is closed connects again, and sends the same contribution.
    """

    # Before one of them pushes: with backups, a thread that begins late would be alone in the next version.
    began = shards[0].engine.version

    def push(rank: int):
        for number in itertools.count(attempt):
            try:
                return push_once(rank, number)
            except PeerLost:
                if not again:
                    raise
        raise AssertionError

    def push_once(rank: int, number: int):
        client = dial(*shards, rank=rank, mode=mode)
        into = [shard.buffers() for shard in shards]
        pulled = client.exchange_all(None, 0, into).version
        version = began if mode == "Sync" and number == attempt else pulled
        gradient = kit.gid(rank, version, attempt=number)
        gradient.key_step = version if mode == "Sync" else 0
        blocks = [shard.gradient(1.0 + rank) for shard in shards]
        return client.exchange_all(Push(gradient, blocks, lambda: GradientInfo(finite=True, examples=1)), 0, into)

    return [future.result(timeout=kit.wait) for future in [background(lambda rank=rank: push(rank)) for rank in ranks]]


@pytest.mark.parametrize("shards", [1, 2])
def test_t1_contributions_are_added_up_as_they_complete(kit, make_shard, dial, background, shards: int) -> None:
    """The update is the mean of all of them, although the shard never holds more than a few."""
    world = 8
    rules = Rules(mode="Sync", shards=shards, steps=10, held=1)
    made = [make_shard(BLOCKS, number=number, serve=True, rules=rules, world=world) for number in range(shards)]
    Driven(rules, world).attach(made)
    order = list(range(world))
    Random(shards).shuffle(order)
    answers = push_all(kit, dial, background, made, "Sync", order)
    assert {answer.version for answer in answers} == {1}
    assert not [answer.outcome for answer in answers if answer.outcome]
    for shard in made:
        assert np.all(shard.engine.values[0] == np.mean([1.0 + rank for rank in range(world)]))
    assert made[0].runtime.memory.most() <= rules.held + 4, "shard 0 decides it for all"


@pytest.mark.parametrize("small", [(7,), ()])
def test_t8_only_the_other_shards_have_large_parts(kit, make_shard, dial, background, small: tuple[int, ...]) -> None:
    """Shard 0 has little of a fragment, or nothing of it. It gives memory for the parts of the others."""
    rules = Rules(mode="Sync", shards=2, steps=10, held=1)
    made = [
        make_shard(sizes, number=number, serve=True, rules=rules, world=8)
        for number, sizes in enumerate([small, BLOCKS])
    ]
    Driven(rules, 8).attach(made)
    answers = push_all(kit, dial, background, made, "Sync", range(7, -1, -1))
    assert {answer.version for answer in answers} == {1}
    assert np.all(made[1].engine.values[0] == np.mean([1.0 + rank for rank in range(8)]))
    assert made[0].runtime.memory.most() <= rules.held + 4


def test_t2_a_rank_within_the_backups_holds_nothing_up(kit, make_shard, dial, background) -> None:
    """Ranks 0 and 1 never send. The others do not wait for them."""
    rules = Rules(mode="Sync", shards=1, steps=10, held=4, backups=2)
    shard = make_shard(BLOCKS, serve=True, rules=rules, world=8)
    Driven(rules, 8).attach([shard])
    answers = push_all(kit, dial, background, [shard], "Sync", range(2, 8))
    assert {answer.version for answer in answers} == {1}
    assert np.all(shard.engine.values[0] == np.mean([1.0 + rank for rank in range(2, 8)]))
    assert shard.runtime.memory.most() <= rules.held + 2


def test_async_contributions_wait_for_memory(kit, make_shard, dial, background) -> None:
    rules = Rules(mode="Async", shards=2, steps=100, held=1)
    made = [make_shard(BLOCKS, number=number, mode="Async", serve=True, rules=rules, world=7) for number in range(2)]
    Driven(rules, 7).attach(made)
    answers = push_all(kit, dial, background, made, "Async", range(7))
    assert not [answer.outcome for answer in answers if answer.outcome]
    for shard in made:
        assert shard.engine.version == 7
    assert made[0].runtime.memory.most() <= rules.held + 1, "one is applied while the next is received"


def test_t8_pushes_that_send_nothing_hold_no_memory_that_others_need(kit, make_shard, dial, background, stack) -> None:
    """Both pushes that have the memory stop, as those of workers that are stopped. Later they are sent again."""
    rules = Rules(mode="Async", shards=1, steps=100, held=2)
    shard = make_shard(BLOCKS, mode="Async", serve=True, rules=rules, world=5, timeouts=kit.Timeouts(peer_check=0.05))
    Driven(rules, 5).attach([shard])
    stopped = [ClientStream(shard.address, kit.hello(rank), kit.credentials) for rank in range(2)]
    for rank, end in enumerate(stopped):
        stack.callback(end.close)
        part = Part(contribution=kit.gid(rank), shard=0)
        end.write(Frame(push_begin=PushBegin(part=part, bytes=shard.layout.nbytes, ask=True)))
        assert kind_of(end.read()[0]) == "received"
    # On a busy machine, a push that continues may look like one that has stopped.
    push_all(kit, dial, background, [shard], "Async", range(2, 5), again=True)
    assert shard.engine.version == 3
    for end in stopped:
        with pytest.raises(PeerLost):
            end.read()
    push_all(kit, dial, background, [shard], "Async", range(2), attempt=2, again=True)
    assert shard.engine.version == 5
    assert sorted(first for (first,) in shard.engine.applied) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("begun", [True, False])
def test_t8_pushes_that_stop_on_their_way_to_another_shard_hold_no_memory_that_others_need(
    kit, make_shard, dial, background, stack, begun: bool
) -> None:
    """Shard 0 has all of them, and shard 1 a part or nothing. They kept the memory of shard 0 until their workers were
    missed, after 10 s."""
    rules = Rules(mode="Async", shards=2, steps=100, held=2)
    times = kit.Timeouts(peer_check=0.05)
    made = [
        make_shard(BLOCKS, number=number, mode="Async", serve=True, rules=rules, world=5, timeouts=times)
        for number in range(2)
    ]
    Driven(rules, 5).attach(made)
    for rank in range(2):
        made[0].fill(kit.gid(rank, attempt=1), 99.0)
        if begun:
            end = ClientStream(made[1].address, kit.hello(rank, shard=1), kit.credentials)
            stack.callback(end.close)
            part = Part(contribution=kit.gid(rank, attempt=1), shard=1)
            end.write(Frame(push_begin=PushBegin(part=part, bytes=made[1].layout.nbytes)))
    push_all(kit, dial, background, made, "Async", range(2, 5), attempt=2, again=True)
    push_all(kit, dial, background, made, "Async", range(2), attempt=2, again=True)
    for shard in made:
        assert sorted(first for (first,) in shard.engine.applied) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("mode", ["Async", "Sync"])
def test_t8_a_later_attempt_does_not_wait_for_the_memory_of_an_earlier_one(
    kit, make_shard, dial, background, mode: str
) -> None:
    """Shard 1 was lost while shard 0 had the first attempts completely: so much that no other push may begin."""
    backups = 2 if mode == "Sync" else 0
    rules = Rules(mode=mode, shards=2, steps=100, held=2, backups=backups)
    made = [make_shard(BLOCKS, number=number, mode=mode, serve=True, rules=rules, world=8) for number in range(2)]
    Driven(rules, 8).attach(made)
    orphans = made[0].runtime.memory.limit(8)
    for rank in range(orphans):
        made[0].fill(kit.gid(rank, attempt=1), 99.0)
    push_all(kit, dial, background, made, mode, range(8), attempt=2)
    for shard in made:
        assert 99.0 not in {value for values in shard.engine.applied for value in values}
    assert made[0].engine.version == made[1].engine.version == (8 if mode == "Async" else 1)


class FakeStream:
    """The end of a push. `arrived` has the number of bytes that have arrived at each check."""

    def __init__(self, *received: int | None) -> None:
        self._received = iter(received)
        self.cuts = 0

    def received(self) -> int | None:
        return next(self._received)

    def cut(self) -> None:
        self.cuts += 1


@pytest.mark.parametrize(
    ("received", "cut"),
    [([5, 5, 5, 5], True), ([5, 5, 6, 6], False), ([5, 5, 5, 6], False), ([5, 6, 7, 8], False), ([None] * 4, False)],
)
def test_a_push_is_ended_after_checks_without_a_byte(received: list[int | None], cut: bool) -> None:
    """A slow push continues, and so does one of which the system does not report the bytes."""
    pushes, stream = QuietPushes(interval=0.0), FakeStream(*received)
    with pushes.receiving(stream, 0):
        pushes.check()  # nothing waits
        with pushes.waiting():
            for _ in received:
                pushes.check()
        assert bool(stream.cuts) == cut
    with pushes.waiting():
        pushes.check()  # the push has ended
    other = FakeStream(*received)
    with pushes.receiving(other, 1) as examine:  # for another shard, whose memory is waited for
        for _ in received:
            examine()
        assert bool(other.cuts) == cut
    examine()


@pytest.mark.parametrize(("interval", "lost"), [(0.0, 1), (600.0, 0)])
def test_t8_examinations_that_waited_while_the_server_was_stopped_count_once(
    kit, make_shard, interval: float, lost: int
) -> None:
    """A contribution of which nothing came in several intervals is lost, and not after several messages together."""
    shard = make_shard((8,), timeouts=Timeouts(peer_check=interval))
    for _ in range(5):
        shard.runtime.deliver(Examine(id=kit.gid(3)))
    assert shard.coordination.of("lost") == [kit.gid(3)] * lost


def test_t3_a_sum_is_void_when_one_of_its_contributions_is_taken_back(kit, make_shard) -> None:
    """The contributions of another round are added up instead, and no other is part of the update."""
    rules = Rules(mode="Sync", shards=1, steps=10, held=1)
    shard = make_shard((8,), rules=rules, world=5)

    def gather(number: int, attempt: int) -> list[Contribution]:
        ids = [kit.gid(rank, attempt=attempt) for rank in range(4)]
        for rank, gradient in enumerate(ids):
            shard.fill(gradient, 10.0 * attempt + rank)
        contributions = [Contribution(id=gradient, weight=1.0) for gradient in ids]
        shard.runtime.deliver(Gather(term=1, version=0, round=number, index=0, contributions=contributions))
        until(lambda: not shard.runtime.memory.taken)
        return contributions

    for contribution in gather(1, 1):
        shard.runtime.deliver(Reject(id=contribution.id, reason=RejectReason.ABANDONED))
    again = gather(2, 2)
    shard.fill(kit.gid(4, attempt=2), 24.0)
    shard.runtime.deliver(kit.commit(0, [*(one.id for one in again), kit.gid(4, attempt=2)]))
    shard.coordination.wait_for("applied")
    assert np.all(shard.engine.values[0] == np.mean([20.0, 21.0, 22.0, 23.0, 24.0]))


def test_a_commit_without_a_contribution_that_was_added_up_fails_the_shard(kit, make_shard) -> None:
    rules = Rules(mode="Sync", shards=1, steps=10, held=1)
    shard = make_shard((8,), rules=rules, world=5)
    ids = [kit.gid(rank) for rank in range(4)]
    for gradient in ids:
        shard.fill(gradient, 1.0)
    contributions = [Contribution(id=gradient, weight=1.0) for gradient in ids]
    shard.runtime.deliver(Gather(term=1, version=0, round=1, contributions=contributions))
    shard.runtime.deliver(kit.commit(0, ids[:3]))
    shard.coordination.wait_for("failed")
    assert shard.engine.version == 0


@pytest.mark.parametrize("backups", [0, 2])
def test_t8_credits_never_stop(backups: int) -> None:
    """Pushes come in any order. Without backups, those that can be added up are always among the first."""
    for seed in range(30):
        random = Random(seed)
        world, rules = 13, Rules(mode="Sync", shards=1, steps=1, held=4 if backups else 2, backups=backups)
        turns_of = Credits(MODES["Sync"], rules, threading.Lock())
        turns_of._lock.acquire()
        turns_of.begin(world)
        order = list(range(world))
        random.shuffle(order)
        turns, held, summed, most = {}, [], set(), 0
        while len(summed) < world // 4 * 4 - (4 if backups else 0):
            if order:
                rank = order.pop()
                turns[rank] = turns_of.enter(rank)
            for rank in [rank for rank, turn in turns.items() if turn.granted]:
                turns_of.take()
                turns_of.leave(turns.pop(rank))
                held.append(rank)
            most = max(most, turns_of.taken)
            groups = [held[:4]] if backups else [list(range(at, at + 4)) for at in range(0, world, 4)]
            ready = next((group for group in groups if len(group) == 4 and set(group) <= set(held)), None)
            assert ready or order or backups, f"seed {seed}: nobody may begin"
            if ready:
                held = [rank for rank in held if rank not in ready]
                summed |= set(ready)
                for _ in ready:
                    turns_of.give()
                turns_of.summed(set(ready))
        assert most <= 6
