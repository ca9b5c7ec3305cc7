"""`Applier` alone carries out one order after the other on a fake engine (T1, T3)."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from backstay._coordination import MODES, Rules
from backstay._shard._applier import Applier, Term, TermOver
from backstay._shard._credits import Credits
from backstay._shard._publisher import Publisher
from backstay._shard._replication import Replica
from backstay._shard._staging import Gradients
from backstay._shard._standbys import NoStandbys
from backstay_rpc.control_pb2 import Commit, Contribution, NormRequest, Part, RejectReason


class Bench:
    """An applier with its parts, and no thread."""

    def __init__(self, kit: SimpleNamespace, standbys: NoStandbys | None = None) -> None:
        self.kit = kit
        layout = kit.Layout(0, (kit.Block(5), kit.Block(3)))
        wire = kit.exact_wire(layout)
        lock = threading.Lock()
        self.lock = threading.Condition(lock)
        memory = Credits(MODES["Sync"], Rules(mode="Sync", shards=1, steps=0), lock)
        self.gradients, self.publisher = Gradients(wire, memory), Publisher(MODES["Sync"])
        self.reports, self.saved = kit.Recorder(), []
        self.applier = Applier(
            self.lock,
            self.gradients,
            self.publisher,
            standbys or NoStandbys(),
            MODES["Sync"],
            self.reports,
            lambda snapshot, term, version: self.saved.append((term, version, snapshot[0])),
        )
        self.engine = kit.FakeEngine(layout)
        self.term = self.begin(1)

    def begin(self, number: int) -> Term:
        term = Term(number, self.engine, self.engine.version, 1, 0)
        self.applier.begin(term)
        return term

    def stage(self, gradient: Any, value: float, *, complete: bool = True) -> Any:
        held = self.gradients.begin(Part(contribution=gradient)).gradient
        for array in held.staging.arrays:
            array[:] = value
        held.complete = complete
        return held

    def apply(self, commit: Commit) -> None:
        self.applier.apply(self.term, commit, 0.0)

    def applied(self) -> list[int]:
        return self.reports.of("applied")


@pytest.fixture
def bench(kit: SimpleNamespace) -> Bench:
    return Bench(kit)


def test_t1_an_update_is_the_mean_of_the_set_and_frees_its_memory(bench: Bench, kit: SimpleNamespace) -> None:
    used = [bench.stage(kit.gid(rank), value) for rank, value in ((0, 1.0), (2, 3.0))]
    late = bench.stage(kit.gid(1), 100.0)
    with bench.publisher.waiting(None, 1) as waiter:
        bench.apply(kit.commit(0, [kit.gid(0), kit.gid(2)]))
        answer = bench.publisher.answer_to(waiter)
    assert [block.tolist() for block in bench.engine.values] == [[2.0] * 5, [2.0] * 3]
    assert answer is not None
    assert (answer.version, answer.block(1).tolist()) == (1, [2.0] * 3)
    assert [one.applied for one in used] == [1, 1]
    assert late.outcome == RejectReason.LATE
    assert (len(bench.gradients), bench.applied()) == (0, [1])


@pytest.mark.parametrize("held", ["nothing", "a part", "another version"])
def test_t1_a_commit_that_names_what_is_not_here_changes_nothing(bench: Bench, kit: SimpleNamespace, held: str) -> None:
    bench.stage(kit.gid(0), 1.0)
    if held == "a part":
        bench.stage(kit.gid(1), 1.0, complete=False)
    elif held == "another version":
        bench.stage(kit.gid(1, 1, attempt=0), 1.0)
    with pytest.raises(RuntimeError, match="holds only in part" if held == "a part" else "does not hold"):
        bench.apply(kit.commit(0, [kit.gid(0), kit.gid(1)]))
    assert (bench.engine.version, bench.engine.applied, bench.applied()) == (0, [], [])
    assert bench.gradients.find(kit.gid(0)) is not None


def test_t3_a_commit_that_names_a_gradient_twice_or_none_is_refused(bench: Bench, kit: SimpleNamespace) -> None:
    bench.stage(kit.gid(0), 1.0)
    for named in ([kit.gid(0), kit.gid(0)], []):
        with pytest.raises(RuntimeError, match="names no gradient, or one gradient twice"):
            bench.apply(kit.commit(0, named))
    assert bench.engine.applied == []


def test_a_skipped_update_makes_a_version_with_the_same_parameters(bench: Bench, kit: SimpleNamespace) -> None:
    held = bench.stage(kit.gid(0), 1.0)
    bench.apply(kit.commit(0, [kit.gid(0)], skip=True))
    assert (bench.engine.version, bench.engine.applied) == (1, [])
    assert (held.outcome, bench.applied()) == (RejectReason.SKIPPED, [1])


def test_t6_an_order_of_a_term_that_is_over_has_no_effect(bench: Bench, kit: SimpleNamespace) -> None:
    bench.stage(kit.gid(0), 1.0)
    old = bench.term
    bench.begin(2)
    with pytest.raises(TermOver):
        bench.applier.apply(old, kit.commit(0, [kit.gid(0)], checkpoint=True), 0.0)
    bench.applier.save(old)
    assert (bench.engine.applied, bench.applied(), bench.saved) == ([], [], [])


@pytest.mark.parametrize("over", [False, True])
def test_t6_a_standby_that_was_filled_with_a_term_that_ended_connects_again(kit: SimpleNamespace, over: bool) -> None:
    """A rollback ends the standbys that are known then. The one that is being filled was not among them."""

    class Filled(NoStandbys):
        def fill(self, *state: Any) -> None:
            if over:
                bench.begin(2)

    bench = Bench(kit, Filled())
    replica = Replica(2, kit.Timeouts())
    bench.applier.fill(bench.term, replica)
    assert (replica.ended_at is not None) == over


def test_the_norm_is_that_of_the_mean_and_the_update_uses_the_same_gradients(
    bench: Bench, kit: SimpleNamespace
) -> None:
    bench.stage(kit.gid(0), 2.0)
    contributions = [Contribution(id=kit.gid(0), weight=1.0)]
    bench.applier.prepare(bench.term, NormRequest(term=1, version=0, contributions=contributions, round=3))
    (norm,) = bench.reports.of("norm")
    assert (norm.version, norm.round, norm.sum_of_squares) == (0, 3, 4.0 * 8)
    assert bench.engine.version == 0
    bench.apply(kit.commit(0, [kit.gid(0)], clip_factor=0.5))
    assert bench.engine.values[0].tolist() == [1.0] * 5


def test_t7_a_checkpoint_is_the_state_right_after_its_commit(bench: Bench, kit: SimpleNamespace) -> None:
    for version in range(2):
        bench.stage(kit.gid(0, version), 1.0)
        bench.apply(kit.commit(version, [kit.gid(0, version)], checkpoint=version == 0))
    assert bench.saved == [(1, 1, 1)]
    bench.applier.save(bench.term)
    assert bench.saved[1:] == [(1, 2, 2)]


def test_t8_streams_get_an_error_if_the_engine_fails_in_the_middle(bench: Bench, kit: SimpleNamespace) -> None:
    bench.stage(kit.gid(0), 1.0)
    whole = bench.engine.block
    bench.engine.block = lambda b: whole(b) if b == 0 else (_ for _ in ()).throw(OSError("the device is lost"))
    with bench.publisher.waiting(None, 1) as waiter:
        with pytest.raises(OSError, match="the device is lost"):
            bench.apply(kit.commit(0, [kit.gid(0)]))
        answer = bench.publisher.answer_to(waiter)
    assert answer is not None
    assert answer.block(0).tolist() == [1.0] * 5
    with pytest.raises(Exception, match="failed to compute version 1"):
        answer.block(1)
    assert len(bench.gradients) == 0, "its memory is free again"
