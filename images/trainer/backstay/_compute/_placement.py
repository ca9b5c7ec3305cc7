"""Places a process's arrays on all its devices (in-graph replication)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._update import TreeSpec

__all__ = ["Placement"]

_LOG = logging.getLogger(__name__)


class Placement:
    """The model is on every device; a batch is cut along its leading axis.

    Attributes:
        devices: the devices of this process.
        everywhere: the sharding of arrays that every device has whole.
    """

    def __init__(self, devices: Sequence[Any] | None = None, *, deterministic: bool = False) -> None:
        """
        Args:
            devices: the devices to use; None: all local devices.
            deterministic: ask the backend for kernels that give the same bits run after run. It matters on GPUs.
        """
        self._deterministic = deterministic
        self.devices = list(devices) if devices is not None else jax.local_devices()
        mesh = Mesh(np.asarray(self.devices), ("batch",))
        spec: Any = PartitionSpec  # which JAX leaves untyped
        self.everywhere = NamedSharding(mesh, spec())
        self._split = NamedSharding(mesh, spec("batch"))
        self._warned = False

    def batch(self, batch: Any) -> Any:
        """Places `batch` on the devices, where arrays are cut if the number of devices divides their leading axis. Safe
        to call from any thread.

        On one device that shares the host's memory, the batch stays as it is. There a compiled function takes arrays
        of the host in a tenth of the time that `device_put` needs.
        """
        if self.on_host:
            return batch
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        return jax.tree_util.tree_unflatten(treedef, jax.device_put(leaves, [self._layout(leaf) for leaf in leaves]))

    def leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of the model where compiled functions take them."""
        if self.on_host:  # a jitted function takes a thousand arrays of the host ten times as fast as `device_put` does
            return list(leaves)
        return self.kept(leaves)

    def kept(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves that every call of a compiled function takes, in memory of the devices."""
        placed: list[Any] = jax.device_put(list(leaves), self.everywhere, may_alias=True)
        return placed

    def shapes(self, tree: TreeSpec) -> list[Any]:
        """The shapes, dtypes and places of the results of `leaves`, for the leaves of a tree."""
        sharding = None if self.on_host else self.everywhere
        shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
        return [shape(leaf.shape, leaf.dtype, sharding=sharding) for leaf in tree.leaves]

    def first(self, values: Any) -> Any:
        """A pytree of arrays that every device has whole, as they are on the first device."""
        if len(self.devices) == 1:
            return values
        return jax.tree_util.tree_map(lambda value: value.addressable_data(0), values)

    def placing(self, batches: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Places `batches` on the devices, which arrive before their step is due if a prefetcher reads them."""
        if self.on_host:
            return batches

        def placed(key: Any) -> Any:
            return self.batch(batches(key))

        for name in ("workers", "ahead", "ahead_bytes"):  # how a prefetcher calls it
            if hasattr(batches, name):
                setattr(placed, name, getattr(batches, name))
        return placed

    def on(self, *platforms: str) -> bool:
        """Whether all devices are of these platforms."""
        return all(device.platform in platforms for device in self.devices)

    @property
    def on_host(self) -> bool:
        """Whether it is one device that shares the host's memory: arrays of the host are as good there."""
        return len(self.devices) == 1 and self.on("cpu")

    @property
    def options(self) -> dict[str, Any] | None:
        """Compiler options for functions that run there."""
        return {"xla_gpu_deterministic_ops": True} if self._deterministic and self.on("gpu", "cuda", "rocm") else None

    def _layout(self, leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        if shape and shape[0] > 0 and shape[0] % len(self.devices) == 0:
            return self._split
        if shape and shape[0] > 1 and not self._warned:
            self._warned = True
            _LOG.warning(
                "an array of a batch has %d rows, which the %d devices of this process do not divide. Each device "
                "computes all rows: use a multiple of %d",
                shape[0],
                len(self.devices),
                len(self.devices),
            )
        return self.everywhere
