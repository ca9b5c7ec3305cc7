"""One fact has two places: where shard 0's server measures it, and its row in the report (docs/decisions/0047)."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic.alias_generators import to_camel

from backstay_client.view.explain import as_object
from backstay_client.view.follow import view_of, with_page
from backstay_operator.job_metrics import JobMetrics
from backstay_rpc.answers import combine
from backstay_rpc.control_pb2 import ProgressReply
from backstay_spec.job_report import (
    STATUS_ROWS,
    CheckpointStatus,
    JobReport,
    TermStart,
    WaitedForStatus,
    exported_rows,
)
from backstay_spec.observed import Progress
from backstay_spec.planner.new_status import with_progress
from backstay_spec.types_status import TrainingJobStatus

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 1, 1, tzinfo=UTC)
META = {"name": "a", "namespace": "default"}

EXAMPLES = {
    "checkpoint": CheckpointStatus(step=7, uri="/c/7"),
    "waited_for": [WaitedForStatus(rank=1, part="data", seconds=2.0, updates=3)],
    "term_start": TermStart(3, 5),
}
OTHERS = {"checkpoint", "ending", "loss", "metrics", "step", "term", "world"}
"""Names that other things have, too: settings, termination messages, parts of a worker's time, positions of servers."""


def example(name: str) -> Any:
    """Returns a value of the row that is not its default."""
    if name in EXAMPLES:
        return EXAMPLES[name]
    text = str(JobReport.model_fields[name].annotation)
    for kind, value in (("dict", {"a": 1.5}), ("list", ["a"]), ("float", 2.5), ("int", 3), ("str", "why")):
        if kind in text:
            return value
    raise AssertionError(f"add an example of {name}: {text}")


def answered(report: JobReport) -> Progress:
    """Returns the progress after an answer of shard 0's server."""
    reply = ProgressReply(incarnation=1, term=3, step=3, world=3, report=report.encoded())
    progress = combine({0: reply}, NOW)
    assert progress is not None
    return progress


ALL = JobReport(**{name: example(name) for name in JobReport.model_fields})


@pytest.mark.parametrize("name", JobReport.model_fields)
def test_each_row_reaches_the_operator(name: str) -> None:
    assert getattr(answered(ALL).report, name) == getattr(ALL, name)


@pytest.mark.parametrize("name", STATUS_ROWS)
def test_each_row_of_the_status_reaches_the_status_and_the_commands(name: str) -> None:
    """The planner stores the rows `with_event`; each of them has a policy and its tests."""
    status = with_progress(TrainingJobStatus(), answered(ALL), NOW)
    if STATUS_ROWS[name].with_event:
        status = status.model_copy(update={name: getattr(ALL, name)})
    stored = status.to_dict()[to_camel(name)]
    assert stored
    found = as_object(view_of({"metadata": META, "status": status.to_dict()}, [], []), 0.0)
    assert found[to_camel(name)]


@pytest.mark.parametrize("name", STATUS_ROWS)
def test_each_row_of_the_page_reaches_the_commands(name: str) -> None:
    view = with_page(view_of({"metadata": META}, [], []), ALL.model_dump(mode="json", by_alias=True))
    assert getattr(view.report, name) == getattr(ALL, name)
    assert as_object(view, 0.0)[to_camel(name)]


@pytest.mark.parametrize(
    ("newer", "older", "loss"),
    [
        (JobReport(step=30, non_finite_loss=4), JobReport(step=1, loss=3.0), None),
        (JobReport(step=30), JobReport(step=4, loss=3.0, non_finite_loss=4), None),
        (JobReport(step=30, loss=0.5, non_finite_loss=4), JobReport(step=4, loss=3.0), 0.5),
        (JobReport(step=30), JobReport(step=29, loss=3.0), 3.0),
        (JobReport(step=3, non_finite_loss=2), JobReport(step=4, loss=3.0), 3.0),
        (JobReport(non_finite_loss=2), JobReport(step=4, loss=3.0), 3.0),
    ],
)
def test_a_report_without_a_loss_does_not_take_that_of_an_older_step_if_it_may_have_diverged(
    newer: JobReport, older: JobReport, loss: float | None
) -> None:
    """JSON has no NaN. The summary of a diverged job had the loss of its first step."""
    assert newer.over(older).loss == loss


