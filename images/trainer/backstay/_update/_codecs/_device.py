"""Arrays and blocks on an accelerator, and memory of the host that the accelerator reads and writes by itself.

JAX calls it ``pinned_host``. With ordinary memory the processor copies once more. An H100 then reaches 1.6 GB/s out and
8 GB/s in, and 52 GB/s with pinned memory (docs/gpu.md).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from ctypes import c_uint8
from typing import Any, Final

import jax
import numpy as np

__all__ = [
    "DeviceArray",
    "DeviceBlock",
    "host_of",
    "on_host",
    "pinned_like",
    "pinned_memory",
    "placed_from",
    "shares_host_memory",
    "use_ordinary_memory",
]

_PINNED: Final = "pinned_host"
_LOG = logging.getLogger(__name__)
_IS_FULL: Final = threading.Event()  # the pinned memory of this process: a further attempt would take as long
_FILLING: Final = threading.Lock()

Array = np.ndarray[Any, np.dtype[Any]]


def shares_host_memory(device: Any) -> bool:
    """Returns whether arrays of this `jax.Device` lie in the memory of the host."""
    return bool(device.platform == "cpu")


def pinned_like(array: Any) -> Any:
    """Returns the sharding of the copy of an array in pinned memory, or None if the device has no such memory.

    Args:
        array: a `jax.Array` on one device.
    """
    (device,) = array.devices()
    return array.sharding.with_memory_kind(_PINNED) if _has_pinned(device) else None


def _has_pinned(device: Any) -> bool:
    """It is not known of other platforms whether the host can read and write such memory by its address."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return device.platform in ("gpu", "cpu") and _PINNED in kinds and not _IS_FULL.is_set()


def use_ordinary_memory(error: jax.errors.JaxRuntimeError, *, computed: bool = False) -> None:
    """Do without more pinned memory in this process, because it has none left.

    Args:
        error: what JAX raised when pinned memory was needed; raised again if it has another reason.
        computed: whether a computation may have failed, on an accelerator whose own memory is full. An error about
            pinned memory has the name of its allocator, `xla_gpu_host_bfc`.
    """
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text or (computed and "host" not in text):
        raise error
    with _FILLING:
        if not _IS_FULL.is_set():
            _IS_FULL.set()
            _LOG.warning(
                "pinned memory is full, so copies between this host and its accelerators are slower from now on. "
                "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB is its limit, 64 by default: %s",
                error,
            )


def _place(device: Any, kind: str) -> Any:
    sharding: Any = jax.sharding.SingleDeviceSharding  # which JAX leaves untyped
    return sharding(device, memory_kind=kind)


def placed_from(arrays: Sequence[Any], devices: Sequence[Any]) -> list[Any]:
    """Copies of arrays in pinned memory, each on its device; waits until all are made."""
    places = [_place(device, device.default_memory().kind) for device in devices]
    copies: list[Any] = jax.device_put(list(arrays), places)
    for copy in copies:
        copy.block_until_ready()
    return copies


def pinned_memory(wanted: Sequence[tuple[tuple[int, ...], np.dtype[Any], Any]]) -> list[tuple[Any, Array]]:
    """Returns new pinned memory for all, or nothing if a device has none, or no room in it.

    Args:
        wanted: the shape, dtype and device of each array.

    Returns:
        Of each a `jax.Array`, and a writable 1-D view of its memory, which the array must outlive. A copy of the array
        on the device has the values that were written before.
    """
    found = []
    for shape, dtype, device in wanted:
        if not _has_pinned(device):
            return []
        try:
            array = jax.device_put(np.zeros(shape, dtype), _place(device, _PINNED)).block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            use_ordinary_memory(error)
            return []
        found.append((array, _memory_of(array, dtype)))
    return found


def _memory_of(array: Any, dtype: np.dtype[Any]) -> Array:
    if not array.nbytes:
        return np.empty(0, dtype)
    memory = (c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return np.frombuffer(memory, np.uint8).view(dtype)


class DeviceArray:
    """An array on an accelerator, and its copy on the host, which is made once. Thread-safe.

    Attributes:
        array: a `jax.Array` on one device.
        device: the device of the array.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        (self.device,) = array.devices()
        self._lock = threading.Lock()
        self._copy: Any = None

    def begin(self) -> None:
        """Begin the copy to the host, unless it has begun."""
        with self._lock:
            if self._copy is None:
                self._copy = self._begun()

    def _begun(self) -> Any:
        """Returns the array of JAX that the host reads."""
        if (pinned := pinned_like(self.array)) is not None:
            try:
                return jax.device_put(self.array, pinned)
            except jax.errors.JaxRuntimeError as error:
                use_ordinary_memory(error)
        self.array.copy_to_host_async()
        return self.array

    def host(self) -> Array:
        """Returns the elements on the host, 1-D; waits until they are computed and copied."""
        self.begin()
        try:
            return np.asarray(self._copy).reshape(-1)
        except jax.errors.JaxRuntimeError as error:
            if self._copy is self.array:
                raise
            use_ordinary_memory(error, computed=True)
        return np.asarray(self.array).reshape(-1)


class DeviceBlock:
    """A block of a contribution, which consists of parts of arrays on accelerators.

    Attributes:
        parts: in their order, each as an array, its first element when it is flattened, and the one after its last. In
            a block that a codec encodes, each part but the last has whole groups. A block of another process has none.
    """

    __slots__ = ("parts",)

    def __init__(self, *parts: tuple[DeviceArray, int, int]) -> None:
        self.parts = parts

    def begin(self) -> None:
        """Begin the copies of all arrays to the host."""
        for array, _, _ in self.parts:
            array.begin()

    def host(self) -> Array:
        """Returns the block on the host, 1-D; see `DeviceArray.host`. A view if it has one part."""
        found = [array.host()[start:stop] for array, start, stop in self.parts]
        return found[0] if len(found) == 1 else np.concatenate(found)


def on_host(array: Any) -> Array:
    """Returns a `jax.Array` as one on the host, of the same shape; from an accelerator through pinned memory.

    Args:
        array: an array on one device.
    """
    (device,) = array.devices()
    if shares_host_memory(device):
        return np.asarray(array)
    return DeviceArray(array).host().reshape(array.shape)


def host_of(block: Array | DeviceBlock) -> Array:
    """Returns a block of a contribution on the host, 1-D; waits until it is computed and copied."""
    return block.host() if isinstance(block, DeviceBlock) else block
