"""Makes HTML of jobs and of curves for notebooks. All texts of scripts are escaped."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from html import escape

from backstay_client.show.curve import thin
from backstay_client.view.explain import progress_of
from backstay_client.view.facts import cells, facts
from backstay_client.view.follow import JobView
from backstay_client.view.status import JobStatus
from backstay_client.words import duration, number, plain, shown

__all__ = ["job_card", "job_rows", "line_chart", "table"]

_COLOURS = {"Succeeded": "#188038", "Failed": "#d93025", "Running": "#1a73e8"}
_LINES = ("#1a73e8", "#e37400", "#188038", "#9334e6", "#d93025", "#007b83")
_MOST_POINTS = 400


def job_card(status: JobStatus, curve: Sequence[tuple[float, float]] = ()) -> str:
    """Returns a small table about a job, with a bar of its progress and a curve of its loss.

    Args:
        status: the job.
        curve: (step, loss) in order of steps.
    """
    view = status.view or JobView(status.name, status.namespace, status.phase, report=status.report)
    rows = [("phase", _phase(status)), *((escape(fact.label), escape(fact.text)) for fact in facts(view))]
    if status.started is not None:
        ended = status.completed if status.completed is not None else time.time()
        rows.append(("time", escape(duration(max(0.0, ended - status.started)))))
    if status.checkpoint:
        rows.append(("checkpoint", escape(status.checkpoint)))
    # In a table, the last line of a traceback is what matters.
    if problem := (status.message if status.phase == "Failed" else status.waiting):
        rows.append(("", escape(plain(problem)[-1])))
    body = "".join(
        f'<tr><th style="text-align:left;padding:1px 8px">{name}</th>'
        f'<td style="text-align:left;padding:1px 8px;overflow-wrap:anywhere">{value}</td></tr>'
        for name, value in rows
    )
    chart = line_chart([("loss", curve)], 300, 110, labels=("step", "loss")) if len(curve) > 1 else ""
    return (
        f'<div style="font-family:sans-serif;font-size:13px"><b>{escape(status.name)}</b> in {escape(status.namespace)}'
        f'{_bar(status)}<div style="display:flex;gap:16px;align-items:center"><table>{body}</table>'
        f'<div style="flex:none">{chart}</div></div></div>'
    )


def job_rows(jobs: Iterable[JobStatus]) -> str:
    """Returns a table with a row for each job."""
    rows = []
    for one in jobs:
        known = {} if one.view is None else cells(one.view)
        step, loss = (escape(known.get(label, "–")) for label in ("step", "loss"))
        ready = f"{one.workers_ready} of {one.workers}"
        rows.append((escape(one.name), _phase(one), step, loss, escape(shown(one.metrics)), ready))
    return table(("job", "phase", "step", "loss", "evaluation", "workers"), rows)


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns an HTML table of cells that are HTML already."""
    head = "".join(f"<th>{name}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _phase(status: JobStatus) -> str:
    return f'<span style="color:{_COLOURS.get(status.phase, "#5f6368")}">{escape(status.phase)}</span>'


def _bar(status: JobStatus) -> str:
    fraction = None if status.view is None else progress_of(status.view)
    if fraction is None:
        return ""
    colour = _COLOURS.get(status.phase, "#1a73e8")
    return (
        '<div style="background:#e8eaed;height:6px;border-radius:3px;max-width:420px">'
        f'<div style="background:{colour};height:6px;border-radius:3px;width:{100 * fraction:.1f}%"></div></div>'
    )


def line_chart(
    lines: Sequence[tuple[str, Sequence[tuple[float, float]]]],
    width: int,
    height: int,
    *,
    marks: bool = False,
    labels: tuple[str, str] = ("", ""),
) -> str:
    """Returns a chart as SVG. The values are on a logarithmic axis where all are positive and span a decade.

    Args:
        lines: the name and the points (x, y) of each line; points that are not finite are left out.
        width, height: the size in pixels.
        marks: whether to draw separate points in place of lines.
        labels: the names of the axes.
    """
    drawn = [
        (name, thin([(x, y) for x, y in line if math.isfinite(x) and math.isfinite(y)], _MOST_POINTS))
        for name, line in lines
    ]
    points = [point for _, line in drawn for point in line]
    if not points:
        return ""
    low, high = min(y for _, y in points), max(y for _, y in points)
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    # A loss that falls by a decade is a flat line on a linear axis.
    is_log = low > 0 and high / low > 10
    top, bottom, start, end = 8.0, height - 18.0, 46.0, width - 6.0

    def at(x: float, y: float) -> tuple[float, float]:
        share = 0.5
        if high > low:
            share = math.log(y / low) / math.log(high / low) if is_log else (y - low) / (high - low)
        across = (x - left) / (right - left) if right > left else 0.5
        return round(start + across * (end - start), 1), round(bottom - share * (bottom - top), 1)

    parts = [f'<path d="M{start} {top}V{bottom}H{end}" fill="none" stroke="#9aa0a6"/>']
    for value, y in ((high, top + 4), (low, bottom)):
        parts.append(f'<text x="{start - 4}" y="{y}" text-anchor="end">{escape(number(value, 3))}</text>')
    for value, x, anchor in ((left, start, "start"), (right, end, "end")):
        text = escape(number(value, 3))
        parts.append(f'<text x="{x}" y="{height - 4}" text-anchor="{anchor}">{text}</text>')
    middle = escape(" against ".join(label for label in (labels[1], labels[0]) if label))
    if middle and is_log:
        middle += ", log axis"
    if middle:
        parts.append(f'<text x="{(start + end) / 2}" y="{height - 4}" text-anchor="middle">{middle}</text>')
    for number_of_line, (name, line) in enumerate(drawn):
        colour = _LINES[number_of_line % len(_LINES)]
        places = [at(x, y) for x, y in line]
        title = f"<title>{escape(name)}</title>"
        if marks:
            parts += [f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}">{title}</circle>' for x, y in places]
        else:
            path = " ".join(f"{x},{y}" for x, y in places)
            style = f'fill="none" stroke="{colour}" stroke-width="1.5"'
            parts.append(f'<polyline points="{path}" {style}>{title}</polyline>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="10" '
        f'font-family="sans-serif" fill="#5f6368">{"".join(parts)}</svg>'
    )
