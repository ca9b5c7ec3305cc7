"""One interface for everything that a worker computes between a pull and a push.

The worker's loop knows three things only: it starts a `Computation` from parameters and a `BatchKey`, it gets a
`ComputedContribution`, and it sends the contribution's blocks and summary. A gradient of one batch is one computation.
Local steps, model state, random keys and groups of pods are other computations; the loop has no branch for any of them.

To write another computation:

1. Implement `Computation`. `start` gets the leaves of the partition's tree, in order, as the servers hold them: with
   model state these are the parameters and the state. Derive random keys from ``start.key.key``.
2. Return a `ComputedContribution` that has one array for each leaf of the same tree: `PackedContribution` takes them
   from a jitted function that ends with `Layout.pack`. The rule that updates a leaf on the server decides the meaning
   of the leaf's array: a gradient, a difference, or a new state.
3. Compute loss, metrics and `finite` in the same jitted function, so that all of it is ready together.
4. Choose it in `backstay._script.Script.computation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .._data import BatchKey
from .._update import DeviceBlock, Selection, TreeSpec
from ._gradient import Gradient, GradientFn, Pack

__all__ = [
    "Computation",
    "ComputedContribution",
    "GradientComputation",
    "Layout",
    "PackedContribution",
    "Start",
    "Summary",
]


@dataclass(frozen=True)
class Start:
    """The input of a contribution.

    Attributes:
        params: the pulled leaves of the partition's tree, in order, on the host or the device. On the host they lie
            in memory that receives the next parameters but one: a computation keeps no reference to them after its
            contribution was computed.
        key: the key of the contribution's first batch. `key.step` is the number of the contribution: the version in
            Sync mode, this rank's own count in Async mode. A computation of ``n = Computation.batches`` batches draws
            those of steps ``n * key.step`` to ``n * key.step + n - 1``, whose `BatchKey.batches` is ``n``.
        received: the parameters that the answer to the previous contribution brought; only their leaves are in
            `params`. None: `params` are the answer to a new request, and complete.
    """

    params: Sequence[Any]
    key: BatchKey
    received: Selection | None = None


@dataclass(frozen=True)
class Summary:
    """The facts about a contribution that are known once it is computed. They travel with the end mark.

    Attributes:
        finite: whether all that is contributed is finite. An update with a contribution that is not is skipped.
        examples: how many examples it was computed from.
        loss: the loss before the update; with local steps, the mean of their losses.
        metrics: what `loss` returned beside the loss.
    """

    finite: bool
    examples: int
    loss: float
    metrics: Mapping[str, float]


class ComputedContribution(Protocol):
    """The part of one rank in one update, which may still be in computation."""

    @property
    def key(self) -> BatchKey:
        """See `Start.key`."""
        ...

    def wait(self) -> None:
        """Waits until it is computed. Its blocks may still be on their way from the device to the host."""
        ...

    @property
    def blocks(self) -> Sequence[Sequence[np.ndarray | DeviceBlock]]:
        """``[s][b]`` is block `b` of shard `s`, of the block's size and dtype: 1-D in host memory, where reading it
        waits until it is computed; or on an accelerator.

        The values never change, so that they can be sent again. Any thread.
        """
        ...

    @property
    def summary(self) -> Summary:
        """Waits until it is computed. Any thread."""
        ...


class Computation(Protocol):
    """Makes contributions. One thread at a time."""

    @property
    def batches(self) -> int:
        """How many batches one contribution takes, at least 1."""
        ...

    def compile(self, batch: Any) -> float | None:
        """Compile for batches like this one before there are parameters.

        Returns:
            Floating-point operations of one contribution, as XLA estimates them; None: it has no estimate.
        """
        ...

    def first_batch(self, start: Start) -> BatchKey | None:
        """Returns the key of the first batch that `start` will draw for this contribution, or None if it has all of
        them."""
        ...

    def early(self) -> Callable[[], object] | None:
        """Returns a function that waits until the part of the next contribution is computed that the last `start` has
        begun. Returns None if it began none."""
        ...

    def start(self, start: Start) -> ComputedContribution:
        """Dispatch the computation of one contribution and return.

        Raises:
            ConfigurationError: a function of the script returns something else than it should.
            Any exception that the script's functions raise.
        """
        ...


class Layout(Pack, Protocol):
    """How leaves lie in blocks (`backstay._transport.Arrangement`)."""

    def gradient_blocks(self, packed_leaves: Sequence[Any]) -> Sequence[Sequence[np.ndarray | DeviceBlock]]:
        """`ComputedContribution.blocks` out of what `pack` returned."""
        ...


class PackedContribution:
    """A `ComputedContribution` out of the results of a jitted function."""

    def __init__(self, key: BatchKey, result: Gradient, layout: Layout) -> None:
        """
        Args:
            key: as in `Start`.
            result: its leaves are what `Layout.pack` returned. They are taken from it.
            layout: the layout of the partition's blocks.
        """
        self.key = key
        self._result = result
        self.blocks = layout.gradient_blocks(result.take())

    def wait(self) -> None:
        self._result.finite  # noqa: B018  # waits: all results of a jitted function are ready together

    @property
    def summary(self) -> Summary:
        result = self._result
        return Summary(result.finite, result.examples, result.loss, result.metrics)


class GradientComputation:
    """The `Computation` of the gradient of `loss` for one batch."""

    batches = 1

    def __init__(
        self,
        gradient_of: GradientFn,
        tree: TreeSpec,
        layout: Layout,
        batch_of: Callable[[BatchKey], Any],
        dispatched: Callable[[ComputedContribution], None] = lambda contribution: None,
    ) -> None:
        """
        Args:
            gradient_of: made with `layout`.
            tree: the parameters' tree.
            layout: the layout of the partition's blocks.
            batch_of: returns the batch of a key; may wait.
            dispatched: called with each contribution before the devices get more work (`Encoder.begin`).
        """
        self._gradient_of, self._tree, self._layout, self._batch_of = gradient_of, tree, layout, batch_of
        self._dispatched = dispatched

    def compile(self, batch: Any) -> float | None:
        return self._gradient_of.compile(batch)

    def first_batch(self, start: Start) -> BatchKey:
        return start.key

    def early(self) -> None:
        return None

    def start(self, start: Start) -> PackedContribution:
        batch = self._batch_of(start.key)
        place = (start.key.step, start.key.rank)
        gradient = self._gradient_of(self._tree.unflatten(start.params), batch, place)
        self._dispatched(contribution := PackedContribution(start.key, gradient, self._layout))
        return contribution
