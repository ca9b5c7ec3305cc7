"""Decides who writes the checkpoints of one history, what they continue, and what is read from them (T6, T7).

- `_lease`: which process may write into a folder.
- `_tenure`: the states of that right, from no term to a stored claim; `_ownership`: whose history a folder holds.
- `_manifests`: the manifests of a term; `_continuation`: the run that a term continues.
- `_frozen`: the frozen arrays that all workers of a history have.
- `_writer`: the file of one shard; `_restore`: one shard's part of a checkpoint; `_patience`: repeated reads.
"""

from __future__ import annotations

from ._continuation import Continued, log_continued
from ._frozen import AgreedFrozen
from ._lease import FolderLease, Holder, Interrupted, LeaseTimes
from ._manifests import ManifestStorage, NoStorage
from ._ownership import Identity
from ._patience import patiently
from ._restore import check_fits, restore
from ._writer import CheckpointWriter, file_of, open_store

__all__ = [
    "AgreedFrozen",
    "CheckpointWriter",
    "Continued",
    "FolderLease",
    "Holder",
    "Identity",
    "Interrupted",
    "LeaseTimes",
    "ManifestStorage",
    "NoStorage",
    "check_fits",
    "file_of",
    "log_continued",
    "open_store",
    "patiently",
    "restore",
]
