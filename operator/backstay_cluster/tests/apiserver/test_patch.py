"""Patches do what RFC 6902, RFC 7386 and Kubernetes' strategic merge say, and never change what they are given."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.apiserver.errors import ApiError
from backstay_cluster.apiserver.patch import json_patch, merge, same, strategic_merge

SCALARS = st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "a", "~", "/"])
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["a", "b", "a/b", "~0", "m~n"]), inner),
    max_leaves=8,
)


def pointer(path):
    return "".join("/" + str(p).replace("~", "~0").replace("/", "~1") for p in path)


def difference(one, other, path=()):
    """Operations that make `other` of `one`: the opposite of applying them."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in one.keys() - other.keys():
            yield {"op": "remove", "path": pointer((*path, key))}
        for key in other.keys() - one.keys():
            yield {"op": "add", "path": pointer((*path, key)), "value": other[key]}
        for key in one.keys() & other.keys():
            yield from difference(one[key], other[key], (*path, key))
    elif isinstance(one, list) and isinstance(other, list):
        both = min(len(one), len(other))
        for at in range(both):
            yield from difference(one[at], other[at], (*path, at))
        for at in range(len(one) - 1, both - 1, -1):
            yield {"op": "remove", "path": pointer((*path, at))}
        for value in other[both:]:
            yield {"op": "add", "path": pointer((*path, "-")), "value": value}
    elif not same(one, other):
        yield {"op": "replace", "path": pointer(path), "value": other}


@given(JSON, JSON)
def test_rfc_6902_what_leads_from_one_document_to_another_does(one, other):
    before = copy.deepcopy(one)
    operations = list(difference(one, other))
    patched = json_patch(one, [*operations, {"op": "test", "path": "", "value": other}])
    assert same(patched, other)
    assert same(one, before)


@given(JSON, JSON)
def test_rfc_7386_a_merge_patch_is_idempotent_and_changes_only_a_copy(target, patch):
    before = copy.deepcopy(target)
    once = merge(target, patch)
    assert same(merge(once, patch), once)
    assert same(target, before)


@given(st.dictionaries(st.sampled_from("abc"), SCALARS.filter(lambda v: v is not None)))
def test_rfc_7386_an_object_without_nulls_merged_into_nothing_is_itself(patch):
    assert same(merge({}, patch), patch)


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_rfc_7386_examples(target, patch, result):
    assert merge(target, patch) == result


@pytest.mark.parametrize(
    ("target", "operations", "result"),
    [
        ({"a": ["x", "z"]}, [{"op": "add", "path": "/a/1", "value": "y"}], {"a": ["x", "y", "z"]}),
        ({"a": {"b": 1}, "c": {}}, [{"op": "move", "from": "/a/b", "path": "/c/d"}], {"a": {}, "c": {"d": 1}}),
        ({"a": [1, 2, 3]}, [{"op": "move", "from": "/a/0", "path": "/a/2"}], {"a": [2, 3, 1]}),
        ({"a": {"b": 1}}, [{"op": "copy", "from": "/a", "path": "/c"}], {"a": {"b": 1}, "c": {"b": 1}}),
        ({"a": 1}, [{"op": "replace", "path": "", "value": {"b": 2}}], {"b": 2}),
    ],
)
def test_rfc_6902_examples(target, operations, result):
    assert json_patch(target, operations) == result


