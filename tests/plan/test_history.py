"""O1, O5: what happened to the history of the parameters is reported once, also by an operator that was restarted."""

from __future__ import annotations

from typing import Any

import pytest

from backstay_spec.job_report import TermStart
from backstay_spec.observed import StoredReport

URI = "/ck/step-105"


def sent_events(job: Any, *reasons: str) -> list[tuple[str, str]]:
    return [(reason, text) for reason, text in job.events if reason in reasons]


def test_a_rollback_is_one_warning_with_the_updates_that_are_redone(running: Any) -> None:
    job = running()
    job.answer(term=1, step=157, last=(1, 157), term_start=TermStart(1, 0))
    job.settle()
    job.answer(term=2, step=106, step_before_term=157, term_start=TermStart(2, 105, URI, redone=52))
    job.settle()
    job.tick(20)
    job.answer(term=2, step=120, step_before_term=157, term_start=TermStart(2, 105, URI, redone=52))
    job.settle()
    assert sent_events(job, "RolledBack", "Continued") == [
        ("RolledBack", "back to the checkpoint of step 105: 52 updates are redone")
    ]
    assert job.status["term"] == 2


def test_a_coordinator_that_was_replaced_leaves_a_lower_bound(running: Any) -> None:
    """It cannot report how far its predecessor was; the operator has the predecessor's last answer."""
    job = running()
    job.answer(term=1, step=100, last=(1, 100), term_start=TermStart(1, 0))
    job.settle()
    job.answer(term=2, step=1, last=(2, 1), step_before_term=157, term_start=TermStart(2, 0))
    job.settle()
    assert sent_events(job, "RolledBack") == [
        ("RolledBack", "back to step 0, the initial parameters: at least 157 updates are redone")
    ]


def test_a_restarted_operator_has_the_step_from_the_status_and_reports_nothing_twice(running: Any) -> None:
    job = running()
    job.answer(term=1, step=110, last=(1, 110), term_start=TermStart(1, 0))
    job.settle()
    job.restart_operator()
    job.answer(term=2, step=105, last=(2, 105), term_start=TermStart(2, 105, URI))
    job.secret_ensured = True
    job.settle()
    job.restart_operator()
    job.answer(term=2, step=130, last=(2, 130), term_start=TermStart(2, 105, URI))
    job.settle()
    assert sent_events(job, "RolledBack") == [
        ("RolledBack", "back to the checkpoint of step 105: at least 5 updates are redone")
    ]


def test_a_job_that_continues_a_checkpoint_reports_it_and_a_new_one_reports_nothing(running: Any) -> None:
    job = running()
    job.answer(term=4, step=105, last=(4, 105))  # where the term began is reported later
    job.settle()
    job.tick(20)
    job.answer(term=4, step=106, last=(4, 106), term_start=TermStart(4, 105, URI))
    job.settle()
    assert sent_events(job, "RolledBack", "Continued") == [
        ("Continued", f"training continues from the checkpoint of step 105: {URI}")
    ]
    new = running()
    new.answer(term=1, step=3, last=(1, 3), term_start=TermStart(1, 0))
    new.settle()
    assert not sent_events(new, "RolledBack", "Continued")


def test_what_the_user_changed_between_two_runs_is_a_warning(running: Any) -> None:
    """T7: another learning rate or batch size is allowed, and reported once."""
    job = running()
    start = TermStart(4, 105, URI, changes=("the optimizer computes another update: 0.1 was replaced by 0.2", "b"))
    for step in (105, 120):
        job.answer(term=4, step=step, last=(4, step), term_start=start)
        job.settle()
    assert sent_events(job, "SettingsChanged") == [
        (
            "SettingsChanged",
            "changed since the checkpoint of step 105: "
            "the optimizer computes another update: 0.1 was replaced by 0.2; b",
        )
    ]


