"""Compiles the functions of an optimizer's rule for means of gradients, and programs on blocks and groups.

One jitted function for each program and form of the mean; equal blocks and engines of one process share its
executables. Weights, divisor and clip factor are arguments, so another value of them needs no compilation. Only a form
without one of them does. Without them, the program has no multiplication: it could change how the compiler contracts
the optimizer's own arithmetic, and with it the last bit.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from .._codecs import Codec, Encoded, encoded
from .._rules import ElementwiseProgram, Rule, StateProgram, WholeProgram
from .._tree import is_low_precision
from ._sums import BRANCHES, Tree


@dataclass(frozen=True)
class Mean:
    """How gradients are averaged. `form` selects the compiled program; the rest are values."""

    weights: tuple[float, ...]
    divisor: float
    clip_factor: float

    @classmethod
    def of(cls, weights: Sequence[float], divisor: float, clip_factor: float) -> Mean:
        """Raises `ValueError` for no weights, a divisor below 1, or a negative or non-finite factor."""
        if not weights:
            raise ValueError("weights is empty: a mean needs at least one gradient")
        if divisor < 1:
            raise ValueError(f"divisor is {divisor}: must be at least 1")
        if not (0.0 <= clip_factor < float("inf")):
            raise ValueError(f"clip_factor is {clip_factor}: must be finite and not negative")
        return cls(tuple(float(weight) for weight in weights), divisor, float(clip_factor))

    @property
    def count(self) -> int:
        return len(self.weights)

    @property
    def form(self) -> tuple[int, bool, bool, bool]:
        """(contributions, weighted, divided, clipped)"""
        return (
            self.count,
            any(weight != 1.0 for weight in self.weights),
            self.divisor != 1,
            self.clip_factor != 1.0,
        )

    def scalars(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Weights, divisor and factor as arguments for blocks of `dtype`."""
        real = _real(dtype)
        return np.asarray(self.weights, real), np.asarray(self.divisor, real), np.asarray(self.clip_factor, real)

    def state_scalars(self, dtype: np.dtype[Any]) -> tuple[Any, ...]:
        """Weights and their sum as arguments of `state_mean`. Weights that are all zero count as equal ones."""
        total = math.fsum(self.weights)
        weights = self.weights if total > 0.0 else (1.0,) * self.count
        real = _real(dtype)
        return np.asarray(weights, real), np.asarray(total if total > 0.0 else self.count, real)


def _real(dtype: np.dtype[Any]) -> type[np.floating[Any]]:
    return np.float64 if dtype.itemsize >= 8 else np.float32  # JAX narrows the first where x64 is off


def mean(values: Sequence[Any], form: tuple[int, bool, bool, bool], scalars: Sequence[Any]) -> Any:
    """``factor * (w0 * g0 + w1 * g1 + ...) / divisor``, added as `Tree` does. To be traced; see `Mean`.

    Sums of floats narrower than 32 bits are made in float32 and rounded once. An `Encoded` value is decoded as it is
    added: no decoded copy of a contribution exists.
    """
    _, weighted, divided, clipped = form
    weights, divisor, factor = scalars
    values = [_decoded(value) for value in values]
    dtype = values[0].dtype
    wide = jnp.float32 if is_low_precision(np.dtype(dtype)) else dtype
    terms = [value.astype(wide) for value in values]
    if weighted:
        terms = [term * weights[index].astype(wide) for index, term in enumerate(terms)]
    total = _summed(terms)
    if divided:
        total = total / divisor.astype(wide)
    if clipped:
        total = total * factor.astype(wide)
    return total.astype(dtype)


def _summed(terms: Sequence[Any]) -> Any:
    tree = Tree[Any](lambda nodes: functools.reduce(operator.add, nodes))
    for index, term in enumerate(terms):
        tree.put(index, term)
    return tree.root()


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, Encoded) else value


