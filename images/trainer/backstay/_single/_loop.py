"""Runs `train` in one process by one compiled function a step, whose results the host reads later.

Parameters, model state and optimizer state stay on the devices, in donated buffers. The host is a few steps ahead of
the devices. It reads the loss and the finite flag of a step after it has dispatched later steps (`Lead`).
`train_local` is the same loop as a reference; a test compares them.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from .._compute import AHEAD, Base, LocalProgram, LocalTraining, examples_of
from .._coordination import CoordinatorState, Course, Dispatch, EpochEnded, Then
from .._data import IMPURE, BatchKey, CheckedBatches, Prefetcher
from .._result import History, Result
from .._script import Script, epochs_of, evaluated, on_processor
from .._update import (
    NON_FINITE_LOSS,
    UPDATES,
    Objective,
    Rounding,
    TreeSpec,
    Turns,
    Untrained,
    ZeroLeaves,
    average_of,
    called,
    multiplied,
    seed_of,
    warning,
)
from ..errors import JobFailed

if TYPE_CHECKING:
    from .._process import Interrupts
    from ._storage import AloneStorage

__all__ = ["InterruptedAt", "Lead", "StepReport", "train_alone"]

_LOG = logging.getLogger(__name__)

_LEAD_SECONDS: Final = 0.02
_LEAD_STEPS: Final = 16

_NO_WORDS: Final = np.zeros(2, np.uint32)


class InterruptedAt(Exception):  # noqa: N818
    """A signal, with this number, ended training after update `step`, which is stored if the storage works."""

    def __init__(self, step: int, number: int) -> None:
        super().__init__(f"signal {number} ended training after step {step}")
        self.step, self.number = step, number


class StepReport:
    """One step, which may still be in computation: what is read waits for it.

    Attributes:
        step: the number of updates including this one.
        examples: the number of examples in the batch.
        model: the arguments of `evaluate` after the update, parameters or their average, and state; after every
            `model_every` steps, else None. Valid until `on_update` returns.
        ended: the accounts of the epochs that ended with the update.
    """

    ended: tuple[EpochEnded, ...] = ()

    def __init__(self, step: int, examples: int, outcome: Mapping[str, Any], model: tuple[Any, Any] | None) -> None:
        self.step = step
        self.examples = examples
        self.model = model
        self._outcome = outcome

    @cached_property
    def applied(self) -> bool:
        """False if the update was skipped for a gradient that is not finite."""
        return bool(self._outcome["finite"])

    @property
    def loss(self) -> float:
        """The value that `loss` returned for the batch, before the update."""
        return float(self._outcome["loss"])

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics that `loss` returned for the batch."""
        return {name: float(value) for name, value in self._outcome["metrics"].items()}

    def nonzero(self, leaves: list[int]) -> dict[int, list[Any]]:
        """Returns whether the gradient of each leaf has an element that is not zero, as an array."""
        flags = np.asarray(self._outcome["nonzero"])
        return {leaf: [flags[leaf : leaf + 1]] for leaf in leaves}


