"""Whole checkpoints of made-up histories."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from backstay._checkpoint import (
    CheckpointStore,
    FolderLease,
    Identity,
    JobIdentity,
    Manifest,
    ManifestLeaf,
    ManifestStorage,
    Origin,
    describe_structure,
)
from backstay._coordination import CoordinatorState
from backstay._update import Entry, describe, leaf_names

HISTORY = "00000000000000aa"


def make_origin(history: str = HISTORY, name: str = "a", *, uid: str = "1", seed: int = 0, **more: Any) -> Origin:
    return Origin(history=history, job=JobIdentity(namespace="default", name=name, uid=uid), seed=seed, **more)


def leaves_of(named: list[tuple[str, Any]]) -> tuple[ManifestLeaf, ...]:
    return tuple(ManifestLeaf(path=path, shape=array.shape, dtype=array.dtype.name) for path, array in named)


def write_checkpoint(
    store: CheckpointStore,
    params: Any,
    *,
    version: int,
    term: int = 1,
    lease: int = 1,
    shards: int = 1,
    incarnation: int = 0,
    origin: Origin | None = None,
    state: Any = None,
    **more: Any,
) -> Manifest:
    """Returns a whole checkpoint of `params`, and of a model state, split into equal parts."""
    origin = origin or make_origin()

    def named_of(tree: Any) -> list[tuple[str, Any]]:
        flat = jax.tree_util.tree_leaves_with_path(tree)
        names = leaf_names(path for path, _ in flat)
        return [(name, np.asarray(leaf)) for name, (_, leaf) in zip(names, flat, strict=True)]

    named, of_state = named_of(params), named_of(state)
    keys = [(f"params/{path}", array) for path, array in named] + [(f"state/{path}", array) for path, array in of_state]
    if state is not None:
        more |= {"state_structure": describe_structure(state), "state_leaves": leaves_of(of_state)}
    files = []
    for shard in range(shards):
        entries = []
        for key, array in keys:
            first, last = shard * array.size // shards, (shard + 1) * array.size // shards
            entries.append(Entry(key, first, last, array.reshape(-1)[first:last]))
        files.append(
            store.write_shard(
                entries,
                history=origin.history,
                version=version,
                term=term,
                shard=shard,
                shards=shards,
                incarnation=incarnation,
            )
        )
    manifest = Manifest(
        origin=origin,
        lease=lease,
        version=version,
        term=term,
        incarnation=incarnation,
        shards=shards,
        leaves=leaves_of(named),
        structure=describe_structure(params),
        files=tuple(files),
        state=CoordinatorState(term=term, version=version, world=1, history=origin.history).to_json(),
        **more,
    )
    return store.write_manifest(manifest)


@pytest.fixture(scope="session")
def storage_of() -> Callable[..., Any]:
    """Makes the storage of shard 0's server, for a job with one parameter `a` of four elements."""

    class Layout:
        """The attributes of a partition that `ManifestStorage` uses."""

        tree = describe({"a": np.zeros(4, np.float32)})
        digest = structure_digest = b""

    def make(store: CheckpointStore, lease: FolderLease, job: JobIdentity, *, keep: int = 1) -> ManifestStorage:
        identity = Identity(job, incarnation=1, seed=0, steps=100, settings={})
        layout: Any = Layout()
        requested: Any = SimpleNamespace(keep=keep, world=1)
        facts: Any = SimpleNamespace(evaluation=lambda: (None, {}), examples=lambda: None)
        return ManifestStorage(store, lease, layout, identity, requested, facts)

    return make


@pytest.fixture(scope="session")
def origin_of() -> Callable[..., Origin]:
    """Makes an `Origin`."""
    return make_origin


@pytest.fixture(scope="session")
def write() -> Callable[..., Manifest]:
    """Writes a whole checkpoint."""
    return write_checkpoint