def test_infinite_metrics_of_the_page_stay_infinite() -> None:
    """They were printed as NaN."""
    values = {"up": "Infinity", "down": "-Infinity", "none": None}
    shown = with_page(view_of({"metadata": META}, [], []), {"goalSteps": 9, "step": 3, "trainMetrics": values})
    assert {name: str(value) for name, value in shown.report.train_metrics.items()} == {
        "up": "inf",
        "down": "-inf",
        "none": "nan",
    }


def test_each_row_with_a_metric_is_exported() -> None:
    metrics = JobMetrics(lambda: 0.0, lambda: 0.0)
    metrics.progress(("default", "a"), answered(ALL), trains=True)
    found = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    for name, row in exported_rows().items():
        assert found[f"backstay_job_{name}{'_total' if row.counts else ''}"] == getattr(ALL, name)


def test_a_rate_of_0_in_the_status_of_an_interrupted_job_is_shown() -> None:
    status = {"phase": "Running", "examplesPerSecond": 0.0}
    found = as_object(view_of({"metadata": META, "status": status}, [], []), 0.0)
    assert found["examplesPerSecond"] == 0.0


def test_an_evaluation_that_succeeds_ends_the_error_of_the_previous_one() -> None:
    def page(**more: Any) -> dict[str, Any]:
        return JobReport(goal_steps=9, **more).model_dump(mode="json", by_alias=True) | {"goalSteps": 9}

    object_ = {"metadata": META}
    view = with_page(view_of(object_, [], []), page(step=3, evaluation_error="at step 2: boom"))
    view = view_of(object_, [], [], view)
    assert view.report.evaluation_error == "at step 2: boom", "the API has no row for it"
    assert with_page(view, page(step=5, evaluated_step=4, metrics={"a": 0.5})).report.evaluation_error == ""


def test_an_evaluation_without_metrics_has_not_those_of_an_older_step() -> None:
    before = JobReport(step=20, evaluated_step=20, metrics={"error": 0.5})
    found = JobReport.decoded(JobReport(step=40, evaluated_step=40, metrics={}).encoded()).over(before)
    assert (found.evaluated_step, found.metrics) == (40, {})
    assert JobReport(step=60).over(before).metrics == {"error": 0.5}


def test_o7_a_report_of_wrong_values_is_refused_in_few_words() -> None:
    """To format each of them would hold up the operator for seconds."""
    for rows in ({"untrained_leaves": [1] * 100_000}, {"metrics": {str(number): "x" for number in range(20_000)}}):
        with pytest.raises(ValueError, match=r"^\d+ values are invalid") as caught:
            JobReport.decoded(json.dumps(rows).encode())
        assert caught.value.__cause__ is None
        assert len(str(caught.value)) < 100


def test_a_report_is_the_sum_of_its_parts() -> None:
    parts = JobReport(step=3, loss=0.5), JobReport(metrics={"a": 1.0}, loss=None)
    assert JobReport.sum(parts) == JobReport(step=3, metrics={"a": 1.0})
    assert JobReport.sum(()) == JobReport()


@pytest.mark.parametrize("name", sorted(set(JobReport.model_fields) - OTHERS))
def test_a_fact_is_declared_once(name: str) -> None:
    """Neither the control messages, nor the operator, nor the commands declare a row again.

    Every server has a position, so `ProgressReply` has it, too.
    """
    declares = re.compile(rf"^\s+(?:\w[\w .<>,]* {name} = \d+;|{name}: )", re.MULTILINE)
    proto = re.search(
        r"message ProgressReply \{.*?\n\}", (ROOT / "operator/backstay_rpc/control.proto").read_text(), re.S
    )
    assert proto is not None
    files = [file for file in sorted((ROOT / "operator").rglob("*.py")) if "_pb2" not in file.name]
    found = [str(file.relative_to(ROOT)) for file in files if declares.search(file.read_text(encoding="utf-8"))]
    assert not declares.search(proto[0])
    assert found == ["operator/backstay_spec/job_report.py"]
