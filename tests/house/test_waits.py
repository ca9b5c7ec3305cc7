"""No wait of a test has a short limit: its test ends it, later on a busy machine (`limits.slack`)."""

from __future__ import annotations

import ast
from pathlib import Path

from between import LONG

ROOT = Path(__file__).parents[2]
FOLDERS = (ROOT / "tests", ROOT / "operator" / "backstay_cluster" / "tests")
WAITS = {"wait", "join", "result", "communicate"}
SHORT = 1.0
"""Up to so many seconds, the end of the wait is not a failure: the caller looks again."""


def limits(source: str) -> list[int]:
    """Returns the lines of calls with a limit that is written as a number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        given = [keyword.value for keyword in node.keywords if keyword.arg == "timeout"]
        given += node.args[:1] if name in WAITS else []
        numbers = [one.value for one in given if isinstance(one, ast.Constant) and type(one.value) in (int, float)]
        found += [node.lineno for number in numbers if isinstance(number, int | float) and SHORT < number < LONG]
    return found


def test_no_wait_has_a_short_limit() -> None:
    paths = [path for folder in FOLDERS for path in folder.rglob("*.py")]
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in limits(path.read_text())]
    assert not found, "write between.LONG, or a number times between.slack()"


def test_a_short_limit_is_found() -> None:
    assert limits("event.wait(30)\nrun(words, timeout=5)\nfuture.result(2.5)\n") == [1, 2, 3]
    assert not limits("event.wait(0.1)\nrun(words, timeout=LONG)\nprocess.wait(3 * slack())\n', '.join(words)\n")