def train_alone(
    script: Script,
    *,
    max_non_finite: int = 3,
    model_every: int = 0,
    on_update: Callable[[StepReport], bool] | None = None,
    storage: AloneStorage | None = None,
    interrupts: Interrupts | None = None,
) -> Result:
    """Train in this process.

    Args:
        script: the arguments of `train`.
        max_non_finite: training fails after this many updates in a row with a gradient that is not finite.
        model_every: number of updates between two reports with a `StepReport.model`, for which the host waits; 0: no
            report has one.
        on_update: called for each update, in order; later than the update was dispatched. Training ends when it returns
            True for a report with a model.
        storage: stores checkpoints; training continues from the one that it found.
        interrupts: keeps signals during training; None: they have their usual effect.

    Raises:
        CheckpointInUse: another process has taken the folder of `storage`.
        ConfigurationError: a function of the script returns an invalid value.
        InterruptedAt: a signal arrived during training.
        JobFailed: ``NonFiniteGradients``.
    """
    state, model = _beginning(script, storage)
    course = Course(
        state,
        script.steps,
        batches=script.batches_of_update,
        shown_every=model_every,
        due=lambda version: storage is not None and storage.due(version),
    )
    tree, leaves = script.beginning.tree, jax.tree_util.tree_leaves(model)
    del model  # its memory is free when `leaves` are
    frozen = _frozen(script, state.start_from, storage)
    wire = None if script.wire is None else script.wire.resolved(local=script.local is not None)
    rounding = None if wire is None or wire.exact else Rounding(tree, wire)
    places = _places(script, tree)
    carry = _first(leaves, tree, script, places, rounding, storage)
    step = (_gradients if script.local is None else _local_steps)(script, script.objective(frozen), places, rounding)
    judge, lead = _Judge(tree, max_non_finite), Lead()
    waiting: deque[StepReport] = deque()
    history = History()
    newest: StepReport | None = None

    def read() -> None:
        report = waiting.popleft()
        judge.examine(report, state.non_finite_run)
        history.add(report.step, lambda: (report.loss, report.metrics))
        report.ended = course.read(applied=report.applied)
        lead.settled()
        if on_update is not None and on_update(report) and report.model is not None:
            course.stop()
        report.model = None  # the next step consumes it

    def store() -> None:
        if storage is not None and storage.stored != state.version:
            storage.store([*carry["params"], *carry["state"]], carry["optimizer"], state)

    def leaving() -> bool:
        return interrupts is not None and interrupts.arrived != 0

    with interrupts or nullcontext(), _fetching(script) as fetch:
        while action := course.next(leaving=leaving(), ahead=lead.steps):
            match action:
                case Dispatch(version, shown):
                    key = BatchKey(version - 1, rank=0, world=state.world, seed=script.seed, offset=state.offset)
                    carry, outcome, examples = step(carry, key, fetch)
                    newest = StepReport(version, examples, outcome, _evaluated(carry, tree, frozen) if shown else None)
                    waiting.append(newest)
                case Then.READ:
                    read()
                case Then.STORE:
                    store()
        if storage is not None:
            if leaving():
                storage.closing()
            if course.begun < state.version:
                store()
            storage.finish()  # before `evaluate`, which may end this process
        if interrupts is not None and interrupts.arrived:
            raise InterruptedAt(state.version, interrupts.arrived)
    params, model_state = _model(carry, tree, frozen)
    average = average_of(carry["optimizer"], tree)
    metrics = evaluated(script, *_evaluated(carry, tree, frozen))
    return Result(
        params=params,
        state=model_state,
        step=state.version,
        loss=math.nan if newest is None else newest.loss,
        metrics=metrics,
        checkpoint=None if storage is None else storage.newest,
        train_metrics={} if newest is None else newest.metrics,
        average=None if average is None else tree.whole(average, frozen),
        history=history,
    )


def _beginning(script: Script, storage: AloneStorage | None) -> tuple[CoordinatorState, Any]:
    """Returns the history, and the parameters or ``(params, state)``, to begin with."""
    # No device may have room for a model that is divided over all.
    with on_processor() if script.placement.divided else nullcontext():
        if storage is not None:
            return storage.state.copy(), storage.model(script)
        return CoordinatorState(term=1, version=0, world=1, samples=epochs_of(script)), script.beginning.trained()


def _frozen(script: Script, start_from: str, storage: AloneStorage | None) -> Sequence[Any]:
    """Returns the values of the frozen leaves, on the devices.

    Raises:
        CheckpointError: the arrays cannot be read, or are not those of the checkpoint that training continues from.
    """
    beginning = script.beginning
    if not beginning.tree.frozen_leaves:
        return ()
    reference = beginning.reference(start_from, None if storage is None else storage.frozen)
    with Base(script.placement, digests=storage is not None) as base:
        beginning.place_frozen(base.place, reference)
    if storage is not None:
        storage.agree(beginning.record(base.digests, reference))
    return base.arrays


