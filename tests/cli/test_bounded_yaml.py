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
    """Returns a document whose levels hold `width` aliases of the level below: width ** height nodes in all."""
    lines = ["l0: &l0 {a: 1}"]
    for level in range(1, height):
        aliases = ", ".join([f"*l{level - 1}"] * width)
        lines.append(f"l{level}: &l{level} " + ("{<<: [%s]}" if merge else "[%s]") % aliases)
    return "\n".join(lines)


# As the YAML library of kubectl reads them (kubectl create --dry-run=server -o json), most unlike PyYAML.
SCALARS = {
    "1e-3": 0.001,
    "1e5": 100_000,  # whole numbers, because JSON is between kubectl and the API server
    "400e6": 400_000_000,
    "2.0": 2,
    "-3.": -3,
    "1e22": 1e22,
    "-.5": -0.5,
    "08": 8,
    "010": 8,
    "0o10": 8,
    "0x1F": 31,
    "1_000": 1000,
    "y": True,
    "N": False,
    "on": True,
    "1:30": "1:30",
    "2026-11-28": "2026-11-28",
    "1.2.3": "1.2.3",
    "yep": "yep",
    "1e": "1e",
    "~": None,
}


@given(PLAIN | st.sampled_from(sorted(SCALARS)) | st.from_regex(r"\A[-+0-9.eExobaf_:]{1,6}\Z"))
def test_what_was_written_is_read_back_by_each_reader(value: Any) -> None:
    """A string such as ``1e-3`` among a script's arguments stays one, also for kubectl."""
    text = bounded_yaml.as_yaml(value)
    assert bounded_yaml.load_all(text) == [yaml.safe_load(text)] == [value]


@pytest.mark.parametrize(("text", "value"), SCALARS.items())
def test_a_plain_scalar_is_what_it_is_for_kubectl(text: str, value: Any) -> None:
    [found] = bounded_yaml.load_all(f"a: {text}")
    assert (type(found["a"]), found["a"]) == (type(value), value)


def test_json_may_be_indented_with_tabs() -> None:
    text = '\n{\n\t"a": [1,\n\t\t"\\t"],\n\t"b": true}\n'
    assert bounded_yaml.load_all(text) == bounded_yaml.load_all(text.encode()) == [{"a": [1, "\t"], "b": True}]
    assert bounded_yaml.scalars_of_all(text) == [{"a[0]": "1", "b": "true"}]
    for wrong in ("{\n\ta: 1}", '{\n\t"a": 1, "a": 2}', "a:\n\tb: 1", "{" * 99_999 + "\t"):
        with pytest.raises(yaml.YAMLError):
            bounded_yaml.load_all(wrong)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize(("width", "height"), [(10, 9), (2, 60), (50, 200)])
def test_o7_aliases_that_stand_for_too_much_are_refused(width: int, height: int, merge: bool) -> None:
    with pytest.raises(yaml.YAMLError, match=r"has more than .* with its aliases expanded"):
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
