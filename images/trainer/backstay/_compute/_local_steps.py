"""Local steps: a worker trains by itself for some batches, and contributes what its parameters lost by that."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._data._batch_key import BatchKey
from .._update._local_steps import LocalSteps
from .._update._objective import Objective, all_finite
from .._update._rules import called
from .._update._tree import TreeSpec
from ._contribution import Layout, PackedContribution, Start
from ._gradient import Gradient, examples_of
from ._placement import Placement

__all__ = ["LocalComputation", "LocalProgram", "LocalTraining"]

_AHEAD: Final = 2
"""How many steps are dispatched before the host waits for the first of them: each holds a batch."""


class LocalProgram:
    """The compiled functions of local steps. All ranks of a process may share one.

    Attributes:
        local: the arguments of the script.
        placement: of the model and of batches.
    """

    def __init__(
        self,
        loss: Callable[..., Any],
        tree: TreeSpec,
        local: LocalSteps,
        devices: Sequence[Any] | None = None,
        deterministic: bool = False,
        pack: Callable[[list[Any]], list[Any]] | None = None,
        *,
        has_rng: bool = False,
        seed: int = 0,
    ) -> None:
        """Prepare; nothing is compiled before the first call. The other arguments are those of `GradientFn`.

        Args:
            local: the inner optimizer and the number of its steps.
        """
        self.local = local
        self.placement = Placement(devices)
        self._tree = tree
        self._count = len(tree.parameters.leaves)
        self._objective = Objective(loss, tree, has_rng=has_rng, seed=seed)
        self._pack = pack or list
        self._keeps = local.inner_state == "keep"
        jit = partial(
            jax.jit,
            out_shardings=self.placement.everywhere,
            compiler_options=self.placement.options(deterministic=deterministic),
        )
        self.initial_state: Callable[[Any], Any] = jit(self._initial_state)
        self.begin: Callable[[Any, Any], Any] = jit(self._begin)
        self.step: Any = jit(self._step, donate_argnums=0)
        # The new state of the inner optimizer takes the memory of the previous state.
        self.finish: Callable[..., Any] = jit(self._finish, donate_argnums=2 if self._keeps else ())
        self.add: Callable[[Any, Any], Any] = jit(partial(jax.tree_util.tree_map, jnp.add))

    def place(self, leaves: Sequence[Any]) -> Any:
        """Leaves of the model where the functions take them."""
        if self.placement.on_host:
            return list(leaves)
        return jax.device_put(list(leaves), self.placement.everywhere, may_alias=True)

    def compile(self, batch: Any) -> None:
        """Compile the step for batches like this one, before there are parameters; a call finds the executable then."""
        sharding = None if self.placement.on_host else self.placement.everywhere
        shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
        leaves = [shape(leaf.shape, leaf.dtype, sharding=sharding) for leaf in self._tree.leaves]
        inner = jax.eval_shape(self._initial_state, leaves)
        carry = jax.eval_shape(self._begin, leaves, inner)
        carry = jax.tree_util.tree_map(
            lambda leaf: shape(leaf.shape, leaf.dtype, sharding=self.placement.everywhere, weak_type=leaf.weak_type),
            carry,
        )
        self.step.lower(carry, self.placement.batch(batch), np.zeros(2, np.uint32)).compile()

    def _initial_state(self, leaves: Any) -> Any:
        optimizer, params = self.local.optimizer, self._params(leaves)
        return called("init", optimizer, lambda: optimizer.init(params))

    def _params(self, leaves: Any) -> Any:
        return self._tree.parameters.unflatten(leaves[: self._count])

    def _begin(self, leaves: Any, inner: Any) -> Any:
        """Copies, because the memory of what a step gets is used again."""
        model, held = jax.tree_util.tree_map(jnp.copy, (list(leaves), inner))
        return {"model": model, "inner": held, "finite": jnp.bool_(True)}

    def _step(self, carry: Any, batch: Any, at: Any) -> Any:
        made = self._objective(carry["model"], batch, at)
        optimizer, params = self.local.optimizer, self._params(carry["model"])
        gradients = self._tree.parameters.unflatten(made.leaves[: self._count])

        def update() -> Any:
            updates, held = optimizer.update(gradients, carry["inner"], params)
            return optax.apply_updates(params, updates), held

        new, held = called("update", optimizer, update)
        model = [*jax.tree_util.tree_leaves(new), *made.leaves[self._count :]]
        after = {"model": model, "inner": held, "finite": carry["finite"] & made.finite}
        real = jnp.promote_types(jnp.float32, made.loss.dtype)
        return after, jax.tree_util.tree_map(lambda value: value.astype(real), (made.loss, made.metrics))

    def _finish(self, before: Any, carry: Any, inner: Any, sums: Any) -> Any:
        """The first result of `LocalTraining.steps`, and the state of the inner optimizer for the next contribution.

        A contribution that is not finite leaves that state as it was. None: the next contribution begins with a fresh
        state.
        """
        after = carry["model"]
        differences = [old - new for old, new in zip(before[: self._count], after[: self._count], strict=True)]
        finite = carry["finite"] & all_finite(differences)
        kept = None
        if self._keeps:
            kept = jax.tree_util.tree_map(lambda new, old: jnp.where(finite, new, old), carry["inner"], inner)
        loss, metrics = jax.tree_util.tree_map(lambda value: value / self.local.batches, sums)
        return (self._pack([*differences, *after[self._count :]]), loss, metrics, finite), kept


class LocalTraining:
    """The local steps of one rank, and the state of its inner optimizer from one contribution to the next."""

    def __init__(self, program: LocalProgram) -> None:
        self._program = program
        self._inner: Any = None  # None: fresh

    def steps(self, leaves: Sequence[Any], key: BatchKey, batch_of: Callable[[BatchKey], Any]) -> tuple[Any, int]:
        """Make the steps of one contribution; the last ones are still being computed when this returns.

        Args:
            leaves: of the model, on the host or the device. They must stay unchanged until the result is computed.
            key: see `Start`.
            batch_of: returns the batch of a key.

        Returns:
            ``(made, loss, metrics, finite)``, on all devices: the contribution, the means of loss and metrics over the
            steps, each before its own step, and whether all of it is finite; and the number of examples.
        """
        program = self._program
        placed = program.place(leaves)
        inner = program.initial_state(placed) if self._inner is None else self._inner
        carry = program.begin(placed, inner)
        sums, examples, running = None, 0, deque[Any]()
        for number in range(program.local.batches):
            own = replace(key, step=key.step * program.local.batches + number)
            batch = batch_of(own)
            examples += examples_of(batch)
            at = np.asarray((own.step, own.rank), np.uint32)
            carry, outcome = program.step(carry, program.placement.batch(batch), at)
            sums = outcome if sums is None else program.add(sums, outcome)
            running.append(outcome)
            if len(running) > _AHEAD:
                running.popleft()[0].block_until_ready()
        result, self._inner = program.finish(placed, carry, inner, sums)
        return result, examples

    def contribute(self, leaves: Sequence[Any], key: BatchKey, batch_of: Callable[[BatchKey], Any]) -> Gradient:
        """The result of `steps` on the first device."""
        result, examples = self.steps(leaves, key, batch_of)
        if len(self._program.placement.devices) > 1:
            result = jax.tree_util.tree_map(lambda value: value.addressable_data(0), result)
        made, loss, metrics, finite = result
        return Gradient(made, loss, metrics, finite, examples)


class LocalComputation:
    """Local steps: a `Computation`."""

    def __init__(self, program: LocalProgram, layout: Layout, batch_of: Callable[[BatchKey], Any]) -> None:
        """
        Args:
            program: made with `layout.pack`.
            layout: of the partition.
            batch_of: returns the batch of a key; may wait.
        """
        self._program, self._layout, self._batch_of = program, layout, batch_of
        self._training = LocalTraining(program)
        self.batches = program.local.batches

    @property
    def on_host(self) -> bool:
        return self._program.placement.on_host

    def compile(self, batch: Any) -> None:
        self._program.compile(batch)

    def start(self, start: Start) -> PackedContribution:
        result = self._training.contribute(start.params, start.key, self._batch_of)
        return PackedContribution(start.key, result, self._layout)