@contextmanager
def _fetching(script: Script) -> Iterator[Callable[[BatchKey], Any]]:
    """A function of a key that gives its batch, on the devices.

    The host is ahead of the devices, so one thread prepares batches beside the computation without a second one.
    """
    checked = CheckedBatches(script.batches)
    batches = script.placement.placing(checked)
    warned = False

    def warn(batch: Any) -> Any:
        nonlocal warned
        if checked.impure and not warned:
            warned = True
            _LOG.warning("ImpureBatches: %s", IMPURE)
        return batch

    if getattr(batches, "workers", 1) <= 1:
        yield lambda key: warn(batches(key))
        return
    prefetcher = Prefetcher(batches)
    last = script.steps * script.batches_of_update - 1
    try:
        yield lambda key: warn(prefetcher.get(key, last))
    finally:
        prefetcher.close()


def _model(carry: Mapping[str, Any], tree: TreeSpec, frozen: Sequence[Any]) -> tuple[Any, Any]:
    """Returns all parameters, and the state."""
    model = tree.unflatten([*carry["params"], *carry["state"]])
    params, state = model if tree.has_state else (model, None)
    return tree.whole_model(params, state, frozen)


def _evaluated(carry: Mapping[str, Any], tree: TreeSpec, frozen: Sequence[Any]) -> tuple[Any, Any]:
    """Returns the arguments of `evaluate`: the parameters, or their average if there is one, and the state."""
    params, state = _model(carry, tree, frozen)
    average = average_of(carry["optimizer"], tree)
    return params if average is None else tree.whole(average, frozen), state


def _first(
    leaves: list[Any],
    tree: TreeSpec,
    script: Script,
    places: dict[str, Any],
    rounding: Rounding | None,
    storage: AloneStorage | None,
) -> dict[str, Any]:
    """Returns the values that each step passes to the next, which own their memory, because it is donated.

    Args:
        leaves: the model's leaves. They are copied and removed one after the other, so that no second model exists.
        places: see `_places`.
    """
    count = len(tree.parameters.leaves)
    divided = script.placement.divided
    for at, (spec, place) in enumerate(zip(tree.leaves, (*places["params"], *places["state"]), strict=True)):
        if divided:  # not by way of one device, which may have no room for the leaf
            leaves[at] = jax.device_put(np.asarray(leaves[at], spec.dtype), place, may_alias=False)
        else:
            leaves[at] = jnp.array(leaves[at], spec.dtype, copy=True)
    params = tree.parameters.unflatten(leaves[:count])
    begin = jax.jit(script.updates.init, out_shardings=places["optimizer"] if divided else None)
    held = called("init", script.updates, lambda: begin(params))
    # A compiled function may return an array that it got, such as a parameter.
    seen = {id(leaf) for leaf in leaves}

    def own(leaf: Any) -> Any:
        return leaf.copy() if id(leaf) in seen else leaf

    held = jax.tree_util.tree_map(own, held)
    if storage is not None:
        held = storage.optimizer_state(held)
    number = jnp.uint32(0 if storage is None else storage.state.version)
    carry = {"params": leaves[:count], "state": leaves[count:], "optimizer": held, "step": number}
    carry["residual"] = [] if rounding is None else rounding.no_residual(leaves[:count])
    return {name: jax.device_put(carry[name], place) for name, place in places.items()}


def _places(script: Script, tree: TreeSpec) -> dict[str, Any]:
    """Returns the shardings of what `_first` returns."""
    placement, count = script.placement, len(tree.parameters.leaves)
    model, everywhere = placement.model(tree), placement.everywhere
    held = placement.state_of(script.updates, tree)
    return {
        "params": model[:count],
        "state": model[count:],
        "optimizer": held,
        "step": everywhere,
        "residual": everywhere,
    }


_Step = Callable[[Any, BatchKey, Callable[[BatchKey], Any]], tuple[Any, Mapping[str, Any], int]]
"""Makes one update as ``(carry, key, batch_of) -> (carry, outcome, examples)``, where `carry` is donated."""


