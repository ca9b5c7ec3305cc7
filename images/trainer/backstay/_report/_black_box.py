"""The records that shard 0's server leaves: a report about each pod that died, and the job's history.

The operator sends the history, which says who died and why (`ProgressRequest.record`). A pod that gets SIGTERM while it
hangs sends its stacks and the end of its output. The timeline has its last spans. Files are made by the thread of
`Records`: what fails there costs a record and never the training.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError

from backstay_rpc.control_pb2 import HangReport, Peer, ProgressReply, Spans, StoredReport
from backstay_rpc.spans import spans_in
from backstay_spec.goodput import PARTS, goodput
from backstay_spec.records import merged

from .._checkpoint import Records, record_name

if TYPE_CHECKING:
    from .._process import Environment

__all__ = ["BlackBox", "updated"]

_LOG = logging.getLogger(__name__)

_PATIENCE: Final = 3.0
"""Seconds from the entry of a death to its report, because a pod that hangs sends its state after the entry."""

_ENTRIES: Final = 1000
_REPORTS: Final = 50
_SPANS: Final = 200
_FORMAT: Final = 1

_ACCOUNT: Final = ("goodput", "workerSeconds", "workerSecondsGone", "workerSecondsUntil")


class BlackBox:
    """Stores the reports about dead pods, and the history of the job. Thread-safe.

    Args:
        environment: the environment of shard 0's server.
        records: writes the files.
        spans: returns the serialized `Spans` of the pods of a slot, such as ``worker-3``.
    """

    def __init__(
        self,
        environment: Environment,
        records: Records,
        spans: Callable[[str], Sequence[bytes]],
        *,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        self._job = {"job": environment.job, "namespace": environment.namespace, "uid": environment.uid}
        self._records, self._spans, self._clock, self._unix_clock = records, spans, clock, unix_clock
        self._uid = environment.short_uid
        self._lock = threading.Lock()
        self._hung: dict[tuple[str, int], HangReport] = {}
        self._due: dict[tuple[str, int], tuple[float, Mapping[str, Any]]] = {}  # deaths whose report is not made yet
        self._made: set[tuple[str, int]] = set()
        self._stored: list[StoredReport] = []
        self._status: dict[str, Any] = {}
        self._account: dict[str, Any] = {}
        self._outcome: dict[str, Any] = {}
        self._recorded = ""

    def hangs(self, peer: Peer, report: HangReport) -> None:
        """A pod reports that it hangs."""
        with self._lock:
            while len(self._hung) >= _REPORTS:
                del self._hung[next(iter(self._hung))]
            self._hung[f"{peer.role}-{peer.index}", peer.incarnation] = report

    def record(self, status: str, record_id: str) -> None:
        """The operator sent the job's status as JSON. It is empty if nothing has happened since the last one."""
        if not status:
            return
        try:
            found = json.loads(status)
            entries = found.get("history") or []
            # A death whose report is stored is not reported again by the server that took over.
            dead = [e for e in entries if "incarnation" in e and "slot" in e and not e.get("report")]
            deaths = [(str(e["slot"]), int(e["incarnation"]), e) for e in dead]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            _LOG.warning("the operator sent a history that cannot be read, and pods get no reports from it: %s", error)
            found, deaths = {}, []
        with self._lock:
            self._recorded = record_id
            for slot, incarnation, entry in deaths:
                if (slot, incarnation) not in self._made and (slot, incarnation) not in self._due:
                    self._due[slot, incarnation] = self._clock() + _PATIENCE, entry
            self._status = found or self._status
        if found:
            self._keep_history(found)

    def spent(self, seconds: Sequence[float], step: int) -> None:
        """The operator sent the seconds of the job's worker pods until now, by `PARTS`; `step` updates are applied."""
        if len(seconds) != len(PARTS) or not all(0 <= value < math.inf for value in seconds):
            return  # it has no account yet
        parts = {part: round(value, 3) for part, value in zip(PARTS, seconds, strict=True) if value > 0}
        share = goodput(parts)
        until = datetime.fromtimestamp(self._unix_clock(), UTC).isoformat(timespec="seconds")
        with self._lock:
            self._account = {"step": step, "workerSeconds": parts, "workerSecondsUntil": until}
            if share is not None:
                self._account["goodput"] = round(share, 4)

    def ended(self, outcome: Mapping[str, Any]) -> None:
        """The job ends; the operator writes that into its status when this server has left."""
        with self._lock:
            self._outcome = dict(outcome)
        self.leaves()

    def leaves(self) -> None:
        """Store the history with the newest account of goodput, because this server is shutting down."""
        with self._lock:
            if not self._status and not self._outcome:
                return
            # The account in the status is that of the last event: readers would treat it as that of the whole job.
            status = {name: value for name, value in self._status.items() if name not in _ACCOUNT} | self._account
            if self._outcome:
                status["outcome"] = self._outcome
        self._keep_history(status)

    def tick(self, *, every: bool = False) -> None:
        """Make the reports that are due; call it about once a second.

        Args:
            every: make all of them: the job ends.
        """
        with self._lock:
            ready = [(key, entry) for key, (at, entry) in self._due.items() if every or self._clock() >= at]
        for key, entry in ready:
            if not self._make(*key, entry):
                return  # the folder is slow: later
            with self._lock:
                del self._due[key]
                self._made.add(key)

    def fill(self, reply: ProgressReply) -> None:
        """Returns the answer to the operator, which names the recorded state and the existing reports."""
        with self._lock:
            reply.recorded = self._recorded
            reply.death_reports.extend(self._stored)

    def _make(self, slot: str, incarnation: int, entry: Mapping[str, Any]) -> bool:
        """Returns whether the report will be written."""
        with self._lock:
            hung = self._hung.get((slot, incarnation))

        def content() -> bytes:
            report = {
                "format": _FORMAT,
                **self._job,
                "slot": slot,
                "incarnation": incarnation,
                **{name: entry.get(name) for name in ("time", "reason", "message")},
                "stacks": None if hung is None else hung.stacks,
                "output": None if hung is None else hung.output,
                "doing": None if hung is None else hung.doing,
            }
            spans = [json.dumps(span) for span in _last_spans(self._spans(slot), incarnation)]
            head = json.dumps(report, indent=1, default=str).removesuffix("\n}")
            lines = ",\n  ".join(spans)
            return f'{head},\n "spans": [\n  {lines}\n ]\n}}\n'.encode()

        def stored(uri: str) -> None:
            with self._lock:
                self._stored.append(StoredReport(slot=slot, incarnation=incarnation, uri=uri))
                del self._stored[:-_REPORTS]

        name = record_name("report", _unix(entry.get("time")), f"{slot}-{incarnation}-{self._uid}")
        return self._records.put("report", name, content, stored)

    def _keep_history(self, status: Mapping[str, Any]) -> None:
        name = record_name("history", _unix(status.get("startTime")), self._uid)
        about = {"format": _FORMAT, **self._job, "unixSeconds": self._unix_clock()}
        self._records.update("history", name, lambda before: updated(before, about, status))


