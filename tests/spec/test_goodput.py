"""The parts of the account of goodput add up to the seconds of the pods and of slots without one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_spec.goodput import (
    FRESH,
    MEASURED,
    PARTS,
    Account,
    SecondsReport,
    WorkerPod,
    goodput,
    is_measured,
    parts_of,
)

T0 = 1_700_000_000.0


def measured(**parts: float) -> tuple[float, ...]:
    assert parts.keys() <= set(MEASURED)
    return tuple(parts.get(part, 0.0) for part in MEASURED)


def named(parts: tuple[float, ...]) -> dict[str, float]:
    return {part: seconds for part, seconds in zip(PARTS, parts, strict=True) if seconds}


def test_a_pod_is_counted_up_to_its_last_report_while_it_lives() -> None:
    pod = WorkerPod((0, 1), start=T0)
    assert named(parts_of(pod, None, T0 + 4)) == {"starting": 4}
    report = SecondsReport(T0 + 20, measured(starting=5, applied=10, computing=2))
    known = {"starting": 5 + 3, "applied": 10, "computing": 2}  # the process began 3 s after the pod
    assert named(parts_of(pod, report, T0 + 20 + FRESH)) == known
    silent = named(parts_of(pod, report, T0 + 60))
    assert silent == {**known, "missing": 40}
    assert named(parts_of(pod, report, T0 + 60, over=True)) == known


def test_what_a_dead_pod_computed_last_is_missing() -> None:
    report = SecondsReport(T0 + 20, measured(applied=17, computing=3))
    killed = WorkerPod((0, 1), start=T0, end=T0 + 21)
    assert named(parts_of(killed, report, T0 + 50)) == {"applied": 17, "missing": 4}
    ended = WorkerPod((0, 1), start=T0, end=T0 + 21, succeeded=True)
    assert named(parts_of(ended, report, T0 + 50)) == {"applied": 17, "missing": 3, "ending": 1}


def test_a_termination_message_is_newer_than_every_report() -> None:
    """It was written at 28 s; then the script continued for 2 s."""
    report = SecondsReport(T0 + 20, measured(starting=5, applied=10))
    pod = WorkerPod((0, 1), start=T0, end=T0 + 30, succeeded=True, measured=measured(starting=5, applied=15, wait=3))
    assert named(parts_of(pod, report, T0 + 99)) == {"starting": 5 + 5, "applied": 15, "wait": 3, "ending": 2}
    assert named(parts_of(pod, None, T0 + 99)) == {"starting": 5 + 7, "applied": 15, "wait": 3}


def test_a_rollback_after_a_termination_message_counts() -> None:
    report = SecondsReport(T0 + 20, measured(applied=20), unsaved=5, version=9).rolled_back(4)
    pod = WorkerPod((0, 1), start=T0, end=T0 + 21, measured=measured(applied=21))
    assert named(parts_of(pod, report, T0 + 99)) == {"applied": 16, "redone": 5}


@pytest.mark.parametrize("seconds", [(), (1.0,), measured(applied=-1), measured(wait=float("nan"))])
def test_reports_that_are_nonsense_are_ignored(seconds: tuple[float, ...]) -> None:
    assert not is_measured(seconds)
    account = Account()
    account.observe(T0, [WorkerPod((0, 1), T0)], 1)
    account.report({(0, 1): SecondsReport(T0 + 1, seconds), (7, 1): SecondsReport(T0 + 1, measured(applied=1))})
    assert account.seconds(T0 + 3)["starting"] == 3


def test_without_seconds_there_is_no_goodput() -> None:
    assert goodput({}) is None
    assert goodput({"applied": 3.0, "wait": 1.0}) == 0.75


def test_a_slot_without_a_pod_is_missing_once_a_pod_had_a_node() -> None:
    account = Account()
    account.observe(T0, [], 3)
    account.observe(T0 + 100, [WorkerPod((0, 1), T0 + 99)], 3)
    account.observe(T0 + 110, [WorkerPod((0, 1), T0 + 99), WorkerPod((2, 1), T0 + 110)], 3)
    seconds = account.seconds(T0 + 110)
    assert seconds["missing"] == 20
    assert sum(seconds.values()) == 30
    account.observe(T0 + 120, [WorkerPod((0, 1), T0 + 99), WorkerPod((2, 1), T0 + 110)], 0)  # suspended, say
    assert account.seconds(T0 + 120)["missing"] == 20


def test_a_pod_that_vanished_keeps_its_seconds_and_its_last_report_may_come_late() -> None:
    account = Account()
    account.observe(T0, [WorkerPod((0, 1), T0)], 1)
    account.report({(0, 1): SecondsReport(T0 + 10, measured(applied=10))})
    account.observe(T0 + 14, [], 1)
    assert account.seconds(T0 + 14)["missing"] == 4
    account.report({(0, 1): SecondsReport(T0 + 13, measured(applied=13))})
    account.observe(T0 + 14 + FRESH, [], 1)
    account.report({(0, 1): SecondsReport(T0 + 14, measured(applied=14))})  # too late
    assert dict(zip(PARTS, account.gone, strict=True)) == dict.fromkeys(PARTS, 0.0) | {
        "applied": 13,
        "missing": 1 + FRESH,
    }


def test_reports_count_although_the_clock_of_the_operator_is_set_back() -> None:
    """The newest report was that with the latest time, so all reports of an hour were ignored."""
    account = Account()
    account.observe(T0, [WorkerPod((0, 1), T0)], 1)
    account.report({(0, 1): SecondsReport(T0 + 3610, measured(applied=10))})
    account.report({(0, 1): SecondsReport(T0 + 20, measured(applied=20))})
    assert account.seconds(T0 + 22)["applied"] == 20
    assert account.seconds(T0 + 22)["starting"] == 0
    account.report({(0, 1): SecondsReport(T0 + 30, measured(applied=10))})  # an old one, which comes late
    assert account.seconds(T0 + 22)["applied"] == 20


def test_a_rollback_makes_applied_seconds_redone_also_those_of_pods_that_are_gone() -> None:
    account = Account()
    account.observe(T0, [WorkerPod((0, 1), T0), WorkerPod((1, 1), T0)], 2)
    account.progressed(1, 0, 0, 0)
    account.report(
        {
            (0, 1): SecondsReport(T0 + 10, measured(applied=10), unsaved=4, version=50),
            (1, 1): SecondsReport(T0 + 10, measured(applied=10), unsaved=4, version=50),
        }
    )
    account.observe(T0 + 10, [WorkerPod((0, 1), T0)], 2)
    account.observe(T0 + 30, [WorkerPod((0, 1), T0)], 2)
    account.progressed(1, 0, 0, 40)
    assert account.seconds(T0 + 30)["redone"] == 0
    account.progressed(2, 40, 10, 40)
    assert account.seconds(T0 + 30)["redone"] == 8
    assert account.seconds(T0 + 30)["applied"] == 12
    account.progressed(2, 40, 10, 40)
    account.report({(0, 1): SecondsReport(T0 + 25, measured(applied=14, wait=5, redone=6))})
    assert account.seconds(T0 + 30)["redone"] == 6 + 4


def test_what_a_checkpoint_holds_is_not_redone() -> None:
    account = Account()
    account.observe(T0, [WorkerPod((0, 1), T0)], 1)
    account.report({(0, 1): SecondsReport(T0 + 10, measured(applied=10), unsaved=4, version=50)})
    account.progressed(1, 0, 0, 40)
    account.observe(T0 + 10, [], 1)
    account.observe(T0 + 30, [], 1)
    account.progressed(1, 0, 0, 60)
    account.progressed(2, 60, 12, 60)
    assert account.seconds(T0 + 30)["redone"] == 0


def test_another_operator_continues_the_account() -> None:
    """One pod lives, one ended and was deleted while no operator ran."""
    account = Account()
    pods = [WorkerPod((0, 1), T0), WorkerPod((1, 1), T0)]
    account.observe(T0, pods, 2)
    account.report({key: SecondsReport(T0 + 20, measured(applied=20)) for key in ((0, 1), (1, 1))})
    account.observe(T0 + 20, pods, 2)
    gone = dict(zip(PARTS, account.gone, strict=True))
    after = Account.continued(account.seconds(T0 + 20), gone, account.until, 1)
    after.observe(T0 + 25, [WorkerPod((0, 1), T0)], 2)
    after.report({(0, 1): SecondsReport(T0 + 25, measured(applied=25))})
    seconds = after.seconds(T0 + 25)
    assert seconds["applied"] == 25
    assert seconds["missing"] == 20 + 5
    assert sum(seconds.values()) == 50


@pytest.mark.parametrize("end", [None, T0 + 101])
def test_a_continued_account_keeps_what_is_known_of_pods_without_a_new_report(end: float | None) -> None:
    pod = WorkerPod((0, 1), T0, end)
    parts = {"applied": 80.0, "wait": 20.0, "missing": 1.0}
    after = Account.continued(parts, {}, T0 + 101, 1)
    after.observe(T0 + 102, [pod], 1 if end is None else 0)
    if end is None:
        assert after.seconds(T0 + 102) == pytest.approx(dict.fromkeys(PARTS, 0.0) | parts | {"missing": 0.0})
        after.report({pod.key: SecondsReport(T0 + 102, measured(applied=81, wait=21))})
        parts = {"applied": 81, "wait": 21}
    assert after.seconds(T0 + 102) == pytest.approx(dict.fromkeys(PARTS, 0.0) | parts)


def test_a_continued_account_divides_what_no_termination_message_reports() -> None:
    """Pod 0 says what it did; pods 1 and 2 do not; one of three is new."""
    pods = [
        WorkerPod((0, 1), T0, T0 + 50, measured=measured(starting=10, applied=40)),
        WorkerPod((1, 1), T0, T0 + 50),
        WorkerPod((2, 1), T0 + 60, None),
    ]
    after = Account.continued({"starting": 10, "applied": 80, "missing": 10}, {}, T0 + 50, 1)
    after.observe(T0 + 60, pods, 0)
    seconds = after.seconds(T0 + 60)
    assert (seconds["starting"], seconds["applied"], seconds["missing"]) == pytest.approx((10, 80, 10))


EVENTS = st.lists(
    st.tuples(
        st.floats(0.1, 20),
        st.integers(0, 3),
        st.sampled_from(["kill", "create", "report", "end", "delete", "rollback", "restart", "scale"]),
        st.floats(0, 1),
    ),
    max_size=40,
)


class _Cluster:
    """Worker pods in a model of a cluster, where what is paid is known."""

    def __init__(self) -> None:
        self.now, self.slots, self.paid, self.term, self.version = T0, 2, 0.0, 1, 0
        self.pods: dict[tuple[int, int], dict[str, Any]] = {}
        self.incarnations = dict.fromkeys(range(4), 0)

    def create(self, rank: int) -> None:
        self.incarnations[rank] += 1
        self.pods[rank, self.incarnations[rank]] = {"start": self.now, "end": None, "measured": measured()}

    def alive(self, rank: int) -> list[dict[str, Any]]:
        return [pod for (r, _), pod in self.pods.items() if r == rank and pod["end"] is None]

    def passes(self, seconds: float, share: float) -> None:
        self.now += seconds
        for rank in range(4):
            alive = self.alive(rank)
            self.paid += seconds * max(len(alive), 1 if rank < self.slots else 0)
            for pod in alive:
                more = measured(applied=seconds * share, wait=seconds * (1 - share))
                pod["measured"] = tuple(a + b for a, b in zip(pod["measured"], more, strict=True))

    def shown(self) -> list[WorkerPod]:
        return [WorkerPod(key, pod["start"], pod["end"]) for key, pod in self.pods.items()]

    def reports(self) -> dict[tuple[int, int], SecondsReport]:
        applied = MEASURED.index("applied")
        return {
            key: SecondsReport(self.now, pod["measured"], pod["measured"][applied] / 2, self.version)
            for key, pod in self.pods.items()
            if pod["end"] is None
        }


@given(EVENTS)
@settings(max_examples=300)
def test_the_parts_add_up_to_the_seconds_of_the_pods_for_any_events(events: list[tuple[Any, ...]]) -> None:
    cluster, account = _Cluster(), Account()
    for rank in range(cluster.slots):
        cluster.create(rank)
    account.observe(cluster.now, cluster.shown(), cluster.slots)
    for seconds, rank, event, share in events:
        cluster.passes(seconds, share)
        cluster.version += 1
        account.observe(cluster.now, cluster.shown(), cluster.slots)
        match event:
            case "kill" | "end":
                for pod in cluster.alive(rank):
                    pod["end"] = cluster.now
            case "delete":
                for key in [key for key in cluster.pods if key[0] == rank]:
                    del cluster.pods[key]
            case "create":
                cluster.create(rank)
            case "report":
                account.report(cluster.reports())
            case "rollback":
                cluster.term += 1
                account.progressed(cluster.term, cluster.version // 2, cluster.version, 0)
            case "restart":
                account.report(cluster.reports())
                seconds_now = account.seconds(cluster.now)
                gone = dict(zip(PARTS, account.gone, strict=True))
                account = Account.continued(seconds_now, gone, account.until, cluster.term)
            case "scale":
                cluster.slots = rank
        account.observe(cluster.now, cluster.shown(), cluster.slots)
    account.report(cluster.reports())
    found = account.seconds(cluster.now)
    assert min(found.values()) >= 0
    assert sum(found.values()) == pytest.approx(cluster.paid, abs=1e-3)
