"""The waits at the end of a job: the process that waits, the event that ends the wait, and the limit (decision 0062).

The runtime and the planner take their limits, in seconds, from here. `docs/generate.py` writes a page from `WAITS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["WAITS", "EndWait"]

EVALUATION: Final = 600.0
SUCCESSION: Final = 30.0
STORING: Final = 600.0
SHUTDOWN: Final = 15.0
RESULT: Final = 120.0
NEWCOMER: Final = 3.0
LATECOMER: Final = 10.0
GONE: Final = 2.0
LAST_SAVE: Final = 50.0
CONFIRM: Final = 20.0
MARGIN: Final = 60.0
END: Final = EVALUATION + STORING + MARGIN
EXIT_VERDICT: Final = 10.0
LAST_MESSAGE: Final = 20.0
# Shard 0's server leaves within these times after `Done`: it stays for peers, or for rank 0, and closes its parts.
STAYS_STORED: Final = SHUTDOWN + CONFIRM + 5.0
STAYS: Final = RESULT + CONFIRM + 20.0
LEAVING: Final = 10.0


@dataclass(frozen=True, slots=True)
class EndWait:
    """One wait.

    Attributes:
        who: the process that waits.
        what: the event that ends the wait in order.
        seconds: the limit.
        late: the action after the limit.
    """

    who: str
    what: str
    seconds: float
    late: str


_COORDINATOR, _SERVER, _SHARD_0, _RANK_0, _OPERATOR = (
    "coordinator",
    "each server",
    "shard 0's server",
    "worker 0",
    "operator",
)

WAITS: Final = (
    EndWait(_COORDINATOR, "all shards and the manifest of the last version are stored", STORING, "the job fails"),
    EndWait(_COORDINATOR, "worker 0 or the evaluator reports the evaluation", EVALUATION, "`Done` without metrics"),
    EndWait(
        "coordinator after a failover",
        "the evaluation, which the previous coordinator may have received",
        SUCCESSION,
        "`Done` without metrics",
    ),
    EndWait("worker with the last version", "`Done` in a heartbeat", END, "the worker fails (`WaitedTooLong`)"),
    EndWait(_RANK_0, "shard 0's server accepts the report of the result", CONFIRM, "the worker fails"),
    EndWait(_SERVER, "its shard has applied the last update", SHUTDOWN, "the server leaves"),
    EndWait(_SERVER, "its workers, the evaluator and the links have received `Done`", SHUTDOWN, "the server leaves"),
    EndWait(
        "each server, without checkpoints",
        "worker 0 reports that it has the result",
        RESULT,
        "the server leaves, and the result is lost",
    ),
    EndWait(
        "a promoted server, or a replacement that finds the training complete",
        "workers that were cut off connect again",
        NEWCOMER,
        "the server leaves",
    ),
    EndWait(
        "a replacement of a server that finds the training complete",
        "worker 0, which may still evaluate, joins it or reports that it has the result",
        LATECOMER,
        "the server leaves",
    ),
    EndWait(_SHARD_0, "a server without a link links again", GONE, "the server leaves"),
    EndWait("server of another shard", "the coordinator has received its last spans", GONE, "the server leaves"),
    EndWait("server after SIGTERM", "its checkpoint is stored", LAST_SAVE, "the server leaves"),
    EndWait("server after SIGTERM", "the coordinator has processed its reports", GONE, "the server leaves"),
    EndWait(
        _OPERATOR,
        "a message of any pod, after a worker or server ended with code 0 and a foreign message",
        EXIT_VERDICT,
        "the pod is replaced",
    ),
    EndWait(_OPERATOR, "the message of shard 0's server, with loss and metrics", LAST_MESSAGE, "the job ends without"),
    EndWait(
        _OPERATOR, "shard 0's server ends, before worker 0 is judged", STAYS_STORED, "worker 0 reads the checkpoint"
    ),
    EndWait(f"{_OPERATOR}, without checkpoints", "the same", STAYS, "worker 0 cannot get the result: the job fails"),
    EndWait(_OPERATOR, "the pods of a successful job leave by themselves", LEAVING, "the operator deletes them"),
)
