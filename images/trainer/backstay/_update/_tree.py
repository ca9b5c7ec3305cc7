"""A model, its parameters and optionally its state, as a list of named leaves.

Every other module refers to a leaf by its index in this list: shards, blocks on the wire, checkpoints. A tree that
gradients cannot train, or that would mean something else once its leaves are stored apart, is refused here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from ..errors import TreeError
from ._frozen import merged, selected

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
        trained: True for a parameter; False for a leaf of the model state, whose new value is the weighted mean of the
            contributions' new values.
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
class FrozenSpec:
    """The frozen leaves of the parameters or of the model state, and their places there.

    Attributes:
        leaves: in the order of the tree.
        treedef: the `jax.tree_util.PyTreeDef` of the whole tree, with its frozen leaves and the others.
        places: for each leaf of `treedef`, whether it is frozen.
    """

    leaves: tuple[LeafSpec, ...]
    treedef: Any
    places: tuple[bool, ...]

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    def combine(self, rest: Any, frozen: Sequence[Any]) -> Any:
        """Returns the whole tree.

        Args:
            rest: the tree without frozen leaves, which has None in their places.
            frozen: a value for each of `leaves`.
        """
        return jax.tree_util.tree_unflatten(self.treedef, merged(self.places, jax.tree_util.tree_leaves(rest), frozen))

    def rest(self, whole: Any) -> Any:
        """Returns the tree without frozen leaves. Raises `ValueError` if `whole` has another structure."""
        leaves = self.treedef.flatten_up_to(whole)
        kept = [None if place else leaf for place, leaf in zip(self.places, leaves, strict=True)]
        return jax.tree_util.tree_unflatten(self.treedef, kept)

    def values(self, whole: Any) -> list[Any]:
        """Returns the frozen leaves of the whole tree. Raises `ValueError` as `rest` does."""
        leaves = self.treedef.flatten_up_to(whole)
        return [leaf for place, leaf in zip(self.places, leaves, strict=True) if place]


@dataclass(frozen=True)
class TreeSpec:
    """The leaves of a model in JAX's order, parameters first, and how to put them together again.

    Attributes:
        leaves: the leaves of the parameters, then those of the model state.
        treedef: the `jax.tree_util.PyTreeDef` of what `init` returns: of the parameters, or of the pair
            ``(params, state)``.
        has_state: whether it is of the pair.
        frozen: the parameters that do not train: they are not in `leaves`, and `treedef` has None in their places.
            None: all train.
        frozen_state: the same, of the model state. None: contributions may change all of it.
    """

    leaves: tuple[LeafSpec, ...]
    treedef: Any
    has_state: bool = False
    frozen: FrozenSpec | None = None
    frozen_state: FrozenSpec | None = None

    @property
    def nbytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.leaves)

    @cached_property
    def frozen_leaves(self) -> tuple[LeafSpec, ...]:
        """All frozen leaves, those of the parameters first."""
        return tuple(leaf for part in (self.frozen, self.frozen_state) if part is not None for leaf in part.leaves)

    @cached_property
    def parameters(self) -> TreeSpec:
        """The parameters alone."""
        if not self.has_state:
            return self
        return TreeSpec(tuple(leaf for leaf in self.leaves if leaf.trained), self.treedef.children()[0])

    @cached_property
    def state(self) -> TreeSpec | None:
        """The model state alone, without its frozen leaves; None for a model without state."""
        if not self.has_state:
            return None
        return TreeSpec(tuple(leaf for leaf in self.leaves if not leaf.trained), self.treedef.children()[1])

    @cached_property
    def everything(self) -> TreeSpec:
        """The whole model, with its frozen leaves among the others."""
        leaves, treedefs = list[LeafSpec](), []
        for rest, part in ((self.parameters, self.frozen), (self.state, self.frozen_state)):
            if rest is not None:
                leaves += rest.leaves if part is None else merged(part.places, rest.leaves, part.leaves)
                treedefs.append(rest.treedef if part is None else part.treedef)
        treedef: Any = jax.tree_util.treedef_tuple(treedefs) if self.has_state else treedefs[0]
        return TreeSpec(tuple(leaves), treedef, self.has_state)

    def unflatten(self, leaves: Iterable[Any]) -> Any:
        """Put `leaves` (one for each of `self.leaves`, any objects) into the tree that `init` returns, parameters or
        ``(params, state)``."""
        return jax.tree_util.tree_unflatten(self.treedef, list(leaves))

    def whole(self, params: Any, frozen: Sequence[Any]) -> Any:
        """Returns all parameters, out of those that train and the values of `frozen_leaves`."""
        return params if self.frozen is None else self.frozen.combine(params, frozen)

    def whole_model(self, params: Any, state: Any, frozen: Sequence[Any]) -> tuple[Any, Any]:
        """Returns all parameters and the whole model state, which is None for a model without state."""
        part = self.frozen_state
        if part is not None:
            state = part.combine(state, frozen[len(self.frozen_leaves) - len(part.leaves) :])
        return self.whole(params, frozen), state

    def rest(self, model: Any) -> Any:
        """Returns the result of `init` without its frozen leaves."""
        params, *state = model if self.has_state else (model,)
        params = params if self.frozen is None else self.frozen.rest(params)
        if not state:
            return params
        return params, state[0] if self.frozen_state is None else self.frozen_state.rest(state[0])

    def frozen_values(self, model: Any) -> list[Any]:
        """Returns the values of `frozen_leaves`, out of the result of `init`."""
        parts = zip((self.frozen, self.frozen_state), model if self.has_state else (model,), strict=False)
        return [value for part, whole in parts if part is not None for value in part.values(whole)]

    def shapes(self) -> Any:
        """Returns the tree with a `jax.ShapeDtypeStruct` at every leaf."""
        return self.unflatten(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
            for leaf in self.leaves
        )

    def difference(self, other: TreeSpec) -> str | None:
        """Returns the first leaf in which `other` differs, in words; None if paths, shapes and dtypes are equal."""
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


def describe(tree: Any, *, has_state: bool = False, frozen: Any = None, frozen_state: Any = None) -> TreeSpec:
    """Name the leaves of a model and check that it can be trained.

    Args:
        tree: the parameters, any pytree of floating-point or complex arrays (JAX, NumPy, Python floats,
            `jax.ShapeDtypeStruct`); with `has_state` the pair ``(params, state)``, where `state` is a pytree of arrays
            of numbers or booleans. ``None`` is an empty subtree, as everywhere in JAX.
        frozen: which parameters are frozen, as in `train`; False: none. They may be arrays of any numbers.
        frozen_state: which leaves of `state` are frozen, as in `train`.

    Raises:
        TreeError: `tree` is not such a pair; a leaf is not an array; a parameter has a dtype without gradients
            (integers, booleans, keys); a parameter is the same array as another one; a leaf of the state is a typed
            key; `frozen` or `frozen_state` is invalid.
    """
    frozen, frozen_state = (None if _is_false(one) else one for one in (frozen, frozen_state))
    params, state = tree, None
    if frozen_state is not None and not has_state:
        raise TreeError("frozen_state is given, and the model has no state: leave it out, or give it with has_state")
    if has_state:
        if type(tree) is not tuple or len(tree) != 2:
            what = f"a tuple of {len(tree)}" if isinstance(tree, tuple) else type(tree).__name__
            raise TreeError(f"init returned {what}: with has_state=True it must return the pair (params, state)")
        params, state = tree
    leaves, apart = _parameters(params, frozen)
    kept = params if apart is None else apart.rest(params)
    if not has_state:
        return TreeSpec(leaves, jax.tree_util.tree_structure(kept), frozen=apart)
    states, still = _states(state, frozen_state)
    structure = jax.tree_util.tree_structure((kept, state if still is None else still.rest(state)))
    return TreeSpec((*leaves, *states), structure, has_state=True, frozen=apart, frozen_state=still)


def _is_false(value: Any) -> bool:
    return isinstance(value, bool | np.bool_) and not value


def _parameters(params: Any, frozen: Any) -> tuple[tuple[LeafSpec, ...], FrozenSpec | None]:
    """Returns the leaves that train, and those that are frozen."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(params)
    names = leaf_names(path for path, _ in flat)
    places = (False,) * len(names) if frozen is None else selected(frozen, params, names)
    leaves = [
        _leaf(name, value, "frozen" if apart else "trained")
        for name, (_, value), apart in zip(names, flat, places, strict=True)
    ]
    refuse_shared(names, [value for _, value in flat], places)
    return _separated(leaves, treedef, None if frozen is None else places)


