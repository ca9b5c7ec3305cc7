"""Draws `docs/pictures/timeline.svg` from a part of the file that `backstay run --trace` writes.

`make pictures` runs it; alone: `python docs/timeline_picture.py`. A job with two servers and three workers runs on the
embedded cluster. Rank 2 reads its batches slowly, and rank 1 is killed. The places of slices and arrows are the file's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

PICTURE = Path(__file__).parent / "pictures" / "timeline.svg"
WIDTH, LABELS, ROW, DEEP, GAP, TOP = 1248, 170, 15, 13, 7, 34  # pixels
BEFORE, AFTER = 0.5, 1.3  # seconds around the death
INK, FAINT, PAPER, GRID, BAD = "#24292f", "#6e7781", "#ffffff", "#d8dee4", "#D55E00"
COLOURS = {
    "data": "#E69F00",
    "compute": "#0072B2",
    "compile": "#56B4E9",
    "send": "#009E73",
    "receive": "#44AA99",
    "first receive": "#44AA99",
    "wait for the quorum": "#c8ccd0",
    "apply": "#CC79A7",
    "checkpoint": "#882255",
    "start": "#999999",
    "join": "#DDCC77",
    "worker 1: replacement": "#f6c7ad",
}
SKIPPED = {"exchange", "waited for"}
SCRIPT = """
import time, jax, jax.numpy as jnp, numpy as np, optax
import backstay

def init(key):
    return {"w": jax.random.normal(key, (512, 512))}

def loss(params, batch):
    x = batch["x"]
    for _ in range(16):
        x = jnp.tanh(x @ params["w"] / 16)
    return jnp.mean((x - batch["x"]) ** 2)

data = backstay.from_dataset({"x": np.ones((2048, 512), np.float32)}, batch_size=512)

def batches(key):
    time.sleep(0.25 if key.rank == 2 else 0.1)
    return data(key)

if __name__ == "__main__":
    backstay.train(init=init, loss=loss, batches=batches, optimizer=optax.adam(1e-3), steps=60)
