"""T4: `init` runs as one program in every pod and in a single process; what cannot be compiled runs as it is."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive

from backstay._compute._initial import initial


def layers(key, *widths):
    keys = jax.random.split(key, len(widths))
    return [jax.random.normal(one, (8, width)) / 3 for one, width in zip(keys, widths, strict=True)]


def test_t4_it_is_what_init_returns_up_to_rounding_and_the_same_each_time() -> None:
    def init(key):
        return {"layers": layers(key, 3, 5), "bias": jnp.zeros(4), "table": np.arange(6.0), "count": jnp.int32(7)}

    found, again, direct = initial(init, 3), initial(init, 3), init(jax.random.key(3))
    assert jax.tree.structure(found) == jax.tree.structure(direct)
    for one, two, three in zip(*map(jax.tree.leaves, (found, again, direct)), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, three, rtol=1e-6, atol=1e-7)
    assert float(jnp.abs(initial(init, 4)["layers"][0] - found["layers"][0]).max()) > 0


@pytest.mark.parametrize(
    "init",
    [
        lambda key: {"w": jnp.zeros(3) if float(jax.random.uniform(key)) < 2 else None},  # cannot be traced
        lambda key: {"w": jnp.asarray(np.ones(2_000_000, np.float32))},  # a constant that is too large to compile
        lambda key: {"w": jax.random.normal(key, (1_100, 1_000))},
    ],
)
def test_what_is_not_compiled_runs_as_it_is(init) -> None:
    np.testing.assert_array_equal(initial(init, 0)["w"], init(jax.random.key(0))["w"])


def test_the_error_is_that_of_init() -> None:
    def init(key):
        return {}["no such layer"]

    with pytest.raises(KeyError, match="no such layer"):
        initial(init, 0)


@pytest.mark.parametrize("size", [3, 1_500_000])
def test_the_rest_is_not_computed_for_a_part(size):
    """A server has no memory for a frozen base."""
    computed = []
    base = Primitive("base")  # it has no compiled form
    base.def_impl(lambda: computed.append(size) or jnp.zeros(4))
    base.def_abstract_eval(lambda: jax.core.ShapedArray((4,), jnp.float32))

    def init(key):
        return {"base": base.bind(), "trained": jax.random.normal(key, (size,))}

    whole = initial(init, 0)
    assert len(computed) == 1
    part = initial(init, 0, lambda params: params["trained"])
    assert len(computed) == 1
    np.testing.assert_allclose(part, whole["trained"], rtol=1e-5, atol=1e-6)


def set_around(key):
    """Operations that depend on what is set around them."""
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        one, other = jax.random.split(key)
        return {"random": jax.random.normal(one, (64,)), "bits": jax.random.bits(other, (64,))}


def various(key):
    """Operations that JAX runs in different ways, one array twice as long as the limit for one program."""
    keys = jax.random.split(key, 3)
    used_twice = jax.random.normal(keys[0], (64, 64))
    return {
        "large": jax.random.normal(key, (2_000, 1_000)) / jnp.sqrt(1_000.0),
        "stacked": jax.vmap(lambda one: jax.random.normal(one, (17, 33)) * 0.02)(keys),
        "orthogonal": jax.nn.initializers.orthogonal()(keys[1], (20, 20)),
        "truncated": jax.random.truncated_normal(keys[2], -2, 2, (99,)) * 0.02,
        "scanned": jax.lax.scan(lambda sums, one: (sums + jax.random.uniform(one, (5,)), sums), jnp.ones(5), keys)[1],
        "of both": [jnp.mean(used_twice, axis=0), used_twice @ used_twice.T],
        "numbers": (np.arange(4.0), 0.5, jnp.int32(7)),
        "settings": set_around(keys[2]),
        "custom rule": jax.nn.gelu(jax.random.normal(keys[1], (1_001,))),
    }


@pytest.mark.parametrize("init", [various, jax.jit(various)], ids=["as it is", "compiled by the script"])
def test_t4_a_needed_leaf_of_a_large_model_has_the_bits_that_it_has_in_one_process(init) -> None:
    whole = jax.tree.leaves(initial(init, 3))
    for needed in range(0, len(whole), 2), range(1, len(whole), 2):
        parts = jax.tree.leaves(initial(init, 3, needed=needed))
        for number, (found, wanted) in enumerate(zip(parts, whole, strict=True)):
            if number in needed:
                np.testing.assert_array_equal(found, wanted)
            else:
                assert (found.shape, found.dtype) == (jnp.shape(wanted), jnp.result_type(wanted))


def test_what_no_needed_leaf_depends_on_is_not_computed() -> None:
    """A server has no memory for the whole of a large model."""
    computed = []

    def init(key):
        made = [
            counted.bind(jax.random.normal(one, (1_000_000,)), number=number) for number, one in enumerate(keys(key))
        ]
        return {"a": made[0], "b": made[1] + 1, "c": [made[2], made[3]]}

    def keys(key):
        return jax.random.split(key, 4)

    counted = Primitive("counted")
    counted.def_impl(lambda value, number: computed.append(number) or value)
    counted.def_abstract_eval(lambda value, number: value)
    found = initial(init, 0, needed={1, 3})
    assert computed == [1, 3]
    assert [isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(found)] == [True, False, True, False]


def test_each_server_finds_an_array_at_two_places() -> None:
    def init(key):
        table = jax.random.normal(key, (1_200, 1_000))
        return {"embedding": table, "head": table, "other": jnp.zeros(3)}

    found = initial(init, 0, needed={2})
    assert found["embedding"] is found["head"]
    assert isinstance(found["head"], jax.Array)


def test_what_init_prints_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    def init(key):
        jax.debug.print("made {}", 1)
        return {"large": jnp.zeros(1_200_000), "small": jnp.zeros(3)}

    initial(init, 0, needed={1})
    jax.effects_barrier()
    assert capfd.readouterr().out.count("made 1") == 1
