"""Writes a checkpoint for other programs, as safetensors or as an Orbax checkpoint (`backstay.export`)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final, Literal

import numpy as np
import safetensors
from numpy.typing import NDArray

from ..._update import MODEL_STATE
from ...errors import CheckpointError, ConfigurationError, StorageError
from .._dtypes import BY_NAME
from .._files import open_folder
from .._manifest import Manifest
from .._names import MANIFEST_SUFFIX
from .._store import CheckpointStore
from .._structure import rebuild
from ._arrays import fix, open_arrays
from ._base import frozen_values
from ._orbax import write_orbax

__all__ = ["Exported", "export"]

_SUFFIX: Final = ".safetensors"
_NAME: Final = "model"
_OF_OTHERS: Final = frozenset(
    [
        *(".bin", ".ckpt", ".gguf", ".h5", ".hdf5", ".json", ".keras", ".msgpack", ".npy", ".npz", ".onnx"),
        *(".pb", ".pickle", ".pkl", ".pt", ".pth", ".tar", ".tflite", ".zip"),
    ]
)
"""A folder with such a name looks like a file, which other programs cannot read."""
MAX_FILE_BYTES: Final = 5 * 10**9
"""A folder has several files where one would be larger."""


@dataclass(frozen=True)
class Exported:
    """The result of `export`.

    Attributes:
        step: the checkpoint's step.
        arrays: the number of arrays.
        nbytes: the size of all arrays together, in bytes.
        without: the number of frozen arrays that are not in the output.
    """

    step: int
    arrays: int
    nbytes: int
    without: int = 0


def export(
    checkpoint: str,
    out: str,
    format: Literal["safetensors", "orbax"] = "safetensors",  # noqa: A002
    *,
    base: Any = False,
    translate: Callable[[str, NDArray[np.generic]], tuple[str, NDArray[np.generic]] | None] | None = None,
) -> Exported:
    """Write the parameters, and the model state, of a checkpoint in a format that other programs read.

    Args:
        checkpoint: one checkpoint (its manifest), or a job's ``checkpoint.uri``: then the newest complete checkpoint is
            exported.
        out: a path or any fsspec URI, which does not exist yet. For ``safetensors`` it is a file if it ends in
            ``.safetensors``, else a folder with ``model.safetensors``. Above 5 GB the folder has several files, and
            ``model.safetensors.index.json``. For ``orbax`` it is a folder.
        format: ``safetensors``: tensors have the names of the parameters, such as ``layers.0.kernel``. The names of
            the model state begin with ``state/``. ``orbax``: the tree of parameters, or
            ``{"params": ..., "state": ...}`` for a model with state. Nodes other than dicts, lists and tuples become
            dicts.
        base: as in `load`. With it, the output also has the arrays that were frozen. Without it, the output has only
            the others, such as adapters.
        translate: ``translate(name, array)`` returns the name and the array to write instead, such as
            `TorchNames.exported`. None leaves the array out, such as one of two tied weights. For ``safetensors`` only.

    Raises:
        ConfigurationError: `format` is not one of these, or `out` has the suffix of another format. `translate` returns
            something else, one name for two arrays, or None for all.
        CheckpointError: there is no complete checkpoint, or `out` exists or cannot be written.
        Exception: any that `translate` raises.
    """
    if format not in ("safetensors", "orbax"):
        raise ConfigurationError(f"format is {format!r}: must be safetensors or orbax")
    if translate is not None and format == "orbax":
        raise ConfigurationError("translate is for format='safetensors': the tree of orbax has the names of the model")
    if not str(out):
        raise ConfigurationError("out is empty: must name a file or a folder that does not exist")
    suffix = PurePath(str(out)).suffix.lower()
    if suffix in _OF_OTHERS or (suffix == _SUFFIX and format == "orbax"):
        valid = "a folder" if format == "orbax" else f"a folder, or a file called *{_SUFFIX}"
        numpy = "; safetensors.numpy.load_file reads that file" if suffix in {".npy", ".npz"} else ""
        raise ConfigurationError(f"out is {str(out)!r}: must be {valid}{numpy}")
    fixed = fix(str(checkpoint))
    if not fixed.endswith(MANIFEST_SUFFIX):
        raise CheckpointError(f"{checkpoint} is not a checkpoint of Backstay, nor a folder with checkpoints")
    folder, _, name = fixed.rpartition("/")
    manifest = CheckpointStore(folder or ".").open(name, verify=False)
    with open_arrays(fixed) as arrays:
        named = dict(arrays)
    if base is not False:
        named |= frozen_values(manifest, base)
    if translate is not None:
        named = _translated(named, translate)
    if format == "orbax":
        write_orbax(str(out), _tree(manifest, named, whole=base is not False))
    else:
        _write_safetensors(
            str(out),
            named,
            # Transformers reads no file without a format that it knows.
            {
                "format": "np" if translate is None else "pt",
                "step": str(manifest.version),
                "checkpoint": manifest.name,
            },
        )
    without = 0 if manifest.frozen is None or base is not False else len(manifest.frozen.leaves)
    return Exported(manifest.version, len(named), sum(array.nbytes for array in named.values()), without)


def _translated(named: Mapping[str, NDArray[np.generic]], translate: Callable[..., Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    names: dict[str, str] = {}
    for name, array in named.items():
        pair = translate(name, array)
        if pair is None:
            continue
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ConfigurationError(
                f"translate returned {type(pair).__name__} for {name}: must be (name, array), or None"
            )
        new = pair[0]
        if new in names:
            raise ConfigurationError(
                f"translate gives the name {new} to {names[new]} and to {name}: return None for one of them to leave "
                "it out, or another name"
            )
        names[new], found[new] = name, np.asarray(pair[1])
    if named and not found:
        raise ConfigurationError("translate returned None for each array: must return (name, array) for one at least")
    return found


def _tree(manifest: Manifest, named: Mapping[str, NDArray[np.generic]], *, whole: bool) -> Any:
    """Returns the tree of a checkpoint, or nested dicts where it has nodes that only its script could make.

    Args:
        whole: whether `named` has the frozen arrays too.
    """
    record = manifest.frozen if whole else None
    frozen = [] if record is None else [leaf.path for leaf in record.leaves]
    names, structure = [leaf.path for leaf in manifest.leaves], manifest.structure
    if record is not None:
        names, structure = record.parameters(names, frozen), record.structure
    params = _rebuilt(structure, {name: named[name] for name in names})
    if manifest.state_structure is None:
        return params
    names, structure = [MODEL_STATE + leaf.path for leaf in manifest.state_leaves], manifest.state_structure
    if record is not None and record.state_structure is not None:
        names, structure = record.of_state(names, frozen), record.state_structure
    state = {name.removeprefix(MODEL_STATE): named[name] for name in names}
    return {"params": params, "state": _rebuilt(structure, state)}


def _rebuilt(structure: dict[str, Any], named: Mapping[str, NDArray[np.generic]]) -> Any:
    try:
        return rebuild(structure, list(named.values()))
    except CheckpointError:
        return _nested(named)


def _nested(named: Mapping[str, NDArray[np.generic]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, array in named.items():
        *way, last = name.split(".")
        node = tree
        for key in way:
            node = node.setdefault(key, {})
        node[last] = array
    return tree


def _write_safetensors(out: str, named: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]) -> None:
    parent, _, last = out.rstrip("/").rpartition("/")
    folder = open_folder((parent or ("/" if out.startswith("/") else ".")) if out.endswith(_SUFFIX) else out)
    if out.endswith(_SUFFIX):
        if folder.size(last) is not None:
            raise CheckpointError(f"{out} exists, and is not replaced: name a file that does not exist")
        files = [(last, dict(named))]
    else:
        try:
            found = folder.names()
        except StorageError as error:
            raise CheckpointError(
                f"out: {out} cannot be used: {error.__cause__ or error}: name a folder that does not exist, or a file "
                f"that ends in {_SUFFIX}"
            ) from error
        if found:
            raise CheckpointError(f"{out} is not empty, and is not replaced: name a folder that does not exist")
        parts = _parts(named)
        names = [f"{_NAME}-{number:05d}-of-{len(parts):05d}{_SUFFIX}" for number in range(1, len(parts) + 1)]
        files = list(zip(names if len(parts) > 1 else [_NAME + _SUFFIX], parts, strict=True))
    # Before the first file, so that a refused export leaves none.
    if without := {name: array.dtype.name for name, array in named.items() if array.dtype.name not in BY_NAME}:
        name, dtype = next(iter(without.items()))
        raise CheckpointError(
            f"safetensors has no dtype {dtype}, that of {name} ({len(without)} of {len(named)} arrays): use "
            "format='orbax', or a base with another dtype"
        )
    for name, arrays in files:
        folder.write(name, _filling(arrays, metadata))
    if len(files) > 1:
        homes = {tensor: name for name, arrays in files for tensor in arrays}
        size = sum(array.nbytes for array in named.values())
        index = json.dumps({"metadata": {"total_size": size}, "weight_map": homes}, indent=1)
        folder.write(f"{_NAME}{_SUFFIX}.index.json", index.encode())


def _parts(named: Mapping[str, NDArray[np.generic]]) -> list[dict[str, NDArray[np.generic]]]:
    parts: list[dict[str, NDArray[np.generic]]] = [{}]
    size = 0
    for name, array in named.items():
        if parts[-1] and size + array.nbytes > MAX_FILE_BYTES:
            parts.append({})
            size = 0
        parts[-1][name] = array
        size += array.nbytes
    return parts


def _filling(arrays: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]) -> Any:
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=array.dtype.name, shape=list(arrays[name].shape), data_ptr=array.ctypes.data, data_len=array.nbytes
        )
        for name, array in kept.items()
    }

    def fill(path: str) -> None:
        assert kept.keys() == specs.keys()  # the specs point into these arrays
        safetensors.serialize_file(specs, path, dict(metadata))

    return fill