def _gradients(script: Script, objective: Objective, places: dict[str, Any], rounding: Rounding | None) -> _Step:
    """Each update has one gradient; one function, compiled for each shape of batch."""
    tree, placement = objective.tree, script.placement
    update = _update_of(script, tree, rounding, Turns(script.updates, tree, 1))

    def step(carry: Any, batch: Any, words: Any, frozen: Any) -> Any:
        number = carry["step"]
        at = jnp.stack([number, jnp.zeros_like(number)])
        made = objective(_received(carry, rounding), batch, at, frozen)
        return update(carry, (made.leaves, made.loss, made.metrics, made.finite), words, 0)

    shardings = (places, placement.everywhere)
    jitted = jax.jit(step, donate_argnums=0, out_shardings=shardings, compiler_options=placement.options)

    def whole(carry: Any, key: BatchKey, batch_of: Callable[[BatchKey], Any]) -> tuple[Any, Mapping[str, Any], int]:
        batch = batch_of(key)
        with placement.tracing():
            return *jitted(carry, batch, _words(script, key, rounding), objective.frozen), examples_of(batch)

    return whole


def _local_steps(script: Script, objective: Objective, places: dict[str, Any], rounding: Rounding | None) -> _Step:
    """Each update has local steps, as one worker makes them."""
    assert script.local is not None
    tree, placement = objective.tree, script.placement
    training = LocalTraining(LocalProgram(objective, script.local, placement), script.steps)
    turns = Turns(script.updates, tree, script.local.fragments)
    received = jax.jit(lambda carry: _received(carry, rounding), out_shardings=placement.model(tree))
    update = jax.jit(
        _update_of(script, tree, rounding, turns),
        donate_argnums=0,
        static_argnums=3,
        out_shardings=(places, placement.everywhere),
        compiler_options=placement.options,
    )

    def whole(carry: Any, key: BatchKey, batch_of: Callable[[BatchKey], Any]) -> tuple[Any, Mapping[str, Any], int]:
        made, examples = training.steps(received(carry), key, batch_of, turns.received(key.step))
        return *update(carry, made, _words(script, key, rounding), key.step % turns.count), examples

    return whole


def _received(carry: Any, rounding: Rounding | None) -> list[Any]:
    """Returns the leaves of the model, as a worker receives them."""
    model = [*carry["params"], *carry["state"]]
    return model if rounding is None else rounding.parameters(model)


def _words(script: Script, key: BatchKey, rounding: Rounding | None) -> Any:
    return _NO_WORDS if rounding is None else seed_of(script.seed, key.step, key.rank)


def _update_of(script: Script, tree: TreeSpec, rounding: Rounding | None, turns: Turns) -> Callable[..., Any]:
    """``(carry, (leaves, loss, metrics, finite), words, fragment) -> (carry, outcome)``; to be traced. `words` seed the
    rounding. `turns`: an update changes one fragment."""
    optimizer, count = script.updates, len(tree.parameters.leaves)

    def apply(carry: Any, made: Any, words: Any, fragment: int) -> Any:
        leaves, loss, metrics, finite = made
        number, computed, state = carry["step"], leaves[:count], leaves[count:]

        def after() -> dict[str, Any]:
            gradients, residual = computed, carry["residual"]
            if rounding is not None:
                gradients, residual = rounding.contribution(computed, residual, words)
            residual = turns.leaves(fragment, residual, carry["residual"])
            gradients = turns.gradients(fragment, gradients)
            clipped = gradients if script.clip_norm is None else _clipped(gradients, script.clip_norm)
            params = tree.parameters.unflatten(carry["params"])

            def update() -> Any:
                updates, held = optimizer.update(tree.parameters.unflatten(clipped), carry["optimizer"], params)
                return optax.apply_updates(params, updates), held

            new, held = called("update", optimizer, update)
            changed = turns.leaves(fragment, jax.tree_util.tree_leaves(new), carry["params"])
            held = turns.state(fragment, held, carry["optimizer"])
            return {"params": changed, "state": state, "optimizer": held, "residual": residual}

        before = {name: carry[name] for name in ("params", "state", "optimizer", "residual")}
        kept = _where(finite, after, before, branch=script.placement.on("cpu"))
        # Read in the first steps only; afterwards it costs nothing.
        nonzero = jax.lax.cond(number < UPDATES, _any_nonzero, lambda each: jnp.ones(len(each), bool), computed)
        outcome = {"loss": loss, "metrics": metrics, "finite": finite, "nonzero": nonzero}
        return kept | {"step": number + 1}, outcome

    return apply


