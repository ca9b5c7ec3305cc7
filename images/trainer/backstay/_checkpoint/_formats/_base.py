"""Reads the frozen parameters beside which a checkpoint was trained, and compares them with its digests."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from ..._update import digest_of, some_of
from ...errors import CheckpointError
from .._manifest import FrozenRecord, Manifest
from ._start import StartFrom, place_of, read_start, specs_of

__all__ = ["frozen_values"]

_SHOWN = 5


def frozen_values(manifest: Manifest, base: Any) -> dict[str, NDArray[np.generic]]:
    """The values of the frozen leaves by their paths, in their order.

    Args:
        base: True: the place that the manifest names. A path, a URI or a `StartFrom`: another place. Or the parameters
            themselves, a tree like those of ``init``.

    Raises:
        CheckpointError: the checkpoint has no frozen parameters, or they cannot be read, or they are others.
    """
    record = manifest.frozen
    if record is None:
        raise CheckpointError(f"the checkpoint {manifest.name} has no frozen parameters: leave `base` out")
    if base is True or isinstance(base, str | os.PathLike | StartFrom):
        values = _read(manifest, record, base)
    else:
        values = _taken(manifest, record, base)
    other = [leaf.path for leaf, value in zip(record.leaves, values, strict=True) if digest_of(value) != leaf.digest]
    if other:
        raise CheckpointError(
            f"these frozen parameters are not those beside which {manifest.name} was trained: "
            f"{some_of(other, _SHOWN)} ({len(other)} of {len(record.leaves)} arrays differ)"
        )
    return {leaf.path: value for leaf, value in zip(record.leaves, values, strict=True)}


def _read(manifest: Manifest, record: FrozenRecord, base: bool | str | os.PathLike[str] | StartFrom) -> list[Any]:
    of_init = CheckpointError(
        f"the frozen parameters of {manifest.name} are the result of init: give them as `base`, such as "
        f"base=init(jax.random.key({manifest.origin.seed})). With has_state=True they are init(...)[0]"
    )
    if base is True and not record.uri:
        raise of_init
    start, fixed = place_of(record, base)
    try:
        started = read_start(start, fixed, specs_of(record), None)
    except CheckpointError as error:
        hint = " If the job had a mapping of names, give it: base=backstay.StartFrom(uri, mapping=...)"
        text = str(error) if start.mapping is not None else f"{str(error).rstrip('.')}.{hint}"
        raise CheckpointError(text) from error
    if started.of_init:
        raise of_init
    absent = [leaf.path for leaf, value in zip(record.leaves, started.values, strict=True) if value is None]
    if absent:
        raise CheckpointError(
            f"{start.uri} has no array for {some_of(absent, _SHOWN)} ({len(absent)} in all). If init made them, give "
            "all parameters as `base`"
        )
    return started.values


def _taken(manifest: Manifest, record: FrozenRecord, base: Any) -> list[Any]:
    leaves = jax.tree_util.tree_leaves(base)
    if len(leaves) != len(record.places):
        raise CheckpointError(
            f"`base` has {len(leaves)} arrays, and all parameters of {manifest.name} are {len(record.places)}: must be "
            "a tree like those that init returns, True, or the place of a checkpoint"
        )
    kept = [np.asarray(leaf) for leaf, place in zip(leaves, record.places, strict=True) if place]
    for leaf, value in zip(record.leaves, kept, strict=True):
        if (value.shape, value.dtype.name) != (tuple(leaf.shape), leaf.dtype):
            found = f"{value.dtype.name}{list(value.shape)}"
            raise CheckpointError(f"`base` has {found} at {leaf.path}: must be {leaf.dtype}{list(leaf.shape)}")
    return kept
