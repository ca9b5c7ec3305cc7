"""A jaxpr with the calls inside it inlined, in a form that can be sliced output by output.

JAX's own jaxprs group what is computed together: a `cond` over the whole tree takes every leaf. The dependencies of one
leaf must be known, and the leaf computed alone. So calls are inlined, and conditionals are kept with branches of the
same form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

# Calls that compute what their jaxpr says when nothing is differentiated or mapped: parameter names of the jaxpr.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vjp_call_jaxpr": "fun_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


@dataclass(frozen=True, eq=False)
class Literal:
    """A constant of the program, which is a scalar written in it, or an array that the traced function closed over."""

    value: Any  # np.ndarray, or a jax.Array for dtypes that NumPy does not have (PRNG keys)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


Atom = int | Literal  # a variable's number, or a constant


@dataclass(frozen=True, eq=False)
class Equation:
    """``outputs = primitive(inputs)``. For a conditional, `inputs` is the index and then the operands of `branches`."""

    primitive: Any
    params: dict[str, Any]
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    branches: tuple[Flat, ...] = ()

    @property
    def name(self) -> str:
        return str(self.primitive.name)


@dataclass(frozen=True, eq=False)
class Flat:
    """A program of variables `inputs`, then `equations` in order, then the atoms `outputs`.

    `avals` gives shape and dtype of every variable by its number.
    """

    inputs: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    avals: tuple[Any, ...]

    def shape(self, atom: Atom) -> tuple[int, ...]:
        return atom.shape if isinstance(atom, Literal) else tuple(self.avals[atom].shape)

    def dtype(self, atom: Atom) -> Any:
        return atom.value.dtype if isinstance(atom, Literal) else self.avals[atom].dtype


def flatten(closed: Any) -> Flat:
    """Inline the calls of a closed jaxpr."""
    builder = _Builder()
    inputs = tuple(builder.new(var.aval) for var in closed.jaxpr.invars)
    outputs = builder.inline(closed, inputs)
    return Flat(inputs, tuple(builder.equations), tuple(outputs), tuple(builder.avals))


def evaluate(flat: Flat, values: Sequence[Any], *, traced: bool = True) -> list[Any]:
    """Compute the outputs from `values`, one for each input.

    Args:
        traced: whether this is traced under `jax.jit`. If not, each operation is compiled and run by itself, and arrays
            of one constant are made without a program.
    """
    env: dict[int, Any] = dict(zip(flat.inputs, values, strict=True))

    def read(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else env[atom]

    for equation in flat.equations:
        args = [read(atom) for atom in equation.inputs]
        if equation.branches:
            branches = [_branch(branch) for branch in equation.branches]
            results = jax.lax.switch(args[0], branches, *args[1:])
        elif not traced and (filled := _filled(equation)) is not None:
            results = [filled]
        else:
            results = bind(equation.primitive, equation.params, args)
        env.update(zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in flat.outputs]


def _filled(equation: Equation) -> jax.Array | None:
    """Returns the result of an operation that only repeats a constant, and None for others."""
    constant = equation.inputs[0] if equation.name == "broadcast_in_dim" else None
    if not isinstance(constant, Literal) or constant.shape or not isinstance(constant.value, np.ndarray):
        return None
    if equation.params.get("sharding") is not None:
        return None
    made: jax.Array = jax.device_put(np.full(equation.params["shape"], constant.value, constant.value.dtype))
    return made


def bind(primitive: Any, params: Mapping[str, Any], args: Sequence[Any]) -> list[Any]:
    """Returns the results of one primitive, always as a list."""
    prepared = primitive.get_bind_params(dict(params))
    if isinstance(prepared, dict):
        results = primitive.bind(*args, **prepared)
    else:  # JAX before 0.9 keeps the functions apart
        functions, prepared = prepared
        results = primitive.bind(*functions, *args, **prepared)
    return list(results) if primitive.multiple_results else [results]


def select(flat: Flat, outputs: Sequence[int]) -> tuple[Flat, tuple[int, ...]]:
    """Returns the part of a program that computes the outputs of the given indices.

    Returns:
        The part, whose inputs are only those that it needs, and their indices among `flat.inputs`.
    """
    return Slicer(flat).select(outputs)


class Slicer:
    """`select` for many sets of outputs of one program; each costs only as much as the part has equations."""

    def __init__(self, flat: Flat) -> None:
        self.flat = flat
        self._producer = {out: index for index, eqn in enumerate(flat.equations) for out in eqn.outputs}
        self._position = {var: index for index, var in enumerate(flat.inputs)}

    def select(self, outputs: Sequence[int]) -> tuple[Flat, tuple[int, ...]]:
        flat = self.flat
        wanted = tuple(flat.outputs[index] for index in outputs)
        needed: dict[int, set[int]] = {}  # equation -> the positions of its outputs that are needed
        cut: dict[int, Equation] = {}
        inputs: set[int] = set()
        stack = [atom for atom in wanted if not isinstance(atom, Literal)]
        while stack:
            var = stack.pop()
            if var in self._position:
                inputs.add(self._position[var])
                continue
            index = self._producer[var]
            equation = flat.equations[index]
            position = equation.outputs.index(var)
            positions = needed.setdefault(index, set())
            if position in positions:
                continue
            first = not positions
            positions.add(position)
            if equation.branches:  # needs more operands with each output
                equation = cut[index] = _cut(equation, sorted(positions))
            elif not first:
                continue
            stack.extend(atom for atom in equation.inputs if not isinstance(atom, Literal))
        equations = tuple(cut.get(index, flat.equations[index]) for index in sorted(needed))
        order = tuple(sorted(inputs))
        return Flat(tuple(flat.inputs[i] for i in order), equations, wanted, flat.avals), order


def dependencies(flat: Flat, masks: Sequence[int]) -> list[int]:
    """Returns the dependencies of each output, when input i has the set of bits ``masks[i]``."""
    env: dict[int, int] = dict(zip(flat.inputs, masks, strict=True))

    def read(atom: Atom) -> int:
        return 0 if isinstance(atom, Literal) else env[atom]

    for equation in flat.equations:
        args = [read(atom) for atom in equation.inputs]
        if equation.branches:
            results = [args[0]] * len(equation.outputs)
            for branch in equation.branches:
                found = dependencies(branch, args[1:])
                results = [mine | other for mine, other in zip(results, found, strict=True)]
        else:
            union = 0
            for mask in args:
                union |= mask
            results = [union] * len(equation.outputs)
        env.update(zip(equation.outputs, results, strict=True))
    return [read(atom) for atom in flat.outputs]


class Origins:
    """For each variable of a program, the input that it always equals, and whether it is always zero.

    The equations are read once, in their order. So long chains and shared parts cost no more than others.
    """

    def __init__(self, flat: Flat) -> None:
        self._flat = flat
        self._origin: dict[int, int | None] = {var: index for index, var in enumerate(flat.inputs)}
        self._zeros: set[int] = set()
        self._constants: dict[int, Literal] = {}  # whose elements are elements of this literal
        for equation in flat.equations:
            self._read(equation)

    def unchanged(self, atom: Atom) -> int | None:
        """Returns the index of the input that `atom` always equals, except in the sign of a zero, or None if `atom` may
        be something else.

        A condition passes an input on if each of its branches does.
        """
        return None if isinstance(atom, Literal) else self._origin.get(atom)

    def is_zero(self, atom: Atom) -> bool:
        """Returns whether all elements are zero in every run."""
        if isinstance(atom, Literal):
            return isinstance(atom.value, np.ndarray) and not atom.value.any()
        return atom in self._zeros

    def _read(self, equation: Equation) -> None:
        inputs = equation.inputs
        if equation.branches:
            branches = [Origins(branch) for branch in equation.branches]
            for place, output in enumerate(equation.outputs):
                outputs = [(one, one._flat.outputs[place]) for one in branches]
                inner = [one.unchanged(atom) for one, atom in outputs]
                self._origin[output] = _common(None if at is None else self.unchanged(inputs[1 + at]) for at in inner)
                self._note(output, zero=all(one.is_zero(atom) for one, atom in outputs))
            return
        for output in equation.outputs:
            self._origin[output] = self._origin_of(equation, output)
            self._note(output, zero=self._makes_zero(equation))
        if equation.name in _COPIES and (constant := self._constant(inputs[0])) is not None:
            self._constants.update(dict.fromkeys(equation.outputs, constant))

    def _note(self, output: int, *, zero: bool) -> None:
        if zero:
            self._zeros.add(output)

    def _origin_of(self, equation: Equation, output: int) -> int | None:
        inputs = equation.inputs
        if equation.name == "select_n":
            return _common(map(self.unchanged, self._selected(equation)))
        if equation.name in _SUMS and self.is_zero(inputs[1]):
            return self.unchanged(inputs[0])
        if equation.name in _SUMS and equation.name != "sub" and self.is_zero(inputs[0]):
            return self.unchanged(inputs[1])
        same = equation.name == "convert_element_type" and self._flat.dtype(inputs[0]) == self._flat.dtype(output)
        return self.unchanged(inputs[0]) if same or equation.name in ("copy", "copy_p") else None

    def _makes_zero(self, equation: Equation) -> bool:
        if equation.name == "select_n":
            return all(map(self.is_zero, self._selected(equation)))
        if equation.name in _SUMS:
            return all(map(self.is_zero, equation.inputs))
        return (equation.name in _COPIES or equation.name in _OF_ZERO) and self.is_zero(equation.inputs[0])

    def _constant(self, atom: Atom) -> Literal | None:
        return atom if isinstance(atom, Literal) else self._constants.get(atom)

    def _selected(self, equation: Equation) -> Sequence[Atom]:
        """Returns the values among which a `select_n` selects: only one of them, if its condition is the same constant
        everywhere."""
        which, *values = equation.inputs
        constant = self._constant(which)
        if constant is not None and isinstance(constant.value, np.ndarray) and constant.value.size:
            first = constant.value.flat[0]
            if (constant.value == first).all() and 0 <= first < len(values):
                return values[int(first) : int(first) + 1]
        return values


_SUMS = ("add", "add_any", "sub")
_COPIES = ("broadcast_in_dim", "copy", "copy_p", "reshape", "squeeze", "transpose")
"""Primitives whose elements are elements of their input, and which have no other elements."""
_OF_ZERO = ("convert_element_type", "neg")
"""Primitives that make zeros of zeros."""


def _common(found: Iterable[int | None]) -> int | None:
    one, *others = set(found)
    return None if others else one


def _branch(flat: Flat) -> Any:
    return lambda *operands: tuple(evaluate(flat, operands))


def _cut(equation: Equation, positions: Sequence[int]) -> Equation:
    """Returns a conditional with only some of its outputs, and only the operands that those need."""
    parts = [select(branch, positions) for branch in equation.branches]
    operands = sorted({index for _, used in parts for index in used})
    branches = tuple(
        Flat(tuple(whole.inputs[i] for i in operands), part.equations, part.outputs, part.avals)
        for whole, (part, _) in zip(equation.branches, parts, strict=True)
    )
    inputs = (equation.inputs[0], *(equation.inputs[1 + i] for i in operands))
    outputs = tuple(equation.outputs[i] for i in positions)
    return Equation(equation.primitive, equation.params, inputs, outputs, branches)


class _Builder:
    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.equations: list[Equation] = []

    def new(self, aval: Any) -> int:
        self.avals.append(aval)
        return len(self.avals) - 1

    def inline(self, closed: Any, inputs: Iterable[Atom]) -> list[Atom]:
        jaxpr = closed.jaxpr
        env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
        env.update((var, constant(value)) for var, value in zip(jaxpr.constvars, closed.consts, strict=True))

        def read(atom: Any) -> Atom:
            if isinstance(atom, jex.Literal):
                aval: Any = atom.aval
                return constant(atom.val, aval.dtype)
            return env[atom]

        for eqn in jaxpr.eqns:
            args = tuple(read(atom) for atom in eqn.invars)
            inner = _called(eqn)
            if inner is not None:
                env.update(zip(eqn.outvars, self.inline(inner, args), strict=True))
                continue
            branches: tuple[Flat, ...] = ()
            if eqn.primitive.name == "cond":
                branches = tuple(flatten(branch) for branch in eqn.params["branches"])
            outputs = tuple(self.new(var.aval) for var in eqn.outvars)
            env.update(zip(eqn.outvars, outputs, strict=True))
            if outputs:  # one without results only prints or checks
                self.equations.append(Equation(eqn.primitive, dict(eqn.params), args, outputs, branches))
        return [read(atom) for atom in jaxpr.outvars]


def constant(value: Any, dtype: Any = None) -> Literal:
    """Returns a literal of JAX's canonical dtype."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return Literal(value)
    if dtype is None:
        dtype = jax.dtypes.canonicalize_dtype(np.asarray(value).dtype)
    return Literal(np.asarray(value, dtype=dtype))


def _called(eqn: Any) -> Any | None:
    key = _CALLS.get(eqn.primitive.name)
    if key is None or key not in eqn.params:
        return None
    inner = eqn.params[key]
    if not isinstance(inner, jex.ClosedJaxpr):
        if not hasattr(inner, "eqns") or inner.constvars:
            return None
        inner = jex.ClosedJaxpr(inner, ())
    return inner if len(inner.jaxpr.invars) == len(eqn.invars) else None
