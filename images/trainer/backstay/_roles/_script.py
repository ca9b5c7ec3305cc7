"""What the training script passed to `train`, and the plan that every pod of a job makes of it alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from backstay_rpc.control_pb2 import Leaf

from .._data._batch_key import BatchKey
from ..errors import ConfigurationError

if TYPE_CHECKING:
    import optax

    from .._control import Agreement
    from .._update._partition import Partition
    from .._update._rules import Rule

__all__ = ["Plan", "Script", "evaluation_of"]


@dataclass(frozen=True)
class Plan:
    """How the parameters are laid out and updated, and what a pod shows of that when it joins.

    Attributes:
        arguments: those of `train` that must be the same in every pod, as text.
    """

    partition: Partition
    rule: Rule
    arguments: Mapping[str, str]

    @cached_property
    def agreement(self) -> Agreement:
        """For joining."""
        from .._control._agreement import CONSTANTS, LAYOUT, PROGRAM, STRUCTURE, Agreement

        parts = self.partition
        settings = {
            LAYOUT: parts.digest.hex(),
            STRUCTURE: parts.structure_digest.hex(),
            PROGRAM: parts.program_digest.hex(),
            CONSTANTS: " ".join(self.rule.program.constants),
            **self.arguments,
        }
        leaves = (Leaf(path=leaf.path, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in parts.tree.leaves)
        return Agreement(tuple(leaves), settings)


@dataclass(frozen=True)
class Script:
    """The arguments of `train`, checked."""

    init: Callable[[Any], Any]
    loss: Callable[[Any, Any], Any]
    batches: Callable[[BatchKey], Any]
    optimizer: optax.GradientTransformation
    steps: int
    evaluate: Callable[[Any], Mapping[str, float]] | None = None
    seed: int = 0
    clip_norm: float | None = None
    deterministic: bool = False
    log_every: float = 5.0

    def __post_init__(self) -> None:
        for name in ("init", "loss", "batches"):
            if not callable(getattr(self, name)):
                raise ConfigurationError(f"{name} is {type(getattr(self, name)).__name__}: must be a function")
        if self.evaluate is not None and not callable(self.evaluate):
            raise ConfigurationError(f"evaluate is {type(self.evaluate).__name__}: must be a function, or None")
        if not (callable(getattr(self.optimizer, "init", None)) and callable(getattr(self.optimizer, "update", None))):
            raise ConfigurationError(
                f"optimizer is {type(self.optimizer).__name__}: must be an optax.GradientTransformation, such as "
                "optax.adam(1e-3)"
            )
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 0:
            raise ConfigurationError(f"steps is {self.steps!r}: must be a whole number of updates, 0 or more")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ConfigurationError(f"seed is {self.seed!r}: must be a whole number from 0 to 2**32 - 1")
        if self.clip_norm is not None and not 0.0 < self.clip_norm < math.inf:
            raise ConfigurationError(f"clip_norm is {self.clip_norm!r}: must be a positive number, or None not to clip")
        if not 0.0 <= self.log_every < math.inf:
            raise ConfigurationError(f"log_every is {self.log_every!r}: must be a number of seconds, 0 or more")

    def plan(self, shards: int) -> Plan:
        """Trace `init` and the optimizer over shapes only; nothing is computed.

        Raises:
            TreeError: `init` returned something that cannot be trained.
            OptimizerError: the optimizer cannot be computed by so many shards.
        """
        import jax

        from .._update._partition import partition
        from .._update._rules import analyse
        from .._update._tree import describe

        tree = describe(jax.eval_shape(self.init, jax.random.key(self.seed)))
        rule = analyse(self.optimizer, tree)
        arguments = {
            "steps": str(self.steps),
            "seed": str(self.seed),
            "clip_norm": str(None if self.clip_norm is None else float(self.clip_norm)),
        }
        return Plan(partition(tree, rule, shards), rule, arguments)

    def initial(self) -> Any:
        """The parameters of version 0."""
        import jax

        return self.init(jax.random.key(self.seed))


def evaluation_of(evaluate: Callable[[Any], Mapping[str, float]], params: Any) -> dict[str, float]:
    """What `evaluate` returned, as numbers.

    Raises:
        ConfigurationError: it is no mapping of names to numbers.
    """
    returned = evaluate(params)
    if not isinstance(returned, Mapping):
        raise ConfigurationError(f"evaluate returned {type(returned).__name__}: must be {{name: number}}")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        try:
            metrics[str(name)] = float(value)
        except (TypeError, ValueError):
            raise ConfigurationError(f"evaluate returned {name!r}: {type(value).__name__}: must be a number") from None
    return metrics
