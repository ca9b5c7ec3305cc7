"""Whole checkpoints (T7): a checkpoint exists once its manifest, with the checksums of its files, is stored.

Readers read only files that a manifest names.

- `_files`: folders on file systems and in object stores; `_names`: the names of the files in them.
- `_manifest`: the contents of manifests and claims; `_structure`: a tree of parameters as JSON, without pickling.
- `_lease`: which process may write; `_probe`: whether the folder can be written and read.
- `_store`: the newest checkpoint of a history, and the best one (`_best`).
- `_reader`: ranges of arrays, for another number of shards.
- `_store_to`: the settings of one process.
- `_start`: initial parameters from another place, by name (`_arrays`, `_orbax`).
"""

from __future__ import annotations

from ._arrays import fix
from ._export import Exported, export
from ._files import Folder, PosixFolder, open_folder, same_place
from ._lease import FolderLease, Holder, Interrupted, LeaseTimes
from ._load import Checkpoint, load
from ._manifest import Best, Claim, Evaluation, FileInfo, FileRange, Job, Manifest, ManifestLeaf, Origin
from ._names import ManifestName, parse_manifest
from ._probe import forbidden, probe
from ._reader import Reader
from ._records import Records, record_name
from ._start import StartFrom, read_start
from ._store import CheckpointStore, Contents, Newest
from ._store_to import StoreTo
from ._structure import describe_structure, rebuild

__all__ = [
    "Best",
    "Checkpoint",
    "CheckpointStore",
    "Claim",
    "Contents",
    "Evaluation",
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
    "ManifestName",
    "Newest",
    "Origin",
    "PosixFolder",
    "Reader",
    "Records",
    "StartFrom",
    "StoreTo",
    "describe_structure",
    "export",
    "fix",
    "forbidden",
    "load",
    "open_folder",
    "parse_manifest",
    "probe",
    "read_start",
    "rebuild",
    "record_name",
    "same_place",
]
