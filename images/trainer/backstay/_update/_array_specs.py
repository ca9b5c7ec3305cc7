"""The arrays of a job's state, which are parameters, model state and optimizer state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np

from ._rules import Rule

__all__ = ["STATE", "ArraySpec", "array_specs"]

STATE: Final = "optimizer/"


@dataclass(frozen=True)
class ArraySpec:
    """One array of a job's state, as a checkpoint names it.

    Attributes:
        key: ``params/`` or ``state/`` and the leaf's path, or ``optimizer/`` and the path in the optimizer's state.
        shape: the shape of the whole array. PRNG keys have the shape of their data.
        dtype: a NumPy dtype (ml_dtypes' for bfloat16); uint32 for PRNG keys.
    """

    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        return math.prod(self.shape)


def array_specs(rule: Rule) -> tuple[ArraySpec, ...]:
    """Returns every array that a job stores, for any number of shards: parameters, model state, optimizer state, each
    in the order of its tree."""
    model = [ArraySpec(leaf.key, leaf.shape, leaf.dtype) for leaf in rule.tree.leaves]
    states = []
    for state in rule.states:
        spec = state.shape_dtype()
        if state.is_key:
            spec = jax.eval_shape(jax.random.key_data, spec)
        states.append(ArraySpec(STATE + state.path, tuple(spec.shape), np.dtype(spec.dtype)))
    return (*model, *states)
