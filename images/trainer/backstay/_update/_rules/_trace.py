"""One update of an optimizer, traced over the whole tree's shapes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ...errors import ConfigurationError, OptimizerError
from .._tree import TreeSpec, leaf_names
from ._advice import called, factories, never
from ._flat import Flat, Origins, flatten
from ._imaginary import drops_imaginary


@dataclass(frozen=True)
class StateSpec:
    """One array of the optimizer's state.

    Attributes:
        path: readable and unique, such as ``0.mu.dense.kernel``.
        shape, dtype: the array's shape and dtype in JAX; `dtype` is not a NumPy dtype for typed PRNG keys.
        weak_type: whether JAX lets it take the other operand's dtype.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any
    weak_type: bool

    @property
    def is_key(self) -> bool:
        """Whether these are typed PRNG keys, which are stored as their uint32 data."""
        return bool(jnp.issubdtype(self.dtype, jax.dtypes.prng_key))

    def shape_dtype(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            self.shape, self.dtype, weak_type=self.weak_type
        )


def key_impl(spec: StateSpec) -> Any:
    """Returns the generator that typed keys are of, for `jax.random.wrap_key_data`."""
    found: list[Any] = []
    jax.eval_shape(lambda keys: found.append(jax.random.key_impl(keys)), spec.shape_dtype())
    return found[0]


@dataclass(frozen=True)
class Trace:
    """The optimizer as two programs.

    Attributes:
        flat: an update. Inputs are the gradients, the states, the parameters, each leaf by leaf; outputs are the new
            parameters, then the new states.
        init: parameters to states.
    """

    tree: TreeSpec
    states: tuple[StateSpec, ...]
    treedef: Any  # of the state
    flat: Flat
    init: Flat

    @cached_property
    def origins(self) -> Origins:
        """The inputs that the outputs of an update always equal."""
        return Origins(self.flat)


def trace(optimizer: optax.GradientTransformation, tree: TreeSpec) -> Trace:
    """Trace ``optimizer.update`` and ``optax.apply_updates``.

    Raises:
        OptimizerError: the optimizer cannot be traced, needs more than gradients, state and parameters, or does not
            keep the dtypes and shapes of its state.
        ConfigurationError: the optimizer drops the imaginary parts of complex values.
    """
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise OptimizerError(
            f"optimizer is {type(optimizer).__name__}, not an optax.GradientTransformation: pass one, such as "
            f"optax.adam(1e-3)"
        )
    shapes = tree.shapes()
    init, state = called("init", optimizer, lambda: jax.make_jaxpr(optimizer.init, return_shape=True)(shapes))

    def step(gradients: Any, state: Any, params: Any) -> Any:
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(2):  # the second time with the weak types that the first update leaves
        closed, (new_params, new_state) = called(
            "update", optimizer, partial(jax.make_jaxpr(step, return_shape=True), shapes, state, shapes)
        )
        _same(tree, optimizer, new_params, state, new_state)
        before = [leaf.weak_type for leaf in jax.tree_util.tree_leaves(state)]
        if before == [bool(getattr(leaf, "weak_type", False)) for leaf in jax.tree_util.tree_leaves(new_state)]:
            break
        state = new_state
    paths, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = leaf_names(path for path, _ in paths)
    specs = tuple(
        StateSpec(name, tuple(leaf.shape), leaf.dtype, bool(leaf.weak_type))
        for name, (_, leaf) in zip(names, paths, strict=True)
    )
    flat, flat_init = flatten(closed), flatten(init)
    if (dtype := drops_imaginary(flat, flat_init, len(tree.leaves))) is not None:
        raise ConfigurationError(
            f"optimizer converts complex values to {dtype}, which drops their imaginary parts. Give the dtype of its "
            "state a complex one, such as accumulator_dtype=jnp.complex64 of optax.MultiSteps; use jnp.real where the "
            "real part is meant"
        )
    return Trace(tree, specs, treedef, flat, flat_init)


def _same(tree: TreeSpec, optimizer: Any, new_params: Any, state: Any, new_state: Any) -> None:
    for leaf, new in zip(tree.leaves, jax.tree_util.tree_leaves(new_params), strict=True):
        if (tuple(new.shape), np.dtype(new.dtype)) != (leaf.shape, leaf.dtype):
            raise OptimizerError(
                f"optimizer turns parameter {leaf} into {new.dtype}{list(new.shape)}: must keep its shape and dtype"
            )
    structures: list[Any] = [jax.tree_util.tree_structure(each) for each in (state, new_state)]
    if structures[0] != structures[1]:
        raise OptimizerError(
            "optimizer.update returns a state of another structure than optimizer.init: both must be equal. "
            f"{never(factories(optimizer))}".rstrip()
        )
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    names = leaf_names(path for path, _ in paths)
    for name, (_, old), new in zip(names, paths, jax.tree_util.tree_leaves(new_state), strict=True):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            raise OptimizerError(
                f"optimizer.update turns its state {name} from {old.dtype}{list(old.shape)} into "
                f"{new.dtype}{list(new.shape)}: both must be the same. Give the optimizer the dtype of its state, "
                "such as mu_dtype, or hyperparam_dtype of optax.inject_hyperparams, or use parameters of one precision."
            )
