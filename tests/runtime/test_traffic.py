"""The bytes of an update and worker, from the totals that contributions carry."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstay._report._traffic import Traffic
from backstay_rpc.control_pb2 import Commit, Contribution, GradientId, GradientInfo


def commit(*contributions: tuple[int, int, int]) -> Commit:
    """Returns an update with contributions of these ranks, incarnations and numbers."""
    found = (GradientId(rank=rank, incarnation=inc, key_step=step) for rank, inc, step in contributions)
    return Commit(contributions=[Contribution(id=one) for one in found])


def totals(carried: int, exact: int) -> GradientInfo:
    return GradientInfo(carried=carried, exact=exact)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 4), st.sampled_from(["same", "replaced", "rolled back"])),
        max_size=40,
    ),
    st.integers(1, 10**9),
    st.integers(1, 8),
)
def test_the_mean_is_exact_though_workers_die(story: list[tuple[int, int, str]], nbytes: int, ratio: int) -> None:
    """Each update costs a worker the same bytes. Updates without its contribution cost them too: it was dropped."""
    traffic = Traffic()
    incarnations, steps, carried = [1] * 3, [0] * 3, [5] * 3
    reported = 0
    for rank, skipped, event in story:
        if event == "replaced":
            incarnations[rank] += 1
            carried[rank] = 5
        elif event == "rolled back":
            steps[rank] = 0
        else:
            steps[rank] += skipped
            carried[rank] += skipped * nbytes
            reported += skipped
        traffic.add(commit((rank, incarnations[rank], steps[rank])), [totals(carried[rank], ratio * carried[rank])])
        if found := traffic.mean():
            assert (found["carried"], found["exact"]) == (nbytes, ratio * nbytes)


def test_nothing_is_known_before_the_second_update_and_from_runs_that_did_not_count() -> None:
    traffic = Traffic()
    traffic.add(commit((0, 1, 0)), [totals(100, 100)])
    assert traffic.mean() == {}
    traffic.add(commit((0, 1, 1), (1, 1, 1)), [totals(400, 800), GradientInfo()])
    assert traffic.mean() == {"carried": 300, "exact": 700}
