"""Counts what tests import from private modules of packages that are not their own.

A room of the trainer, such as `backstay._checkpoint`, offers the names in its `__all__` to other rooms. A test of
another room uses these, or `backstay.testing`. `PYTHONPATH=tests/helpers python tests/house/private_imports.py` prints
the others.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sources import nodes_in, nodes_of

TESTS = Path(__file__).parents[1]
PACKAGES = (
    "backstay",
    "backstay_cli",
    "backstay_client",
    "backstay_cluster",
    "backstay_operator",
    "backstay_rpc",
    "backstay_spec",
)
# The rooms that each folder tests. Modules of the trainer beside the rooms belong to tests/runtime.
HOMES = {
    "checkpoint": {"_checkpoint"},
    "codecs": {"_update"},
    "coordination": {"_coordination", "_simulation"},
    "data": {"_data"},
    "faults": {"_faults", "_instrument"},
    "simulator": {"_simulator"},
    "runtime": {
        "_pod",
        "_roles",
        "_report",
        "_single",
        "_transport",
        "_threaded",
        "_process",
        "_instrument",
        "_timeouts",
        "_train",
    },
    "serving": {"_serving"},
    "testing": {"testing"},
    "trainer_math": {"_update", "_compute"},
    "wire": {"_transport", "_shard"},
}


@dataclass(frozen=True)
class Import:
    """One name that a test imports.

    Attributes:
        file: path of the test's file.
        line: line of the import in the file.
        module: where the name is from.
        name: the object's name.
        offered: whether the room of the module has the name in its `__all__`.
        private_object: whether the name is private, and not a module.
    """

    file: Path
    line: int
    module: str
    name: str
    offered: bool
    private_object: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(TESTS.parent)}:{self.line}: {self.module} {self.name}"


def foreign_imports() -> Iterator[Import]:
    """Imports of private names, and of names in private modules of another room."""
    for file in sorted(TESTS.rglob("*.py")):
        homes = HOMES.get(file.relative_to(TESTS).parts[0], set())
        for line, module, name in _imported(nodes_of(file)):
            package, *modules = module.split(".")
            if package not in PACKAGES:
                continue
            path = [*modules, name]
            private = [part for part in path if part.startswith("_") and not part.startswith("__")]
            if not private:
                continue
            is_object = _is_private_object(module, name)
            if path[0] in homes and not is_object:
                continue
            offered = name in _all(package, path[0])
            if not (offered and len(modules) == 1):
                yield Import(file, line, module, name, offered, is_object)


def _imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of each import, also in programs that the test has as text, and of each patched name."""
    for node in nodes:
        match node:
            case ast.ImportFrom(level=0, module=str(module)):
                for alias in node.names:
                    yield node.lineno, module, alias.name
            case ast.Import():
                for alias in node.names:
                    module, _, name = alias.name.rpartition(".")
                    if module:
                        yield node.lineno, module, name
            case ast.Call(func=ast.Attribute(attr="setattr"), args=[ast.Constant(value=str(dotted)), _]):
                module, _, name = dotted.rpartition(".")
                yield node.lineno, module, name
            case ast.Constant(value=str(text)) if "\n" in text and "import " in text:
                try:
                    program = nodes_in(ast.parse(textwrap.dedent(text)))
                except SyntaxError:  # it is prose
                    continue
                for _, module, name in _imported(program):
                    yield node.lineno, module, name


def _is_private_object(module: str, name: str) -> bool:
    if not name.startswith("_") or name.startswith("__"):
        return False
    try:
        return importlib.util.find_spec(f"{module}.{name}") is None
    except ModuleNotFoundError:  # the module is not a package
        return True


@cache
def _all(package: str, room: str) -> frozenset[str]:
    try:
        found = importlib.import_module(f"{package}.{room}")
    except ImportError:
        return frozenset()
    return frozenset(getattr(found, "__all__", ())) if hasattr(found, "__path__") else frozenset()


if __name__ == "__main__":
    imports = list(foreign_imports())
    print(*imports, sep="\n")
    print(len(imports), "of which their rooms offer", sum(one.offered for one in imports))
