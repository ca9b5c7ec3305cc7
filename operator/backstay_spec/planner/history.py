"""Decides the events about the history of the parameters, which is continued, rolled back and evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from backstay_spec import status
from backstay_spec.causes import finite
from backstay_spec.events import Event, normal, one_line, warning
from backstay_spec.job_report import TermStart
from backstay_spec.observed import Progress
from backstay_spec.planner.facts import Facts

__all__ = ["Changes", "judge"]

_SHOWN: Final = 8
_STORED: Final = 20
_UNTRAINED: Final = (
    "the gradient of {names} was exactly zero in the first updates of every worker, so training does not change them. "
    "Gradients do not train running statistics, such as those of batch normalization: make them model state "
    "(has_state=True). Freeze what stays constant (frozen=...), or keep it in `loss`."
)
_UNCHANGED: Final = (
    "more than half of the bytes that each update sends did not change in the first updates: {names}. Freeze "
    "what does not train, and it does not travel: train(frozen=...) for parameters, and train(frozen_state=...) for "
    "model state."
)
_SAME_BATCHES: Final = (
    "the losses of all workers were equal bit for bit in many updates in a row. All workers compute the same batch, so "
    "the job does the work of one worker. Make the batch from the key, such as with backstay.from_dataset, and not "
    "from a global generator."
)
_IMPURE_BATCHES: Final = (
    "batches returned two different batches for the same key: a replacement of a dead worker trains on other samples, "
    "and the run cannot be repeated. Make the batch from the key, such as with backstay.from_dataset or "
    "backstay.from_iterator."
)


@dataclass(frozen=True, slots=True)
class Changes:
    """Events that are sent once, and the fields of the status that record that.

    Attributes:
        events: the events for `kubectl describe` and `backstay run`.
        fields: fields of the status, which are written immediately, and not only with the next progress.
    """

    events: tuple[Event, ...] = ()
    fields: Mapping[str, Any] = field(default_factory=dict)


def judge(facts: Facts) -> Changes:
    """Returns the reports of the servers that the last status does not have."""
    progress = facts.progress
    if progress is None:
        return Changes()
    found = [
        _term(facts, progress),
        _evaluation(facts, progress),
        _leaves(facts, progress, "untrained_leaves", warning("ZeroGradients", _UNTRAINED)),
        _leaves(facts, progress, "unchanged_leaves", warning("UnchangedParameters", _UNCHANGED)),
        _batches(facts, progress),
        _loss(facts, progress),
        _metrics(facts, progress),
        _reports(facts, progress),
    ]
    return Changes(
        tuple(event for part in found for event in part.events),
        {name: value for part in found for name, value in part.fields.items()},
    )


def _term(facts: Facts, progress: Progress) -> Changes:
    start, known = progress.report.term_start, facts.old.term
    if start is None or progress.report.term != start.term:
        return Changes()
    if known is not None and start.term <= known:
        return _changed(start) if start.term == known and _owes_changes(facts) else Changes()
    fields = {"term": start.term, "step": progress.report.step}
    place = f"the checkpoint of step {start.step}" if start.checkpoint else f"step {start.step}, the initial parameters"
    # If the end of training is known before its term, the status has the last step, which is of this term.
    ended = known is None and status.holds(facts.conditions, status.TRAINED)
    before = None if ended else facts.old.step
    reached = max(step or 0 for step in (before, progress.step_before_term))
    # A new coordinator does not have the number of updates: the last answer of the previous one is a lower bound.
    redone, at_least = (start.redone, "") if start.redone else (max(0, reached - start.step), "at least ")
    if redone:
        updates = "1 update is" if redone == 1 else f"{redone} updates are"
        return Changes((warning("RolledBack", f"back to {place}: {at_least}{updates} redone"),), fields)
    events = [warning("LeaseTakenOver", f"{text}: this run writes the checkpoints now") for text in start.taken_over]
    if start.checkpoint:
        events.append(normal("Continued", f"training continues from {place}: {start.checkpoint}"))
        events += _changed(start).events
    return Changes(tuple(events), fields)


def _changed(start: TermStart) -> Changes:
    if not start.changes:
        return Changes()
    text = f"changed since the checkpoint of step {start.step}: {'; '.join(start.changes)}"
    return Changes((warning("SettingsChanged", text),))


def _owes_changes(facts: Facts) -> bool:
    """Returns whether the run continued a checkpoint, and its changes are not reported: the first update completes
    them."""
    ours = ("Continued", "SettingsChanged")
    return next((entry.reason for entry in reversed(facts.old.history) if entry.reason in ours), "") == "Continued"


def _evaluation(facts: Facts, progress: Progress) -> Changes:
    report, step = progress.report, progress.report.evaluated_step
    events, fields = [], dict[str, Any]()
    # After a rollback, the same step may be evaluated with another result.
    if step is not None and (step, finite(report.metrics)) != (facts.old.evaluated_step, facts.old.metrics):
        shown = ", ".join(f"{name} {value:.6g}" for name, value in sorted(report.metrics.items()))
        events.append(normal("Evaluated", f"evaluation of step {step}: {shown}"))
        fields = {"evaluated_step": step, "metrics": finite(report.metrics)}
    if report.failed_evaluation not in (None, facts.old.failed_evaluation):
        # A later evaluation that succeeded has no error.
        why = report.evaluation_error or "the log of parameter server 0 has the reason"
        events.append(warning("EvaluationFailed", f"the evaluation of step {report.failed_evaluation} failed: {why}"))
        fields["failed_evaluation"] = report.failed_evaluation
    return Changes(tuple(events), fields)


def _leaves(facts: Facts, progress: Progress, row: str, event: Event) -> Changes:
    """Returns a warning with the names of leaves, once in a job. The message of `event` has ``{names}`` in their
    place."""
    names = list(getattr(progress.report, row))
    if not names or getattr(facts.old, row):
        return Changes()
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    message = one_line(event.message.format(names=", ".join(names[:_SHOWN]) + more))
    return Changes((replace(event, message=message),), {row: names[:_STORED]})


def _batches(facts: Facts, progress: Progress) -> Changes:
    known = facts.old.mistakes_of_batches
    found = (warning("SameBatches", _SAME_BATCHES), warning("ImpureBatches", _IMPURE_BATCHES))
    new = tuple(
        event for event in found if event.reason in progress.report.mistakes_of_batches and event.reason not in known
    )
    return Changes(new, {"mistakes_of_batches": [*known, *(event.reason for event in new)]}) if new else Changes()


def _loss(facts: Facts, progress: Progress) -> Changes:
    step = progress.report.non_finite_loss
    if step is None or facts.old.non_finite_loss is not None:
        return Changes()
    text = (
        f"the loss of step {step} was NaN or infinite although its gradients were finite, so the update was applied. A "
        "mean over an empty batch is such a loss, and one that overflows: see `batches`, `loss` and the learning rate."
    )
    return Changes((warning("NonFiniteLoss", text),), {"non_finite_loss": step})


def _metrics(facts: Facts, progress: Progress) -> Changes:
    known = facts.old.non_finite_metrics
    new = [name for name in progress.report.non_finite_metrics if name not in known]
    if not new:
        return Changes()
    text = (
        f"evaluate or loss returned NaN or infinity for: {', '.join(new)}. The status leaves such values out, and "
        "spec.checkpoint.keepBest never keeps their checkpoint."
    )
    return Changes((warning("NonFiniteMetrics", one_line(text)),), {"non_finite_metrics": [*known, *new][:_STORED]})


def _reports(facts: Facts, progress: Progress) -> Changes:
    """Name each report about a pod that died once, because the entry of the death remembers it."""
    stored = {(report.slot, report.incarnation): report.uri for report in progress.death_reports}
    entries, events = [], []
    for entry in facts.old.history:
        uri = None if entry.slot is None or entry.incarnation is None else stored.get((entry.slot, entry.incarnation))
        if entry.report is None and uri is not None:
            entry = entry.model_copy(update={"report": uri})  # noqa: PLW2901
            events.append(normal("ReportStored", f"the report about {entry.slot} #{entry.incarnation} is {uri}"))
        entries.append(entry)
    return Changes(tuple(events), {"history": entries}) if events else Changes()
