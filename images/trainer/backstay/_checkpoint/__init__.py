"""Whole checkpoints (T7): files first, the manifest with their checksums last, and only what a manifest names is read.

`_files` knows folders and object stores, `_names` the names in them, `_manifest` what a manifest and a claim say,
`_lease` who may write, `_probe` whether that works, `_store` which checkpoint is the newest of a history, `_structure`
how a tree of parameters is written down without pickling, `_reader` how ranges of leaves are found again in another
number of shards, `_start` how initial parameters are taken from another place by name (`_arrays`, `_orbax`).
"""

from __future__ import annotations

from ._arrays import fix
from ._export import Exported, export
from ._files import Folder, PosixFolder, same_place
from ._lease import FolderLease, Holder, Interrupted, LeaseTimes
from ._load import Checkpoint, load
from ._manifest import Claim, FileInfo, FileRange, Job, Manifest, ManifestLeaf, Origin
from ._names import parse_manifest
from ._probe import probe
from ._reader import Reader
from ._records import Records, record_name
from ._start import StartFrom, read_start
from ._store import CheckpointStore, Contents, Entry, Newest
from ._structure import describe_structure

__all__ = [
    "Checkpoint",
    "CheckpointStore",
    "Claim",
    "Contents",
    "Entry",
    "Exported",
    "FileInfo",
    "FileRange",
    "Folder",
    "FolderLease",
    "Holder",
    "Interrupted",
    "Job",
    "LeaseTimes",
    "Manifest",
    "ManifestLeaf",
    "Newest",
    "Origin",
    "PosixFolder",
    "Reader",
    "Records",
    "StartFrom",
    "describe_structure",
    "export",
    "fix",
    "load",
    "parse_manifest",
    "probe",
    "read_start",
    "record_name",
    "same_place",
]
