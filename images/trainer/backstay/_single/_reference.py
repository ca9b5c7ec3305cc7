"""The plain optax loop of training in one process.

It is what `train` does without a cluster, and with more than one rank it is the reference of promise T4. So it computes
the optimizer over the whole tree, as any optax user would, and uses neither shards nor blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from backstay_spec.whole import whole

from .._compute import (
    Gradient,
    GradientFn,
    LocalProgram,
    LocalTraining,
    MeshAxes,
    ModelSharding,
    Placement,
    initial,
    placement_of,
)
from .._data import BatchKey, draw
from .._result import Result
from .._script import evaluation_of
from .._update import (
    LocalSteps,
    Mean,
    Objective,
    Rounding,
    Turns,
    Untrained,
    Wire,
    ZeroLeaves,
    as_leaf,
    called,
    clip_factor,
    describe,
    enable_x64,
    mean,
    multiplied,
    state_mean,
    warning,
)
from ..errors import ConfigurationError, JobFailed

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReferenceUpdate:
    """One update of the local loop.

    Attributes:
        step: the number of updates including this one.
        loss, metrics: the loss and the metrics of the newest gradient in the update, before the update.
        examples: the number of examples of all gradients in the update.
        applied: False if it was skipped for a gradient that is not finite.
        params, state: the values after the update, which are only valid until the callback returns. `state` is None for
            a model without state.
    """

    step: int
    loss: float
    metrics: Mapping[str, float]
    examples: int
    applied: bool
    params: Any
    state: Any = None


def train_local(
    init: Callable[[Any], Any],
    loss: Callable[..., Any],
    batches: Callable[[BatchKey], Any],
    optimizer: optax.GradientTransformation,
    steps: int,
    *,
    evaluate: Callable[..., Mapping[str, float]] | None = None,
    has_state: bool = False,
    has_rng: bool = False,
    seed: int = 0,
    clip_norm: float | None = None,
    world: int = 1,
    max_non_finite: int = 3,
    deterministic: bool = False,
    devices: Any = None,
    on_update: Callable[[ReferenceUpdate], object] | None = None,
    wire: Wire | None = None,
    local: LocalSteps | None = None,
    frozen: Any = None,
    frozen_state: Any = None,
    mesh: MeshAxes | None = None,
    sharding: ModelSharding | None = None,
) -> Result:
    """Train in this process.

    Args:
        init: PRNG key to parameters or, with `has_state`, to ``(params, state)``; called with
            ``jax.random.key(seed)``.
        loss: see `Objective`.
        batches: `BatchKey` to batch; called for every rank of every step.
        optimizer: any `optax.GradientTransformation`.
        steps: updates, at least 0.
        evaluate: called once with the last parameters and, with `has_state`, the last state.
        has_state, has_rng: see `train`.
        seed: the seed of `init`, of the keys of batches, and of the keys of `loss`.
        clip_norm: upper bound of the mean gradient's global norm.
        world: the gradients and new states of ranks 0..world-1 are averaged, summed in that order.
        max_non_finite: training fails after this many updates in a row with a gradient that is not finite.
        deterministic, devices: see `Placement`.
        on_update: called after each update; training ends when it returns True.
        wire: parameters and gradients are rounded as they would be between workers and servers; None: they are not.
            The parameters that are updated, and the result, keep full precision.
        local: each rank makes local steps.
        frozen, frozen_state, mesh, sharding: see `train`.

    Raises:
        ConfigurationError: an argument, or a function's result, is invalid.
        JobFailed: ``NonFiniteGradients``.
    """
    steps, world = whole(steps), whole(world)
    check_arguments(steps=steps, clip_norm=clip_norm, world=world)
    model = initial(init, seed)
    tree = describe(model, has_state=has_state, frozen=frozen, frozen_state=frozen_state)
    placement = placement_of(tree, mesh, sharding, devices, deterministic=deterministic)
    base: list[Any] = []
    if tree.frozen_leaves:
        values = zip(tree.frozen_values(initial(init, seed, compiled=False)), tree.frozen_leaves, strict=True)
        base = [placement.frozen(number, as_leaf(*value)) for number, value in enumerate(values)]
    model = jax.tree_util.tree_map(_copied, tree.rest(model), tree.shapes())
    params, model_state = model if has_state else (model, None)
    # Copied, because a state may be the same array as the parameters, and both are donated.
    state = jax.tree_util.tree_map(
        lambda leaf: leaf.copy(), called("init", optimizer, lambda: jax.jit(optimizer.init)(params))
    )
    turns = Turns(optimizer, tree, 1 if local is None else local.fragments)
    objective = Objective(loss, tree, has_rng=has_rng, seed=seed, frozen=base)
    contributions_of = _contributors(objective, local, placement, turns, steps, world)
    update = _updater(optimizer, tree.parameters.unflatten, turns)
    count = len(tree.parameters.leaves)
    averaged = jax.jit(_average, static_argnums=(1, 2))
    squares = jax.jit(_squares)
    zero_leaves, untrained = ZeroLeaves(tree), Untrained()
    if wire is not None:
        wire = wire.resolved(local=local is not None)
    rounding = None if wire is None or wire.exact else Rounding(tree, wire)
    newest: Gradient | None = None
    bad_in_a_row = 0
    batch_of = partial(draw, batches)
    for step in range(steps):
        model = (params, model_state) if has_state else params
        if rounding is not None:
            model = tree.unflatten(rounding.parameters(jax.tree_util.tree_leaves(model)))
        gradients = [
            contribute(model, BatchKey(step=step, rank=rank, world=world, seed=seed), batch_of)
            for rank, contribute in enumerate(contributions_of)
        ]
        newest = gradients[-1]
        for gradient in gradients:
            zero = zero_leaves.examine(step, partial(_arrays, gradient))
        if found := untrained.update([zero]):
            names = [tree.leaves[leaf].path for leaf in found]
            _LOG.warning("%s", warning(names, count))
        bad = [rank for rank, gradient in enumerate(gradients) if not gradient.finite]
        if bad:
            bad_in_a_row += 1
            if bad_in_a_row >= max_non_finite:
                raise JobFailed(
                    "NonFiniteGradients",
                    f"the contributions of {bad_in_a_row} updates in a row were not finite, the last at step {step} of "
                    f"rank {bad[0]} (loss {gradients[bad[0]].loss:g})",
                )
        else:
            bad_in_a_row = 0
            contributions = [gradient.leaves for gradient in gradients]
            if rounding is not None:
                contributions = [
                    rounding.gradients(leaves, seed, step, rank, partial(turns.leaves, step))
                    for rank, leaves in enumerate(contributions)
                ]
            leaves = contributions[-1]
            if world > 1:
                how = Mean.of([1.0] * world, world, 1.0)
                wide = np.dtype(np.float64)
                leaves = averaged(contributions, count, how.form, how.scalars(wide), how.state_scalars(wide))
            leaves, new_state = leaves[:count], leaves[count:]
            leaves = turns.gradients(step, leaves)
            factor = 1.0
            if clip_norm is not None:
                with enable_x64():
                    factor = clip_factor(clip_norm, math.fsum(float(part) for part in squares(leaves)))
            params, state = update(params, state, leaves, factor, step)
            if tree.state is not None:
                model_state = tree.state.unflatten(new_state)
        if on_update is not None:
            examples = sum(gradient.examples for gradient in gradients)
            now = tree.whole_model(params, model_state, base)
            update_report = ReferenceUpdate(step + 1, newest.loss, newest.metrics, examples, not bad, *now)
            if on_update(update_report) is True:
                steps = step + 1
                break
    params, model_state = tree.whole_model(params, model_state, base)
    metrics: Mapping[str, float] = {}
    if evaluate is not None:
        metrics = evaluation_of(evaluate, params, model_state, has_state=has_state)
    return Result(
        params=params,
        state=model_state,
        step=steps,
        loss=math.nan if newest is None else newest.loss,
        metrics=metrics,
        train_metrics={} if newest is None else newest.metrics,
    )


def _contributors(
    objective: Objective, local: LocalSteps | None, placement: Placement, turns: Turns, steps: int, world: int
) -> list[Callable[[Any, BatchKey, Callable[[BatchKey], Any]], Gradient]]:
    """Returns a function ``(model, key, batches) -> contribution`` for each rank."""
    if local is not None:
        program = LocalProgram(objective, local, placement)

        def training(one: LocalTraining) -> Callable[..., Gradient]:
            def contribute(model: Any, key: BatchKey, batches: Callable[[BatchKey], Any]) -> Gradient:
                return one.contribute(jax.tree_util.tree_leaves(model), key, batches, turns.received(key.step))

            return contribute

        return [training(LocalTraining(program, steps)) for _ in range(world)]
    gradient_of = GradientFn(objective, placement)
    return [lambda model, key, batches: gradient_of(model, batches(key), (key.step, key.rank))] * world


def check_arguments(*, steps: int, clip_norm: float | None, world: int = 1) -> None:
    """Check the numbers that `train` takes.

    Raises:
        ConfigurationError: a number is invalid; the message names the argument.
    """
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ConfigurationError(f"steps is {steps!r}: must be a whole number of updates, 0 or more")
    if world < 1:
        raise ConfigurationError(f"world is {world}: must be at least 1")
    if clip_norm is not None and not 0.0 < clip_norm < math.inf:
        raise ConfigurationError(f"clip_norm is {clip_norm}: must be a positive number, or None not to clip")


def _updater(
    optimizer: optax.GradientTransformation, unflatten: Callable[[Any], Any], turns: Turns
) -> Callable[..., Any]:
    def step(params: Any, state: Any, leaves: Any, factor: Any, clipped: bool, fragment: int) -> Any:
        if clipped:
            leaves = [multiplied(leaf, factor) for leaf in leaves]

        def update() -> Any:
            updates, new_state = optimizer.update(unflatten(leaves), state, params)
            return optax.apply_updates(params, updates), new_state

        new, new_state = called("update", optimizer, update)
        kept = turns.leaves(fragment, *(jax.tree_util.tree_leaves(each) for each in (new, params)))
        return unflatten(kept), turns.state(fragment, new_state, state)

    jitted = jax.jit(step, static_argnums=(4, 5), donate_argnums=(0, 1))
    return lambda params, state, leaves, factor, number: jitted(
        params, state, leaves, np.asarray(factor), factor != 1.0, number % turns.count
    )


def _arrays(gradient: Gradient, leaves: list[int]) -> dict[int, list[Any]]:
    return {leaf: [np.asarray(gradient.leaves[leaf])] for leaf in leaves}


def _copied(leaf: Any, spec: Any) -> Any:
    """Returns a copy on the device with the dtype that `describe` found. Python numbers in a state would be weakly
    typed."""
    return jnp.array(leaf, spec.dtype, copy=True)


def _average(contributions: Any, count: int, form: Any, scalars: Any, state_scalars: Any) -> list[Any]:
    """Returns the mean of the gradients in the first `count` leaves, and of the model states in the others."""
    leaves = list(zip(*contributions, strict=True))
    means = [mean(values, form, scalars) for values in leaves[:count]]
    return means + [state_mean(values, form, state_scalars) for values in leaves[count:]]


def _squares(leaves: Any) -> list[Any]:
    return [jnp.sum(jnp.square(jnp.abs(leaf).astype(jnp.float64))) for leaf in leaves]
