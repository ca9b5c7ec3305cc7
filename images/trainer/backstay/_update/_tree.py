"""A model, its parameters and optionally its state, as a list of named leaves.

Every other module refers to a leaf by its index in this list: shards, blocks on the wire, checkpoints. A tree that
gradients cannot train, or that would mean something else once its leaves are stored apart, is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from ..errors import TreeError

PARAMS: Final = "params/"
MODEL_STATE: Final = "state/"
"""The beginnings of a checkpoint's names of arrays; no path has a slash."""

_UNSAFE = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class LeafSpec:
    """One array of a model.

    Attributes:
        path: readable and unique among the parameters, or in the model state: the keys on the way to the leaf joined
            by ``.``, such as ``dense.kernel`` or ``layers.0.bias``. Only ``A-Z a-z 0-9 _ - . % ~`` occur, so it is safe
            in file names.
        shape: the array's shape.
        dtype: the array's dtype as JAX holds it (float64 is float32 unless x64 is enabled).
        trained: True for a parameter, which the optimizer updates; False for a leaf of the model state, whose new value
            is the weighted mean of the contributions' new values.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    trained: bool = True

    @property
    def name(self) -> str:
        """Unique among all leaves of a model: the path of a parameter; ``state/`` and the path of another leaf."""
        return self.path if self.trained else MODEL_STATE + self.path

    @property
    def key(self) -> str:
        """Returns the name of the array in checkpoints, which is ``params/`` or ``state/``, and the path."""
        return (PARAMS if self.trained else MODEL_STATE) + self.path

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name} {self.dtype.name}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class TreeSpec:
    """The leaves of a model in JAX's order, parameters first, and how to put them together again.

    Attributes:
        leaves: the leaves of the parameters, then those of the model state.
        treedef: the `jax.tree_util.PyTreeDef` of what `init` returns: of the parameters, or of the pair
            ``(params, state)``.
        has_state: whether it is of the pair.
    """

    leaves: tuple[LeafSpec, ...]
    treedef: Any
    has_state: bool = False

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def parameters(self) -> TreeSpec:
        """The parameters alone."""
        if not self.has_state:
            return self
        return TreeSpec(tuple(leaf for leaf in self.leaves if leaf.trained), self.treedef.children()[0])

    @cached_property
    def state(self) -> TreeSpec | None:
        """The model state alone, whose leaves are not trained; None for a model without state."""
        if not self.has_state:
            return None
        return TreeSpec(tuple(leaf for leaf in self.leaves if not leaf.trained), self.treedef.children()[1])

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Put `leaves` (one for each of `self.leaves`, any objects) into the tree that `init` returns, parameters or
        ``(params, state)``."""
        return jax.tree_util.tree_unflatten(self.treedef, list(leaves))

    def shapes(self) -> Any:
        """The tree with a `jax.ShapeDtypeStruct` at every leaf."""
        return self.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
            for leaf in self.leaves
        )

    def difference(self, other: TreeSpec) -> str | None:
        """The first leaf in which `other` differs, in words; None if paths, shapes and dtypes are equal."""
        mine = {leaf.name: leaf for leaf in self.leaves}
        theirs = {leaf.name: leaf for leaf in other.leaves}
        for name, leaf in mine.items():
            if name not in theirs:
                return f"the other tree has no leaf {leaf}"
            if theirs[name] != leaf:
                return f"leaf {name} is {leaf} here and {theirs[name]} in the other tree"
        for name, leaf in theirs.items():
            if name not in mine:
                return f"only the other tree has leaf {leaf}"
        if [leaf.name for leaf in self.leaves] != [leaf.name for leaf in other.leaves]:
            return "the leaves are in another order"
        return None


