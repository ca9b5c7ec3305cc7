"""Runs pytest, and runs each failed test once more, alone, after all others have ended.

usage: python tests/twice.py [--report FILE] [--ending SECONDS] [ARGUMENT OF PYTEST...]

A test that then passes is flaky: the last lines of the output name it, with the reason of its first failure. Up to
three flaky tests do not fail the run, all runs with the same FILE taken together. The run fails if a test fails twice.
It also fails if pytest stops for another reason, such as a collection error, a crash or an interrupt. It fails too if
something is left behind (`Surroundings`), except by a flaky test. Processes have SECONDS to end, 20 by default, and
more on a busy machine. FILE sums up all runs (`Report`), for the summary of `tests/stages.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backstay_cluster.tests.limits import slack

MOST_FLAKY = 3
LEFT = "left behind by a test: "
NOT_RUN = "did not run: "
MOST_AGAIN = 20  # more failures have one cause, which a second run of each would only hide in a long output
_OUTCOME = "BACKSTAY_PYTEST_OUTCOME"
# Variables of a process of pytest-xdist. This program may run in such a process, as a test.
_OF_WORKERS = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST")


@dataclass
class Outcome:
    """The reports of one run of pytest; not its output."""

    status: int = int(pytest.ExitCode.INTERNAL_ERROR)
    passed: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # of each test with its fixtures
    failed: dict[str, str] = field(default_factory=dict)  # the test's id -> the reason of its first failure, one line
    uncollected: dict[str, str] = field(default_factory=dict)  # what could not be collected -> the reason
    collected: list[str] = field(default_factory=list)
    threads: list[str] = field(default_factory=list)  # the names of those that tests/conftest.py has found at the end


@dataclass
class Report:
    """The sum of some runs."""

    passed: int = 0
    skipped: int = 0
    flaky: dict[str, str] = field(default_factory=dict)  # the test's id -> the reason of its first failure
    failed: dict[str, str] = field(default_factory=dict)  # the same, of tests that failed twice
    seconds: dict[str, float] = field(default_factory=dict)

    @staticmethod
    def read(path: Path | None) -> Report:
        """Returns the report in a file, which may not exist."""
        return Report(**json.loads(path.read_text())) if path is not None and path.exists() else Report()

    def write(self, path: Path) -> None:
        """Replace the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, asdict(self))


def write(path: Path, content: object) -> None:
    """Write JSON, so that a reader finds all of it or no file."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(content))
    unfinished.replace(path)


class Recorder:
    """A plug-in of pytest that collects the `Outcome`; with pytest-xdist, in the process that prints."""

    def __init__(self) -> None:
        self.outcome = Outcome()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.outcome.seconds
        seconds[report.nodeid] = round(seconds.get(report.nodeid, 0.0) + report.duration, 3)
        if report.failed:
            self.outcome.failed.setdefault(report.nodeid, reason(report))
        elif report.passed and report.when == "call":
            self.outcome.passed.append(report.nodeid)
        elif report.skipped:
            self.outcome.skipped += 1

    def pytest_testnodedown(self, node: Any) -> None:
        self.outcome.threads += getattr(node, "workeroutput", {}).get("threads", [])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            lines = str(report.longrepr).splitlines()
            errors = [line[1:].strip() for line in lines if line.startswith("E ")]
            self.outcome.uncollected[report.nodeid] = (errors or lines or ["no message"])[-1][:300]
        elif report.skipped:
            self.outcome.skipped += 1

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.outcome.collected = [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self.outcome.collected = list(ids)


def reason(report: pytest.TestReport) -> str:
    """Returns the exception of a failed test as one line, with the part of the test that raised it if that is not its
    call."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no message")
    return f"{report.when}: {first[:300]}" if report.when in ("setup", "teardown") else first[:300]


def record(arguments: list[str]) -> int:
    """Runs pytest in this process; the file that `_OUTCOME` names exists only if pytest has returned."""
    sys.path[0] = str(Path.cwd())  # as in `python -m pytest`; this file's folder is not a place to import from
    recorder = Recorder()
    place = Path(os.environ.pop(_OUTCOME))
    recorder.outcome.status = int(pytest.main(arguments, plugins=[recorder]))
    write(place, asdict(recorder.outcome))
    return recorder.outcome.status


