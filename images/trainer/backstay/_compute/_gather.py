"""Puts arrays that the devices of several processes hold together into the memory of each host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from ._sharding import partition_spec

__all__ = ["gather"]


def gather(tree: Any) -> Any:
    """Returns the arrays of a pytree as NumPy arrays, whole.

    Where a rank has several pods, `Result.params` are arrays of all its devices, and no pod can read them by itself.
    All pods of the rank must call this function, with the same tree. Elsewhere it copies the arrays to the host.

    Args:
        tree: a pytree of arrays, such as `Result.params`.

    Returns:
        The same tree, of NumPy arrays. Each pod needs memory for all of them.
    """
    leaves, structure = jax.tree_util.tree_flatten(tree)
    return jax.tree_util.tree_unflatten(structure, [_whole(leaf) for leaf in leaves])


def _whole(leaf: Any) -> np.ndarray[Any, Any]:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    if not leaf.is_fully_replicated:
        assert isinstance(leaf.sharding, NamedSharding)
        everywhere = NamedSharding(leaf.sharding.mesh, partition_spec())
        leaf = jax.jit(_same, out_shardings=everywhere)(leaf)
    return np.asarray(leaf.addressable_data(0))


def _same(value: Any) -> Any:
    return value
