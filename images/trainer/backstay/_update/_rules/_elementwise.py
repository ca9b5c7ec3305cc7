"""Which leaves are updated element by element, and how to update any stretch of their elements.

The optimizer was traced on the true shapes, so the trace contains the effect of masks and labels by name, rank or
shape. This module reads one leaf's part of that trace again. Each value in it is one of:

* uniform: the same for every element and every leaf, computed from literals and shared state (a count, a learning
  rate); kept as a scalar, regardless of its shape;
* aligned: element e of it depends on element e of the leaf's gradient, parameter and state alone; becomes a block;
* shared: any other array made of shared state and literals only (a PRNG key, an iota), in its true shape.

Any other value makes the leaf a whole one. Expressions are interned: equal programs get equal numbers, even if the
leaves' shapes differ. Such leaves may be cut and packed into common blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from ._flat import Atom, Equation, Flat, Literal, bind
from ._signature import of_literal, of_params

# Primitives that compute each element of the result from the same element of every operand.
ELEMENTWISE: Final = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz complex conj
    convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma
    igamma_grad_a igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name ne neg nextafter
    not or polygamma population_count pow random_gamma_grad real reduce_precision regularized_incomplete_beta rem
    round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
    """.split()  # noqa: SIM905  # one word a line would be a page
)


class Kind(Enum):
    UNIFORM = "uniform"
    ALIGNED = "aligned"
    SHARED = "shared"


@dataclass(frozen=True)
class Value:
    """A variable of the trace, with the number of its expression and its true shape."""

    expression: int
    kind: Kind
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Expression:
    """`args` are numbers of expressions, each with the shape to give to a uniform one, or None to leave it."""

    kind: Kind
    op: str  # "input", "literal", "aligned", "plain", "item"
    primitive: Any = None
    params: Mapping[str, Any] = field(default_factory=dict)
    args: tuple[tuple[int, tuple[int, ...] | None], ...] = ()
    payload: Any = None  # an input's name, a literal's array, an item's index


@dataclass(frozen=True)
class ExpressionNode:
    """One expression of a program for its digest, where `args` are positions of earlier nodes with the shapes to
    take."""

    op: str
    primitive: str
    params: Mapping[str, Any]
    args: tuple[tuple[int, tuple[int, ...] | None], ...]
    payload: Any


class NotElementwiseError(Exception):
    """A leaf must stay whole; the message has the reason."""


