"""Rooms of the trainer offer names that other rooms use, and other rooms import these from the room."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from sources import module_of, nodes_of

TRAINER = Path(__file__).parents[2] / "images" / "trainer" / "backstay"
ROOMS = sorted(path.parent.name for path in TRAINER.glob("_*/__init__.py"))
FOR_TESTS = {"_simulation", "_simulator"}  # no other room imports them


def imports_of_other_rooms() -> Iterator[tuple[str, str, str]]:
    """(file, room, the imported module) for each name that the trainer imports from another room."""
    for file in sorted(TRAINER.rglob("*.py")):
        path = file.relative_to(TRAINER).with_suffix("").parts
        for node in nodes_of(file):
            if isinstance(node, ast.ImportFrom) and node.level == len(path) and node.module:
                room = node.module.partition(".")[0]
                if room in ROOMS and room not in path[:1]:
                    for alias in node.names:
                        yield f"{'/'.join(path)}.py:{node.lineno} {alias.name}", room, node.module


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_that_a_room_offers_can_be_imported(room: str) -> None:
    module = importlib.import_module(f"backstay.{room}")
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    with pytest.raises((AttributeError, ImportError)):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "package", ["backstay", "backstay._report", "backstay._roles", "backstay._single", "backstay._update"]
)
def test_a_type_checker_sees_the_names_that_are_loaded_when_they_are_first_used(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    [block] = [
        node
        for node in module_of(Path(module.__file__)).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: f"{'.' * node.level}{node.module or ''}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, home in seen.items() if home == "."}
    assert {name: home for name, home in seen.items() if name not in modules} == module._HOMES
    assert set(module.__all__) == set(seen)


def test_rooms_import_names_of_other_rooms_from_the_room() -> None:
    found = list(imports_of_other_rooms())
    assert {room for _, room, _ in found} == set(ROOMS) - FOR_TESTS
    deep = [f"{place} from {module}" for place, room, module in found if module != room]
    assert deep == [], "add the name to the room's __all__, and import it from there"
