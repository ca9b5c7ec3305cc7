"""Makes the events of a job, each of which reports once what happened, for people (`kubectl describe`) and for tests.

An event is sent only together with a change of status, so a repeated plan sends no event again.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

# events.k8s.io refuses longer notes; https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
MAX_NOTE: Final = 1000
# Of an event of ours: `kubectl describe` prints a table with one line for each.
MAX_EVENT: Final = 400
_TRACEBACK: Final = "Traceback (most recent call last):"
# The line of a traceback that names the exception. Notes may follow it.
_EXCEPTION: Final = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Warning|Group)\b")


@dataclass(frozen=True, slots=True)
class Event:
    """One event about the TrainingJob.

    Attributes:
        type: ``Normal`` or ``Warning``.
        reason: one CamelCase word for programs.
        message: a sentence for people, on one line.
        slot: the slot whose pod died, such as ``worker-3``; empty for other events.
        incarnation: the incarnation of the pod that died; None for other events.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str
    slot: str = ""
    incarnation: int | None = None


def normal(reason: str, message: str) -> Event:
    """Returns an event about the ordinary course of things."""
    return Event("Normal", reason, one_line(message))


def warning(reason: str, message: str, slot: str = "", incarnation: int | None = None) -> Event:
    """Returns an event about something that a person may have to repair.

    Args:
        slot: the slot whose pod died, such as ``worker-3``.
        incarnation: the incarnation of that pod.
    """
    return Event("Warning", reason, one_line(message), slot, incarnation)


def one_line(text: str, limit: int = MAX_EVENT) -> str:
    """Returns the first line of `text` and the line with the reason, in at most `limit` characters.

    If `text` ends with the last lines of a log, the second line is the one that names an exception, or else the last.
    The whole text is in the job's conditions, and the log is in the pod.
    """
    first, *rest = [line.strip() for line in shortened(text, len(text)).splitlines() if line.strip()] or [""]
    if rest:
        why = next((line for line in reversed(rest) if _EXCEPTION.match(line)), rest[-1])
        first, room = first.removesuffix(_TRACEBACK).rstrip(), max(limit // 3, limit - len(why) - len(" … "))
        first = f"{first if len(first) <= room else first[: room - 1] + '…'} … {why}"
    if len(first) <= limit:
        return first
    end = limit // 3
    return f"{first[: limit - end - 1]}…{first[-end:]}"


def shortened(text: str, limit: int = MAX_NOTE) -> str:
    """`text` in at most `limit` characters. The end is kept, because the last line of a traceback has the reason.

    Without control characters: the output of a script must not move the cursor of a terminal.
    """
    if not text.replace("\n", "").isprintable():  # few texts are not, and most of the time of a plan was here
        text = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
