"""With standbys, servers and the coordinator die at any moment, and there is one history without a gap (T1, T3, T6).

The simulation models `_shard` and a `Link`. A shard answers a decision once its standby holds the mean. It
publishes a version once its standby holds the commit. Links deliver in order, at any pace.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from random import Random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backstay._coordination import (
    Coordinator,
    CoordinatorState,
    Finished,
    Intervals,
    Restart,
    Rules,
    Send,
    ServerPosition,
    Updated,
    after,
)
from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Contribution,
    GradientId,
    GradientInfo,
    Norm,
    NormRequest,
    Reject,
    RejectReason,
    Rollback,
    Staged,
)

STEPS = 6


@dataclasses.dataclass
class Held:
    """The state that a server and its standby share."""

    version: int = 0
    last: Commit | None = None
    prepared: tuple[Contribution, ...] = ()
    history: tuple[Commit, ...] = ()
    state: CoordinatorState | None = None  # shard 0's standby


class Shard:
    def __init__(self, index: int) -> None:
        self.index = index
        self.incarnation = 1
        self.active, self.standby = Held(), Held()
        self.received: Commit | None = None  # the newest commit received, applied or not
        self.published = 0
        self.staged: dict[bytes, Staged] = {}
        self.inbox: deque[object] = deque()
        self.outbox: deque[object] = deque()
        self.linked = False
        self.commits: dict[int, Commit] = {}
        self.requests: dict[int, NormRequest] = {}


def key_of(gradient: GradientId) -> bytes:
    return gradient.SerializeToString(deterministic=True)


class Job:
    def __init__(
        self, shards: int, ranks: int, backups: int, mode: str, random: Random, *, replicates: bool = True
    ) -> None:
        self.random = random
        self.rules = Rules(
            mode=mode,
            shards=shards,
            steps=STEPS,
            backups=backups,
            clip_norm=1.0,
            max_non_finite=99,
            replicates=replicates,
        )
        state = CoordinatorState(term=1, version=0, world=ranks)
        self.start = Rollback(term=1, version=0, world=ranks)
        self.coordinator = Coordinator(self.rules, state.copy())
        self.shards = [Shard(index) for index in range(shards)]
        self.shards[0].standby.state = state
        self.workers: list[GradientId | None] = [None] * ranks
        self.attempt = 0
        self.incarnations = [1] * ranks
        self.history: dict[int, bytes] = {}

    def carry_out(self, decisions: list[object]) -> None:
        for decision in decisions:
            assert not isinstance(decision, Restart), "nothing is lost, so nothing starts again"
            if isinstance(decision, Finished):
                assert not decision.reason
            if isinstance(decision, Send) and not isinstance(decision.message, Rollback):
                for shard in self.shards:
                    if shard.linked and decision.shard in (None, shard.index):
                        shard.inbox.append(decision.message)

    def link(self, shard: Shard) -> None:
        shard.linked = True
        shard.inbox.clear()
        shard.outbox.clear()
        self.carry_out(
            self.coordinator.hello(
                0.0,
                ServerPosition(
                    shard.index,
                    1,
                    shard.active.version,
                    incarnation=shard.incarnation,
                    last=shard.received,
                    prepared=tuple(shard.active.prepared),
                ),
            )
        )
        shard.outbox.extend(shard.staged.values())
        shard.outbox.append(shard.active.version)

    def receive(self, shard: Shard) -> None:
        message = shard.inbox.popleft()
        match message:
            case NormRequest():
                shard.requests[message.version] = message
            case Commit():
                if message.version < shard.active.version:
                    return
                if shard.received is None or message.version > shard.received.version:
                    shard.received = message
                shard.commits[message.version] = message
            case Reject():
                shard.staged.pop(key_of(message.id), None)

    def prepare(self, shard: Shard) -> None:
        request = shard.requests.pop(shard.active.version, None)
        if request is None:
            return
        contributions = tuple(request.contributions)
        if not self.rules.replicates:
            assert all(key_of(c.id) in shard.staged for c in contributions), "a shard holds what a decision names"
        elif shard.active.prepared != contributions:
            if any(key_of(c.id) not in shard.staged for c in contributions):
                return  # withdrawn meanwhile
            shard.active.prepared = shard.standby.prepared = contributions
        shard.outbox.append(Norm(term=1, version=request.version, sum_of_squares=4.0, round=request.round))

    def apply(self, shard: Shard) -> None:
        self.prepare(shard)
        commit = shard.commits.pop(shard.active.version, None)
        if commit is None:
            return
        if self.rules.replicates:
            assert shard.active.prepared == tuple(commit.contributions), "a shard holds what a commit names"
        else:
            assert all(key_of(c.id) in shard.staged for c in commit.contributions), "a shard holds what a commit names"
        decided = commit.SerializeToString(deterministic=True)
        assert self.history.setdefault(commit.version, decided) == decided, "T1, T6: one history"
        state = shard.standby.state
        for held in (shard.active, shard.standby):
            held.version += 1
            held.last, held.prepared, held.history = commit, (), (*held.history, commit)
        if state is not None:
            shard.standby.state = after(state, commit)
        for staged_key, staged in list(shard.staged.items()):
            if self.rules.mode == "Sync" or any(c.id == staged.id for c in commit.contributions):
                del shard.staged[staged_key]
        shard.published = shard.active.version
        shard.outbox.append(shard.active.version)

    def speak(self, shard: Shard) -> None:
        message = shard.outbox.popleft()
        match message:
            case Staged():
                self.carry_out(self.coordinator.report(0.0, shard.index, message))
            case Norm():
                self.carry_out(self.coordinator.report(0.0, shard.index, message))
            case int():
                self.carry_out(self.coordinator.report(0.0, shard.index, Applied(version=message)))

    def cut(self, shard: Shard) -> None:
        """The link to the coordinator breaks; messages on the way are lost."""
        shard.linked = False

    def restart_worker(self, rank: int) -> None:
        """The pod of a rank is replaced; its gradients stay on the shards."""
        self.workers[rank] = None
        self.incarnations[rank] += 1
        self.carry_out(self.coordinator.joined(0.0, rank, self.incarnations[rank]))

    def kill(self, shard: Shard) -> None:
        """The active server dies; its standby serves, and a new standby is filled from it."""
        shard.incarnation += 1
        shard.active = dataclasses.replace(shard.standby, state=None)
        shard.received = shard.active.last
        shard.published = shard.active.version
        shard.staged.clear()
        shard.commits.clear()
        shard.requests.clear()
        shard.linked = False
        self.workers = [None] * len(self.workers)  # they join again, and push again
        if shard.index == 0:
            assert shard.standby.state is not None
            self.coordinator = Coordinator.resume(
                self.rules,
                shard.standby.state.copy(),
                self.start,
                last=shard.active.last,
                prepared=shard.active.prepared,
                incarnation=shard.incarnation,
            )
            for each in self.shards:
                each.linked = False

    def push(self, rank: int) -> None:
        versions = {shard.published for shard in self.shards}
        if self.rules.mode == "Sync" and len(versions) > 1:
            return
        version = min(versions)
        self.carry_out(self.coordinator.worker_at(0.0, 1, version))
        key_step = version
        if self.rules.mode == "Async":
            key_step = self.coordinator.state.key_steps.get(rank, 0)
        self.attempt += 1
        gradient = GradientId(
            term=1,
            version=version,
            rank=rank,
            key_step=key_step,
            incarnation=self.incarnations[rank],
            attempt=self.attempt,
        )
        for shard in self.shards:
            staged = Staged(id=gradient, info=GradientInfo(finite=self.random.random() < 0.9))
            shard.staged[key_of(gradient)] = staged
            if shard.linked:
                shard.outbox.append(staged)
        self.workers[rank] = gradient

    def step(self, chaos: float) -> None:
        shard = self.random.choice(self.shards)
        if self.random.random() < chaos:
            fault = self.random.randrange(4)
            if fault == 0:
                self.cut(shard)
            elif fault == 1:
                self.restart_worker(self.random.randrange(len(self.workers)))
            elif self.rules.replicates:
                self.kill(shard)
        elif not shard.linked:
            self.link(shard)
        else:
            what = self.random.randrange(4)
            rank = self.random.randrange(len(self.workers))
            if what == 0 and shard.inbox:
                self.receive(shard)
            elif what == 1 and shard.outbox:
                self.speak(shard)
            elif what == 2:
                self.apply(shard)
            elif what == 3 and self.wants_to_push(rank):
                self.push(rank)

    def wants_to_push(self, rank: int) -> bool:
        gradient = self.workers[rank]
        if gradient is None:
            return True
        if all(key_of(gradient) not in shard.staged for shard in self.shards):
            return True  # it was used, or refused
        return self.rules.mode == "Sync" and min(shard.published for shard in self.shards) > gradient.version


def trains_to_the_end(job: Job, faults: tuple[int, float]) -> None:
    """Run a job with faults (number of actions, probability of a fault in each), then without; check its histories."""
    actions, probability = faults
    for _ in range(actions):
        job.step(probability)
    for _ in range(6_000):
        if all(shard.active.version == STEPS for shard in job.shards):
            break
        job.step(0.0)
    else:
        pytest.fail(f"T8: the shards stay at versions {[shard.active.version for shard in job.shards]}")
    histories = [[commit.SerializeToString(deterministic=True) for commit in s.active.history] for s in job.shards]
    assert all(history == histories[0] for history in histories)
    used = [(c.id.rank, c.id.key_step) for commit in job.shards[0].active.history for c in commit.contributions]
    assert len(used) == len(set(used)), "T3"


SIZES = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 1))
FAULTS = st.sampled_from([(600, 0.03), (300, 0.1), (200, 0.2), (100, 0.3)])
SEEDS = st.integers(0, 2**32)


def job_of(mode: str, sizes: tuple[int, int, int], seed: int, *, replicates: bool = True) -> Job:
    shards, ranks, backups = sizes
    return Job(shards, ranks, backups if mode == "Sync" else 0, mode, Random(seed), replicates=replicates)


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=SIZES, faults=FAULTS, seed=SEEDS)
@example(sizes=(3, 1, 0), faults=(600, 0.03), seed=600548)  # Async: an answer to a dead coordinator's decision counted
def test_after_any_failure_there_is_one_history_and_nothing_of_it_is_lost(mode: str, sizes, faults, seed) -> None:
    trains_to_the_end(job_of(mode, sizes, seed), faults)


@pytest.mark.parametrize("mode", ["Sync", "Async"])
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(sizes=SIZES, faults=FAULTS, seed=SEEDS)
@example(
    sizes=(3, 2, 0), faults=(300, 0.1), seed=101117
)  # a refused gradient was accepted from a shard that linked again
def test_t8_broken_links_and_replaced_workers_do_not_stop_a_job_without_standbys(
    mode: str, sizes, faults, seed
) -> None:
    trains_to_the_end(job_of(mode, sizes, seed, replicates=False), faults)


def test_t8_a_decision_that_may_be_withdrawn_does_not_refuse_a_gradient() -> None:
    """Found by the model. After the death of a server, the worker had sent its gradient again. Two shards received its
    rejection as a duplicate, the third was not connected, and the decision was withdrawn. The worker waited forever."""
    coordinator = Coordinator(
        Rules(mode="Async", shards=3, steps=STEPS, replicates=True), CoordinatorState(term=1, version=0, world=1)
    )
    for shard in range(3):
        coordinator.hello(0.0, ServerPosition(shard, 1, 0, incarnation=1))
    first, again = (Staged(id=GradientId(term=1, attempt=n), info=GradientInfo(finite=True)) for n in (1, 2))
    said = [*coordinator.report(0.0, 0, first), *coordinator.report(0.0, 1, first), *coordinator.report(0.0, 2, first)]
    assert [type(d.message) for d in said if isinstance(d, Send)] == [NormRequest]
    assert coordinator.report(0.0, 0, again) == [], "too early to refuse it"
    taken_back = coordinator.hello(0.0, ServerPosition(2, 1, 0, incarnation=2))
    assert [d.message.id for d in taken_back if isinstance(d, Send)] == [first.id]
    said = [*coordinator.report(0.0, 1, again), *coordinator.report(0.0, 2, again)]
    (request,) = [d.message for d in said if isinstance(d, Send)]
    assert [contribution.id for contribution in request.contributions] == [again.id]


def test_t8_a_gradient_that_was_refused_is_refused_by_every_shard() -> None:
    """Found by the model. A shard was not connected when a gradient was refused, and reported the gradient later. Then
    the older complete gradient was dropped, though the other shard held only that one."""
    coordinator = Coordinator(Rules(mode="Sync", shards=2, steps=STEPS), CoordinatorState(term=1, version=0, world=2))
    complete, again = (Staged(id=GradientId(term=1, attempt=n), info=GradientInfo(finite=True)) for n in (1, 2))
    for shard in (0, 1):
        coordinator.hello(0.0, ServerPosition(shard, 1, 0))
        coordinator.report(0.0, shard, complete)
    refused = Reject(id=again.id, reason=RejectReason.DUPLICATE)
    assert Send(None, refused) in coordinator.report(0.0, 0, again)
    coordinator.hello(0.0, ServerPosition(1, 1, 0))  # its link broke
    assert Send(None, refused) in coordinator.report(0.0, 1, again)
    coordinator.report(0.0, 1, complete)
    other = Staged(id=GradientId(term=1, rank=1), info=GradientInfo(finite=True))
    said = [*coordinator.report(0.0, 0, other), *coordinator.report(0.0, 1, other)]
    (commit,) = [d.message for d in said if isinstance(d, Send)]
    assert [contribution.id for contribution in commit.contributions] == [complete.id, other.id]


def test_a_stale_standby_begins_a_new_term() -> None:
    """The standby is behind a worker, or behind a shard by more than the mean that it holds: a new term begins."""
    rules = Rules(mode="Sync", shards=2, steps=STEPS, replicates=True)
    start = Rollback(term=1, version=0, world=1)

    def resumed() -> Coordinator:
        return Coordinator.resume(rules, CoordinatorState(term=1, version=2, world=1), start, last=None, prepared=())

    assert resumed().worker_at(0.0, 1, 3) == [Restart(0)]
    assert resumed().worker_at(0.0, 1, 2) == []
    newer = resumed()
    assert newer.worker_at(0.0, 2, 1) == [Restart(0)], "a worker has a term that this history lacks"
    assert newer.worker_at(0.0, 2, 1) == []
    assert newer.restart(0.0, CoordinatorState(term=2, version=0, world=1), "") == [Restart(0)]
    ahead = Commit(term=1, version=2, contributions=[Contribution(id=GradientId(term=1, version=2))], world=1)
    assert resumed().hello(0.0, ServerPosition(1, 1, 3, incarnation=1, last=ahead)) == [Restart(1)]
    far = Commit(term=1, version=4, world=1)
    assert resumed().hello(0.0, ServerPosition(1, 1, 5, incarnation=1, last=far)) == [Restart(1)]


@pytest.mark.parametrize("shards", [1, 2])
def test_t1_a_standby_with_a_mean_waits_for_another_shard_that_received_the_update(shards: int) -> None:
    """With one shard no other one can report the commit. Another set of contributions would make another version."""
    rules = Rules(mode="Async", shards=shards, steps=STEPS, replicates=True)
    prepared = (Contribution(id=GradientId(term=1, version=2)),)
    start, state = Rollback(term=1, version=0, world=1), CoordinatorState(term=1, version=2, world=2)
    job = Coordinator.resume(rules, state, start, last=None, prepared=prepared)
    assert job.worker_at(0.0, 1, 3) == ([] if shards > 1 else [Restart(0)])
    assert job.worker_at(0.0, 1, 4) == ([Restart(0)] if shards > 1 else [])


def test_t8_a_standby_receives_nothing_of_an_abandoned_history() -> None:
    """The standby's shard is still at the end of the old term, while the coordinator has begun the next."""
    rules = Rules(mode="Sync", shards=2, steps=STEPS, replicates=True)
    coordinator = Coordinator(rules, CoordinatorState(term=1, version=0, world=1))
    known = coordinator.state_at(1, 0)
    assert known == coordinator.state
    assert known is not coordinator.state
    coordinator.restart(0.0, CoordinatorState(term=2, version=0, world=1), "")
    assert coordinator.state_at(1, 0) is None
    assert coordinator.state_at(2, 5) is None


