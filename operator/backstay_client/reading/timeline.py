"""A job's timeline as a Chrome trace, which https://ui.perfetto.dev opens. No I/O here.

The format is https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Its times are
microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from google.protobuf.message import DecodeError

from backstay_client.view.follow import ShownEntry
from backstay_client.view.pods import slot_words
from backstay_client.words import on_one_line
from backstay_rpc.control_pb2 import Spans, Timeline
from backstay_rpc.spans import PodSpan, spans_in
from backstay_spec import contract

__all__ = ["BadTimeline", "JobTimeline", "PodClock", "TimelinePod", "chrome_trace", "in_order", "merged", "read"]

_TRACKS: Final = {"quorum_wait": "coordinator: quorum", "blame": "coordinator: blame", "apply": "apply updates"}
"""Points whose spans begin in one thread and end in another. Each point has its own track."""

_NAMES: Final = {
    **contract.STEP_PARTS,
    "update_wait": "wait for the quorum",
    "quorum_wait": "wait for the quorum",
    "exchange": "exchange",
    "first_pull": "first receive",
    "blame": "waited for",
}
_ROLES: Final = {contract.ROLE_SERVER: 0, contract.ROLE_EVALUATOR: 2}
_BEFORE: Final = 60.0
"""Seconds before the first span of which events are shown."""

_JOB: Final = 1  # the process of the job's own tracks
_STRIDE: Final = 1000
"""Numbers of threads for each process. Perfetto shows the thread first whose number is that of its process."""


class BadTimeline(Exception):  # noqa: N818  # it is what happened
    """The bytes are not a timeline."""


@dataclass(frozen=True)
class PodClock:
    """How a pod's clock relates to that of the timeline.

    Attributes:
        offset: seconds that the timeline's clock is ahead.
        error: the largest error of the offset, in seconds; None: wall clocks were compared, whose error is not known.
    """

    offset: float
    error: float | None

    def after(self, other: PodClock) -> PodClock:
        """Returns the clock relative to another timeline; `other` relates the two timelines."""
        known = self.error is not None and other.error is not None
        return PodClock(self.offset + other.offset, (self.error or 0.0) + (other.error or 0.0) if known else None)


_Key = tuple[str, int, int, str]


@dataclass
class TimelinePod:
    """A pod's part of a timeline."""

    role: str
    index: int
    incarnation: int
    name: str
    spans: list[PodSpan] = field(default_factory=list)
    lost: int = 0
    clock: PodClock = PodClock(0.0, 0.0)
    title: str = ""  # of what is not a pod

    @property
    def key(self) -> _Key:
        """A key that no other pod of the job has."""
        return self.role, self.index, self.incarnation, self.name

    def at(self, nanoseconds: int) -> float:
        """Returns a time of the pod's clock, as seconds of the timeline's clock."""
        return nanoseconds / 1e9 + self.clock.offset

    @property
    def shown(self) -> str:
        """The name to print, such as ``worker 3`` or ``worker 3 #2``."""
        if self.title:
            return self.title
        return slot_words(f"{self.role}-{self.index}") + (f" #{self.incarnation}" if self.incarnation > 1 else "")


@dataclass(frozen=True)
class JobTimeline:
    """A timeline that was read.

    Attributes:
        clock, unix_seconds: the monotonic clock and the Unix time of shard 0's server, at the same moment.
        incarnation: this server's incarnation.
        pods: the pods, in the order in which they are shown.
        dropped: bytes of spans that were too old or too many.
    """

    name: str
    namespace: str
    uid: str
    clock: float
    unix_seconds: float
    incarnation: int
    pods: tuple[TimelinePod, ...]
    dropped: int = 0

    def newest(self, seconds: float) -> JobTimeline:
        """Returns the timeline of the last `seconds` before the newest span ended."""
        ends = [pod.at(span.ended) for pod in self.pods for span in pod.spans]
        first = max(ends, default=0.0) - seconds
        kept = [replace(pod, spans=[span for span in pod.spans if pod.at(span.ended) >= first]) for pod in self.pods]
        return replace(self, pods=tuple(pod for pod in kept if pod.spans))


