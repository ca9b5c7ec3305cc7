"""The limits of rooms and constructors (docs/decisions/0080)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from sources import comments_in, nodes_in, nodes_of

from .test_house import MODULES, ROOT

TRAINER = ROOT / "images" / "trainer" / "backstay"
MOST_ARGUMENTS, MOST_FILES, MOST_BRANCHES = 7, 15, 15
LEAST_WORDS = 6  # of the reason for more branches
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)
SCRIPTS = sorted((ROOT / "bench").rglob("*.py"))


def classes(module: Path) -> Iterator[ast.ClassDef]:
    """Yields every class of a module, also inside functions and classes."""
    for node in nodes_of(module):
        if isinstance(node, ast.ClassDef):
            yield node


def arguments_of_constructor(defined: ast.ClassDef) -> int:
    """Returns the number of arguments of `__init__`, without `self`; 0 where the class defines none."""
    for node in defined.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs) - 1
    return 0


def test_a_constructor_has_at_most_seven_arguments() -> None:
    """With eight, a noun is missing. Records, whose fields are their arguments, are not counted."""
    found = [
        f"{module.relative_to(ROOT)}: {defined.name} has {number}"
        for module in MODULES
        for defined in classes(module)
        if (number := arguments_of_constructor(defined)) > MOST_ARGUMENTS
    ]
    assert found == []


def branches(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the number of places at which a reader has to consider two ways."""
    nodes = nodes_in(function)
    operators = sum(len(node.values) - 1 for node in nodes if isinstance(node, ast.BoolOp))
    return operators + sum(isinstance(node, BRANCHES) for node in nodes)


def reasons(text: str) -> set[int]:
    """Returns the lines of a module with a sentence for readers, and not only with a word, or for tools."""
    said = [(line, text) for line, text, _ in comments_in(text) if not text.startswith(("# noqa", "# type:"))]
    return {line for line, text in said if len(re.findall(r"[A-Za-z]+", text)) >= LEAST_WORDS}


def test_a_function_with_many_branches_has_a_comment_with_the_reason() -> None:
    found, large = [], 0
    for module in MODULES:
        functions = (node for node in nodes_of(module) if isinstance(node, FUNCTIONS))
        if many := [node for node in functions if branches(node) > MOST_BRANCHES]:
            lines = reasons(module.read_text(encoding="utf-8"))
            without = (one for one in many if lines.isdisjoint(range(one.lineno, (one.end_lineno or 0) + 1)))
            found += [f"{module.relative_to(ROOT)}: {one.name} has {branches(one)}" for one in without]
            large += len(many)
    assert large > 50
    assert found == [], "add the reason as a comment, or divide the function"


def test_a_room_of_the_trainer_has_at_most_fifteen_files() -> None:
    folders = {path.parent for path in TRAINER.rglob("*.py")}
    assert len(folders) > 20
    found = {str(folder.relative_to(TRAINER)): len(list(folder.glob("*.py"))) for folder in folders}
    assert {room: number for room, number in found.items() if number > MOST_FILES} == {}


def test_a_class_name_exists_once() -> None:
    """In all packages and in `bench`, also private names: with a name, a reader finds one class."""
    places: dict[str, set[str]] = defaultdict(set)
    for module in [*MODULES, *SCRIPTS]:
        for defined in classes(module):
            places[defined.name.removeprefix("_")].add(str(module.relative_to(ROOT)))
    assert len(places) > 500
    found = {name: sorted(modules) for name, modules in places.items() if len(modules) > 1}
    assert found == {}, "give the newer class a name that says how it differs"


def test_a_process_of_backstay_imports_nothing_from_the_current_folder() -> None:
    """`python -m` begins `sys.path` with it, so a file `html.py` of the user ended the embedded cluster."""
    starts = [found.group(1) for path in MODULES for found in re.finditer(r"sys\.executable,\s*(.+)", path.read_text())]
    started = [text for text in starts if '"-m"' in text or text.startswith('"-P"')]
    assert len(started) > 4
    assert [text for text in started if not text.startswith('"-P"')] == []
