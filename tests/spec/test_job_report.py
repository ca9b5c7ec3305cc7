"""A job's report in a termination message, which a script may have written."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_spec.causes import parsed
from backstay_spec.job_report import JobReport

ROWS = sorted(str(field.alias) for field in JobReport.model_fields.values())
TEXTS = st.text(st.characters(codec=None, exclude_categories=()))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(ROWS), VALUES, max_size=5))
@settings(deadline=None)
def test_a_message_of_any_values_is_read(message: dict[str, Any]) -> None:
    found = parsed(json.dumps(message))
    assert found is not None
    JobReport.in_message(found).over(JobReport()).stored()


@pytest.mark.parametrize(
    "message",
    ['{"step": 3, "evaluationError": "\\ud800"}', '{"metrics": {"a": ' + "[" * 250 + "]" * 250 + "}}"],
    ids=["half of a surrogate pair", "nested"],
)
def test_a_message_that_another_parser_refuses_is_not_a_report(message: str) -> None:
    """The planner raised with each plan of this job, so the job never ended."""
    found = parsed(message)
    assert found is not None
    assert JobReport.in_message(found) == JobReport()


@pytest.mark.parametrize("step", [98, 100])
def test_o8_the_loss_of_a_last_update_that_was_not_finite_is_not_that_of_an_earlier_one(step: int) -> None:
    """The message had no loss, because JSON has no NaN, so the status kept the loss of the newest answer."""
    known = JobReport(step=step, loss=0.5)
    message = json.loads(json.dumps(JobReport(step=100, loss=math.nan).last()))
    assert message == {"step": 100, "loss": None}
    found = JobReport.in_message(message).over(known)
    assert math.isnan(found.newest_loss or 0.0)
    assert found.stored()["loss"] is None
    worker = JobReport.in_message({"step": 100, "metrics": {"accuracy": 0.5}})
    for report in (worker.over(found), JobReport.in_message(message).over(worker.over(known))):
        assert math.isnan(report.loss or 0.0)
    page = JobReport.model_validate(JobReport(step=100).model_dump(mode="json"))
    assert page.over(known).loss == 0.5, "a page has all rows, also those that are not known"
