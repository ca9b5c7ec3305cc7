"""O7: YAML from outside costs no more than its size allows, and is read as kubectl reads it."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from backstay_client.jobfiles import bounded_yaml

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=20,
)


def bomb(width: int, height: int, merge: bool = False) -> str:
    """Each level holds `width` aliases of the level below: width ** height nodes in all."""
    lines = ["l0: &l0 {a: 1}"]
    for level in range(1, height):
        aliases = ", ".join([f"*l{level - 1}"] * width)
        lines.append(f"l{level}: &l{level} " + ("{<<: [%s]}" if merge else "[%s]") % aliases)
    return "\n".join(lines)


@given(PLAIN)
def test_what_was_dumped_is_read_as_the_safe_loader_reads_it(value: Any) -> None:
    text = yaml.safe_dump(value)
    assert bounded_yaml.load_all(text) == [yaml.safe_load(text)]


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(("width", "height"), [(10, 9), (2, 60), (50, 200)])
def test_o7_aliases_that_stand_for_too_much_are_refused(width: int, height: int, merge: bool) -> None:
    with pytest.raises(yaml.YAMLError, match="aliases expand to more than"):
        bounded_yaml.load_all(bomb(width, height, merge))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: &a [*a]", "contains it"),
        ("&a {<<: *a}", "contains it"),
        ("[" * 5000, "deeper than"),
        ("{a: " * 500 + "1" + "}" * 500, "deeper than"),
        ("- " * 3000 + "1", "deeper than"),
        ("a: 1\na: 2", "is duplicated"),
        ("<<: {a: 1, a: 2}", "is duplicated"),
        ("b: &b {a: 1}\nc: {a: 2, a: 3, <<: *b}", "is duplicated"),
        ("a: {<<: 1}", "expected a mapping"),
    ],
)
def test_o7_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(yaml.YAMLError, match=says):
        bounded_yaml.load_all(text)


def test_numbers_that_python_does_not_convert_are_value_errors() -> None:
    with pytest.raises(ValueError, match="digits"):
        bounded_yaml.load_all("a: " + "9" * 6000)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("base: &b {a: 1, b: 2}\nx: {<<: *b, a: 3}", {"a": 3, "b": 2}),
        ("base: &b {a: 1}\nmore: &c {a: 2, c: 3}\nx: {<<: [*b, *c]}", {"a": 1, "c": 3}),
        ("base: &b {a: 1}\nmore: &c {<<: *b, b: 2}\nx: {b: 4, <<: *c}", {"a": 1, "b": 4}),
        ("base: &b {a: 1}\nmore: &c {<<: *b, a: 2}\nx: {<<: *c}", {"a": 2}),
    ],
)
def test_merge_keys(text: str, value: Any) -> None:
    """https://yaml.org/type/merge.html"""
    assert bounded_yaml.load_all(text)[0]["x"] == value


def test_a_small_alias_is_fine() -> None:
    assert bounded_yaml.load_all("a: &a [1, 2]\nb: [*a, *a]") == [{"a": [1, 2], "b": [[1, 2], [1, 2]]}]
