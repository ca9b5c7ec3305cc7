"""`Intake` alone decides which reported gradients are complete, refused and counted (T1, T3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import MODES, CoordinatorState, Counted, Decision, Outcome, Rules, Send
from backstay._coordination._conclusion import Conclusion
from backstay._coordination._history import UpdateHistory, start_of
from backstay._coordination._intake import Intake
from backstay_rpc.control_pb2 import Contribution, GradientId, GradientInfo, Reject, RejectReason, Staged

SHARDS, WORLD = 2, 3


def intake(**rules: object) -> tuple[Intake, UpdateHistory]:
    made = Rules(mode="Sync", shards=SHARDS, steps=100, **rules)  # type: ignore[arg-type]
    state = CoordinatorState(term=1, version=0, world=WORLD)
    mode = MODES["Sync"]
    history = UpdateHistory(made, mode, state, start_of(state, ""))
    return Intake(made, mode, history, Conclusion(made, history, None, 0.0)), history


def staged(rank: int, attempt: int = 1, *, version: int = 0, incarnation: int = 1, term: int = 1) -> Staged:
    gradient = GradientId(
        term=term, version=version, rank=rank, key_step=version, incarnation=incarnation, attempt=attempt
    )
    return Staged(id=gradient, info=GradientInfo(finite=True, examples=4))


def counted(decisions: list[Decision]) -> list[tuple[int, int, Outcome]]:
    return [(d.id.rank, d.id.attempt, d.outcome) for d in decisions if isinstance(d, Counted)]


def all_complete(made: Intake) -> list[Staged]:
    return list(made.candidates(desired_world=0).complete)


def reasons(decisions: list[Decision]) -> list[RejectReason]:
    return [d.message.reason for d in decisions if isinstance(d, Send) and isinstance(d.message, Reject)]


@given(st.permutations([(rank, shard) for rank in range(WORLD) for shard in range(SHARDS)]))
def test_t1_a_gradient_is_complete_once_the_last_shard_holds_all_of_it(order: list[tuple[int, int]]) -> None:
    made, _ = intake()
    held: dict[int, set[int]] = {rank: set() for rank in range(WORLD)}
    completed = []
    for rank, shard in order:
        out, complete = made.staged(shard, staged(rank))
        held[rank].add(shard)
        assert (out, complete) == ([], len(held[rank]) == SHARDS)
        assert made.staged(shard, staged(rank)) == ([], False), "a second report changes nothing"
        completed += [rank] * complete
    assert [one.id.rank for one in all_complete(made)] == completed


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.sampled_from(["sends", "dies", "again", "before"]), st.integers(0, SHARDS - 1)),
        max_size=30,
    )
)
def test_t9_each_gradient_is_counted_at_most_once(events: list[tuple[int, str, int]]) -> None:
    """Workers send and die, and links break: a shard reports its newest two gradients of a rank again."""
    made, history = intake()
    outcomes: list[tuple[int, int, int]] = []
    sent: dict[tuple[int, int], list[Staged]] = {}
    incarnations = dict.fromkeys(range(2), 1)

    def count(decisions: list[Decision]) -> None:
        found = [(d.id.rank, d.id.incarnation, d.id.attempt) for d in decisions if isinstance(d, Counted)]
        assert not set(found) & set(outcomes)
        outcomes.extend(found)

    for rank, event, shard in events:
        of_rank = sent.setdefault((rank, shard), [])
        match event:
            case "dies":
                incarnations[rank] += 1
                count(made.joined(rank, incarnations[rank]))
            case "sends":
                known = [one.id.attempt for other in range(SHARDS) for one in sent.get((rank, other), [])]
                attempt = max(len(of_rank) + 1, max(known, default=1))
                if of_rank and attempt <= of_rank[-1].id.attempt:
                    continue
                of_rank.append(staged(rank, attempt, incarnation=incarnations[rank]))
                count(made.staged(shard, of_rank[-1])[0])
            case _ if of_rank:
                count(made.staged(shard, of_rank[-2:][0 if event == "before" else -1])[0])
        found = sorted(all_complete(made), key=lambda one: one.id.rank)
        if len(found) == 2:
            contributions = tuple(Contribution(id=one.id, weight=1.0) for one in found)
            infos = tuple(one.info for one in found)
            version = history.state.version
            history.decide(contributions, infos, world=WORLD)
            count(list(made.use(contributions, infos, version)))
            count(made.settle(final=False))
            assert made.ledger.open() == []
            return


def test_t9_gradients_that_a_shard_reports_again_after_its_link_broke_are_not_counted_again() -> None:
    made, _ = intake()
    reports = [staged(1, 1), staged(1, 2)]
    first = [*made.staged(0, reports[0])[0], *made.staged(0, reports[1])[0], *made.joined(1, 2)]
    assert counted(first) == [(1, 1, Outcome.ABANDONED), (1, 2, Outcome.OLD_INCARNATION)]
    made.connected(0)
    again = [decision for report in reports for decision in made.staged(0, report)[0]]
    assert (counted(again), reasons(again)) == ([], [RejectReason.ABANDONED, RejectReason.OLD_INCARNATION])


def test_a_newer_attempt_and_a_newer_pod_replace_what_is_incomplete() -> None:
    made, _ = intake()
    made.staged(0, staged(1))
    out, _ = made.staged(0, staged(1, 2))
    assert (counted(out), reasons(out)) == ([(1, 1, Outcome.ABANDONED)], [RejectReason.ABANDONED])
    out = made.joined(1, 2)
    assert (counted(out), reasons(out)) == ([(1, 2, Outcome.OLD_INCARNATION)], [RejectReason.OLD_INCARNATION])
    out, _ = made.staged(1, staged(1, 2))
    assert (counted(out), reasons(out)) == ([], [RejectReason.OLD_INCARNATION]), "the other shard gets the same answer"


def test_a_complete_gradient_outlives_its_pod() -> None:
    """T3: the replacement computes the same, which is then a duplicate."""
    made, _ = intake()
    for shard in range(SHARDS):
        made.staged(shard, staged(1))
    assert made.joined(1, 2) == []
    out, complete = made.staged(0, staged(1, incarnation=2))
    assert (counted(out), complete) == ([(1, 1, Outcome.DUPLICATE)], False)
    assert [one.id.incarnation for one in all_complete(made)] == [1]


def test_refusals_that_concern_one_shard_are_sent_to_it_alone() -> None:
    made, _ = intake()
    for one, reason in ((staged(0, term=7), RejectReason.OLD_TERM), (staged(WORLD), RejectReason.NOT_IN_WORLD)):
        out, _ = made.staged(1, one)
        assert [(d.shard, d.message.reason) for d in out if isinstance(d, Send)] == [(1, reason)]
    out, _ = made.staged(1, staged(0, version=5))
    assert [(d.shard, d.message.reason) for d in out if isinstance(d, Send)] == [(None, RejectReason.OUT_OF_ORDER)]


def test_a_shard_that_connects_again_reports_its_gradients_again() -> None:
    made, _ = intake()
    for shard in range(SHARDS):
        made.staged(shard, staged(0))
    made.connected(1)
    assert all_complete(made) == []
    assert made.staged(0, staged(0)) == ([], False), "this shard has reported it already"
    assert made.staged(1, staged(0)) == ([], True)


def test_t6_a_gradient_whose_refusal_depends_on_a_pending_decision_waits() -> None:
    """With standbys, the decision may be withdrawn, and then the gradient is on time."""
    made, history = intake(replicates=True)
    for shard in range(SHARDS):
        made.staged(shard, staged(0))
    first = all_complete(made)[0]
    contributions = (Contribution(id=first.id, weight=1.0),)
    history.decide(contributions, (first.info,), world=WORLD)
    made.use(contributions, (first.info,), 0)
    assert made.staged(0, staged(1)) == ([], False)
    taken = history.take_back()
    assert reasons(made.take_back(taken)) == [RejectReason.ABANDONED]
    (waiting,) = made.uncertain()
    assert waiting == (0, staged(1))
    assert made.staged(*waiting) == ([], False)
    assert made.staged(1, staged(1)) == ([], True)


def test_a_new_term_ends_all_undecided_gradients() -> None:
    made, _ = intake()
    made.staged(0, staged(0))
    made.staged(1, staged(1))
    assert sorted(counted(made.begin())) == [(0, 1, Outcome.OLD_TERM), (1, 1, Outcome.OLD_TERM)]
    assert (made.begin(), made.ledger.open()) == ([], [])
