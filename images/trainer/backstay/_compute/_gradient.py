"""Loss and gradient of one batch over all devices of this process (in-graph replication).

The user's `loss` sees the whole batch; its arrays are laid out over the devices along their leading axis and the
compiler does the rest, so what it computes, such as a mean over the batch, is what one device would compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .._update._tree import TreeSpec
from ..errors import ConfigurationError

Array = np.ndarray[Any, np.dtype[Any]]

_ADDED_AT_ONCE = 64


class Gradient:
    """One gradient, perhaps still being computed: what is read waits for it.

    Attributes:
        leaves: the gradient, one array for each leaf of the tree, of the leaf's shape and dtype, or what `pack` made of
            them; on the first device.
        examples: the length of the leading axis of the batch's first array that has one; 1 if none has.
    """

    def __init__(self, leaves: list[jax.Array], loss: Any, metrics: Mapping[str, Any], finite: Any, examples: int):
        self.leaves = leaves
        self.examples = examples
        self._loss = loss
        self._metrics = metrics
        self._finite = finite

    @property
    def loss(self) -> float:
        """What `loss` returned for this batch, before the update."""
        return float(self._loss)

    @property
    def metrics(self) -> dict[str, float]:
        """What `loss` returned beside it."""
        return {name: float(value) for name, value in self._metrics.items()}

    @property
    def finite(self) -> bool:
        """Whether no element of the gradient is infinite or NaN."""
        return bool(self._finite)

    def host(self) -> list[Array]:
        """The leaves in host memory, read-only; on the CPU without a copy."""
        for leaf in self.leaves:
            leaf.copy_to_host_async()
        return [np.asarray(leaf) for leaf in self.leaves]


class GradientFn:
    """``loss`` and its gradient, compiled once for each shape of batch."""

    def __init__(
        self,
        loss: Callable[[Any, Any], Any],
        tree: TreeSpec,
        devices: Sequence[Any] | None = None,
        deterministic: bool = False,
        pack: Callable[[list[Any]], list[Any]] | None = None,
    ) -> None:
        """Prepare; nothing is compiled before the first call.

        Args:
            loss: ``(params, batch)`` to a floating-point scalar, or to ``(scalar, {name: scalar})``.
            tree: of the parameters.
            devices: to use; all local devices by default.
            deterministic: ask the backend for kernels that give the same bits run after run. It matters on GPUs.
            pack: traced, to make the leaves of a gradient into fewer arrays: each result of a compiled function, and
                each piece of code in it that reads one leaf, takes its milliseconds to compile.
        """
        if not callable(loss):
            raise ConfigurationError(f"loss is {type(loss).__name__}: must be a function of (params, batch)")
        self._loss = loss
        self._tree = tree
        self._pack = pack
        self._devices = list(devices) if devices is not None else jax.local_devices()
        mesh = Mesh(np.asarray(self._devices), ("batch",))
        spec: Any = PartitionSpec  # which JAX leaves untyped
        self._everywhere = NamedSharding(mesh, spec())
        self._split = NamedSharding(mesh, spec("batch"))
        options = {"xla_gpu_deterministic_ops": True} if deterministic and self._on("gpu", "cuda", "rocm") else None
        self._function = jax.jit(self._compute, out_shardings=self._everywhere, compiler_options=options)

    def __call__(self, params: Any, batch: Any) -> Gradient:
        """Dispatch the computation and return.

        Args:
            params: a pytree like the tree's, of host or device arrays. 64-byte-aligned host memory is used where it
                lies when there is one CPU device: it must stay unchanged until the gradient was read.
            batch: any pytree of arrays. Arrays whose leading axis the number of devices divides are laid out over
                them, others are everywhere.

        Raises:
            ConfigurationError: `loss` returns something else than it should.
        """
        flat, treedef = jax.tree_util.tree_flatten(params)
        if treedef != self._tree.treedef:
            raise ConfigurationError(f"parameters have the structure {treedef}: must be {self._tree.treedef}")
        # A jitted function takes a thousand arrays of the host ten times as fast as `device_put` does.
        placed = flat if self.on_host else jax.device_put(flat, self._everywhere, may_alias=True)
        loss, metrics, finite, leaves = self._function(placed, self._placed(batch))
        if len(self._devices) > 1:
            loss, metrics, finite, leaves = jax.tree_util.tree_map(
                lambda value: value.addressable_data(0), (loss, metrics, finite, leaves)
            )
        return Gradient(leaves, loss, metrics, finite, examples_of(batch))

    def compile(self, batch: Any) -> None:
        """Compile for batches like this one, before there are parameters; a call finds the executable then.

        Raises:
            ConfigurationError: as a call does.
        """
        sharding = None if self.on_host else self._everywhere
        shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
        leaves = [shape(leaf.shape, leaf.dtype, sharding=sharding) for leaf in self._tree.leaves]
        self._function.lower(leaves, self._placed(batch)).compile()

    def _placed(self, batch: Any) -> Any:
        return jax.tree_util.tree_map(lambda leaf: jax.device_put(leaf, self._layout(leaf)), batch)

    @property
    def on_host(self) -> bool:
        """Whether it computes on one device that shares the host's memory: arrays of the host are as good there."""
        return len(self._devices) == 1 and self._on("cpu")

    def _on(self, *platforms: str) -> bool:
        return all(device.platform in platforms for device in self._devices)

    def _layout(self, leaf: Any) -> NamedSharding:
        shape = np.shape(leaf)
        divides = bool(shape) and shape[0] > 0 and shape[0] % len(self._devices) == 0
        return self._split if divides else self._everywhere

    def _compute(self, leaves: list[Any], batch: Any) -> Any:
        (loss, metrics), gradients = jax.value_and_grad(self._checked, has_aux=True)(leaves, batch)
        if self._pack is not None:
            gradients = self._pack(gradients)
        return loss, metrics, _all_finite(gradients), gradients

    def _checked(self, leaves: list[Any], batch: Any) -> Any:
        """Runs while tracing only, so a wrong `loss` is refused with its first batch."""
        result = self._loss(self._tree.unflatten(leaves), batch)
        metrics: Any = {}
        if isinstance(result, tuple):
            if len(result) != 2 or not isinstance(result[1], Mapping):
                raise ConfigurationError(
                    f"loss returned a tuple of {_kinds(result)}: must be a scalar, or (scalar, {{name: scalar}})"
                )
            result, metrics = result
        if not _is_scalar(result, jnp.floating):
            raise ConfigurationError(
                f"loss returned {_kind(result)}: must be a floating-point scalar, such as the mean over the batch, or "
                f"(scalar, {{name: scalar}})"
            )
        for name, value in metrics.items():
            if not isinstance(name, str) or not (_is_scalar(value, jnp.number) or _is_scalar(value, jnp.bool_)):
                raise ConfigurationError(f"loss returned the metric {name!r}: {_kind(value)}: must be a real scalar")
        return result, {name: jnp.asarray(value) for name, value in metrics.items()}


