"""Reads any range of any array of a checkpoint, regardless of the number of shards that wrote it (resharding, T7)."""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

import numpy as np
import safetensors
from numpy.typing import NDArray

from .._update import AVERAGE, MODEL_STATE, PARAMS, STATE
from ..errors import CheckpointError
from ._dtypes import BY_NAME, STORED
from ._manifest import Manifest, ManifestLeaf
from ._store import CheckpointStore


class Reader:
    """Reads ranges of a checkpoint's arrays; safe to use from several threads.

    The reader reads whole files, to compare their checksums, and keeps the last `cache` of them.
    """

    def __init__(self, store: CheckpointStore, manifest: Manifest, *, cache: int = 2) -> None:
        self.manifest = manifest
        self._store = store
        self._cache_size = cache
        self._cache: OrderedDict[int, dict[str, NDArray[np.generic]]] = OrderedDict()
        self._lock = threading.Lock()
        self._where: dict[str, list[tuple[int, int, int, str]]] = {}
        for number, info in enumerate(manifest.files):
            for part in info.ranges:
                self._where.setdefault(part.key, []).append((part.start, part.stop, number, part.tensor))
        for parts in self._where.values():
            parts.sort()

    def keys(self) -> tuple[str, ...]:
        """The keys of all arrays in the checkpoint, sorted."""
        return tuple(sorted(self._where))

    def size(self, key: str) -> int:
        """The number of elements of the flattened array `key`; 0 when the checkpoint has none of that name."""
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
        """The moving average of leaf `index` of the parameters, in the leaf's own shape and dtype."""
        leaf = self.manifest.leaves[index]
        return self._leaf(leaf, STATE + AVERAGE).astype(BY_NAME[leaf.dtype])

    def _leaf(self, leaf: ManifestLeaf, prefix: str) -> NDArray[np.generic]:
        size = math.prod(leaf.shape)
        if size == 0:  # nothing of it is stored
            return np.empty(leaf.shape, BY_NAME[leaf.dtype])
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
        try:
            return content[tensor]
        except KeyError:
            raise CheckpointError(f"{self.manifest.files[number].name} holds no tensor {tensor!r}") from None

    def _load(self, number: int) -> dict[str, NDArray[np.generic]]:
        info = self.manifest.files[number]
        data = self._store.read_file(info)
        content = {}
        try:
            tensors = safetensors.deserialize(data)  # type: ignore[no-untyped-call]
        except safetensors.SafetensorError as error:
            raise CheckpointError(f"{info.name} is not a safetensors file: {error}") from error
        for name, spec in tensors:
            dtype = STORED.get(spec["dtype"])
            if dtype is None:
                raise CheckpointError(f"{info.name}: tensor {name!r} has the unknown dtype {spec['dtype']}")
            content[name] = np.frombuffer(spec["data"], dtype=dtype)
        for part in info.ranges:
            if (array := content.get(part.tensor)) is not None and array.size != part.stop - part.start:
                raise CheckpointError(f"{info.name}: tensor {part.tensor!r} has {array.size} elements")
        return content
