"""The public description of local steps, and what pods of a run must agree on about them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from backstay_spec.whole import number, set_whole, whole

from ..errors import ConfigurationError

if TYPE_CHECKING:
    import optax

    from ._tree import TreeSpec

__all__ = ["LocalSteps", "default_outer", "local_settings", "outer_optimizer"]

OUTER_RATE: Final = 0.7
OUTER_MOMENTUM: Final = 0.9
WARM_UP: Final = 100


@dataclass(frozen=True)
class LocalSteps:
    """Optimizer steps that each worker makes by itself between two updates (DiLoCo, https://arxiv.org/abs/2311.08105).

    The contribution of a worker to an update is ``old - new`` parameters. The argument `optimizer` of `train` is the
    outer optimizer, which applies the mean contribution on the servers.

    Attributes:
        count: how many steps, at least 1.
        optimizer: the inner optimizer, any optax optimizer. The worker computes it on the whole model, so an update may
            depend on several arrays: ``optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))``.
        inner_state: ``"keep"``: the worker keeps the state of the inner optimizer after an update, and a replacement of
            the worker begins with a new state. ``"reset"``: the state is new after every update, so the result does
            not depend on replacements (T4).
        fragments: the number of parts into which the layers of the model are divided. An update exchanges one part, in
            turn, and a worker makes ``count / fragments`` steps between two updates. It must divide `count`.
        overlap: the number of steps of the next contribution that the worker makes while the servers receive and apply
            the current one. Then the worker mixes the new parameters of the servers with its own.
        mixing: the share of the worker's own parameters in this mean, at least 0 and below 1.

    Raises:
        ConfigurationError: a value is not one of these.
    """

    count: int
    optimizer: optax.GradientTransformation
    _: KW_ONLY
    inner_state: Literal["keep", "reset"] = "keep"
    fragments: int = 1
    overlap: int = 0
    mixing: float = 0.5

    def __post_init__(self) -> None:
        set_whole(self, "count", "fragments", "overlap")
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ConfigurationError(f"LocalSteps: count is {self.count!r}: must be a whole number of steps, 1 or more")
        if not (callable(getattr(self.optimizer, "init", None)) and callable(getattr(self.optimizer, "update", None))):
            raise ConfigurationError(
                f"LocalSteps: optimizer is {type(self.optimizer).__name__}: must be an optax.GradientTransformation, "
                "such as optax.adamw(1e-3)"
            )
        if self.inner_state not in ("keep", "reset"):
            raise ConfigurationError(f"LocalSteps: inner_state is {self.inner_state!r}: must be 'keep' or 'reset'")
        if isinstance(self.fragments, bool) or not isinstance(self.fragments, int) or self.fragments < 1:
            raise ConfigurationError(
                f"LocalSteps: fragments is {self.fragments!r}: must be a whole number of parts, 1 or more"
            )
        # Otherwise the fragments would travel at different distances, and some parameters would be older than others.
        if self.count % self.fragments:
            raise ConfigurationError(
                f"LocalSteps: fragments is {self.fragments}: must divide count, which is {self.count}"
            )
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap <= self.batches:
            raise ConfigurationError(
                f"LocalSteps: overlap is {self.overlap!r}: must be a whole number of steps from 0 to {self.batches}"
            )
        share = number(self.mixing)
        object.__setattr__(self, "mixing", share)
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0.0 <= share < 1.0:
            raise ConfigurationError(
                f"LocalSteps: mixing is {self.mixing!r}: must be a number of at least 0 and below 1"
            )

    @property
    def batches(self) -> int:
        """How many batches a contribution takes."""
        return self.count // self.fragments

    @property
    def continues(self) -> bool:
        """Whether a worker keeps its own parameters from one contribution to the next."""
        return self.overlap > 0 or self.fragments > 1

    def fragment_of(self, params: Any) -> Any:
        """Returns the fragment of each parameter. Update number `t` exchanges fragment ``t % fragments``.

        Args:
            params: the parameters that train, a pytree of arrays or of `jax.ShapeDtypeStruct`; None in the places of
                frozen ones, which are not exchanged.

        Returns:
            A pytree of the same structure, of whole numbers.

        Raises:
            ConfigurationError: the model has fewer layers than fragments.
        """
        from ._fragments import fragments_of
        from ._tree import describe

        tree = describe(params)
        return tree.unflatten(list(fragments_of(tree, self.fragments)))


def outer_optimizer(*, warmup: int = WARM_UP, fragments: int = 1) -> optax.GradientTransformation:
    """Returns the outer optimizer of local steps where `train` gets none, in Sync mode and in one process.

    It is that of DiLoCo (https://arxiv.org/abs/2311.08105): SGD with Nesterov momentum 0.9 and learning rate 0.7. The
    momentum grows linearly from 0 in the first updates. Without this, the steps are too large while successive
    contributions are similar.

    Args:
        warmup: the number of updates of the whole model in which the momentum grows; 0: it is 0.9 from the start.
        fragments: `LocalSteps.fragments`. The counter of an optimizer counts the updates of all fragments.

    Raises:
        ConfigurationError: `warmup` is negative, `fragments` is not positive, or one is not a whole number.
    """
    warmup, fragments = whole(warmup), whole(fragments)
    for name, value, least in (("warmup", warmup, 0), ("fragments", fragments, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"outer_optimizer: {name} is {value!r}: must be a whole number, {least} or more")
    import jax
    import jax.numpy as jnp
    import optax

    if not warmup:
        return optax.sgd(OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    momentum = optax.linear_schedule(0.0, OUTER_MOMENTUM, warmup * fragments)

    def sgd(params: Any) -> optax.GradientTransformationExtraArgs:
        # By default, the hyperparameters have the dtype of the parameters, which may be complex.
        dtypes = [jnp.result_type(leaf) for leaf in jax.tree_util.tree_leaves(params)]
        real = jnp.zeros((), jnp.result_type(*dtypes)).real.dtype if dtypes else None
        injected = optax.inject_hyperparams(optax.sgd, hyperparam_dtype=real)
        return injected(learning_rate=OUTER_RATE, momentum=momentum, nesterov=True)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return sgd(params).update(updates, state, params)

    return optax.GradientTransformation(lambda params: sgd(params).init(params), update)


def default_outer(local: LocalSteps, *, late: bool) -> tuple[optax.GradientTransformation, str]:
    """Returns the outer optimizer where the script names none, and its name for the log.

    Where contributions may be late by several versions, it is SGD without momentum, which would add them up
    (https://arxiv.org/abs/2401.09135). There the weight of each contribution is ``1 / (1 + staleness)`` too.

    Args:
        late: whether contributions may be late by several versions.
    """
    import optax

    if late:
        return optax.sgd(OUTER_RATE), f"SGD with learning rate {OUTER_RATE}, weighted by staleness"
    return (
        outer_optimizer(fragments=local.fragments),
        f"backstay.outer_optimizer(fragments={local.fragments}): SGD with learning rate {OUTER_RATE} and Nesterov "
        f"momentum, which grows to {OUTER_MOMENTUM} in the first {WARM_UP * local.fragments} updates",
    )


def local_settings(local: LocalSteps | None, tree: TreeSpec) -> Mapping[str, str]:
    """Returns the settings of local steps that must be equal in every pod of a run, as text.

    Args:
        local: the local steps; None: workers send gradients.
        tree: the model's tree.

    Raises:
        OptimizerError: the inner optimizer cannot be traced, or does not keep the dtypes and shapes of its state.
    """
    if local is None:
        return {"local.count": "none"}
    from ._rules import inner_program

    program = inner_program(local.optimizer, tree)
    return {
        "local.count": str(local.count),
        "local.inner_state": local.inner_state,
        "local.fragments": str(local.fragments),
        "local.overlap": str(local.overlap),
        "local.mixing": str(float(local.mixing)) if local.overlap else "none",
        "local.optimizer": " ".join([program.sha256.hex()[:16], *program.constants]),
    }