def state_mean(values: Sequence[Any], form: tuple[int, bool, bool, bool], scalars: Sequence[Any]) -> Any:
    """Returns the model state of an update, ``(w0 * s0 + w1 * s1 + ...) / (w0 + w1 + ...)``, as `Tree` adds. To be
    traced.

    Integers and booleans are those of the first contribution. Sums of floats narrower than 32 bits are made in float32
    and rounded once. An element that is equal in all contributions keeps its value: the mean of three equal numbers
    may differ in the last bit. The result is never the memory of a contribution, which is used again.
    """
    dtype = values[0].dtype
    if len(values) == 1 or not jnp.issubdtype(dtype, jnp.inexact):
        return jnp.copy(values[0])
    weights, total = scalars
    weighted = form[1]
    wide = jnp.float32 if is_low_precision(np.dtype(dtype)) else dtype
    terms = [value.astype(wide) for value in values]
    if weighted:
        terms = [term * weights[index].astype(wide) for index, term in enumerate(terms)]
    equal = functools.reduce(operator.and_, [value == values[0] for value in values])
    return jnp.where(equal, values[0], (_summed(terms) / total.astype(wide)).astype(dtype))


FUSED: Final = BRANCHES
"""The most contributions of an update that is one program for each number of them. `Kernels.folded` adds up more."""