class Expressions:
    """The interned expressions of one optimizer."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._all: list[_Expression] = []

    def leaf(self, flat: Flat, inputs: Sequence[tuple[str, int] | None], shape: tuple[int, ...]) -> tuple[int, ...]:
        """Read one leaf's part of the trace.

        Args:
            flat: the part; its outputs are the new parameter and then the new states of the leaf.
            inputs: where each input comes from: ``("leaf", k)``, aligned input k of the leaf (0 gradient, 1 parameter,
                2.. states), or ``("shared", j)``, state leaf j of the optimizer.
            shape: the leaf's shape.

        Returns:
            For each output an expression that is aligned or uniform.

        Raises:
            NotElementwiseError: the leaf must stay whole.
        """
        env: dict[int, Value] = {}
        for var, name in zip(flat.inputs, inputs, strict=True):
            if name is None:
                raise NotElementwiseError("it depends on another leaf")
            env[var] = self._input(name, flat.shape(var), flat.avals[var].dtype, shape)
        results = self._run(flat, env)
        for value in results:
            if value.kind is Kind.SHARED:
                raise NotElementwiseError("a result is made of shared arrays alone")
            if value.shape != shape:
                raise NotElementwiseError(f"a result has the shape {value.shape}")
        return tuple(value.expression for value in results)

    def frontier(self, outputs: Sequence[int]) -> tuple[int, ...]:
        """Returns the uniform expressions that the aligned ones among and under `outputs` need; the outputs may be
        some."""
        found: set[int] = set()
        seen: set[int] = set()
        stack = list(outputs)
        while stack:
            number = stack.pop()
            if number in seen:
                continue
            seen.add(number)
            expression = self._all[number]
            if expression.kind is Kind.UNIFORM:
                found.add(number)
            else:
                stack.extend(arg for arg, _ in expression.args)
        return tuple(sorted(found))

    def nodes(self, outputs: Sequence[int]) -> list[ExpressionNode]:
        """Returns the expressions under `outputs`, each after those that it reads; the last node lists the outputs.

        The order depends on the program alone, not on the numbers that the expressions have.
        """
        position: dict[int, int] = {}
        found: list[ExpressionNode] = []
        stack = list(reversed(outputs))
        while stack:
            number = stack[-1]
            expression = self._all[number]
            missing = [arg for arg, _ in expression.args if arg not in position]
            if missing and number not in position:
                stack.extend(reversed(missing))
                continue
            stack.pop()
            if number not in position:
                position[number] = len(found)
                name = "" if expression.primitive is None else str(expression.primitive.name)
                args = tuple((position[arg], shape) for arg, shape in expression.args)
                found.append(ExpressionNode(expression.op, name, expression.params, args, expression.payload))
        found.append(ExpressionNode("outputs", "", {}, tuple((position[number], None) for number in outputs), None))
        return found

    def scalars(self, wanted: Sequence[int], shared: Mapping[int, Any]) -> list[jax.Array]:
        """Compute uniform expressions; `shared` are the shared state leaves by their index. To be traced."""
        env: dict[int, Any] = {}
        return [self._compute(number, env, shared, (), None) for number in wanted]

    def constants(self, wanted: Sequence[int]) -> list[Any] | None:
        """Returns the values of expressions that are all constants; None if an operation computes one of them."""
        found = [self._all[number] for number in wanted]
        return [each.payload for each in found] if all(each.op == "literal" for each in found) else None

    def block(
        self, outputs: Sequence[int], uniform: Mapping[int, Any], inputs: Sequence[Any], size: int
    ) -> list[jax.Array]:
        """Compute outputs on `size` elements: `inputs` are 1-D, gradient, parameter, states. To be traced."""
        env: dict[int, Any] = dict(uniform)
        return [_spread(self._compute(number, env, {}, inputs, size), size) for number in outputs]

    # -- reading a trace

    def _input(self, name: tuple[str, int], own: tuple[int, ...], dtype: Any, leaf: tuple[int, ...]) -> Value:
        if name[0] == "leaf":
            if own != leaf:
                raise NotElementwiseError(f"a state of it has the shape {own}")
            kind = Kind.ALIGNED
        else:
            kind = Kind.UNIFORM if own == () else Kind.SHARED
        number = self._intern(("input", name, dtype, own if kind is Kind.SHARED else ()), kind, "input", payload=name)
        return Value(number, kind, own)

    def _run(self, flat: Flat, env: dict[int, Value]) -> list[Value]:
        for equation in flat.equations:
            args = [self._read(atom, env) for atom in equation.inputs]
            results = self._conditional(equation, args) if equation.branches else self._apply(flat, equation, args)
            env.update(zip(equation.outputs, results, strict=True))
        return [self._read(atom, env) for atom in flat.outputs]

    def _read(self, atom: Atom, env: Mapping[int, Value]) -> Value:
        if not isinstance(atom, Literal):
            return env[atom]
        kind = Kind.UNIFORM if atom.shape == () else Kind.SHARED
        number = self._intern(of_literal(atom), kind, "literal", payload=atom.value)
        return Value(number, kind, atom.shape)

    def _conditional(self, equation: Equation, args: Sequence[Value]) -> list[Value]:
        """Compute all branches and select one. For elementwise work, this costs less than dividing the fused loop."""
        index, operands = args[0], args[1:]
        if index.kind is not Kind.UNIFORM:
            raise NotElementwiseError("a condition depends on it")
        outcomes = [self._run(branch, dict(zip(branch.inputs, operands, strict=True))) for branch in equation.branches]
        last = len(equation.branches) - 1
        bounds = [self._read(_int32(0), {}), index, self._read(_int32(last), {})]
        index = self._pure(jax.lax.clamp_p, {}, bounds, ())
        return [
            self._pure(jax.lax.select_n_p, {}, [index, *cases], cases[0].shape) for cases in zip(*outcomes, strict=True)
        ]

    def _apply(self, flat: Flat, equation: Equation, args: Sequence[Value]) -> list[Value]:
        shapes = [tuple(flat.avals[var].shape) for var in equation.outputs]
        if equation.name == "optimization_barrier":
            return list(args)
        if equation.name in ELEMENTWISE and equation.params.get("sharding") is None and len(shapes) == 1:
            return [self._pure(equation.primitive, equation.params, args, shapes[0])]
        moved = _same_elements(equation, args, shapes)
        if moved is not None:
            return [Value(args[0].expression, args[0].kind, moved)]
        if any(arg.kind is Kind.ALIGNED for arg in args):
            raise NotElementwiseError(f"{equation.name} mixes its elements")
        return self._plain(equation.primitive, equation.params, args, shapes)

    def _pure(self, primitive: Any, params: Mapping[str, Any], args: Sequence[Value], shape: tuple[int, ...]) -> Value:
        """Apply an elementwise primitive."""
        kinds = {arg.kind for arg in args}
        if Kind.SHARED in kinds:
            if Kind.ALIGNED in kinds:
                raise NotElementwiseError(f"{primitive.name} combines it with an array that it shares")
            return self._plain(primitive, params, args, [shape])[0]
        kind = Kind.ALIGNED if Kind.ALIGNED in kinds else Kind.UNIFORM
        if any(arg.kind is Kind.ALIGNED and arg.shape != shape for arg in args):
            raise NotElementwiseError(f"{primitive.name} broadcasts it")  # a scalar leaf against an array
        numbers = tuple((arg.expression, None) for arg in args)
        key = (kind, primitive, of_params(dict(params)), numbers)
        return Value(self._intern(key, kind, "aligned", primitive, params, numbers), kind, shape)

    def _plain(
        self, primitive: Any, params: Mapping[str, Any], args: Sequence[Value], shapes: Sequence[tuple[int, ...]]
    ) -> list[Value]:
        """Returns any primitive on shared state and literals, computed in the true shapes."""
        inputs = tuple((arg.expression, arg.shape if arg.kind is Kind.UNIFORM else None) for arg in args)
        key = ("plain", primitive, of_params(dict(params)), inputs)
        whole = self._intern(key, Kind.SHARED, "plain", primitive, params, inputs)
        values = []
        for index, shape in enumerate(shapes):
            kind = Kind.UNIFORM if shape == () else Kind.SHARED
            number = self._intern(("item", whole, index), kind, "item", args=((whole, None),), payload=index)
            values.append(Value(number, kind, shape))
        return values

    def _intern(
        self,
        key: Any,
        kind: Kind,
        op: str,
        primitive: Any = None,
        params: Mapping[str, Any] | None = None,
        args: tuple[tuple[int, tuple[int, ...] | None], ...] = (),
        payload: Any = None,
    ) -> int:
        number = self._numbers.setdefault(key, len(self._all))
        if number == len(self._all):
            self._all.append(_Expression(kind, op, primitive, params or {}, args, payload))
        return number

    # -- computing

    def _compute(
        self, wanted: int, env: dict[int, Any], shared: Mapping[int, Any], inputs: Sequence[Any], size: int | None
    ) -> Any:
        """Visits depth first without recursion, because chains are as long as an optimizer is."""
        stack = [wanted]
        while stack:
            number = stack[-1]
            if number in env:
                stack.pop()
                continue
            expression = self._all[number]
            missing = [arg for arg, _ in expression.args if arg not in env]
            if missing:
                stack.extend(missing)
                continue
            env[number] = self._step(expression, env, shared, inputs, size)
            stack.pop()
        return env[wanted]

    def _step(
        self,
        expression: _Expression,
        env: Mapping[int, Any],
        shared: Mapping[int, Any],
        inputs: Sequence[Any],
        size: int | None,
    ) -> Any:
        match expression.op:
            case "input":
                origin, index = expression.payload
                return inputs[index] if origin == "leaf" else shared[index]
            case "literal":
                return jnp.asarray(expression.payload)
            case "item":
                return env[expression.args[0][0]][expression.payload]
            case _:
                args = [env[number] for number, _ in expression.args]
                if expression.op == "plain":
                    shapes = [shape for _, shape in expression.args]
                    args = [
                        arg if shape in (None, ()) else jnp.broadcast_to(arg, shape)
                        for arg, shape in zip(args, shapes, strict=True)
                    ]
                elif expression.kind is Kind.ALIGNED:
                    args = [_spread(arg, size) for arg in args]
                results = bind(expression.primitive, expression.params, args)
                return results if expression.op == "plain" else results[0]


def _spread(value: Any, size: int | None) -> Any:
    return value if size is None or value.ndim else jnp.broadcast_to(value, (size,))


def _same_elements(equation: Equation, args: Sequence[Value], shapes: Sequence[tuple[int, ...]]) -> Any:
    """Returns the new shape, where the primitive only renames the elements of its single operand in the same order."""
    if len(args) != 1 or len(shapes) != 1 or args[0].kind is Kind.SHARED:
        return None
    old, new = args[0], shapes[0]
    if equation.name == "broadcast_in_dim":
        if equation.params.get("sharding") is not None:
            return None
        return new if old.kind is Kind.UNIFORM or _size(old.shape) == _size(new) else None
    if equation.name == "reshape":
        return new if equation.params.get("dimensions") is None and equation.params.get("sharding") is None else None
    if equation.name in ("squeeze", "expand_dims"):
        return new
    if equation.name in ("transpose", "rev", "slice") and old.kind is Kind.UNIFORM:
        return new
    return None


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size


def _int32(value: int) -> Literal:
    return Literal(np.asarray(value, np.int32))
