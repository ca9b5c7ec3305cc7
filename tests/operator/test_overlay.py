"""O1: the observed state is the index overlaid with our own writes that the watch has not shown yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from hypothesis import given
from hypothesis import strategies as st

from backstay_operator.bus import Bus
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.overlay import Overlay, Seen, version_of
from backstay_operator.rights import PODS
from backstay_spec import contract

Key: TypeAlias = tuple[str, str]
Index: TypeAlias = dict[Key, list[Seen[str]]]

KEY: Key = ("default", "job")


class Time:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def seen(uid: str, version: int) -> Seen[str]:
    return Seen(uid, f"name-{uid}", version, f"{uid}@{version}")


def make(*indexed: Seen[str], clock: Time | None = None) -> tuple[Overlay[Key, str], Index]:
    index: Index = {KEY: list(indexed)} if indexed else {}
    return Overlay(clock or Time(), index), index


def values(overlay: Overlay[Key, str]) -> list[str]:
    return [one.value for one in overlay.view(KEY)]


def test_a_created_pod_is_there_before_the_watch_shows_it() -> None:
    overlay, index = make()
    overlay.wrote(KEY, seen("a", 5))
    assert values(overlay) == ["a@5"]
    assert overlay.keys() == {KEY}
    index[KEY] = [seen("a", 7)]
    overlay.shown(KEY, "a", 7, deleted=False)
    assert values(overlay) == ["a@7"]
    assert overlay.owed_since() is None


def test_an_older_event_does_not_hide_a_newer_write() -> None:
    overlay, _ = make(seen("a", 5))
    overlay.wrote(KEY, seen("a", 9))
    overlay.shown(KEY, "a", 6, deleted=False)
    assert values(overlay) == ["a@9"]


def test_a_write_that_the_watch_overtook_is_not_kept() -> None:
    overlay, _ = make(seen("a", 9))
    overlay.wrote(KEY, seen("a", 8))
    assert values(overlay) == ["a@9"]
    assert overlay.owed_since() is None


def test_a_deleted_object_stays_deleted_after_any_late_event() -> None:
    overlay, index = make(seen("a", 5))
    overlay.removed(KEY, "a")
    assert values(overlay) == []
    index[KEY] = [seen("a", 6)]
    overlay.shown(KEY, "a", 6, deleted=False)
    overlay.wrote(KEY, seen("a", 6))
    assert values(overlay) == []
    del index[KEY]
    overlay.shown(KEY, "a", 7, deleted=True)
    assert not overlay.is_gone("a")
    assert values(overlay) == []


def test_an_answer_that_comes_after_the_deletion_was_shown_raises_nothing_from_the_dead() -> None:
    clock = Time()
    overlay, _ = make(seen("a", 5), clock=clock)
    overlay.shown(KEY, "a", 9, deleted=True)
    overlay.attach({})
    overlay.wrote(KEY, seen("a", 8))
    assert values(overlay) == []
    assert overlay.owed_since() is None
    for number in range(50):  # the records of deleted objects do not grow forever
        clock.now += 10.0
        overlay.shown(KEY, f"b{number}", 10 + number, deleted=True)
    assert len(overlay._deleted) <= 14


def test_a_write_that_was_deleted_again_is_removed() -> None:
    overlay, _ = make()
    overlay.wrote(KEY, seen("a", 5))
    overlay.shown(KEY, "a", 6, deleted=True)
    assert values(overlay) == []
    assert overlay.keys() == set()


def test_the_watch_owes_the_oldest_write_until_it_is_pardoned() -> None:
    clock = Time()
    overlay, _ = make(clock=clock)
    overlay.wrote(KEY, seen("a", 5))
    clock.now = 10.0
    overlay.wrote(KEY, seen("b", 6))
    overlay.wrote(KEY, seen("a", 7))  # written again: owed since the first time
    assert overlay.owed_since() == 0.0
    overlay.shown(KEY, "a", 7, deleted=False)
    assert overlay.owed_since() == 10.0
    clock.now = 50.0
    overlay.restart_clock()
    assert overlay.owed_since() == 50.0


def test_missing_from_a_list_is_only_what_is_older_than_the_list() -> None:
    overlay, _ = make(seen("kept", 3), seen("ghost", 4), seen("new", 12))
    overlay.wrote(KEY, seen("phantom", 6))
    listed: Mapping[str, int] = {"kept": 3}
    assert sorted(one.uid for _, one in overlay.missing_from(listed, 10)) == ["ghost", "phantom"]


def test_versions_are_numbers() -> None:
    assert version_of({"resourceVersion": "42"}) == 42
    assert version_of({}) == -1
    assert version_of({"resourceVersion": "odd"}) == -1


@given(st.lists(st.sampled_from(["create", "change", "delete"]), max_size=12), st.data())
def test_the_view_is_never_older_than_our_own_writes_and_ends_right(steps: list[str], data: st.DataObject) -> None:
    """A lagging watch shows a history of one object with steps of this operator, and the overlay never goes back."""
    history: list[tuple[str, int]] = []
    version, alive = 0, False
    for step in steps:
        if (step == "create") == alive:
            continue  # as a server would refuse
        version += 1
        alive = step != "delete"
        history.append((step, version))
    overlay, index = make()
    shown, known = 0, 0

    def show_one() -> None:
        nonlocal shown
        step, at = history[shown]
        shown += 1
        uid = f"u{sum(1 for past, _ in history[:shown] if past == 'create')}"
        if step == "delete":
            index.pop(KEY, None)
        else:
            index[KEY] = [seen(uid, at)]
        overlay.shown(KEY, uid, at, deleted=step == "delete")

    for number, (step, at) in enumerate(history):
        uid = f"u{sum(1 for past, _ in history[: number + 1] if past == 'create')}"
        if data.draw(st.booleans(), label="ours"):
            if step == "delete":
                overlay.removed(KEY, uid)
            else:
                overlay.wrote(KEY, seen(uid, at))
            known = at
        while shown <= number and data.draw(st.booleans(), label="shown"):
            show_one()
        view = overlay.view(KEY)
        if known == at:
            assert [one.version for one in view if one.uid == uid] == ([] if step == "delete" else [at])
    while shown < len(history):
        show_one()
    assert [one.version for one in overlay.view(KEY)] == ([version] if alive else [])
    assert overlay.owed_since() is None


def pod(name: str, version: int) -> dict[str, Any]:
    labels = {contract.LABEL_JOB: "job"}
    return {
        "metadata": {"namespace": "ns", "name": name, "uid": name, "resourceVersion": str(version), "labels": labels}
    }


def test_a_watch_that_moves_is_not_dead_however_much_it_owes() -> None:
    """The liveness probe uses this: it must not restart the operator because the API server is slow."""
    now = [0.0]
    metrics = OperatorMetrics(lambda: now[0])
    cluster = ClusterOverlay(lambda: now[0], metrics, Bus())
    cluster.wrote(PODS, pod("mine", 10))
    for second in range(1, 200):
        now[0] = float(second)
        if second < 100:
            cluster.event(PODS, ("ns", "job"), pod("other", second - 100), deleted=False, listed=False)
    assert cluster.owed() == 100.0  # it showed something last at 99 s
    cluster.event(PODS, ("ns", "job"), pod("mine", 10), deleted=False, listed=False)
    assert cluster.owed() == 0.0
