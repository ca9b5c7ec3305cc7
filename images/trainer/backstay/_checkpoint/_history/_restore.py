"""Reads one shard's part of a checkpoint, and refuses a checkpoint that does not fit the script (T7)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ... import _instrument
from ..._update import MODEL_STATE, ShardEngine
from ...errors import CheckpointError
from .._manifest import Manifest
from .._reader import Reader
from .._store import CheckpointStore
from ._patience import patiently

if TYPE_CHECKING:
    from ..._update import Partition, Rule

__all__ = ["check_fits", "restore"]


def check_fits(manifest: Manifest, partition: Partition) -> None:
    """
    Raises:
        CheckpointError: the checkpoint is of other parameters or of another optimizer; the message names the leaf.
    """
    own = {leaf.name: (tuple(leaf.shape), leaf.dtype.name) for leaf in partition.tree.leaves}
    stored = {leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.leaves}
    stored |= {MODEL_STATE + leaf.path: (tuple(leaf.shape), leaf.dtype) for leaf in manifest.state_leaves}
    if (manifest.state_structure is not None) != partition.tree.has_state:
        has = "no model state" if partition.tree.has_state else "a model state"
        raise CheckpointError(
            f"the checkpoint {manifest.name} does not fit init: it has {has}, and train was called with "
            f"has_state={partition.tree.has_state}; use another checkpoint.uri, or the model of the checkpoint"
        )
    frozen = {leaf.name for leaf in partition.tree.frozen_leaves}
    was_frozen: set[str] = set() if manifest.frozen is None else {leaf.path for leaf in manifest.frozen.leaves}
    for path in [*own, *stored]:
        if path in was_frozen:
            raise CheckpointError(
                f"the checkpoint {manifest.name} does not fit: {path} was frozen beside it, and is not frozen now. Use "
                "another checkpoint.uri, and start_from with this checkpoint, which reads what was frozen too"
            )
        if path in frozen:
            raise CheckpointError(
                f"the checkpoint {manifest.name} does not fit: {path} was not frozen beside it, and is frozen now. To "
                "continue, freeze what was frozen before; frozen=False freezes no parameter, also not what the "
                "optimizer never changes. Or use another checkpoint.uri"
            )
        if own.get(path) != stored.get(path):
            raise CheckpointError(
                f"the checkpoint {manifest.name} does not fit init: {path} is {_shown(stored.get(path))} in the "
                f"checkpoint and {_shown(own.get(path))} in init; use another checkpoint.uri, or the parameters "
                "of the checkpoint"
            )
    if manifest.origin.structure != partition.structure_digest.hex():
        raise CheckpointError(
            f"the checkpoint {manifest.name} does not fit the optimizer, whose state has other arrays; "
            "use another checkpoint.uri, or the optimizer of the checkpoint"
        )


def _shown(kind: tuple[Any, str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]}{list(kind[0])}"


def restore(uri: str, partition: Partition, shard: int, rule: Rule) -> ShardEngine:
    """This shard's part of a checkpoint, for any number of shards that wrote it.

    Args:
        uri: the manifest's URI.

    Raises:
        CheckpointError: the checkpoint cannot be read, is damaged, or does not fit.
    """
    folder, _, name = uri.rpartition("/")

    def read() -> ShardEngine:
        store = CheckpointStore(folder or ".")
        manifest = store.open(name, verify=False)  # the reader compares the checksums of what it reads
        check_fits(manifest, partition)
        return ShardEngine.restore(partition, shard, rule, Reader(store, manifest).read, manifest.version)

    with _instrument.span("restore"):
        return patiently(read)
