"""Local steps train a worker by itself for some batches, and contribute the difference of its parameters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._data import BatchKey
from .._update import LocalSteps, Objective, Selection, all_finite, called, fragments_of
from ._contribution import ComputedContribution, Layout, PackedContribution, Start
from ._flops import flops_of
from ._gradient import Gradient, Pack, examples_of, packed_places
from ._placement import Placement

__all__ = ["AHEAD", "LocalComputation", "LocalProgram", "LocalTraining"]

AHEAD: Final = 2
"""How many steps are dispatched before the host waits for the first of them: each holds a batch."""


class LocalProgram:
    """The compiled functions of local steps. All ranks of a process may share one.

    Attributes:
        local: the arguments of the script.
        placement: the placement of the model and of batches.
        pack: see `GradientFn`.
        keeps: whether the state of the inner optimizer is kept.
    """

    def __init__(
        self,
        objective: Objective,
        local: LocalSteps,
        placement: Placement | None = None,
        pack: Pack | None = None,
    ) -> None:
        """Prepare; nothing is compiled before the first call. The other arguments are those of `GradientFn`.

        Args:
            local: the inner optimizer and the number of its steps.
        """
        self.local = local
        self.placement = placement or Placement()
        self._objective, self._tree = objective, objective.tree
        self._count = len(self._tree.parameters.leaves)
        self._fragments = fragments_of(self._tree, local.fragments)
        self.pack = pack
        self.keeps = local.inner_state == "keep"
        everywhere, model = self.placement.everywhere, self.placement.model(self._tree)
        inner = self.placement.state_of(local.optimizer, self._tree)
        jit = partial(jax.jit, compiler_options=self.placement.options)
        carry = {"model": model, "inner": inner, "finite": everywhere}
        outcome = (packed_places(self.placement, self._tree, pack), everywhere, everywhere, everywhere)
        ends = (outcome, model if local.continues else everywhere, inner if self.keeps else everywhere)
        self._carry = carry
        self.initial_state: Callable[[Any], Any] = jit(self._initial_state, out_shardings=inner)
        self.begin: Callable[[Any, Any], Any] = jit(self._begin, out_shardings=carry)
        self._compiled_step: Any = jit(self._step, donate_argnums=0, out_shardings=(carry, everywhere))
        # The new state of the inner optimizer takes the memory of the previous state.
        donated = 2 if self.keeps else ()
        self.finish: Callable[..., Any] = jit(self._finish, donate_argnums=donated, out_shardings=ends)
        self.copy: Callable[[Any], Any] = jit(partial(jax.tree_util.tree_map, jnp.copy), out_shardings=model)
        self.add: Callable[[Any, Any], Any] = jit(partial(jax.tree_util.tree_map, jnp.add), out_shardings=everywhere)
        self.receive: Callable[..., Any] = jit(self._receive, static_argnums=(3, 4), out_shardings=(model, model))

    def compile(self, batch: Any) -> float | None:
        """Compile the step for batches like this one, before there are parameters; a call finds the executable then.

        Returns:
            As `GradientFn.compile`, of one step.
        """
        leaves = self.placement.shapes(self._tree)
        inner = jax.eval_shape(self._initial_state, leaves)
        carry = jax.eval_shape(self._begin, leaves, inner)
        shape: Any = jax.ShapeDtypeStruct  # which JAX leaves untyped
        carry = jax.tree_util.tree_map(
            lambda sharding, part: jax.tree_util.tree_map(
                lambda leaf: shape(leaf.shape, leaf.dtype, sharding=sharding, weak_type=leaf.weak_type), part
            ),
            self._carry,
            carry,
        )
        arguments = (carry, self.placement.batch(batch), np.zeros(2, np.uint32), self._objective.frozen)
        with self.placement.tracing():
            compiled = self._compiled_step.lower(*arguments).compile()
        return flops_of(compiled, len(self.placement.devices))

    def step(self, carry: Any, batch: Any, at: Any) -> Any:
        """Dispatch a step; returns the next `carry`, in the memory of this one, and the loss and metrics."""
        with self.placement.tracing():
            return self._compiled_step(carry, batch, at, self._objective.frozen)

    def _initial_state(self, leaves: Any) -> Any:
        optimizer, params = self.local.optimizer, self._params(leaves)
        return called("init", optimizer, lambda: optimizer.init(params))

    def _params(self, leaves: Any) -> Any:
        return self._tree.parameters.unflatten(leaves[: self._count])

    def _begin(self, leaves: Any, inner: Any) -> Any:
        """Copies, because the memory of what a step gets is used again."""
        model, held = jax.tree_util.tree_map(jnp.copy, (list(leaves), inner))
        return {"model": model, "inner": held, "finite": jnp.bool_(True)}

    def _step(self, carry: Any, batch: Any, at: Any, frozen: list[Any]) -> Any:
        made = self._objective(carry["model"], batch, at, frozen)
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

    def _finish(self, base: Any, carry: Any, inner: Any, sums: Any) -> Any:
        """Returns the first result of `LocalTraining.steps`; then the worker's own leaves and the state of the inner
        optimizer for the next contribution, None where that begins without them.

        A contribution that is not finite leaves that state as it was, and the leaves are those of the servers.
        """
        after = carry["model"]
        differences = [old - new for old, new in zip(base[: self._count], after[: self._count], strict=True)]
        finite = carry["finite"] & all_finite(differences)

        def unless_bad(new: Any, old: Any) -> Any:
            return jax.tree_util.tree_map(lambda a, b: jnp.where(finite, a, b), new, old)

        own = unless_bad(after, base) if self.local.continues else None
        kept = unless_bad(carry["inner"], inner) if self.keeps else None
        loss, metrics = jax.tree_util.tree_map(lambda value: value / self.local.batches, sums)
        leaves = [*differences, *after[self._count :]]
        packed = leaves if self.pack is None else self.pack.pack(leaves)
        return (packed, loss, metrics, finite), own, kept

    def _receive(self, own: Any, base: Any, leaves: Any, received: Selection, mixes: bool) -> Any:
        """Returns the worker's own leaves and the leaves of the servers, after `received` arrived in `leaves`."""
        mixing = self.local.mixing if mixes else 0.0

        def mixed(mine: Any, new: Any) -> Any:
            if not mixing:
                return new
            if not jnp.issubdtype(new.dtype, jnp.inexact):
                return mine  # such as a counter in the model state
            return mine * jnp.asarray(mixing, new.real.dtype) + new * jnp.asarray(1 - mixing, new.real.dtype)

        arrived = [received.has(fragment) for fragment in self._fragments]
        new_own = [mixed(mine, new) if here else mine for here, mine, new in zip(arrived, own, leaves, strict=True)]
        new_base = [new if here else old for here, old, new in zip(arrived, base, leaves, strict=True)]
        return jax.tree_util.tree_map(jnp.copy, (new_own, new_base))


