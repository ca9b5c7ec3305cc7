"""A test that failed runs once more, alone, and one that fails twice fails the run (tests/twice.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from between import put, slack
from tiers import STORE

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
        put(folder / "pytest.ini", "[pytest]\n")

    def run(self, tests: str, *arguments: str) -> tuple[int, str]:
        """Returns the exit status and the output of the program on a file with these tests."""
        put(self._folder / "test_it.py", ONCE + tests)
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


def test_tests_that_pass_the_second_time_are_listed_as_flaky_and_the_run_passes(suite: Suite) -> None:
    """An error in a fixture counts, and names of parameters reach the second run as they are."""
    tests = FLAKY.format(1) + "def test_good(): pass\n"
    tests += "@pytest.fixture\ndef it():\n    yield\n    fails_once('teardown')\n\ndef test_uses(it): pass\n"
    names = ["a::b[1] @x $X ü", "other"]
    tests += f"@pytest.mark.parametrize('n', {names})\ndef test_it(n): fails_once('x')\n"
    code, output = suite.run(tests, "-n", "0")
    assert code == 0, output
    end = output[output.rindex("flaky: 3, of at most 3") :]
    assert "test_it.py::test_flaky_1\n    first failure: AssertionError: the first time" in end
    assert "test_it.py::test_uses\n    first failure: teardown: AssertionError: the first time" in end
    assert f"test_it.py::test_it[{names[0].encode('unicode_escape').decode()}]\n" in end


def test_a_test_of_another_process_runs_once_more_too(suite: Suite) -> None:
    """It does not find the programs that the first run compiled: they could hide why it failed."""
    no_programs = f"; assert os.listdir(os.environ['{STORE}']) == []\ndef test_good(): pass\n"
    tests = FLAKY.format(1).rstrip() + no_programs
    code, output = suite.run(tests, "-n", "2")
    assert code == 0, output
    assert "test_it.py::test_flaky_1\n    first failure: AssertionError: the first time" in output


def test_the_second_run_has_the_settings_and_the_options_of_the_first_one(suite: Suite, tmp_path: Path) -> None:
    """A folder below may have settings for runs in it."""
    (tmp_path / "pytest.ini").unlink()
    strict = "[tool.pytest.ini_options]\naddopts = '--strict-markers'\n"
    put(tmp_path / "pyproject.toml", f"{strict}markers = ['here']\n")
    inner = tmp_path / "inner"
    inner.mkdir()
    put(inner / "pyproject.toml", strict)
    put(inner / "test_inner.py", f"{ONCE}\n@pytest.mark.here{FLAKY.format(1)}")
    warns = "def test_warns():\n    import warnings\n    warnings.warn('an old name')\n"
    code, output = suite.run(warns, "-W", "error", "-n", "0", "test_it.py", "inner")
    assert code == 1, output
    assert "inner/test_inner.py::test_flaky_1\n    first failure: AssertionError: the first time" in output
    assert "failed twice: 1\n  test_it.py::test_warns\n" in output


def test_a_run_without_a_failure_runs_no_test_again(suite: Suite) -> None:
    """A process that ends soon after the tests is not left behind."""
    tests = "import subprocess\n\ndef test_ends(): subprocess.run('sleep 0.5 &', shell=True, start_new_session=True)\n"
    code, output = suite.run(tests)
    assert code == 0, output
    assert "once more" not in output
    assert "flaky" not in output


def test_a_test_that_fails_twice_or_leaves_something_behind_each_time_fails_the_run(suite: Suite) -> None:
    tests = FLAKY.format(1) + "def test_bad(): raise ValueError('always')\n"
    tests += "import tempfile\n\ndef test_leaves():\n    tempfile.mkdtemp('forgotten')\n    fails_once('x')\n"
    code, output = suite.run(tests)
    assert code == 1, output
    assert "failed twice: 2\n  test_it.py::test_bad\n    first failure: ValueError: always" in output
    assert "  test_it.py::test_leaves\n    first failure: AssertionError: the first time" in output
    assert "beside the tests: 1\n  left behind by a test: the file " in output
    assert "flaky: 1" in output


def test_more_than_three_flaky_tests_fail_the_run_counted_over_all_with_one_record(suite: Suite) -> None:
    tests = "".join(FLAKY.format(number) for number in range(4))
    arguments = ("--report", suite.record())
    assert suite.run(tests, *arguments, "-k", "flaky_0 or flaky_1")[0] == 0
    code, output = suite.run(tests, *arguments, "-k", "flaky_2 or flaky_3")
    assert code == 1
    assert "flaky: 4" in output


@pytest.mark.parametrize(
    ("tests", "status", "reason"),
    [
        ("import nothing_of_this_name\n", 2, "No module named 'nothing_of_this_name'"),  # is not collected
        ("def test_stops(): pytest.exit('enough', 7)\n", 7, ""),
        ("", 5, ""),  # no tests
        # The process of pytest itself.
        ("def test_dies(): os._exit(0)\n", 3, "it ended with exit status 0, without its results"),
        ("def test_skips_later():\n    fails_once('x') if not os.path.exists('x') else pytest.skip('later')\n", 1, ""),
        ("@pytest.mark.parametrize('n', range(21))\ndef test_many(n): fails_once(f'many-{n}')\n", 1, ""),
    ],
)
def test_a_run_that_stops_for_another_reason_fails_with_its_status(
    suite: Suite, tests: str, status: int, reason: str
) -> None:
    code, output = suite.run(tests, "--report", suite.record(), "-n", "0")
    assert code == status, output
    assert "flaky: 1" not in output
    assert reason in str(json.loads(Path(suite.record()).read_text())["failed"])


# A process has none of the tests' variables, and no parent that lives: it is known by what it descends from.
LEAVES = {
    "tempfile.mkdtemp(prefix='forgotten-')": "the file forgotten-",
    "subprocess.Popen(['sleep', '30'], start_new_session=True)": "the process sleep 30",
    "subprocess.run('/bin/sleep 31 & ', shell=True, env={}, start_new_session=True)": "the process /bin/sleep 31",
    "threading.Thread(target=time.sleep, args=(9,), daemon=True, name='it').start()": "the thread it of test_it.py::",
    "kept.append(socket.create_server(('127.0.0.1', 0)))": "the listening socket ('127.0.0.1', ",
}
IMPORTS = "import left_in_process, socket, subprocess, tempfile, threading, time\n\nkept = []\n"
SOON = "left_in_process.ENDING = 0.0\n\n"  # to wait for what a test never ends


ALL_LEAVE = "    " + "\n    ".join(LEAVES) + "\n"


@pytest.mark.parametrize("processes", ["0", "1"])
def test_what_a_test_leaves_behind_fails_the_run(suite: Suite, processes: str) -> None:
    """A second run of the test would not help: it is not tried."""
    tests = f"{IMPORTS}{SOON}def test_leaves():\n{ALL_LEAVE}"
    status, output = suite.run(tests, "--ending", "0.2", "-n", processes)
    assert status == 1, output
    for left in LEAVES.values():
        assert f"left behind by a test: {left}" in output
    assert "once more" not in output


def test_what_a_flaky_test_leaves_behind_belongs_to_its_failure(suite: Suite) -> None:
    """A limit of time interrupts a test anywhere. Alone it leaves nothing, or that run fails."""
    begins = ALL_LEAVE.replace("    ", "        ")
    tests = f"{IMPORTS}{SOON}def test_leaves():\n    if not os.path.exists('x'):\n{begins}    fails_once('x')\n"
    status, output = suite.run(tests, "--ending", "0.2")
    assert status == 0, output
    assert "flaky: 1" in output
    (line,) = [line for line in output.splitlines() if "first failure: AssertionError: the first time; left" in line]
    for left in LEAVES.values():
        assert f"; left behind by a test: {left}" in line


def test_what_another_test_leaves_behind_is_not_excused_by_a_flaky_one(suite: Suite) -> None:
    tests = f"{IMPORTS}{SOON}def test_leaves():\n{ALL_LEAVE}\ndef test_rests(): time.sleep(0.2)\n{FLAKY.format(1)}"
    status, output = suite.run(tests, "--ending", "0.2", "-n", "0")
    assert status == 1, output
    end = output[output.rindex(f"beside the tests: {len(LEAVES)}\n") :]
    for left in LEAVES.values():
        assert f"  left behind by a test: {left}" in end
    assert "first failure: AssertionError: the first time\n" in output


def test_what_a_test_leaves_behind_as_its_process_dies_belongs_to_its_failure(suite: Suite) -> None:
    tests = f"{IMPORTS}def test_dies():\n    if not os.path.exists('x'):\n        open('x', 'w').close()\n"
    tests += "        subprocess.Popen(['sleep', '30'], env={}, start_new_session=True)\n        os._exit(3)\n"
    status, output = suite.run(tests, "--ending", "0.2", "-n", "1")
    assert status == 0, output
    assert "test_it.py::test_dies" in output[output.rindex("flaky: 1") :]
    assert "crashed while running 'test_it.py::test_dies'; left behind by a test: the process sleep 30" in output


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("def pytest_sessionfinish(): os._exit(9)", "exit status 9, before its results"),
        ("import atexit\n    atexit.register(os._exit, 5)", "exit status 5, after its results"),
    ],
)
def test_a_process_that_dies_after_its_tests_fails_the_run(suite: Suite, tmp_path: Path, end: str, reason: str) -> None:
    put(tmp_path / "conftest.py", f"import os\n\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    {end}\n")
    status, output = suite.run("def test_good(): pass\n", "-n", "1", "--max-worker-restart", "0")
    assert status == 1, output
    assert f"the process gw0 of pytest\n    first failure: {reason}" in output
    assert "once more" not in output


def test_a_process_has_time_for_its_last_work(suite: Suite, tmp_path: Path) -> None:
    """execnet interrupts a process that works 5 s after the request to end, and later kills it."""
    slow = "def pytest_unconfigure():\n        time.sleep(6)\n        open('ended', 'w').close()"
    put(tmp_path / "conftest.py", f"import os, time\n\nif 'PYTEST_XDIST_WORKER' in os.environ:\n    {slow}\n")
    status, output = suite.run("def test_good(): pass\n", "-n", "1")
    assert status == 0, output
    assert (tmp_path / "ended").exists()


def test_threads_of_libraries_and_sockets_that_do_not_listen_are_not_left_behind(suite: Suite) -> None:
    tests = "import left_in_process, socket, threading\n\nleft_in_process.ENDING = 0.0\nended = threading.Event()\n"
    tests += "imported = threading.Thread(target=ended.wait, daemon=True)\nimported.start()\n"
    tests += "kept = []\ndef test_keeps(): kept.extend(socket.socketpair())\n"
    status, output = suite.run(tests, "-n", "0")
    assert status == 0, output


def test_a_run_ends_soon_after_many_failures(suite: Suite) -> None:
    """Each failure has its line when it happens, and what a process has left as it was killed adds none."""
    tests = "import pytest, subprocess, time\n\n@pytest.mark.parametrize('n', range(90))\ndef test_it(n):\n"
    tests += "    if os.environ['PYTEST_XDIST_WORKER'] == 'gw0':\n"
    tests += "        subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n        time.sleep(600)\n"
    tests += "    raise ValueError(f'number {n}')\n"
    status, output = suite.run(tests, "--report", suite.record(), "-n", "2")
    assert status == 1, output
    (others, _), *failed = json.loads(Path(suite.record()).read_text())["failed"].items()
    assert len(failed) == 21
    assert all(f"\nfailed: {test}: {reason}\n" in output for test, reason in failed)
    assert re.fullmatch("did not run: 6[89] tests", others)
    assert "once more, alone" not in output


def test_an_interrupt_ends_all_processes(suite: Suite, tmp_path: Path) -> None:
    tests = "import signal, subprocess, time\n\ndef test_waits():\n"
    tests += "    it = subprocess.Popen(['sleep', '600'], env={}, start_new_session=True)\n"
    tests += "    pathlib.Path('begun').write_text(str(it.pid))\n    os.rename('begun', 'pid')\n"
    tests += "    os.kill(os.getppid(), signal.SIGTERM)\n    time.sleep(600)\n"
    status, output = suite.run("def test_bad(): raise ValueError('known')\n" + tests, "-n", "0")
    assert status != 0, output
    assert "\nfailed: test_it.py::test_bad: ValueError: known\n" in output
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_run_in_which_tests_did_not_run_fails(suite: Suite) -> None:
    """The test that stopped the run passes the second time, and the others are still unknown."""
    status, output = suite.run(FLAKY.format(1) + "def test_unknown(): assert 0\n", "-x", "-n", "0")
    assert status == 1, output
    assert "did not run: 1 tests\n    first failure: the first is test_it.py::test_unknown" in output


def test_a_thread_that_keeps_pytest_from_its_end_does_not_stop_the_run(suite: Suite) -> None:
    """Also one that an import began, which is not of a test."""
    tests = "import threading, time\n\nthreading.Thread(target=time.sleep, args=(90,)).start()\ndef test_it(): pass\n"
    status, output = suite.run(tests, "--ending", "0.5", "-n", "0")
    assert status == 1, output
    assert "left behind by a test: pytest itself, which a thread that is not a daemon kept from its end" in output


def test_a_deleted_temporary_folder_is_named(suite: Suite) -> None:
    tests = "import shutil, tempfile\n\ndef test_it(): shutil.rmtree(tempfile.gettempdir())\n"
    status, output = suite.run(tests, "-n", "0")
    assert status == 1, output
    assert "no temporary folder: a test has deleted it" in output
