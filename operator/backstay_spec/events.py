"""The events of a job: what happened, once, for people (`kubectl describe`) and for tests.

An event goes with a change of status and with nothing else, so a plan that is run again says nothing again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

# events.k8s.io refuses longer notes; https://kubernetes.io/docs/reference/kubernetes-api/cluster-resources/event-v1/
MAX_NOTE: Final = 1000


@dataclass(frozen=True, slots=True)
class Event:
    """One event about the TrainingJob.

    Attributes:
        type: ``Normal`` or ``Warning``.
        reason: one CamelCase word for programs.
        message: a sentence for people.
    """

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def normal(reason: str, message: str) -> Event:
    """An event about the ordinary course of things."""
    return Event("Normal", reason, shortened(message))


def warning(reason: str, message: str) -> Event:
    """An event about something that somebody may have to mend."""
    return Event("Warning", reason, shortened(message))


def shortened(text: str, limit: int = MAX_NOTE) -> str:
    """`text` in at most `limit` characters, its end kept: the last line of a traceback is the one that says why.

    Without control characters: what a script printed must not move the cursor of whoever reads a job's status.
    """
    text = "".join(c if c == "\n" or c.isprintable() else " " for c in text)
    return text if len(text) <= limit else "…" + text[-(limit - 1) :]
