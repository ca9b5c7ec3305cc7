"""Typed events that the parts of the operator send to each other, without references to each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from backstay_operator.watching import JobKey
from backstay_spec.observed import Contact, Progress

__all__ = ["Bus", "Called", "Changed", "LeadChanged", "PodEnded", "Progressed", "Relisted", "Serves"]


@dataclass(frozen=True, slots=True)
class Changed:
    """A job must be reconciled.

    Attributes:
        key: the job.
        after: seconds until then at most.
    """

    key: JobKey
    after: float = 0.0


@dataclass(frozen=True, slots=True)
class PodEnded:
    """The watch showed that a pod of a job has ended or was deleted; again with each event of such a pod."""

    key: JobKey
    raw: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Relisted:
    """The watch listed objects, and may have missed events before."""


@dataclass(frozen=True, slots=True)
class LeadChanged:
    """This operator begins to act, or stops acting."""

    leads: bool


@dataclass(frozen=True, slots=True)
class Serves:
    """A job has servers to call.

    Attributes:
        key: the job.
        now: whether the next round of calls begins immediately, because other servers serve the job.
    """

    key: JobKey
    now: bool = False


@dataclass(frozen=True, slots=True)
class Called:
    """A round of calls to the servers of a job ended, with this result about which pods answer.

    Attributes:
        token: the job's token, because another job may have the name since; empty: it is the known one.
    """

    key: JobKey
    contact: Contact
    token: str = ""


@dataclass(frozen=True, slots=True)
class Progressed:
    """The servers of a job answered with this progress; `token` is as in `Called`."""

    key: JobKey
    progress: Progress
    token: str = ""


_Event = TypeVar("_Event", Changed, PodEnded, Relisted, LeadChanged, Serves, Called, Progressed)


class Bus:
    """Calls the subscribers of an event's type, in the order in which they subscribed, before `send` returns."""

    def __init__(self) -> None:
        self._subscribers: defaultdict[type, list[Callable[[Any], None]]] = defaultdict(list)

    def subscribe(self, kind: type[_Event], handle: Callable[[_Event], None]) -> None:
        """Call `handle` with each event of this type from now on."""
        self._subscribers[kind].append(handle)

    def send(self, event: _Event) -> None:
        """Call the subscribers of the event's type."""
        for handle in self._subscribers[type(event)]:
            handle(event)
