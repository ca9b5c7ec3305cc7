"""Whole checkpoints (T7): files first, the manifest with their checksums last, and only what a manifest names is read.

`store` knows folders and object stores, `manifest` what a manifest says, `structure` how a tree of parameters is
written down without pickling, `reader` how ranges of leaves are found again in another number of shards.
"""

from __future__ import annotations

from ._load import Checkpoint, load
from ._manifest import FileInfo, FileRange, Manifest, ManifestLeaf, order_of_manifest
from ._reader import Reader
from ._store import CheckpointStore, Entry, Newest
from ._structure import describe_structure

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Entry",
    "FileInfo",
    "FileRange",
    "Manifest",
    "ManifestLeaf",
    "Newest",
    "Reader",
    "describe_structure",
    "load",
    "order_of_manifest",
]
