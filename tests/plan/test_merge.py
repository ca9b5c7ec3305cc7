"""A template is merged strategically over what the operator builds, and what it must not change stays."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec.merge import merged

VALUES = st.one_of(st.integers(), st.booleans(), st.text(max_size=3))
KEYS = st.sampled_from(["a", "b", "c"])
PLAIN = st.recursive(VALUES, lambda inner: st.dictionaries(KEYS, inner, max_size=3), max_leaves=6)
ITEMS = {
    "containers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "initContainers": "name",
    "imagePullSecrets": "name",
}


@st.composite
def templates(draw):
    """Maps with merged lists in them, and plain fields around."""
    found = draw(st.dictionaries(KEYS, PLAIN, max_size=3))
    for field in draw(st.lists(st.sampled_from(sorted(ITEMS)), unique=True, max_size=3)):
        found[field] = [
            {ITEMS[field]: name, **draw(st.dictionaries(KEYS, PLAIN, max_size=2))}
            for name in draw(st.lists(st.sampled_from("xyz"), unique=True, max_size=3))
        ]
    return found


@given(templates(), templates())
def test_nothing_given_is_changed_or_shared(base, patch):
    before = copy.deepcopy((base, patch))
    result = merged(base, patch)
    for value in list(result.values()):
        if isinstance(value, dict | list):
            value.clear()
    assert (base, patch) == before


@given(templates())
def test_an_empty_patch_changes_nothing(base):
    assert merged(base, {}) == base


@given(templates(), templates())
def test_merging_again_changes_nothing(base, patch):
    once = merged(base, patch)
    assert merged(once, patch) == once


@given(templates(), templates())
def test_what_the_patch_states_holds_and_nothing_else_is_lost(base, patch):
    result = merged(base, patch)
    for field, value in patch.items():
        if field in ITEMS:
            key = ITEMS[field]
            by_key = {item[key]: item for item in result[field]}
            assert set(by_key) == {i[key] for i in value} | {i[key] for i in base.get(field, ())}
            for item in value:
                assert all(contains(by_key[item[key]][k], v) for k, v in item.items())
        else:
            assert contains(result[field], value)
    for field in set(base) - set(patch):
        assert result[field] == base[field]


def contains(whole, part):
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(k in whole and contains(whole[k], v) for k, v in part.items())
    return type(whole) is type(part) and whole == part


@given(templates(), st.data())
def test_null_deletes(base, data):
    field = data.draw(st.sampled_from([*sorted(base), "never there"]))
    assert merged(base, {field: None}) == {k: v for k, v in base.items() if k != field}


@pytest.mark.parametrize(
    ("base", "patch", "result"),
    [
        ({"args": ["a", "b"]}, {"args": ["c"]}, {"args": ["c"]}),
        (
            {"ports": [{"containerPort": 7077, "protocol": "TCP", "name": "rpc"}]},
            {"ports": [{"containerPort": 7077, "hostPort": 1}, {"containerPort": 7077, "protocol": "UDP"}]},
            {
                "ports": [
                    {"containerPort": 7077, "protocol": "TCP", "name": "rpc", "hostPort": 1},
                    {"containerPort": 7077, "protocol": "UDP"},
                ]
            },
        ),
        (
            {"env": [{"name": "A", "value": "1"}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]},
            {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]},
        ),
        (
            {"tolerations": [{"key": "k", "effect": "NoExecute", "tolerationSeconds": 5}]},
            {"tolerations": [{"key": "gpu", "operator": "Exists"}]},
            {
                "tolerations": [
                    {"key": "k", "effect": "NoExecute", "tolerationSeconds": 5},
                    {"key": "gpu", "operator": "Exists"},
                ]
            },
        ),
        (
            {"tolerations": [{"key": "k", "effect": "NoExecute", "tolerationSeconds": 5}]},
            {"tolerations": [{"key": "k", "effect": "NoExecute", "tolerationSeconds": 600}]},
            {"tolerations": [{"key": "k", "effect": "NoExecute", "tolerationSeconds": 600}]},
        ),
        (
            {"env": [{"name": "A"}, {"name": "B"}]},
            {"env": [{"name": "A", "$patch": "delete"}]},
            {"env": [{"name": "B"}]},
        ),
        ({"env": [{"name": "A"}]}, {"env": [{"$patch": "replace"}, {"name": "B"}]}, {"env": [{"name": "B"}]}),
        ({"s": {"a": 1, "b": 2}}, {"s": {"$patch": "replace", "c": 3}}, {"s": {"c": 3}}),
        ({"s": {"a": 1}, "t": 1}, {"s": {"$patch": "delete"}}, {"t": 1}),
        ({"s": {"a": 1}}, {"s": {"a": None}}, {"s": {}}),
        ({}, {"s": {"a": None, "l": [{"b": None}]}}, {"s": {"l": [{}]}}),
        ({"l": [1]}, {"l": []}, {"l": []}),
        ({"containers": "odd"}, {"containers": [{"name": "a"}]}, {"containers": [{"name": "a"}]}),
    ],
)
def test_cases(base, patch, result):
    assert merged(base, patch) == result
