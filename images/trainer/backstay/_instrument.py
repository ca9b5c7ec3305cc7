"""The one instrumentation point of a training pod, which spans, histograms and injected faults share.

Code marks its points once, with `span`, `reach` or `record`. Other objects act at such a point. A ring buffer keeps the
newest spans, a histogram observes their durations, and a fault script injects faults. Times are seconds of
`time.monotonic`.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from backstay_rpc.control_pb2 import Doing as DoingMessage

__all__ = [
    "CAPACITY",
    "Doing",
    "FaultInjector",
    "Span",
    "alter",
    "clocks",
    "doing",
    "follow_this_thread",
    "inject_with",
    "keep",
    "means",
    "observe",
    "reach",
    "record",
    "report",
    "report_to",
    "span",
    "spans",
]

CAPACITY: Final = 16_384
"""Spans that a pod keeps; the oldest are dropped. A span takes about 250 bytes."""

_T = TypeVar("_T")


class Span(NamedTuple):
    """Something that a thread did.

    Attributes:
        number: the position of the span among the spans of this process, from 0, in the order in which they ended.
        point: the name of the instrumented point, such as ``compute``.
        began, ended: seconds of `time.monotonic`. Equal for an instant.
        step: the step that it belongs to; None: it belongs to none.
        thread: the name of the thread.
        notes: more about it: strings and numbers.
    """

    number: int
    point: str
    began: float
    ended: float
    step: int | None
    thread: str
    notes: Mapping[str, Any] | None


@dataclass(frozen=True)
class Doing:
    """The activity of the followed thread.

    Attributes:
        point: the innermost open span.
        step: the span's step; None: the span has no step.
        began: when the span began, in seconds of `time.monotonic`.
        member: the pod of the rank that does it.
    """

    point: str
    step: int | None
    began: float
    member: int = 0

    @classmethod
    def read(cls, message: DoingMessage, now: float) -> Doing:
        """Returns the activity in a message that has arrived now."""
        return cls(message.point, message.step if message.has_step else None, now - message.seconds, message.member)

    def write(self, message: DoingMessage, now: float) -> None:
        """Fill a message that is sent now."""
        message.point, message.seconds, message.member = self.point, now - self.began, self.member
        message.step, message.has_step = self.step or 0, self.step is not None


class FaultInjector(Protocol):
    """Carries out a fault script."""

    def reach(self, point: str, step: int | None) -> None:
        """The process is at `point`. Raises OSError where the script lets a write fail."""

    def alter(self, point: str, value: Any) -> Any:
        """Returns the replacement of `value` at `point`."""


@dataclass
class _ServerClock:
    """How far another process's clock is ahead of this one, by the call with the shortest round trip recently."""

    offset: float
    error: float
    seen: float


_CLOCK_LIFE: Final = 60.0
"""Seconds after which an offset is replaced although its round trip was shorter: clocks drift."""


Server = tuple[int, int]
"""A server's shard and incarnation, because a replacement may run on another machine with another clock."""


@dataclass
class _ServerClocks:
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _known: dict[Server, _ServerClock] = field(default_factory=dict)

    def observe(self, server: Server, began: float, there: float, ended: float) -> None:
        """A call to `server` began and ended at these times here, and was answered at `there` there.

        The answer was given between the two, so the offset has an error of at most half of the round trip.
        """
        offset, error = there - (began + ended) / 2, (ended - began) / 2
        with self._lock:
            known = self._known.get(server)
            if known is None or error <= known.error or ended - known.seen > _CLOCK_LIFE:
                # Of the previous server too: the offsets of both relate its spans to the clock of this one.
                previous = max((key for key in self._known if key[0] == server[0] and key != server), default=None)
                self._known = {k: clock for k, clock in self._known.items() if k[0] != server[0] or k == previous}
                self._known[server] = _ServerClock(offset, error, ended)

    def offsets(self) -> dict[Server, tuple[float, float]]:
        """server -> seconds that its clock is ahead of this process's clock, and the largest error of that number."""
        with self._lock:
            return {server: (clock.offset, clock.error) for server, clock in self._known.items()}


clocks: Final = _ServerClocks()

_injector: FaultInjector | None = None
_reporter: Callable[[str, dict[str, Any]], None] | None = None
_ring: deque[tuple[int, str, float, float, int | None, int, Mapping[str, Any] | None]] | None = deque(maxlen=CAPACITY)
_numbers = itertools.count()
_observers: dict[str, Callable[[float], None]] = {}
_sums: dict[str, tuple[float, int]] = {}  # seconds and number of the spans since `means` was called, by point
_followed = 0
_open: list[_Open] = []
_monotonic = time.monotonic
_thread_id = threading.get_ident