def _all_finite(arrays: Sequence[Any]) -> Any:
    """0 * x is 0 for finite x and else NaN; five times as fast on a CPU as asking for every element.

    Arrays of one shape and dtype are added up first, some at a time: a reduction of each would compile for longer than
    the loss itself.
    """
    alike: dict[Any, list[Any]] = {}
    for array in arrays:
        alike.setdefault((array.shape, array.dtype), []).append(array)
    flags = []
    for same in alike.values():
        for at in range(0, len(same), _ADDED_AT_ONCE):
            zero = same[at] * 0
            for array in same[at + 1 : at + _ADDED_AT_ONCE]:
                zero = zero + array * 0
            flags.append(jnp.sum(zero) == 0)
    return jnp.all(jnp.asarray(flags, jnp.bool_))


def examples_of(batch: Any) -> int:
    """The length of the leading axis of a batch's first array that has one; 1 if none has."""
    for leaf in jax.tree_util.tree_leaves(batch):
        shape = np.shape(leaf)
        if shape:
            return int(shape[0])
    return 1


def _is_scalar(value: Any, kind: Any) -> bool:
    if not isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float):
        return False
    dtype = jnp.result_type(value)
    return (
        np.shape(value) == () and bool(jnp.issubdtype(dtype, kind)) and not jnp.issubdtype(dtype, jnp.complexfloating)
    )


def _kind(value: Any) -> str:
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array {jnp.result_type(value)}{list(np.shape(value))}"
    return f"{type(value).__name__}"


def _kinds(values: Sequence[Any]) -> str:
    return ", ".join(_kind(value) for value in values)
