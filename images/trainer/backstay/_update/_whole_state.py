"""The state of a model in one process, by the names that the shards of a job give to the same arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._array_specs import ArraySpec, array_specs
from ._rules import Rule, key_impl
from ._snapshot import Entry

__all__ = ["entries_of", "model_from", "optimizer_state_from"]

_Array = np.ndarray[Any, np.dtype[Any]]
_Read = Callable[[str, int, int], _Array]


def entries_of(rule: Rule, model: Sequence[Any], optimizer_state: Any) -> tuple[Entry, ...]:
    """Everything that a checkpoint contains, as one shard would store it.

    The values are views of host memory, or copies of the memory of other devices. They never change: JAX copies a
    donated array of which a view exists.

    Args:
        model: the leaves of the parameters, then of the model state.
        optimizer_state: the state of the optimizer of `rule`.
    """
    values = [*model, *map(_data, jax.tree_util.tree_leaves(optimizer_state))]
    for value in values:
        value.copy_to_host_async()
    entries = []
    for spec, value in zip(array_specs(rule), values, strict=True):
        flat = np.asarray(value).reshape(-1)
        if flat.size:
            entries.append(Entry(spec.key, 0, flat.size, flat))
    return tuple(entries)


def model_from(rule: Rule, read: _Read) -> Any:
    """Returns the model that `read` returns, with the structure of what `init` returns; see `ShardEngine.restore`."""
    specs = array_specs(rule)[: len(rule.tree.leaves)]
    return rule.tree.unflatten([_stored(spec, read) for spec in specs])


def optimizer_state_from(rule: Rule, initial: Any, read: _Read) -> Any:
    """Returns the optimizer's state that `read` returns, with the `Rule.constants` of the initial one.

    Args:
        initial: a state that ``optimizer.init`` returned.
    """
    specs = array_specs(rule)[len(rule.tree.leaves) :]
    leaves, treedef = jax.tree_util.tree_flatten(initial)
    restored = []
    for index, (leaf, state, spec) in enumerate(zip(leaves, rule.states, specs, strict=True)):
        if index in rule.constants:
            restored.append(leaf)
            continue
        value = jnp.asarray(_stored(spec, read))
        if state.is_key:
            restored.append(jax.random.wrap_key_data(value, impl=key_impl(state)))
        elif state.weak_type:
            # An update of a weakly typed array keeps its type, which decides the dtypes of later results.
            restored.append(leaf.at[...].set(value.astype(leaf.dtype)))
        else:
            restored.append(jnp.array(value, spec.dtype, copy=True))
    return jax.tree_util.tree_unflatten(treedef, restored)


def _data(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _stored(spec: ArraySpec, read: _Read) -> np.ndarray:
    """Returns the array that `read` returns. Empty ones are not stored."""
    flat = read(spec.key, 0, spec.size) if spec.size else np.empty(0, spec.dtype)
    return flat.reshape(spec.shape)
