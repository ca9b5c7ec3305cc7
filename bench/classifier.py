"""The images example (a residual network with batch normalization) in one process and as jobs, for the same examples.

Each run has an accuracy on held-out images for each twentieth of its updates. In a second series a part of the
gradients comes late, as from busy nodes. The script writes the table of docs/image-classifier.md and its picture.

    python bench/classifier.py [--results FILE] [--only RUN]...

The file keeps the results: a run that it has is not run again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from _cluster import NAMESPACE, BenchJob, alone, cluster

REPO = Path(__file__).resolve().parent.parent
EXAMPLE = REPO / "examples" / "images" / "train.py"
PAGE = REPO / "docs" / "image-classifier.md"
PICTURE = REPO / "docs" / "pictures" / "classifier.svg"
BEGIN, END = "<!-- table -->\n", "<!-- end of the table -->\n"

EXAMPLES, POINTS, WORKERS, BATCH, GOAL = 96_000, 20, 4, 128, 0.975
LATE_SHARE, LATE_SECONDS = 0.02, 0.5
ENDED = re.compile(r"epoch (\d+) has ended: \d+ samples: (\d+) used, (\d+) dropped")


@dataclass(frozen=True)
class ClassifierRun:
    """One of the runs that are compared.

    Attributes:
        name: the run's name in the table and in the picture.
        update: `spec.update` of the job; None: the script in one process.
        batch: examples in one gradient.
        rate: the learning rate of the first update.
        late: whether `LATE_SHARE` of the gradients come `LATE_SECONDS` late.
    """

    name: str
    update: dict[str, Any] | None = None
    batch: int = BATCH // WORKERS
    rate: float = 3e-3
    late: bool = False

    @property
    def steps(self) -> int:
        """The number of updates. Together they apply at most `EXAMPLES`."""
        mode = "Alone" if self.update is None else self.update["mode"]
        return EXAMPLES // (self.batch * (WORKERS if mode == "Sync" else 1))

    @property
    def arguments(self) -> list[str]:
        return ["--batch", str(self.batch), "--steps", str(self.steps), "--rate", str(self.rate)]


WITH_BACKUP = {"mode": "Sync", "backups": 1, "grace": "Auto", "weighting": "Examples"}
JOBS = (
    ("Sync", {"mode": "Sync", "backups": 0, "weighting": "Examples"}, 3e-3),
    ("Sync, 1 backup", WITH_BACKUP | {"grace": "0s"}, 3e-3),
    ("Sync, 1 backup, grace Auto", WITH_BACKUP, 3e-3),
    ("Async", {"mode": "Async"}, 1e-3),
)
RUNS = (
    ClassifierRun("one process", batch=BATCH),
    *(ClassifierRun(name, update, rate=rate) for name, update, rate in JOBS),
    *(ClassifierRun(f"{name}, late gradients", update, rate=rate, late=True) for name, update, rate in JOBS),
)


@dataclass
class Point:
    """An accuracy during a run.

    Attributes:
        step: updates before it.
        seconds: seconds since the first update.
        used, dropped: examples in gradients that were applied, and in those that were not.
        accuracy: the accuracy on the held-out images.
    """

    step: int
    seconds: float
    used: int
    dropped: int
    accuracy: float


async def in_one_process(run: ClassifierRun) -> list[Point]:
    """Returns the script in one process; the time of its evaluations does not count."""
    every = run.steps // POINTS
    points: list[Point] = []
    began, evaluating = 0.0, 0.0
    for at, mark in await alone("images.py", run.arguments, EVERY=str(every)):
        what, *values = mark.split()
        if mark == "step 1":
            began = at
        if what == "accuracy":
            accuracy, took = map(float, values)
            evaluating += took
            step = min(run.steps, every * (len(points) + 1))
            points.append(Point(step, at - began - evaluating, step * run.batch, 0, accuracy))
    return points


async def as_job(run: ClassifierRun) -> list[Point]:
    """Returns the script as a job; its checkpoints are evaluated after it."""
    assert run.update is not None
    async with cluster() as on:
        faults = {"FAULT_INJECTION": delays(run)} if run.late else {}
        every = run.steps // POINTS
        job = BenchJob(
            on, "images", steps=run.steps, workers=WORKERS, mode=run.update["mode"], every_steps=every,
            script="images.py", env=faults,
        )  # fmt: skip
        job.spec["args"] = run.arguments
        job.spec["update"] = run.update
        job.spec["checkpoint"]["keep"] = 2 * POINTS
        await job.submit()
        await job.wait_for_end(1200)
        times = {update.step: update.at for update in job.updates()}
        logs = (on.folder / "pods" / NAMESPACE).glob("images-ps-0-*/trainer.log")
        text = "".join(log.read_text(errors="replace") for log in logs)
        ended = {int(epoch): (int(used), int(dropped)) for epoch, used, dropped in ENDED.findall(text)}
        manifests = sorted(job.checkpoints.glob("*.manifest.json"))
        found = [evaluated(manifest, times, ended) for manifest in manifests]
        await job.delete()
        return sorted((point for point in found if point is not None), key=lambda point: point.step)


def delays(run: ClassifierRun) -> str:
    """Each rank computes a part of its gradients `LATE_SECONDS` late, by a seed."""
    rng = random.Random(0)
    own = run.steps if run.update and run.update["mode"] == "Sync" else run.steps // WORKERS
    return "; ".join(
        f"delay worker/{rank} @{step} {LATE_SECONDS:g}s"
        for rank in range(WORKERS)
        for step in range(1, own)
        if rng.random() < LATE_SHARE
    )


def evaluated(manifest: Path, times: dict[int, float], ended: dict[int, tuple[int, int]]) -> Point | None:
    """Returns the accuracy of a checkpoint, and the examples before it."""
    import backstay
    from backstay.integrations.nnx import adapt

    checkpoint = backstay.load(str(manifest))
    if not checkpoint.step:
        return None
    example = runpy.run_path(str(EXAMPLE))
    evaluate = adapt(example["ResNet"], example["loss"], example["evaluate"]).evaluate
    assert evaluate is not None
    accuracy = evaluate(checkpoint.params, checkpoint.state)["accuracy"]
    samples = json.loads(manifest.read_text())["state"]["samples"]
    before = [counts for epoch, counts in ended.items() if epoch < samples["epoch"]]
    used, dropped = (sum(column) for column in zip((samples["used"], samples["dropped"]), *before, strict=True))
    return Point(checkpoint.step, times[checkpoint.step] - times[1], used, dropped, accuracy)


def table(results: dict[str, list[Point]]) -> str:
    """Returns the table of the runs, in Markdown."""
    rows = [
        f"| run | updates | examples applied | examples dropped | time | accuracy | {GOAL:.1%} after |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, points in results.items():
        last = points[-1]
        reached = next((point for point in points if point.accuracy >= GOAL), None)
        when = "-" if reached is None else f"{reached.used:,} examples, {reached.seconds:.0f} s"
        rows.append(
            f"| {name} | {last.step:,} | {last.used:,} | {last.dropped:,} | {last.seconds:.0f} s "
            f"| {last.accuracy:.1%} | {when} |"
        )
    return "\n".join(rows) + "\n"


COLORS = ("#24292f", "#0072B2", "#E69F00", "#009E73", "#D55E00")
WIDTH, HEIGHT, LEFT, TOP, GAP = 340, 230, 56, 44, 66
LOW = 0.85  # lower points are not drawn


def draw(results: dict[str, list[Point]]) -> str:
    """Draws accuracy over examples, over time, and over time with late gradients, as SVG."""
    single = RUNS[0].name
    usual = {name: points for name, points in results.items() if "late" not in name}
    late = {single: results[single], **{name: results[f"{name}, late gradients"] for name in usual if name != single}}
    panels = (
        ("over examples applied", usual, "used", "thousand examples", 1000),
        ("over time", usual, "seconds", "seconds", 1),
        (f"over time, {LATE_SHARE:.0%} of the gradients {LATE_SECONDS:g} s late", late, "seconds", "seconds", 1),
    )
    total = LEFT + len(panels) * (WIDTH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{HEIGHT + 130}" '
        f'viewBox="0 0 {total} {HEIGHT + 130}" font-family="sans-serif" font-size="12" fill="{COLORS[0]}">',
        f'<rect width="{total}" height="{HEIGHT + 130}" fill="#ffffff"/>',
    ]
    for number, (title, lines, along, unit, scale) in enumerate(panels):
        parts += panel(LEFT + number * (WIDTH + GAP), title, lines, along, unit, scale)
    for number, name in enumerate(usual):
        x = LEFT + number * 230
        parts.append(f'<path d="M{x} {HEIGHT + 112}h24" stroke="{COLORS[number]}" stroke-width="3"/>')
        parts.append(f'<text x="{x + 30}" y="{HEIGHT + 116}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def panel(left: float, title: str, lines: dict[str, list[Point]], along: str, unit: str, scale: float) -> list[str]:
    most = max(getattr(points[-1], along) for points in lines.values())

    def place(point: Point) -> str:
        return f"{getattr(point, along) / most * WIDTH:.1f},{(1 - point.accuracy) / (1 - LOW) * HEIGHT:.1f}"

    parts = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">accuracy {escape(title)}</text>']
    for tick in range(6):
        y, value = TOP + HEIGHT - tick * HEIGHT / 5, LOW + tick * (1 - LOW) / 5
        parts.append(f'<path d="M{left} {y:.1f}h{WIDTH}" stroke="#d8dee4"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.0%}</text>')
    step = next(size for size in (5, 10, 20, 50, 100, 200, 500) if most / scale / size < 7)
    for value in range(0, int(most / scale) + 1, step):
        x = left + value * scale / most * WIDTH
        parts.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{value}</text>')
    parts.append(f'<text x="{left + WIDTH / 2}" y="{TOP + HEIGHT + 38}" text-anchor="middle">{unit}</text>')
    parts.append(f'<svg x="{left}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke-width="2">')
    for color, points in zip(COLORS, lines.values(), strict=True):
        parts.append(f'<polyline points="{" ".join(map(place, points))}" stroke="{color}"/>')
    return [*parts, "</svg>"]


def write(results: dict[str, list[Point]]) -> None:
    """The picture, and the table in its page."""
    PICTURE.write_text(draw(results))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table(results)}\n{END}{rest.partition(END)[2]}")


def main(wanted: Sequence[str], path: Path | None) -> None:
    """Do the runs that are not in the file, and write the page when all have ended."""
    stored = json.loads(path.read_text()) if path is not None and path.exists() else {}
    results = {name: [Point(**point) for point in points] for name, points in stored.items()}
    for run in RUNS:
        if run.name in results or (wanted and run.name not in wanted):
            continue
        results[run.name] = asyncio.run(in_one_process(run) if run.update is None else as_job(run))
        print(f"{run.name}: {results[run.name][-1]}", file=sys.stderr, flush=True)
        if path is not None:
            path.write_text(json.dumps({name: [asdict(one) for one in found] for name, found in results.items()}))
    results = {run.name: results[run.name] for run in RUNS if run.name in results}
    print(table(results))
    if len(results) == len(RUNS):
        write(results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="a JSON file that keeps the results")
    parser.add_argument("--only", action="append", default=[], choices=[run.name for run in RUNS])
    parsed = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for the evaluation of checkpoints here
    main(parsed.only, parsed.results)