class _Open:
    """A span that has not ended."""

    __slots__ = ("_began", "_notes", "_point", "_step")

    def __init__(self, point: str, step: int | None, notes: dict[str, Any]) -> None:
        self._point, self._step, self._notes = point, step, notes
        self._began = 0.0

    def __enter__(self) -> None:
        self._began = _monotonic()
        if _thread_id() == _followed:
            _open.append(self)
        if _injector is not None:
            try:
                _injector.reach(self._point, self._step)
            except BaseException:
                self._leave()
                raise

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended = _monotonic()
        self._leave()
        if kind is not None:
            self._notes["raised"] = kind.__name__
        else:
            _sum(self._point, ended - self._began)
            if (observer := _observers.get(self._point)) is not None:
                observer(ended - self._began)
        if _ring is not None:
            _ring.append(
                (next(_numbers), self._point, self._began, ended, self._step, _thread_id(), self._notes or None)
            )

    def _leave(self) -> None:
        if _open and _open[-1] is self:
            _open.pop()

    def as_doing(self) -> Doing:
        return Doing(self._point, self._step, self._began)


def span(point: str, step: int | None = None, **notes: Any) -> AbstractContextManager[None]:
    """``with span("compute", step):`` marks what the thread does meanwhile; a fault may be injected when it begins.

    A span whose body raises an exception is kept with the exception's name, and is in no histogram.

    Args:
        point: what the thread does, such as ``compute``.
        step: the step that it belongs to; None: it belongs to none.
        notes: more about it: strings and numbers.
    """
    return _Open(point, step, notes)


def reach(point: str, step: int | None = None) -> None:
    """The thread is at `point`: a fault may be injected here. No span is kept."""
    if _injector is not None:
        _injector.reach(point, step)


def alter(point: str, value: _T) -> _T:
    """`value`, unless a fault script replaces it at `point`."""
    if _injector is None:
        return value
    altered: _T = _injector.alter(point, value)
    return altered


def record(point: str, began: float, ended: float, step: int | None = None, **notes: Any) -> None:
    """Keep a span that was measured elsewhere; no fault is injected."""
    seconds = max(0.0, ended - began)
    _sum(point, seconds)
    if (observer := _observers.get(point)) is not None:
        observer(seconds)
    if _ring is not None:
        _ring.append((next(_numbers), point, began, ended, step, _thread_id(), notes or None))


def report(point: str, **notes: Any) -> None:
    """Send a fact about the job to the function that `report_to` set; no span is kept.

    Args:
        point: what happened, such as ``update``.
        notes: more about it: strings, numbers and lists of them.
    """
    if _reporter is not None:
        _reporter(point, notes)


def spans(since: int = 0, most: int = CAPACITY) -> list[Span]:
    """Returns the newest spans, in the order in which they ended.

    Args:
        since: the lowest number.
        most: how many at most; the newest are returned.
    """
    found = None
    while found is None:
        with contextlib.suppress(RuntimeError):  # another thread appended meanwhile
            found = [] if _ring is None else list(itertools.islice(reversed(_ring), most))
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        Span(number, point, began, ended, step, names.get(thread, "a thread that has ended"), notes)
        for number, point, began, ended, step, thread, notes in reversed(found)
        if number >= since
    ]


def doing() -> Doing | None:
    """Returns the activity of the followed thread, or None if no span is open there."""
    innermost = _open[-1:]
    return innermost[0].as_doing() if innermost else None


def means(points: Iterable[str]) -> dict[str, float]:
    """Returns how many seconds the spans at each of these points took on average since the previous call; a point
    without a span is left out. Only one thread may call it."""
    global _sums
    sums, _sums = _sums, {}
    return {point: sums[point][0] / sums[point][1] for point in points if point in sums}


def _sum(point: str, seconds: float) -> None:
    total, number = _sums.get(point, (0.0, 0))
    _sums[point] = total + seconds, number + 1


def follow_this_thread() -> None:
    """`doing` reports what this thread does, from now on."""
    global _followed  # noqa: PLW0603  # one process, one pod
    _followed = _thread_id()
    _open.clear()


def keep(capacity: int) -> None:
    """Keep this many spans from now on, or none if it is 0. Spans are numbered from 0 again."""
    global _ring, _numbers  # noqa: PLW0603
    _ring = deque(maxlen=capacity) if capacity else None
    _numbers = itertools.count()


def observe(point: str, observer: Callable[[float], None] | None) -> None:
    """Call `observer` with the seconds of each span at `point` that raises nothing; with None, stop these calls."""
    if observer is None:
        _observers.pop(point, None)
    else:
        _observers[point] = observer


def inject_with(injector: FaultInjector | None) -> None:
    """Inject the faults of a script from now on; with None, stop that."""
    global _injector  # noqa: PLW0603
    _injector = injector


def report_to(reporter: Callable[[str, dict[str, Any]], None] | None) -> None:
    """Call ``reporter(point, notes)`` at each `report` from now on, in any thread; with None, stop these calls."""
    global _reporter  # noqa: PLW0603
    _reporter = reporter
