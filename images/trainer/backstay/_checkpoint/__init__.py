"""Stores whole checkpoints (T7), which exist once their manifests, with the checksums of their files, are stored.

Readers read only files that a manifest names.

- `_files`: folders on file systems and in object stores; `_names`: the names of the files in them.
- `_manifest`: the contents of manifests and claims; `_structure`: a tree of parameters as JSON, without pickling.
- `_probe`: whether the folder can be written and read.
- `_store`: the newest checkpoint of a history, and the best one (`_best`).
- `_reader`: ranges of arrays, for another number of shards.
- `_store_to`: the settings of one process.
- `_history`: which process writes the checkpoints of a history, and how they are restored.
- `_formats`: initial parameters from another place, and exported ones, by name.
"""

from __future__ import annotations

from ._dtypes import BY_NAME, check_storable
from ._files import Folder, PosixFolder, open_folder, same_place
from ._formats import BaseNeeded, Exported, MadeByInit, StartFrom, TorchNames, export, fix, read_start
from ._history import (
    AgreedFrozen,
    CheckpointWriter,
    Continued,
    FolderLease,
    Holder,
    Identity,
    Interrupted,
    LeaseTimes,
    ManifestStorage,
    NoStorage,
    check_fits,
    file_of,
    log_continued,
    open_store,
    patiently,
    restore,
)
from ._load import Checkpoint, load, load_in_parts
from ._manifest import (
    Best,
    Claim,
    Evaluation,
    FileInfo,
    FileRange,
    FrozenLeaf,
    FrozenRecord,
    JobIdentity,
    Manifest,
    ManifestLeaf,
    Origin,
)
from ._names import MANIFEST_SUFFIX, ManifestName, parse_manifest
from ._probe import forbidden, probe
from ._reader import Reader
from ._records import Records, record_name
from ._store import CheckpointStore, Contents, Newest
from ._store_to import StoreTo
from ._structure import describe_structure, rebuild

__all__ = [
    "BY_NAME",
    "MANIFEST_SUFFIX",
    "AgreedFrozen",
    "BaseNeeded",
    "Best",
    "Checkpoint",
    "CheckpointStore",
    "CheckpointWriter",
    "Claim",
    "Contents",
    "Continued",
    "Evaluation",
    "Exported",
    "FileInfo",
    "FileRange",
    "Folder",
    "FolderLease",
    "FrozenLeaf",
    "FrozenRecord",
    "Holder",
    "Identity",
    "Interrupted",
    "JobIdentity",
    "LeaseTimes",
    "MadeByInit",
    "Manifest",
    "ManifestLeaf",
    "ManifestName",
    "ManifestStorage",
    "Newest",
    "NoStorage",
    "Origin",
    "PosixFolder",
    "Reader",
    "Records",
    "StartFrom",
    "StoreTo",
    "TorchNames",
    "check_fits",
    "check_storable",
    "describe_structure",
    "export",
    "file_of",
    "fix",
    "forbidden",
    "load",
    "load_in_parts",
    "log_continued",
    "open_folder",
    "open_store",
    "parse_manifest",
    "patiently",
    "probe",
    "read_start",
    "rebuild",
    "record_name",
    "restore",
    "same_place",
]