@dataclass(frozen=True)
class Partial:
    """The sum of some contributions to one block, before it is divided. A pytree.

    Attributes:
        total: the sum, in float32 for narrower floats; None for integers of the model state.
        equal: where all contributions to a model state are equal; None for parameters and integers.
        first: the first contribution to a model state; None for parameters.
        dtype: the block's dtype.
    """

    total: Any
    equal: Any
    first: Any
    dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the block."""
        shape: tuple[int, ...] = (self.first if self.total is None else self.total).shape
        return shape


jax.tree_util.register_dataclass(Partial, data_fields=["total", "equal", "first"], meta_fields=["dtype"])


@dataclass(frozen=True)
class SumNode:
    """One contribution to a block, or the sum of some.

    Attributes:
        value: an array, `Encoded`, or `Partial`. Where all weights are the same, the sum is not multiplied with them.
        weights: the weights of the contributions.
    """

    value: Any
    weights: tuple[float, ...]

    @property
    def equal_weights(self) -> bool:
        """Whether all its contributions have the same weight."""
        return len(set(self.weights)) == 1

    @property
    def factor(self) -> float:
        """The factor that makes the value the weighted sum."""
        return self.weights[0] if self.equal_weights else 1.0


def _wide(dtype: Any) -> Any:
    return jnp.float32 if is_low_precision(np.dtype(dtype)) else dtype


def _lift(value: Any, trained: bool) -> Partial:
    """Returns the sum of one contribution in new memory, because that of the contribution is used again. To be
    traced."""
    value = _decoded(value)
    dtype = np.dtype(value.dtype)
    if trained:
        return Partial(jnp.array(value, _wide(dtype), copy=True), None, None, dtype)
    first = jnp.copy(value)
    if not jnp.issubdtype(dtype, jnp.inexact):
        return Partial(None, None, first, dtype)
    return Partial(jnp.array(value, _wide(dtype), copy=True), value == value, first, dtype)  # noqa: PLR0124  # not NaN


def _add(first: Any, rest: Sequence[Any], factors: Any, counts: Any, trained: bool) -> Partial:
    """``f0 * v0 + f1 * v1 + ...`` in that order, of those that count. To be traced."""
    values = [value if isinstance(value, Partial) else _lift(value, trained) for value in (first, *rest)]
    total, equal, head = None, None, values[0].first
    for index, value in enumerate(values):
        if value.total is not None:
            term = value.total * factors[index].astype(value.total.dtype)
            total = term if total is None else jnp.where(counts[index], total + term, total)
        if value.equal is not None:
            same = value.equal & (value.first == head)
            equal = same if equal is None else equal & (same | ~counts[index])
    return Partial(total, equal, head, values[0].dtype)


def _finish(value: Partial, divisor: Any, trained: bool) -> Any:
    if value.total is None:
        return jnp.copy(value.first)
    wide = value.total.dtype
    result = (value.total / divisor.astype(wide)).astype(value.dtype)
    return result if trained else jnp.where(value.equal, value.first, result)


class Kernels:
    """The jitted functions of one rule."""

    def __init__(self, rule: Rule) -> None:
        self._programs = rule.programs
        self._evaluate_advance = rule.advance
        self._constants_of = rule.constants_of
        self._constants: dict[tuple[int, ...], list[jax.Array]] = {}
        self._jitted: dict[Any, Any] = {}

    def advance(self, shared: Sequence[jax.Array], wanted: tuple[int, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        """Returns new shared states, and uniform scalars of this update."""
        evaluate = self._evaluate_advance
        if not shared:  # then the scalars are the same in each update, and mostly written in the program
            if wanted not in self._constants:
                written = self._constants_of(wanted)
                self._constants[wanted] = jax.jit(lambda: evaluate((), wanted)[1])() if written is None else written
            return [], self._constants[wanted]
        function = self._get(("advance", wanted), lambda: jax.jit(lambda values: evaluate(values, wanted)))
        new, scalars = function(list(shared))
        return list(new), list(scalars)

    def shared(self, program: int) -> tuple[int, ...]:
        """Returns the shared state leaves that a whole program reads."""
        whole = self._programs[program]
        assert isinstance(whole, WholeProgram)
        return whole.shared

    def stretch(self, program: int, how: Mean, codec: Codec | None = None) -> Any:
        """``(param, states, gradients, uniform, scalars) -> (param, states, sent)`` of one block; two are donated.

        `sent` has the new parameters as `codec` encodes them, or None. One pass over memory computes both.
        """
        elementwise, form = self._programs[program], how.form
        if isinstance(elementwise, StateProgram):
            state = self.state(how)
            return lambda _param, states, values, _uniform, scalars: (state(values, scalars), states, None)
        assert isinstance(elementwise, ElementwiseProgram)

        def update(param: Any, states: Any, values: Any, uniform: Any, scalars: Any) -> Any:
            param, states = elementwise.run(uniform, mean(values, form, scalars), param, states)
            return param, states, None if codec is None else encoded(codec, param, None, None)

        return self._get(("stretch", program, form, codec), lambda: jax.jit(update, donate_argnums=(0, 1)))

    def whole(self, program: int, how: Mean) -> Any:
        """``(params, states, gradients, shared, scalars) -> (params, states)`` on one group; the first two donated.

        ``gradients[i]`` are the contributions to the i-th leaf that is not empty, flat.
        """
        group, form = self._programs[program], how.form
        assert isinstance(group, WholeProgram)

        def update(params: Any, states: Any, values: Any, shared: Any, scalars: Any) -> Any:
            remaining = iter(values)
            gradients = [
                mean(next(remaining), form, scalars).reshape(param.shape) if param.size else jnp.zeros_like(param)
                for param in params
            ]
            return group.run(shared, gradients, params, states)

        return self._get(("whole", program, form), lambda: jax.jit(update, donate_argnums=(0, 1)))

    def mean(self, how: Mean) -> Any:
        """``(gradients, scalars) ->`` the mean of one block."""
        form = how.form
        return self._get(("mean", form), lambda: jax.jit(lambda values, scalars: mean(values, form, scalars)))

    def state(self, how: Mean) -> Any:
        """``(states, scalars) ->`` the model state of one block, in new memory; see `state_mean`."""
        form = how.form
        # An update does not apply the division and the clip factor to the model state: they must not compile it again.
        key = ("state", form[0], form[1])
        return self._get(key, lambda: jax.jit(lambda values, scalars: state_mean(values, form, scalars)))

    def folded(self, values: Sequence[Any], weights: Sequence[float], divisor: float, *, trained: bool) -> Any:
        """Returns the mean of any number of contributions to one block, as `mean` or `state_mean`, without the clip
        factor.

        `Tree` has the order of the additions. The same few programs serve every number of contributions.
        """
        tree = Tree[SumNode](lambda nodes: self.add(nodes, trained=trained))
        for index, (value, weight) in enumerate(zip(values, weights, strict=True)):
            tree.put(index, SumNode(value, (float(weight),)))
        return self.finish(tree.root(), divisor, trained=trained)

    def add(self, nodes: Sequence[SumNode], *, trained: bool) -> SumNode:
        """Add up to `FUSED` neighbours. The memory of those that are sums already is used again.

        Args:
            nodes: the nodes of one block, in order.
            trained: whether it is a block of parameters, and not of the model state.
        """
        if not 1 < len(nodes) <= FUSED:
            raise ValueError(f"{len(nodes)} nodes are added: must be 2 to {FUSED}")
        weights = tuple(weight for node in nodes for weight in node.weights)
        equal_weights = len(set(weights)) == 1
        values = [node.value for node in nodes]
        if (sums := any(isinstance(value, Partial) for value in values)) is True:
            values = [value if isinstance(value, Partial) else self._lifted(value, trained) for value in values]
        missing = FUSED - len(values)
        factors = [1.0 if equal_weights else node.factor for node in nodes] + [0.0] * missing
        counts = np.arange(FUSED) < len(values)
        function = self._get(
            ("add", sums, trained),
            lambda: jax.jit(functools.partial(_add, trained=trained), donate_argnums=(0,) if sums else ()),
        )
        rest = (*values[1:], *values[-1:] * missing)
        return SumNode(function(values[0], rest, np.asarray(factors, _real(values[0].dtype)), counts), weights)

    def finish(self, node: SumNode, divisor: float, *, trained: bool) -> Any:
        """Returns the mean of the contributions in a node, as an array of the block's dtype.

        Args:
            divisor: the divisor of parameters. A block of the model state is divided by the sum of the weights.
        """
        value = node.value if isinstance(node.value, Partial) else self._lifted(node.value, trained)
        if not trained:
            divisor = len(node.weights) if node.equal_weights else math.fsum(node.weights)
        elif node.equal_weights:
            # Equal numbers of examples give the bits of equal weighting, even if all of them are 0.
            divisor = divisor / node.weights[0] if node.weights[0] else len(node.weights)
        real = _real(value.dtype)
        function = self._get(("finish", trained), lambda: jax.jit(functools.partial(_finish, trained=trained)))
        return function(value, np.asarray(divisor, real))

    def _lifted(self, value: Any, trained: bool) -> Partial:
        lifted: Partial = self._get(("lift", trained), lambda: jax.jit(functools.partial(_lift, trained=trained)))(
            value
        )
        return lifted

    def squares(self, how: Mean) -> Any:
        """``(gradients, scalars) ->`` the sum of squares of the mean in float64; to be called with x64 enabled."""
        form = how.form

        def squares(values: Any, scalars: Any) -> Any:
            value = jnp.abs(mean(values, form, scalars))
            return jnp.sum(jnp.square(value.astype(jnp.float64)))

        return self._get(("squares", form), lambda: jax.jit(squares))

    def _get(self, key: Any, make: Callable[[], Any]) -> Any:
        function = self._jitted.get(key)
        if function is None:
            function = self._jitted[key] = make()
        return function


def kernels_of(rule: Rule) -> Kernels:
    """Returns the jitted functions of a rule, the same for every engine of it in this process."""
    kernels: Kernels = rule.cache.setdefault("kernels", Kernels(rule))
    return kernels


def enable_x64() -> AbstractContextManager[Any]:
    """Returns a context in which this thread computes float64 in float64, regardless of `jax_enable_x64`."""
    context: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else vars(jax.experimental)["enable_x64"]
    return cast("AbstractContextManager[Any]", context(True))
