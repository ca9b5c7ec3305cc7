"""Texts to print. Those of pods are made safe: a pod may print control characters, which a terminal would execute."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from backstay_spec.job_report import ReportedStatus

# The part of a traceback before the line with the exception; the rest is in the pod's log.
_TRACEBACK = re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*(?:\n|$))*")
# Python prints it between an exception and the one that was raised from it, or while it was handled.
_BETWEEN = re.compile(r"^(?:The above exception was|During handling of the above exception, ).*:(?:\n|$)", re.MULTILINE)
_TORN_TRACEBACK = re.compile(r"(?:[ \t]+File \".*\", line \d+.*\n(?:[ \t].*\n)*)+")


def printable(text: str) -> str:
    """`text` with every invisible character (controls, direction marks) escaped; tabs stay."""
    return "".join(
        c if c.isprintable() or c == "\t" else c.encode("unicode_escape", "surrogatepass").decode() for c in text
    )


def log_line(line: bytes) -> str:
    """Returns a line of a log as a terminal would leave it: what follows the last carriage return, with controls
    escaped."""
    return printable(line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="backslashreplace"))


def plain(message: str) -> list[str]:
    """Returns the lines of a message; of each traceback only the end."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    text = _BETWEEN.sub("", _TORN_TRACEBACK.sub("", _TRACEBACK.sub("", "\n".join(lines))))
    return [printable(line) for line in text.splitlines() or lines] or [""]


def on_one_line(message: str) -> str:
    """Returns a message on one line; of each traceback only the end."""
    return " ".join(line.strip() for line in plain(message))


def current_folder() -> Path | None:
    """Returns the current folder, or None if it was deleted."""
    with contextlib.suppress(OSError):
        return Path.cwd()
    return None


def shortened(place: str) -> str:
    """Returns a path relative to the current folder if it is inside; other paths unchanged."""
    with contextlib.suppress(ValueError, OSError):  # the current folder may be deleted
        return str(Path(place).relative_to(Path.cwd()))
    return place


def without_folder(message: str) -> str:
    """Returns a message in which paths inside the current folder are relative to it; URIs stay as they are."""
    folder = current_folder()
    if folder is None or str(folder) == os.sep:
        return message
    return re.sub(rf"(?<![\w./:-]){re.escape(str(folder) + os.sep)}(?=[\w.])", "", message)


def count(number: int, noun: str) -> str:
    """Returns a number with its unit, such as ``1 server`` or ``2 servers``."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Returns a duration in words, such as ``0.4 s``, ``12 s``, ``3 min 20 s``, ``2 h 5 min`` or ``3 d 4 h``."""
    if seconds < 0.95:
        return f"{max(0.0, seconds):.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    for unit, name, below, small in ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // below
            return f"{whole // unit} {name}" + (f" {rest} {small}" if rest else "")
    raise AssertionError("a minute is a unit")


def clock(seconds: float) -> str:
    """Returns a duration in the form of a clock, such as ``0:07``, ``12:30`` or ``1:02:03``."""
    whole = max(0, int(seconds))
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"


def number(value: float | None, digits: int = 4) -> str:
    """Returns a number to print, with a dash for None, few digits, and an exponent only if necessary."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1e15:
        return f"{value:.{digits}g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def loss(report: ReportedStatus) -> str:
    """Returns the newest loss to print; empty if it is not known."""
    newest = report.newest_loss
    if newest is None:
        return ""
    if math.isfinite(newest):
        return number(newest)
    first = report.non_finite_loss
    return "NaN or infinite" + ("" if first is None else f", first at step {number(first)}")


def step_of_goal(report: ReportedStatus) -> str:
    """Returns the updates that are applied, such as ``5 of 10``."""
    if report.step is None:
        return number(None)
    return number(report.step) + (f" of {number(report.goal_steps)}" if report.goal_steps else "")


def size(nbytes: float) -> str:
    """Returns a number of bytes, such as ``512 B``, ``3.8 kB``, ``1.2 MB`` or ``24 GB``."""
    value, unit = nbytes, "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 99.5 or unit == "B" else f"{value:.2g} {unit}"


def shown(metrics: Mapping[str, float]) -> str:
    """Returns the metrics in words, such as ``accuracy 0.97, loss 0.1``; the names come from the script."""
    return ", ".join(f"{printable(name)} {number(value)}" for name, value in sorted(metrics.items()))