def updated(before: bytes | None, about: Mapping[str, Any], status: Mapping[str, Any]) -> bytes:
    """Returns the content of a history's file.

    Args:
        before: the content until now, which may have entries that the status has dropped; None: there is no file.
        about: the job, and when this was made.
        status: the job's status; its entries replace those of the file that have the same time, reason and slot.
    """
    known: list[Mapping[str, Any]] = []
    if before is not None:
        try:
            known = list(json.loads(before)["status"]["history"])
        except (ValueError, TypeError, KeyError):
            known = []  # it was torn while it was written
    history = merged(known, status.get("history") or [])[-_ENTRIES:]
    return json.dumps({**about, "status": {**status, "history": history}}, indent=1).encode()


def _last_spans(messages: Sequence[bytes], incarnation: int) -> Sequence[dict[str, Any]]:
    """Returns the newest spans of a pod, oldest first; their times are those of its wall clock."""
    found: list[dict[str, Any]] = []
    try:
        for data in messages:
            message = Spans.FromString(data)
            if message.peer.incarnation != incarnation:
                continue
            shift = message.unix_seconds - message.clock
            found += [
                {
                    "point": span.point,
                    "step": span.step,
                    "began": round(span.began / 1e9 + shift, 6),
                    "seconds": round((span.ended - span.began) / 1e9, 6),
                    "thread": span.thread,
                    **({"notes": dict(span.notes)} if span.notes else {}),
                }
                for span in spans_in(message)
            ]
    except (DecodeError, ValueError, IndexError) as error:
        _LOG.warning("spans of incarnation %d cannot be read: %s", incarnation, error)
    return found[-_SPANS:]


def _unix(text: Any) -> float:
    """Returns a time of the API as Unix time, or 0 if there is none."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (ValueError, TypeError):
        return 0.0
