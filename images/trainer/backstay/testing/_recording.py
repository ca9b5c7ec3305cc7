"""Holds the history of a tested job, which its pods record as they train, and from which a test reads values."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from .._result import Result

__all__ = [
    "ENV_PATH",
    "ENV_RECORD",
    "ENV_SILENT",
    "EVENTS",
    "RESULT",
    "Contribution",
    "Death",
    "JobResult",
    "Rollback",
    "Update",
    "account",
    "read_events",
]

EVENTS: Final = "events"
"""The suffix of the file with a pod's events, one JSON object in each line."""
RESULT: Final = "result"
"""The suffix of the file with what `train` returned in a pod."""
ENV_RECORD: Final = "BACKSTAY_TESTING_RECORD"
"""The path of these two files, without the suffix."""
ENV_PATH: Final = "BACKSTAY_TESTING_PATH"
"""Folders to import from, beside those of a script, as JSON."""
ENV_SILENT: Final = "BACKSTAY_TESTING_SILENT"
"""Seconds without a heartbeat after which a pod counts as lost."""


@dataclass(frozen=True)
class Update:
    """One update of the parameters.

    Attributes:
        term: the term of the job's history; grows with each rollback.
        step: the version that the update was applied to, from 0 on.
        ranks: the ranks whose contributions made the update, in order.
        skipped: a contribution was not finite, so the parameters stayed the same.
        world: the number of ranks in force after it.
        loss: the mean loss of the contributions.
    """

    term: int
    step: int
    ranks: tuple[int, ...]
    skipped: bool
    world: int
    loss: float


@dataclass(frozen=True)
class Contribution:
    """One contribution that the coordinator decided about.

    Attributes:
        rank, incarnation: the worker that made the contribution.
        step: the number of its batch (`BatchKey.step`).
        outcome: ``applied``, or the reason why not: a value of the label `outcome` of the metric
            ``backstay_contributions_total``, such as ``late`` or ``non_finite``.
        staleness: versions between its parameters and the update; 0 in Sync mode.
        term: the term of the job's history.
    """

    rank: int
    incarnation: int
    step: int
    outcome: str
    staleness: int
    term: int


@dataclass(frozen=True)
class Rollback:
    """The job went back to a checkpoint, or to the initial parameters.

    Attributes:
        term: the new one.
        step: where training continued.
        redone: updates that had to be made again.
    """

    term: int
    step: int
    redone: int


@dataclass(frozen=True)
class Death:
    """A pod that ended before its work was done, in order of their ends.

    Attributes:
        slot: the slot of the pod, such as ``worker/1``, as in a fault script.
        incarnation: the pod's incarnation.
        exit_code: 137 after SIGKILL.
        message: the text of the termination message; empty where there was none.
    """

    slot: str
    incarnation: int
    exit_code: int
    message: str


@dataclass(frozen=True)
class JobResult:
    """The end of a tested job, and its history.

    Attributes:
        results: what `train` returned in each worker, by rank; arrays are NumPy arrays. Parameters whose tree has other
            nodes than dicts, lists and tuples are a dict from the path of a leaf to its array. A worker that hung or
            was not replaced is missing.
        updates: all updates that count, in order. After a rollback, those of the new term replace the old ones.
        contributions: all contributions, in the order of the decisions, those before a rollback included.
        rollbacks: all rollbacks, in order.
        deaths: all deaths, in order.
        logs: the output of each pod, by its name.
        reason, message: why the job failed; empty where it succeeded.
    """

    results: Mapping[int, Result]
    updates: tuple[Update, ...]
    contributions: tuple[Contribution, ...]
    rollbacks: tuple[Rollback, ...]
    deaths: tuple[Death, ...]
    logs: Mapping[str, str] = field(repr=False)
    reason: str = ""
    message: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the worker of rank 0 returned from `train` and ended with exit code 0."""
        return not self.reason

    @property
    def result(self) -> Result:
        """The return value of `train` in the worker of rank 0. Raises `KeyError` if the job failed before."""
        return self.results[0]

    @property
    def params(self) -> Any:
        """The last parameters."""
        return self.result.params

    def of_rank(self, rank: int) -> tuple[Contribution, ...]:
        """Returns the contributions of one rank, in order."""
        return tuple(one for one in self.contributions if one.rank == rank)

    def outcomes(self, rank: int | None = None) -> dict[str, int]:
        """Returns how many contributions had each outcome; of one rank, or of all."""
        found: dict[str, int] = {}
        for one in self.contributions:
            if rank is None or one.rank == rank:
                found[one.outcome] = found.get(one.outcome, 0) + 1
        return found


def read_events(file: Path) -> list[dict[str, Any]]:
    """Returns the events of a pod. A last line that is not complete is left out: the pod was killed as it wrote."""
    try:
        lines = file.read_text().split("\n")[:-1]
    except OSError:
        return []
    return [json.loads(line) for line in lines]


def account(
    events: Iterable[Mapping[str, Any]],
) -> tuple[tuple[Update, ...], tuple[Contribution, ...], tuple[Rollback, ...]]:
    """Returns the history of a job from the events of its coordinators.

    Args:
        events: the events of each server of shard 0, in order of incarnation. A decision that a coordinator reported
            and did not deliver before it was killed is taken again by the next one, whose report counts.
    """
    updates: dict[int, Update] = {}
    contributions: dict[tuple[int, ...], Contribution] = {}
    rollbacks: dict[int, Rollback] = {}
    term = 0
    for event in events:
        match event["point"]:
            case "update":
                update = Update(
                    event["term"],
                    event["step"],
                    tuple(event["ranks"]),
                    event["skipped"],
                    event["world"],
                    event["loss"],
                )
                if update.term > term > 0 and update.term not in rollbacks:
                    # A coordinator that was replaced begins its term without an event.
                    again = sum(step >= update.step for step in updates)
                    rollbacks[update.term] = Rollback(update.term, update.step, again)
                    updates = {step: one for step, one in updates.items() if step < update.step}
                term = max(term, update.term)
                updates[update.step] = update
            case "contribution":
                one = Contribution(
                    event["rank"],
                    event["incarnation"],
                    event["step"],
                    event["outcome"],
                    event["staleness"],
                    event["term"],
                )
                key = one.term, one.rank, one.incarnation, one.step, event["attempt"]
                contributions.pop(key, None)
                contributions[key] = one
            case "rollback":
                back = Rollback(event["term"], event["step"], event["redone"])
                rollbacks[back.term] = back
                term = max(term, back.term)
                updates = {step: update for step, update in updates.items() if step < back.step}
            case _:
                pass
    return (
        tuple(updates[step] for step in sorted(updates)),
        tuple(contributions.values()),
        tuple(rollbacks[term] for term in sorted(rollbacks)),
    )
