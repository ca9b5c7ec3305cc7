"""Shard 0's server measures every row of the report, and each part of the observer sets its own."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime

from backstay._coordination import CheckpointFailed, CoordinatorState, PeerTable, WriteManifest
from backstay._report._job import JobObserver
from backstay._report._metrics import PodMetrics
from backstay_rpc.control_pb2 import EvaluatedRequest, ProgressReply, Rollback
from backstay_spec.job_report import CheckpointStatus, JobReport, TermStart


def observer_of(steps: int = 10) -> JobObserver:
    observer = JobObserver(PeerTable("Sync"), PodMetrics("job", "ParameterServer", 0), steps, 0)
    observer.watch_waits(1, lambda world: world, sync=True)
    return observer


def test_every_row_is_measured() -> None:
    observer = observer_of()
    observer.checkpoint_stored(0.0, WriteManifest(1, 2, {}, ()), "/c/2")
    observer.checkpoint_failed(0.0, CheckpointFailed(4, "the disk is full"))
    terms = observer.terms.report(CoordinatorState(term=1, version=3, world=4), Rollback(term=1))
    report = JobReport.sum((observer.report(0.0), terms))
    assert report.model_fields_set == set(JobReport.model_fields)


def test_o8_a_rollback_past_a_damaged_checkpoint_reports_the_one_from_which_it_continues() -> None:
    """The status and new evaluators were still given the damaged one."""
    observer = observer_of()
    observer.checkpoint_stored(0.0, WriteManifest(1, 5, {}, ()), "/c/5")
    observer.checkpoint_failed(0.0, CheckpointFailed(7, "the disk is full"))
    observer.restarted(0.0, CoordinatorState(term=2, version=2, world=4), "/c/2", 7.0)
    known = CheckpointStatus(step=2, uri="/c/2", time=datetime.fromtimestamp(7, UTC))
    assert observer.newest_checkpoint() == known
    assert (report := observer.report(0.0)).checkpoint == known
    assert report.checkpoint_error == "the disk is full", "the newest attempt is still that one"
    observer.restarted(0.0, CoordinatorState(term=3, version=0, world=4), "", 0.0)
    assert observer.newest_checkpoint() == CheckpointStatus(step=0)


def test_a_rollback_before_the_first_checkpoint_exports_no_time_of_one() -> None:
    metrics = PodMetrics("job", "ParameterServer", 0)
    observer = JobObserver(PeerTable("Sync"), metrics, 10, 0)
    observer.restarted(0.0, CoordinatorState(term=2, version=0, world=4), "", 0.0)
    assert b"\nbackstay_checkpoint_timestamp_seconds" not in metrics.page()


def test_long_names_of_metrics_have_their_own_series() -> None:
    metrics = PodMetrics("job", "ParameterServer", 0)
    names = [f"{'a' * 150}{number}" for number in range(60)]
    for value in (1.0, 2.0):
        for name in names:
            metrics.evaluation(name).set(value)
    series = re.findall(r'^backstay_evaluation\{.*name="([^"]*)".*\} (.*)$', metrics.page().decode(), re.MULTILINE)
    assert len(dict(series)) == 50
    assert {value for _, value in series} == {"2.0"}
    assert {len(name) for name, _ in series} == {100}


def test_the_answer_to_the_operator_has_the_report_and_the_position() -> None:
    observer = observer_of()
    state = CoordinatorState(term=2, version=3, world=4, redone=5)
    observer.start(state, "/c/2", 2, checkpoint_time=7.0)
    observer.evaluated(EvaluatedRequest(step=2, metrics={"accuracy": 0.5}))
    observer.evaluated(EvaluatedRequest(step=3, error="ValueError: no data"))
    observer.redo(0.0, 1)
    reply = ProgressReply()
    observer.fill(0.0, reply, state, 300, Rollback(term=2, version=2, checkpoint="/c/2"))
    assert (reply.term, reply.step, reply.world) == (2, 3, 4)
    expected = JobReport(
        term=2,
        step=3,
        world=4,
        steps_redone=5,
        term_start=TermStart(2, 2, "/c/2", 1),
        goal_steps=10,
        examples_per_second=0.0,
        metrics={"accuracy": 0.5},
        evaluated_step=2,
        failed_evaluation=3,
        evaluation_error="ValueError: no data",
        checkpoint=CheckpointStatus(step=2, uri="/c/2", time=datetime.fromtimestamp(7, UTC)),
    )
    assert JobReport.decoded(reply.report) == expected
    assert observer.evaluations.of(3) == {}, "it failed"
    start = Rollback(term=2, version=2, checkpoint="/c/2")
    message = {**observer.last_report(state, start), "checkpoint": "/c/2", "result": "Succeeded"}
    found = JobReport.in_message(json.loads(json.dumps(message)))
    # The message has the URI, which is that of its step; nothing is measured yet.
    last = {"checkpoint": CheckpointStatus(step=3, uri="/c/2"), "examples_per_second": None}
    assert found == expected.model_copy(update=last)
    assert found.evaluation_failed == "at step 3: ValueError: no data"
