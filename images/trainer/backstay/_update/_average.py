"""The exponential moving average of the parameters, as a part of an optimizer's state.

Servers update, replicate and checkpoint the state of the optimizer exactly once for each update. So a part of that
state needs no further rule.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax

from ._tree import is_low_precision

if TYPE_CHECKING:
    from ._rules import Rule
    from ._tree import TreeSpec

__all__ = ["AVERAGE", "ParameterAverage", "average_of", "averaged", "averages"]

AVERAGE: Final = "parameter_average."
"""The path of the average of a leaf in the optimizer's state begins with this. The leaf's path follows."""

_WARM_UP: Final = 9.0


class ParameterAverage(NamedTuple):
    """The state of an optimizer with an average of the parameters.

    Attributes:
        parameter_average: the average; the tree of the parameters, or ``{"value": leaf}`` for parameters that are one
            array. float32 for leaves of a narrower dtype, and otherwise the leaf's dtype.
        updates: number of updates.
        optimizer: the state of the optimizer itself.
    """

    parameter_average: Any
    updates: Any
    optimizer: Any


def averaged(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Returns the same optimizer, with an average of the parameters in its state.

    Update number n (1, 2, ...) computes ``average += (1 - d) * (parameters - average)`` with the new parameters and
    ``d = min(decay, n / (n + 9))``. The second term forgets the initial parameters in the first updates.
    https://www.tensorflow.org/api_docs/python/tf/train/ExponentialMovingAverage (``num_updates``)

    Args:
        optimizer: any optax optimizer.
        decay: the share of the old average that an update keeps; more than 0 and less than 1.
    """

    def init(params: Any) -> ParameterAverage:
        start = jax.tree_util.tree_map(lambda leaf: jnp.array(leaf, _dtype(leaf), copy=True), _contained(params))
        return ParameterAverage(start, jnp.zeros((), jnp.int32), optimizer.init(params))

    def update(gradients: Any, state: ParameterAverage, params: Any = None) -> tuple[Any, ParameterAverage]:
        updates, held = optimizer.update(gradients, state.optimizer, params)
        count = optax.safe_increment(state.updates)

        def moved(average: Any, new: Any) -> Any:
            real = average.real.dtype
            share = jnp.maximum(jnp.asarray(1.0 - decay, real), _WARM_UP / (_WARM_UP + count.astype(real)))
            return average + share * (new.astype(average.dtype) - average)

        new = optax.apply_updates(params, updates)
        average = jax.tree_util.tree_map(moved, state.parameter_average, _contained(new))
        return updates, ParameterAverage(average, count, held)

    return optax.GradientTransformation(init, update)


def average_of(state: Any, tree: TreeSpec) -> Any:
    """Returns the average in an optimizer's state, in the structure and the dtypes of the parameters, or None if it has
    none.

    Args:
        tree: the model's tree.
    """
    if not isinstance(state, ParameterAverage):
        return None
    leaves = jax.tree_util.tree_leaves(state.parameter_average)
    specs = tree.parameters.leaves
    return tree.parameters.unflatten([leaf.astype(spec.dtype) for leaf, spec in zip(leaves, specs, strict=True)])


def averages(rule: Rule) -> dict[int, int]:
    """Returns the state that holds the average of each parameter leaf, both by number; empty without an average."""
    numbers = {state.path: number for number, state in enumerate(rule.states)}
    wanted = ((index, AVERAGE + leaf.path) for index, leaf in enumerate(rule.tree.leaves) if leaf.trained)
    return {index: numbers[path] for index, path in wanted if path in numbers}


def _contained(params: Any) -> Any:
    """Returns the parameters in a container, so that each leaf has a name."""
    return {"value": params} if jax.tree_util.all_leaves([params]) else params


def _dtype(leaf: Any) -> Any:
    dtype = jnp.result_type(leaf)
    return jnp.dtype(jnp.float32) if is_low_precision(dtype) else dtype
