"""Runs pytest, and runs each failed test once more, alone, after all others have ended.

usage: python tests/twice.py [--report FILE] [--ending SECONDS] [ARGUMENT OF PYTEST...]

A test that then passes is flaky: the last lines of the output name it, with the reason of its first failure. Up to
three flaky tests do not fail the run, all runs with the same FILE taken together. The run fails if a test fails twice.
It also fails if pytest stops for another reason, such as a collection error, a crash or an interrupt. It fails too if
something is left behind (`surroundings.py`, `left_in_process.py`), except by a flaky test, and if a process of pytest
dies. A failure is printed when it happens, and more than twenty end the run. Processes have SECONDS to end, 20 by
default, and more on a busy machine. FILE sums up all runs (`Report`), for the summary of `tests/stages.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from backstay_cluster.tests.files import put
from backstay_cluster.tests.limits import slack

HELPERS = Path(__file__).resolve().parent / "helpers"
sys.path.append(str(HELPERS))
from surroundings import Surroundings, begun, living  # noqa: E402  # this program knows the folder without pytest
from tiers import STORE  # noqa: E402

PLUGIN = "left_in_process"
MOST_FLAKY = 3
ENDS = (signal.SIGTERM, signal.SIGHUP)
LEFT = "left behind by a test: "
MOST_AGAIN = 20  # more failures have one cause, which a second run of each would only hide in a long output
ITSELF = "pytest itself"
RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
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
    left: list[tuple[str, str]] = field(default_factory=list)  # in the processes of pytest, each with its test
    begun: dict[str, list[str]] = field(default_factory=dict)  # a failed test -> keys of what began during it
    faults: dict[str, str] = field(default_factory=dict)  # what no second run of a test can repair -> the reason
    excuses: dict[str, list[str]] = field(default_factory=dict)  # a fault -> the failed tests that may be its cause
    cut: bool = False  # ended with its processes, because more than MOST_AGAIN tests failed

    def add_left(self, what: str, tests: list[str]) -> None:
        """Something was left behind, during these failed tests."""
        fault = f"{LEFT}{what}"
        self.faults[fault] = "each test ends what it has begun"
        self.excuses.setdefault(fault, []).extend(tests)


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
        put(path, json.dumps(asdict(self)))


class Recorder:
    """A plug-in of pytest that collects the `Outcome`; with pytest-xdist, in the process that prints."""

    def __init__(self, ending: float) -> None:
        """Let the processes of pytest-xdist end after the tests within `ending` seconds."""
        self.outcome = Outcome()
        self._ending = ending
        self._temporary = Path(tempfile.gettempdir())
        self._began: dict[str, float] = {}
        self._workers: list[Any] = []
        self._crashed: set[str] = set()  # the workers whose end is the failure of a test
        self._plugins: pytest.PytestPluginManager

    def pytest_configure(self, config: pytest.Config) -> None:
        self._plugins = config.pluginmanager

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began[nodeid] = time.time()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds, failed = self.outcome.seconds, self.outcome.failed
        seconds[report.nodeid] = round(seconds.get(report.nodeid, 0.0) + report.duration, 3)
        if report.failed and report.nodeid not in failed:
            failed[report.nodeid] = reason(report)
            if (terminal := self._plugins.getplugin("terminalreporter")) is not None:  # no summary ends a killed run
                terminal.write(f"\nfailed: {report.nodeid}: {failed[report.nodeid]}\n", flush=True)
        elif report.passed and report.when == "call":
            self.outcome.passed.append(report.nodeid)
        elif report.skipped:
            self.outcome.skipped += 1
        if report.when == "setup":  # the message that it began came later
            self._began[report.nodeid] = min(report.start, self._began.get(report.nodeid, report.start))
        elif report.when != "call" and report.nodeid in failed:  # its end, or that of its process
            known = begun(os.getppid(), self._temporary, self._began.get(report.nodeid, time.time()))
            self.outcome.begun[report.nodeid] = known

    def pytest_runtest_logfinish(self) -> None:
        if len(self.outcome.failed) > MOST_AGAIN:
            # `--maxfail` would let each process of pytest-xdist run what it has been given already. If each job waits
            # until it fails, that takes many minutes.
            self.outcome.cut = True
            pytest.exit(f"more than {MOST_AGAIN} tests failed")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        self._workers.append(node)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, report: Any) -> None:
        self._crashed.add(report.node.gateway.id)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        """Let each worker end what it does, and only then request its end: it would get an interrupt after 5 s."""
        for node in self._workers if exitstatus in RAN else ():
            with contextlib.suppress(node.channel.RemoteError, node.channel.TimeoutError, EOFError):
                node.channel.waitclose(self._ending * slack())
            node.nodemanager.EXIT_TIMEOUT = self._ending * slack()

    def judge_workers(self) -> None:
        """Set the faults of the processes of pytest-xdist, which does not look at how they end."""
        for node in self._workers if self.outcome.status in RAN else ():
            left = getattr(node, "workeroutput", {}).get("left")
            self.outcome.left += left or []
            if node.gateway.id in self._crashed:
                continue
            try:
                status = node.gateway._io.popen.wait(self._ending * slack())
            except subprocess.TimeoutExpired:
                status = "none"
            # A thread may be why a process had to be ended.
            explained = left and status in ("none", -signal.SIGKILL, -signal.SIGTERM)
            if left is None or (status != 0 and not explained):
                when = "before its results" if left is None else "after its results"
                self.outcome.faults[f"the process {node.gateway.id} of pytest"] = f"exit status {status}, {when}"

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


def record(ending: float, arguments: list[str]) -> int:
    """Runs pytest in this process; the file that `_OUTCOME` names exists only if pytest has returned."""
    sys.path[0] = str(Path.cwd())  # as in `python -m pytest`; this file's folder is not a place to import from
    recorder = Recorder(ending)
    place = Path(os.environ.pop(_OUTCOME))
    outcome = recorder.outcome
    outcome.status = int(pytest.main(["-p", PLUGIN, *arguments], plugins=[recorder]))
    recorder.judge_workers()
    if outcome.cut:  # its tests are not to blame for what they have left
        outcome.status = int(pytest.ExitCode.TESTS_FAILED)
    elif (plugin := sys.modules.get(PLUGIN)) is not None:
        outcome.left += plugin.left
    put(place, json.dumps(asdict(outcome)))
    return outcome.status


def run(arguments: list[str], folder: Path, ending: float = 20.0, environ: Mapping[str, str] | None = None) -> Outcome:
    """Runs pytest in another process, and returns what happened; an internal error, if that process dies.

    `environ`: variables for that process, besides those of this one.
    """
    place = folder / "outcome.json"
    place.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if name not in _OF_WORKERS} | dict(environ or {})
    with Surroundings(ending) as surroundings:
        env |= {_OUTCOME: str(place), **surroundings.variables}
        command = [sys.executable, __file__, "--record", str(ending), *arguments]
        status = ended(subprocess.Popen(command, env=env), place, ending)
        if not place.exists():
            return Outcome(faults={ITSELF: f"it ended with exit status {status}, without its results"})
        outcome = Outcome(**json.loads(place.read_text()))
        left = {} if outcome.cut else surroundings.left()
    if status is None and not outcome.left:
        outcome.add_left(f"{ITSELF}, which a thread that is not a daemon kept from its end", [])
    if status not in (None, outcome.status):
        outcome.faults[ITSELF] = f"it ended with exit status {status}, after its results"
        outcome.status = int(pytest.ExitCode.INTERNAL_ERROR)
    unknown = [test for test in outcome.collected if test not in outcome.seconds]
    if unknown and outcome.status in RAN:
        outcome.faults[f"did not run: {len(unknown)} tests"] = f"the first is {unknown[0]}"
    for key, text in left.items():
        outcome.add_left(text, [test for test, keys in outcome.begun.items() if key in keys])
    for (text, test), count in Counter(tuple(one) for one in outcome.left).items():
        outcome.add_left(f"{text} of {test}" + (f", {count} times" if count > 1 else ""), [test])
    if outcome.faults and outcome.status == pytest.ExitCode.OK:
        outcome.status = int(pytest.ExitCode.TESTS_FAILED)
    return outcome


def ended(process: subprocess.Popen[bytes], place: Path, ending: float) -> int | None:
    """Returns the exit status of pytest, or None if it did not end within `ending` seconds after its results and was
    killed."""
    try:
        results = None
        while process.poll() is None and (results is None or time.monotonic() < results + ending * slack()):
            living(process.pid)
            if results is None and place.exists():
                results = time.monotonic()
            time.sleep(0.05)
        return process.poll()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def passes_alone(test: str, folder: Path, options: list[str], ending: float) -> bool:
    """Returns whether the test passes as the only one of a process; a test that is skipped or not found does not."""
    print(f"\nonce more, alone: {test}", flush=True)
    # The file of the first run, and not that of a folder with other settings, such as operator/backstay_cluster.
    here = ["-c", "pyproject.toml"] if Path("pyproject.toml").exists() else []
    # Without the programs that the first run compiled: a failure of compiling would pass with them.
    with tempfile.TemporaryDirectory(prefix="backstay-twice-") as store:
        outcome = run([*options, *here, "-n", "0", test], folder, ending, {STORE: store})
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
    again = first.status == pytest.ExitCode.TESTS_FAILED and (first.failed or first.faults) and not first.uncollected
    if not again or len(first.failed) > MOST_AGAIN:
        if again:
            print(f"\n{len(first.failed)} tests failed: none of more than {MOST_AGAIN} runs once more.")
        report.failed |= {**first.uncollected, **first.faults, **first.failed}
        report_failed("beside the tests", first.faults)
        return first.status
    twice = {test: why for test, why in first.failed.items() if not passes_alone(test, folder, list(options), ending)}
    flaky = {test: why for test, why in first.failed.items() if test not in twice}
    faults = {}
    for fault, why in first.faults.items():
        # A test that fails where it waits may leave things. Alone it has left nothing, or it had not passed.
        cause = next((test for test in first.excuses.get(fault, ()) if test in flaky), None)
        if cause is None:
            faults[fault] = why
        else:
            flaky[cause] += f"; {fault}"
    report.failed |= {**twice, **faults}
    report.flaky |= flaky
    if report.flaky:
        report_flaky(report.flaky)
    report_failed("failed twice", twice)
    report_failed("beside the tests", faults)
    return pytest.ExitCode.TESTS_FAILED if twice or faults or len(report.flaky) > MOST_FLAKY else pytest.ExitCode.OK


def report_failed(what: str, failed: dict[str, str]) -> None:
    """Prints what fails the run, if there is any."""
    if failed:
        print(f"{what}: {len(failed)}")
        for one, why in failed.items():
            print(f"  {one}\n    first failure: {why}")


def interrupted(*_: object) -> None:
    """SIGTERM, or a closed terminal, ends a run as Ctrl-C does: with all its processes. A second one, such as make
    sends, changes nothing."""
    for number in ENDS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        sys.exit(record(float(sys.argv[2]), sys.argv[3:]))
    for number in ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, interrupted)
    sys.exit(main(sys.argv[1:]))
