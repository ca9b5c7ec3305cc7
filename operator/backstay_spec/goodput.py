"""Accounts for the seconds of a job's worker pods by part (goodput). `docs/goodput.md` explains the definition.

A worker divides the time of its process into `MEASURED` and sends the sums with its heartbeats. An `Account` has
the newest report of each pod. It adds the time before the process began, the time after the last report, and slots
without a pod. The parts add up to the seconds of the pods, and of the slots without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

__all__ = [
    "FRESH",
    "LONGEST",
    "MEASURED",
    "PARTS",
    "Account",
    "SecondsReport",
    "WorkerPod",
    "goodput",
    "is_measured",
    "parts_of",
]

MEASURED: Final = (
    "applied",
    "dropped",
    "redone",
    "computing",
    "starting",
    "compiling",
    "data",
    "send",
    "wait",
    "receive",
    "checkpoint",
    "reconnecting",
    "ending",
)
"""The parts that a worker measures. The order is that of `WorkerSeconds.seconds` in control.proto.

`applied`, `dropped`, `redone`, `computing`: computation. It is dropped when the contribution was late, stale or not
finite. It is also dropped when the update was skipped, or a server was lost before it answered. It is redone when a
rollback discarded it. It is computing while its outcome is not known.
`starting`: from the start of the process to the first parameters, without compiling.
`data`: waiting for a batch.
`send`, `wait`, `receive`: the contribution, the update, the new parameters.
`checkpoint`: after the last update, until its checkpoint is stored. `ending`: other time after the last update.
`reconnecting`: from the loss of a server to new parameters."""

PARTS: Final = (*MEASURED, "missing")
"""`missing` has the seconds of slots without a pod, and of a pod that died, or is silent, since its last report."""

FRESH: Final = 10.0
"""Seconds. A pod whose newest report is at most this old is counted up to that report. The next report has the rest."""

_WHOLE: Final = 2.0  # seconds; a time of the API, which has whole seconds, counts as the present if it is less old

Parts: TypeAlias = tuple[float, ...]
Key: TypeAlias = tuple[int, int]
"""Rank and incarnation."""

_APPLIED, _REDONE, _COMPUTING = (MEASURED.index(part) for part in ("applied", "redone", "computing"))
_STARTING, _ENDING, _MISSING = (PARTS.index(part) for part in ("starting", "ending", "missing"))
_NOTHING: Final[Parts] = (0.0,) * len(PARTS)


LONGEST: Final = 1e10
"""More seconds than this, which are 300 years, are not a measurement. Sums of valid values stay finite."""


class SecondsReport(NamedTuple):
    """The seconds that a worker's process has measured.

    Attributes:
        at: the Unix time of the report.
        seconds: the seconds of each of `MEASURED`; they add up to the age of the process.
        unsaved: seconds of `applied` in updates after the newest checkpoint.
        version: the newest update that applied a contribution of this process.
    """

    at: float
    seconds: Parts
    unsaved: float = 0.0
    version: int = 0

    def rolled_back(self, version: int) -> SecondsReport:
        """Returns the report, after the updates from `version` on were discarded."""
        return self if self.version <= version else _discarded(self, self.unsaved)


def _discarded(report: SecondsReport, seconds: float) -> SecondsReport:
    """Returns the report, after `seconds` applied seconds were discarded."""
    lost = max(0.0, min(seconds, report.seconds[_APPLIED]))
    moved = tuple(value + lost * ((i == _REDONE) - (i == _APPLIED)) for i, value in enumerate(report.seconds))
    return report._replace(seconds=moved, unsaved=0.0)


@dataclass(frozen=True, slots=True)
class WorkerPod:
    """One worker's pod that occupies a node, or did. Times are in Unix seconds.

    Attributes:
        key: its rank and incarnation.
        start: when a node began to run it.
        end: when it ended; None: it runs.
        succeeded: whether the pod ended with exit code 0.
        measured: the seconds of each of `MEASURED` in its termination message; empty: the message has none.
    """

    key: Key
    start: float
    end: float | None = None
    succeeded: bool = False
    measured: Parts = ()


def parts_of(pod: WorkerPod, report: SecondsReport | None, now: float, *, over: bool = False) -> Parts:
    """Returns the seconds of one pod by `PARTS`.

    Args:
        report: the newest of its process; None: there is none.
        over: the job has ended: a pod that is still there has nothing left to do.
    """
    end = now if pod.end is None else max(pod.end, pod.start)
    if pod.measured:
        at = end if report is None else report.at - sum(report.seconds) + sum(pod.measured)
        lost = 0.0 if report is None else report.seconds[_REDONE] - pod.measured[_REDONE]
        report = _discarded(SecondsReport(min(at, end), pod.measured), lost)  # a rollback after the message
    found = list(_NOTHING)
    if report is None:
        found[_STARTING] = max(0.0, end - pod.start)
        return tuple(found)
    found[: len(MEASURED)] = report.seconds
    found[_STARTING] += max(0.0, report.at - sum(report.seconds) - pod.start)
    rest = max(0.0, end - report.at)
    if pod.end is None:
        found[_MISSING] += rest if rest > FRESH and not over else 0.0
        return tuple(found)
    found[_MISSING] += found[_COMPUTING]  # no update will contain it
    found[_COMPUTING] = 0.0
    found[_ENDING if pod.succeeded or over else _MISSING] += rest
    return tuple(found)


def is_measured(seconds: Sequence[float]) -> bool:
    """Returns whether these can be the seconds of `MEASURED`."""
    return len(seconds) == len(MEASURED) and all(0 <= value <= LONGEST for value in seconds)


def goodput(parts: Mapping[str, float]) -> float | None:
    """Returns the share of the seconds whose computation was applied, or None if there are no seconds yet."""
    total = sum(parts.values())
    return parts.get("applied", 0.0) / total if total > 0 else None


@dataclass
class Account:
    """The account of one job. Times are in Unix seconds, and passed in.

    Attributes:
        gone: the seconds of pods that no longer exist, and of slots without a pod.
        until: slots without a pod are counted up to here; None: no pod had a node yet.
        known: after a restart of the operator, the stored sums of all pods at `until`, until the first `observe`.
        term, redone: as the coordinator reported last, to notice rollbacks.
    """

    gone: Parts = _NOTHING
    until: float | None = None
    known: Parts | None = None
    term: int | None = None
    redone: int | None = None
    over: bool = False
    _pods: dict[Key, WorkerPod] = field(default_factory=dict)
    _reports: dict[Key, SecondsReport] = field(default_factory=dict)
    _kept: dict[Key, SecondsReport] = field(
        default_factory=dict
    )  # after an operator's restart, until a pod's first report
    _risks: list[tuple[int, float]] = field(default_factory=list)  # of `gone`: (version, applied seconds)

    @classmethod
    def continued(
        cls, seconds: Mapping[str, float], gone: Mapping[str, float], until: float | None, term: int | None
    ) -> Account:
        """Returns the account that another operator has kept until now.

        Args:
            seconds: the seconds of all pods, by part.
            gone: the seconds of pods that no longer exist, and of slots without a pod.
        """
        before, known = (tuple(of.get(part, 0.0) for part in PARTS) for of in (gone, seconds))
        return cls(gone=before, until=until, known=known if any(known) else None, term=term)

    def observe(self, now: float, pods: Iterable[WorkerPod], slots: int, *, over: bool = False) -> None:
        """The job's worker pods at `now`.

        Args:
            pods: the pods that have a node, or ended and still exist.
            slots: ranks that should have a pod.
            over: the job has ended.
        """
        found = {pod.key: self._precise(pod, now) for pod in pods}
        if self.until is None and not found:
            return
        self._settle(found)
        for key in self._pods.keys() - found.keys():
            pod = self._pods[key]
            end = now if pod.end is None else pod.end
            ended = replace(pod, end=end)
            if now - end < FRESH:
                found[key] = ended  # the coordinator may have a newer report than it has sent
            else:
                self._close(ended, now)
        self._pods, self.over = found, over
        if self.until is not None and now > self.until and not over:
            by_rank: dict[int, list[WorkerPod]] = {}
            for pod in self._pods.values():
                by_rank.setdefault(pod.key[0], []).append(pod)
            self._miss(sum(_uncovered(by_rank.get(rank, ()), self.until, now) for rank in range(slots)))
        self.until = now if self.until is None else max(now, self.until)

    def report(self, reports: Mapping[Key, SecondsReport]) -> None:
        """Reports of workers. A report of a pod that does not exist is ignored."""
        for key, report in reports.items():
            known = self._reports.get(key)
            # The age of the process, because the clock of the operator may be set back.
            newer = known is None or sum(report.seconds) > sum(known.seconds)
            if key in self._pods and is_measured(report.seconds) and newer:
                self._reports[key] = report

    def progressed(self, term: int, began: int, redone: int, checkpoint: int) -> None:
        """Record the position of the history.

        Args:
            term, began: the coordinator's term, and the version that it began with.
            redone: updates that rollbacks have discarded so far.
            checkpoint: the version of the newest complete checkpoint.
        """
        back = self.term is not None and (
            term > self.term or (term == self.term and self.redone is not None and redone > self.redone)
        )
        self.term, self.redone = term, redone
        if back:
            self._reports = {key: report.rolled_back(began) for key, report in self._reports.items()}
            lost = sum(seconds for version, seconds in self._risks if version > began)
            self._risks = []
            self._add(tuple(lost * ((i == _REDONE) - (i == _APPLIED)) for i in range(len(PARTS))))
        else:
            self._risks = [(version, seconds) for version, seconds in self._risks if version > checkpoint]

    def seconds(self, now: float) -> dict[str, float]:
        """Returns the seconds of all worker pods, and of slots without one, by `PARTS`."""
        of_pods = [parts_of(pod, self._newest(pod), now, over=self.over) for pod in self._pods.values()]
        return dict(zip(PARTS, map(sum, zip(self.gone, *of_pods, strict=True)), strict=True))

    # ---- Inside ----

    def _precise(self, pod: WorkerPod, now: float) -> WorkerPod:
        """Replaces times of the API, which are whole seconds, by the times at which this account observed the changes.

        Otherwise each pod would gain or lose up to a second, and the parts would not add up to the age (decision 0046).
        """
        known = self._pods.get(pod.key)
        start = min(pod.start, now) if known is None else known.start
        if known is None and self.known is None:  # it had no node at `until`
            start = now if now - start < _WHOLE else max(start, self.until or start)
        if pod.end is None:
            return replace(pod, start=start)
        if known is not None and known.end is not None:
            return replace(pod, start=start, end=known.end)
        seen = known is not None and now - pod.end < _WHOLE
        return replace(pod, start=start, end=max(start, now if seen else min(pod.end, now)))

    def _settle(self, found: Mapping[Key, WorkerPod]) -> None:
        """Divide the stored seconds of pods that existed at `until` among the pods that still exist.

        Pods that ended and were deleted while no operator ran are missing.
        """
        if self.known is None or self.until is None:
            return
        # The status has one sum of all pods, because the parts of 256 workers would be 30 kB each time (decision 0046).
        until, known, self.known = self.until, self.known, None
        ages = {key: max(0.0, min(until, pod.end or until) - pod.start) for key, pod in found.items()}
        absent = max(0.0, sum(known) - sum(self.gone) - sum(ages.values()))
        exact = [parts_of(pod, None, until) for pod in found.values() if pod.measured]
        left = [max(0.0, all_ - sum(others)) for all_, *others in zip(known, self.gone, *exact, strict=True)]
        for key, pod in found.items():
            if pod.measured or not ages[key] or sum(left) <= left[_STARTING]:
                continue  # a pod without a report is starting
            share = [seconds * ages[key] / sum(left) for seconds in left]
            self._kept[key] = SecondsReport(pod.start + ages[key] - share[_MISSING], tuple(share[: len(MEASURED)]))
        self._miss(absent)

    def _newest(self, pod: WorkerPod) -> SecondsReport | None:
        """Returns the newest report of a pod, or what is kept of it instead."""
        report = self._reports.get(pod.key)
        return self._kept.get(pod.key) if report is None and not pod.measured else report

    def _close(self, pod: WorkerPod, now: float) -> None:
        """End the account of a pod that is gone."""
        report = self._newest(pod)
        self._reports.pop(pod.key, None)
        self._kept.pop(pod.key, None)
        self._add(parts_of(pod, report, now, over=self.over))
        if report is not None and report.unsaved:
            self._risks.append((report.version, report.unsaved))

    def _miss(self, seconds: float) -> None:
        self._add(tuple(seconds * (i == _MISSING) for i in range(len(PARTS))))

    def _add(self, parts: Parts) -> None:
        self.gone = tuple(a + b for a, b in zip(self.gone, parts, strict=True))


def _uncovered(pods: Sequence[WorkerPod], since: float, now: float) -> float:
    """Returns the seconds between the two in which no pod of a slot had a node.

    Args:
        pods: the slot's pods.
    """
    uncovered, at = 0.0, since
    for start, end in sorted((pod.start, now if pod.end is None else pod.end) for pod in pods):
        uncovered += max(0.0, min(start, now) - at)
        at = max(at, end)
    return uncovered + max(0.0, now - at)
