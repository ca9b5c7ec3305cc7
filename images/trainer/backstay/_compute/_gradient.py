"""Loss, gradient and new model state of one batch over all devices of this process (in-graph replication).

The user's `loss` gets the whole batch. The arrays of the batch are laid out over the devices along their leading axis,
and the compiler does the rest. So the results, such as a mean over the batch, are those of one device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from .._update import Objective, TreeSpec
from ..errors import ConfigurationError
from ._flops import flops_of
from ._placement import Placement

Array = np.ndarray[Any, np.dtype[Any]]


class Pack(Protocol):
    """Makes the leaves of a gradient into fewer arrays. Each result of a compiled function takes milliseconds to
    compile, and so does each piece of code that reads one leaf."""

    def packed_shardings(self, model: Sequence[Any], everywhere: Any) -> list[Any]:
        """Returns the sharding of each array that `pack` returns.

        Args:
            model: the sharding of each leaf of the tree.
            everywhere: the sharding of an array that every device has whole.
        """
        ...

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arrays that travel, out of all leaves of the tree; to be traced."""
        ...


def packed_places(placement: Placement, tree: TreeSpec, pack: Pack | None) -> list[Any]:
    """Returns the sharding of each array that `pack` returns, or of each leaf without it."""
    model = placement.model(tree)
    return model if pack is None else pack.packed_shardings(model, placement.everywhere)


class Gradient:
    """One gradient, which may still be in computation: what is read waits for it.

    Attributes:
        leaves: one array for each leaf of the tree, with the leaf's shape and dtype, or the arrays that `pack` made of
            them. The gradients of the parameters come first, then the new model state. Leaves are on the first device,
            except what is divided over several; packed arrays are where the jitted function leaves them.
        examples: the length of the leading axis of the batch's first array that has rows; 1 if none has.
    """

    def __init__(self, leaves: list[jax.Array], loss: Any, metrics: Mapping[str, Any], finite: Any, examples: int):
        self.leaves = leaves
        self.examples = examples
        self._loss = loss
        self._metrics = metrics
        self._finite = finite

    @classmethod
    def of(cls, results: tuple[Any, Any, Any, Any], examples: int, placement: Placement, *, packed: bool) -> Gradient:
        """Make one of what a jitted function returned on the devices of `placement`.

        Args:
            results: the loss, the metrics, whether all is finite, and the leaves.
            packed: whether the leaves are what a `Pack` made.
        """
        loss, metrics, finite, leaves = results
        loss, metrics, finite = placement.first((loss, metrics, finite))
        return cls(leaves if packed else placement.first(leaves), loss, metrics, finite, examples)

    def take(self) -> list[jax.Array]:
        """Return the leaves and forget them, so that copies of them on other devices are freed."""
        leaves, self.leaves = self.leaves, []
        return leaves

    @property
    def loss(self) -> float:
        """The loss of this batch, before the update."""
        return float(self._loss)

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that `loss` returned."""
        return {name: float(value) for name, value in self._metrics.items()}

    @property
    def finite(self) -> bool:
        """Whether no element of the gradient is infinite or NaN, nor has become so in the model state."""
        return bool(self._finite)

    def host(self) -> list[Array]:
        """Returns the leaves in host memory, read-only; on the CPU without a copy."""
        for leaf in self.leaves:
            leaf.copy_to_host_async()
        return [np.asarray(leaf) for leaf in self.leaves]


class GradientFn:
    """``loss`` and its gradient, compiled once for each shape of batch.

    Attributes:
        placement: the placement of the model and of batches.
    """

    def __init__(
        self,
        objective: Objective,
        placement: Placement | None = None,
        pack: Pack | None = None,
    ) -> None:
        """Prepare; nothing is compiled before the first call.

        Args:
            objective: the loss and the model's tree.
            placement: the devices to use; None: all local devices.
            pack: makes the leaves of a gradient into fewer arrays.
        """
        self._objective, self._tree = objective, objective.tree
        self._pack = pack
        self.placement = placement or Placement()
        everywhere = self.placement.everywhere
        self._function = jax.jit(
            self._compute,
            out_shardings=(everywhere, everywhere, everywhere, packed_places(self.placement, self._tree, pack)),
            compiler_options=self.placement.options,
        )

    def __call__(self, params: Any, batch: Any, at: tuple[int, int] = (0, 0)) -> Gradient:
        """Dispatch the computation and return.

        Args:
            params: a pytree like the tree's, of host or device arrays: parameters, or ``(params, state)``.
                64-byte-aligned host memory is used where it lies when there is one CPU device: it must stay unchanged
                until the gradient was read.
            batch: any pytree of arrays, or what `placement.batch` made of it.
            at: step and rank of the batch, for the random key.

        Raises:
            ConfigurationError: `loss` returns something else than it should.
        """
        flat, treedef = jax.tree_util.tree_flatten(params)
        if treedef != self._tree.treedef:
            raise ConfigurationError(f"the model has the structure {treedef}: must be {self._tree.treedef}")
        placed, placed_batch = self.placement.leaves(flat), self.placement.batch(batch)
        with self.placement.tracing():
            made = self._function(placed, placed_batch, np.asarray(at, np.uint32), self._objective.frozen)
        return Gradient.of(made, examples_of(batch), self.placement, packed=self._pack is not None)

    def compile(self, batch: Any) -> float | None:
        """Compile for batches like this one, before there are parameters; a call finds the executable then.

        Returns:
            Floating-point operations of one call on all devices, as XLA estimates them; None: it has no estimate.

        Raises:
            ConfigurationError: for the same reasons as a call.
        """
        leaves = self.placement.shapes(self._tree)
        arguments = (leaves, self.placement.batch(batch), np.zeros(2, np.uint32), self._objective.frozen)
        with self.placement.tracing():
            compiled = self._function.lower(*arguments).compile()
        return flops_of(compiled, len(self.placement.devices))

    def _compute(self, leaves: list[Any], batch: Any, at: Any, frozen: list[Any]) -> Any:
        outcome = self._objective(leaves, batch, at, frozen)
        made = outcome.leaves if self._pack is None else self._pack.pack(outcome.leaves)
        return outcome.loss, outcome.metrics, outcome.finite, made


def examples_of(batch: Any) -> int:
    """Returns the length of the leading axis of a batch's first array that has rows; 1 if none has."""
    for leaf in jax.tree_util.tree_leaves(batch):
        shape = np.shape(leaf)
        if shape and shape[0]:
            return int(shape[0])
    return 1
