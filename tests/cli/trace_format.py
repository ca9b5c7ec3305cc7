"""Holds a trace to what Perfetto's importer of Chrome's JSON expects of one.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. How Perfetto reads it:
https://perfetto.dev/docs/getting-started/other-formats. Perfetto does not support complete events of one thread that
overlap and do not nest. It reads the events in order of time, and binds an end of an arrow to the innermost slice that
is open then. `check` does the same.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from backstay_rpc.control_pb2 import ClockOffset, Peer, Spans, Timeline

METADATA = {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
"""Perfetto's importer reads these, and ignores process_labels."""


def check(trace: dict[str, Any]) -> None:
    """
    Raises:
        AssertionError: the trace breaks a rule of the format.
    """
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    stacks: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(
        list
    )  # the open slices: when each ends, its name
    flows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    last = -math.inf
    for event in trace["traceEvents"]:
        kind = event["ph"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        track = event["pid"], event["tid"]
        if kind == "M":
            assert event["name"] in METADATA
            if event["name"] == "process_name":
                processes.add(event["pid"])
            if event["name"] == "thread_name":
                named.add(track)
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert event["ts"] >= last, "events are in order of time"
        last = event["ts"]
        assert event["name"]
        assert event["pid"] in processes
        assert track in named
        at, open_slices = _nanoseconds(event["ts"]), stacks[track]
        if kind == "X" or (kind == "i" and event["s"] == "t"):  # an instant of a thread is a slice without duration
            assert event.get("dur", 0) >= 0
            ended = at + _nanoseconds(event.get("dur", 0))
            while open_slices and open_slices[-1][0] <= at:
                open_slices.pop()
            assert not open_slices or ended <= open_slices[-1][0], f"two slices of {track} overlap and do not nest"
            open_slices.append((ended, event["name"]))
        elif kind == "i":
            assert event["s"] == "p"
        else:
            assert kind in {"s", "f"}, kind
            assert open_slices, "an end of an arrow is in no slice"
            assert at <= open_slices[-1][0], "an end of an arrow is in no slice"
            assert open_slices[-1][1] == {"s": "send", "f": "receive"}[kind]
            flows[event["cat"], event["id"]].append(event)
    for key, ends in flows.items():
        assert [end["ph"] for end in ends] == ["s", "f"], f"the arrow {key} has not one start and one end"
        assert ends[1]["bp"] == "e"


def _nanoseconds(micros: float) -> int:
    return round(micros * 1000)


def spans(
    role: str,
    index: int,
    items: Sequence[tuple[Any, ...]],
    *,
    incarnation: int = 1,
    ahead: float = 0.0,
    offsets: Sequence[tuple[int, int, float, float]] = (),
) -> Spans:
    """Spans of a pod; `items`: point, began, ended, step, notes and thread, in seconds of the timeline's clock.

    Args:
        ahead: seconds that the pod's clock is ahead of the timeline's.
        offsets: shard, incarnation, seconds, error, as the pod measured them.
    """
    message = Spans(
        peer=Peer(role=role, index=index, incarnation=incarnation, pod=f"{role}-{index}-{incarnation}"),
        clock=100.0 + ahead,
        unix_seconds=1_000_100.0,
        offsets=[ClockOffset(shard=s, incarnation=i, seconds=at, error=error) for s, i, at, error in offsets],
    )
    before = 0
    for position, (point, began, ended, step, *more) in enumerate(items):
        notes, thread = (*more, None, None)[:2]
        start = round((began + ahead) * 1e9)
        for names, column, name in (
            (message.points, message.point, point),
            (message.threads, message.thread, thread or "MainThread"),
        ):
            if name not in names:
                names.append(name)
            column.append(list(names).index(name))
        message.began.append(start - before)
        message.lasted.append(max(0, round((ended + ahead) * 1e9) - start))
        message.step.append(0 if step is None else step + 1)
        if notes:
            message.notes[position] = json.dumps(notes)
        before = start
    return message


def timeline(*messages: Spans, incarnation: int = 1, ahead: float = 0.0, dropped: int = 0) -> bytes:
    """Returns a timeline of the server of shard 0 with this incarnation, whose clock is so many seconds ahead."""
    return Timeline(
        job="digits",
        namespace="default",
        uid="u",
        server=Peer(role="parameter-server", index=0, incarnation=incarnation),
        clock=100.0 + ahead,
        unix_seconds=1_000_100.0,
        spans=[message.SerializeToString() for message in messages],
        dropped=dropped,
    ).SerializeToString()


def step(at: float, flow: str, wait: float = 0.03) -> list[tuple[Any, ...]]:
    """Returns a worker's spans of a step of about 0.1 s."""
    return [
        ("compute", at, at + 0.05, 1),
        ("push", at + 0.05, at + 0.06, 1, {"flow": flow}),
        ("update_wait", at + 0.06, at + 0.06 + wait, 1, {"flow": flow}),
        ("pull", at + 0.06 + wait, at + 0.07 + wait, 1),
        ("exchange", at + 0.05, at + 0.07 + wait, 1),
    ]