def _where(finite: Any, after: Callable[[], Any], before: Any, *, branch: bool) -> Any:
    """Returns the values that `after` returns, or `before` if `finite` is false, in the dtypes of `after`.

    Args:
        branch: compute one of both. On a CPU, choosing element by element costs a tenth of the step of a large model.
            A GPU would wait for the host, which reads the condition.
    """
    if not branch:
        return jax.tree_util.tree_map(lambda a, b: jnp.where(finite, a, b), after(), before)
    made = jax.eval_shape(after)
    return jax.lax.cond(
        finite,
        after,
        lambda: jax.tree_util.tree_map(lambda a, b: b if a.dtype == b.dtype else b.astype(a.dtype), made, before),
    )


def _any_nonzero(leaves: list[Any]) -> Any:
    """Returns whether each leaf has an element that is not zero.

    By the largest: `any` of a comparison would keep a byte for each element.
    """

    def largest(leaf: Any) -> Any:
        parts = (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,)
        return jnp.max(jnp.stack([jnp.max(jnp.abs(part), initial=0) for part in parts]))

    return jnp.asarray([largest(leaf) != 0 for leaf in leaves], bool)


def _clipped(gradients: list[Any], clip_norm: float) -> list[Any]:
    """Returns the gradients, multiplied so that their norm is at most `clip_norm`. In the widest floats that are
    enabled."""
    wide = jnp.promote_types(jnp.float32, jax.dtypes.canonicalize_dtype(np.float64))
    sizes = [jnp.abs(leaf).astype(wide) for leaf in gradients if leaf.size]
    if not sizes:
        return gradients
    largest = jnp.max(jnp.stack([jnp.max(size) for size in sizes]))
    # Divided by the largest, because the squares of large float32 numbers are infinite.
    scale = jnp.where(largest > 0, largest, 1)
    norm = scale * jnp.sqrt(sum(jnp.sum(jnp.square(size / scale)) for size in sizes))
    factor = jnp.where(norm <= clip_norm, 1, clip_norm / norm)
    return [multiplied(leaf, factor) for leaf in gradients]


class Lead:
    """How many steps are dispatched before the host waits for the first of them.

    A host that reads each step of a millisecond leaves the devices without work when another program runs in its
    place. So short steps are dispatched about `_LEAD_SECONDS` ahead.

    Attributes:
        steps: a number of steps, from `AHEAD` to `_LEAD_STEPS`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.steps = AHEAD
        self._clock = clock
        self._began = 0.0
        self._count = 0

    def settled(self) -> None:
        """The host has read a step."""
        now = self._clock()
        if not self._count:
            self._began = now  # without the time of compilation
        elif now > self._began:
            rate = self._count / (now - self._began)
            self.steps = int(min(max(AHEAD, rate * _LEAD_SECONDS), _LEAD_STEPS))
        self._count += 1


class _Judge:
    """Ends training after too many gradients that are not finite. Warns of leaves that no gradient reaches, and of the
    first loss that is not finite."""

    def __init__(self, tree: TreeSpec, max_non_finite: int) -> None:
        self._tree = tree
        self._most = max_non_finite
        self._zero, self._untrained = ZeroLeaves(tree), Untrained()
        self._warned = False

    def examine(self, report: StepReport, in_a_row: int) -> None:
        """
        Args:
            in_a_row: how many of the newest updates before this one had such a gradient.

        Raises:
            JobFailed: ``NonFiniteGradients``.
        """
        if found := self._untrained.update([self._zero.examine(report.step - 1, report.nonzero)]):
            leaves = self._tree.parameters.leaves
            _LOG.warning("%s", warning([leaves[leaf].path for leaf in found], len(leaves)))
        if report.applied and not self._warned and not math.isfinite(report.loss):
            self._warned = True
            _LOG.warning(NON_FINITE_LOSS, report.step, report.loss)
        if not report.applied and in_a_row + 1 >= self._most:
            raise JobFailed(
                "NonFiniteGradients",
                f"the contributions of {in_a_row + 1} updates in a row were not finite, the last at step "
                f"{report.step - 1} of rank 0 (loss {report.loss:g})",
            )
