"""The output of worker 0's script reaches the terminal, once, and without control characters for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cli.script_output import ScriptOutput
from backstay_spec import contract

TRACEBACK = b"Traceback (most recent call last):\n  File 'train.py'\nKeyError: 'x'\n"


def pod(incarnation: int = 1, role: str = contract.ROLE_WORKER, index: int = 0) -> dict[str, Any]:
    labels = {
        contract.LABEL_ROLE: role,
        contract.LABEL_INDEX: str(index),
        contract.LABEL_INCARNATION: str(incarnation),
    }
    return {"metadata": {"name": f"a-{role}-{index}-{incarnation}", "namespace": "default", "labels": labels}}


def write(logs: Path, of: dict[str, Any], data: bytes) -> None:
    log = logs / "default" / of["metadata"]["name"] / "trainer.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.write(data)


def test_the_scripts_lines_are_shown_and_backstays_and_those_of_libraries_are_not(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    others = [pod(role=contract.ROLE_SERVER), pod(index=1)]
    for other in others:
        write(tmp_path, other, b"not me\n")
    write(tmp_path, pod(), b"12:00:01 worker-0: step 3/10\nW1122 04:58:00.62 18599 x.cc:1403] y\nhello\nhalf a l")
    assert output.new_lines([*others, pod()]) == ["hello"]
    write(tmp_path, pod(), b"ine\n10 %\r50 %\r100 %\r\n\x1b[31mred\xff\n12:00:01 worker-1: mine\n")
    assert output.new_lines([pod()]) == ["half a line", "100 %", "\\x1b[31mred\\xff", "12:00:01 worker-1: mine"]
    write(tmp_path, pod(), b"the end")
    assert output.new_lines([]) == []
    assert output.end(failed=False) == ["the end"]
    assert output.end(failed=False) == []


def test_how_the_parameters_began_is_shown_with_its_first_line(tmp_path: Path) -> None:
    """The lines that follow it have no time, and were shown without it."""
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), b"12:00:01 worker-0: start_from: 1 of 2 frozen parameters come from b\n  missing (1): w\n")
    assert output.new_lines([pod()]) == ["start_from: 1 of 2 frozen parameters come from b", "  missing (1): w"]


def test_a_line_of_the_script_that_looks_like_one_of_backstay_is_not_altered(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), b"see 12:00:01 worker-0: start_from: b\n")
    assert output.new_lines([pod()]) == ["see 12:00:01 worker-0: start_from: b"]


def test_where_the_parameters_come_from_is_shown_after_a_traceback_that_the_script_survived(tmp_path: Path) -> None:
    """It belonged to the traceback, which is not shown if the job fails later."""
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), TRACEBACK + b"12:00:01 worker-0: start_from: b\n" + TRACEBACK)
    assert output.new_lines([pod()]) == [*TRACEBACK.decode().splitlines(), "start_from: b"]
    assert output.end(failed=True) == []


def test_only_the_report_prints_the_traceback_of_a_failed_job(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), b"hello\n" + TRACEBACK)
    assert output.new_lines([pod()]) == ["hello"]
    assert output.end(failed=True) == []


def test_the_note_before_a_traceback_belongs_to_it(tmp_path: Path) -> None:
    note = b"(the traceback is shown without the frames of Backstay and JAX: 9)\n"
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), b"hello\n" + note + TRACEBACK)
    assert output.new_lines([pod()]) == ["hello"]
    assert output.end(failed=True) == []


def test_before_the_first_update_the_traceback_of_a_replaced_pod_waits_for_the_jobs_end(tmp_path: Path) -> None:
    def output_of_two_pods() -> tuple[ScriptOutput, list[str]]:
        output = ScriptOutput(tmp_path)
        return output, [line for n in (1, 2) for line in output.new_lines([pod(n)], updated=False)]

    write(tmp_path, pod(1), b"hello\n" + TRACEBACK)
    write(tmp_path, pod(2), b"12:00:01 worker-0: starting\nagain\n")
    failed, shown = output_of_two_pods()
    assert shown + failed.end(failed=True) == ["hello", "again"]
    trained, _ = output_of_two_pods()
    assert trained.new_lines([pod(2)], updated=True) == TRACEBACK.decode().splitlines()
    stopped, _ = output_of_two_pods()
    assert stopped.end(failed=False) == TRACEBACK.decode().splitlines()


def test_the_same_traceback_of_replacements_is_shown_once(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    shown: list[str] = []
    for incarnation in (1, 2, 3):
        write(tmp_path, pod(incarnation), TRACEBACK)
        shown += output.new_lines([pod(incarnation)])
    shown += output.end(failed=False)
    assert shown == TRACEBACK.decode().splitlines()


def test_a_traceback_that_the_script_survived_is_shown(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), TRACEBACK + b"12:00:01 worker-0: step 4/10\nmore\n")
    assert output.new_lines([pod()]) == [*TRACEBACK.decode().splitlines(), "more"]


def test_a_flood_is_cut_and_states_where_the_rest_is(tmp_path: Path) -> None:
    output = ScriptOutput(tmp_path)
    write(tmp_path, pod(), b"".join(b"%d\n" % i for i in range(1000)))
    lines = output.new_lines([pod()])
    assert len(lines) == 101
    assert "900 lines are left out" in lines[0]
    assert "trainer.log" in lines[0]
    assert lines[-1] == "999"


@given(st.lists(st.binary(max_size=60), max_size=8))
def test_no_output_is_shown_twice_or_harms_the_terminal(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[bytes]
) -> None:
    logs = tmp_path_factory.mktemp("logs")
    output = ScriptOutput(logs)
    lines: list[str] = []
    for piece in pieces:
        write(logs, pod(), piece)
        lines += output.new_lines([pod()])
    lines += output.end(failed=False)
    assert all(c.isprintable() or c == "\t" for line in lines for c in line)
    whole = ScriptOutput(logs)
    assert lines == whole.new_lines([pod()]) + whole.end(failed=False)
