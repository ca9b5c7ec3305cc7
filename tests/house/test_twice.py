"""A test that failed runs once more, alone, and one that fails twice fails the run (tests/twice.py)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from between import slack

pytestmark = pytest.mark.timeout(60)  # each starts pytest a few times

ONCE = """
import os, pathlib, pytest

def fails_once(name):
    mark = pathlib.Path(__file__).with_name(name)
    first = not mark.exists()
    mark.touch()
    assert not first, "the first time"
"""
FLAKY = "\ndef test_flaky_{0}(): fails_once('flaky-{0}')\n"


@pytest.fixture
def suite(root: Path, tmp_path: Path) -> Iterator[Suite]:
    suite = Suite(root / "tests" / "twice.py", tmp_path)
    yield suite
    suite.end()


class Suite:
    """A folder of tests, run by tests/twice.py."""

    def __init__(self, program: Path, folder: Path) -> None:
        self._program = program
        self._folder = folder
        self._group: int | None = None
        (folder / "pytest.ini").write_text("[pytest]\n")

    def run(self, tests: str, *arguments: str) -> tuple[int, str]:
        """Returns the exit status and the output of the program on a file with these tests."""
        (self._folder / "test_it.py").write_text(ONCE + tests)
        temporary = self._folder / "temporary"
        temporary.mkdir(exist_ok=True)
        env = {
            **os.environ,
            # The other plug-ins are not needed, and take most of the time of a start.
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_ADDOPTS": "-p xdist",
            "TMPDIR": str(temporary),  # the files of a killed run go with this folder
            "PYTHONFAULTHANDLER": "1",
        }
        command = [sys.executable, str(self._program), *arguments]
        with (self._folder / "output").open("w+") as output:
            started = subprocess.Popen(
                command, cwd=self._folder, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            self._group = started.pid
            try:
                status = started.wait(50 * slack())
            except subprocess.TimeoutExpired:
                os.killpg(self._group, signal.SIGABRT)  # each process prints where its threads are
                started.wait()
                output.seek(0)
                pytest.fail(f"{command} does not end:\n{output.read()}")
            output.seek(0)
            return status, output.read()

    def end(self) -> None:
        """Kill the processes that a test has left, because it failed."""
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)

    def record(self) -> str:
        return str(self._folder / "records" / "report.json")


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_test_that_passes_the_second_time_is_listed_as_flaky_and_the_run_passes(suite: Suite, processes: str) -> None:
    code, output = suite.run(FLAKY.format(1) + "def test_good(): pass\n", "-n", processes)
    assert code == 0, output
    end = output[output.rindex("flaky: 1, of at most 3") :]
    assert "test_it.py::test_flaky_1\n    first failure: AssertionError: the first time" in end


def test_the_second_run_has_the_settings_of_the_first_one(suite: Suite, tmp_path: Path) -> None:
    """A folder below may have settings for runs in it."""
    (tmp_path / "pytest.ini").unlink()
    strict = "[tool.pytest.ini_options]\naddopts = '--strict-markers'\n"
    (tmp_path / "pyproject.toml").write_text(f"{strict}markers = ['here']\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "pyproject.toml").write_text(strict)
    (inner / "test_inner.py").write_text(f"{ONCE}\n@pytest.mark.here{FLAKY.format(1)}")
    code, output = suite.run("def test_good(): pass\n")
    assert code == 0, output
    assert "inner/test_inner.py::test_flaky_1\n    first failure: AssertionError: the first time" in output


def test_a_run_without_a_failure_runs_no_test_again(suite: Suite) -> None:
    code, output = suite.run("def test_good(): pass\n")
    assert code == 0
    assert "once more" not in output
    assert "flaky" not in output


def test_a_test_that_fails_twice_fails_the_run(suite: Suite) -> None:
    code, output = suite.run(FLAKY.format(1) + "def test_bad(): raise ValueError('always')\n")
    assert code == 1
    assert "failed twice: 1\n  test_it.py::test_bad\n    first failure: ValueError: always" in output
    assert "flaky: 1" in output


def test_more_than_three_flaky_tests_fail_the_run(suite: Suite) -> None:
    code, output = suite.run("".join(FLAKY.format(number) for number in range(4)))
    assert code == 1
    assert "flaky: 4" in output


def test_runs_with_one_record_count_their_flaky_tests_together(suite: Suite) -> None:
    tests = "".join(FLAKY.format(number) for number in range(5))
    arguments = ("--report", suite.record())
    assert suite.run(tests, *arguments, "-k", "flaky_0 or flaky_1")[0] == 0
    assert suite.run(tests, *arguments, "-k", "flaky_2")[0] == 0
    code, output = suite.run(tests, *arguments, "-k", "flaky_3 or flaky_4")
    assert code == 1
    assert "flaky: 5" in output


def test_a_process_that_dies_in_a_test_counts_as_a_failure_of_the_test(suite: Suite) -> None:
    tests = "def test_dies():\n    if not os.path.exists('died'): open('died', 'w').close(); os._exit(3)\n"
    code, output = suite.run(tests, "-n", "1")
    assert code == 0, output
    assert "test_it.py::test_dies" in output[output.rindex("flaky: 1") :]


def test_an_error_in_a_fixture_runs_once_more_too(suite: Suite) -> None:
    tests = "@pytest.fixture\ndef it():\n    yield\n    fails_once('teardown')\n\ndef test_uses(it): pass\n"
    code, output = suite.run(tests)
    assert code == 0, output
    assert "first failure: teardown: AssertionError: the first time" in output


@pytest.mark.parametrize(
    ("tests", "status"),
    [
        ("import nothing_of_this_name\n", 2),  # is not collected
        ("def test_stops(): pytest.exit('enough', 7)\n", 7),
        ("", 5),  # no tests
        ("def test_dies(): os._exit(0)\n", 3),  # the process of pytest itself
        ("def test_skips_later():\n    fails_once('x') if not os.path.exists('x') else pytest.skip('later')\n", 1),
        ("@pytest.mark.parametrize('n', range(21))\ndef test_many(n): fails_once(f'many-{n}')\n", 1),
    ],
)
def test_a_run_that_stops_for_another_reason_fails_with_its_status(suite: Suite, tests: str, status: int) -> None:
    code, output = suite.run(tests)
    assert code == status, output
    assert "flaky: 1" not in output


def test_names_of_parameters_reach_the_second_run_as_they_are(suite: Suite) -> None:
    tests = "@pytest.mark.parametrize('n', ['a::b', '[1]', 'a b', '@x', '$X', 'ü'])\ndef test_it(n): fails_once('x')\n"
    code, output = suite.run(tests)
    assert code == 0, output
    assert "test_it[a::b]" in output[output.rindex("flaky: 1") :]


LEAVES = {
    "tempfile.mkdtemp(prefix='forgotten-')": "the file forgotten-",
    "subprocess.Popen(['sleep', '30'], start_new_session=True)": "sleep 30",
}


@pytest.mark.parametrize("code", LEAVES)
def test_what_a_test_leaves_behind_fails_the_run(suite: Suite, code: str) -> None:
    """A second run of the test would not help: it is not tried."""
    tests = f"import subprocess, tempfile\n\ndef test_leaves(): {code}\n"
    status, output = suite.run(tests, "--ending", "0.2")
    assert status == 1, output
    assert f"left behind by a test: {'the process ' if 'sleep' in code else ''}" in output
    assert LEAVES[code] in output
    assert "once more" not in output


def test_what_a_flaky_test_leaves_behind_belongs_to_its_failure(suite: Suite) -> None:
    """A limit of time interrupts a test anywhere. Alone it leaves nothing, or that run fails."""
    tests = "import tempfile\n\ndef test_leaves():\n    if not os.path.exists('x'): tempfile.mkdtemp('forgotten')\n"
    status, output = suite.run(tests + "    fails_once('x')\n")
    assert status == 0, output
    assert "flaky: 1" in output
    assert "first failure: AssertionError: the first time; left behind by a test: the file" in output


def test_what_a_test_leaves_behind_each_time_fails_the_run(suite: Suite) -> None:
    tests = "import tempfile\n\ndef test_leaves():\n    tempfile.mkdtemp('forgotten')\n    fails_once('x')\n"
    status, output = suite.run(tests)
    assert status == 1, output
    assert "failed twice: 2" in output


def test_a_process_that_ends_soon_after_the_tests_is_not_left_behind(suite: Suite) -> None:
    tests = "import subprocess\n\ndef test_ends(): subprocess.Popen(['sleep', '0.5'], start_new_session=True)\n"
    status, output = suite.run(tests)
    assert status == 0, output


def test_a_run_in_which_tests_did_not_run_fails(suite: Suite) -> None:
    """The test that stopped the run passes the second time, and the others are still unknown."""
    status, output = suite.run(FLAKY.format(1) + "def test_unknown(): assert 0\n", "-x", "-n", "0")
    assert status == 1, output
    assert "did not run: 1 tests\n    first failure: the first is test_it.py::test_unknown" in output


def test_the_second_run_has_the_options_of_the_first(suite: Suite) -> None:
    tests = "def test_warns():\n    import warnings\n    warnings.warn('an old name')\n"
    status, output = suite.run(tests, "-W", "error", "-n", "0", "test_it.py")
    assert status == 1, output
    assert "failed twice: 1" in output


def test_a_thread_that_keeps_pytest_from_its_end_does_not_stop_the_run(suite: Suite) -> None:
    tests = "import threading, time\n\ndef test_it(): threading.Thread(target=time.sleep, args=(90,)).start()\n"
    status, output = suite.run(tests, "--ending", "0.5", "-n", "0")
    assert status == 1, output
    assert "left behind by a test: pytest itself, which a thread that is not a daemon kept from its end" in output


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        ("import nothing_of_this_name\n", "No module named 'nothing_of_this_name'"),
        ("def test_dies(): os.kill(os.getpid(), 9)\n", "it ended with exit status -9, without its results"),
    ],
)
def test_the_report_has_the_reason_of_a_run_that_did_not_end(suite: Suite, tests: str, reason: str) -> None:
    suite.run(tests, "--report", suite.record(), "-n", "0")
    assert reason in str(json.loads(Path(suite.record()).read_text())["failed"])


def test_a_deleted_temporary_folder_is_named(suite: Suite) -> None:
    tests = "import shutil, tempfile\n\ndef test_it(): shutil.rmtree(tempfile.gettempdir())\n"
    status, output = suite.run(tests, "-n", "0")
    assert status == 1, output
    assert "no temporary folder: a test has deleted it" in output