def read(data: bytes) -> JobTimeline:
    """Returns a serialized `Timeline`.

    Raises:
        BadTimeline: the bytes are not a timeline.
    """
    try:
        timeline = Timeline.FromString(data)
        messages = [Spans.FromString(spans) for spans in timeline.spans]
        pods: dict[_Key, TimelinePod] = {}
        seen: dict[_Key, set[PodSpan | tuple[Any, ...]]] = {}
        by_pod: dict[_Key, list[Spans]] = {}
        for message in messages:
            key = (message.peer.role, message.peer.index, message.peer.incarnation, message.peer.pod)
            pod = pods.setdefault(key, TimelinePod(*key))
            pod.lost += message.lost
            by_pod.setdefault(key, []).append(message)
            known = seen.setdefault(key, set())
            for span in spans_in(message):
                if (identity := span[:4]) not in known:  # a new server of shard 0 is sent what the previous one had
                    known.add(identity)
                    pod.spans.append(span)
    except (DecodeError, IndexError, ValueError, OverflowError) as error:
        raise BadTimeline(f"it is not a timeline: {error}") from None
    links = _server_clocks(messages, timeline)
    for key, pod in pods.items():
        pod.clock = _clock(pod, by_pod[key], timeline, links)
        pod.spans = in_order(pod.spans)
    _narrow_clocks(list(pods.values()), timeline)
    order = sorted(pods.values(), key=_order)
    return JobTimeline(
        timeline.job,
        timeline.namespace,
        timeline.uid,
        timeline.clock,
        timeline.unix_seconds,
        timeline.server.incarnation,
        tuple(order),
        timeline.dropped,
    )


def merged(job: JobTimeline, older: JobTimeline) -> JobTimeline:
    """`job` with the spans that only another timeline of the same job has, on its clock.

    Args:
        older: the timeline of a previous server of shard 0, whose clock may be another one.
    """
    known = {pod.key: pod for pod in job.pods}
    shift = PodClock((older.unix_seconds - older.clock) - (job.unix_seconds - job.clock), None)
    for pod in older.pods:
        same = known.get(pod.key)
        if same is None or same.clock.error is None or pod.clock.error is None:
            continue
        error = same.clock.error + pod.clock.error
        if shift.error is None or error < shift.error:  # both servers' clocks were compared with that of this pod
            shift = PodClock(same.clock.offset - pod.clock.offset, error)
    pods = dict(known)
    for pod in older.pods:
        if (same := known.get(pod.key)) is None:
            pods[pod.key] = replace(pod, clock=pod.clock.after(shift))
        else:
            has = {span[:4] for span in same.spans}
            spans = [*same.spans, *(span for span in pod.spans if span[:4] not in has)]
            pods[pod.key] = replace(same, spans=in_order(spans))
    # A newer count of the same server contains its older one.
    dropped = job.dropped + (older.dropped if older.incarnation != job.incarnation else 0)
    return replace(job, pods=tuple(sorted(pods.values(), key=_order)), dropped=dropped)


def in_order(spans: Iterable[PodSpan]) -> list[PodSpan]:
    """Spans in the order in which they began; a span comes before those inside it."""
    return sorted(spans, key=lambda span: (span.began, -span.ended))


def _order(pod: TimelinePod) -> tuple[int, int, int]:
    return _ROLES.get(pod.role, 1), pod.index, pod.incarnation


def _server_clocks(messages: Iterable[Spans], timeline: Timeline) -> dict[tuple[int, int], PodClock]:
    """Places the clocks of servers, by shard and incarnation, with pods that measured two servers."""
    reference = timeline.server.index, timeline.server.incarnation
    found: dict[tuple[int, int], PodClock] = {reference: PodClock(0.0, 0.0)}
    for message in messages:
        offsets = {(each.shard, each.incarnation): (each.seconds, each.error) for each in message.offsets}
        if reference not in offsets:
            continue
        to_reference, error = offsets[reference]
        for server, (seconds, own_error) in offsets.items():
            clock = PodClock(to_reference - seconds, error + own_error)
            known = found.get(server)
            if known is None or clock.error < (known.error or 0.0):  # type: ignore[operator]
                found[server] = clock
    return found


