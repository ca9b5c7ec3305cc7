"""Computes the contribution of one batch to an update, which is the gradient of ``loss`` and the new model state. To be
traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import ConfigurationError
from ._tree import LeafSpec, TreeSpec, leaf_names

LONGEST_NAME = 200
"""Characters in the name of a metric, which must fit into a call and a report (`backstay_rpc.limits`)."""

_SHOWN = 80

_ADDED_TOGETHER = 8  # one loop that reads more arrays than this is slower
NEW_STATE = "loss returned a new state"
GRADIENTS = "gradients returned gradients"
NON_FINITE_LOSS = (
    "the loss of step %d is %s although its gradients are finite, so the update was applied. A mean over an empty "
    "batch is such a loss"
)


def check_metric_name(what: str, name: str) -> None:
    """Refuse a name that a line of the log, a report or a metric of Prometheus cannot hold.

    Args:
        what: the function and what it did, such as ``evaluate returned``.

    Raises:
        ConfigurationError: `name` is empty, is longer than `LONGEST_NAME`, or has a character that is not printable.
    """
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        shown = repr(name) if len(name) <= _SHOWN else f"{repr(name)[:_SHOWN]}..."
        raise ConfigurationError(
            f"{what} a metric with the name {shown}: must be 1 to {LONGEST_NAME} printable characters"
        )


@dataclass(frozen=True)
class OwnGradients:
    """A user's function in the place of ``loss``, which also computes the gradient (``train(gradients=...)``).

    Attributes:
        function: gets what ``loss`` gets, and returns ``(result, gradients)``, as ``jax.value_and_grad`` makes it.
            `result` is what ``loss`` would return, and `gradients` has the tree of the parameters. For complex
            parameters they are the conjugates of what JAX returns: optimizers of optax subtract them.
    """

    function: Callable[..., Any]

    def __call__(self, *arguments: Any) -> Any:
        return self.function(*arguments)


@dataclass(frozen=True)
class LossOutcome:
    """One batch's contribution, traced.

    Attributes:
        leaves: one array for each leaf of the tree, with the leaf's shape and dtype: gradients of the parameters, then
            the new model state.
        loss: a floating-point scalar.
        metrics: real scalars by name.
        finite: a boolean scalar: no gradient has an infinite or NaN element, and no element of the model state became
            infinite or NaN.
    """

    leaves: list[Any]
    loss: Any
    metrics: dict[str, Any]
    finite: Any


class Objective:
    """A user's ``loss``, as a function of flat lists of leaves.

    Attributes:
        tree: the model's tree.
        frozen: the values of its frozen leaves. Compiled functions take them as an argument.
    """

    def __init__(
        self, loss: Any, tree: TreeSpec, *, has_rng: bool = False, seed: int = 0, frozen: Sequence[Any] = ()
    ) -> None:
        """
        Args:
            loss: ``(params, [state,] batch, [key])`` to ``scalar`` or ``(scalar, {name: scalar})``; with state to
                ``(scalar, new_state)`` or ``(scalar, new_state, {name: scalar})``.
            tree: the model's tree. `loss` gets a state if the tree has one.
            has_rng: whether `loss` gets a key, the one of `BatchKey.key`.
            seed: the seed of the random keys.
            frozen: the values of the tree's frozen leaves, on the devices.

        Raises:
            ConfigurationError: `loss` is not a function.
        """
        if not callable(loss):
            wanted = ", ".join(["params", *["state"] * tree.has_state, "batch", *["key"] * has_rng])
            raise ConfigurationError(f"loss is {type(loss).__name__}: must be a function of ({wanted})")
        self._loss = loss
        self._what = "gradients returned, as its result," if isinstance(loss, OwnGradients) else "loss returned"
        self.tree, self.frozen = tree, list(frozen)
        self._has_rng = has_rng
        self._seed = seed

    def __call__(self, leaves: Sequence[Any], batch: Any, at: Any, frozen: Sequence[Any] = ()) -> LossOutcome:
        """
        Args:
            leaves: the model's leaves, in the order of the tree.
            batch: any pytree of arrays.
            at: the step and the rank of the batch, uint32 of shape [2].
            frozen: `self.frozen`, traced. No gradient is computed for them.

        Raises:
            ConfigurationError: `loss` returns something else than it should.
        """
        count = len(self.tree.parameters.leaves)
        trained, untrained = list(leaves[:count]), list(leaves[count:])
        key = key_at(self._seed, at[0], at[1]) if self._has_rng else None

        def objective(trained: list[Any]) -> Any:
            return self._checked(self._called([*trained, *untrained], frozen, batch, key))

        if isinstance(self._loss, OwnGradients):
            result, own = self._pair(self._called(leaves, frozen, batch, key))
            (loss, (metrics, state)), gradients = self._checked(result), self._own_gradients(own)
        else:
            (loss, (metrics, state)), gradients = jax.value_and_grad(objective, has_aux=True)(trained)
            gradients = [_ascent(leaf) for leaf in gradients]
        finite = all_finite(gradients)
        if state:
            finite = finite & _stays_finite(state, untrained)
        return LossOutcome([*gradients, *state], loss, metrics, finite)

    def _called(self, leaves: Sequence[Any], frozen: Sequence[Any], batch: Any, key: Any) -> Any:
        model = self.tree.unflatten(leaves)
        params, state = model if self.tree.has_state else (model, None)
        params, state = self.tree.whole_model(params, state, frozen)
        of_state, of_key = [state] if self.tree.has_state else [], [key] if self._has_rng else []
        return self._loss(params, *of_state, batch, *of_key)

    def _own_gradients(self, gradients: Any) -> list[Any]:
        """Returns the gradients of the parameters that train. The function may return any others, or None, for frozen
        ones."""
        apart = self.tree.frozen
        if apart is not None and jax.tree_util.tree_structure(gradients) == apart.treedef:
            gradients = apart.rest(gradients)
        return _matching(self.tree.parameters, gradients, GRADIENTS)

    def _pair(self, made: Any) -> tuple[Any, Any]:
        if isinstance(made, tuple) and len(made) == 2:
            return made[0], made[1]
        raise ConfigurationError(
            f"gradients returned {_kind(made)}: must be (result, gradients), as jax.value_and_grad returns them"
        )

    def _checked(self, result: Any) -> Any:
        """Runs while tracing only, so a wrong `loss` is refused with its first batch."""
        scalar, state, metrics = self._parts(result)
        if not _is_scalar(scalar, jnp.floating):
            raise ConfigurationError(
                f"{self._what} {_kind(scalar)}: must be a floating-point scalar, such as the mean over the batch, or "
                f"{self._wanted()}"
            )
        for name, value in metrics.items():
            if not isinstance(name, str) or not (_is_scalar(value, jnp.number) or _is_scalar(value, jnp.bool_)):
                raise ConfigurationError(f"{self._what} the metric {name!r}: {_kind(value)}: must be a real scalar")
            check_metric_name(self._what, name)
        return scalar, ({name: jnp.asarray(value) for name, value in metrics.items()}, self._new_state(state))

    def _new_state(self, state: Any) -> list[Any]:
        """Returns the new values of the leaves of the model state that are not frozen."""
        whole, part = self.tree.everything.state, self.tree.frozen_state
        if whole is None:
            return []
        new = _matching(whole, state)
        return new if part is None else [leaf for leaf, frozen in zip(new, part.places, strict=True) if not frozen]

    def _parts(self, result: Any) -> tuple[Any, Any, Mapping[Any, Any]]:
        """Scalar, new state and metrics."""
        if self.tree.has_state:
            if isinstance(result, tuple) and len(result) == 2:
                return result[0], result[1], {}
            if isinstance(result, tuple) and len(result) == 3 and isinstance(result[2], Mapping):
                return result[0], result[1], result[2]
            what = f"a tuple of {_kinds(result)}" if isinstance(result, tuple) else _kind(result)
            raise ConfigurationError(f"{self._what} {what}: with has_state=True it must be {self._wanted()}")
        if isinstance(result, tuple):
            if len(result) == 2 and isinstance(result[1], Mapping):
                return result[0], None, result[1]
            raise ConfigurationError(f"{self._what} a tuple of {_kinds(result)}: must be a scalar, or {self._wanted()}")
        return result, None, {}

    def _wanted(self) -> str:
        if self.tree.has_state:
            return "(scalar, new_state), or (scalar, new_state, {name: scalar})"
        return "(scalar, {name: scalar})"


def key_at(seed: int, step: Any, rank: Any) -> Any:
    """Returns the random key of a batch, which depends on (seed, step, rank) alone. `step` and `rank` may be traced."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), rank)


