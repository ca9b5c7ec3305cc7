"""A worker after an exchange: the residuals of its contribution, and the parameters that become the result."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from backstay._roles._key_steps import KEY_STEPS
from backstay._roles._worker import Worker, end_sending
from backstay._wire import Pulled
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import RejectReason


@pytest.mark.parametrize(
    ("outcome", "fate"),
    [
        (RejectReason.REJECT_UNSPECIFIED, "applied"),
        (RejectReason.LATE, "dropped"),
        (RejectReason.SKIPPED, "dropped"),
        (RejectReason.DUPLICATE, None),
        (None, None),
    ],
)
def test_a_worker_reports_the_outcome(outcome: Any, fate: str | None) -> None:
    """A duplicate was sent before the stream broke: whether that one is applied is unknown."""
    sending = Mock(spec_set=["applied", "dropped"])
    end_sending(sending, outcome)
    assert [name for name, _, _ in sending.method_calls] == ([] if fate is None else [fate])


@pytest.mark.parametrize(
    ("term", "next_key_step", "skipped", "outcome"),
    [
        (1, 6, False, "applied"),
        (1, 6, True, "skipped"),
        (1, 0, False, "lost"),
        (2, 6, False, "lost"),
    ],
    ids=["the newest update has it", "it was skipped", "it is unknown", "the servers went back"],
)
def test_t4_a_worker_that_lost_the_answer_reports_the_outcome_that_it_receives(
    term: int, next_key_step: int, skipped: bool, outcome: str
) -> None:
    worker = Mock(_attempt=0, _term=1, _rank=0)
    worker._env.config.mode, worker._env.incarnation = "Sync", 1
    worker._plan.wires = [Mock()]
    worker._key_steps = KEY_STEPS["Sync"]()
    at = Pulled(term=1, version=5, world=1)
    reason = RejectReason.SKIPPED if skipped else RejectReason.REJECT_UNSPECIFIED
    now = Pulled(term=term, version=6, world=1, outcome=reason, next_key_step=next_key_step)

    def reconnect(_: Exception) -> tuple[Pulled, list[Any]]:
        worker._term = term
        return now, []

    worker._pull.side_effect = PeerLost("the server was killed")
    worker._reconnect.side_effect = reconnect
    assert Worker._send(worker, at, 5, [], Mock()) == (now, [], outcome != "lost")
    worker._metrics.worker_contributions.assert_called_once_with(outcome)
    assert [name for name, *_ in worker.seconds.method_calls] == ["applied" if outcome == "applied" else "abandoned"]


@pytest.mark.parametrize(
    ("outcome", "known"), [(RejectReason.LATE, False), (RejectReason.REJECT_UNSPECIFIED, True)], ids=["late", "applied"]
)
def test_a_late_second_attempt_does_not_show_that_the_first_one_was_not_applied(
    outcome: RejectReason, known: bool
) -> None:
    """With backups, the newest update may come after the one that has the first attempt."""
    worker = Mock(_attempt=0, _term=1, _rank=0)
    worker._env.config.mode, worker._env.incarnation = "Sync", 1
    worker._key_steps = KEY_STEPS["Sync"]()
    at, now = Pulled(term=1, version=5, world=3), Pulled(term=1, version=7, world=3, outcome=outcome)
    worker._pull.side_effect = [PeerLost("the stream broke"), (now, [])]
    worker._reconnect.return_value = at, []
    assert Worker._send(worker, at, 5, [], Mock()) == (now, [], known)
    assert worker._attempt == 2
    worker._pull.side_effect = [(now, [])]
    assert Worker._send(worker, at, 5, [], Mock()) == (now, [], True)


@pytest.mark.parametrize(
    ("received", "count", "done", "kept"),
    [
        (None, 2, True, True),
        (frozenset({0, 1}), 2, True, True),
        (frozenset({1}), 2, True, False),
        (frozenset({0}), 1, True, True),
        (None, 2, False, False),
    ],
)
def test_t4_the_result_is_never_a_model_of_which_some_fragments_are_older(
    received: frozenset[int] | None, count: int, done: bool, kept: bool
) -> None:
    """The servers have left, so that the whole model cannot be requested: `kept`: what came last is the result."""

    class Used(Exception):  # noqa: N818
        """The parameters become the result."""

    worker = Mock()
    worker._heart.job.done = done
    worker._plan.wire.parameters = "BFloat16"
    worker._plan.partition.fragments = count
    worker._script.average = None
    worker._model.side_effect = Used
    worker._pull.side_effect = PeerLost("the server has left")
    pulled = SimpleNamespace(version=7, fragments=received)
    if kept:
        with pytest.raises(Used):
            Worker._finish(worker, pulled, [])  # type: ignore[arg-type]
    else:
        assert Worker._finish(worker, pulled, []) is None  # type: ignore[arg-type]
