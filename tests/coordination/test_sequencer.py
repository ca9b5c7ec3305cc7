"""T1, T6, T8: decisions are carried out in order, one at a time, for the links that are current."""

from __future__ import annotations

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import (
    Coordinator,
    CoordinatorState,
    Finished,
    Message,
    Restart,
    Rules,
    Send,
    Sequencer,
    ServerPosition,
    WriteManifest,
    carry_out,
)
from backstay_rpc.control_pb2 import Applied, Commit, GradientId, GradientInfo, Rollback, Save, Staged


class Link:
    """A link that reports a staged gradient as soon as it has a version, from inside `deliver`."""

    def __init__(self, sequencer: Sequencer, shard: int, *, eager: bool = False) -> None:
        self.sequencer, self.shard, self.eager = sequencer, shard, eager
        self.received: list[Message] = []

    def deliver(self, message: Message) -> None:
        self.received.append(message)
        if not self.eager:
            return
        match message:
            case Rollback():
                self.stage(message.term, message.version)
            case Commit():
                self.sequencer.report(0.0, self.shard, Applied(version=message.version + 1), self)
                self.stage(message.term, message.version + 1)

    def stage(self, term: int, version: int) -> None:
        gradient = GradientId(term=term, version=version, key_step=version, attempt=version + 1)
        staged = Staged(id=gradient, info=GradientInfo(finite=True, examples=1))
        self.sequencer.report(0.0, self.shard, staged, self)


def sequencer_of(shards: int, steps: int = 4) -> Sequencer:
    rules = Rules(mode="Sync", shards=shards, steps=steps)
    made = Sequencer(Coordinator(rules, CoordinatorState(term=1, version=0, world=1)))
    made.add(0.0, made.coordinator.start(0.0))
    return made


class Silent:
    """An observer that keeps the end."""

    def __init__(self) -> None:
        self.ends: list[Finished] = []

    def finished(self, now: float, finished: Finished) -> None:
        self.ends.append(finished)

    def __getattr__(self, name: str) -> object:
        return lambda *_: None


def taken(sequencer: Sequencer, observer: object) -> Iterator[WriteManifest | Restart | None]:
    """Take the decisions as one caller."""
    if sequencer.begin():
        while (due := sequencer.take()) is not None:
            yield carry_out(due, observer)  # type: ignore[arg-type]


def test_t1_links_that_answer_inside_a_delivery_get_every_commit_in_order() -> None:
    sequencer, observer = sequencer_of(shards=3, steps=40), Silent()
    links = [Link(sequencer, shard, eager=True) for shard in range(3)]
    for link in links:
        sequencer.attach(0.0, link, ServerPosition(link.shard, 0, 0))
    assert list(taken(sequencer, observer)).count(None) > 120
    for link in links:
        versions = [message.version for message in link.received if isinstance(message, Commit)]
        assert versions == list(range(40)), "each shard gets every commit once"
    assert [end.version for end in observer.ends] == [40]
    assert not sequencer.begin(), "nothing is left"


def test_one_caller_takes_decisions_at_a_time() -> None:
    sequencer = sequencer_of(shards=1)
    assert not sequencer.begin(), "there is nothing to take"
    sequencer.add(0.0, [Send(None, Save(version=1)), Send(None, Save(version=2))])
    assert sequencer.begin()
    assert not sequencer.begin(), "another caller takes them"
    assert sequencer.take() is not None
    sequencer.add(0.0, [Send(None, Save(version=3))])
    assert not sequencer.begin(), "the caller that takes them gets later ones too"
    assert [sequencer.take() is None for _ in range(3)] == [False, False, True]
    sequencer.add(0.0, [Send(None, Save(version=4))])
    assert sequencer.begin(), "after its last `take`, another caller can begin"


def test_t6_reports_of_a_replaced_link_are_ignored_and_its_end_has_no_effect() -> None:
    sequencer, observer = sequencer_of(shards=1), Silent()
    old, new = Link(sequencer, 0), Link(sequencer, 0)
    sequencer.attach(0.0, old, ServerPosition(0, 0, 0))
    sequencer.attach(0.0, new, ServerPosition(0, 0, 0))
    sequencer.detach(0, old)
    assert sequencer.is_current(0, new)
    assert not sequencer.is_current(0, old)
    old.stage(1, 0)
    assert sequencer.coordinator.state.version == 0
    new.stage(1, 0)
    assert sequencer.coordinator.state.version == 1
    list(taken(sequencer, observer))
    assert not any(isinstance(message, Commit) for message in old.received)
    sequencer.detach(0, new)
    assert not sequencer.is_current(0, new)


def test_t8_reports_before_the_attachment_follow_the_position_in_their_order() -> None:
    """A server that takes over serves workers before it gives its position; no report is lost or counted twice."""
    sequencer, observer = sequencer_of(shards=1), Silent()
    own = Link(sequencer, 0)
    for term, version in ((0, 0), (1, 0), (1, 0), (1, 1)):  # of a history that was left, counted, repeated, the next
        gradient = GradientId(term=term, version=version, key_step=version, attempt=version + 1)
        staged = Staged(id=gradient, info=GradientInfo(finite=True, examples=1))
        sequencer.report(0.0, 0, staged)
    list(taken(sequencer, observer))
    assert sequencer.coordinator.state.version == 0
    sequencer.attach(0.0, own, ServerPosition(0, 1, 0))
    list(taken(sequencer, observer))
    commits = [message for message in own.received if isinstance(message, Commit)]
    assert [(commit.version, len(commit.contributions)) for commit in commits] == [(0, 1), (1, 1)]
    sequencer.report(0.0, 0, Applied(version=2))
    own.stage(1, 2)
    list(taken(sequencer, observer))
    assert sequencer.coordinator.state.version == 3


@given(st.data())
def test_a_link_gets_what_was_decided_while_it_was_attached(data: st.DataObject) -> None:
    """A decision goes to the links of its moment, in the order of decisions, at any time of taking them."""
    sequencer, observer = sequencer_of(shards=2), Silent()
    links: dict[int, Link] = {}
    expected: list[tuple[Link, list[int]]] = []
    current: dict[int, list[int]] = {}
    number = 0
    for _ in range(data.draw(st.integers(0, 30))):
        shard = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["attach", "detach", "one", "all", "take"])):
            case "attach":
                links[shard], current[shard] = Link(sequencer, shard), []
                expected.append((links[shard], current[shard]))
                sequencer.attach(0.0, links[shard], ServerPosition(shard, 1, 0))
            case "detach" if shard in links:
                sequencer.detach(shard, links.pop(shard))
                current.pop(shard)
            case "one" | "all" as to:
                number += 1
                sequencer.add(0.0, [Send(shard if to == "one" else None, Save(version=number))])
                for index, numbers in current.items():
                    if to == "all" or index == shard:
                        numbers.append(number)
            case "take":
                list(taken(sequencer, observer))
    list(taken(sequencer, observer))
    for link, numbers in expected:
        assert [message.version for message in link.received if isinstance(message, Save)] == numbers
