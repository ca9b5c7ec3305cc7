"""Runs the stages of `make test`, the cheap ones first, and ends with a summary of at most fifty lines.

usage: python3 tests/stages.py

The first stage that fails ends the run. The summary has the seconds of each stage, the slowest tests, and failed and
flaky tests with the reason. If a stage without tests has failed, it has the last lines of its output.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "helpers"))
from tiers import PURE, QUICK_COMPILER  # noqa: E402  # this program runs without pytest, which knows the folder

REPORT = Path(".cache", "tests.json")
LOCK, PASSED = Path("requirements.lowest.lock"), Path("tests", "lowest.txt")
MOST_LINES, SLOWEST, MOST_NAMED, LAST_LINES, LONGEST = 50, 20, 8, 16, 240
ENDING = 30.0  # seconds in which tests/twice.py ends what it has started
MOST_FLAKY = 3  # as in tests/twice.py
ENDS = (signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stage:
    """One command.

    Attributes:
        skip: the reason why it does not run; empty: it runs.
        tests: whether its failures are in the report.
        explained: whether the report has the reason of its failure, so that its output need not be repeated.
    """

    name: str
    command: list[str]
    skip: str = ""
    tests: bool = False
    explained: bool = False
    seconds: float = 0.0
    status: int | None = None
    last: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))


def stages() -> list[Stage]:
    """Returns all stages in their order."""
    first = ("tests/prose", *PURE, "tests/codecs", "tests/wire")
    quick = f"XLA_FLAGS={' '.join((os.environ.get('XLA_FLAGS', ''), *QUICK_COMPILER)).strip()}"
    twice = [".venv/bin/python", "tests/twice.py", "--report", str(REPORT), "-n"]
    computing = str(min(4, 2 * len(os.sched_getaffinity(0))))  # more would only take longer
    digests = [line.split()[0] for line in PASSED.read_text().splitlines() if line.strip()] if PASSED.exists() else []
    again = f"{LOCK} is unchanged" if hashlib.sha256(LOCK.read_bytes()).hexdigest() in digests else ""
    return [
        Stage("environment", ["make", ".venv/.installed"]),
        Stage("lint and docs", ["make", "-j2", "-O", "collected", "lint", "docs"]),
        Stage("pure tests and bits", [*twice, computing, *first], tests=True),
        Stage("tests", ["env", quick, *twice, "auto", *(f"--ignore={folder}" for folder in first)], tests=True),
        Stage("lowest", ["make", "lowest", f"REPORT=--report {REPORT}"], skip=again, tests=True),
    ]


def run(stage: Stage) -> None:
    """Runs the command, shows its output, and sets how it ended."""
    began = time.monotonic()
    print(f"==== {stage.name}", flush=True)
    # Its own group, so that an interrupt ends all of it: make waits for its children and sends them nothing. A
    # process outside the group of the terminal may not read from it.
    process = subprocess.Popen(
        stage.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, process_group=0
    )
    assert process.stdout is not None
    try:
        show(process.stdout.fileno(), stage)
        stage.status = process.wait()
    except KeyboardInterrupt:
        process.stdout.close()  # a process that could not write on would not end
        os.killpg(process.pid, signal.SIGTERM)  # a shell starts a background process with SIGINT ignored
        stage.last.append("interrupted")
        stage.status = 128 + signal.SIGINT
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDING)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        stage.seconds = time.monotonic() - began


def show(output: int, stage: Stage) -> None:
    """Prints what the command writes, until no process can write any more, and keeps the last lines."""
    part = b""
    while chunk := os.read(output, 1 << 16):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()
        *lines, part = (part + chunk).split(b"\n")
        stage.last.extend(text for line in lines if (text := line.decode(errors="replace").rstrip()))
    if text := part.decode(errors="replace").rstrip():
        stage.last.append(text)


def report_of() -> dict[str, Any]:
    """Returns the report of the stages until now; empty before the first one with tests."""
    found: dict[str, Any] = json.loads(REPORT.read_text()) if REPORT.exists() else {}
    return found


def summary(done: list[Stage], tools: str = "") -> list[str]:
    """Returns the lines of the summary; `tools`: the seconds of `make tools`, if they are known."""
    report = report_of()
    lines = ["==== summary"] + ([f"{float(tools):6.0f} s  tools"] if tools else [])
    for stage in done:
        how = f"skipped: {stage.skip}" if stage.skip else "" if stage.status == 0 else f"FAILED ({stage.status})"
        lines.append(f"{stage.seconds:6.0f} s  {stage.name}  {how}".rstrip())
    failed, flaky = report.get("failed", {}), report.get("flaky", {})
    after = [f"more than {MOST_FLAKY} tests are flaky, which fails the run"] if len(flaky) > MOST_FLAKY else []
    after += named("flaky, each is a defect that the next change repairs", flaky)
    after += named("failed", failed)
    for stage in done:
        if stage.status and not stage.explained:
            after += [f"the last lines of {stage.name}:", *(shortened(f"  {line}") for line in stage.last)]
    if report:
        passed = report["passed"]
        after.append(f"{passed} passed, {report['skipped']} skipped, {len(flaky)} flaky, {len(failed)} failed")
        slowest = sorted(report["seconds"].items(), key=lambda item: -item[1])
        room = MOST_LINES - len(lines) - len(after) - 1
        lines.append(f"the slowest of {len(report['seconds'])} tests, with their fixtures:")
        lines += [f"{seconds:6.1f} s  {shortened(test)}" for test, seconds in slowest[: min(SLOWEST, room)]]
    return lines + after


def named(title: str, tests: dict[str, str]) -> list[str]:
    """Returns some tests, each in one line with its reason."""
    shown = [shortened(f"  {test}: {why}") for test, why in list(tests.items())[:MOST_NAMED]]
    more = [f"  and {len(tests) - MOST_NAMED} more"] if len(tests) > MOST_NAMED else []
    return [f"{title}: {len(tests)}", *shown, *more] if tests else []


def shortened(text: str) -> str:
    """Returns the text as one line of limited length."""
    line = " ".join(text.splitlines())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 3]}..."


def interrupted(*_: object) -> None:
    """SIGTERM, or a closed terminal, ends a run as Ctrl-C does: with a summary, and without its processes. A second one
    changes nothing."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    os.chdir(ROOT)
    received = [number for number in ENDS if signal.getsignal(number) is not signal.SIG_IGN]  # not those of nohup
    before = {number: signal.signal(number, interrupted) for number in received}
    try:
        return all_stages()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def all_stages() -> int:
    """Run the stages until one fails, and print the summary; returns the exit status."""
    REPORT.unlink(missing_ok=True)
    done: list[Stage] = []
    for stage in stages():
        done.append(stage)
        if not stage.skip:
            before = report_of()
            run(stage)
            after = report_of()
            added = len(after.get("failed", {})) > len(before.get("failed", {}))
            stage.explained = stage.tests and (added or len(after.get("flaky", {})) > MOST_FLAKY)
        if stage.status:
            break
    print("\n".join(summary(done, os.environ.get("BACKSTAY_TOOLS_SECONDS", ""))), flush=True)
    return done[-1].status or 0


if __name__ == "__main__":
    sys.exit(main())
