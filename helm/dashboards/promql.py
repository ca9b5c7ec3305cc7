"""The expressions that several dashboards and rules share."""

from __future__ import annotations

from typing import Final

from parts import WINDOW

# The series of the job that the dashboard Job shows.
JOB = 'namespace=~"$namespace", training_job=~"$training_job"'
COORDINATOR = f'{JOB}, role="ParameterServer", index="0"'
SERVERS = f'{JOB}, role="ParameterServer"'
WORKERS = f'{JOB}, role="Worker"'

BY_JOB: Final = "by (namespace, training_job)"
CRASHES: Final = "Crashed|OutOfMemory|ExitedEarly|Stalled"
"""The causes of death that are charged to a role's budget: `backstay_spec.causes`."""


def worker_seconds(select: str, window: str, by: str = BY_JOB, part: str = "") -> str:
    """Returns how the seconds of jobs' worker pods grew. A part may decrease, so they are gauges: `delta`, not
    `increase`.

    Args:
        select: matchers of labels, such as ``namespace="a"``; may be empty.
        window: the range of the query.
        part: the name of one part; empty: all parts.
    """
    chosen = ", ".join(matcher for matcher in (select, part and f'part="{part}"') if matcher)
    return f"sum {by} (delta(backstay_job_worker_seconds{{{chosen}}}[{window}]))"


def shares_by_part(select: str, window: str) -> str:
    """Returns the share of each part in the seconds of worker pods in the window; arguments as above."""
    by_part = f"clamp_min({worker_seconds(select, window, 'by (part)')}, 0)"
    return f"{by_part} / on () group_left () (sum({by_part}) > 0)"


def goodput(select: str, window: str) -> str:
    """Returns the share of the seconds of worker pods in the window whose computation was applied; arguments as
    above."""
    applied, spent = worker_seconds(select, window, part="applied"), worker_seconds(select, window)
    return f"clamp({applied} / ({spent} > 0), 0, 1)"


def rate(metric: str, select: str, by: str = "") -> str:
    return f"sum {by} (rate({metric}{{{select}}}[{WINDOW}]))"


def mean(metric: str, select: str, by: str = "") -> str:
    """Returns the mean observation within the window; nothing where there was none."""
    return f"{rate(f'{metric}_sum', select, by)} / ({rate(f'{metric}_count', select, by)} > 0)"


def most(metric: str, select: str, by: str = "") -> str:
    """Returns the upper edge of the highest bucket that the window has observations in: no observation was larger."""
    labels = f"by (le, {by})" if by else "by (le)"
    return f"histogram_quantile(1, sum {labels} (rate({metric}_bucket{{{select}}}[{WINDOW}])))"
