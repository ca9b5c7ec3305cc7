"""State of a job that the operator keeps between two runs. It may be lost: a restart costs only a few reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from backstay_spec.goodput import Account
from backstay_spec.job_memory import JobMemory

_MOST_EVENTS = 64


@dataclass
class SentEvent:
    """An event that was sent: its object's name and how often it was repeated."""

    name: str
    count: int


@dataclass
class OperatorMemory(JobMemory):
    """The memory of one job that the operator keeps, with more than other supervisors need.

    Attributes:
        account: the account of the seconds of its worker pods; None: it must be continued from the job's status.
        sent_events: the events that were sent, by (type, reason, message).
        died: (role, index) -> why the last pod of that slot died; kept until its replacement is created.
        ended: (role, index) -> the clock when a pod of that slot was first observed to have ended.
        planned_at: the clock when the newest plan was made; None: no plan was made yet.
    """

    account: Account | None = None
    sent_events: dict[tuple[str, str, str], SentEvent] = field(default_factory=dict)
    died: dict[tuple[str, int], str] = field(default_factory=dict)
    ended: dict[tuple[str, int], float] = field(default_factory=dict)
    planned_at: float | None = None

    def prune(
        self, job: str, incarnations: dict[str, int], active: dict[str, int], workers: int, pods_per_rank: int
    ) -> None:
        """Drop what `JobMemory.prune` drops, and the oldest events."""
        super().prune(job, incarnations, active, workers, pods_per_rank)
        while len(self.sent_events) > _MOST_EVENTS:
            del self.sent_events[next(iter(self.sent_events))]
