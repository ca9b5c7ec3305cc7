"""A test writes files that other processes read meanwhile by `between.put`, so that these find whole files.

A script that tests start cannot import it: it writes beside the file and renames.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from between import put

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tests", ROOT / "operator" / "backstay_cluster" / "tests")
FILES = sorted(path for folder in FOLDERS for path in folder.rglob("*.py"))
WRITES = {"write_text", "write_bytes"}
STARTS = {"Popen", "start", "start_all", "server", "worker", "submit", "begin", "forked", "pod"}
"""Names of calls after which another process may run."""

SCRIPT = re.compile(r"(?<!\.part\"\))\.write_(text|bytes)\(")
"""In a script that a test starts: a write to a file without the suffix `.part`."""


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def name_of(call: ast.Call) -> str:
    function = call.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def late_writes(source: str) -> list[int]:
    """Returns the lines of functions that write a file after they have started a process."""
    found = set()
    for function in functions(ast.parse(source)):
        calls = [node for node in ast.walk(function) if isinstance(node, ast.Call)]
        began = min((call.lineno for call in calls if name_of(call) in STARTS), default=None)
        if began is not None:
            found |= {call.lineno for call in calls if name_of(call) in WRITES and call.lineno > began}
    return sorted(found)


def writes_in_scripts(source: str) -> list[int]:
    """Returns the lines of texts of several lines, which are scripts, that write a file in place."""
    texts = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    return [
        text.lineno
        for text in texts
        if isinstance(text.value, str) and "\nimport " in text.value and SCRIPT.search(text.value)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_that_processes_share_are_written_atomically(path: Path) -> None:
    source = path.read_text()
    assert not late_writes(source), "use between.put"
    if path != Path(__file__):
        assert not writes_in_scripts(source), "write to a file with the suffix .part, and rename it"
    if path.parent.name == "scripts" or path.name == "tiny.py":
        assert not SCRIPT.search(source), "write to a file with the suffix .part, and rename it"


def test_a_write_after_a_start_is_found() -> None:
    early = "def test(path, job):\n    path.write_text('1')\n    job.start_all()\n"
    assert not late_writes(early)
    assert late_writes(early + "    path.write_text('2')\n") == [4]
    assert writes_in_scripts("x = '''\nimport os\n(place / 'at').write_text('1')\n'''\n")
    assert not writes_in_scripts("x = '''\nimport os\n(place / \"at.part\").write_text('1')\n'''\n")


def test_a_reader_of_a_put_file_finds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, "old")
    with path.open() as before:
        put(path, "new and longer")
        assert before.read() == "old"
    put(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
