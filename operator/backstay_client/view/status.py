"""Describes the state of a job by one typed object, for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backstay_client.view.follow import JobView
from backstay_client.view.waiting import waiting_for
from backstay_spec.job_report import JobReport

__all__ = ["JobStatus", "status_of"]


@dataclass(frozen=True)
class JobStatus:
    """A job at one moment. A number that is not known is None.

    Attributes:
        name, namespace: the name and namespace of the TrainingJob.
        phase: ``Pending``, ``Running``, ``Suspended``, ``Succeeded`` or ``Failed``; ``Stopped`` if its run on this
            machine ended first.
        reason: the reason of the phase, one CamelCase word; empty: there is none.
        message: the reason in a sentence. Of a failed job, it has the exception of the script.
        step: the number of updates that are applied.
        loss: the newest finite loss.
        metrics: the newest result of `evaluate`.
        seconds_left: the time until the last update, at this rate.
        goodput: the fraction of the workers' time that was spent on updates that count.
        workers, workers_ready: the wanted and the ready workers.
        restarts: pods that were replaced after crashes.
        disruptions: pods that were replaced after disruptions, such as drained nodes.
        checkpoint: the URI of the newest checkpoint.
        checkpoint_step: its step.
        waiting: what the next update waits for, after a long wait; empty: there is no long wait.
        report: all facts that the server of shard 0 reported. Among them are the rates of the last seconds, the
            number of updates at which training ends, and the metrics that `loss` returned.
        started, completed: Unix times.
    """

    name: str
    namespace: str
    phase: str
    reason: str = ""
    message: str = ""
    step: int | None = None
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds_left: float | None = None
    goodput: float | None = None
    workers: int = 0
    workers_ready: int = 0
    restarts: int = 0
    disruptions: int = 0
    checkpoint: str | None = None
    checkpoint_step: int | None = None
    waiting: str = ""
    report: JobReport = field(default_factory=JobReport)
    started: float | None = None
    completed: float | None = None
    view: JobView | None = field(default=None, repr=False, compare=False)

    @property
    def ended(self) -> bool:
        """Whether the phase is final."""
        return self.view is not None and self.view.ended

    @property
    def succeeded(self) -> bool:
        """Whether the job has succeeded."""
        return self.phase == "Succeeded"


def status_of(view: JobView) -> JobStatus:
    """Returns the state of a job for programs."""
    reason, _, message = view.message.partition(": ")
    workers = view.roles.get("Worker")
    report = view.report
    return JobStatus(
        name=view.name,
        namespace=view.namespace,
        phase=view.phase,
        reason=reason,
        message=message,
        step=report.step,
        loss=report.loss,
        metrics=dict(report.metrics),
        seconds_left=view.seconds_left,
        goodput=view.goodput,
        workers=0 if workers is None else workers.desired,
        workers_ready=0 if workers is None else workers.ready,
        restarts=view.restarts,
        disruptions=view.disruptions,
        checkpoint=view.checkpoint,
        checkpoint_step=view.checkpoint_step,
        waiting=waiting_for(view),
        report=report,
        started=view.started,
        completed=view.completed,
        view=view,
    )
