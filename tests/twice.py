"""Runs pytest, and runs each failed test once more, alone, after all others have ended.

usage: python tests/twice.py [--flaky FILE] [ARGUMENT OF PYTEST...]

A test that then passes is flaky: the last lines of the output name it, with the reason of its first failure. Up to
three flaky tests do not fail the run, all runs with the same FILE taken together. The run fails if a test fails twice.
It also fails if pytest stops for another reason, such as a collection error, a crash or an interrupt.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest

MOST_FLAKY = 3
MOST_AGAIN = 20  # more failures have one cause, which a second run of each would only hide in a long output
_OUTCOME = "BACKSTAY_PYTEST_OUTCOME"
# Variables of a process of pytest-xdist. This program may run in such a process, as a test.
_OF_WORKERS = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")


@dataclass
class Outcome:
    """The reports of one run of pytest; not its output."""

    status: int = int(pytest.ExitCode.INTERNAL_ERROR)
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # the test's id -> the reason of its first failure, one line
    uncollected: list[str] = field(default_factory=list)


class Recorder:
    """A plug-in of pytest that collects the `Outcome`; with pytest-xdist, in the process that prints."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome.failed.setdefault(report.nodeid, reason(report))
        elif report.passed and report.when == "call":
            self.outcome.passed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcome.uncollected.append(report.nodeid)


def reason(report: pytest.TestReport) -> str:
    """The exception of a failed test as one line, with the part of the test that raised it if that is not its call."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return first[:300] if report.when == "call" else f"{report.when}: {first[:300]}"


def record(arguments: list[str]) -> int:
    """Runs pytest in this process; the file that `_OUTCOME` names exists only if pytest has returned."""
    sys.path[0] = str(Path.cwd())  # as in `python -m pytest`; this file's folder is not a place to import from
    recorder = Recorder()
    place = Path(os.environ.pop(_OUTCOME))
    recorder.outcome.status = int(pytest.main(arguments, plugins=[recorder]))
    unfinished = place.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(recorder.outcome)))
    unfinished.replace(place)
    return recorder.outcome.status


def run(arguments: list[str], folder: Path) -> Outcome:
    """Runs pytest in another process. Returns the default `Outcome`, an internal error, if that process dies."""
    place = folder / "outcome.json"
    place.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in _OF_WORKERS}
    done = subprocess.run([sys.executable, __file__, "--record", *arguments], env={**env, _OUTCOME: str(place)})
    if not place.exists():
        return Outcome()
    outcome = Outcome(**json.loads(place.read_text()))
    return outcome if done.returncode == outcome.status else Outcome()


def passes_alone(test: str, folder: Path) -> bool:
    """Whether the test passes as the only one of a process; a test that is skipped or not found does not."""
    print(f"\nonce more, alone: {test}", flush=True)
    outcome = run(["-n", "0", test], folder)
    return outcome.status == pytest.ExitCode.OK and test in outcome.passed


def report_flaky(flaky: dict[str, str]) -> None:
    """Prints the flaky tests, and what follows from them."""
    print(f"\nflaky: {len(flaky)}, of at most {MOST_FLAKY}. Each is a defect, which the next change repairs.")
    for test, why in flaky.items():
        print(f"  {test}\n    first failure: {why}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/twice.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--flaky", type=Path, metavar="FILE")
    options, arguments = parser.parse_known_args(arguments)
    before = json.loads(options.flaky.read_text()) if options.flaky is not None and options.flaky.exists() else {}
    with tempfile.TemporaryDirectory(prefix="backstay-twice-") as name:
        folder = Path(name)
        first = run(arguments, folder)
        if first.status != pytest.ExitCode.TESTS_FAILED or first.uncollected or not first.failed:
            return first.status
        if len(first.failed) > MOST_AGAIN:
            print(f"\n{len(first.failed)} tests failed: none of more than {MOST_AGAIN} runs once more.")
            return first.status
        twice = [test for test in first.failed if not passes_alone(test, folder)]
    flaky = {test: why for test, why in first.failed.items() if test not in twice}
    if options.flaky is not None:
        options.flaky.parent.mkdir(parents=True, exist_ok=True)
        options.flaky.write_text(json.dumps(before | flaky))
    report_flaky(before | flaky)
    if twice:
        print(f"failed twice: {len(twice)}")
        for test in twice:
            print(f"  {test}\n    first failure: {first.failed[test]}")
    return int(pytest.ExitCode.TESTS_FAILED if twice or len(before | flaky) > MOST_FLAKY else pytest.ExitCode.OK)


if __name__ == "__main__":
    sys.exit(record(sys.argv[2:]) if sys.argv[1:2] == ["--record"] else main(sys.argv[1:]))
