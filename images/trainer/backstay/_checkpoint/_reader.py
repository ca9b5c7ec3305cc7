"""Reads any range of any array of a checkpoint, regardless of the number of shards that wrote it (resharding, T7)."""

from __future__ import annotations

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .._update import AVERAGE, MODEL_STATE, PARAMS, STATE, aligned_empty
from ..errors import CheckpointError
from ._dtypes import BY_NAME, STORED
from ._manifest import FileInfo, Manifest, ManifestLeaf
from ._store import CheckpointStore, HashedFile

OF_MODEL: Final = (PARAMS, MODEL_STATE)
"""The beginnings of the keys of a model's arrays, without the state of the optimizer."""


class Reader:
    """Reads ranges of a checkpoint's arrays; safe to use from several threads.

    The reader reads whole files, to compare their checksums, and keeps the arrays of the last `cache` of them.
    """

    def __init__(
        self,
        store: CheckpointStore,
        manifest: Manifest,
        *,
        cache: int = 2,
        keep: tuple[str, ...] = ("",),
        again: bool = False,
        read_into: Callable[[str, int, memoryview], None] | None = None,
    ) -> None:
        """
        Args:
            keep: the beginnings of the keys that will be read. Other arrays take no memory.
            again: whether an array is read again when it is needed, instead of being kept since its file was compared.
            read_into: reads a part of a file in the place of the method of `Folder`.
        """
        self.manifest = manifest
        self._keep, self._again, self._read_into = keep, again, read_into or store.folder.read_into
        self._store = store
        self._cache_size = cache
        self._cache: OrderedDict[int, dict[str, Callable[[], NDArray[np.generic]]]] = OrderedDict()
        self._lock = threading.Lock()
        self._where: dict[str, list[tuple[int, int, int, str]]] = {}
        for number, info in enumerate(manifest.files):
            for part in info.ranges:
                self._where.setdefault(part.key, []).append((part.start, part.stop, number, part.tensor))
        for parts in self._where.values():
            parts.sort()

    def keys(self) -> tuple[str, ...]:
        """Returns the keys of all arrays in the checkpoint, sorted."""
        return tuple(sorted(self._where))

    def size(self, key: str) -> int:
        """Returns the number of elements of the flattened array `key`; 0 when the checkpoint has none of that name."""
        return max((stop for _, stop, _, _ in self._where.get(key, ())), default=0)

    def __contains__(self, key: str) -> bool:
        return key in self._where

    def read(self, key: str, start: int, stop: int) -> NDArray[np.generic]:
        """Elements ``start:stop`` of the flattened array `key`, as a new one-dimensional array of the stored dtype.

        Raises:
            CheckpointError: the checkpoint has no such key, does not hold the whole range, or a file is damaged.
        """
        parts = self._where.get(key)
        if parts is None:
            raise CheckpointError(f"the checkpoint {self.manifest.name} in {self._store.uri} holds no array {key!r}")
        pieces: list[NDArray[np.generic]] = []
        at = start
        for first, last, number, tensor in parts:
            if first == last and start == stop:
                return self._tensor(number, tensor).copy()
            if last <= at or first >= stop:
                continue
            if first > at:
                break
            upto = min(last, stop)
            pieces.append(self._tensor(number, tensor)[at - first : upto - first])
            at = upto
        if at != stop or not pieces:
            raise CheckpointError(
                f"the checkpoint {self.manifest.name} in {self._store.uri} holds only elements {start}:{at} of "
                f"{key!r}, {start}:{stop} are needed"
            )
        return np.concatenate(pieces)

    def parameter(self, index: int) -> NDArray[np.generic]:
        """Leaf `index` of the parameters, whole, in its own shape."""
        return self._leaf(self.manifest.leaves[index], PARAMS)

    def state_leaf(self, index: int) -> NDArray[np.generic]:
        """Leaf `index` of the model state, whole, in its own shape."""
        return self._leaf(self.manifest.state_leaves[index], MODEL_STATE)

    def average(self, index: int) -> NDArray[np.generic]:
        """Returns the moving average of leaf `index` of the parameters, in the leaf's own shape and dtype."""
        leaf = self.manifest.leaves[index]
        return self._leaf(leaf, STATE + AVERAGE).astype(BY_NAME[leaf.dtype])

    def _leaf(self, leaf: ManifestLeaf, prefix: str) -> NDArray[np.generic]:
        size = math.prod(leaf.shape)
        if size == 0:  # nothing of it is stored
            return np.empty(leaf.shape, BY_NAME[leaf.dtype])
        parts = self._where.get(prefix + leaf.path, [])
        if len(parts) == 1 and parts[0][:2] == (0, size):  # without a copy
            return self._tensor(*parts[0][2:]).reshape(leaf.shape)
        return self.read(prefix + leaf.path, 0, size).reshape(leaf.shape)

    def _tensor(self, number: int, tensor: str) -> NDArray[np.generic]:
        with self._lock:
            content = self._cache.get(number)
            if content is None:
                content = self._load(number)
                self._cache[number] = content
                while len(self._cache) > self._cache_size:
                    self._cache.popitem(last=False)
            self._cache.move_to_end(number)
        if tensor not in content:
            raise CheckpointError(f"{self.manifest.files[number].name} holds no tensor {tensor!r}")
        return content[tensor]()

    def _load(self, number: int) -> dict[str, Callable[[], NDArray[np.generic]]]:
        info = self.manifest.files[number]
        sizes = {part.tensor: part.stop - part.start for part in info.ranges if part.key.startswith(self._keep)}
        read = HashedFile(info, self._read_into)
        content: dict[str, Callable[[], NDArray[np.generic]]] = {}
        for name, dtype, nbytes in _header(info, read):
            if sizes.get(name, nbytes // dtype.itemsize) * dtype.itemsize != nbytes:
                raise CheckpointError(f"{info.name}: tensor {name!r} has {nbytes // dtype.itemsize} elements")
            if name in sizes and not self._again:
                data = aligned_empty(nbytes)
                read(data.data)
                content[name] = partial(data.view, dtype)
                continue
            if name in sizes:
                content[name] = partial(self._part, info.name, read.at, dtype, nbytes)
            read.skip(nbytes)
        read.compare()
        return content

    def _part(self, name: str, start: int, dtype: np.dtype[np.generic], nbytes: int) -> NDArray[np.generic]:
        data = aligned_empty(nbytes)
        self._read_into(name, start, data.data)
        return data.view(dtype)


def _header(info: FileInfo, read: HashedFile) -> list[tuple[str, np.dtype[np.generic], int]]:
    """Returns names, dtypes and bytes of the tensors of a safetensors file, by position.

    https://huggingface.co/docs/safetensors has the format. The tensors follow each other without gaps.

    Raises:
        CheckpointError: the file has another format.
    """
    try:
        first = bytearray(8)
        read(memoryview(first))
        length = int.from_bytes(first, "little")
        if length > info.size - len(first):
            raise ValueError("the header is longer than the file")
        text = bytearray(length)
        read(memoryview(text))
        entries: dict[str, Any] = json.loads(text)
        entries.pop("__metadata__", None)
        found, end = [], 0
        for name, entry in sorted(entries.items(), key=lambda one: one[1]["data_offsets"]):
            dtype, (start, stop) = STORED[entry["dtype"]], entry["data_offsets"]
            if start != end or stop - start != dtype.itemsize * math.prod(entry["shape"]):
                raise ValueError(f"the tensor {name!r} has an invalid size or place")
            found.append((name, dtype, stop - start))
            end = stop
        if len(first) + length + end != info.size:
            raise ValueError("the tensors have another size than the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{info.name} is damaged, or not a safetensors file: {error!r}") from error
    return found