def test_a_run_that_continues_is_reported_before_its_first_update(running: Any) -> None:
    """The first update completes the changes, which are then reported once; nothing is interrupted before it."""
    job = running()
    start = TermStart(4, 105, URI)
    for waits in ("", "worker 0 compiles, for 21 s", "worker 0 compiles, for 65 s"):
        job.answer(term=4, step=105, last=(4, 105), term_start=start, waits_for=waits)
        job.settle()
        assert sent_events(job, "Continued", "SettingsChanged", "TrainingInterrupted") == [
            ("Continued", f"training continues from the checkpoint of step 105: {URI}")
        ]
        job.tick(40)
    said = job.condition("Training")
    assert (said["reason"], said["message"]) == ("NotStarted", "no update has been applied yet: worker 0 compiles")
    for step in (106, 107, 108):
        job.answer(term=4, step=step, last=(4, step), term_start=TermStart(4, 105, URI, changes=("b",)))
        job.settle()
    assert job.condition("Training")["status"] == "True"
    assert [reason for reason, _ in sent_events(job, "SettingsChanged")] == ["SettingsChanged"]


def test_changes_that_are_known_late_are_reported_once(running: Any) -> None:
    """An event that no status recorded would be sent by each plan until the next paced write."""
    job = running()
    for step, changes in ((105, ()), (106, ()), (107, ("b",)), (108, ("b",)), (109, ("b",))):
        job.answer(term=4, step=step, last=(4, step), term_start=TermStart(4, 105, URI, changes=changes))
        job.settle()
        job.tick(1)
    assert [reason for reason, _ in sent_events(job, "SettingsChanged")] == ["SettingsChanged"]


def test_a_lease_that_was_taken_over_is_named_once(running: Any) -> None:
    """T8: also in a folder without a checkpoint."""
    job = running()
    text = "the lease lease-1.json cannot be read (0 bytes), and did not change for 5 s"
    for step in (1, 20):
        job.answer(term=1, step=step, last=(1, step), term_start=TermStart(1, 0, taken_over=(text,)))
        job.settle()
    job.answer(term=2, step=11, last=(2, 11), term_start=TermStart(2, 10, URI, redone=10, taken_over=(text,)))
    job.settle()
    assert sent_events(job, "LeaseTakenOver", "RolledBack") == [
        ("LeaseTakenOver", f"{text}: this run writes the checkpoints now"),
        ("RolledBack", "back to the checkpoint of step 10: 10 updates are redone"),
    ]


def test_evaluations_and_the_metrics_of_loss_reach_the_status(running: Any) -> None:
    job = running()
    metrics = {"mse": 0.1768481, "bad": float("nan")}
    job.answer(term=1, step=50, evaluated_step=40, metrics=metrics, train_metrics={"rmse": 1.23456789})
    job.settle()
    job.answer(term=1, step=55, evaluated_step=40, metrics=metrics, train_metrics={"rmse": 1.2})
    job.settle()
    assert job.status["trainMetrics"] == {"rmse": 1.23457}
    assert (job.status["evaluatedStep"], job.status["metrics"]) == (40, {"mse": 0.1768481})
    job.answer(
        term=1,
        step=90,
        evaluated_step=40,
        metrics=metrics,
        failed_evaluation=80,
        evaluation_error="ValueError: no data",
    )
    job.settle()
    assert (job.status["evaluatedStep"], job.status["failedEvaluation"], job.status["step"]) == (40, 80, 90)
    job.answer(term=1, step=91, evaluated_step=90, metrics=metrics, failed_evaluation=85)
    job.settle()
    assert (job.status["evaluatedStep"], job.status["failedEvaluation"]) == (90, 85), "and step 90 succeeded since"
    job.answer(term=2, step=41, evaluated_step=40, metrics={"mse": 0.5}, term_start=TermStart(2, 39, URI, redone=51))
    job.settle()
    assert (job.status["evaluatedStep"], job.status["metrics"]) == (40, {"mse": 0.5}), "another result of this step"
    job.settle()
    assert sent_events(job, "Evaluated", "EvaluationFailed") == [
        ("Evaluated", "evaluation of step 40: bad nan, mse 0.176848"),
        ("EvaluationFailed", "the evaluation of step 80 failed: ValueError: no data"),
        ("Evaluated", "evaluation of step 90: bad nan, mse 0.176848"),
        ("EvaluationFailed", "the evaluation of step 85 failed: the log of parameter server 0 has the reason"),
        ("Evaluated", "evaluation of step 40: mse 0.5"),
    ]


