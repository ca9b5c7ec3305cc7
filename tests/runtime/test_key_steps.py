"""T3, T4: which contribution of a worker is next, and which one is sent again, by update mode."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backstay._roles._key_steps import KEY_STEPS
from backstay._transport import Pulled
from backstay_rpc.control_pb2 import RejectReason

AT = Pulled(term=1, version=5, world=2)
COUNTED = (RejectReason.REJECT_UNSPECIFIED, RejectReason.SKIPPED)
CORRECTED = (RejectReason.DUPLICATE, RejectReason.OUT_OF_ORDER)


def test_t4_sync_each_version_has_its_batch() -> None:
    """A replacement computes the same batch for the same version."""
    steps = KEY_STEPS["Sync"]()
    assert steps.last(40) == 39
    for reason in RejectReason.values():
        steps.joined(17)
        steps.answered(3, replace(AT, outcome=reason, next_key_step=9))
        assert steps.next(5) == 5
    assert steps.undecided(5, AT, AT)
    assert not steps.undecided(5, AT, replace(AT, version=6))


@pytest.mark.parametrize("reason", RejectReason.values())
def test_t3_async_only_a_contribution_that_was_counted_takes_a_number(reason: int) -> None:
    steps = KEY_STEPS["Async"]()
    assert steps.last(40) is None
    steps.joined(3)
    assert steps.next(100) == 3
    steps.answered(3, replace(AT, outcome=reason, next_key_step=9))
    assert steps.next(5) == (4 if reason in COUNTED else 9 if reason in CORRECTED else 3)


def test_t3_async_a_contribution_is_sent_again_while_the_coordinator_lacks_it() -> None:
    steps = KEY_STEPS["Async"]()
    steps.joined(3)
    assert steps.undecided(3, AT, replace(AT, version=8))
    assert not steps.undecided(3, AT, replace(AT, done=True))
    steps.joined(4)
    assert not steps.undecided(3, AT, AT)
