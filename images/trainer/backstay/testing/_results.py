"""The file in which a pod of a tested job writes what `train` returned: safetensors, with the rest as JSON inside."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from .._checkpoint import describe_structure, rebuild
from .._result import History, Result
from ..errors import CheckpointError

__all__ = ["read_result", "write_result"]

_TREES = ("params", "state", "average")


def write_result(file: Path, result: Result) -> None:
    """Write a result; a reader finds it whole or not at all."""
    arrays: dict[str, NDArray[Any]] = {}
    fields = {name: value for name, value in vars(result).items() if name not in _TREES}
    fields["history"] = asdict(result.history)
    for name in _TREES:
        tree = jax.device_get(getattr(result, name))
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        fields[name] = describe_structure(tree)
        fields[f"{name}_paths"] = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
        arrays |= {f"{name}/{number}": np.asarray(leaf, order="C") for number, (_, leaf) in enumerate(leaves)}
    part = file.with_suffix(".part")
    text = json.dumps(fields, default=dict)
    part.write_bytes(safetensors.numpy.save(arrays, metadata={"result": text}))
    part.replace(file)


def read_result(file: Path) -> Result | None:
    """Read a result; None where `train` did not return."""
    if not file.exists():
        return None
    with safetensors.safe_open(file, framework="numpy") as opened:
        fields = json.loads(opened.metadata()["result"])
        trees = {name: _tree(opened, name, fields.pop(name), fields.pop(f"{name}_paths")) for name in _TREES}
    fields["history"] = History(**fields["history"])
    return replace(Result(params=None, step=0), **fields, **trees)


def _tree(opened: Any, name: str, structure: dict[str, Any], paths: list[str]) -> Any:
    leaves = [opened.get_tensor(f"{name}/{number}") for number in range(len(paths))]
    try:
        return rebuild(structure, leaves)
    except CheckpointError:  # it has nodes that only the script can make
        return dict(zip(paths, leaves, strict=True))
