"""The time from `backstay run` to the first update, with forked pods and with executed pods (docs/decisions/0070).

Both are measured in turns. The benchmark also prints the processor time of the whole process tree. Divided by the
number of cores, that is a lower bound of the time on a quiet machine.

    python bench/start.py [--runs 3] [--job examples/digits/job.yaml]
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
from _command import backstay_run

REPO = Path(__file__).resolve().parent.parent
STEP = re.compile(r"^.*parameter-server-0: step \d+/", re.MULTILINE)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--job", type=Path, default=REPO / "examples/digits/job.yaml")
    args = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"--preload": [], "--no-preload": []}
    for _ in range(args.runs):
        for option, results in found.items():
            results.append(first_update(args.job, option))
            wall, processor = results[-1]
            print(f"{option:<14} {wall:6.2f} s, {processor:6.2f} s of processor time", file=sys.stderr, flush=True)
    print(f"first update of {args.job.name} ({args.runs} runs, medians; {os.cpu_count()} cores)")
    for option, results in found.items():
        wall, processor = (statistics.median(column) for column in zip(*results, strict=True))
        print(f"{option:<14} {wall:6.2f} s, {processor:6.2f} s of processor time")
    pairs = list(zip(*found.values(), strict=True))
    ratios = [statistics.median(new[i] / old[i] for new, old in pairs) for i in range(2)]
    print(f"ratio of pairs {ratios[0]:6.2f}   {ratios[1]:6.2f}")


def first_update(job: Path, option: str) -> tuple[float, float]:
    """Returns the seconds on the clock, and of processor time, until server 0 has made an update.

    Raises:
        SystemExit: the job ended without an update, or made none within five minutes.
    """
    with tempfile.TemporaryDirectory(prefix="backstay-start-") as folder:
        began = time.monotonic()
        with backstay_run(Path(folder), option, str(job)) as run:
            run.wait(lambda logs: STEP.search(logs) is not None)
            wall = time.monotonic() - began
            return wall, processor_seconds(run.process.pid)


def processor_seconds(pid: int) -> float:
    """Processor time of a process, its descendants, and the ended children of all these."""
    root = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:4]) for each in [root, *root.children(recursive=True)])


if __name__ == "__main__":
    main()