def test_t6_a_new_term_begins_at_a_checkpoint_newer_than_the_standbys_state() -> None:
    """The server abandoned the standby, and the operator promoted it, so its state is not the newest."""
    rules = Rules(mode="Sync", shards=1, steps=STEPS, replicates=True, stores=True)
    start = Rollback(term=1, version=0, world=1)

    def resumed(at: tuple[int, int]) -> Coordinator:
        state = CoordinatorState(term=1, version=2, world=1)
        return Coordinator.resume(rules, state, start, last=None, prepared=(), checkpoint="c", checkpoint_at=at)

    assert resumed((1, 2)).start(0.0) == []
    assert resumed((0, 5)).start(0.0) == []
    assert resumed((1, 3)).start(0.0) == [Restart(0)]
    assert resumed((2, 0)).start(0.0) == [Restart(0)]


def test_t6_a_successor_without_a_term_that_was_begun_does_not_begin_it_again() -> None:
    """The coordinator died after it had sent the shards back, and before its standby had the new term."""
    rules = Rules(mode="Sync", shards=2, steps=STEPS, replicates=True)
    start = Rollback(term=1, version=0, world=1)
    state = CoordinatorState(term=1, version=0, world=1)
    resumed = Coordinator.resume(rules, state, start, last=None, prepared=())
    assert resumed.hello(0.0, ServerPosition(1, 0, 0, incarnation=1, begun=2)) == [Restart(1)]
    assert resumed.newest_term == 2
    # Another shard reports a newer term while the coordinator searches the checkpoint.
    assert resumed.hello(0.0, ServerPosition(0, 0, 0, incarnation=2, begun=3)) == []
    assert resumed.restart(0.0, CoordinatorState(term=3, version=0, world=1), "") == [Restart(0)]
    assert resumed.newest_term == 3
    begun = resumed.restart(0.0, CoordinatorState(term=4, version=0, world=1), "")
    assert [d.message.term for d in begun if isinstance(d, Send)] == [4]


