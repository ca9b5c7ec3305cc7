"""Leaves get readable, unique, file-safe names; what cannot be trained is refused by name."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._update._tree import arrays, describe
from backstay.errors import TreeError


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def test_paths_shapes_and_dtypes():
    tree = {
        "dense": {"kernel": jnp.ones((2, 3)), "bias": np.zeros(3, ml_dtypes.bfloat16)},
        "layers": [Layer(jnp.ones((1, 2), jnp.float16), jnp.zeros(())), (jnp.zeros((0, 4)),)],
        "nothing": None,
        "a.b/c d": 0.5,
    }
    spec = describe(tree)
    assert [str(leaf) for leaf in spec.leaves] == [
        "a%2Eb%2Fc%20d float32[]",
        "dense.bias bfloat16[3]",
        "dense.kernel float32[2,3]",
        "layers.0.kernel float16[1,2]",
        "layers.0.bias float32[]",
        "layers.1.0 float32[0,4]",
    ]
    assert spec.nbytes == 4 + 6 + 24 + 4 + 4
    assert jax.tree.structure(spec.unflatten(range(6))) == jax.tree.structure(tree)
    assert [value.dtype for value in arrays(tree, spec)] == [leaf.dtype for leaf in spec.leaves]
    assert describe(spec.shapes()) == spec


def test_a_bare_array_is_a_tree():
    assert [leaf.path for leaf in describe(jnp.ones(3)).leaves] == ["value"]


KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["a", "a.b", "b", ".", "", "%", "0", "é/"]))


@given(st.recursive(st.just(0.0), lambda inner: st.dictionaries(KEYS, inner, max_size=3) | st.lists(inner, max_size=3)))
def test_names_are_unique_and_safe(tree):
    names = [leaf.path for leaf in describe(tree).leaves]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_.%~-]+", name) for name in names)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.arange(3), r"leaf a\.b is int64, which gradients cannot train.*close over it"),
        (jnp.arange(3) > 1, r"leaf a\.b is bool"),
        (3, r"leaf a\.b is int"),
        (jax.random.key(0), r"leaf a\.b is key"),
        ("relu", r"leaf a\.b is of type str, not an array"),
        (object(), r"leaf a\.b is of type object"),
        (np.array(["x"]), r"leaf a\.b is <U1"),
        (np.array([object()]), r"leaf a\.b is object"),
    ],
)
def test_leaves_that_cannot_be_trained(leaf, message):
    with pytest.raises(TreeError, match=message):
        describe({"a": {"b": leaf}})


def test_shared_leaves_are_refused():
    shared = jnp.ones(3)
    with pytest.raises(TreeError, match=r"leaves decoder and encoder are the same array.*make the second a copy"):
        describe({"encoder": shared, "decoder": shared})
    describe({"encoder": shared, "decoder": shared.copy()})


def test_the_first_difference_is_named():
    one = describe({"a": jnp.ones(3), "b": jnp.ones(2)})
    assert one.difference(one) is None
    assert one.difference(describe({"a": jnp.ones(4), "b": jnp.ones(2)})) == (
        "leaf a is a float32[3] here and a float32[4] in the other tree"
    )
    assert one.difference(describe({"a": jnp.ones(3)})) == "the other tree has no leaf b float32[2]"
    with pytest.raises(TreeError, match="leaf c float32"):
        arrays({"a": jnp.ones(3), "b": jnp.ones(2), "c": 0.0}, one)
