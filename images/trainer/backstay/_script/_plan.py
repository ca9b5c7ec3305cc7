"""The plan that every pod of a job computes from its script."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

from backstay_rpc.control_pb2 import Leaf

from .._version import __version__
from ..errors import OptimizerError

if TYPE_CHECKING:
    from .._transport import Agreement
    from .._update import LocalSteps, Partition, Rule, ShardWire, Wire

__all__ = ["ScriptPlan", "warn_of_plan"]

_LOG = logging.getLogger(__name__)
FEW_STEPS: Final = 24


@dataclass(frozen=True)
class ScriptPlan:
    """How the parameters are laid out and updated, and the settings that a pod sends when it joins.

    Attributes:
        arguments: the arguments of `train` that must be the same in every pod, as text.
        wire: the codecs.
    """

    partition: Partition
    rule: Rule
    arguments: Mapping[str, str]
    wire: Wire

    @cached_property
    def wires(self) -> tuple[ShardWire, ...]:
        """How the blocks of each shard are encoded on the wire."""
        from .._update import coded_leaves, shard_wires

        return shard_wires(self.partition, self.wire, coded_leaves(self.partition.tree, self.wire))

    @cached_property
    def agreement(self) -> Agreement:
        """The settings that a pod sends when it joins."""
        import jax

        from .._transport import CONSTANTS, LAYOUT, PROGRAM, SOFTWARE, STRUCTURE, VERSION, Agreement

        parts = self.partition
        settings = {
            LAYOUT: parts.digest.hex(),
            STRUCTURE: parts.structure_digest.hex(),
            PROGRAM: parts.program_digest.hex(),
            CONSTANTS: " ".join(self.rule.program.constants),
            SOFTWARE: f"jax {jax.__version__} with x64 {'on' if jax.config.values['jax_enable_x64'] else 'off'}",
            VERSION: __version__,
            **self.arguments,
            **self.wire.settings(),
        }
        named = parts.tree.everything.leaves
        leaves = (Leaf(path=leaf.name, shape=leaf.shape, dtype=leaf.dtype.name) for leaf in named)
        return Agreement(tuple(leaves), settings)


def warn_of_plan(plan: ScriptPlan, local: LocalSteps | None) -> None:
    """Warn if only one parameter server can compute the optimizer, if the codecs encode nothing, or if there are few
    local steps."""
    from .._update import coded_leaves

    try:
        plan.rule.check(2)
    except OptimizerError as error:
        _LOG.warning("this works with one parameter server only: %s", error)
    if not plan.wire.exact and not coded_leaves(plan.partition.tree, plan.wire):
        _LOG.warning(
            "the codecs (gradients %s, parameters %s) encode nothing: no array that is trained is large enough and of "
            "a dtype that they know",
            plan.wire.gradients,
            plan.wire.parameters,
        )
    if local is not None and local.count < FEW_STEPS:
        _LOG.warning(
            "fewer than %d local steps can cost quality, and these are %d: on a fast network, train without any (docs: "
            "Local steps)",
            FEW_STEPS,
            local.count,
        )
