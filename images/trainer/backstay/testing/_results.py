"""The file in which a pod of a tested job writes what `train` returned: safetensors, with the rest as JSON inside."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from numpy.typing import NDArray

from .._checkpoint import BY_NAME, describe_structure, rebuild
from .._result import History, Result
from ..errors import CheckpointError

__all__ = ["read_result", "write_result"]

_TREES = ("params", "state", "average")


def write_result(file: Path, result: Result) -> None:
    """Write a result; a reader finds it whole or not at all."""
    arrays: dict[str, NDArray[Any]] = {}
    tensors: dict[str, safetensors.TensorSpec] = {}  # which point into `arrays`: a copy of the model has no room
    others: dict[str, tuple[str, tuple[int, ...]]] = {}  # dtype and shape of the arrays that are stored as bytes
    fields = {name: value for name, value in vars(result).items() if name not in _TREES}
    fields["history"] = asdict(result.history)
    for name in _TREES:
        tree = jax.device_get(getattr(result, name))
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        fields[name] = describe_structure(tree)
        fields[f"{name}_paths"] = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        for number, (_, leaf) in enumerate(leaves):
            key, array = f"{name}/{number}", np.asarray(leaf, order="C")
            if array.dtype.name not in BY_NAME or array.dtype.isbuiltin != 1:  # the library reads few of NumPy's guests
                others[key] = array.dtype.name, array.shape
                array = array.reshape(-1).view(np.uint8)
            arrays[key] = array
            tensors[key] = safetensors.TensorSpec(
                dtype=array.dtype.name, shape=list(array.shape), data_ptr=array.ctypes.data, data_len=array.nbytes
            )
    fields["others"] = others
    part = file.with_suffix(".part")
    text = json.dumps(fields, default=dict)
    part.touch()
    mode = part.stat().st_mode
    safetensors.serialize_file(tensors, part, {"result": text})
    part.chmod(stat.S_IMODE(mode))  # the library makes it readable for its owner only
    del arrays
    part.replace(file)


def read_result(file: Path) -> Result | None:
    """Read a result; None where `train` did not return."""
    if not file.exists():
        return None
    with safetensors.safe_open(file, framework="numpy") as opened:
        fields = json.loads(opened.metadata()["result"])
        others = fields.pop("others")

        def read(key: str) -> Any:
            array = opened.get_tensor(key)
            if key not in others:
                return array
            dtype, shape = others[key]
            return np.frombuffer(array.tobytes(), jnp.dtype(dtype)).reshape(shape)

        trees = {name: _tree(read, name, fields.pop(name), fields.pop(f"{name}_paths")) for name in _TREES}
    fields["history"] = History(**fields["history"])
    return replace(Result(params=None, step=0), **fields, **trees)


def _tree(read: Callable[[str], Any], name: str, structure: dict[str, Any], paths: list[str]) -> Any:
    leaves = [read(f"{name}/{number}") for number in range(len(paths))]
    try:
        return rebuild(structure, leaves)
    except CheckpointError:  # it has nodes that only the script can make
        return dict(zip(paths, leaves, strict=True))