def run(arguments: list[str], folder: Path, ending: float = 20.0) -> Outcome:
    """Runs pytest in another process. Returns the default `Outcome`, an internal error, if that process dies."""
    place = folder / "outcome.json"
    place.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in _OF_WORKERS}
    with Surroundings(ending) as surroundings:
        env |= {_OUTCOME: str(place), **surroundings.variables}
        status = ended(subprocess.Popen([sys.executable, __file__, "--record", *arguments], env=env), place, ending)
        left = surroundings.left()
    if not place.exists():
        return Outcome(failed={"pytest itself": f"it ended with exit status {status}, without its results"})
    outcome = Outcome(**json.loads(place.read_text()))
    if status is None:
        left.append("pytest itself, which a thread that is not a daemon kept from its end")
        status = outcome.status
    if outcome.status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        unknown = [test for test in outcome.collected if test not in outcome.seconds]
        if unknown:
            outcome.failed |= {f"{NOT_RUN}{len(unknown)} tests": f"the first is {unknown[0]}"}
            outcome.status = int(pytest.ExitCode.TESTS_FAILED)
            return outcome
    left += [f"the thread {name}, {count} times" for name, count in Counter(outcome.threads).items()]
    outcome.failed |= {f"{LEFT}{one}": "each test ends what it has begun" for one in left}
    if left and outcome.status == status == pytest.ExitCode.OK:
        outcome.status = int(pytest.ExitCode.TESTS_FAILED)
        return outcome
    return outcome if status == outcome.status else Outcome()


def ended(process: subprocess.Popen[bytes], place: Path, ending: float) -> int | None:
    """Returns the exit status of pytest, or None if it did not end within `ending` seconds after its results and was
    killed."""
    try:
        results = None
        while process.poll() is None and (results is None or time.monotonic() < results + ending * slack()):
            if results is None and place.exists():
                results = time.monotonic()
            time.sleep(0.05)
        return process.poll()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


