"""Supervises one job (O1). The loop observes, plans, and carries the plan out, until no action is left.

`settle` is the only such loop. It reaches a job through a port, `JobObjects`. The operator's adapter is Kubernetes,
`backstay.testing` has one of processes on this machine, and `backstay_spec.simulated` one of dictionaries with a clock
that tests move. `docs/decisions/0003-the-planner.md` has the reasons.

The port's methods are coroutines, because requests to an API server wait. `run_without_waiting` runs the
methods of an adapter that never waits, without an event loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol, TypeVar

from backstay_spec.actions import Action, CreatePod, Plan
from backstay_spec.job_memory import JobMemory
from backstay_spec.observed import HELD, Observed, PlanSettings
from backstay_spec.plan import plan, refuse
from backstay_spec.types import ObjectMeta, TrainingJob, TrainingJobSpec
from backstay_spec.types_status import TrainingJobStatus
from backstay_spec.validation import SpecErrors

__all__ = ["Done", "JobObjects", "SeenJob", "in_order", "name_of", "planned_from", "run_without_waiting", "settle"]

_ROUNDS: Final = 6
_T = TypeVar("_T")


@dataclass(frozen=True)
class Done:
    """The result of carrying out a plan.

    Attributes:
        again: something was done, so the supervisor must plan again from the new state.
        wait: seconds until a failed action may be tried again; None: no action failed.
    """

    again: bool = False
    wait: float | None = None


@dataclass(frozen=True)
class SeenJob:
    """One job and what is observed of it.

    Attributes:
        metadata, status: the metadata of the job, and the status that was last written.
        spec: its valid spec, or the errors of an invalid one, which an older CRD accepted.
        observed: its objects and its servers' answers.
    """

    metadata: ObjectMeta
    spec: TrainingJobSpec | SpecErrors
    status: TrainingJobStatus
    observed: Observed


class JobObjects(Protocol):
    """The port through which a supervisor reads and changes one job and its objects."""

    async def observed(self) -> SeenJob | None:
        """Returns the job now. Returns None while the job does not exist, or while this supervisor may not act."""
        ...

    async def write_status(self, planned: Plan) -> bool:
        """Write the plan's status over the one that was observed last, and count its deaths. Returns False if the job
        has changed since: then nothing of the plan may be carried out."""
        ...

    async def carry_out(self, planned: Plan) -> Done:
        """Carry out the plan's actions, in the order of `in_order`, and send its events."""
        ...


def planned_from(seen: SeenJob, now: datetime, settings: PlanSettings) -> Plan:
    """Returns the plan for a job; `settings` are the supervisor's."""
    if isinstance(seen.spec, SpecErrors):
        return refuse(seen.metadata, seen.status, str(seen.spec), now, seen.observed.pods)
    job = TrainingJob(metadata=seen.metadata, spec=seen.spec, status=seen.status)
    return plan(job, seen.observed, now, settings)


async def settle(objects: JobObjects, settings: PlanSettings, now: Callable[[], datetime]) -> float | None:
    """Plan and carry out until no action is left, for a few rounds at most.

    Returns:
        The seconds after which the job must be planned again, even if nothing happens. 0 after the last round that is
        allowed, and None if no time is known, or if there is no job to plan.
    """
    for _ in range(_ROUNDS):
        seen = await objects.observed()
        if seen is None:
            return None
        planned = planned_from(seen, now(), settings)
        if planned.status is not None and not await objects.write_status(planned):
            continue
        done = await objects.carry_out(planned)
        if not done.again:
            planned_wait = None if planned.requeue_after is None else planned.requeue_after.total_seconds()
            return min((wait for wait in (planned_wait, done.wait) if wait is not None), default=None)
    return 0.0


async def in_order(
    actions: Sequence[Action],
    memory: JobMemory,
    now: Callable[[], datetime],
    carry_out: Callable[[Sequence[Action]], Awaitable[None]],
) -> None:
    """Carry out actions in the order that `backstay_spec.actions` defines.

    Args:
        actions: the actions of a plan.
        memory: has the refusals. After a pod was refused, pods of later stages are recorded as held back there.
        now: the time of day.
        carry_out: carries out neighbouring actions of one kind, which are independent of each other.
    """
    why = ""
    for group in _groups(actions):
        if isinstance(group[0], CreatePod) and why:
            for action in group:
                memory.refuse(name_of(action), HELD, why, now())
            continue
        await carry_out(group)
        if isinstance(group[0], CreatePod):
            refused = (memory.refused.get(name_of(action)) for action in group)
            why = next((f"waits for a pod that was refused: {each.message}" for each in refused if each), "")


def name_of(action: Action) -> str:
    """Returns the name of the object that an action changes."""
    found: str = getattr(action, "name", None) or action.manifest["metadata"]["name"]  # type: ignore[union-attr]
    return found


def run_without_waiting(work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of a coroutine that never waits.

    Raises:
        RuntimeError: the coroutine waits for something, so it needs an event loop.
    """
    try:
        work.send(None)
    except StopIteration as ended:
        result: _T = ended.value
        return result
    work.close()
    raise RuntimeError("the coroutine waits: it needs an event loop")


def _groups(actions: Sequence[Action]) -> Iterator[Sequence[Action]]:
    for _, group in itertools.groupby(actions, lambda action: (type(action), getattr(action, "stage", 0))):
        yield list(group)
