"""The changes of a planner's verdict, as values that can be added: actions, events, deaths, obstructed slots."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from backstay_spec.actions import Action, FoundDead
from backstay_spec.causes import Cause, Obstacle
from backstay_spec.events import Event
from backstay_spec.names import Slot
from backstay_spec.planner.record import Record

__all__ = ["NOTHING", "Creation", "Decision", "Effects", "JobFailure", "Obstructed", "earliest"]


@dataclass(frozen=True, slots=True)
class Creation:
    """A pod to create; its incarnation is recorded.

    Attributes:
        members: the pods to create, if a rank has several; None: all of them.
    """

    slot: Slot
    incarnation: int
    cause: Cause | None = None
    members: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Obstructed:
    """A slot whose pod does not start, and since when.

    Attributes:
        standby: whether it is the standby of a shard; the job can continue without it.
    """

    slot: Slot
    obstacle: Obstacle
    since: datetime
    standby: bool = False

    @property
    def text(self) -> str:
        """The slot in words."""
        return f"the standby of {self.slot.text}" if self.standby else self.slot.text


@dataclass(frozen=True, slots=True)
class JobFailure:
    """The failure of the job.

    Attributes:
        reason, message: one CamelCase word, and a sentence for people.
        detail: more text for the condition, such as a traceback; empty: none.
        fields: fields of the status that are known only now.
    """

    reason: str
    message: str
    detail: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Effects:
    """The changes of one or more verdicts, except those of the record.

    Attributes:
        actions, events, deaths: as in `actions.Plan`.
        creations: pods to create.
        obstructed: slots whose pods do not start.
        wake: plan again at this time at the latest; None: no need.
        failure: the job fails; the first failure counts.
    """

    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    deaths: tuple[FoundDead, ...] = ()
    creations: tuple[Creation, ...] = ()
    obstructed: tuple[Obstructed, ...] = ()
    wake: datetime | None = None
    failure: JobFailure | None = None

    def __add__(self, other: Effects) -> Effects:
        if other is NOTHING:
            return self
        return Effects(
            actions=self.actions + other.actions,
            events=self.events + other.events,
            deaths=self.deaths + other.deaths,
            creations=self.creations + other.creations,
            obstructed=self.obstructed + other.obstructed,
            wake=earliest((self.wake, other.wake)),
            failure=self.failure or other.failure,
        )


#: No effects.
NOTHING: Final = Effects()


def earliest(times: Iterable[datetime | None]) -> datetime | None:
    """Returns the earliest of some times, or None if all are None."""
    return min((time for time in times if time is not None), default=None)


@dataclass(frozen=True, slots=True)
class Decision:
    """The record after a policy, and its other effects."""

    record: Record
    effects: Effects = NOTHING

    def also(self, effects: Effects) -> Decision:
        """Returns the decision with more effects."""
        return Decision(self.record, self.effects + effects)

    def then(self, later: Decision) -> Decision:
        """Returns the effects of this decision, followed by those of one that was made from its record."""
        return Decision(later.record, self.effects + later.effects)
