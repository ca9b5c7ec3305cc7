"""Loads the parameters and model state of a checkpoint, to serve, evaluate, or start something new
(`backstay.load`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import jax

from .._update import AVERAGE, MODEL_STATE, STATE, leaf_names
from ..errors import CheckpointError
from ._formats import StartFrom, frozen_values
from ._manifest import FrozenLeaf, FrozenRecord, Manifest, ManifestLeaf
from ._names import MANIFEST_SUFFIX
from ._reader import OF_MODEL, Reader
from ._store import CheckpointStore
from ._structure import rebuild

_Leaf: TypeAlias = ManifestLeaf | FrozenLeaf


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint in memory.

    Attributes:
        params: the parameters, as NumPy arrays in their own shapes and dtypes.
        state: the model state, also as NumPy arrays; None for a model without state.
        step: the number of applied updates.
        uri: the manifest of the checkpoint.
        metrics: the result of the evaluation of this checkpoint. If it was not evaluated, the result of the newest
            evaluation before it.
        metrics_step: the step of `metrics`, which is `step` if this checkpoint was evaluated; None: there are no
            metrics, or an earlier version of Backstay stored them.
        average: the moving average of the parameters, like `params`; None if the job had no ``train(average=...)``.
        frozen: the frozen arrays beside which `params` were trained: their names, digests and source. `params` and
            `state` have None in their places, unless `base` was given. None: the job had none.
        skipped: newer checkpoints that are damaged or incomplete, each with the reason.
    """

    params: Any = field(repr=False)
    step: int
    uri: str
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    state: Any = field(default=None, repr=False)
    average: Any = field(default=None, repr=False)
    metrics_step: int | None = None
    frozen: FrozenRecord | None = field(default=None, repr=False)


def load(
    uri: str,
    like: Any = None,
    *,
    best: bool = False,
    base: bool | str | os.PathLike[str] | StartFrom | Any = False,
) -> Checkpoint:
    """Read a checkpoint's parameters and model state.

    Args:
        uri: one checkpoint (its manifest), or a job's ``checkpoint.uri``, whose newest complete one is read.
            A path or any fsspec URI.
        like: a tree with the structure that `init` returned; for a model with state, the pair ``(params, state)``. Its
            leaves are arrays or ``jax.ShapeDtypeStruct``. Needed if the parameters contain other containers than
            dicts, lists and tuples.
        base: with ``train(frozen=...)``, a checkpoint has only the parameters that train. False: `params`, `average`
            and `state` have None in the places of frozen arrays. True: these are read from the place where the job read
            them. A path, a URI or a `StartFrom` is another place. Or all of what `init` returned; the parameters are
            enough if no model state was frozen.
        best: whether to read the best checkpoint of a job with ``spec.checkpoint.keepBest``, instead of the newest one.

    Returns:
        A `Checkpoint`; its leaves are NumPy arrays of the stored shapes and dtypes.

    Raises:
        CheckpointError: the folder has no complete checkpoint, or with `best` no evaluated one. Or `like` has other
            leaves (the message names the first). Or `base` has other arrays than the job.
    """
    return _loaded(uri, like, best=best, base=base, placed=None)


def load_in_parts(uri: str, like: Any, placed: Callable[[int, Any], Any]) -> Checkpoint:
    """Like `load`, for a model that this host cannot hold. It has one array at a time.

    Args:
        placed: takes the index of a leaf, among those of the parameters and then of the model state, and its NumPy
            array. It returns what the checkpoint has in its place.
    """
    return _loaded(uri, like, best=False, base=False, placed=placed)


