"""The warning about a rank names, once, the member that the others wait for."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._transport._members._progress import LONG, MemberActivity, MemberProgress

PING = 2.0
LIMIT = LONG * PING
NOW = 1.0
POINTS = ("batch_wait", "evaluate", "compute", "compile", "script", "exchange", "join")


def reported(members: Sequence[MemberActivity], longest: float = 0.0) -> MemberProgress:
    progress = MemberProgress(len(members), PING, lambda point: longest)
    for member, one in enumerate(members):
        progress.reports(member, one, NOW)
    return progress


def does(point: str, began: float = 0.0, step: int | None = 7, stacks: str = "") -> MemberActivity:
    return MemberActivity(point, step, began, stacks=stacks)


def test_the_member_that_reads_its_batch_holds_up_those_in_a_collective() -> None:
    batch = does("batch_wait", 1.0, stacks='File "train.py", line 3, in batches')
    progress = reported([does("compute", stacks="x"), batch, does("compute"), MemberActivity("stop", waits=True)])
    assert progress.complaint(LIMIT + 0.9) == ""
    assert progress.complaint(LIMIT + 2.0) == (
        "nothing has changed in the pods of this rank for 21 s:\n"
        "  pod 0, 2: computes (step 7), for 22 s\n"
        "  pod 1: waits for its input batch (step 7), for 21 s\n"
        "  pod 3: waits for the others at 'stop', for 22 s\n"
        "Pod 1:\n"
        'File "train.py", line 3, in batches'
    )
    held = progress.held_up_by(NOW)
    assert held is not None
    assert (held.point, held.step, held.began, held.member) == ("batch_wait", 7, 1.0, 1)
    assert progress.stacks(but=0) == 'Pod 1:\nFile "train.py", line 3, in batches'
    progress.reports(1, does("batch_wait", 1.5), NOW)
    assert progress.complaint(LIMIT + 9.0) == "", "clocks differ a little: it is the same batch"
    progress.reports(1, does("batch_wait", 1.0, step=8), NOW)
    assert progress.complaint(LIMIT + 9.0)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ([does("exchange"), does("exchange")], "they wait for servers"),
        ([does("compute"), MemberActivity()], "the script of one has got its result"),
        ([does("compute"), does("compute", LIMIT)], "one has only begun"),
        ([does("compile"), does("compile")], "compiling takes longer"),
    ],
)
def test_a_rank_that_waits_for_others_or_compiles_is_not_named(members: Sequence[MemberActivity], why: str) -> None:
    assert reported(members).complaint(LIMIT + 1.0) == "", why


def test_members_that_compute_together_do_not_wait_for_one_of_them() -> None:
    """The clocks of members differ, and one of them always seems to have begun first."""
    held = reported([does("compute", 1.0), does("compute", 0.9)]).held_up_by(NOW)
    assert held is not None
    assert held.member == 0
    held = reported([does("batch_wait", 1.0, step=8), does("batch_wait", 0.9)]).held_up_by(NOW)
    assert held is not None
    assert held.member == 1


def test_a_report_from_before_the_leaders_own_activity_names_no_member() -> None:
    """The steps of a rank may be shorter than the time between two pings."""
    progress = reported([MemberActivity("pull", 18, NOW + 0.5, waits=True), does("compute", 0.0, step=12)])
    assert progress.held_up_by(NOW + 0.5) is None
    progress.reports(1, does("compute", NOW + 0.6, step=18), NOW + 2.0)
    held = progress.held_up_by(NOW + 0.5)
    assert held is not None
    assert (held.member, held.step) == (1, 18)


def test_members_that_all_wait_for_each_other_are_a_deadlock() -> None:
    """One of them is at another decision, so no answer will come."""
    first, second = MemberActivity("pull", waits=True), MemberActivity("reconnect", None, 5.0, waits=True)
    assert reported([first, second]).deadlock(LIMIT + 4.0) == ""
    assert reported([first, second]).deadlock(LIMIT + 5.0) == (
        "all pods of the rank wait for each other: pod 0: waits for the others at 'pull', for 25 s; "
        "pod 1: waits for the others at 'reconnect', for 20 s"
    )
    assert reported([first, does("compute")]).deadlock(1e6) == ""
    assert reported([first, MemberActivity()]).deadlock(1e6) == "", "its script may take long"


def test_other_code_of_the_script_has_three_minutes() -> None:
    """One pod waits for the other at the end, or in a collective that it began after training."""
    ends = MemberActivity("end", waits=True)
    progress = reported([does("script", step=None, stacks="File x"), ends])
    assert progress.complaint(9 * LIMIT - 1) == ""
    complaint = progress.complaint(9 * LIMIT)
    assert "pod 0: runs other code of the script, for 180 s" in complaint
    assert complaint.endswith("Pod 0:\nFile x")


def test_steps_that_always_take_long_are_not_named() -> None:
    members = [does("compute"), does("compute")]
    assert reported(members, longest=LIMIT).complaint(LIMIT * 3 - 1) == ""
    assert reported(members, longest=LIMIT).complaint(LIMIT * 3 + 1)


def test_no_warning_comes_before_all_have_reported() -> None:
    progress = MemberProgress(3, PING, lambda point: 0.0)
    progress.reports(0, does("compute"), NOW)
    progress.reports(2, does("compute"), NOW)
    assert progress.complaint(1e6) == ""


@given(
    members=st.lists(
        st.builds(
            MemberActivity, st.sampled_from(("", *POINTS)), st.just(7), st.floats(0, 100), st.booleans(), st.just("")
        ),
        min_size=2,
        max_size=5,
    ),
    now=st.floats(0, 400),
)
def test_the_named_member_is_one_that_does_not_wait(members: Sequence[MemberActivity], now: float) -> None:
    progress = reported(members)
    held = progress.held_up_by(NOW)
    if held is not None:
        assert not members[held.member].waits
        busy = [one.point for one in members if one.point and not one.waits]
        assert POINTS.index(held.point) == min(map(POINTS.index, busy))
    if complaint := progress.complaint(now):
        assert held is not None
        assert all(one.point and now - one.began >= LIMIT for one in members)
        assert progress.complaint(now) == ""
        lines = complaint.splitlines()[1:]
        assert sorted(int(m) for line in lines for m in line.split(":")[0].replace("  pod ", "").split(", ")) == list(
            range(len(members))
        )
