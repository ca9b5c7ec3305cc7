"""No wait of a test has a short limit: its test ends it, later on a busy machine (`limits.slack`)."""

from __future__ import annotations

import ast
import io
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import between
import pytest
from between import LONG, read_until
from sources import nodes_in, nodes_of

ROOT = Path(__file__).parents[2]
TESTS = (ROOT / "tests", ROOT / "operator" / "backstay_cluster" / "tests")
FOLDERS = (*TESTS, ROOT / "images" / "trainer" / "backstay" / "testing")
WAITS = {
    "wait": 0,
    "join": 0,
    "result": 0,
    "communicate": 0,
    "settimeout": 0,
    "asyncio.timeout": 0,
    "ClientTimeout": 0,
    "wait_for": 1,
    "create_connection": 1,
    "select": 3,
}
"""The place of the limit among the arguments of each call that waits."""

CLOCKS = ("monotonic()", "perf_counter()")
SHORT = 1.0
"""Up to so many seconds, the end of the wait is not a failure: the caller looks again."""


def name_of(called: ast.expr) -> tuple[str, str]:
    """Returns the last name of what is called, alone and with the name before it."""
    match called:
        case ast.Attribute(value=ast.Name(before), attr=name):
            return name, f"{before}.{name}"
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name, name
    return "", ""


def given(node: ast.AST) -> Iterator[ast.expr]:
    """Yields the arguments that limit a wait, and what is added to the time or compared with it."""
    match node:
        case ast.Call():
            name, longer = name_of(node.func)
            place = WAITS.get(longer, WAITS.get(name, len(node.args)))
            counts = isinstance(node.args[0], ast.Constant) if place and node.args else False  # of events of a kind
            yield from [] if counts else node.args[place : place + 1]
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "timeout")
        case ast.BinOp(op=ast.Add()) if ast.unparse(node.left).endswith(CLOCKS):
            yield node.right
        case ast.Compare() if any(clock in ast.unparse(node) for clock in CLOCKS):
            yield from node.comparators
            yield from (one.right for one in node.comparators if isinstance(one, ast.BinOp))


def constants(tree: ast.AST) -> dict[str, ast.expr]:
    """Returns the values of the module's names, each of one assignment."""
    found = {}
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            targets, values = (
                (target.elts, node.value.elts)
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                else ([target], [node.value])
            )
            found |= {one.id: value for one, value in zip(targets, values, strict=False) if isinstance(one, ast.Name)}
    return found


def limits(nodes: Sequence[ast.AST]) -> list[int]:
    """Returns the lines of waits with a limit that is a number, or the name of one in this module."""
    names = constants(nodes[0])
    found = []
    for node in nodes:
        for one in given(node):
            value = names.get(one.id, one) if isinstance(one, ast.Name) else one
            number = value.value if isinstance(value, ast.Constant) else None
            if type(number) in (int, float) and SHORT < float(number) < LONG:  # type: ignore[arg-type]
                found.append(one.lineno)
    return found


def loops(nodes: Sequence[ast.AST]) -> list[int]:
    """Returns the lines of loops that sleep until something holds, in functions that look at no clock."""
    sleeping = [
        loop
        for loop in nodes
        if isinstance(loop, ast.While) and "time.sleep(" in (text := ast.unparse(loop)) and ".recv(" not in text
    ]
    return [
        loop.lineno
        for function in nodes
        if sleeping and isinstance(function, ast.FunctionDef)
        for loop in sleeping
        if function.lineno < loop.lineno <= (function.end_lineno or 0)
        and not any(clock in ast.unparse(function) for clock in CLOCKS)
    ]