@dataclass
class _ContinuedSteps:
    """The part of a rank's next contribution that is computed before the answer to the previous contribution arrives.

    Attributes:
        key: the contribution's key; None: no step of the contribution was made yet.
        base: the leaves of the servers, as the rank received them last; None where each answer brings all of them.
        own: the worker's own leaves, if no step was made.
        carry, sums, examples: the values after `LocalSteps.overlap` steps, if these steps were made.
    """

    key: BatchKey | None
    base: Any
    own: Any
    carry: Any = None
    sums: Any = None
    examples: int = 0


class LocalTraining:
    """The local steps of one rank, and what it keeps from one contribution to the next."""

    def __init__(self, program: LocalProgram, updates: int) -> None:
        """
        Args:
            program: may be shared.
            updates: how many the job makes at most: no step is made for a contribution after them.
        """
        self._program = program
        self._updates = updates
        self._inner: Any = None  # None: fresh
        self._continued: _ContinuedSteps | None = None

    def made(self, key: BatchKey, received: Selection | None) -> int:
        """Returns how many steps of the contribution of `key` exist already, which `steps` will not make again.

        Args:
            key, received: see `Start`.
        """
        continued = self._continued
        return self._program.local.overlap if continued and received is not None and continued.key == key else 0

    def early(self) -> Callable[[], object] | None:
        """See `Computation.early`."""
        continued = self._continued
        return None if continued is None or continued.carry is None else partial(jax.block_until_ready, continued.sums)

    def steps(
        self,
        leaves: Sequence[Any],
        key: BatchKey,
        batch_of: Callable[[BatchKey], Any],
        received: Selection | None = None,
        dispatched: Callable[[Any, int], None] = lambda made, examples: None,
    ) -> tuple[Any, int]:
        """Make the steps of one contribution; the last ones are still being computed when this returns.

        Args:
            leaves, received: see `Start`. The leaves must stay unchanged until the result is computed.
            key: see `Start`.
            batch_of: returns the batch of a key.
            dispatched: called with what is returned, before the first steps of the next contribution are dispatched.

        Returns:
            ``(made, loss, metrics, finite)``, on all devices: the contribution, the means of loss and metrics over the
            steps, each before its own step, and whether all of it is finite; and the number of examples.
        """
        program = self._program
        local, base = program.local, program.placement.leaves(leaves)
        own, inner, carry, sums, examples = base, self._inner, None, None, 0
        first = self.made(key, received)
        continued, self._continued = self._continued, None
        if continued is not None and received is not None:
            begun = first > 0
            old = base if continued.base is None else continued.base
            # Steps for a contribution that is not due are dropped: the worker continues from the values of the servers.
            mine = continued.carry["model"] if begun else continued.own or old
            own, base = program.receive(mine, old, base, received, begun)
            if begun:
                carry, sums, examples = continued.carry | {"model": own}, continued.sums, continued.examples
        elif local.fragments > 1:  # they are needed after the memory of the answer is used again
            own = base = program.copy(base)
        if carry is None:
            inner = program.initial_state(own) if inner is None else inner
            carry = program.begin(own, inner)
        carry, sums, examples = self._run(carry, key, batch_of, range(first, local.batches), sums, examples)
        result, own, self._inner = program.finish(base, carry, inner if program.keeps else None, sums)
        dispatched(result, examples)
        if local.continues and key.step + 1 < self._updates:
            kept = base if local.fragments > 1 else None
            self._continued = _ContinuedSteps(None, kept, own)
            if local.overlap:
                self._ahead(kept, own, replace(key, step=key.step + 1), batch_of)
        return result, examples

    def _ahead(self, base: Any, own: Any, key: BatchKey, batch_of: Callable[[BatchKey], Any]) -> None:
        """Make the first steps of the next contribution, while the last one travels."""
        program = self._program
        carry = program.begin(own, program.initial_state(own) if self._inner is None else self._inner)
        # Nothing waits: the last contribution is to be sent meanwhile.
        made = self._run(carry, key, batch_of, range(program.local.overlap), None, 0, ahead=program.local.overlap)
        self._continued = _ContinuedSteps(key, base, None, *made)

    def _run(
        self,
        carry: Any,
        key: BatchKey,
        batch_of: Callable[[BatchKey], Any],
        numbers: range,
        sums: Any,
        examples: int,
        ahead: int = AHEAD,
    ) -> tuple[Any, Any, int]:
        """Make steps. `ahead`: how many are dispatched before the host waits for the first of them."""
        program, running = self._program, deque[Any]()
        for number in numbers:
            own = _batch_key(key, program.local.batches, number)
            batch = batch_of(own)
            examples += examples_of(batch)
            at = np.asarray((own.step, own.rank), np.uint32)
            carry, outcome = program.step(carry, program.placement.batch(batch), at)
            sums = outcome if sums is None else program.add(sums, outcome)
            running.append(outcome)
            if len(running) > ahead:
                running.popleft()[0].block_until_ready()
        return carry, sums, examples

    def contribute(
        self,
        leaves: Sequence[Any],
        key: BatchKey,
        batch_of: Callable[[BatchKey], Any],
        received: Selection | None = None,
        dispatched: Callable[[Gradient], None] = lambda gradient: None,
    ) -> Gradient:
        """Returns the result of `steps`, as a `Gradient`. `dispatched` is called with it as in `steps`."""
        made: list[Gradient] = []

        def take(result: Any, examples: int) -> None:
            leaves, loss, metrics, finite = result
            program, results = self._program, (loss, metrics, finite, leaves)
            made.append(Gradient.of(results, examples, program.placement, packed=program.pack is not None))
            dispatched(made[0])

        self.steps(leaves, key, batch_of, received, take)
        return made[0]