def _matching(spec: TreeSpec, state: Any, what: str = NEW_STATE) -> list[Any]:
    """Returns the leaves of the new model state, or of the gradients.

    Raises:
        ConfigurationError: `state` has another structure than `init` returned, or other shapes or dtypes.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    if treedef != spec.treedef:
        names, own = leaf_names(path for path, _ in flat), [leaf.path for leaf in spec.leaves]
        other = next((name for name in own if name not in names), None) or next(
            (name for name in names if name not in own), None
        )
        why = f"the leaf {other} is only in one of them" if other else f"{treedef} is not {spec.treedef}"
        raise ConfigurationError(f"{what} of another structure than init's: {why}")
    return [_as_leaf(leaf, value, what) for leaf, (_, value) in zip(spec.leaves, flat, strict=True)]


def _as_leaf(leaf: LeafSpec, value: Any, what: str) -> Any:
    if isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
        array = jnp.asarray(value)
        if array.shape == leaf.shape and array.dtype == leaf.dtype:
            return array
        # A Python number, or what was computed from nothing but Python numbers, takes the dtype of the leaf.
        weak = array.shape == leaf.shape and getattr(array, "weak_type", False)
        if weak and jnp.result_type(value, jnp.zeros((), leaf.dtype)) == leaf.dtype:
            return array.astype(leaf.dtype)
    role = ("loss", "new state") if what == NEW_STATE else ("gradients", "gradient")
    raise ConfigurationError(
        f"{role[0]} returned {_kind(value)} as the {role[1]} of {leaf.path}: must be {leaf.dtype.name}"
        f"{list(leaf.shape)}, as init returned it"
    )


def _ascent(gradient: Any) -> Any:
    """Returns the direction in which the loss grows fastest, as optimizers of optax want it.

    For a complex parameter, JAX returns its conjugate.
    https://docs.jax.dev/en/latest/notebooks/autodiff_cookbook.html#complex-numbers-and-differentiation
    """
    return jnp.conj(gradient) if jnp.issubdtype(gradient.dtype, jnp.complexfloating) else gradient


def _stays_finite(new: Sequence[Any], old: Sequence[Any]) -> Any:
    """Returns whether each element is finite, or was not before (a running minimum may begin at infinity)."""
    flags = [
        jnp.all(jnp.isfinite(after) | ~jnp.isfinite(before))
        for after, before in zip(new, old, strict=True)
        if jnp.issubdtype(after.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.asarray(flags, jnp.bool_))


def all_finite(arrays: Sequence[Any]) -> Any:
    """Returns whether all elements are finite. x - x is 0 for finite x, and otherwise NaN.

    On a CPU this takes a fifth of the time of `isfinite`. 0 * x would share its zeros with a gradient that begins with
    zeros, as that of an embedding, and XLA would then copy the gradient.

    Arrays of one shape and dtype are added first, some at a time. A reduction of each would compile for longer.
    """
    of_one_shape: dict[Any, list[Any]] = {}
    for array in arrays:
        of_one_shape.setdefault((array.shape, array.dtype), []).append(array)
    flags = []
    for same in of_one_shape.values():
        for at in range(0, len(same), _ADDED_TOGETHER):
            zero = same[at] - same[at]
            for array in same[at + 1 : at + _ADDED_TOGETHER]:
                zero = zero + (array - array)
            flags.append(jnp.sum(zero) == 0)
    return jnp.all(jnp.asarray(flags, jnp.bool_))


def _is_scalar(value: Any, kind: Any) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float):
        return False
    dtype = jnp.result_type(value)
    return (
        np.shape(value) == () and bool(jnp.issubdtype(dtype, kind)) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array {jnp.result_type(value)}{list(np.shape(value))}"
    return f"{type(value).__name__}"


def _kinds(values: Sequence[Any]) -> str:
    return ", ".join(_kind(value) for value in values)
