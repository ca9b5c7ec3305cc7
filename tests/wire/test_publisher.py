"""`Publisher` and `Published` alone decide which version answers which stream (T1, T8)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from between import LONG
from hypothesis import given
from hypothesis import strategies as st

from backstay._coordination import MODES
from backstay._shard._publisher import Published, Publisher
from backstay._transport._streams._interfaces import Refusal
from backstay_rpc.control_pb2 import Done, RejectReason
from backstay_rpc.refusals import RefusalCode


def push(version: int, *, applied: int | None = None, outcome: RejectReason = RejectReason.REJECT_UNSPECIFIED) -> Any:
    """Returns the fields of a pushed gradient that decide about its answer."""
    return SimpleNamespace(id=SimpleNamespace(version=version), applied=applied, outcome=outcome)


@given(st.integers(0, 5), st.lists(st.integers(0, 6), min_size=1))
def test_a_pull_gets_the_first_version_that_is_new_enough(minimum: int, versions: list[int]) -> None:
    publisher = Publisher(MODES["Sync"])
    with publisher.waiting(None, minimum) as waiter:
        first = None
        for version in sorted(versions):
            publisher.publish(Published(version, 1, 0))
            publisher.withdraw()  # the next update begins before the stream wakes
            first = version if first is None and version >= minimum else first
            answer = publisher.answer_to(waiter)
            assert (None if answer is None else answer.version) == first


@pytest.mark.parametrize(
    ("gradient", "answered"),
    [
        (push(3), [False, True]),  # in Sync mode, the next version decides about it
        (push(3, applied=4), [False, True]),
        (push(3, outcome=RejectReason.LATE), [False, True]),
        (push(3, outcome=RejectReason.NOT_IN_WORLD), [True, True]),
    ],
)
def test_t1_a_push_is_answered_with_a_version_that_decided_about_it(gradient: Any, answered: list[bool]) -> None:
    publisher = Publisher(MODES["Sync"])
    with publisher.waiting(gradient, 0) as waiter:
        for version, expected in zip((3, 4), answered, strict=True):
            publisher.withdraw()
            publisher.publish(Published(version, 1, 0))
            assert (publisher.answer_to(waiter) is not None) == expected


@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_after_the_end_every_stream_gets_the_last_version(mode: str) -> None:
    """The last update may still be in computation. A worker would return the parameters before it."""
    publisher = Publisher(MODES[mode])
    late = push(3, outcome=RejectReason.LATE if mode == "Async" else RejectReason.NOT_IN_WORLD)
    with publisher.waiting(late, 0) as woken, publisher.waiting(None, 0) as pulls:
        publisher.publish(Published(7, 1, 0))
        publisher.done = Done(version=8)
        assert publisher.answer_to(woken) is publisher.answer_to(pulls) is None
        publisher.withdraw()
        publisher.publish(last := Published(8, 1, 0))
        assert publisher.answer_to(woken) is publisher.answer_to(pulls) is last


def test_in_async_mode_a_push_gets_the_version_that_contains_it() -> None:
    publisher = Publisher(MODES["Async"])
    gradient = push(3)
    with publisher.waiting(gradient, 0) as waiter:
        gradient.applied = 6
        publisher.publish(Published(5, 1, 0))
        assert publisher.answer_to(waiter) is None
        publisher.publish(Published(6, 1, 0))
        answer = publisher.answer_to(waiter)
        assert answer is not None
        assert answer.version == 6


def test_t8_the_end_of_the_job_answers_every_stream() -> None:
    publisher = Publisher(MODES["Sync"])
    with publisher.waiting(push(9), 0) as pushes, publisher.waiting(None, 9) as pulls:
        publisher.publish(Published(5, 1, 0))
        assert publisher.answer_to(pushes) is publisher.answer_to(pulls) is None
        publisher.done = Done(version=5)
        assert publisher.answer_to(pushes) is publisher.answer_to(pulls) is not None
        publisher.begin()
        assert publisher.done is None


def test_t8_a_stream_that_waits_for_a_block_gets_the_block_or_the_reason(background: Any) -> None:
    published = Published(1, 1, 2)
    encoded = background(lambda: published.encoded(0))
    missing = background(lambda: published.block(1))
    data = np.ones(3, np.float32)
    published.put(0, data, b"encoded")
    assert encoded.result(LONG) == b"encoded"
    assert published.block(0) is data
    published.stop(Refusal(RefusalCode.BROKEN, "failed to compute"))
    with pytest.raises(Refusal, match="failed to compute"):
        missing.result(LONG)
    published.put(1, data)
    assert published.encoded(1) is data, "a block without a codec is sent as it is"
