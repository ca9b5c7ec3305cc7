"""Reads the frozen arrays beside which a checkpoint was trained, and compares them with its digests."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ..._update import digest_of, some_of
from ...errors import CheckpointError
from .._manifest import FrozenRecord, Manifest
from ._start import MadeByInit, StartFrom, frozen_beside

__all__ = ["BaseNeeded", "frozen_values"]

_SHOWN = 5


class BaseNeeded(CheckpointError):  # noqa: N818
    """Frozen parameters have no place, such as those that `init` made: the caller must give them."""


def frozen_values(manifest: Manifest, base: Any) -> dict[str, NDArray[np.generic]]:
    """Returns the values of the frozen leaves by their names, in their order.

    Args:
        base: True: the place that the manifest names. A path, a URI or a `StartFrom`: another place. Or the result of
            ``init``, or a tree like it; its parameters are enough if no model state was frozen.

    Raises:
        CheckpointError: the checkpoint has no frozen arrays, or they cannot be read, or they are others.
    """
    record = manifest.frozen
    if record is None:
        raise CheckpointError(f"the checkpoint {manifest.name} has no frozen arrays: leave `base` out")
    if base is True or isinstance(base, str | os.PathLike | StartFrom):
        values = _read(manifest, record, base)
    else:
        values = _taken(manifest, record, base)
    return {leaf.path: value for leaf, value in zip(record.leaves, values, strict=True)}


def _read(manifest: Manifest, record: FrozenRecord, base: bool | str | os.PathLike[str] | StartFrom) -> list[Any]:
    with frozen_beside(record, base) as arrays:
        try:
            return [arrays[leaf.path] for leaf in record.leaves]
        except MadeByInit as made:
            if made.why:
                raise BaseNeeded(
                    f"{made.why}. If init made it, give the result of init as `base`. If the job had a mapping that "
                    "changes arrays, give it: base=StartFrom(uri, mapping=...)"
                ) from made
            raise BaseNeeded(
                f"the frozen arrays of {manifest.name} are the result of init: give it as `base`, such as "
                f"base=init(jax.random.key({manifest.origin.seed}))"
            ) from made


def _taken(manifest: Manifest, record: FrozenRecord, base: Any) -> list[Any]:
    leaves = jax.tree_util.tree_leaves(base)  # of a pair those of the parameters come first
    places, of_state = record.places, record.state_places or (False,) * len(manifest.state_leaves)
    if record.state_places or len(leaves) != len(places):
        places += of_state
        if len(leaves) != len(places):
            raise CheckpointError(
                f"`base` has {len(leaves)} arrays, and the whole model of {manifest.name} has {len(places)}: must be "
                "what init returns, True, or the place of a checkpoint"
            )
    given = [np.asarray(leaf) for leaf, place in zip(leaves, places, strict=True) if place]
    kept = [
        value if value.dtype.name == leaf.dtype else np.asarray(value, jax.dtypes.canonicalize_dtype(value.dtype))
        for leaf, value in zip(record.leaves, given, strict=True)
    ]
    for leaf, value in zip(record.leaves, kept, strict=True):
        if (value.shape, value.dtype.name) != (tuple(leaf.shape), leaf.dtype):
            found = f"{value.dtype.name}{list(value.shape)}"
            raise CheckpointError(f"`base` has {found} at {leaf.path}: must be {leaf.dtype}{list(leaf.shape)}")
    other = [leaf.path for leaf, value in zip(record.leaves, kept, strict=True) if digest_of(value) != leaf.digest]
    if other:
        raise CheckpointError(
            f"these frozen arrays are not those beside which {manifest.name} was trained: "
            f"{some_of(other, _SHOWN)} ({len(other)} of {len(record.leaves)} arrays differ)"
        )
    return kept
