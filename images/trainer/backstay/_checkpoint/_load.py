"""`backstay.load`: the parameters of a checkpoint, for serving, evaluating or starting something new from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

from ..errors import CheckpointError
from ._names import MANIFEST_SUFFIX
from ._reader import Reader
from ._store import CheckpointStore
from ._structure import rebuild


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint in memory.

    Attributes:
        params: the parameters, as NumPy arrays in their own shapes and dtypes.
        step: how many updates had been applied.
        uri: the manifest it was read from.
        metrics: what the newest evaluation before it returned.
        skipped: newer checkpoints that were not whole, each with the reason.
    """

    params: Any
    step: int
    uri: str
    metrics: dict[str, float] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


def load(uri: str, like: Any = None) -> Checkpoint:
    """Read a checkpoint's parameters.

    Args:
        uri: one checkpoint (its manifest), or a job's ``checkpoint.uri``, of which the newest whole one is taken.
            A path or any fsspec URI.
        like: a tree of the same structure (arrays or ``jax.ShapeDtypeStruct`` leaves), needed when the parameters hold
            other nodes than dicts, lists and tuples.

    Returns:
        A `Checkpoint`; its leaves are NumPy arrays of the stored shapes and dtypes.

    Raises:
        CheckpointError: there is no whole checkpoint, or `like` has other leaves (the message names the first).
    """
    uri = str(uri)
    skipped: tuple[str, ...] = ()
    if uri.endswith(MANIFEST_SUFFIX):
        folder, _, name = uri.rpartition("/")
        store = CheckpointStore(folder or ".")
        manifest = store.open(name, verify=False)
    else:
        store = CheckpointStore(uri)
        newest = store.newest()
        if newest.manifest is None:
            damaged = "".join(f"\n  passed over {line}" for line in newest.skipped)
            raise CheckpointError(f"there is no whole checkpoint in {uri}{damaged}")
        manifest, skipped = newest.manifest, newest.skipped
    reader = Reader(store, manifest, cache=len(manifest.files))
    leaves = [reader.parameter(index) for index in range(len(manifest.leaves))]
    if like is None:
        params = rebuild(manifest.structure, leaves)
    else:
        wanted, structure = jax.tree.flatten(like)
        if len(wanted) != len(leaves):
            raise CheckpointError(
                f"`like` has {len(wanted)} leaves, the checkpoint {manifest.name} has {len(leaves)}: "
                f"the first of them is {manifest.leaves[0].path if manifest.leaves else 'none'}"
            )
        for leaf, array in zip(manifest.leaves, wanted, strict=True):
            shape = tuple(getattr(array, "shape", ()))
            if shape != leaf.shape:
                raise CheckpointError(f"`like` has shape {shape} at {leaf.path}, the checkpoint has {leaf.shape}")
        params = jax.tree.unflatten(structure, leaves)
    return Checkpoint(
        params=params,
        step=manifest.version,
        uri=store.uri_of(manifest),
        metrics=dict(manifest.metrics),
        skipped=skipped,
    )
