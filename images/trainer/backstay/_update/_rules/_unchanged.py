"""Finds the parameters that an optimizer never changes, and runs it on the others alone.

``optax.multi_transform({"train": optax.adam(1e-3), "freeze": optax.set_to_zero()}, labels)`` is such an optimizer. Its
trace proves that a parameter keeps its value. So the parameter can be frozen without another result.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import optax

from .._tree import FrozenSpec
from ._flat import dependencies
from ._trace import Trace

__all__ = ["only_trained", "unchanged_parameters"]


def unchanged_parameters(traced: Trace) -> tuple[bool, ...]:
    """Returns whether each parameter provably keeps its value, and nothing else is computed from it or from its
    gradient.

    Returns:
        A flag for each parameter leaf; all False for an optimizer that changes no parameter.
    """
    leaves, states, flat = len(traced.tree.leaves), len(traced.states), traced.flat
    kept = {leaf for leaf in range(leaves) if traced.origins.unchanged(flat.outputs[leaf]) == leaves + states + leaf}
    if not 0 < len(kept) < leaves:
        return (False,) * leaves
    bits = [1 << leaf for leaf in range(leaves)]
    read = dependencies(flat, [*bits, *[0] * states, *bits])
    of_states = [*dependencies(traced.init, bits), *read[leaves:]]
    while True:
        needed = 0
        for mask in (*of_states, *(read[leaf] for leaf in range(leaves) if leaf not in kept)):
            needed |= mask
        wanted = {leaf for leaf in kept if needed & bits[leaf]}
        if not wanted:
            return tuple(leaf in kept for leaf in range(leaves))
        kept -= wanted


def only_trained(optimizer: optax.GradientTransformation, frozen: FrozenSpec) -> optax.GradientTransformation:
    """Returns the same optimizer for trees without the frozen leaves, which `unchanged_parameters` has found.

    Args:
        optimizer: gets whole trees, with zeros for frozen leaves, which nothing is computed from.
        frozen: the frozen leaves.
    """

    def whole(tree: Any) -> Any:
        return frozen.combine(tree, [jnp.zeros(leaf.shape, leaf.dtype) for leaf in frozen.leaves])

    def init(params: Any) -> Any:
        return optimizer.init(whole(params))

    def update(gradients: Any, state: Any, params: Any = None) -> Any:
        updates, state = optimizer.update(whole(gradients), state, None if params is None else whole(params))
        return frozen.rest(updates), state

    return optax.GradientTransformation(init, update)