@pytest.mark.parametrize(
    "operation",
    [
        {"op": "test", "path": "/a", "value": True},  # true is not 1
        {"op": "remove", "path": "/none"},
        {"op": "replace", "path": "/none", "value": 1},
        {"op": "add", "path": "/none/b", "value": 1},
        {"op": "add", "path": "/l/3", "value": 1},
        {"op": "add", "path": "/l/01", "value": 1},
        {"op": "add", "path": "a", "value": 1},
        {"op": "add", "path": "/a"},
        {"op": "move", "from": "/o", "path": "/o/p"},
        {"op": "frobnicate", "path": "/a"},
        {"op": [], "path": "/a"},
        {"op": "copy", "from": None, "path": "/a"},
        {"op": "remove", "path": ""},
        "no operation",
    ],
)
def test_an_operation_that_cannot_be_done_refuses_the_whole_patch(operation):
    document = {"a": 1, "l": [1, 2], "o": {"p": {}}}
    with pytest.raises(ApiError) as caught:
        json_patch(document, [{"op": "add", "path": "/x", "value": 1}, operation])
    assert (caught.value.code, caught.value.reason) == (422, "Invalid")
    assert document == {"a": 1, "l": [1, 2], "o": {"p": {}}}


def containers(*items):
    return {"spec": {"containers": list(items)}}


@pytest.mark.parametrize(
    ("patch", "result"),
    [
        (
            {"name": "a", "image": "2"},
            [{"name": "a", "image": "2", "env": [{"name": "E", "value": "1"}]}, {"name": "b"}],
        ),
        (
            {"name": "c"},
            [{"name": "c"}, {"name": "a", "image": "1", "env": [{"name": "E", "value": "1"}]}, {"name": "b"}],
        ),
        ({"name": "a", "$patch": "delete"}, [{"name": "b"}]),
        (
            {"name": "a", "env": [{"name": "F", "value": "2"}, {"name": "E", "$patch": "delete"}]},
            [{"name": "a", "image": "1", "env": [{"name": "F", "value": "2"}]}, {"name": "b"}],
        ),
    ],
)
def test_strategic_merge_merges_lists_by_their_key(patch, result):
    pod = containers({"name": "a", "image": "1", "env": [{"name": "E", "value": "1"}]}, {"name": "b"})
    assert strategic_merge("V1Pod", pod, containers(patch)) == containers(*result)


def test_strategic_merge_replaces_other_lists_and_keeps_sets():
    pod = {"metadata": {"finalizers": ["a/b"]}, "spec": {"tolerations": [{"key": "a"}]}}
    patch = {"metadata": {"finalizers": ["c/d"]}, "spec": {"tolerations": [{"key": "b"}]}}
    assert strategic_merge("V1Pod", pod, patch) == {
        "metadata": {"finalizers": ["c/d", "a/b"]},
        "spec": {"tolerations": [{"key": "b"}]},
    }


def test_strategic_merge_directives():
    pod = {"metadata": {"finalizers": ["c/d", "a/b"]}, "spec": {"volumes": [{"name": "v", "emptyDir": {}}]}}
    patch = {
        "metadata": {"$deleteFromPrimitiveList/finalizers": ["a/b"]},
        "spec": {
            "$setElementOrder/volumes": [{"name": "w"}, {"name": "v"}],
            "volumes": [{"name": "w", "emptyDir": {}}, {"name": "v", "$retainKeys": ["name", "secret"], "secret": {}}],
        },
    }
    assert strategic_merge("V1Pod", pod, patch) == {
        "metadata": {"finalizers": ["c/d"]},
        "spec": {"volumes": [{"name": "w", "emptyDir": {}}, {"name": "v", "secret": {}}]},
    }
    assert strategic_merge("V1Pod", containers({"name": "a"}), containers({"$patch": "replace"}, {"name": "b"})) == (
        containers({"name": "b"})
    )
    with pytest.raises(ApiError, match="does not contain declared merge key: name"):
        strategic_merge("V1Pod", {}, containers({"image": "x"}))


def test_o7_copies_of_copies_are_bounded():
    """28 operations would make 250 million of one kilobyte."""
    doc = {"a": ["x" * 1000]}
    operations = [{"op": "copy", "from": "/a", "path": "/a/-"}] * 28
    with pytest.raises(ApiError) as caught:
        json_patch(doc, operations)
    assert caught.value.code == 413
    assert doc == {"a": ["x" * 1000]}
    assert json_patch(doc, operations[:5])["a"][0] == "x" * 1000