def _loaded(
    uri: str, like: Any, *, best: bool, base: bool | Any, placed: Callable[[int, Any], Any] | None
) -> Checkpoint:
    """See `load`. `placed`: see `load_in_parts`. Without it the arrays stay as they are."""
    uri = str(uri)
    store, manifest, skipped = _opened(uri, best=best)
    own = None
    with contextlib.suppress(CheckpointError):  # it costs the metrics only
        own = store.evaluation(manifest.key)
    keep = (*OF_MODEL, STATE + AVERAGE)
    reader = Reader(store, manifest, cache=len(manifest.files), keep=keep, again=placed is not None)
    place = placed or (lambda _, array: array)
    has_state = manifest.state_structure is not None
    if like is not None and has_state and not (type(like) is tuple and len(like) == 2):
        raise CheckpointError(f"the checkpoint {manifest.name} has a model state: `like` must be (params, state)")
    like_params, like_state = like if like is not None and has_state else (like, None)
    record = None if base is False else manifest.frozen
    values = [] if base is False else list(frozen_values(manifest, base).values())
    frozen = [partial(_same, value) for value in values]

    def read(function: Callable[[int], Any], index: int, before: int = 0) -> Any:
        return place(before + index, function(index))

    def parameters(function: Callable[[int], Any]) -> Any:
        leaves: list[Callable[[], Any]] = [partial(read, function, index) for index in range(len(manifest.leaves))]
        specs, structure = list[_Leaf](manifest.leaves), manifest.structure
        if record is not None:  # the manifest's structure has the trained leaves alone
            leaves, specs = record.parameters(leaves, frozen), record.parameters(specs, record.leaves)
            structure = record.structure
        return _tree(leaves, specs, structure, like_params, manifest.name)

    params, average = parameters(reader.parameter), None
    if any(STATE + AVERAGE + leaf.path in reader for leaf in manifest.leaves):
        average = parameters(reader.average)
    state = None
    if manifest.state_structure is not None:
        before = len(manifest.leaves)
        leaves: list[Callable[[], Any]] = [
            partial(read, reader.state_leaf, index, before) for index in range(len(manifest.state_leaves))
        ]
        specs, structure = list[_Leaf](manifest.state_leaves), manifest.state_structure
        if record is not None and record.state_structure is not None:
            leaves, specs = record.of_state(leaves, frozen), record.of_state(specs, record.leaves)
            structure = record.state_structure
        state = _tree(leaves, specs, structure, like_state, manifest.name, given=like is not None)
    return Checkpoint(
        params=params,
        step=manifest.version,
        uri=store.uri_of(manifest),
        metrics=dict(manifest.metrics if own is None else own.metrics),
        metrics_step=manifest.metrics_step if own is None else manifest.version,
        skipped=skipped,
        state=state,
        average=average,
        frozen=manifest.frozen,
    )


def _same(value: Any) -> Any:
    return value


def _opened(uri: str, *, best: bool) -> tuple[CheckpointStore, Manifest, tuple[str, ...]]:
    """Returns the store, the manifest that `load` reads, and newer ones that are damaged."""
    if uri.endswith(MANIFEST_SUFFIX):
        folder, _, name = uri.rpartition("/")
        store = CheckpointStore(folder or ".")
        return store, store.open(name, verify=False), ()
    store = CheckpointStore(uri)
    if best:
        return store, store.best(), ()
    newest = store.newest()
    if newest.manifest is None:
        damaged = "".join(f"\n  skipped {line}" for line in newest.skipped)
        raise CheckpointError(f"there is no complete checkpoint in {uri}{damaged}")
    return store, newest.manifest, newest.skipped


def _tree(
    leaves: Sequence[Callable[[], Any]],
    specs: Sequence[_Leaf],
    structure: dict[str, Any],
    like: Any,
    name: str,
    *,
    given: bool = False,
) -> Any:
    """
    Args:
        leaves: read them, once they are known to fit.
        like: see `load`; None: there is none, unless `given`.
    """
    if like is None and not given:
        return rebuild(structure, [read() for read in leaves])
    wanted, treedef = jax.tree_util.tree_flatten_with_path(like)
    if len(wanted) != len(leaves):
        raise CheckpointError(
            f"`like` has {len(wanted)} leaves, but the checkpoint {name} has {len(leaves)}: "
            f"must have those of the checkpoint, which begin with {specs[0].path if specs else 'none'}"
        )
    names = leaf_names(path for path, _ in wanted)
    for own, leaf, (_, array) in zip(names, specs, wanted, strict=True):
        stored = leaf.path.removeprefix(MODEL_STATE)
        # Equal names are numbered, and only the tree of the job has all of them.
        if own.partition("~")[0] != stored.partition("~")[0]:
            raise CheckpointError(f"`like` has {own} where the checkpoint {name} has {stored}: must have its names")
        shape = tuple(getattr(array, "shape", ()))
        if shape != leaf.shape:
            raise CheckpointError(f"`like` has shape {shape} at {leaf.path}, the checkpoint has {leaf.shape}")
    return jax.tree.unflatten(treedef, [read() for read in leaves])
