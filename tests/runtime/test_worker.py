"""T3, T4: a worker names its contributions and interprets answers, without threads, clock or servers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import Outcome
from backstay._roles._worker_protocol import AfterLoss, Fate, WorkerProtocol, after_loss, may_be_result
from backstay._transport import Pulled
from backstay._update import Selection
from backstay.errors import PeerLost, Refused, Superseded, WaitedTooLong
from backstay_rpc.control_pb2 import GradientId, JoinReply, RejectReason
from backstay_rpc.refusals import RefusalCode

NO_REASON = RejectReason.REJECT_UNSPECIFIED


def joined(mode: Any = "Sync", term: int = 1, **reply: int) -> WorkerProtocol:
    """Returns a worker of rank 3 and incarnation 2 that has joined."""
    protocol = WorkerProtocol(mode, rank=3, incarnation=2)
    assert not protocol.joined(JoinReply(term=term, **reply))
    return protocol


@pytest.mark.parametrize(
    ("outcome", "residuals"),
    [
        (RejectReason.REJECT_UNSPECIFIED, True),
        (RejectReason.LATE, False),
        (RejectReason.SKIPPED, False),
        (RejectReason.DUPLICATE, None),
    ],
)
def test_an_answer_decides_the_residuals(outcome: Any, residuals: bool | None) -> None:
    """A duplicate was sent before the stream broke: whether that one is applied is unknown."""
    exchange = joined().exchange(Pulled(term=1, version=5, world=1), 5)
    exchange.attempt()
    assert exchange.answered(Pulled(term=1, version=6, world=1, outcome=outcome), finite=True).residuals is residuals


@pytest.mark.parametrize(
    ("term", "next_key_step", "skipped", "fate"),
    [
        (1, 6, False, Fate(Outcome.APPLIED, 6, True)),
        (1, 6, True, Fate(Outcome.SKIPPED, None, False)),
        (1, 0, False, Fate(None, None, None)),
        (2, 6, False, Fate(None, None, None)),
    ],
    ids=["the newest update has it", "it was skipped", "it is unknown", "the servers went back"],
)
def test_t4_a_worker_that_lost_the_answer_reports_the_outcome_that_it_receives(
    term: int, next_key_step: int, skipped: bool, fate: Fate
) -> None:
    protocol = joined()
    exchange = protocol.exchange(Pulled(term=1, version=5, world=1), 5)
    exchange.attempt()
    protocol.joined(JoinReply(term=term))
    reason = RejectReason.SKIPPED if skipped else NO_REASON
    now = Pulled(term=term, version=6, world=1, outcome=reason, next_key_step=next_key_step)
    assert not exchange.repeats(now)
    assert exchange.lost(now, finite=lambda: True) == fate
    assert fate.label == ("lost" if fate.outcome is None else fate.outcome.value)
    assert (exchange.exchanged(now) is None) == (term == 2)


@pytest.mark.parametrize(
    ("outcome", "residuals"), [(RejectReason.LATE, None), (NO_REASON, True)], ids=["late", "applied"]
)
def test_a_late_second_attempt_does_not_show_that_the_first_one_was_not_applied(
    outcome: Any, residuals: bool | None
) -> None:
    """With backups, the newest update may come after the one that has the first attempt."""
    protocol = joined()
    at, now = Pulled(term=1, version=5, world=3), Pulled(term=1, version=7, world=3, outcome=outcome)
    exchange = protocol.exchange(at, 5)
    first = exchange.attempt()
    protocol.joined(JoinReply(term=1))
    assert exchange.repeats(at)
    second = exchange.attempt()
    assert (first.attempt, second.attempt) == (1, 2)
    assert exchange.answered(now, finite=True).residuals is residuals
    once = protocol.exchange(at, 5)
    once.attempt()
    assert once.answered(now, finite=True).residuals is (outcome == NO_REASON)


@pytest.mark.parametrize(
    ("received", "done", "kept"),
    [
        (None, True, True),
        (Selection(), True, True),
        (Selection(frozenset({1})), True, False),
        (None, False, False),
    ],
)
def test_t4_the_result_is_never_a_model_of_which_some_fragments_are_older(
    received: Selection | None, done: bool, kept: bool
) -> None:
    """The servers have left, so that the whole model cannot be requested: `kept`: what came last is the result."""
    assert may_be_result(received, done=done) is kept


AFTER_REFUSAL = {
    RefusalCode.NOT_AUTHENTICATED: AfterLoss.RAISE,
    RefusalCode.INVALID: AfterLoss.RAISE,
    RefusalCode.REPLACED: AfterLoss.RAISE,
    RefusalCode.JOB_FAILED: AfterLoss.RAISE,
    RefusalCode.MOVED: AfterLoss.JOIN,
    RefusalCode.FULL: AfterLoss.JOIN,
    RefusalCode.REPEATED: AfterLoss.JOIN,
    RefusalCode.NOT_READY: AfterLoss.JOIN,
    RefusalCode.BROKEN: AfterLoss.JOIN,
    RefusalCode.LATE: AfterLoss.RAISE,
}
AFTER_ERROR = [
    (PeerLost("the connection broke"), AfterLoss.JOIN),
    (WaitedTooLong("no server answered"), AfterLoss.RAISE),
    (Superseded(RefusalCode.REPLACED, "replaced"), AfterLoss.RAISE),
    (Refused("NO_CODE_OF_THE_LIST", "refused"), AfterLoss.RAISE),
    *((Refused(code, "refused"), after) for code, after in AFTER_REFUSAL.items()),
]


@pytest.mark.parametrize(("error", "after"), AFTER_ERROR, ids=[str(error) for error, _ in AFTER_ERROR])
def test_an_error_of_a_call_decides_what_a_worker_does_next(error: PeerLost | Refused, after: AfterLoss) -> None:
    """SIGTERM counts before the error, and the replacement of this rank before both."""
    assert after_loss(error, None, stopped=False) is after
    assert after_loss(error, None, stopped=True) is AfterLoss.STOP
    replaced = Superseded(RefusalCode.REPLACED, "a heartbeat")
    for stopped in (False, True):
        with pytest.raises(Superseded) as raised:
            after_loss(error, replaced, stopped=stopped)
        assert raised.value is replaced
        assert raised.value.__cause__ is error


def test_the_table_has_every_code_of_a_refusal() -> None:
    assert set(AFTER_REFUSAL) == set(RefusalCode)


@pytest.mark.parametrize(
    ("term", "version", "back"), [(1, 7, False), (1, 9, False), (1, 6, True), (2, 9, True), (2, 7, True)]
)
def test_a_join_shows_whether_updates_are_made_again(term: int, version: int, back: bool) -> None:
    protocol = joined()
    exchange = protocol.exchange(Pulled(term=1, version=6, world=1), 6)
    exchange.attempt()
    exchange.answered(Pulled(term=1, version=7, world=1), finite=True)
    assert protocol.version == 7
    assert protocol.joined(JoinReply(term=term, version=version)) is back
    assert (protocol.term, protocol.version) == (term, 7 if term == 1 else 0)


# ---- Any order of answers, lost answers and rollbacks ----

REASONS = st.sampled_from([reason for reason in RejectReason.values() if reason != NO_REASON])


@dataclass
class Rank:
    """A model of the servers of a job with one rank. Each update has one contribution.

    Attributes:
        applied: the names of the contributions that updates of this term have, by key step.
    """

    asynchronous: bool
    term: int = 1
    version: int = 0
    applied: dict[int, GradientId] = field(default_factory=dict)

    @property
    def next_key_step(self) -> int:
        return max(self.applied, default=-1) + 1

    def receive(self, name: GradientId) -> RejectReason:
        """Apply a contribution once (T3)."""
        if name.term != self.term:
            return RejectReason.OLD_TERM
        if name.key_step in self.applied:
            return RejectReason.DUPLICATE if self.asynchronous else RejectReason.LATE
        self.applied[name.key_step] = name
        self.version += 1
        return NO_REASON

    def pulled(self, outcome: RejectReason = NO_REASON) -> Pulled:
        return Pulled(self.term, self.version, 1, outcome=outcome, next_key_step=self.next_key_step)

    def reply(self) -> JoinReply:
        return JoinReply(term=self.term, version=self.version, key_step=self.next_key_step)

    def go_back(self) -> None:
        """A rollback to the beginning of the history."""
        self.term, self.version, self.applied = self.term + 1, 0, {}


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@given(events=st.lists(st.sampled_from(["answer", "lose push", "lose answer", "go back"]), max_size=30))
def test_t3_t4_each_number_is_applied_once_and_in_order(mode: Any, events: list[str]) -> None:
    """The link breaks before or after the servers receive a contribution, and the servers may go back."""
    rank = Rank(asynchronous=mode == "Async")
    protocol = WorkerProtocol(mode, 0, 1)
    protocol.joined(rank.reply())
    at, attempts = rank.pulled(), 0
    remaining = list(reversed(events))
    while remaining:
        key_step = protocol.next(at.version)
        assert key_step == rank.next_key_step, "the batches of the rank are consecutive"
        exchange = protocol.exchange(at, key_step)
        while True:
            name, event = exchange.attempt(), remaining.pop() if remaining else "answer"
            attempts += 1
            assert name.attempt == attempts
            assert (name.term, name.version, name.key_step) == (protocol.term, at.version, key_step)
            if event != "lose push":
                outcome = rank.receive(name)
            if event == "go back":
                rank.go_back()
            if event == "answer":
                fate, at = exchange.answered(rank.pulled(outcome), finite=True), rank.pulled()
                assert (fate.outcome is Outcome.APPLIED) == (outcome == NO_REASON)
                break
            term = protocol.term
            protocol.joined(rank.reply())
            at_now = rank.pulled()
            if exchange.repeats(at_now):
                assert key_step not in rank.applied
                continue
            fate, at = exchange.lost(at_now, finite=lambda: True), at_now
            if fate.outcome is Outcome.APPLIED:
                assert rank.term == term
                assert key_step in rank.applied
            else:
                assert rank.term != term, "within a term, the worker finds its contribution in the newest update"
            break
    numbers = sorted(rank.applied)
    assert numbers == list(range(len(numbers)))


@given(reason=st.sampled_from(RejectReason.values()), repeated=st.booleans(), finite=st.booleans())
def test_residuals_are_never_kept_or_dropped_in_doubt(reason: Any, repeated: bool, finite: bool) -> None:
    """Residuals are decided only by an answer that is certainly about every attempt."""
    protocol = joined()
    at = Pulled(term=1, version=5, world=2)
    exchange = protocol.exchange(at, 5)
    exchange.attempt()
    if repeated:
        protocol.joined(JoinReply(term=1))
        assert exchange.repeats(at)
        exchange.attempt()
    fate = exchange.answered(replace(at, version=6, outcome=reason), finite=finite)
    in_doubt = reason == RejectReason.DUPLICATE or (repeated and reason == RejectReason.LATE)
    assert fate.residuals is (None if in_doubt else reason == NO_REASON)
    assert (fate.applied_at is None) or finite


@given(reason=REASONS, mode=st.sampled_from(["Sync", "Async"]))
def test_a_contribution_of_an_older_term_has_no_outcome(reason: Any, mode: Any) -> None:
    """An answer that is received after a rollback is about another history."""
    protocol = joined(mode)
    at = Pulled(term=1, version=5, world=2)
    exchange = protocol.exchange(at, protocol.next(5))
    exchange.attempt()
    assert protocol.joined(JoinReply(term=2))
    now = replace(at, term=2, outcome=reason, next_key_step=1)
    assert not exchange.repeats(now)
    assert exchange.lost(now, finite=lambda: True) == Fate(None, None, None)