def _clock(
    pod: TimelinePod, messages: Sequence[Spans], timeline: Timeline, servers: Mapping[tuple[int, int], PodClock]
) -> PodClock:
    """Returns the clock of a pod. All its spans use one offset, so that they stay in order."""
    if pod.role == contract.ROLE_SERVER and (pod.index, pod.incarnation) in servers:
        return servers[pod.index, pod.incarnation]
    reference = timeline.server.index, timeline.server.incarnation
    measured = [
        (each.error, each.seconds)
        for message in messages
        for each in message.offsets
        if (each.shard, each.incarnation) == reference
    ]
    if measured:
        offset = min(measured)[1]
        # Each measurement holds for its time: where clocks drift, the bound is that of the farthest one.
        return PodClock(offset, max(abs(seconds - offset) + error for error, seconds in measured))
    newest = messages[-1]
    return PodClock((newest.unix_seconds - newest.clock) - (timeline.unix_seconds - timeline.clock), None)


def _narrow_clocks(pods: Sequence[TimelinePod], timeline: Timeline) -> None:
    """Narrow the offsets by what contributions prove. Round trips of heartbeats are longer on a busy machine.

    The server with the timeline's clock narrows the workers, and then the workers narrow the other servers.
    """
    reference = timeline.server.index, timeline.server.incarnation
    workers = [(pod, _exchanges(pod)) for pod in pods if pod.role == contract.ROLE_WORKER]
    servers = [pod for pod in pods if pod.role == contract.ROLE_SERVER]
    for server in sorted(servers, key=lambda pod: (pod.index, pod.incarnation) != reference):
        received = _received(server)
        for worker, sent in workers:
            if (between := _difference(sent, received)) is None:
                continue
            low, high = between
            if (server.index, server.incarnation) == reference:
                worker.clock = _within(worker.clock, server.clock, low, high)
            else:
                server.clock = _within(server.clock, worker.clock, -high, -low)


def _difference(
    sent: Mapping[str, tuple[int, int]], received: Mapping[str, tuple[int, int]]
) -> tuple[float, float] | None:
    """Returns the least and the largest offset of a worker's clock minus that of a server's, in seconds, or None if not
    known.

    A server begins to receive a contribution after its worker began to send it, and has received it before the worker
    gets the answer.
    """
    both = [(sent[flow], received[flow]) for flow in sent.keys() & received.keys()]
    if not both:
        return None
    low = max(had - answered for (_, answered), (_, had) in both)
    high = min(first - began for (began, _), (first, _) in both)
    return low / 1e9, high / 1e9


def _within(clock: PodClock, other: PodClock, low: float, high: float) -> PodClock:
    """Returns the clock, given that its offset minus that of `other` is between `low` and `high`.

    A clock that contradicts this drifts, and stays as it is.
    """
    if clock.error is None or other.error is None:
        return clock
    low = max(clock.offset - clock.error, other.offset - other.error + low)
    high = min(clock.offset + clock.error, other.offset + other.error + high)
    return PodClock((low + high) / 2, (high - low) / 2) if low <= high else clock


def _exchanges(worker: TimelinePod) -> dict[str, tuple[int, int]]:
    """contribution -> the times at which a worker began to send it, and had the answer."""
    began = {str(span.notes["flow"]): span.began for span in worker.spans if span.point == "push"}
    return {
        flow: (began[flow], span.ended)
        for span in worker.spans
        if span.point == "update_wait" and (flow := str(span.notes.get("flow"))) in began
    }


def _received(server: TimelinePod) -> dict[str, tuple[int, int]]:
    """contribution -> the times at which a server began to receive it, and had all of it. Only complete ones."""
    return {
        str(span.notes["flow"]): (span.began, span.ended)
        for span in server.spans
        if span.point == "receive" and span.notes.get("complete")
    }


# ---- The Chrome trace