def jobless(nodes: Sequence[ast.AST]) -> list[int]:
    """Returns the lines of waits in functions with a job that do not look at its pods."""
    return [
        call.lineno
        for function in nodes
        if isinstance(function, ast.FunctionDef) and {"job", "group"} & {arg.arg for arg in function.args.args}
        for call in nodes_in(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("until", "between.until")
    ]


def all_of(folders: tuple[Path, ...], pattern: str) -> list[Path]:
    return [path for folder in folders for path in folder.rglob(pattern)]


def test_no_wait_has_a_short_limit() -> None:
    paths = all_of(FOLDERS, "*.py")
    paths.remove(ROOT / "tests" / "stages.py")  # it ends tests, and kills what takes longer
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in limits(nodes_of(path))]
    assert not found, "write between.LONG, or a number times between.slack()"


def test_no_loop_waits_without_end() -> None:
    paths = all_of(TESTS, "test_*.py")
    found = [f"{path.relative_to(ROOT)}:{line}" for path in paths for line in loops(nodes_of(path))]
    assert not found, "use between.until"


def test_waits_for_a_job_end_when_a_pod_dies() -> None:
    paths = (ROOT / "tests" / "runtime").glob("test_*.py")
    found = [f"{path.name}:{line}" for path in paths for line in jobless(nodes_of(path))]
    assert not found, "use job.until"


@pytest.mark.parametrize(
    "wait",
    [
        "event.wait(30)",
        "run(words, timeout=5)",
        "future.result(2.5)",
        "asyncio.timeout(30)",
        "asyncio.wait_for(task, 10)",
        "sock.settimeout(20)",
        "socket.create_connection(place, 30)",
        "select.select(all, [], [], 60)",
        "aiohttp.ClientTimeout(30)",
        "end = time.monotonic() + 60",
        "while time.monotonic() < began + 60: pass",
        "while time.monotonic() - began < 60: pass",
        "LIMIT: Final = 30\nevent.wait(LIMIT)",
        "_SHORT, _LONG = 1.0, 2.0\nrun(words, timeout=_LONG)",
    ],
)
def test_a_short_limit_is_found(wait: str) -> None:
    assert limits(nodes_in(ast.parse(wait))) == [wait.count("\n") + 1]


@pytest.mark.parametrize(
    "wait",
    [
        "event.wait(0.1)",
        "run(words, timeout=LONG)",
        "process.wait(3 * slack())",
        "', '.join(words)",
        "events.wait_for('applied', 3)",
        "pytest.mark.timeout(60)",
        "end = time.monotonic() + 60 * slack()",
        "while time.monotonic() < began + 30 * slack(): pass",
        "LIMIT = 30\nevent.wait(LIMIT * slack())",
    ],
)
def test_a_limit_that_grows_is_not_found(wait: str) -> None:
    assert not limits(nodes_in(ast.parse(wait)))


def test_a_loop_without_end_and_a_wait_without_a_job_are_found() -> None:
    def found(rule: Callable[[Sequence[ast.AST]], list[int]], source: str) -> list[int]:
        return rule(nodes_in(ast.parse(source)))

    assert found(loops, "def test():\n    while not begun:\n        time.sleep(1)\n") == [2]
    assert not found(loops, "def test():\n    until(lambda: begun)\n")
    clocked = "def test():\n    end = time.monotonic() + 60\n    while not begun:\n        time.sleep(1)\n"
    assert not found(loops, clocked)
    assert found(jobless, "def test(job):\n    until(lambda: begun)\n") == [2]
    assert not found(jobless, "def test(job):\n    job.until(lambda: begun, 'it begins')\n")


def test_output_is_read_up_to_a_line_and_shown_when_it_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = io.StringIO("one\ntwo\nthree\n")
    assert read_until(lines, "tw.") == "one\ntwo\n"
    with pytest.raises(AssertionError, match="no line has 'four':\nthree"):
        read_until(lines, "four")
    monkeypatch.setattr(between, "LIMIT", 0.0)
    monkeypatch.setattr(between, "slack", lambda: 0.0)

    def endless() -> Iterator[str]:
        yield "five"
        between.threading.Event().wait(1)

    with pytest.raises(AssertionError, match="did not end within 0 s:\nfive"):
        read_until(endless(), "six")
