"""Whole checkpoints (T7): files first, the manifest with their checksums last, and only what a manifest names is read.

`_files` knows folders and object stores, `_names` the names in them, `_manifest` what a manifest and a claim say,
`_lease` who may write, `_probe` whether that works, `_store` which checkpoint is the newest of a history, `_structure`
how a tree of parameters is written down without pickling, `_reader` how ranges of leaves are found again in another
number of shards.
"""

from __future__ import annotations

from ._lease import FolderLease, Holder, Interrupted, LeaseTimes
from ._load import Checkpoint, load
from ._manifest import Claim, FileInfo, FileRange, Job, Manifest, ManifestLeaf, Origin
from ._names import parse_manifest
from ._probe import probe
from ._reader import Reader
from ._store import CheckpointStore, Contents, Entry, Newest
from ._structure import describe_structure

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Claim",
    "Contents",
    "Entry",
    "FileInfo",
    "FileRange",
    "FolderLease",
    "Holder",
    "Interrupted",
    "Job",
    "LeaseTimes",
    "Manifest",
    "ManifestLeaf",
    "Newest",
    "Origin",
    "Reader",
    "describe_structure",
    "load",
    "parse_manifest",
    "probe",
]