def chrome_trace(job: JobTimeline, history: Sequence[ShownEntry] = ()) -> dict[str, Any]:
    """Returns the JSON object of the trace.

    Args:
        history: the job's history: deaths, replacements and other events, at their wall-clock times.
    """
    placed = [_Placed(pod, _STRIDE * position) for position, pod in enumerate(job.pods, 1)]
    first = min((p.pod.at(span.began) for p in placed for span in p.pod.spans[:1]), default=job.clock)
    entries = [(at, entry) for entry in history if (at := _at(job, entry)) is not None and at >= first - _BEFORE]
    start = min([first, *(at for at, _ in entries)])

    def micros(seconds: float) -> float:
        return round((seconds - start) * 1e6, 3)

    events: list[dict[str, Any]] = []
    for p in placed:
        events += p.events(micros)
    arrows, lost_arrows = _arrows(placed, micros)
    events += arrows
    events += _history(job, entries, placed, micros)
    events.sort(key=lambda event: (event["ph"] != "M", event.get("ts", 0.0), -event.get("dur", 0.0)))
    errors = {pod.shown: pod.clock.error for pod in job.pods}
    return {
        "displayTimeUnit": "ms",
        "otherData": {
            "job": job.name,
            "namespace": job.namespace,
            "uid": job.uid,
            "clock": "the monotonic clock of shard 0's server",
            "clockErrorSeconds": errors,
            "unixSecondsAtZero": job.unix_seconds - (job.clock - start),
            "eventsOfTheOperator": "placed by wall clocks, which may differ between machines",
            "droppedBytes": job.dropped,
            "lostSpans": {pod.shown: pod.lost for pod in job.pods if pod.lost},
            "arrowsLeftOut": lost_arrows,
        },
        "traceEvents": events,
    }


class _Placed:
    """A pod as a process of the trace, with its spans on tracks, on each of which they nest."""

    def __init__(self, pod: TimelinePod, pid: int) -> None:
        self.pod, self.pid = pod, pid
        self.flows: dict[str, list[tuple[PodSpan, int]]] = {}
        self.slices: list[tuple[PodSpan, int]] = []
        self.tracks: list[str] = []
        lanes: dict[str, list[tuple[int, list[int]]]] = {}  # by track: thread and the ends of its open spans
        for span in pod.spans:
            tid = self._lane(lanes.setdefault(_track(span), []), span)
            self.slices.append((span, tid))
            if "flow" in span.notes:
                self.flows.setdefault(str(span.notes["flow"]), []).append((span, tid))

    def _lane(self, lanes: list[tuple[int, list[int]]], span: PodSpan) -> int:
        """Returns the thread for a span, which is the first one of its track where it is inside of, or after, every
        other span."""
        for tid, ends in lanes:
            while ends and ends[-1] <= span.began:
                ends.pop()
            if not ends or span.ended <= ends[-1]:
                ends.append(span.ended)
                return tid
        tid = self.pid + len(self.tracks)
        self.tracks.append(_track(span) + (f" ({len(lanes) + 1})" if lanes else ""))
        lanes.append((tid, [span.ended]))
        return tid

    def events(self, micros: Any) -> Iterator[dict[str, Any]]:
        """Yields the process, its tracks and its spans."""
        pod, error = self.pod, self.pod.clock.error
        exactness = "wall clock" if error is None else f"clock ± {error * 1e3:.3g} ms"
        yield from _process(self.pid, f"{pod.shown} ({exactness})", self.tracks)
        for span, tid in self.slices:
            began = micros(pod.at(span.began))
            yield {
                "ph": "X",
                "name": _NAMES.get(span.point, span.point),
                "cat": pod.role,
                "pid": self.pid,
                "tid": tid,
                "ts": began,
                "dur": max(0.0, round(micros(pod.at(span.ended)) - began, 3)),
                "args": {"point": span.point, **({} if span.step is None else {"step": span.step}), **span.notes},
            }


def _track(span: PodSpan) -> str:
    if span.point == "receive" and "rank" in span.notes:
        return f"from worker {span.notes['rank']}"
    return _TRACKS.get(span.point, "main" if span.thread == "MainThread" else span.thread)


