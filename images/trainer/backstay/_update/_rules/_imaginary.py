"""Finds optimizers that drop imaginary parts: `optax.MultiSteps` accumulates the gradients of complex parameters so.

JAX converts complex values to real ones with a warning that Python hides. An optimizer that means it uses `jnp.real`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ._flat import Atom, Flat, Literal

__all__ = ["drops_imaginary"]


def drops_imaginary(flat: Flat, init: Flat, leaves: int) -> str | None:
    """Returns the dtype to which an update converts complex values, if these are computed from complex parameters or
    gradients.

    Args:
        flat, init: as of `Trace`.
        leaves: the number of parameters.

    Returns:
        The name of the dtype; None: no imaginary part is dropped, as far as the program shows outside its loops.
    """
    of_leaves = [_is_complex(flat.dtype(atom)) for atom in flat.inputs[:leaves]]
    if not any(of_leaves):
        return None
    of_states, _ = _complex_outputs(init, of_leaves)
    while True:
        outputs, dropped = _complex_outputs(flat, [*of_leaves, *of_states, *of_leaves])
        after = [before or now for before, now in zip(of_states, outputs[leaves:], strict=True)]
        if dropped is not None or after == of_states:
            return dropped
        of_states = after


def _complex_outputs(flat: Flat, inputs: Sequence[bool]) -> tuple[list[bool], str | None]:
    """Returns whether each output has imaginary parts, if these inputs have; and the dtype to which one is converted.

    A complex value has none if all values that it is computed from are real.
    """
    env = dict(zip(flat.inputs, inputs, strict=True))
    dropped: str | None = None

    def read(atom: Atom) -> bool:
        if isinstance(atom, Literal):
            return _is_complex(atom.value.dtype) and bool(atom.value.imag.any())
        return env[atom]

    for equation in flat.equations:
        args = [read(atom) for atom in equation.inputs]
        results = [any(args) and _is_complex(flat.dtype(output)) for output in equation.outputs]
        # Which branch runs is not known, so an output has imaginary parts if any branch gives it some.
        if equation.branches:
            found = [_complex_outputs(branch, args[1:]) for branch in equation.branches]
            results = [any(each) for each in zip(*(outputs for outputs, _ in found), strict=True)]
            dropped = dropped or next((name for _, name in found if name is not None), None)
        elif equation.name == "convert_element_type" and args[0] and not results[0]:
            to = flat.dtype(equation.outputs[0])
            dropped = dropped or (None if to == jnp.bool_ else str(to))
        env.update(zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in flat.outputs], dropped


def _is_complex(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))
