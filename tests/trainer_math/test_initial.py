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