NAMES = tuple(f"norm_{index}.mean" for index in range(30))


@pytest.mark.parametrize(
    ("field", "names", "reason", "texts"),
    [
        (
            "untrained_leaves",
            NAMES,
            "ZeroGradients",
            ["norm_0.mean, norm_1.mean", "and 22 more was exactly zero in the first updates of every worker"],
        ),
        (
            "unchanged_leaves",
            ("base.{w}", "state/table"),
            "UnchangedParameters",
            ["did not change in the first updates: base.{w}, state/table. Freeze"],
        ),
    ],
)
def test_leaves_that_need_attention_are_named_once(
    running: Any, field: str, names: tuple[str, ...], reason: str, texts: list[str]
) -> None:
    job = running()
    job.answer(term=1, step=9)
    job.settle()
    for step in (11, 12):
        job.answer(term=1, step=step, **{field: names})
        job.settle()
    job.restart_operator()
    job.answer(term=1, step=30, **{field: names})
    job.settle()
    [(_, text)] = sent_events(job, reason)
    assert all(part in text for part in texts)
    assert job.status[field.replace("_l", "L")] == list(names[:20])


def test_mistakes_of_batches_are_named_once_each(running: Any) -> None:
    job = running()
    job.answer(term=1, step=9)
    job.settle()
    for step, mistakes in ((11, ("ImpureBatches",)), (40, ("ImpureBatches", "SameBatches")), (41, ("Unknown",))):
        job.answer(term=1, step=step, mistakes_of_batches=mistakes)
        job.settle()
    job.restart_operator()
    job.answer(term=1, step=50, mistakes_of_batches=("ImpureBatches", "SameBatches"))
    job.settle()
    [(_, text)] = sent_events(job, "SameBatches")
    assert "so the job does the work of one worker" in text
    [(_, text)] = sent_events(job, "ImpureBatches")
    assert "two different batches for the same key" in text
    assert job.status["mistakesOfBatches"] == ["ImpureBatches", "SameBatches"]


def test_a_loss_that_is_not_finite_is_named_once_and_until_the_end(running: Any) -> None:
    job = running()
    job.answer(term=1, step=9, non_finite_loss=4)
    job.settle()
    job.restart_operator()
    job.answer(term=1, step=50, non_finite_loss=4, loss=0.5)
    job.settle()
    [(_, text)] = sent_events(job, "NonFiniteLoss")
    assert "the loss of step 4 was NaN or infinite" in text
    assert job.status["nonFiniteLoss"] == 4


def test_each_metric_that_was_not_finite_is_named_once(running: Any) -> None:
    """No status has such a value, and its checkpoint is never the best one."""
    job = running()
    for names in (["acc"], ["acc"], ["acc", "bleu"]):
        job.answer(term=1, step=9, non_finite_metrics=names)
        job.settle()
        job.restart_operator()
    texts = [text for _, text in sent_events(job, "NonFiniteMetrics")]
    assert [text.partition(". ")[0].partition(": ")[2] for text in texts] == ["acc", "bleu"]
    assert job.status["nonFiniteMetrics"] == ["acc", "bleu"]


def test_a_report_about_a_dead_pod_is_named_once_and_its_death_remembers_it(running: Any) -> None:
    job = running()
    job.answer(term=1, step=5)
    job.end(job.named("worker", 0), 137)
    job.settle()
    (death,) = [entry for entry in job.status["history"] if entry.get("slot") == "worker-0"]
    assert "report" not in death
    reports = (StoredReport("worker-0", 1, "/ck/report-1"), StoredReport("worker-9", 1, "/ck/of-nobody"))
    for _ in range(2):
        job.answer(term=1, step=6, death_reports=reports)
        job.settle()
    job.restart_operator()
    job.answer(term=1, step=7, death_reports=reports)
    job.settle()
    assert sent_events(job, "ReportStored") == [("ReportStored", "the report about worker-0 #1 is /ck/report-1")]
    (death,) = [entry for entry in job.status["history"] if entry.get("slot") == "worker-0"]
    assert death["report"] == "/ck/report-1"
