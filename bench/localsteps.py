"""Local steps beside an update for each batch, as jobs over a link of 1 Gb/s, in quiet runs and while workers die.

A worker is killed 13 s after the first update, and then every 26 s.

All rows train the byte-level transformer of `examples/bytes` on the same number of tokens, with the same inner
optimizer. No row is tuned. The link is the one of the server. The kernel limits it in each direction, in a network
namespace of this program (bench/_link.py). This needs root. The workers share the cores of this machine.

    python bench/localsteps.py [--size small|large] [--seeds 3] [--rows N ...] [--results FILE] [--runs N] [--write]

Columns: bits per byte on held-out text, after the last update (mean and standard deviation over the seeds); bytes on
the link for each token, in both directions, with all headers; goodput (docs/goodput.md); the seconds from the first
update to the last. The file keeps the results: a run that it has is not run again. So the table may be measured in
pieces of `--runs` runs. `--write` writes the table of the small model into docs/local-steps.md, and the
picture of both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import _link
from _cluster import BenchCluster, BenchJob, cluster
from chaos import Chaos

REPO = Path(__file__).resolve().parent.parent
PAGE = REPO / "docs" / "local-steps.md"
PICTURE = REPO / "docs" / "pictures" / "local-steps.svg"

COUNT, KILL_SECONDS = 24, 26.0
STEPS = {"small": 6144, "large": 1920}
"""Local steps of all workers of a row together. Each run on two cores takes longer than `KILL_SECONDS`."""

_NUMBERS = itertools.count()
STREAMED = {"count": COUNT, "fragments": 4, "overlap": 2}


@dataclass(frozen=True)
class LocalStepsRow:
    """One way to train.

    Attributes:
        workers: number of workers.
        local: the arguments of `LocalSteps`; None: an update for each batch.
        update, wire: these fields of the job's spec.
        outer: arguments of scripts/text.py for the outer optimizer; none: the default of the mode.
    """

    name: str
    workers: int = 4
    local: dict[str, Any] | None = None
    update: dict[str, Any] = field(default_factory=lambda: {"mode": "Sync", "backups": 0})
    wire: dict[str, Any] = field(default_factory=dict)
    outer: tuple[str, ...] = ()

    @property
    def between(self) -> int:
        """Steps of a worker between two of its contributions."""
        return 1 if self.local is None else int(self.local["count"]) // int(self.local.get("fragments", 1))

    def updates(self, size: str) -> int:
        """Returns how many updates a job of this row makes."""
        steps = STEPS[size] // self.workers // self.between
        return steps if self.update["mode"] == "Sync" else steps * self.workers

    def title(self) -> str:
        return f"{self.name}, {self.workers} workers"


ROWS = (
    LocalStepsRow("Sync"),
    LocalStepsRow("Sync, 1 backup, no grace", update={"mode": "Sync", "backups": 1}),
    LocalStepsRow("Sync, 1 backup, grace Auto", update={"mode": "Sync", "backups": 1, "grace": "Auto"}),
    LocalStepsRow("24 local steps, no warm-up", local={"count": COUNT}, outer=("--warm-up", "0")),
    LocalStepsRow("24 local steps, outer SGD 1.0", local={"count": COUNT}, outer=("--outer-rate", "1.0")),
    LocalStepsRow("24 local steps", local={"count": COUNT}),
    LocalStepsRow("24 local steps", workers=8, local={"count": COUNT}),
    LocalStepsRow(
        "24 local steps, 4 fragments, overlap 2, Int4",
        local=STREAMED,
        wire={"gradients": "Int4"},
    ),
    LocalStepsRow("Async, 24 local steps", local={"count": COUNT}, update={"mode": "Async"}),
)


@dataclass(frozen=True)
class LocalStepsResult:
    """The measurements of one run.

    Attributes:
        bits: held-out bits per byte.
        sent: bytes on the link for each token.
        goodput: a number between 0 and 1.
        seconds: seconds between the first update and the last.
        killed: number of workers that were killed.
    """

    bits: float
    sent: float
    goodput: float
    seconds: float
    killed: int


async def run(on: BenchCluster, row: LocalStepsRow, size: str, seed: int, killing: bool) -> LocalStepsResult:
    """Train one row as a job."""
    from scripts.text import example

    import backstay

    steps, updates = STEPS[size] // row.workers, row.updates(size)
    job = BenchJob(
        on, f"text-{next(_NUMBERS)}", steps=updates, workers=row.workers, every_steps=100_000, script="text.py"
    )
    job.spec["args"] = [
        *("--size", size, "--worker-steps", str(steps), "--updates", str(updates), "--seed", str(seed)),
        *(("--local", json.dumps(row.local)) if row.local else ()),
        *row.outer,
    ]
    job.spec["update"], job.spec["wire"] = row.update, row.wire
    before = sum(_link.carried())
    await job.submit()
    await job.wait("the first update", job.updates, 300)
    chaos = Chaos(on, job, seed, 0)

    async def kill() -> None:
        await asyncio.sleep(KILL_SECONDS / 2)  # so that a short run has a death, too
        while True:
            await chaos.cause(chaos.kill_worker)
            await asyncio.sleep(KILL_SECONDS)

    killer = asyncio.ensure_future(kill()) if killing else None
    try:
        await job.wait_for_end(1800)
    finally:
        if killer is not None:
            killer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await killer
    sent = sum(_link.carried()) - before
    await asyncio.sleep(2.0)  # until the last worker has ended
    seconds = (await job.look())["workerSeconds"]
    times = [update.at for update in job.updates()]
    module = example(size)
    bits = module.evaluate(backstay.load(str(job.checkpoints)).params)["bits_per_byte"]
    await job.delete()
    goodput = seconds["applied"] / sum(seconds.values())
    tokens = steps * row.workers * module.BATCH * module.CONTEXT
    return LocalStepsResult(float(bits), sent / tokens, goodput, times[-1] - times[0], len(chaos.faults))


def found(results: Mapping[str, LocalStepsResult], size: str, row: int, killing: bool) -> list[LocalStepsResult]:
    """Returns the runs of all seeds that there are."""
    return [result for key, result in results.items() if key.rpartition("/")[0] == name(size, row, killing)]


def mean(of: Callable[[LocalStepsResult], float], runs: Iterable[LocalStepsResult]) -> float:
    return statistics.mean(map(of, runs))


def table(results: Mapping[str, LocalStepsResult], size: str, rows: Iterable[int]) -> str:
    """Returns the table of all runs that are done, in Markdown."""
    lines = [
        "| row | workers | updates | bits per byte | with deaths | bytes per token | goodput | seconds |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number in rows:
        (quiet, killed), row = (found(results, size, number, killing) for killing in (False, True)), ROWS[number]
        if not quiet:
            continue
        lines.append(
            f"| {row.name} | {row.workers} | {row.updates(size):,} | {bits_of(quiet)} | {bits_of(killed)} "
            f"| {mean(lambda run: run.sent, quiet):,.0f} | {mean(lambda run: run.goodput, quiet):.0%} "
            f"| {mean(lambda run: run.seconds, quiet):.0f} |"
        )
    return "\n".join(lines) + "\n"


def bits_of(runs: list[LocalStepsResult]) -> str:
    """Returns the mean of the bits per byte, with the standard deviation of several seeds; a dash without a run."""
    if not runs:
        return "-"
    spread = f" ± {deviation(runs):.3f}" if len(runs) > 1 else ""
    return f"{mean(lambda run: run.bits, runs):.3f}{spread}"


def sizes_of(results: Iterable[str]) -> list[str]:
    """Returns the sizes that have results."""
    return [size for size in STEPS if any(key.startswith(f"{size}/") for key in results)]


def deviation(runs: Iterable[LocalStepsResult]) -> float:
    """Returns the standard deviation of the bits per byte; 0 for a single run."""
    bits = [run.bits for run in runs]
    return statistics.stdev(bits) if len(bits) > 1 else 0.0


# ---- The picture ----

COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999999", "#882255", "#44AA99")
INK, GRID = "#24292f", "#d8dee4"
WIDTH, HEIGHT, LEFT, TOP, GAP, BOTTOM = 330, 220, 56, 44, 64, 60  # pixels of a panel, and around it


def draw(results: Mapping[str, LocalStepsResult]) -> str:
    """Draws bits over bytes, bits over time, and goodput for each size, as SVG. Hollow marks are runs with deaths."""
    sizes = sizes_of(results)
    tall = TOP + HEIGHT + BOTTOM
    width, height = LEFT + 3 * (WIDTH + GAP), len(sizes) * tall + 22 * math.ceil(len(ROWS) / 3) + 8
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="12" fill="{INK}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for line, size in enumerate(sizes):
        points = {
            (number, killing): runs
            for number, killing in itertools.product(range(len(ROWS)), (False, True))
            if (runs := found(results, size, number, killing))
        }
        parts.append(f'<g transform="translate({LEFT} {line * tall + TOP})">')
        parts += scatter(points, f"{size} model: bits per byte over bytes per token", lambda run: run.sent, log=True)
        parts.append(f'</g><g transform="translate({LEFT + WIDTH + GAP} {line * tall + TOP})">')
        parts += scatter(points, f"{size} model: bits per byte over seconds", lambda run: run.seconds, log=False)
        parts.append(f'</g><g transform="translate({LEFT + 2 * (WIDTH + GAP)} {line * tall + TOP})">')
        parts += [*bars(points, f"{size} model: goodput"), "</g>"]
    for number, row in enumerate(ROWS):
        x, y = LEFT + number % 3 * (WIDTH + GAP), len(sizes) * tall + number // 3 * 22
        parts.append(f'<circle cx="{x}" cy="{y}" r="5" fill="{COLORS[number]}"/>')
        parts.append(f'<text x="{x + 12}" y="{y + 4}">{escape(row.title())}</text>')
    return "\n".join([*parts, "</svg>", ""])


Points = Mapping[tuple[int, bool], list[LocalStepsResult]]


def scatter(points: Points, title: str, along: Callable[[LocalStepsResult], float], *, log: bool) -> Iterator[str]:
    """Yields one point for each row, with a line for the standard deviation of the bits."""
    scale = math.log10 if log else float
    places = {key: (scale(mean(along, runs)), mean(lambda run: run.bits, runs)) for key, runs in points.items()}
    bits = [bits for _, bits in places.values()]
    low, high = math.floor(10 * min(bits)) / 10, math.ceil(10 * max(bits) + 0.1) / 10
    first = math.floor(min(x for x, _ in places.values())) if log else 0.0
    last = math.ceil(max(x for x, _ in places.values())) if log else 1.05 * max(x for x, _ in places.values())

    def down(bits: float) -> float:
        return HEIGHT * (high - bits) / (high - low)

    yield f'<text y="-16" font-weight="bold">{escape(title)}</text>'
    for tick in range(5):
        y, value = HEIGHT * (1 - tick / 4), low + tick * (high - low) / 4
        yield f'<path d="M0 {y:.1f}h{WIDTH}" stroke="{GRID}"/>'
        yield f'<text x="-8" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>'
    step = 1 if log else next(size for size in (5, 10, 20, 50, 100) if last / size < 8)
    for value in range(int(first), int(last) + 1, step):
        x = WIDTH * (value - first) / (last - first)
        yield f'<text x="{x:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{10**value if log else value:,}</text>'
    for (number, killing), (at, value) in places.items():
        x, spread, color = WIDTH * (at - first) / (last - first), deviation(points[number, killing]), COLORS[number]
        yield f'<path d="M{x:.1f} {down(value - spread):.1f}V{down(value + spread):.1f}" stroke="{color}"/>'
        fill = "#ffffff" if killing else color
        yield f'<circle cx="{x:.1f}" cy="{down(value):.1f}" r="5" fill="{fill}" stroke="{color}" stroke-width="2"/>'


def bars(points: Points, title: str) -> Iterator[str]:
    yield f'<text y="-16" font-weight="bold">{escape(title)}</text>'
    for tick in range(0, 101, 25):
        x = WIDTH * tick / 100
        yield f'<path d="M{x:.1f} 0V{HEIGHT}" stroke="{GRID}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{tick} %</text>'
    deep = HEIGHT / (2 * len(ROWS))
    for (number, killing), runs in points.items():
        y, width, color = (2 * number + killing) * deep, WIDTH * mean(lambda run: run.goodput, runs), COLORS[number]
        fill = "#ffffff" if killing else color
        yield (
            f'<rect y="{y + 1.5:.1f}" width="{width:.1f}" height="{deep - 3:.1f}" fill="{fill}" stroke="{color}" '
            'stroke-width="1.5"/>'
        )


def write(results: Mapping[str, LocalStepsResult]) -> None:
    """The table of the small model in its page, and the picture of both."""
    begin, end = "<!-- table of the small model -->\n", "<!-- end of the table of the small model -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    rows = table(results, "small", range(len(ROWS)))
    PAGE.write_text(f"{before}{begin}\n{rows}\n{end}{rest.partition(end)[2]}")
    PICTURE.write_text(draw(results))


def name(size: str, row: int, killing: bool) -> str:
    """Returns the name of a run in the file of results, without its seed."""
    return f"{size}/{row}/{'killed' if killing else 'quiet'}"


def stored(path: Path | None) -> dict[str, LocalStepsResult]:
    """Returns the results in a file."""
    kept = json.loads(path.read_text()) if path and path.exists() else {}
    return {key: LocalStepsResult(**values) for key, values in kept.items()}


async def measure(arguments: argparse.Namespace, results: dict[str, LocalStepsResult]) -> None:
    """The runs that are not in the results, in one cluster."""
    due = [
        (number, killing, seed)
        for killing, seed, number in itertools.product((False, True), range(arguments.seeds), arguments.rows)
        if f"{name(arguments.size, number, killing)}/{seed}" not in results
    ][: arguments.runs]
    if not due:
        return
    async with cluster() as on:
        for number, killing, seed in due:
            key = f"{name(arguments.size, number, killing)}/{seed}"
            results[key] = await run(on, ROWS[number], arguments.size, seed, killing)
            print(key, results[key], file=sys.stderr, flush=True)
            if arguments.results:
                kept = json.dumps({key: asdict(value) for key, value in results.items()}, indent=1)
                arguments.results.write_text(kept)


def main() -> None:
    """Parse arguments, enter the namespace, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=STEPS, default="small")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gigabits", type=float, default=1.0, help="gigabits a second on the link, in each direction")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)), help="rows, from 0; default: all")
    parser.add_argument("--results", type=Path, help="a file that keeps the results")
    parser.add_argument("--runs", type=int, help="the most runs to do now; default: all that are missing")
    parser.add_argument("--write", action="store_true", help="write the page and its picture, of all results")
    arguments = parser.parse_args()
    results = stored(arguments.results)
    if arguments.runs != 0:
        _link.enter(arguments.gigabits)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # for evaluating here
        asyncio.run(measure(arguments, results))
    print(table(results, arguments.size, arguments.rows))
    if arguments.write:
        write(results)


if __name__ == "__main__":
    main()
