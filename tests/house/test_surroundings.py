"""The things that tests leave on the machine are found (tests/helpers/surroundings.py)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from surroundings import begun, descendants, key_of

IN = """
import os, subprocess, sys
from pathlib import Path

import surroundings

surroundings.other_runs = lambda: eval(sys.argv[2])
with surroundings.Surroundings(0.0, Path(sys.argv[1])) as made:
    Path(sys.argv[1], "backstay-test-it").touch()
    Path(sys.argv[1], "of-another").touch()
    print(sorted(made.left().values()))
"""


@pytest.mark.parametrize(
    ("others", "found"),
    [
        ("[]", "['the file {0}/backstay-test-it']\n"),
        ("['pytest']", "not judged: the file {0}/backstay-test-it. They may be of "),
    ],
)
def test_files_that_all_runs_share_are_judged_while_no_other_run_has_any(
    root: Path, tmp_path: Path, others: str, found: str
) -> None:
    (tmp_path / "backstay-test-before").mkdir()
    (own := tmp_path / "own").mkdir()
    paths = {"PYTHONPATH": f"{root / 'tests' / 'helpers'}:{root / 'operator'}", "TMPDIR": str(own)}
    command = [sys.executable, "-c", IN, str(tmp_path), others]
    output = subprocess.run(command, env=paths, capture_output=True, text=True, check=True).stdout
    assert output.startswith(found.format(tmp_path)), output


def test_processes_and_files_that_began_earlier_are_not_of_a_test(tmp_path: Path) -> None:

    (tmp_path / "file").touch()
    with subprocess.Popen(["sleep", "600"]) as process:
        try:
            key = key_of(process.pid, descendants(os.getpid())[process.pid])
            assert {key, str(tmp_path / "file")} <= set(begun(os.getpid(), tmp_path, time.time() - 60.0))
            assert not {key, str(tmp_path / "file")} & set(begun(os.getpid(), tmp_path, time.time() + 60.0))
        finally:
            process.kill()
