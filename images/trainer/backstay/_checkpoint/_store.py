"""Writes checkpoints and finds the newest whole one (T6, T7).

A shard's server writes its own file with `write_shard`; the coordinator gathers what was written and makes the
checkpoint with `write_manifest`; `prune` deletes only what no newer history could need.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import safetensors
from numpy.typing import NDArray

from ..errors import CheckpointError, StorageError
from ._files import Folder, PosixFolder, open_folder
from ._manifest import FileInfo, FileRange, Manifest, order_of_manifest, order_of_shard, shard_name

_CHUNK = 8 << 20
_ABANDONED_SECONDS = 3600.0


class Entry(NamedTuple):
    """Elements ``start:stop`` of the flattened array `key`, as a one-dimensional array of any dtype."""

    key: str
    start: int
    stop: int
    array: NDArray[np.generic]


@dataclass(frozen=True)
class Newest:
    """The newest whole checkpoint, and what was passed over on the way to it: names of manifests with the reason."""

    manifest: Manifest | None
    skipped: tuple[str, ...] = ()


class CheckpointStore:
    """Checkpoints in one folder (`uri`: a path or any fsspec URI)."""

    def __init__(self, uri: str, folder: Folder | None = None) -> None:
        self.uri = uri
        self._folder = folder if folder is not None else open_folder(uri)

    # ---- writing

    def write_shard(
        self, entries: Iterable[Entry], *, version: int, term: int, shard: int, shards: int, incarnation: int
    ) -> FileInfo:
        """Write one shard's arrays as safetensors, whole or not at all.

        Args:
            entries: what the shard holds; the arrays are read until the call returns and must not change meanwhile.

        Returns:
            The file and the ranges in it, for the manifest.

        Raises:
            CheckpointError: the file could not be written (a full disk, no rights, an object store that errs).
        """
        name = shard_name(version, term, shard, shards, incarnation)
        kept: list[NDArray[np.generic]] = []
        tensors: dict[str, safetensors.TensorSpec] = {}
        ranges: list[FileRange] = []
        for key, start, stop, array in entries:
            flat = np.ascontiguousarray(array).reshape(-1)
            if flat.size != stop - start:
                raise CheckpointError(f"{key}[{start}:{stop}] was given with {flat.size} elements")
            kept.append(flat)
            here = FileRange(key=key, start=start, stop=stop)
            tensors[here.tensor] = safetensors.TensorSpec(
                dtype=flat.dtype.name, shape=list(flat.shape), data_ptr=flat.ctypes.data, data_len=flat.nbytes
            )
            ranges.append(here)
        digest: list[tuple[int, str]] = []

        def fill(path: str) -> None:
            safetensors.serialize_file(tensors, path, {"format": "backstay"})
            digest.append(_sha256_of(path))

        self._folder.write(name, fill)
        del kept
        size, sha256 = digest[-1]
        return FileInfo(name=name, size=size, sha256=sha256, ranges=tuple(ranges))

    def write_manifest(self, manifest: Manifest) -> None:
        """Make the checkpoint: after this call it is the newest whole one.

        Raises:
            CheckpointError: a file that the manifest names is not there with its size, or the write failed.
        """
        for info in manifest.files:
            size = self._folder.size(info.name)
            if size != info.size:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"{self.uri}/{info.name} {found}, {info.size} bytes were written: no checkpoint made"
                )
        self._folder.write(manifest.name, manifest.model_dump_json(indent=1).encode())

    def prune(self, *, keep: int, term: int) -> list[str]:
        """Delete all but the newest `keep` checkpoints, and shard files that never got a manifest.

        A file of a term newer than `term` is never deleted (T6), and neither is anything as new as the newest
        manifest that this call sees: it may be a checkpoint in the making.

        Returns:
            The names of the deleted files.
        """
        names = self._folder.names()
        orders = sorted(
            ((order, name) for name in names if (order := order_of_manifest(name)) is not None), reverse=True
        )
        if not orders:
            return []
        mine = [(order, name) for order, name in orders if order[0] <= term]
        newer = len(orders) - len(mine)
        doomed = [name for _, name in mine[max(0, keep - newer) :]]
        if len(doomed) == len(orders):
            doomed.remove(orders[0][1])
        kept = [(order, name) for order, name in orders if name not in doomed]
        needed = {info.name for _, name in kept for info in self._manifest_or_none(name)}
        newest = orders[0][0]
        loose = [
            name
            for name in names
            if (made := order_of_shard(name)) is not None
            and name not in needed
            and made[0] <= term
            and made < newest[:2]
        ]
        # Manifests go first: a checkpoint without its manifest is no checkpoint, one without its files is a torn one.
        for name in (*doomed, *loose):
            self._folder.delete(name)
        if isinstance(self._folder, PosixFolder):
            self._sweep_temporaries(self._folder, newest[:2], term)
        return [*doomed, *loose]

    def _sweep_temporaries(self, folder: PosixFolder, newest: tuple[int, int], term: int) -> None:
        for name in folder.names():
            match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
            if match is None:
                # What safetensors was writing when its process was killed; the name does not tell of which version.
                if re.fullmatch(r"\.tmp\w{6}", name) and folder.age(name) > _ABANDONED_SECONDS:
                    folder.delete(name)
                continue
            order = order_of_shard(match[1]) or (order_of_manifest(match[1]) or (None,))[:2]
            if order[0] is not None and len(order) == 2 and order[0] <= term and order < newest:
                folder.delete(name)

    def _manifest_or_none(self, name: str) -> tuple[FileInfo, ...]:
        try:
            return Manifest.parse(self._folder.read(name), f"{self.uri}/{name}").files
        except CheckpointError:
            return ()

    # ---- reading

    def manifests(self) -> list[str]:
        """The names of the manifests in the folder, newest first by (term, version, incarnation)."""
        found = [(order, name) for name in self._folder.names() if (order := order_of_manifest(name)) is not None]
        return [name for _, name in sorted(found, reverse=True)]

    def newest(self, *, verify: bool = True, before: tuple[int, int] | None = None) -> Newest:
        """The newest whole checkpoint.

        Args:
            verify: read every file and compare its SHA-256; otherwise only sizes are compared.
            before: only checkpoints of a (term, version) below this one.

        Returns:
            The manifest, or None when there is no whole checkpoint; and what was skipped, with the reason.

        Raises:
            StorageError: the folder cannot be listed, or a file in it not be read.
        """
        skipped: list[str] = []
        for name in self.manifests():
            order = order_of_manifest(name)
            if before is not None and order is not None and order[:2] >= before:
                continue
            try:
                return Newest(self.open(name, verify=verify), tuple(skipped))
            except StorageError:
                raise  # it may be whole: to pass it over would throw away what was trained
            except CheckpointError as error:
                skipped.append(f"{name}: {error}")
        return Newest(None, tuple(skipped))

    def open(self, name: str, *, verify: bool = True) -> Manifest:
        """The manifest called `name`, when all it names is whole.

        Raises:
            CheckpointError: the manifest or one of its files is missing, truncated or damaged; the message says which.
        """
        manifest = Manifest.parse(self._folder.read(name), f"{self.uri}/{name}")
        if manifest.name != name:
            raise CheckpointError(f"{self.uri}/{name} says of itself that it is {manifest.name}")
        for info in manifest.files:
            size = self._folder.size(info.name)
            if size is None:
                raise CheckpointError(f"{info.name} is missing")
            if size != info.size:
                raise CheckpointError(f"{info.name} has {size} bytes instead of {info.size}")
            if verify:
                self.read_file(info)
        return manifest

    def read_file(self, info: FileInfo) -> bytes:
        """The whole content of a file, checked against its size and SHA-256.

        Raises:
            CheckpointError: it differs.
        """
        data = self._folder.read(info.name)
        if len(data) != info.size:
            raise CheckpointError(f"{info.name} has {len(data)} bytes instead of {info.size}")
        if hashlib.sha256(data).hexdigest() != info.sha256:
            raise CheckpointError(f"{info.name} is damaged: its SHA-256 is not the manifest's")
        return data


def _sha256_of(path: str) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:  # noqa: PTH123
        while block := file.read(_CHUNK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