def test_a_checkpoint_that_died_with_its_writer_is_due_immediately() -> None:
    """T7: otherwise two intervals of work could be lost."""
    rules = Rules(mode="Sync", shards=1, steps=100, replicates=True, stores=True)
    start = Rollback(term=1, version=0, world=1)

    def requests_checkpoint(version: int, stored: int, seconds: float | None = None, since: float = 0.0) -> bool:
        """Returns whether the first update of a successor is to be stored."""
        resumed = Coordinator.resume(
            rules,
            CoordinatorState(term=1, version=version, world=1),
            start,
            last=None,
            prepared=(),
            checkpoint_at=(1, stored),
            since_checkpoint=since,
            intervals=Intervals(20 if seconds is None else None, seconds),
            now=1000.0,
        )
        resumed.hello(1000.0, ServerPosition(0, 1, version, incarnation=2))
        gradient = GradientId(term=1, version=version, rank=0, key_step=version)
        resumed.report(1000.0, 0, Staged(id=gradient, info=GradientInfo(finite=True)))
        said = resumed.report(1000.0, 0, Norm(term=1, version=version, round=1))
        (commit,) = [d.message for d in said if isinstance(d, Send) and isinstance(d.message, Commit)]
        return commit.checkpoint

    assert requests_checkpoint(45, 20), "that of step 40 was begun"
    assert not requests_checkpoint(45, 40)
    assert not requests_checkpoint(15, -1)
    assert requests_checkpoint(45, 40, seconds=60.0, since=61.0), "the time since the last one outlives the coordinator"
    assert not requests_checkpoint(45, 40, seconds=60.0, since=30.0)


