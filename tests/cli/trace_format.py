"""Holds a trace to what Perfetto's importer of Chrome's JSON expects of one.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. How Perfetto reads it:
https://perfetto.dev/docs/getting-started/other-formats. Perfetto does not support complete events of one thread that
overlap and do not nest. A flow event belongs to the slice that it is inside of.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

METADATA = {"process_name", "process_labels", "process_sort_index", "thread_name", "thread_sort_index"}


def check(trace: dict[str, Any]) -> None:
    """
    Raises:
        AssertionError: the trace breaks a rule of the format.
    """
    assert trace["displayTimeUnit"] in {"ms", "ns"}
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[int, int]] = set()
    processes: set[int] = set()
    last = -math.inf
    for event in trace["traceEvents"]:
        kind = event["ph"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if kind == "M":
            assert event["name"] in METADATA
            if event["name"] == "process_name":
                processes.add(event["pid"])
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
            continue
        assert math.isfinite(event["ts"])
        assert event["ts"] >= 0
        assert event["ts"] >= last, "events are in order of time"
        last = event["ts"]
        assert event["name"]
        if kind == "X":
            assert event["dur"] >= 0
            began = _nanoseconds(event["ts"])
            slices[event["pid"], event["tid"]].append((began, began + _nanoseconds(event["dur"])))
        elif kind == "i":
            assert event["s"] in {"g", "p", "t"}
        else:
            assert kind in {"s", "f"}, kind
            flows[event["cat"], event["id"]].append(event)
    for track, found in slices.items():
        assert track in named
        assert track[0] in processes
        open_ends: list[int] = []
        for began, ended in sorted(found, key=lambda slice_: (slice_[0], -slice_[1])):
            while open_ends and open_ends[-1] <= began:
                open_ends.pop()
            assert not open_ends or ended <= open_ends[-1], f"two slices of {track} overlap and do not nest"
            open_ends.append(ended)
    for key, ends in flows.items():
        assert [end["ph"] for end in ends] == ["s", "f"], f"the arrow {key} has not one start and one end"
        assert ends[1]["bp"] == "e"
        for end in ends:
            at = _nanoseconds(end["ts"])
            inside = [began <= at <= ended for began, ended in slices[end["pid"], end["tid"]]]
            assert any(inside), f"an end of the arrow {key} is in no slice"


def _nanoseconds(micros: float) -> int:
    return round(micros * 1000)
