"""A model of many thousand leaves: neither the compiled program nor the number of arrays in JAX grows with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._compute._gradient import GradientFn
from backstay._compute._initial import initial
from backstay._transport import Arrangement, ParamBuffers
from backstay._update import Objective
from backstay._update._engine import ShardEngine
from backstay._update._partition import partition
from backstay._update._rules import analyse
from backstay._update._tree import describe
from backstay.testing import train_local

SHAPES = [(), (3,), (4, 5)]


@contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the executables that JAX builds meanwhile in this process, or takes from the cache on disk."""
    names: list[str] = []
    active = True

    def observed(event: str, seconds: float, **_: Any) -> None:
        if active and event == "/jax/core/compile/backend_compile_duration":
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(observed)
    try:
        yield names
    finally:
        active = False  # JAX before 0.9 cannot unregister a listener


def init(leaves: int) -> dict[str, Any]:
    return {f"w{i:03}": np.full(SHAPES[i % 3], 0.1 * i, np.float32) for i in range(leaves)}


def loss(params: Any, batch: Any) -> Any:
    return sum(jnp.sum((leaf * batch - 1) ** 2) for leaf in jax.tree.leaves(params))


def one_update(leaves: int) -> tuple[int, int, list[np.ndarray]]:
    """Returns a worker's and two servers' way from parameters to parameters; what was compiled, and the arrays that
    came out of the gradient."""
    params = init(leaves)
    tree = describe(params)
    rule = analyse(optax.adam(0.1), tree)
    layout = partition(tree, rule, 2)
    arrangement = Arrangement(layout)
    slot = ParamBuffers.of(arrangement).take()
    engines = [ShardEngine(layout, shard, rule, params) for shard in range(2)]
    gradient_of = GradientFn(Objective(loss, tree), pack=arrangement)
    jax.clear_caches()
    with compilations() as compiled:
        for engine in engines:
            engine.compile([1])
        for engine, targets in zip(engines, slot.blocks, strict=True):
            for index, target in enumerate(targets):
                target[:] = engine.block(index).view(np.uint8)
        gradient = gradient_of(tree.unflatten(slot.host()), np.float32(0.5))
        blocks = arrangement.gradient_blocks(gradient.leaves)
        for engine, contribution in zip(engines, blocks, strict=True):
            engine.apply([contribution])
            engine.ready(0)
    for engine, targets in zip(engines, slot.blocks, strict=True):
        for index, target in enumerate(targets):
            target[:] = engine.block(index).view(np.uint8)
    return len(compiled), len(gradient.leaves), slot.host()


def test_one_update_compiles_as_much_for_many_leaves_as_for_few() -> None:
    one_update(6)  # what another test of this process still compiles in a thread is not counted below
    few, many = one_update(6), one_update(90)
    assert 0 < few[0] == many[0]
    assert few[1] == many[1] == 1, "the gradient leaves the device as one packed array"


def start(sizes: range) -> int:
    """Returns how many programs a server compiles before it trains leaves of these sizes."""

    def init(key: Any) -> dict[str, Any]:
        return {str(size): jax.random.normal(jax.random.fold_in(key, size), (size,)) for size in sizes}

    tree = describe(jax.eval_shape(lambda: init(jax.random.key(0))))
    rule = analyse(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), tree)
    jax.clear_caches()
    with compilations() as compiled:
        ShardEngine(partition(tree, rule, 1), 0, rule, initial(init, 3)).compile([1])
    return len(compiled)


def test_a_server_of_many_sizes_compiles_as_much_as_one_of_few_before_it_trains() -> None:
    """Parameters and states are copied and made without programs of their sizes."""
    start(range(3, 5))
    assert 0 < start(range(3, 5)) == start(range(3, 13)) <= 3, "init, what all leaves share, and the update"


def test_many_leaves_give_what_the_plain_loop_gives() -> None:
    """T4: packed in the gradient, cut over shards, updated in blocks, read where they were received."""
    done = train_local(lambda _: init(40), loss, lambda _: np.float32(0.5), optax.adam(0.1), 1)
    for ours, theirs in zip(one_update(40)[2], jax.tree.leaves(done.params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("bad", [0, 63, 64, 129])
def test_a_leaf_that_is_not_finite_is_seen_among_many(bad: int) -> None:
    params = {f"w{i:03}": np.float32(1) for i in range(130)}
    params[f"w{bad:03}"] = np.float32("nan")
    function = GradientFn(Objective(lambda p, batch: sum(leaf**2 for leaf in jax.tree.leaves(p)), describe(params)))
    assert function(params, np.zeros(2)).finite is False
    params[f"w{bad:03}"] = np.float32(2)
    assert function(params, np.zeros(2)).finite is True