def _separated(
    leaves: Sequence[LeafSpec], treedef: Any, places: tuple[bool, ...] | None
) -> tuple[tuple[LeafSpec, ...], FrozenSpec | None]:
    """Returns the leaves that are not frozen, and those that are. `places` is whether each is, or None if none is."""
    if places is None:
        return tuple(leaves), None
    rest = tuple(leaf for leaf, apart in zip(leaves, places, strict=True) if not apart)
    kept = tuple(leaf for leaf, apart in zip(leaves, places, strict=True) if apart)
    return rest, FrozenSpec(kept, treedef, places)


def refuse_shared(names: Sequence[str], values: Sequence[Any], frozen: Sequence[bool]) -> None:
    """Refuse an array that is at two places of the parameters, if it trains at one of them.

    Args:
        names: the names of the leaves.
        values: the values of the leaves. Only arrays are compared.
        frozen: whether each leaf is frozen.

    Raises:
        TreeError: an array is at two places.
    """
    seen: dict[int, tuple[str, bool]] = {}
    for name, value, apart in zip(names, values, frozen, strict=True):
        if not isinstance(value, jax.Array | np.ndarray):
            continue
        other, other_apart = seen.setdefault(id(value), (name, apart))
        if other != name and not (apart and other_apart):
            raise TreeError(
                f"parameters: leaves {other} and {name} are the same array. Training would separate them: keep "
                f"the array at one place in the tree and use it twice in `loss`, or make the second a copy."
            )


