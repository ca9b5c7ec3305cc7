"""Divides the arrays of a model over several devices, as the arguments `mesh` and `sharding` of `train` say.

`train` takes the names and sizes of the axes instead of a `jax.sharding.Mesh`, because parameter servers import the
same script and have other devices.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from backstay_spec.whole import whole

from .._update import LeafSpec, TreeSpec, some_of
from ..errors import ConfigurationError

__all__ = [
    "MeshAxes",
    "ModelSharding",
    "Shardings",
    "mesh_of",
    "owner_of_devices",
    "partition_spec",
    "shardings_of",
]

_LOG = logging.getLogger(__name__)

MeshAxes = Mapping[str, int] | Callable[[Sequence[Any]], Mesh]
"""The sizes of the axes by name, or a function of the devices that returns the mesh. See `train`."""

ModelSharding = Literal["replicate", "fsdp"] | Callable[[Mesh, Any], Any]
"""The placement of the parameters. See `train`."""

BATCH: Final = "batch"
_SMALL: Final = 1 << 12
"""Below so many elements, fsdp leaves an array whole: to gather it would cost more than the memory is worth."""

partition_spec: Any = PartitionSpec  # which JAX leaves untyped


@dataclass(frozen=True)
class Shardings:
    """Where each array of a model lies.

    Attributes:
        mesh: all devices of a process.
        leaves: the sharding of each leaf of the tree.
        frozen: the sharding of each frozen leaf.
        batch: the axes of the mesh that divide the leading axis of a batch.
    """

    mesh: Mesh
    leaves: tuple[NamedSharding, ...]
    frozen: tuple[NamedSharding, ...]
    batch: tuple[str, ...]

    @property
    def divided(self) -> bool:
        """Whether a leaf is not whole on each device."""
        return not all(sharding.is_fully_replicated for sharding in (*self.leaves, *self.frozen))


def mesh_of(axes: MeshAxes | None, devices: Sequence[Any]) -> Mesh:
    """Returns the mesh of all `devices`.

    Args:
        axes: see `train`. None: one axis, ``batch``.
        devices: the devices of the process.

    Raises:
        ConfigurationError: `axes` is not of such a type, or does not fit the devices.
    """
    if axes is None:
        return Mesh(np.asarray(devices), (BATCH,))
    if isinstance(axes, Mesh):
        raise ConfigurationError(
            "mesh is a jax.sharding.Mesh: must be the sizes of its axes, such as {'batch': 2, 'model': 4}, or a "
            "function of the devices that returns the mesh. Parameter servers import this script too, and have other "
            "devices"
        )
    counts = Counter(device.process_index for device in devices)
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"pod {pod} has {number}" for pod, number in sorted(counts.items()))
        raise ConfigurationError(
            f"the pods of this rank have different numbers of devices ({shown}): each of the {len(counts)} pods of a "
            "rank must have the same number"
        )
    have = f"the devices of {owner_of_devices(devices)} ({len(devices)} {devices[0].platform})"
    made = _returned_by("mesh", have, axes, devices) if callable(axes) else _mesh_of_sizes(axes, devices)
    if not isinstance(made, Mesh):
        raise ConfigurationError(f"mesh returned {type(made).__name__}: must return a jax.sharding.Mesh")
    if sorted(device.id for device in made.devices.flat) != sorted(device.id for device in devices):
        raise ConfigurationError(f"mesh returned a mesh of {made.devices.size} devices: must be of {have}, each once")
    if explicit := [
        name for name, kind in zip(made.axis_names, made.axis_types, strict=True) if "Auto" not in str(kind)
    ]:
        raise ConfigurationError(
            f"mesh returned a mesh whose axis {explicit[0]!r} is not of the type Auto. Pass "
            "axis_types=(jax.sharding.AxisType.Auto,) * N, because XLA divides the computation"
        )
    return made


def owner_of_devices(devices: Sequence[Any]) -> str:
    """Returns the words for the process, or the rank of several pods, that has these devices."""
    return "this rank" if len({device.process_index for device in devices}) > 1 else "this process"


def _returned_by(argument: str, given: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function of the script. `given` describes its argument."""
    try:
        return function(*arguments)
    except Exception as error:
        first = "".join(str(error).strip().splitlines()[:1])
        raise ConfigurationError(f"{argument} raised {type(error).__name__} for {given}: {first}") from error


