"""State of a job that the operator keeps between two runs. It may be lost: a restart costs only a few reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from backstay_spec import names
from backstay_spec.goodput import Account
from backstay_spec.observed import Contact, Progress, Refusal, Updates

_MOST_EVENTS = 64


@dataclass
class SentEvent:
    """An event that was sent: its object's name and how often it was repeated."""

    name: str
    count: int


@dataclass
class JobMemory:
    """The state of one job, by its uid: a job that was created again under an old name starts with an empty state.

    Attributes:
        uid: the job's uid.
        secret_at, secret_deleted, witnessed, progress, contact, updates, gated, missing, refused, status_written: see
            `backstay_spec.observed.Observed`.
        account: the account of the seconds of its worker pods; None: it must be continued from the job's status.
        sent_events: the events that were sent, by (type, reason, message).
        died: (role, index) -> why the last pod of that slot died; kept until its replacement is created.
        ended: (role, index) -> the clock when a pod of that slot was first observed to have ended.
        planned_at: the clock when the newest plan was made; None: no plan was made yet.
    """

    uid: str
    secret_at: datetime | None = None
    secret_deleted: bool = False
    witnessed: set[str] = field(default_factory=set)
    progress: Progress | None = None
    contact: Contact | None = None
    updates: Updates | None = None
    gated: dict[str, datetime] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    refused: dict[str, Refusal] = field(default_factory=dict)
    status_written: datetime | None = None
    account: Account | None = None
    sent_events: dict[tuple[str, str, str], SentEvent] = field(default_factory=dict)
    died: dict[tuple[str, int], str] = field(default_factory=dict)
    ended: dict[tuple[str, int], float] = field(default_factory=dict)
    planned_at: float | None = None

    def prune(self, job: str, incarnations: dict[str, int], active: dict[str, int]) -> None:
        """Drop entries about pods that are neither the newest of their slot nor serve it."""
        current = set()
        for key, incarnation in (*incarnations.items(), *active.items()):
            role, _, index = key.rpartition("-")
            if role in names.ROLE_OF_LABEL and index.isdigit():
                current.add(names.pod_name(job, self.uid, names.Slot(role, int(index)), incarnation))
        self.missing &= current
        self.witnessed &= current
        while len(self.sent_events) > _MOST_EVENTS:
            del self.sent_events[next(iter(self.sent_events))]
