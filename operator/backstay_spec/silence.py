"""How long a process may be silent before it is replaced: the times that several programs share (decision 0073).

The coordinator, the planner and the operator's calls take them, in seconds, from here. `planner.hung` has what only the
planner waits for. `docs/generate.py` writes a page from `table`. A process that has ended is not silent: its connection
is closed, and its pod has ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = [
    "CALL",
    "HEALTH",
    "HEARTBEAT",
    "LOST",
    "MISSED_CALLS",
    "NO_WITNESS_CALLS",
    "PERIOD",
    "SilenceOfWorker",
    "table",
    "worker_silence",
]

#: The interval between two heartbeats of a worker.
HEARTBEAT: Final = 2.0
#: A peer without a heartbeat for this time counts as lost: the grace does not wait for it. It is not replaced yet.
LOST: Final = 10.0
#: The time between two rounds of calls of the operator to the servers of a job, and the deadline of one call.
PERIOD: Final = 2.0
CALL: Final = 1.5
#: The deadline of a health request.
HEALTH: Final = 8.0
#: Calls in a row without an answer of a hung server. A long call is unanswered too: about 10 s.
MISSED_CALLS: Final = 4
#: The same if no other process reports that the server is silent: about 5 minutes.
NO_WITNESS_CALLS: Final = 150

# No step of a worker needs the interpreter's lock for this long. A worker that does is given a tenth of a longer limit.
_LONG: Final = 30.0
_SHARE: Final = 0.1
# A process without enough CPU time answers late.
_SHORTEST_HEALTH: Final = 3.0
_SHORTEST_REPORT: Final = 1.5 * HEARTBEAT


@dataclass(frozen=True, slots=True)
class SilenceOfWorker:
    """The times of a worker that runs and is silent, in seconds.

    Attributes:
        reported: after this time without a heartbeat, the coordinator reports the worker.
        health: the deadline of the health request that the operator then sends.
    """

    reported: float
    health: float

    @property
    def limit(self) -> float:
        """The shortest silence after which the worker is replaced."""
        return self.reported + self.health


def worker_silence(stall_seconds: float) -> SilenceOfWorker:
    """Returns the times of a worker in a job with these `workers.stallSeconds`.

    A worker that holds the interpreter's lock is silent, and lives. So its silence has the limit that the user set for
    a worker without a gradient. A longer limit than 30 s is not for silence: a stopped process would cost a Sync job
    all of it.
    """
    limit = min(stall_seconds, max(_LONG, _SHARE * stall_seconds))
    health = min(HEALTH, max(_SHORTEST_HEALTH, limit / 3))
    return SilenceOfWorker(max(_SHORTEST_REPORT, limit - health), health)


def table() -> list[tuple[str, str, str, str]]:
    """Returns the times for some values of `stallSeconds` as text: that value, and those of `SilenceOfWorker`."""
    rows = []
    for stall in (5, 12, 30, 300, 600):
        found = worker_silence(stall)
        rows.append((f"{stall} s", f"{found.reported:.0f} s", f"{found.health:.0f} s", f"{found.limit:.0f} s"))
    return rows