def _process(pid: int, name: str, tracks: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the names of a process and of its tracks, in the order in which they are shown.

    Args:
        tracks: the names of the tracks; the first one has the number `pid`, the next one that number and 1, and so on.
    """
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": pid, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": pid, "args": {"sort_index": pid}}
    for position, track in enumerate(tracks):
        same = {"ph": "M", "pid": pid, "tid": pid + position}
        yield {**same, "name": "thread_name", "args": {"name": track}}
        yield {**same, "name": "thread_sort_index", "args": {"sort_index": position}}


def _arrows(placed: Sequence[_Placed], micros: Any) -> tuple[list[dict[str, Any]], int]:
    """Contributions, from where a worker sends one to where a server receives it; and how many clocks contradict."""
    events: list[dict[str, Any]] = []
    left_out = 0
    sent = {
        flow: (p, span, tid)
        for p in placed
        for flow, spans in p.flows.items()
        for span, tid in spans
        if span.point == "push"
    }
    for p in placed:
        for flow, spans in p.flows.items():
            for span, tid in spans:
                if span.point != "receive" or flow not in sent:
                    continue
                worker, push, push_tid = sent[flow]
                start, began = micros(worker.pod.at(push.began)), micros(p.pod.at(span.began))
                ended = micros(p.pod.at(span.ended))
                end = max(began, start)
                if end >= ended > began or end > ended:  # Perfetto would bind it to the next slice
                    left_out += 1
                    continue
                same = {"name": "contribution", "cat": "contribution", "id": len(events) // 2 + 1}
                events.append({"ph": "s", **same, "pid": worker.pid, "tid": push_tid, "ts": start})
                events.append({"ph": "f", "bp": "e", **same, "pid": p.pid, "tid": tid, "ts": end})
    return events, left_out


def _contributions(pods: Sequence[_Placed], after: float) -> Iterator[float]:
    """Yields the time at which each worker that began after `after` had its first answer to a contribution.

    The operator observes it a few seconds later.
    """
    for p in pods:
        if p.pod.at(p.pod.spans[0].began) > after:
            yield from [p.pod.at(span.ended) for span in p.pod.spans if span.point == "update_wait"][:1]


def _at(job: JobTimeline, entry: ShownEntry) -> float | None:
    """Returns the time of an event, by the timeline's clock, or None if it is not known."""
    return None if entry.at is None else job.clock + entry.at - job.unix_seconds


def _history(
    job: JobTimeline, entries: Sequence[tuple[float, ShownEntry]], placed: Sequence[_Placed], micros: Any
) -> list[dict[str, Any]]:
    """Events of the job as instants, and replacements as spans, on their own process."""
    events: list[dict[str, Any]] = []
    tracks: dict[str, int] = {}
    for position, (at, entry) in enumerate(entries):
        name = f"{slot_words(entry.slot)} died: {entry.reason}" if entry.slot else entry.reason
        instant = {
            "ph": "i",
            "name": name,
            "cat": "event",
            "ts": micros(at),
            "args": {"message": on_one_line(entry.message)},
        }
        tid = tracks.setdefault(entry.slot, _JOB + len(tracks))
        # On the track of the slot: Perfetto shows instants of a process, and of the whole trace, elsewhere.
        events.append({**instant, "pid": _JOB, "tid": tid, "s": "t"})
        if not entry.slot:
            continue
        own = [p for p in placed if f"{p.pod.role}-{p.pod.index}" == entry.slot and p.pod.spans]
        # A standby began before the death of the server that it replaces.
        dead = [p for p in own if p.pod.incarnation == entry.incarnation] or [
            p for p in own if p.pod.at(p.pod.spans[0].began) <= at and entry.incarnation is None
        ]
        if dead:
            events.append({**instant, "pid": dead[-1].pid, "tid": dead[-1].pid, "s": "p"})
        if entry.recovered is not None and entry.at is not None and entry.recovered >= entry.at:
            # A replacement that died too ends here: spans of one track must not overlap.
            again = [later for later, other in entries[position + 1 :] if other.slot == entry.slot and later >= at]
            ended = min([at + entry.recovered - entry.at, *again, *_contributions(own, at)])
            is_server = entry.slot.startswith(contract.ROLE_SERVER)
            events.append(
                {
                    "ph": "X",
                    "name": f"{slot_words(entry.slot)}: {'until the next update' if is_server else 'replacement'}",
                    "cat": "event",
                    "pid": _JOB,
                    "tid": tid,
                    "ts": micros(at),
                    "dur": round(micros(ended) - micros(at), 3),
                    "args": {"reason": entry.reason, "message": on_one_line(entry.message)},
                }
            )
    if events:
        events += _process(_JOB, f"job {job.name}: events", [slot_words(slot) if slot else "job" for slot in tracks])
    return events
