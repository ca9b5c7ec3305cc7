"""Compares programs, so that leaves with the same update share one executable and may share a block.

A mistake here would update a leaf with another leaf's rule. So only what is known to be comparable is compared by
value; anything else is equal only to itself.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from ._flat import Atom, Flat, Literal


def of_param(value: Any) -> Any:
    """Returns a hashable key of a primitive's parameter, where equal keys mean equal parameters."""
    if value is None or isinstance(value, bool | int | str | bytes | enum.Enum):
        return (type(value), value)
    if isinstance(value, float | complex):
        return (type(value), repr(value))  # 0.0 and -0.0 differ
    if isinstance(value, np.dtype | type):
        return value
    if isinstance(value, np.ndarray | np.generic):
        return of_literal(Literal(np.asarray(value)))
    if isinstance(value, tuple | list):
        return (type(value), tuple(of_param(item) for item in value))
    return _Itself(value)


def of_params(params: dict[str, Any]) -> Any:
    return tuple((name, of_param(params[name])) for name in sorted(params))


def of_literal(literal: Literal) -> Any:
    value = literal.value
    if not isinstance(value, np.ndarray):
        return _Itself(value)
    return ("literal", value.dtype, value.shape, value.tobytes())


def of_flat(flat: Flat) -> Any:
    """Returns a hashable key of a sliced program, shapes included and the numbers of its variables not."""
    numbers: dict[int, int] = {}

    def name(atom: Atom) -> Any:
        if isinstance(atom, Literal):
            return of_literal(atom)
        return numbers.setdefault(atom, len(numbers))

    inputs = tuple((name(var), _aval(flat, var)) for var in flat.inputs)
    equations = tuple(
        (
            equation.primitive,
            of_params(equation.params) if not equation.branches else tuple(map(of_flat, equation.branches)),
            tuple(name(atom) for atom in equation.inputs),
            tuple((name(var), _aval(flat, var)) for var in equation.outputs),
        )
        for equation in flat.equations
    )
    return (inputs, equations, tuple(name(atom) for atom in flat.outputs))


def _aval(flat: Flat, var: int) -> Any:
    aval = flat.avals[var]
    return (tuple(aval.shape), aval.dtype)


class _Itself:
    """Equal to nothing but the same object, which it keeps alive so that no other takes its identity."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value
