"""Batches have sizes and delays, requests are refused, and `predict` raises. Time is injected."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from backstay._serving._batcher import BatchAnswer, Batcher, QueuedRequest, RequestRefused
from backstay._serving._metrics import ServingMetrics
from backstay._serving._program import ServedVersion, ServingProgram
from backstay._serving._signature import Signature


class Times:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def doubled(params: Any, state: Any, x: Any) -> Any:
    del state
    return {"y": x * params["scale"]}


@cache
def program() -> ServingProgram:
    return ServingProgram(doubled, Signature.of(np.zeros(3, np.float32)), (1, 4, 8), ({"scale": np.float32(2)}, None))


def version_of(step: int) -> ServedVersion:
    return ServedVersion(step, f"manifest-{step}", {"scale": jnp.float32(step)}, None)


class Made:
    """A `Batcher`, whose answers are kept."""

    def __init__(self, **settings: Any) -> None:
        self.clock, self.answers = Times(), {}  # type: Times, dict[str, Any]
        given = {"delay": 0.0, "patience": 5.0, "batches": 2, **settings}
        self.metrics = ServingMetrics()
        self.batcher = Batcher(self.metrics, self._keep, clock=self.clock, **given)
        self.calls = 0

    def _keep(self, answered: Any) -> None:
        self.calls += 1
        for request, answer in answered:
            assert request.ticket not in self.answers, "T3: one answer for one request"
            self.answers[request.ticket] = answer

    def submit(self, name: str, rows: int, **more: Any) -> None:
        self.batcher.submit(QueuedRequest([np.full((rows, 3), ord(name), np.float32)], rows, ticket=name, **more))

    def rows(self, name: str) -> Any:
        answer = self.answers[name]
        assert isinstance(answer, BatchAnswer), answer
        return answer.outputs[0]


def test_t3_requests_share_a_batch_and_each_gets_its_own_rows() -> None:
    made = Made()
    made.batcher.use(program(), version_of(3))
    for name, rows in (("a", 2), ("b", 1), ("c", 3)):
        made.submit(name, rows)
    made.batcher.step()
    assert made.calls == 1
    for name, rows in (("a", 2), ("b", 1), ("c", 3)):
        np.testing.assert_array_equal(made.rows(name), np.full((rows, 3), 3 * ord(name), np.float32))
    assert made.metrics.registry.get_sample_value("backstay_serving_padding_examples_total") == 2
    assert made.metrics.registry.get_sample_value("backstay_serving_examples_total", {"version": "3"}) == 6


def test_a_request_that_does_not_fit_waits_for_the_next_batch_in_its_order() -> None:
    made = Made()
    made.batcher.use(program(), version_of(1))
    for name, rows in (("a", 6), ("b", 4), ("c", 1)):
        made.submit(name, rows)
    made.batcher.step()
    assert set(made.answers) == {"a"}
    made.batcher.step()
    assert set(made.answers) == {"a", "b", "c"}


def test_t1_all_requests_of_a_batch_are_answered_by_one_version() -> None:
    """The version that is in force when the batch begins, also for requests that came before it."""
    made = Made()
    made.batcher.use(program(), version_of(1))
    made.submit("a", 1)
    made.batcher.use(program(), version_of(2))
    made.submit("b", 1)
    made.batcher.step()
    assert [made.answers[name].version.step for name in "ab"] == [2, 2]
    np.testing.assert_array_equal(made.rows("a"), np.full((1, 3), 2 * ord("a")))


def test_t6_a_request_for_a_version_is_never_answered_by_another_one() -> None:
    made = Made()
    made.batcher.use(program(), version_of(1))
    made.submit("a", 1, version="1")
    made.batcher.use(program(), version_of(2))
    made.batcher.step()
    assert made.answers["a"].status == 404
    assert "version 1 is not served: version 2 is" in str(made.answers["a"])


def test_o7_a_full_queue_refuses_with_429_and_without_a_version_with_503() -> None:
    made = Made()
    with pytest.raises(RequestRefused, match="no checkpoint is loaded yet") as refused:
        made.submit("a", 1)
    assert refused.value.status == 503
    made.batcher.use(program(), version_of(1))
    for name in "abcd":
        made.submit(name, 4)
    with pytest.raises(RequestRefused, match="16 examples wait already, at most 16 may") as refused:
        made.submit("e", 1)
    assert refused.value.status == 429
    made.batcher.step()
    made.submit("e", 1)
    made.batcher.close()
    with pytest.raises(RequestRefused, match="this process ends") as refused:
        made.submit("f", 1)
    assert refused.value.status == 503
    made.batcher.run()
    assert set(made.answers) == set("abcde"), "what was accepted is answered"


def test_t8_a_request_that_waited_too_long_or_was_cancelled_is_not_computed() -> None:
    made = Made()
    made.batcher.use(program(), version_of(1))
    made.submit("a", 1)
    made.submit("b", 1, wanted=lambda: False)
    made.clock.now = 6.0
    made.submit("c", 1)
    made.batcher.step()
    assert made.answers["a"].status == 503
    assert "waited 6.0 s" in str(made.answers["a"])
    assert set(made.answers) == {"a", "c"}
    assert made.metrics.registry.get_sample_value("backstay_serving_batch_examples_sum") == 1


def test_an_error_of_predict_fails_its_batch_and_no_other() -> None:
    made = Made()
    made.batcher.use(program(), ServedVersion(1, "manifest-1", {"scale": "no array"}, None))
    made.submit("a", 2)
    made.batcher.step()
    assert made.answers["a"].status == 500
    assert "predict raised" in str(made.answers["a"])
    made.batcher.use(program(), version_of(2))
    made.submit("b", 2)
    made.batcher.step()
    assert made.rows("b").shape == (2, 3)
    assert made.batcher.busy_for() == 0


def test_a_batch_waits_for_more_requests_until_the_delay_or_until_it_is_full() -> None:
    """`run` itself waits: it returns after `close`, and a closed batcher does not wait for the delay."""
    made = Made(delay=1000.0)
    made.batcher.use(program(), version_of(1))
    made.submit("a", 4)
    made.submit("b", 4)  # it is full
    made.submit("c", 1)
    made.batcher.close()
    made.batcher.run()
    assert made.calls == 2
    assert set(made.answers) == set("abc")
