"""Whole checkpoints of made-up histories."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest

from backstay._checkpoint import (
    CheckpointStore,
    Entry,
    Job,
    Manifest,
    ManifestLeaf,
    Origin,
    describe_structure,
)
from backstay._coordination import CoordinatorState

HISTORY = "00000000000000aa"


def make_origin(history: str = HISTORY, name: str = "a", *, uid: str = "1", seed: int = 0, **more: Any) -> Origin:
    return Origin(history=history, job=Job(namespace="default", name=name, uid=uid), seed=seed, **more)


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
    dotted: bool = False,
    **more: Any,
) -> Manifest:
    """One whole checkpoint of `params`, in equal parts; `dotted`: with the names that servers give to leaves."""
    origin = origin or make_origin()
    name_of = partial(jax.tree_util.keystr, simple=True, separator=".") if dotted else jax.tree_util.keystr
    named = [(name_of(path), np.asarray(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]
    files = []
    for shard in range(shards):
        entries = []
        for path, array in named:
            first, last = shard * array.size // shards, (shard + 1) * array.size // shards
            entries.append(Entry(f"params/{path}", first, last, array.reshape(-1)[first:last]))
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
        leaves=tuple(ManifestLeaf(path=path, shape=array.shape, dtype=array.dtype.name) for path, array in named),
        structure=describe_structure(params),
        files=tuple(files),
        state=CoordinatorState(term=term, version=version, world=1, history=origin.history).to_json(),
        **more,
    )
    return store.write_manifest(manifest)


@pytest.fixture(scope="session")
def origin_of() -> Callable[..., Origin]:
    """Makes an `Origin`."""
    return make_origin


@pytest.fixture(scope="session")
def write() -> Callable[..., Manifest]:
    """Writes a whole checkpoint."""
    return write_checkpoint


@pytest.fixture(scope="session")
def write_named() -> Callable[..., Manifest]:
    """The same, with the names that servers give to leaves."""
    return partial(write_checkpoint, dotted=True)