def test_a_commit_of_the_previous_coordinator_is_reported_with_its_loss() -> None:
    """The standby that held the mean has the loss."""
    rules = Rules(mode="Sync", shards=2, steps=STEPS, replicates=True)
    contributions = [Contribution(id=GradientId(term=1, version=2, key_step=2), weight=1.0)]
    commit = Commit(term=1, version=2, contributions=contributions, world=1, offset=0)
    resumed = Coordinator.resume(
        rules,
        CoordinatorState(term=1, version=2, world=1),
        Rollback(term=1, version=0, world=1),
        last=None,
        prepared=contributions,
        infos=[GradientInfo(loss=0.5)],
    )
    said = resumed.hello(0.0, ServerPosition(1, 1, 3, incarnation=1, last=commit, prepared=contributions))
    (updated,) = [decision for decision in said if isinstance(decision, Updated)]
    assert updated.adopted
    assert [info.loss for info in updated.infos] == [0.5]
    assert updated.commit == commit


def test_t8_a_job_taken_over_at_its_end_does_not_wait_for_an_evaluator_that_left() -> None:
    """The previous coordinator had reported the end of the job, at least to worker 0. If worker 0 or an evaluator is
    still here, it reports its evaluation again."""
    rules = Rules(mode="Sync", shards=1, steps=STEPS, replicates=True, stores=True, evaluates=True)
    start = Rollback(term=1, version=0, world=1)

    def resumed() -> Coordinator:
        state = CoordinatorState(term=1, version=STEPS, world=1)
        found = Coordinator.resume(
            rules, state, start, last=None, prepared=(), checkpoint="c", checkpoint_at=(1, STEPS), now=0.0
        )
        assert found.start(0.0) == []
        return found

    alone = resumed()
    assert not any(isinstance(decision, Finished) for decision in alone.tick(29.0))
    assert any(isinstance(decision, Finished) for decision in alone.tick(31.0))
    with_worker = resumed()
    with_worker.joined(5.0, 0, 1)
    assert with_worker.tick(31.0) == []
    assert any(isinstance(decision, Finished) for decision in with_worker.evaluated(40.0, STEPS))
