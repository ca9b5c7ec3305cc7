"""The training script's arguments of `train`, and the plan that every pod of a job computes from them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from .._coordination import Samples
from .._data import Batches, BatchKey
from .._update import local_settings
from ..errors import ConfigurationError, OptimizerError, TreeError
from ._arguments import check_arguments
from ._beginning import Beginning
from ._functions import evaluation_of
from ._plan import ScriptPlan, warn_of_plan

if TYPE_CHECKING:
    import optax

    from backstay_spec.runtime import RuntimeConfig

    from .._checkpoint import StartFrom
    from .._compute import Computation, ComputedContribution, Layout, MeshAxes, ModelSharding, Placement
    from .._update import FrozenSpec, LocalSteps, Objective, Trace, TreeSpec, Wire
    from ._functions import OnUpdate, StopWhen

__all__ = ["Script", "check_alone", "epochs_of", "evaluated"]


_LOG = logging.getLogger(__name__)

CHECKED_LEAVES: Final = 512
"""One process checks the optimizer of a model with at most this many leaves: the check of 600 takes 2 to 6 s."""


@dataclass(frozen=True)
class Script:
    """The arguments of `train`, checked.

    Attributes:
        optimizer: the optimizer of the updates, as the script gave it; `updates` is what computes them.
        damps: whether Async updates weigh contributions by their staleness, even without `update.stalenessDamping`.
        outer: describes the default outer optimizer for the log; empty: the default is not used.
        spans: whether it uses the devices of all processes that JAX is connected to, and not only its own.
    """

    init: Callable[[Any], Any]
    loss: Callable[..., Any]
    batches: Callable[[BatchKey], Any]
    optimizer: optax.GradientTransformation
    steps: int
    evaluate: Callable[..., Mapping[str, float]] | None = None
    has_state: bool = False
    has_rng: bool = False
    seed: int = 0
    clip_norm: float | None = None
    deterministic: bool = False
    log_every: float = 5.0
    start_from: StartFrom | None = None
    on_update: OnUpdate | None = None
    stop_when: StopWhen | None = None
    evaluate_every: int | None = None
    wire: Wire | None = None
    local: LocalSteps | None = None
    damps: bool = False
    outer: str = ""
    spans: bool = False
    average: float | None = None
    frozen: Any = None
    frozen_state: Any = None
    mesh: MeshAxes | None = None
    sharding: ModelSharding | None = None

    def __post_init__(self) -> None:
        check_arguments(self)

    def plan(self, shards: int, wire: Wire | None = None, members: int = 1) -> ScriptPlan:
        """Trace `init` and the optimizer over shapes only; nothing is computed.

        Args:
            shards: the job's number of shards.
            wire: the job's codecs; None: all values are sent exactly.
            members: the number of pods of a rank.

        Raises:
            ConfigurationError: the script requests other codecs than the job.
            TreeError: `init` returned something that cannot be trained, or that a checkpoint cannot hold.
            OptimizerError: the optimizer cannot be computed by this number of shards.
        """
        from .._checkpoint import check_storable
        from .._update import Wire, analyse, coded_leaves, fragments_of, partition

        wire = (wire or Wire()).resolved(local=self.local is not None)
        if self.wire is not None and self.wire.resolved(local=self.local is not None) != wire:
            raise ConfigurationError(
                f"wire is {self.wire} in the script, and {wire} in the job. spec.wire of the TrainingJob (of "
                "`backstay run`: --gradients and --parameters) must be the same, or train must leave `wire` out"
            )
        tree = self.beginning.tree
        traced = self._traced if self.updates is self.optimizer else None
        rule = analyse(self.updates, tree, traced)
        check_storable(tree)
        arguments = {
            "steps": str(self.steps),
            "seed": str(self.seed),
            "has_state": str(self.has_state),
            "has_rng": str(self.has_rng),
            "clip_norm": str(None if self.clip_norm is None else float(self.clip_norm)),
            "frozen": _names(tree.frozen),
            "frozen_state": _names(tree.frozen_state),
            **local_settings(self.local, tree),
        }
        fragments = None
        if self.local is not None and self.local.fragments > 1:
            fragments = fragments_of(tree, self.local.fragments)
        coded = coded_leaves(tree, wire)
        parts = partition(tree, rule, shards, coded=coded, fragments=fragments, members=members)
        return ScriptPlan(parts, rule, arguments, wire)

    def objective(self, frozen: Sequence[Any] = ()) -> Objective:
        """Returns the loss of this script. `frozen`: the values of the frozen leaves, on the devices."""
        from .._update import Objective

        return Objective(self.loss, self.beginning.tree, has_rng=self.has_rng, seed=self.seed, frozen=frozen)

    def computation(
        self,
        objective: Objective,
        layout: Layout,
        batch_of: Callable[[BatchKey], Any],
        dispatched: Callable[[ComputedContribution], None] = lambda contribution: None,
    ) -> Computation:
        """Returns the computation of a worker between a pull and a push.

        Args:
            objective: the loss of this script.
            layout: the layout of the partition's blocks in the worker's memory.
            batch_of: returns the batch of a key.
            dispatched: as in `GradientComputation`.
        """
        from .._compute import GradientComputation, GradientFn, LocalComputation, LocalProgram

        placement = self.placement
        if self.local is not None:
            program = LocalProgram(objective, self.local, placement, layout)
            return LocalComputation(program, layout, batch_of, self.steps, dispatched)
        gradient_of = GradientFn(objective, placement, layout)
        return GradientComputation(gradient_of, objective.tree, layout, batch_of, dispatched)

    @cached_property
    def placement(self) -> Placement:
        """Where the model and batches lie on the devices of this process.

        Raises:
            ConfigurationError: `mesh` or `sharding` is invalid, or does not fit the devices.
        """
        import jax

        from .._compute import placement_of

        devices = jax.devices() if self.spans else jax.local_devices()
        return placement_of(self.beginning.tree, self.mesh, self.sharding, devices, deterministic=self.deterministic)

    def evaluation(self, params: Any, state: Any, placement: Placement | None = None) -> dict[str, float]:
        """Returns the result of `evaluate`. Raises as `evaluation_of`.

        Args:
            params, state: the model.
            placement: where its arrays lie; None: as in a process that trains.
        """
        assert self.evaluate is not None
        with (placement or self.placement).tracing():
            return evaluation_of(self.evaluate, params, state, has_state=self.has_state)

    @property
    def batches_of_update(self) -> int:
        """How many batches each rank draws for an update."""
        return 1 if self.local is None else self.local.batches

    def settings(self, plan: ScriptPlan, config: RuntimeConfig | None = None) -> dict[str, str]:
        """Returns the settings that a user may change between two runs, as text; a change is reported.

        Args:
            config: the settings of the job; None: one process.
        """
        updates, start = plan.rule.updates, plan.rule.start
        return {
            "optimizer": updates.sha256.hex(),
            "optimizer_constants": " ".join(updates.constants),
            "optimizer_start": start.sha256.hex(),
            "optimizer_start_constants": " ".join(start.constants),
            "steps": str(self.steps),
            "clip_norm": str(self.clip_norm),
            "update.mode": "Sync" if config is None else config.mode,
            "update.weighting": "Equal" if config is None else config.weighting,
            "update.stalenessDamping": str(config is not None and self.damping(config)),
            **plan.wire.settings(),
            **{name: text for name, text in plan.arguments.items() if name.startswith("local.")},
        }

    def damping(self, config: RuntimeConfig) -> bool:
        """Returns whether Async updates weigh contributions by their staleness."""
        return config.staleness_damping or self.damps

    def overlaps(self, config: RuntimeConfig) -> bool:
        """Returns whether a worker computes its next gradient while the last one is in flight.

        Raises:
            ConfigurationError: `train` was called with local steps, which have their own overlap.
        """
        if config.overlap and self.local is not None:
            raise ConfigurationError(
                "spec.update.overlap is true and train was called with local: leave spec.update.overlap out, and use "
                "LocalSteps(overlap=...)"
            )
        return config.overlap

    @cached_property
    def beginning(self) -> Beginning:
        """The values that training begins with."""
        # Local steps have two optimizers. Neither of them proves that a parameter keeps its value.
        unchanged = self._unchanged if self.frozen is None and self.local is None else None

        def described(model: Any, frozen: Any = self.frozen) -> TreeSpec:
            from .._update import describe

            return describe(model, has_state=self.has_state, frozen=frozen, frozen_state=self.frozen_state)

        return Beginning(self.init, self.seed, self.start_from, described, unchanged)

    def _unchanged(self) -> Sequence[bool]:
        """Returns whether the optimizer never changes each parameter."""
        from .._update import unchanged_parameters

        return () if self._traced is None else unchanged_parameters(self._traced)

    @cached_property
    def _traced(self) -> Trace | None:
        """The optimizer as the script gave it, on all parameters, or None if it cannot be traced, as `plan` reports."""
        from .._update import trace

        try:
            return trace(self.optimizer, self.beginning.described.parameters)
        except OptimizerError:
            return None

    @cached_property
    def updates(self) -> optax.GradientTransformation:
        """The optimizer of the parameters that train. With `average`, it keeps their average in its state."""
        from .._update import averaged, only_trained

        tree, optimizer = self.beginning.tree, self.optimizer
        if tree.frozen is not None and self.frozen is None:
            optimizer = only_trained(optimizer, tree.frozen)
        return optimizer if self.average is None else averaged(optimizer, self.average)


def _names(part: FrozenSpec | None) -> str:
    """Returns the frozen leaves in words, which differ for other leaves."""
    from .._update import some_of

    names = [] if part is None else [leaf.path for leaf in part.leaves]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return (f"{some_of(names)} ({digest})" if len(names) > 1 else some_of(names)) or "nothing"


def epochs_of(script: Script) -> Samples | None:
    """Returns the account of the first epoch; None where `batches` is a function that does not say how large an epoch
    is."""
    batches = script.batches
    return Samples(batches.size, batches.batch_size) if isinstance(batches, Batches) else None


def evaluated(script: Script, params: Any, state: Any) -> dict[str, float]:
    """Returns the result of the script's `evaluate` after training; empty without one. A failure of it costs only the
    metrics: the log has the exception."""
    if script.evaluate is None:
        return {}
    try:
        return script.evaluation(params, state)
    except Exception:  # noqa: BLE001  # an error of the script
        _LOG.exception("evaluate raised: this evaluation has no metrics")
        return {}


def check_alone(script: Script, *, stores: bool) -> ScriptPlan | None:
    """Check before training in one process what a job would refuse. Without checkpoints this is only a warning.

    Args:
        stores: whether the process stores checkpoints, which have the form of a job's.

    Returns:
        The plan for one shard; None for a large model that stores nothing, which is not checked.

    Raises:
        OptimizerError: the process stores checkpoints, and a server cannot compute the optimizer at all.
        TreeError: `init` returned something that cannot be trained, or the process stores checkpoints and they cannot
            hold an array.
    """
    leaves = len(script.beginning.tree.leaves)
    if not stores and leaves > CHECKED_LEAVES:
        _LOG.info(
            "whether a job can compute this optimizer is not checked: the model has %d leaves, more than %d. "
            "backstay run --dry-run checks it",
            leaves,
            CHECKED_LEAVES,
        )
        return None
    try:
        plan = script.plan(1, script.wire)
    except (OptimizerError, TreeError) as error:
        if stores:
            raise
        what = "compute this optimizer" if isinstance(error, OptimizerError) else "train this model"
        _LOG.warning("a job cannot %s: %s", what, error)
        return None
    warn_of_plan(plan, script.local)
    return plan