class Surroundings:
    """The processes, mounts, network namespaces and temporary files of the tests.

    Attributes:
        variables: the environment of pytest, by which its processes and its temporary files are known.
    """

    def __init__(self, ending: float) -> None:
        """Let processes end after the tests within `ending` seconds."""
        self._ending = ending

    def __enter__(self) -> Surroundings:
        self._folder = Path(tempfile.mkdtemp(prefix="bs-"))  # short, because names of sockets have 107 bytes
        self._mark = f"BACKSTAY_TEST_SESSION={self._folder.name}"
        # Folders of pytest itself stay where they are: it keeps those of the last three runs.
        root = os.environ.get("PYTEST_DEBUG_TEMPROOT", str(self._folder.parent))
        self.variables = {
            "BACKSTAY_TEST_SESSION": self._folder.name,
            "TMPDIR": str(self._folder),
            "PYTEST_DEBUG_TEMPROOT": root,
        }
        self._state = self._folder / "state"  # of the runs that tests start; a process that dies leaves its folder
        self._state.mkdir()
        self.variables["BACKSTAY_TEST_STATE"] = str(self._state)
        self._mounts, self._namespaces = mounts(), namespaces()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # an interrupt
            self._end(self._processes())
        for place in sorted(mounts(), reverse=True):
            if Path(place).is_relative_to(self._folder):
                subprocess.run(["umount", "-l", place], check=False)
        if not any(Path(place).is_relative_to(self._folder) for place in mounts()):  # else it has the files of others
            shutil.rmtree(self._folder, ignore_errors=True)

    def left(self) -> list[str]:
        """Returns the things that the tests have left, as text. Processes that do not end in time are killed."""
        began = time.monotonic()
        while (living := self._processes()) or (more := self._of_machine()):
            # A mount or a namespace may be of another run, whose tests remove it in this time.
            if time.monotonic() >= began + self._ending * slack():
                break
            time.sleep(0.1)
        more = self._of_machine()
        self._end(living)
        found = [f"the process {words}" for words in living.values()]
        if not self._folder.is_dir():
            return [*found, "no temporary folder: a test has deleted it", *more]
        names = sorted(path.name for path in self._folder.iterdir() if path != self._state)
        return [*found, *(f"the file {name} in the temporary folder" for name in names), *more]

    def _of_machine(self) -> list[str]:
        """Returns the mounts and network namespaces that were not there at the start, as text."""
        found = [f"the mount {place}" for place in sorted(mounts() - self._mounts)]
        return found + [f"the network namespace {name}" for name in sorted(namespaces() - self._namespaces)]

    @staticmethod
    def _end(processes: Iterable[int]) -> None:
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> dict[int, str]:
        """Returns the command lines of the processes that pytest or one of its processes has started."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = words[:120]
        return found


def mounts() -> set[str]:
    """Returns the places where file systems are mounted."""
    with contextlib.suppress(OSError):
        return {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return set()


def namespaces() -> set[str]:
    """Returns the network namespaces with a name."""
    folder = Path("/run/netns")
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def passes_alone(test: str, folder: Path, options: list[str], ending: float) -> bool:
    """Returns whether the test passes as the only one of a process; a test that is skipped or not found does not."""
    print(f"\nonce more, alone: {test}", flush=True)
    # The file of the first run, and not that of a folder with other settings, such as operator/backstay_cluster.
    here = ["-c", "pyproject.toml"] if Path("pyproject.toml").exists() else []
    outcome = run([*options, *here, "-n", "0", test], folder, ending)
    return outcome.status == pytest.ExitCode.OK and test in outcome.passed


def options_of(arguments: list[str]) -> list[str]:
    """Returns the arguments of pytest that hold for any test, without those that select tests or processes."""
    kept, words = [], iter(arguments)
    for word in words:
        if word in ("-n", "--dist"):
            next(words, None)
        elif not (word.startswith(("-n", "--dist=", "--ignore")) or Path(word.partition("::")[0]).exists()):
            kept.append(word)
    return kept


def report_flaky(flaky: dict[str, str]) -> None:
    """Prints the flaky tests, and what follows from them."""
    print(f"\nflaky: {len(flaky)}, of at most {MOST_FLAKY}. Each is a defect, which the next change repairs.")
    for test, why in flaky.items():
        print(f"  {test}\n    first failure: {why}")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="tests/twice.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--report", type=Path, metavar="FILE")
    parser.add_argument("--ending", type=float, metavar="SECONDS", default=20.0)
    options, arguments = parser.parse_known_args(arguments)
    report = Report.read(options.report)
    with tempfile.TemporaryDirectory(prefix="backstay-twice-") as name:
        folder = Path(name)
        first = run(arguments, folder, options.ending)
        status = judge(first, report, folder, options_of(arguments), options.ending)
    if options.report is not None:
        report.write(options.report)
    return int(status)


def judge(first: Outcome, report: Report, folder: Path, options: Sequence[str] = (), ending: float = 20.0) -> int:
    """Runs the failed tests of a first run once more, and adds all to the report; returns the exit status."""
    report.passed += len(set(first.passed) - set(first.failed))
    report.skipped += first.skipped
    report.seconds |= first.seconds
    again = first.status == pytest.ExitCode.TESTS_FAILED and first.failed and not first.uncollected
    if not again or len(first.failed) > MOST_AGAIN:
        if again:
            print(f"\n{len(first.failed)} tests failed: none of more than {MOST_AGAIN} runs once more.")
        report.failed |= {**first.uncollected, **first.failed}
        return first.status
    left = [test for test in first.failed if test.startswith(LEFT)]
    tests = [test for test in first.failed if test not in left]
    twice = [
        test for test in tests if test.startswith(NOT_RUN) or not passes_alone(test, folder, list(options), ending)
    ]
    flaky = {test: first.failed[test] for test in tests if test not in twice}
    if flaky and not twice:
        # A test that fails where it waits may leave things. Alone it has left nothing, or it had not passed.
        last = list(flaky)[-1]
        flaky[last] = "; ".join([flaky[last], *left])
    else:
        twice += left
    report.failed |= {test: first.failed[test] for test in twice}
    report.flaky |= flaky
    if report.flaky:
        report_flaky(report.flaky)
    if twice:
        print(f"failed twice: {len(twice)}")
        for test in twice:
            print(f"  {test}\n    first failure: {first.failed[test]}")
    return pytest.ExitCode.TESTS_FAILED if twice or len(report.flaky) > MOST_FLAKY else pytest.ExitCode.OK


if __name__ == "__main__":
    sys.exit(record(sys.argv[2:]) if sys.argv[1:2] == ["--record"] else main(sys.argv[1:]))
