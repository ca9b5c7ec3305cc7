"""The expressions that several dashboards and rules share."""

from __future__ import annotations

from typing import Final

BY_JOB: Final = "by (namespace, training_job)"
CRASHES: Final = "Crashed|OutOfMemory|ExitedEarly|Stalled"
"""The causes of death that are charged to a role's budget: `backstay_spec.causes`."""


def goodput(select: str, window: str) -> str:
    """Worker seconds whose computation was applied and not lost again, of all seconds of the job's worker slots.

    Args:
        select: matchers of labels, such as ``namespace="a"``; may be empty.
        window: the range of the query.
    """
    more = f", {select}" if select else ""
    only = f"{{{select}}}" if select else ""
    applied = f'sum {BY_JOB} (increase(backstay_worker_seconds_total{{part="applied"{more}}}[{window}]))'
    redone = f"sum {BY_JOB} (increase(backstay_job_steps_redone_total{only}[{window}]))"
    updates = f"(sum {BY_JOB} (increase(backstay_updates_total{only}[{window}])) > 0)"
    slots = f'(sum {BY_JOB} (increase(backstay_job_slot_seconds_total{{role="Worker"{more}}}[{window}])) > 0)'
    return f"clamp_max((({applied} * (1 - clamp_max({redone} / {updates}, 1))) or {applied}) / {slots}, 1)"