"""
JOB = ("--name", "digits", "--servers", "2", "--workers", "3", "--env", "FAULT_INJECTION=kill worker/1 @25")


def traced(folder: Path) -> dict[str, Any]:
    """Returns the trace of a run of `SCRIPT`."""
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "backstay_cli.main", "run", *JOB, "--trace", "trace.json", "train.py"]
    subprocess.run(command, cwd=folder, check=True)
    found: dict[str, Any] = json.loads((folder / "trace.json").read_bytes())
    return found


def drawn(trace: dict[str, Any]) -> str:
    """Returns the picture of the seconds around the first death."""
    events = trace["traceEvents"]
    died = min(e["ts"] for e in events if e["ph"] == "i" and "died" in e["name"])
    picture = _Picture(events, died / 1e6 - BEFORE, died / 1e6 + AFTER)
    return picture.text()


class _Picture:
    def __init__(self, events: list[dict[str, Any]], first: float, last: float) -> None:
        self._first, self._last = first, last
        self._pods = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
        self._tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        inside = [e for e in events if e["ph"] != "M" and self._ends(e) >= first and e["ts"] / 1e6 <= last]
        self._slices = [e for e in inside if e["ph"] == "X" and e["name"] not in SKIPPED]
        self._instants = [e for e in inside if e["ph"] == "i" and "died" in e["name"]]
        self._flows = {key: [e for e in inside if e["ph"] == key] for key in "sf"}
        self._rows: dict[tuple[int, int], int] = {}
        y, pod = TOP, 0
        for key in sorted({(e["pid"], e["tid"]) for e in self._slices}):
            y += GAP if key[0] != pod else 0
            pod = key[0]
            self._rows[key] = y
            y += ROW + 2
        self._height = y + 30

    @staticmethod
    def _ends(event: dict[str, Any]) -> float:
        return float(event["ts"] + event.get("dur", 0.0)) / 1e6

    def _x(self, seconds: float) -> float:
        share = (min(max(seconds, self._first), self._last) - self._first) / (self._last - self._first)
        return LABELS + share * (WIDTH - LABELS - 8)

    def text(self) -> str:
        """Returns the picture as SVG."""
        size = f'width="{WIDTH}" height="{self._height}" viewBox="0 0 {WIDTH} {self._height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
        paper = f'<rect width="{WIDTH}" height="{self._height}" fill="{PAPER}"/>'
        parts = [self._grid(), self._labels(), self._boxes(), self._arrows(), self._marks(), self._legend()]
        return "\n".join([head, paper, *(line for part in parts for line in part), "</svg>", ""])

    def _grid(self) -> Iterator[str]:
        at = self._first - self._first % 0.25 + 0.25
        while at < self._last:
            x = self._x(at)
            yield f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{self._height - 26}" stroke="{GRID}"/>'
            yield f'<text x="{x + 3:.1f}" y="{TOP - 12}" fill="{FAINT}">{at:.2f} s</text>'
            at += 0.25

    def _labels(self) -> Iterator[str]:
        named: set[int] = set()
        for (pid, tid), y in self._rows.items():
            if pid not in named:
                named.add(pid)
                name = escape(self._pods[pid].split(":")[0].split(" (")[0])  # without the error of its clock
                yield f'<text x="4" y="{y + 11}" fill="{INK}" font-weight="bold">{name}</text>'
            track = self._tracks.get((pid, tid), "")
            yield f'<text x="{LABELS - 6}" y="{y + 11}" fill="{FAINT}" text-anchor="end">{escape(track)}</text>'

    def _boxes(self) -> Iterator[str]:
        for event in self._slices:
            x, end = self._x(event["ts"] / 1e6), self._x(self._ends(event))
            y, colour = self._rows[event["pid"], event["tid"]], COLOURS.get(event["name"], "#999999")
            width = max(0.6, end - x)
            yield f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{DEEP}" fill="{colour}"/>'
            if width > 7 * len(event["name"]):
                ink = PAPER if event["name"] in {"compute", "checkpoint", "start"} else INK
                yield f'<text x="{x + 4:.1f}" y="{y + 10}" fill="{ink}" font-size="10">{escape(event["name"])}</text>'

    def _arrows(self) -> Iterator[str]:
        ends = {event["id"]: event for event in self._flows["f"]}
        for start in self._flows["s"]:
            end = ends.get(start["id"])
            places = [self._rows.get((e["pid"], e["tid"])) for e in (start, end) if e is not None]
            if end is None or None in places or start["ts"] / 1e6 < self._first or end["ts"] / 1e6 > self._last:
                continue
            (y1, y2), x1, x2 = places, self._x(start["ts"] / 1e6), self._x(end["ts"] / 1e6)
            yield (
                f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2 + DEEP}" stroke="#0b6e4f" stroke-width="1" '  # type: ignore[operator]
                'opacity="0.55"/>'
            )

    def _marks(self) -> Iterator[str]:
        for event in self._instants:
            x = self._x(event["ts"] / 1e6)
            yield (
                f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{self._height - 26}" stroke="{BAD}" '
                'stroke-width="1.5" stroke-dasharray="4 3"/>'
            )
        if self._instants:
            event = self._instants[0]
            x = self._x(event["ts"] / 1e6) + 4
            yield f'<text x="{x:.1f}" y="12" fill="{BAD}" font-weight="bold">{escape(event["name"])}</text>'

    def _legend(self) -> Iterator[str]:
        x, y, used = 8.0, self._height - 16, {event["name"] for event in self._slices}
        for name, colour in COLOURS.items():
            if name in used and ":" not in name:
                yield f'<rect x="{x:.0f}" y="{y}" width="11" height="11" fill="{colour}"/>'
                yield f'<text x="{x + 15:.0f}" y="{y + 10}" fill="{FAINT}">{escape(name)}</text>'
                x += 32 + 6.2 * len(name)


def main() -> int:
    """Run the job and write the picture."""
    with tempfile.TemporaryDirectory() as folder:
        PICTURE.write_text(drawn(traced(Path(folder))))
    print(f"wrote {PICTURE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
