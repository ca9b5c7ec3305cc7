"""Tests use the names that a room offers, or `backstay.testing`: the number of other imports may only fall."""

from __future__ import annotations

from .private_imports import foreign_imports

MOST = 6
"""Imports of modules of another room. Lower it when there are fewer."""


def test_tests_import_no_private_object_and_few_modules_of_another_room() -> None:
    found = list(foreign_imports())
    objects = [str(one) for one in found if one.private_object]
    assert objects == [], "give the object a public name, or test it through one"
    offered = [str(one) for one in found if one.offered]
    assert offered == [], "import it from the room, whose __all__ has the name"
    listed = "\n".join(str(one) for one in found)
    assert len(found) <= MOST, f"use `backstay.testing` or a name that the room offers:\n{listed}"