class LocalComputation:
    """The `Computation` of local steps."""

    def __init__(
        self,
        program: LocalProgram,
        layout: Layout,
        batch_of: Callable[[BatchKey], Any],
        updates: int,
        dispatched: Callable[[ComputedContribution], None] = lambda contribution: None,
    ) -> None:
        """
        Args:
            program: made with `layout`.
            updates: as in `LocalTraining`.
            layout: the layout of the partition's blocks.
            batch_of: returns the batch of a key; may wait.
            dispatched: as in `GradientComputation`.
        """
        self._program, self._layout, self._batch_of = program, layout, batch_of
        self._dispatched = dispatched
        self._training = LocalTraining(program, updates)
        self.batches = program.local.batches

    def compile(self, batch: Any) -> float | None:
        flops = self._program.compile(batch)
        return None if flops is None else flops * self.batches

    def early(self) -> Callable[[], object] | None:
        return self._training.early()

    def first_batch(self, start: Start) -> BatchKey | None:
        number = self._training.made(start.key, start.received)
        return None if number == self.batches else _batch_key(start.key, self.batches, number)

    def start(self, start: Start) -> PackedContribution:
        made: list[PackedContribution] = []

        def dispatched(gradient: Gradient) -> None:
            made.append(PackedContribution(start.key, gradient, self._layout))
            self._dispatched(made[0])

        self._training.contribute(start.params, start.key, self._batch_of, start.received, dispatched)
        return made[0]


def _batch_key(key: BatchKey, batches: int, number: int) -> BatchKey:
    """Returns the key of batch `number` of a contribution of `batches`, whose key is `key`."""
    return replace(key, step=key.step * batches + number, batches=batches)
