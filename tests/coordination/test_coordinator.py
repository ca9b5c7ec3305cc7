"""T1, T2, T3, T5 over every order in which reports can arrive: a simulated job around the pure coordinator.

The links of the simulated shards deliver messages in order, at any pace. Workers die, are replaced and send again.
Shards lose their link or their whole state. The assertions are about the commits that the shards receive.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay._coordination import (
    Coordinator,
    CoordinatorState,
    Counted,
    Finished,
    Intervals,
    Outcome,
    Restart,
    Rules,
    Send,
    ServerPosition,
    Updated,
    WriteManifest,
)
from backstay._simulation import SimShard, SimWorker, key_of
from backstay_rpc.control_pb2 import (
    Commit,
    Gather,
    GradientId,
    GradientInfo,
    Lost,
    Norm,
    NormRequest,
    Reject,
    RejectReason,
    Staged,
)
from backstay_spec.quorum import quorum_of


class Job:
    """Shards, workers and the links between them; `step(random)` lets one thing happen."""

    def __init__(self, rules: Rules, ranks: int, finite: float, random: Random) -> None:
        self.rules, self.ranks, self.finite, self.random = rules, ranks, finite, random
        self.now = 0.0
        self.coordinator = Coordinator(
            rules,
            CoordinatorState(term=1, version=0, world=ranks),
            intervals=Intervals(every_steps=3 if rules.stores else None),
        )
        self.shards = [SimShard(index, rules.mode) for index in range(rules.shards)]
        self.workers = [SimWorker(rank, rules.mode) for rank in range(ranks)]
        self.saved = CoordinatorState(term=1, version=0, world=ranks)
        self.saved_uri = ""
        self.histories: dict[int, list[Commit]] = {}
        self.completions: dict[tuple[int, int], list[int]] = {}  # (term, version) -> ranks in order of completion
        self.holders: dict[bytes, set[int]] = {}
        self.gathered: dict[bytes, GradientId] = {}  # complete, although the link of a shard breaks
        self.zombies: list[tuple[GradientId, list[int]]] = []  # messages that replaced pods still send
        self.finished: Finished | None = None
        self.carry_out(self.coordinator.start(self.now))

    # The coordinator's side.
    def carry_out(self, decisions: list[object]) -> None:
        for decision in decisions:
            if isinstance(decision, Send) and isinstance(decision.message, Reject):
                self.holders.pop(key_of(decision.message.id), None)
                if (taken_back := self.gathered.pop(key_of(decision.message.id), None)) is not None:
                    completed = self.completions.get((taken_back.term, taken_back.version), [])
                    completed[:] = [rank for rank in completed if rank != taken_back.rank]
            match decision:
                case Send(None, message):
                    if isinstance(message, Commit):
                        self.check(message)
                    elif isinstance(message, Gather):
                        self.gathered |= {key_of(one.id): one.id for one in message.contributions}
                    elif isinstance(message, NormRequest):
                        self.check_whole(message)
                    for shard in self.shards:
                        if shard.connected:
                            shard.inbox.append(message)
                case Send(index, message):
                    if self.shards[index].connected:
                        self.shards[index].inbox.append(message)
                case WriteManifest():
                    assert len(decision.files) == self.rules.shards
                    assert decision.state["version"] == decision.version
                    self.saved = CoordinatorState.from_json(decision.state)
                    self.saved_uri = f"at-{decision.version}-{decision.term}"
                    self.carry_out(self.coordinator.manifest(self.now, decision, self.saved_uri))
                case Restart():
                    state = self.saved.copy()
                    state.term = self.coordinator.state.term + 1
                    self.carry_out(self.coordinator.restart(self.now, state, self.saved_uri))
                case Finished():
                    assert self.finished is None
                    self.finished = decision

    def check_whole(self, decided: Commit | NormRequest) -> None:
        for contribution in decided.contributions:
            holders = self.holders.get(key_of(contribution.id), set())
            assert holders == set(range(self.rules.shards)), "T1: never a part of one"
        if self.rules.mode == "Sync":
            ranks = {contribution.id.rank for contribution in decided.contributions}
            first = self.completions[decided.term, decided.version][: len(ranks)]
            assert ranks == set(first), "T2: the first ones count"

    def check(self, commit: Commit) -> None:
        """The promises, at the moment of the decision."""
        history = self.histories.setdefault(commit.term, [])
        start = history[0].version if history else commit.version
        assert commit.version == start + len(history), "T1: one commit a version, in order"
        history.append(commit)
        ids = [contribution.id for contribution in commit.contributions]
        ranks = [gradient.rank for gradient in ids]
        assert ranks == sorted(set(ranks)), "distinct ranks in order"
        for gradient in ids:
            assert gradient.term == commit.term
        if self.rules.clip_norm is None:
            self.check_whole(commit)
        if self.rules.mode == "Sync":
            quorum = quorum_of(self.rules.backups, self.ranks)
            assert len(ids) == quorum or (self.rules.grace != 0.0 and len(ids) > quorum), "T1: the quorum at least"
            assert all(gradient.version == commit.version == gradient.key_step for gradient in ids)
            weights = [1.0] * len(ids)
            if self.rules.weighting == "Examples" and len(ids) > 1:
                weights = [1.0 + gradient.rank for gradient in ids]
            assert [contribution.weight for contribution in commit.contributions] == weights
        else:
            (gradient,) = ids
            staleness = commit.version - gradient.version
            assert staleness >= 0
            if self.rules.max_staleness is not None:
                assert staleness <= self.rules.max_staleness, "T5"
            weight = 1 / (1 + staleness) if self.rules.staleness_damping else 1.0
            assert commit.contributions[0].weight == weight
        assert commit.final == (commit.version + 1 == self.rules.steps)

    def deliver_to_coordinator(self, shard: SimShard) -> None:
        if not shard.outbox or not shard.connected:
            return
        message = shard.outbox.popleft()
        coordinator, index, now = self.coordinator, shard.index, self.now
        match message:
            case Staged():
                key = key_of(message.id)
                term = coordinator.state.term
                holders = self.holders.setdefault(key, set())
                known = len(holders)
                holders.add(index)
                decisions = coordinator.report(now, index, message)
                rejected = any(
                    isinstance(d, Send) and isinstance(d.message, Reject) and d.message.id == message.id
                    for d in decisions
                )
                if message.id.term == term and known < len(holders) == self.rules.shards and not rejected:
                    self.completions.setdefault((term, message.id.version), []).append(message.id.rank)
                self.carry_out(decisions)
                of_rank = [s for s in coordinator.open_gradients() if s.id.rank == message.id.rank]
                assert len(of_rank) <= 2, "the undecided gradients are bounded"
            case Lost():
                self.holders.get(key_of(message.id), set()).discard(index)
                self.carry_out(coordinator.report(now, index, message))
            case _:
                self.carry_out(coordinator.report(now, index, message))

    def connect(self, shard: SimShard) -> None:
        shard.open_link()
        self.holders = {
            key: holders if key in self.gathered & shard.staged.keys() else holders - {shard.index}
            for key, holders in self.holders.items()
        }
        for (term, version), ranks in self.completions.items():
            of_version = [one.rank for one in self.gathered.values() if (one.term, one.version) == (term, version)]
            ranks[:] = [rank for rank in ranks if rank in of_version]
        term, version = shard.term, shard.version
        self.carry_out(self.coordinator.hello(self.now, ServerPosition(shard.index, term, version)))
        if shard.term == self.coordinator.state.term:
            shard.report_all()

    # The workers' side.
    def act(self, worker: SimWorker) -> None:
        if not worker.alive:
            worker.replace()
            self.carry_out(self.coordinator.joined(self.now, worker.rank, worker.incarnation))
            worker.key_step = self.coordinator.state.key_steps.get(worker.rank, 0)
            return
        terms = {shard.term for shard in self.shards}
        if len(terms) > 1 or 0 in terms:
            return
        if worker.current is not None and worker.current.term not in terms:
            worker.current, worker.to_push = None, []
            worker.key_step = self.coordinator.state.key_steps.get(worker.rank, 0)
        if worker.current is None:
            versions = {shard.version for shard in self.shards}
            if self.rules.mode == "Sync" and len(versions) > 1:
                return
            version = min(versions)
            if version >= self.rules.steps:
                return
            worker.compute(terms.pop(), version, self.rules.shards)
            self.random.shuffle(worker.to_push)
            return
        if worker.to_push:
            self.push(worker.current, worker.to_push.pop())
            return
        worker.look(self.shards)

    def push(self, gradient: GradientId, index: int) -> None:
        info = GradientInfo(examples=1 + gradient.rank, loss=1.0)
        # A contribution is finite or not, on every shard.
        info.finite = (hash(key_of(gradient)) % 1000) / 1000 < self.finite
        self.shards[index].push(gradient, info)

    def disturb(self) -> None:
        kind = self.random.choice([0, 1, 2, 3, 3, 3, 4, 5])
        shard = self.random.choice(self.shards)
        worker = self.random.choice(self.workers)
        if kind <= 2:
            worker.alive = False
            self.carry_out(self.coordinator.disconnected(self.now, worker.rank, worker.incarnation))
            if worker.current is not None and self.random.random() < 0.5:
                self.zombies.append((worker.current, worker.to_push or [shard.index]))
        elif kind == 3 and worker.current is not None:  # a stream broke: the same gradient, as a new attempt
            if key_of(worker.current) not in shard.staged and shard.connected:
                shard.outbox.append(Lost(id=worker.current))
            worker.attempt += 1
            again = GradientId()
            again.CopyFrom(worker.current)
            again.attempt = worker.attempt
            worker.current, worker.to_push = again, [s.index for s in self.shards]
            self.random.shuffle(worker.to_push)
        elif kind == 4:  # the coordinate stream broke
            shard.connected = False
        elif shard.term:  # the server died
            shard.lose_all()

    def step(self, *, chaos: bool) -> None:
        self.now += 0.1
        wakes_at = self.coordinator.wakes_at
        if wakes_at is not None and wakes_at <= self.now:
            self.carry_out(self.coordinator.tick(self.now))
            assert self.coordinator.wakes_at is None, "T2: no update waits longer than the grace"
        roll = self.random.random()
        if chaos and roll < 0.03:
            self.disturb()
            return
        shard = self.random.choice(self.shards)
        if self.zombies and roll > 0.97:
            gradient, left = self.random.choice(self.zombies)
            if left:
                self.push(gradient, left.pop())
            else:
                self.zombies.remove((gradient, left))
        elif not shard.connected:
            self.connect(shard)
        elif roll < 0.35:
            shard.receive()
        elif roll < 0.65:
            self.deliver_to_coordinator(shard)
        else:
            self.act(self.random.choice(self.workers))

    def drain(self) -> None:
        """Deliver all queued messages."""
        while any(shard.inbox or shard.outbox for shard in self.shards):
            for shard in self.shards:
                if not shard.connected:  # the last disturbance came after the end
                    self.connect(shard)
                shard.receive()
                self.deliver_to_coordinator(shard)

    @property
    def over(self) -> bool:
        return self.finished is not None and all(shard.done for shard in self.shards)

    def surviving(self) -> list[Commit]:
        """Returns the commits that no rollback undid."""
        out: list[Commit] = []
        for _, history in sorted(self.histories.items()):
            if history:
                out = [commit for commit in out if commit.version < history[0].version]
                out += history
        return out


def rules_of(mode: str) -> st.SearchStrategy[Rules]:
    common = {
        "shards": st.integers(1, 3),
        "steps": st.integers(1, 8),
        "stores": st.booleans(),
        "clip_norm": st.sampled_from([None, 1.0]),
        "max_non_finite": st.just(1000),
        "held": st.sampled_from([0, 0, 8]),
    }
    if mode == "Sync":
        return st.builds(
            Rules,
            mode=st.just("Sync"),
            backups=st.sampled_from([0, 1, 2, "50%"]),
            grace=st.sampled_from([0.0, 0.5, 20.0, None]),
            weighting=st.sampled_from(["Equal", "Examples"]),
            **common,
        )
    return st.builds(
        Rules,
        mode=st.just("Async"),
        max_staleness=st.sampled_from([None, 0, 2]),
        staleness_damping=st.booleans(),
        **common,
    )


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_for_any_failures_in_any_order(mode: str, data: st.DataObject) -> None:
    """T1, T2, T3, T5 hold at every decision, and the job ends once the disturbances do (T8)."""
    rules = data.draw(rules_of(mode))
    ranks = data.draw(st.integers(1, 6))
    finite = data.draw(st.sampled_from([1.0, 0.8]))
    job = Job(rules, ranks, finite, Random(data.draw(st.integers(0, 2**32))))
    for _ in range(400):
        job.step(chaos=True)
    for _ in range(60_000):
        if job.over:
            break
        job.step(chaos=False)
    assert job.over, "without failures the job ends"
    job.drain()
    assert not [staged for shard in job.shards for staged in shard.staged.values()], "every outcome is reported"
    assert job.finished == Finished(rules.steps)
    surviving = job.surviving()
    assert [commit.version for commit in surviving] == list(range(rules.steps))
    used = [contribution.id for commit in surviving for contribution in commit.contributions]
    keys = [(gradient.rank, gradient.key_step) for gradient in used]
    assert len(keys) == len(set(keys)), "T3: each at most once"
    for rank in range(ranks):
        steps = [gradient.key_step for gradient in used if gradient.rank == rank]
        if mode == "Async":
            assert steps == list(range(len(steps))), "T3: a rank's key_step grows by one with each applied gradient"
    for shard in job.shards:
        mine = {commit.version: commit for commit in shard.history}
        for commit in surviving:
            if commit.version in mine:
                assert mine[commit.version] == commit, "T1: the same set on every shard"
        assert shard.version == (rules.steps if shard.term else 0), (
            "a shard that returns after the end has nothing to do"
        )
    if rules.stores:
        assert job.shards[0].done is not None
        assert job.shards[0].done.checkpoint == job.saved_uri
        assert job.saved.version == rules.steps


def staged(rank: int, version: int, *, attempt: int = 1, incarnation: int = 0, finite: bool = True) -> Staged:
    gradient = GradientId(
        term=1, version=version, rank=rank, key_step=version, incarnation=incarnation, attempt=attempt
    )
    return Staged(id=gradient, info=GradientInfo(finite=finite, examples=2, loss=0.5))


def commits(decisions: list[object]) -> list[Commit]:
    return [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Commit)]


def test_an_older_incarnation_is_refused_once_a_newer_one_joined() -> None:
    rules = Rules(mode="Sync", shards=2, steps=10)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    job.joined(0, 0, 0)
    job.report(0, 0, staged(0, 0))
    (given_up,) = [d.message for d in job.joined(1, 0, 1) if isinstance(d, Send)]
    assert given_up.reason == RejectReason.OLD_INCARNATION
    (refused,) = [d.message for d in job.report(2, 1, staged(0, 0)) if isinstance(d, Send)]
    assert refused.reason == RejectReason.OLD_INCARNATION
    job.report(3, 0, staged(0, 0, incarnation=1))
    assert commits(job.report(3, 1, staged(0, 0, incarnation=1)))


def test_undecided_gradients_are_answered_at_the_end() -> None:
    rules = Rules(mode="Async", shards=2, steps=1)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=2))
    job.report(0, 0, staged(1, 0))
    job.report(0, 0, staged(0, 0))
    decisions = job.report(0, 1, staged(0, 0))
    (late,) = [d.message for d in decisions if isinstance(d, Send) and isinstance(d.message, Reject)]
    assert (late.id.rank, late.reason) == (1, RejectReason.LATE)


def test_non_finite_updates_move_the_version_and_then_fail_the_job() -> None:
    rules = Rules(mode="Sync", shards=1, steps=10, max_non_finite=2)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    (first,) = commits(job.report(0, 0, staged(0, 0, finite=False)))
    assert (first.skip, first.version) == (True, 0)
    assert not commits(job.report(1, 0, staged(0, 1)))[0].skip
    assert job.state.non_finite_run == 0
    job.report(2, 0, staged(0, 2, finite=False))
    decisions = job.report(3, 0, staged(0, 3, finite=False))
    (finished,) = [d for d in decisions if isinstance(d, Finished)]
    assert finished.reason == "NonFiniteGradients"
    assert "the contribution of rank 0 at step 3" in finished.why, "its gradient, or its model state"
    assert commits(decisions)[0].skip
    assert job.report(4, 0, staged(0, 4)) != []  # answered, not used
    assert job.state.version == 4


def test_finite_contributions_of_a_skipped_update_do_not_count_as_applied() -> None:
    job = Coordinator(Rules(mode="Sync", shards=1, steps=10), CoordinatorState(term=1, version=0, world=2))
    job.report(0, 0, staged(0, 0))
    counted = [d.outcome for d in job.report(0, 0, staged(1, 0, finite=False)) if isinstance(d, Counted)]
    assert counted == [Outcome.SKIPPED, Outcome.NON_FINITE]


def test_the_clip_factor_is_of_the_norm_over_all_shards() -> None:
    rules = Rules(mode="Sync", shards=2, steps=10, clip_norm=1.0)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    job.report(0, 0, staged(0, 0))
    decisions = job.report(0, 1, staged(0, 0))
    assert not commits(decisions)
    assert any(isinstance(d, Send) and isinstance(d.message, NormRequest) for d in decisions)
    assert not commits(job.report(0, 1, Norm(term=1, version=0, sum_of_squares=9.0)))
    decided = job.report(0, 0, Norm(term=1, version=0, sum_of_squares=16.0))
    (commit,) = commits(decided)
    assert commit.clip_factor == pytest.approx(0.2)
    assert [decision.norm for decision in decided if isinstance(decision, Updated)] == [5.0]


def test_the_world_grows_to_joined_ranks_and_shrinks_immediately() -> None:
    rules = Rules(mode="Sync", shards=1, steps=100)
    job = Coordinator(rules, CoordinatorState(term=1, version=0, world=2))
    for rank in (0, 1, 3):
        job.joined(0, rank, 0)
    job.configure(0, 4, Intervals())
    job.report(0, 0, staged(0, 0))
    assert commits(job.report(0, 0, staged(1, 0)))[0].world == 2
    job.joined(0, 2, 0)
    job.report(0, 0, staged(0, 1))
    assert commits(job.report(0, 0, staged(1, 1)))[0].world == 4
    job.configure(0, 1, Intervals())
    for rank in (1, 2, 3):  # they leave: the update is of those that stay
        assert not commits(job.report(0, 0, staged(rank, 2)))
    assert commits(job.report(0, 0, staged(0, 2)))[0].world == 1
    (answer,) = [d for d in job.report(0, 0, staged(1, 3)) if isinstance(d, Send)]
    assert answer.message.reason == RejectReason.NOT_IN_WORLD
