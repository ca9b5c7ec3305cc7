"""Every name that a room of the trainer offers can be imported, also where names are loaded at first use."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

TRAINER = Path(__file__).parents[2] / "images" / "trainer" / "backstay"
ROOMS = sorted(path.parent.name for path in TRAINER.glob("_*/__init__.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_every_name_that_a_room_offers_can_be_imported(room: str) -> None:
    module = importlib.import_module(f"backstay.{room}")
    for name in getattr(module, "__all__", ()):
        assert getattr(module, name) is not None
    with pytest.raises((AttributeError, ImportError)):
        module.no_such_name  # noqa: B018


@pytest.mark.parametrize("package", ["backstay", "backstay._update"])
def test_a_type_checker_sees_the_names_that_are_loaded_when_they_are_first_used(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__file__ is not None
    [block] = [
        node
        for node in ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    seen = {
        alias.name: f".{node.module or ''}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name for name, home in seen.items() if home == "."}
    assert {name: home for name, home in seen.items() if name not in modules} == module._HOMES
    assert set(module.__all__) == set(seen)