def _states(state: Any, frozen: Any) -> tuple[tuple[LeafSpec, ...], FrozenSpec | None]:
    """Returns the leaves that travel, and those that are frozen."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(state)
    names = leaf_names(path for path, _ in flat)
    leaves = [_leaf(name, value, "state") for name, (_, value) in zip(names, flat, strict=True)]
    return _separated(leaves, treedef, None if frozen is None else selected(frozen, state, names, "frozen_state"))


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


def arrays(tree: Any, spec: TreeSpec) -> list[np.ndarray[Any, Any] | jax.ShapeDtypeStruct]:
    """Returns the leaves of `tree` as C-contiguous host arrays of `spec`'s dtypes and shapes; a described leaf stays as
    it is.

    Raises:
        TreeError: `tree` has other leaves than `spec`.
    """
    values, treedef = jax.tree_util.tree_flatten(tree)
    if treedef == spec.treedef:  # the names are those of the whole model, which `tree` is not if a part is frozen
        found = [
            _leaf(leaf.path, value, "trained" if leaf.trained else "state")
            for leaf, value in zip(spec.leaves, values, strict=True)
        ]
        why = spec.difference(replace(spec, leaves=tuple(found)))
    else:
        why = spec.difference(describe(tree, has_state=spec.has_state))
    if why is not None:
        raise TreeError(f"parameters: {why}")
    return [
        value
        if isinstance(value, jax.ShapeDtypeStruct)
        else np.ascontiguousarray(np.asarray(value), dtype=leaf.dtype).reshape(leaf.shape)
        for leaf, value in zip(spec.leaves, values, strict=True)
    ]


def as_leaf(value: Any, leaf: LeafSpec) -> Any:
    """Returns a value that `init` returned, as an array of the leaf's dtype.

    A number, or an array that JAX made of one, would take the dtype of what it is computed with.
    """
    return jnp.asarray(value, leaf.dtype) if isinstance(value, jax.Array) else np.asarray(value, leaf.dtype)


def is_low_precision(dtype: np.dtype[Any]) -> bool:
    """Returns whether sums in `dtype` are made in float32: floats of fewer than 32 bits."""
    return bool(jnp.issubdtype(dtype, jnp.floating)) and dtype.itemsize < 4


def multiplied(leaf: Any, factor: Any) -> Any:
    """Returns ``leaf * factor`` in the leaf's dtype, rounded once: a small factor may be 0 in a narrow dtype."""
    if is_low_precision(np.dtype(leaf.dtype)):
        return (leaf.astype(jnp.float32) * factor.astype(jnp.float32)).astype(leaf.dtype)
    return leaf * factor.astype(leaf.real.dtype)


def refuse_objects(tree: Any) -> None:
    """Refuse leaves other than arrays of numbers, which JAX refuses without the name of the leaf.

    Raises:
        TreeError: a leaf is an object.
    """
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    for name, (_, value) in zip(leaf_names(path for path, _ in flat), flat, strict=True):
        dtype = getattr(value, "dtype", None)
        if dtype is None and not isinstance(value, bool | int | float | complex):
            raise _no_array("init", name, type(value).__name__)
        if isinstance(dtype, np.dtype) and dtype.kind in "OSUMm":
            raise _no_array("init", name, f"array of {dtype.name}")


def _no_array(part: str, name: str, found: str) -> TreeError:
    return TreeError(
        f"{part}: leaf {name} is of type {found}, not an array of numbers. `init` must return a pytree of arrays; keep "
        "configuration out of it."
    )


def _leaf(name: str, value: Any, kind: Literal["trained", "frozen", "state"]) -> LeafSpec:
    part = "model state" if kind == "state" else "parameters"
    if isinstance(value, jax.ShapeDtypeStruct | jax.Array | np.ndarray | np.generic):
        dtype = value.dtype
        shape = tuple(value.shape)
    elif isinstance(value, bool | int | float | complex):
        dtype = jnp.result_type(value)
        shape = ()
    else:
        raise _no_array(part, name, type(value).__name__)
    if kind == "trained" and not jnp.issubdtype(dtype, jnp.inexact):
        raise TreeError(
            f"parameters: leaf {name} is {dtype}, which gradients cannot train. Freeze it (frozen=...), or make it a "
            f"floating-point array. You can also keep it out of what `init` returns (close over it in `loss`), or move "
            f"it to the model state (has_state=True)."
        )
    if kind == "state" and jnp.issubdtype(dtype, jax.dtypes.prng_key):
        raise TreeError(
            f"model state: leaf {name} is a typed random key, which has no mean. Pass has_rng=True: `loss` then gets "
            f"a new key in each step."
        )
    if not (jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)):
        raise TreeError(f"{part}: leaf {name} is {dtype}: must be an array of numbers or booleans")
    return LeafSpec(name, shape, np.dtype(jax.dtypes.canonicalize_dtype(dtype)), kind != "state")


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
