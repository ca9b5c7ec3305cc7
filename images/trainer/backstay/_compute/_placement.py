"""Places a process's arrays on all its devices, whole or divided (in-graph replication, FSDP, tensor parallelism)."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from .._update import TreeSpec, on_host, shares_host_memory
from ._sharding import (
    BATCH,
    MeshAxes,
    ModelSharding,
    Shardings,
    mesh_of,
    owner_of_devices,
    partition_spec,
    shardings_of,
)

__all__ = ["Placement", "is_out_of_memory", "placement_of"]

_LOG = logging.getLogger(__name__)


class Placement:
    """The model is on every device, or divided over them; a batch is cut along its leading axis.

    Attributes:
        devices: the devices of this process.
        everywhere: the sharding of arrays that every device has whole.
        divided: whether an array of the model is divided over them, or belongs to devices of several processes.
        spans: whether devices of other processes belong to it. Then all processes call each method with the same
            values, and the arrays that they get are of all devices.
    """

    def __init__(
        self,
        devices: Sequence[Any] | None = None,
        *,
        deterministic: bool = False,
        shardings: Shardings | None = None,
    ) -> None:
        """
        Args:
            devices: the devices to use; None: all local devices.
            deterministic: ask the backend for kernels that give the same bits run after run. It matters on GPUs.
            shardings: where the arrays of the model lie, on a mesh of these devices; None: each device has all.
        """
        self._deterministic = deterministic
        self.devices = list(devices) if devices is not None else jax.local_devices()
        self.spans = len({device.process_index for device in self.devices}) > 1
        mesh = Mesh(np.asarray(self.devices), (BATCH,)) if shardings is None else shardings.mesh
        self.everywhere = NamedSharding(mesh, partition_spec())
        axes = (BATCH,) if shardings is None else shardings.batch
        self._split = NamedSharding(mesh, partition_spec(axes))
        self._parts = math.prod(mesh.shape[axis] for axis in axes)
        self._mesh, self._shardings = mesh, shardings
        self.divided = self.spans or (shardings is not None and shardings.divided)
        self._warned = False

    def tracing(self) -> AbstractContextManager[Any]:
        """Within it, functions of the script find the mesh, such as `jax.shard_map` without an argument `mesh`."""
        use: Any = getattr(jax, "set_mesh", None)
        return nullcontext() if self._shardings is None or use is None else use(self._mesh)

    def model(self, tree: TreeSpec) -> list[NamedSharding]:
        """Returns the sharding of each leaf of the tree."""
        return [self.everywhere] * len(tree.leaves) if self._shardings is None else list(self._shardings.leaves)

    def state_of(self, optimizer: Any, tree: TreeSpec) -> Any:
        """Finds the shardings of an optimizer's state, by names and shapes.

        An array whose path ends with that of a parameter lies as the parameter does, if its shape ends with the
        parameter's too. So this works for every optimizer that keeps trees like that of the parameters.

        Returns:
            A tree like the state, or the one sharding of all of it.
        """
        if self._shardings is None or not self.divided:
            return self.everywhere
        params = tree.parameters
        shapes = params.shapes()
        of_path = {
            tuple(path): (leaf.shape, sharding)
            for (path, leaf), sharding in zip(
                jax.tree_util.tree_flatten_with_path(shapes)[0], self._shardings.leaves, strict=False
            )
        }

        def place(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
            ends = (path[start:] for start in range(len(path) + 1))
            shape, sharding = next((of_path[end] for end in ends if end in of_path), (None, self.everywhere))
            before = leaf.ndim - len(shape or ())
            if shape is None or before < 0 or leaf.shape[before:] != shape:
                return self.everywhere
            return NamedSharding(self._mesh, partition_spec(*[None] * before, *sharding.spec))

        return jax.tree_util.tree_map_with_path(place, jax.eval_shape(optimizer.init, shapes))

    def batch(self, batch: Any) -> Any:
        """Places `batch` on the devices, where arrays are cut if the number of devices divides their leading axis. Safe
        to call from any thread.

        On one device that shares the host's memory, the batch stays as it is. There a compiled function takes arrays
        of the host in a tenth of the time that `device_put` needs.
        """
        if self.on_host:
            return batch
        leaves, treedef = jax.tree_util.tree_flatten(batch)
        return jax.tree_util.tree_unflatten(treedef, self._placed(leaves, [self._layout(leaf) for leaf in leaves]))

    def leaves(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves of the model where compiled functions take them."""
        if self.on_host:  # a jitted function takes a thousand arrays of the host ten times as fast as `device_put` does
            return list(leaves)
        return self._put(leaves, () if self._shardings is None else self._shardings.leaves)

    def leaf(self, number: int, value: Any) -> Any:
        """Returns leaf `number` of the model where compiled functions take it."""
        place = self.everywhere if self._shardings is None else self._shardings.leaves[number]
        return self._placed([value], [place])[0]

    def frozen(self, number: int, value: Any) -> Any:
        """Returns the value of a frozen leaf, which every call of a compiled function takes, in memory of the
        devices."""
        place = self.everywhere if self._shardings is None else self._shardings.frozen[number]
        return self._placed([value], [place])[0]

    def for_script(self, model: Any) -> Any:
        """Returns the model, or the parameters that train, as arrays of JAX for functions of the script.

        Args:
            model: a pytree with the leaves of the model in their order, or only with those of the parameters.
        """
        if self.divided:
            return self.divide(model)
        # Arrays that came through pinned memory are bound to one device; a script may use them on all.
        free = jax.tree_util.tree_map(
            lambda leaf: leaf if isinstance(leaf, np.ndarray) or not leaf.committed else on_host(self.first(leaf)),
            model,
        )
        return jax.device_put(free, may_alias=True)

    def divide(self, model: Any) -> Any:
        """Returns the same tree, divided over the devices; unchanged if the model is not divided. `model`: see
        `for_script`."""
        leaves, structure = jax.tree_util.tree_flatten(model)
        return jax.tree_util.tree_unflatten(structure, self.leaves(leaves)) if self.divided else model

    def _put(self, leaves: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
        """
        Args:
            shardings: one for each leaf, or for more leaves than these; empty: each device gets all of them.
        """
        places = list(shardings[: len(leaves)]) if shardings else [self.everywhere] * len(leaves)
        return self._placed(leaves, places)

    def _placed(self, values: Sequence[Any], places: Sequence[NamedSharding]) -> list[Any]:
        """Returns arrays on the devices. Each process has all of each value, or the array is placed already."""
        if not self.spans:
            placed: list[Any] = jax.device_put(list(values), list(places), may_alias=True)
            return placed
        return [_of_all_processes(value, place) for value, place in zip(values, places, strict=True)]

    def shapes(self, tree: TreeSpec) -> list[Any]:
        """Returns the shapes, dtypes and places of the results of `leaves`, for the leaves of a tree."""
        places = [None] * len(tree.leaves) if self.on_host else self.model(tree)
        shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
        return [shape(leaf.shape, leaf.dtype, sharding=place) for leaf, place in zip(tree.leaves, places, strict=True)]

    def first(self, values: Any) -> Any:
        """Returns a pytree of arrays as they are on the first device, if every device has them whole. Others stay
        divided."""
        if len(self.devices) == 1:
            return values
        return jax.tree_util.tree_map(
            lambda value: value.addressable_data(0) if value.is_fully_replicated else value, values
        )

    def placing(self, batches: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Places `batches` on the devices, which arrive before their step is due if a prefetcher reads them."""
        if self.on_host:
            return batches

        size: int = getattr(batches, "batch_size", 0)
        own = self._own_rows(size) if size and hasattr(batches, "rows") else None

        def placed(key: Any) -> Any:
            if own is None:
                return self.batch(batches(key))
            batch: Any = batches.rows(key, own)  # type: ignore[attr-defined]
            return jax.tree_util.tree_map(lambda leaf: self._of_rows(np.asarray(leaf), own, size), batch)

        for name in ("workers", "ahead", "ahead_bytes"):  # how a prefetcher calls it
            if hasattr(batches, name):
                setattr(placed, name, getattr(batches, name))
        return placed

    def _own_rows(self, size: int) -> slice | None:
        """Returns the rows of a batch that the devices of this process get, or None if it needs all of them."""
        if not self.spans or size % self._parts:
            return None
        places: Any = self._split.addressable_devices_indices_map((size,))
        held = [rows.indices(size) for (rows,) in places.values()]
        own = slice(min(start for start, _, _ in held), max(stop for _, stop, _ in held))
        return None if own == slice(0, size) else own

    def _of_rows(self, leaf: np.ndarray[Any, Any], own: slice, size: int) -> Any:
        """Returns an array of `size` rows on the devices of all processes, of which this one has its own rows."""

        def of_device(index: Any) -> np.ndarray[Any, Any]:
            start, stop, _ = index[0].indices(size)
            return leaf[start - own.start : stop - own.start]

        return jax.make_array_from_callback((size, *leaf.shape[1:]), self._split, of_device)

    def on(self, *platforms: str) -> bool:
        """Returns whether all devices are of these platforms."""
        return all(device.platform in platforms for device in self.devices)

    @property
    def on_host(self) -> bool:
        """Whether it is one device that shares the host's memory: arrays of the host are as good there."""
        return len(self.devices) == 1 and self.on("cpu")

    @property
    def of_accelerators(self) -> bool:
        """Whether it is several devices, which all have memory besides that of the host."""
        return len(self.devices) > 1 and not any(map(shares_host_memory, self.devices))

    @property
    def takes_host_memory(self) -> bool:
        """Whether `leaves` takes arrays of the host as well as those of a device."""
        return self.on_host or (self.divided and not self.spans and not self.of_accelerators)

    @property
    def options(self) -> dict[str, Any] | None:
        """Compiler options for functions that run there."""
        return {"xla_gpu_deterministic_ops": True} if self._deterministic and self.on("gpu", "cuda", "rocm") else None

    def _layout(self, leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        if shape and shape[0] > 0 and shape[0] % self._parts == 0:
            return self._split
        if shape and shape[0] > 1 and not self._warned:
            self._warned = True
            _LOG.warning(
                "an array of a batch has %d rows, which the %d devices of %s do not divide. Each device computes all "
                "rows: use a multiple of %d",
                shape[0],
                self._parts,
                owner_of_devices(self.devices)
                if self._parts == len(self.devices)
                else f"the axis {self._mesh.axis_names[0]!r}",
                self._parts,
            )
        return self.everywhere


def _of_all_processes(value: Any, place: NamedSharding) -> Any:
    """Returns an array of the devices of several processes, of which each one places its own part."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        return value
    whole = np.asarray(value)

    def part(index: Any) -> Any:
        found = whole[index]
        return found if found.size == whole.size else found.copy()  # JAX may keep it, and with it the whole array

    return jax.make_array_from_callback(whole.shape, place, part)


def placement_of(
    tree: TreeSpec,
    mesh: MeshAxes | None,
    sharding: ModelSharding | None,
    devices: Sequence[Any] | None = None,
    *,
    deterministic: bool = False,
) -> Placement:
    """Returns the placement of a model as a script requests it.

    Args:
        tree: the model.
        mesh, sharding: see `train`.
        devices, deterministic: see `Placement`.

    Raises:
        ConfigurationError: `mesh` or `sharding` is invalid, or does not fit the devices.
    """
    if mesh is None and sharding is None:
        return Placement(devices, deterministic=deterministic)
    made = mesh_of(mesh, list(devices) if devices is not None else jax.local_devices())
    found = shardings_of(sharding, made, tree)
    return Placement(list(made.devices.flat), deterministic=deterministic, shardings=found)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the host or a device has too little memory."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
