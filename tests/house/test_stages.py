"""The log of CI ends with a summary that names the cause of a failure (tests/stages.py)."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from between import LONG, put, until


@pytest.fixture
def stages(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program as a module, with its report in the test's folder."""
    spec = importlib.util.spec_from_file_location("stages_of_ci", root / "tests" / "stages.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, made)
    spec.loader.exec_module(made)
    monkeypatch.setattr(made, "REPORT", tmp_path / "tests.json")
    monkeypatch.chdir(root)  # the program changes the current folder
    return made


def report(stages: Any, **parts: Any) -> None:
    """Write the report of the tests."""
    content = {"passed": 5000, "skipped": 3, "flaky": {}, "failed": {}, "seconds": {}, **parts}
    put(stages.REPORT, json.dumps(content))


def ended(stages: Any, name: str, status: int, *, tests: bool = True, lines: int = 0) -> Any:
    """Returns a stage that has run."""
    stage = stages.Stage(name, [], tests=tests, seconds=61.4, status=status)
    stage.last.extend(f"line {number}" for number in range(lines))
    return stage


def test_the_summary_names_stages_slow_flaky_and_failed_tests(stages: Any) -> None:
    seconds = {f"tests/test_a.py::test_{number}": float(number) for number in range(100)}
    report(stages, seconds=seconds, flaky={"t::flaky": "it was late"}, failed={"t::bad": "worker-1 ended with 3\nno"})
    text = "\n".join(stages.summary([ended(stages, "lint", 0), ended(stages, "tests", 1)], "251"))
    assert "   251 s  tools\n    61 s  lint\n    61 s  tests  FAILED (1)\n" in text
    assert "  99.0 s  tests/test_a.py::test_99\n" in text
    assert "test_80" in text
    assert "test_79" not in text
    assert "flaky, each is a defect that the next change repairs: 1\n  t::flaky: it was late\n" in text
    assert "failed: 1\n  t::bad: worker-1 ended with 3 no\n" in text
    assert text.endswith("5000 passed, 3 skipped, 1 flaky, 1 failed")


def test_the_summary_never_has_more_than_fifty_lines(stages: Any) -> None:
    many = {f"tests/test_a.py::test_{number}": "x" * 1000 for number in range(100)}
    report(stages, flaky=many, failed=many, seconds=dict.fromkeys(many, 1.0))
    kinds = ("environment", "lint", "docs", "pure tests", "tests")
    done = [*(ended(stages, kind, 0) for kind in kinds), ended(stages, "lowest", 2, tests=False, lines=100)]
    lines = stages.summary(done, "1")
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 260
    assert "  and 92 more" in lines
    assert "  line 99" in lines


def test_a_stage_that_fails_shows_its_last_lines_and_ends_the_run(stages: Any, capfd: Any) -> None:
    code = "print('the cause'); print('x' * 100_000, flush=True); print('é', end=''); raise SystemExit(4)"
    stage = stages.Stage("lint", [sys.executable, "-c", code])
    stages.run(stage)
    assert stage.status == 4
    assert "the cause" in capfd.readouterr().out
    assert "  the cause" in stages.summary([stage])


def test_a_run_stops_at_the_first_stage_that_fails(
    stages: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    def writes(name: str) -> list[str]:
        return [sys.executable, "-c", f"open({str(tmp_path / name)!r}, 'w')"]

    fails = [sys.executable, "-c", "raise SystemExit(2)"]
    first, left_out = stages.Stage("first", writes("first")), stages.Stage("left out", writes("out"), skip="no need")
    made = [first, left_out, stages.Stage("fails", fails), stages.Stage("never", writes("never"))]
    monkeypatch.setattr(stages, "stages", lambda: made)
    assert stages.main() == 2
    assert {path.name for path in tmp_path.iterdir()} == {"first"}
    assert "left out  skipped: no need" in capfd.readouterr().out


@pytest.mark.parametrize("signals", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGINT,)])
def test_an_interrupt_ends_the_processes_of_the_stage_and_shows_the_summary(
    root: Path, tmp_path: Path, signals: tuple[signal.Signals, ...]
) -> None:
    """Also those that make waits for, and those that the interrupt of a terminal would not reach."""
    put(tmp_path / "Makefile", "slow:\n\t@trap '' INT; echo $$$$ > begun; mv begun pid; sleep 600\n")
    code = f"""
import sys; sys.path.insert(0, {str(root / "tests")!r})
import pathlib, stages
stages.REPORT = pathlib.Path({str(tmp_path / "tests.json")!r})
stages.stages = lambda: [stages.Stage("slow one", ["make", "-C", {str(tmp_path)!r}])]
sys.exit(stages.main())
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        shell = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        for one in signals:
            started.send_signal(one)
        output, _ = started.communicate(timeout=LONG)
    assert started.returncode == 130, output
    assert "slow one  FAILED (130)" in output
    assert "  interrupted" in output
    until(lambda: not alive(shell), "the end of make's child")


def alive(pid: int) -> bool:
    """Returns whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_lowest_versions_are_tested_when_their_lock_has_changed(
    stages: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    passed = tmp_path / "lowest.txt"
    monkeypatch.setattr(stages, "PASSED", passed)
    put(passed, "0" * 64)
    assert not stages.stages()[-1].skip
    put(passed, hashlib.sha256(stages.LOCK.read_bytes()).hexdigest() + "  requirements.lowest.lock\n")
    assert stages.stages()[-1].skip
    put(passed, f"# not passed: {hashlib.sha256(stages.LOCK.read_bytes()).hexdigest()}\n")
    assert not stages.stages()[-1].skip
    passed.unlink()
    assert not stages.stages()[-1].skip


def test_a_flaky_test_of_one_stage_does_not_hide_why_a_later_one_failed(
    stages: Any, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    def writes(flaky: dict[str, str], failed: dict[str, str], status: int, said: str) -> list[str]:
        content = {"passed": 1, "skipped": 0, "seconds": {}, "flaky": flaky, "failed": failed}
        put = f"open({str(stages.REPORT)!r}, 'w').write({json.dumps(content)!r})"
        return [sys.executable, "-c", f"print({said!r}); {put}; raise SystemExit({status})"]

    once = {"t::flaky": "late"}
    for failed, shown in (({}, True), ({"t::bad": "always"}, False)):
        made = [
            stages.Stage("pure", writes(once, {}, 0, "fine"), tests=True),
            stages.Stage("tests", writes(once, failed, 3, "killed"), tests=True),
        ]
        monkeypatch.setattr(stages, "stages", lambda made=made: made)
        assert stages.main() == 3
        text = capfd.readouterr().out
        assert ("the last lines of tests:\n  killed" in text) == shown
        assert "t::bad: always" in text or shown
