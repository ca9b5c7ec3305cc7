"""Orbax checkpoints, read and written by Orbax itself, which is an optional import.

https://orbax.readthedocs.io: a checkpoint is a folder with `_METADATA`; one of several items has a folder for each
item; `CheckpointManager` has a folder for each step.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np
from numpy.typing import NDArray

from ..._update import leaf_names
from ...errors import CheckpointError

__all__ = ["is_orbax", "read_orbax", "write_orbax"]

_ARRAYS: Final = "_METADATA"
_STEP: Final = "_CHECKPOINT_METADATA"


def is_orbax(uri: str) -> bool:
    """Returns whether `uri` is an Orbax checkpoint, one of its items, or the folder of a `CheckpointManager`."""
    try:
        folder = _path(uri)
        return folder.is_dir() and bool(_is_item(folder) or _items(folder) or _steps(folder))
    except KeyError:  # a scheme that Orbax's paths do not have
        return False


def read_orbax(uri: str) -> dict[str, NDArray[np.generic]]:
    """Returns all arrays of a checkpoint, by the keys on the way to them, joined by dots.

    Of the folder of a `CheckpointManager` the newest step is read. An item that stands alone, or is called ``default``
    or ``state``, is the whole checkpoint; others begin with their names.

    Raises:
        CheckpointError: the checkpoint cannot be read, or Orbax is not installed.
    """
    ocp = _orbax()
    folder = _path(uri)
    if not (_is_item(folder) or _items(folder)):
        folder = max(_steps(folder), key=lambda step: int(step.name))
    items = [folder] if _is_item(folder) else _items(folder)
    found: dict[str, NDArray[np.generic]] = {}
    for item in items:
        begin = "" if len(items) == 1 or item.name in {"default", "state"} else f"{item.name}."
        try:
            with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                metadata = checkpointer.metadata(item).item_metadata
                if metadata is None:
                    raise ValueError("files are missing or damaged")
                tree = metadata.tree
                how = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
                tree = checkpointer.restore(item, args=ocp.args.PyTreeRestore(restore_args=how))
        except Exception as error:
            raise CheckpointError(f"{item} cannot be read as an Orbax checkpoint: {error}") from error
        flat = jax.tree_util.tree_flatten_with_path(tree)[0]
        for name, (_, value) in zip(leaf_names(path for path, _ in flat), flat, strict=True):
            if isinstance(value, np.ndarray | np.generic | jax.Array | int | float):
                found[f"{begin}{name}"] = np.asarray(value)
    return found


def write_orbax(uri: str, tree: Any) -> None:
    """Store `tree`, a pytree of arrays, as a checkpoint that `orbax.checkpoint.StandardCheckpointer` restores.

    Raises:
        CheckpointError: `uri` exists, cannot be written, or Orbax is not installed.
    """
    ocp = _orbax()
    folder = _path(uri)
    if folder.exists():
        raise CheckpointError(f"{uri} exists, and is not replaced: name a folder that does not exist")
    try:
        # Threads of Orbax end only after minutes if Orbax cannot create the folder.
        folder.mkdir(parents=True)
        folder.rmdir()
        with _quiet(), ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, tree)
            checkpointer.wait_until_finished()
    except Exception as error:
        _remove(folder.parent, f"{folder.name}.orbax-checkpoint-tmp")
        raise CheckpointError(f"{uri} cannot be written: {error}") from error


def _remove(parent: Any, name: str) -> None:
    """Remove what Orbax has written before it failed: on a full disk it takes the space of others."""
    with contextlib.suppress(Exception):
        from etils import epath  # comes with Orbax

        epath.Path(parent / name).rmtree()


def _orbax() -> Any:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise CheckpointError(
            "Orbax checkpoints need the package orbax-checkpoint, which is not installed: pip install orbax-checkpoint"
        ) from error
    return ocp


def _path(uri: str) -> Any:
    """Returns a path with the methods of `pathlib.Path`; Orbax takes such."""
    if "://" not in uri:
        return Path(uri).expanduser().absolute()
    try:
        from etils import epath  # comes with Orbax
    except ImportError:
        return Path("/nowhere")  # without Orbax nothing remote is one of its checkpoints
    return epath.Path(uri)


def _is_item(folder: Any) -> bool:
    return bool((folder / _ARRAYS).exists())


def _items(folder: Any) -> list[Any]:
    if not (folder / _STEP).exists():
        return []
    return sorted((item for item in folder.iterdir() if item.is_dir() and _is_item(item)), key=lambda item: item.name)


def _steps(folder: Any) -> list[Any]:
    return [step for step in folder.iterdir() if step.name.isdigit() and (_is_item(step) or _items(step))]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax warns that a checkpoint is read without a sharding: the arrays are wanted on the host."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