def _mesh_of_sizes(axes: Any, devices: Sequence[Any]) -> Mesh:
    if not isinstance(axes, Mapping) or not axes or not all(isinstance(name, str) and name for name in axes):
        raise ConfigurationError(
            f"mesh is {axes!r}: must be the sizes of its axes, such as {{'batch': 2, 'model': 4}}, or a function of "
            "the devices that returns the mesh"
        )
    sizes = {name: whole(size) for name, size in axes.items()}
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < -1 or size == 0:
            raise ConfigurationError(
                f"mesh: the axis {name!r} has the size {size!r}: must be 1 or more, or -1 for the rest"
            )
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigurationError(f"mesh: the axes {open_axes} have the size -1: at most one axis takes the rest")
    product = math.prod(size for size in sizes.values() if size > 0)
    # If it does not divide, the message below has the sizes that the user wrote.
    if open_axes and len(devices) % product == 0:
        sizes[open_axes[0]] = len(devices) // product
    if math.prod(sizes.values()) != len(devices):
        shown = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigurationError(
            f"mesh has the axes {shown}, and {owner_of_devices(devices)} has {len(devices)} devices "
            f"({devices[0].platform}): the product of the sizes must be {len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), tuple(sizes))


def shardings_of(sharding: ModelSharding | None, mesh: Mesh, tree: TreeSpec) -> Shardings:
    """Returns the sharding of each array of a model.

    Args:
        sharding: see `train`. None: ``"replicate"``.
        mesh: see `mesh_of`.
        tree: the model.

    Raises:
        ConfigurationError: `sharding` is invalid, or returns something else than it should.
    """
    params = tree.everything.parameters
    whole, leaves = params.unflatten(params.leaves), params.leaves
    name = sharding if isinstance(sharding, str) else None
    if sharding is None or name == "replicate":
        specs = [partition_spec()] * len(leaves)
    elif name == "fsdp":
        specs = [_divided(leaf, mesh) for leaf in leaves]
        large = [
            leaf for leaf, spec in zip(leaves, specs, strict=True) if leaf.size >= _SMALL and spec == partition_spec()
        ]
        _warn("fsdp", large, mesh)
    elif callable(sharding):
        specs = _returned(sharding, mesh, whole)
    else:
        raise ConfigurationError(
            f"sharding is {sharding!r}: must be 'replicate', 'fsdp', or a function of the mesh and of the shapes of "
            "the parameters that returns a PartitionSpec for each"
        )
    places = jax.tree_util.tree_unflatten(
        jax.tree_util.tree_structure(whole), [NamedSharding(mesh, spec) for spec in specs]
    )
    frozen = [] if tree.frozen is None else tree.frozen.values(places)
    trained = jax.tree_util.tree_leaves(places if tree.frozen is None else tree.frozen.rest(places))
    everywhere = NamedSharding(mesh, partition_spec())  # where the model state lies
    states = [everywhere] * (len(tree.leaves) - len(trained))
    frozen += [everywhere] * (len(tree.frozen_leaves) - len(frozen))
    axes = mesh.axis_names if name == "fsdp" else mesh.axis_names[:1]
    return Shardings(mesh, (*trained, *states), tuple(frozen), tuple(map(str, axes)))


def _divided(leaf: LeafSpec, mesh: Mesh) -> Any:
    """Returns the largest dimension that all devices divide, over all axes of the mesh."""
    fitting = [(size, -axis) for axis, size in enumerate(leaf.shape) if size and size % mesh.size == 0]
    if leaf.size < _SMALL or not fitting:
        return partition_spec()
    axis = -max(fitting)[1]
    return partition_spec(*[None] * axis, tuple(mesh.axis_names))


def _returned(sharding: Callable[[Mesh, Any], Any], mesh: Mesh, whole: Any) -> list[Any]:
    """Returns the specs that the script's function returns, one for each parameter.

    Args:
        whole: all parameters, with a `LeafSpec` at each.
    """
    shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
    shapes = jax.tree_util.tree_map(lambda leaf: shape(leaf.shape, leaf.dtype), whole)
    made = _returned_by("sharding", f"a mesh of {_sizes(mesh)}", sharding, mesh, shapes)

    def ends(value: Any) -> bool:
        return value is None or isinstance(value, PartitionSpec)

    if others := [value for value in jax.tree_util.tree_leaves(made, is_leaf=ends) if not ends(value)]:
        raise ConfigurationError(
            f"sharding returned {type(others[0]).__name__} for a parameter: must be a jax.sharding.PartitionSpec, or "
            "None for one that each device has whole"
        )

    def spread(spec: Any, part: Any) -> Any:
        return jax.tree_util.tree_map(lambda _: partition_spec() if spec is None else spec, part)

    try:
        specs = jax.tree_util.tree_leaves(jax.tree_util.tree_map(spread, made, whole, is_leaf=ends))
    except ValueError as error:
        raise ConfigurationError(
            "sharding returned another tree than that of the parameters: must have a PartitionSpec or None for each "
            f"parameter, or for a part of the tree ({error})"
        ) from error
    uneven: list[LeafSpec] = []
    found = [
        _checked(leaf, spec, mesh, uneven) for leaf, spec in zip(jax.tree_util.tree_leaves(whole), specs, strict=True)
    ]
    _warn("sharding", uneven, mesh)
    return found


def _checked(leaf: LeafSpec, spec: Any, mesh: Mesh, uneven: list[LeafSpec]) -> Any:
    """Returns the spec, without the axes of the mesh that do not divide a dimension. Their leaves are added to
    `uneven`."""
    if len(spec) > len(leaf.shape):
        raise ConfigurationError(
            f"sharding returned {spec} for {leaf}: must have at most {len(leaf.shape)} entries, one for each dimension"
        )
    seen: set[str] = set()
    entries: list[Any] = []
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise ConfigurationError(f"sharding returned {spec} for {leaf}: must not have reduced or unreduced axes")
    for size, entry in zip(leaf.shape, spec, strict=False):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for name in names:
            if not isinstance(name, str):
                raise ConfigurationError(
                    f"sharding returned {spec} for {leaf}: {name!r} must be the name of an axis of the mesh, or None"
                )
            if name not in mesh.axis_names or name in seen:
                why = "appears twice among axes of the mesh" if name in seen else "is not an axis of the mesh"
                raise ConfigurationError(
                    f"sharding returned {spec} for {leaf}: {name!r} {why}, which has the axes "
                    f"{', '.join(map(repr, mesh.axis_names))}"
                )
            seen.add(name)
        if size % math.prod(mesh.shape[name] for name in names):
            if leaf not in uneven:
                uneven.append(leaf)
            names = ()
        entries.append(names or None)
    return partition_spec(*entries)


def _warn(what: str, leaves: Sequence[LeafSpec], mesh: Mesh) -> None:
    if leaves:
        _LOG.warning(
            "%s does not divide all of %s, because the sizes of the mesh (%s) do not divide their dimensions. Pad the "
            "arrays, or stack layers, to a multiple",
            what,
            some_of(list(map(str, leaves)), 3),
            _sizes(mesh),
        )


def _sizes(mesh: Mesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
