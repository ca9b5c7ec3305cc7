"""Common parts of the adapters, which make the arguments for `train` and trees of plain dicts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .._update import leaf_names, selected
from ..errors import ConfigurationError

Path = tuple[Any, ...]


@dataclass(frozen=True)
class Adapter(Mapping[str, Any]):
    """A model as arguments of `train`, for ``backstay.train(**adapter, batches=..., optimizer=..., steps=...)``.

    Attributes:
        init: PRNG key to parameters, or to ``(params, state)``: dicts of arrays, which a checkpoint restores by itself.
        loss: the function that `train` takes as `loss`.
        evaluate: the function that `train` takes as `evaluate`, or None.
        has_state: whether the model has a state.
        has_rng: whether `loss` gets a random key.
        frozen: the argument `frozen` of `train`; None: all parameters train.
        frozen_state: the argument `frozen_state` of `train`.
        model: ``model(params, state=None)`` makes the model again, for evaluation, such as from a `Result` or from
            what `backstay.load` returns.
    """

    init: Callable[[Any], Any]
    loss: Callable[..., Any]
    evaluate: Callable[..., Mapping[str, float]] | None
    has_state: bool
    has_rng: bool
    model: Callable[..., Any]
    frozen: Any = None
    frozen_state: Any = None

    def _arguments(self) -> dict[str, Any]:
        always = ("init", "loss", "evaluate", "has_state", "has_rng")
        given = (name for name in ("frozen", "frozen_state") if getattr(self, name) is not None)
        return {name: getattr(self, name) for name in (*always, *given)}

    def __getitem__(self, name: str) -> Any:
        return self._arguments()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments())

    def __len__(self) -> int:
        return len(self._arguments())


def check_function(what: str, value: Any, *, optional: bool = False) -> None:
    """
    Raises:
        ConfigurationError: `value` is not a function.
    """
    if not callable(value) and not (optional and value is None):
        raise ConfigurationError(f"{what} is {type(value).__name__}: must be a function{' or None' * optional}")


def scalar_and_metrics(result: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the scalar and the metrics that a loss returned.

    Raises:
        ConfigurationError: the tuple has other members.
    """
    if not isinstance(result, tuple):
        return result, {}
    if len(result) == 2 and isinstance(result[1], Mapping):
        return result
    kinds = ", ".join(type(value).__name__ for value in result)
    raise ConfigurationError(f"loss returned a tuple of {kinds}: must be a scalar, or (scalar, {{name: scalar}})")


def nest(paths: Sequence[Path], values: Sequence[Any]) -> dict[Any, Any]:
    """Nested dicts with `values` at `paths`; an empty path is the key ``value``."""
    root: dict[Any, Any] = {}
    for path, value in zip(paths, values, strict=True):
        node = root
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1] if path else "value"] = value
    return root


def pick(tree: Mapping[Any, Any], paths: Sequence[Path]) -> list[Any]:
    """Returns the values at `paths`, as `nest` put them there."""
    values = []
    for path in paths:
        node: Any = tree
        for key in path or ("value",):
            node = node[key]
        values.append(node)
    return values


def frozen_beside(fixed: Any, frozen: Any) -> Any:
    """Returns the argument `frozen` of `train`, for a model of which a part does not train in any case.

    Args:
        fixed: a tree of dicts like the parameters, with a boolean for each array: whether it is in that part.
        frozen: the argument of the adapter.
    """
    flags, treedef = jax.tree_util.tree_flatten(fixed)
    if not any(flags):
        return frozen
    if frozen is None or frozen is False:
        return fixed
    names = leaf_names(path for path, _ in jax.tree_util.tree_flatten_with_path(fixed)[0])
    own = selected(frozen, fixed, names)
    return jax.tree_util.tree_unflatten(treedef, [flag or also for flag, also in zip(flags, own, strict=True)])


def keys_of(path: Sequence[Any]) -> Path:
    """Returns a key path of JAX as keys of nested dicts, which are names of attributes, numbers of items, or keys of
    dicts."""
    keys = []
    for entry in path:
        key = getattr(entry, "name", None)
        if key is None:
            key = getattr(entry, "idx", None)
        if key is None:
            key = getattr(entry, "key", None)
        keys.append(key if isinstance(key, str | int) else str(entry))
    return tuple(keys)


def cast(tree: Any, dtype: Any) -> Any:
    """`tree` with its real floating-point arrays in `dtype`; None leaves it as it is."""
    if dtype is None:
        return tree

    def convert(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf, dtype) if floating else leaf

    return jax.tree.map(convert, tree)