def describe(tree: Any, *, has_state: bool = False) -> TreeSpec:
    """Name the leaves of a model and check that it can be trained.

    Args:
        tree: the parameters, any pytree of floating-point or complex arrays (JAX, NumPy, Python floats,
            `jax.ShapeDtypeStruct`); with `has_state` the pair ``(params, state)``, where `state` is a pytree of arrays
            of numbers or booleans. ``None`` is an empty subtree, as everywhere in JAX.

    Raises:
        TreeError: `tree` is not such a pair; a leaf is not an array; a parameter has a dtype without gradients
            (integers, booleans, keys); a parameter is the same array as another one; a leaf of the state is a typed
            key.
    """
    if not has_state:
        return TreeSpec(_leaves(tree, trained=True), jax.tree_util.tree_structure(tree))
    if type(tree) is not tuple or len(tree) != 2:
        what = f"a tuple of {len(tree)}" if isinstance(tree, tuple) else type(tree).__name__
        raise TreeError(f"init returned {what}: with has_state=True it must return the pair (params, state)")
    params, state = tree
    leaves = (*_leaves(params, trained=True), *_leaves(state, trained=False))
    return TreeSpec(leaves, jax.tree_util.tree_structure(tree), has_state=True)


def _leaves(tree: Any, *, trained: bool) -> tuple[LeafSpec, ...]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = leaf_names(path for path, _ in flat)
    leaves: list[LeafSpec] = []
    seen: dict[int, str] = {}
    for name, (_, value) in zip(names, flat, strict=True):
        leaves.append(_leaf(name, value, trained=trained))
        if not trained or not isinstance(value, jax.Array | np.ndarray):
            continue
        if (other := seen.setdefault(id(value), name)) != name:
            raise TreeError(
                f"parameters: leaves {other} and {name} are the same array. Training would separate them: keep "
                f"the array at one place in the tree and use it twice in `loss`, or make the second a copy."
            )
    return tuple(leaves)


def leaf_names(paths: Iterable[tuple[Any, ...]]) -> list[str]:
    """Readable, unique, file-safe names of key paths (`jax.tree_util.tree_flatten_with_path`), in the same order.

    Characters that could be mistaken for a separator are written as ``%XX``; names that are still equal (the keys
    ``0`` and ``"0"``) get ``~1``, ``~2`` ... in order.
    """
    counts: Counter[str] = Counter()
    names = []
    for path in paths:
        name = ".".join(_escape(_key(entry)) for entry in path) or "value"
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}~{counts[name] - 1}")
    return names


def arrays(tree: Any, spec: TreeSpec) -> list[np.ndarray[Any, Any]]:
    """The leaves of `tree` as C-contiguous host arrays of `spec`'s dtypes and shapes.

    Raises:
        TreeError: `tree` has other leaves than `spec`.
    """
    if (why := spec.difference(describe(tree, has_state=spec.has_state))) is not None:
        raise TreeError(f"parameters: {why}")
    values = jax.tree_util.tree_leaves(tree)
    return [
        np.ascontiguousarray(np.asarray(value), dtype=leaf.dtype).reshape(leaf.shape)
        for leaf, value in zip(spec.leaves, values, strict=True)
    ]


def is_low_precision(dtype: np.dtype[Any]) -> bool:
    """Whether sums in `dtype` are made in float32: floats of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def _leaf(name: str, value: Any, *, trained: bool) -> LeafSpec:
    part = "parameters" if trained else "model state"
    if isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic):
        dtype = value.dtype
        shape = tuple(value.shape)
    elif isinstance(value, bool | int | float | complex):
        dtype = jnp.result_type(value)
        shape = ()
    else:
        raise TreeError(
            f"{part}: leaf {name} is of type {type(value).__name__}, not an array. `init` must return a pytree "
            f"of arrays; keep configuration out of it."
        )
    if trained and not jnp.issubdtype(dtype, jnp.inexact):
        raise TreeError(
            f"parameters: leaf {name} is {dtype}, which gradients cannot train. Keep it out of what `init` returns "
            f"(close over it in `loss`), make it a floating-point array, or move it to the model state "
            f"(has_state=True)."
        )
    if not trained and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TreeError(
            f"model state: leaf {name} is a typed random key, which has no mean. Pass has_rng=True: `loss` then gets "
            f"a new key in each step."
        )
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TreeError(f"{part}: leaf {name} is {dtype}: must be an array of numbers or booleans")
    return LeafSpec(name, shape, np.dtype(jax.dtypes.canonicalize_dtype(dtype)), trained)


def _key(entry: Any) -> str:
    if isinstance(entry, DictKey | FlattenedIndexKey):
        return str(entry.key)
    if isinstance(entry, SequenceKey):
        return str(entry.idx)
    if isinstance(entry, GetAttrKey):
        return str(entry.name)
    return str(entry)


def _escape(key: str) -> str:
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match.group().encode()), key) or "%"
