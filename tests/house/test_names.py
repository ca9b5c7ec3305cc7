"""Names of tests are the same in all processes that collect them, or pytest-xdist runs none.

A value that is made while a file is imported can be a part of a name. Only the modules that give another value at
another time or in another process are searched for, and only in the files of tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import module_of

ROOT = Path(__file__).parents[2]
CHANGING = {"gzip", "os", "random", "secrets", "socket", "tempfile", "threading", "time", "uuid"}
CHANGING_NAMES = {"hash", "id"}
# All processes of a run get the same values from these.
STEADY = {"os.environ.get", "os.getenv", "os.fspath", "os.cpu_count"}


def at_import(tree: ast.Module) -> Iterator[ast.AST]:
    """Yields the nodes that run when the file is imported: decorators and default values are among them, bodies are
    not."""
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += [*node.decorator_list, node.args]
        elif isinstance(node, ast.Lambda):
            waiting.append(node.args)
        else:
            yield node
            waiting += ast.iter_child_nodes(node)


def changing_values(module: ast.Module) -> list[int]:
    """Returns the lines with a call, at import, whose result differs between two processes."""
    found = []
    for node in at_import(module):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        names = called.split(".")
        steady = called in STEADY or names[:2] == ["os", "path"] or any(word.arg == "mtime" for word in node.keywords)
        clock = names[0] in {"date", "datetime"} and names[-1] in {"now", "today", "utcnow"}
        if clock or called in CHANGING_NAMES or (len(names) > 1 and names[0] in CHANGING and not steady):
            found.append(node.lineno)
    return sorted(found)


def test_no_name_of_a_test_depends_on_the_time_or_the_process() -> None:
    folders = (ROOT / "tests", ROOT / "operator" / "backstay_cluster" / "tests")
    files = [path for folder in folders for path in folder.rglob("test_*.py")]
    found = {str(path.relative_to(ROOT)): changing_values(module_of(path)) for path in files}
    assert {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "value",
    [
        'gzip.compress(b"x")',
        "time.time()",
        "uuid.uuid4().hex",
        "datetime.datetime.now()",
        "datetime.now(UTC)",
        "os.getpid()",
        "hash('x')",
    ],
)
def test_a_value_that_changes_is_found_in_decorators_defaults_and_constants(value: str) -> None:
    assert changing_values(ast.parse(f'@pytest.mark.parametrize("x", [{value}])\ndef test_it(x): pass\n')) == [1]
    assert changing_values(ast.parse(f"X = 1\nY = [{value}]\n")) == [2]
    assert changing_values(ast.parse(f"def test_it(x={value}): pass\n")) == [1]
    assert changing_values(ast.parse(f"class T:\n    x = {value}\n")) == [2]
    assert changing_values(ast.parse(f"def test_it():\n    x = {value}\n")) == []
