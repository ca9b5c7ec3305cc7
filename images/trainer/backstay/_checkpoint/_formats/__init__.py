"""Reads and writes arrays in other formats by name, for `start_from` and `backstay export`.

- `_arrays`: files and folders of named arrays; `_orbax`: checkpoints of Orbax, imported only when they are used.
- `_start`: initial parameters from another place; `_base`: the frozen ones of a checkpoint.
- `_torch`: names and layouts of PyTorch.
- `_export`: a checkpoint as arrays of another format.
"""

from __future__ import annotations

from ._arrays import fix
from ._base import BaseNeeded, frozen_values
from ._export import Exported, export
from ._start import MadeByInit, StartFrom, read_start
from ._torch import TorchNames

__all__ = [
    "BaseNeeded",
    "Exported",
    "MadeByInit",
    "StartFrom",
    "TorchNames",
    "export",
    "fix",
    "frozen_values",
    "read_start",
]
