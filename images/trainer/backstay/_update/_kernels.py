"""The compiled functions of an optimizer's rule: means of gradients, and programs on blocks and groups.

One jitted function for each program and form of the mean; equal blocks and engines of one process share its
executables. Weights, divisor and clip factor are arguments, so another value of them needs no compilation. Only a form
without one of them does. Without them, the program has no multiplication: it could change how the compiler contracts
the optimizer's own arithmetic, and with it the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final, cast

import jax
import jax.numpy as jnp
import numpy as np

from ._codecs import Encoded
from ._rules import ElementwiseProgram, Rule, StateProgram, WholeProgram
from ._tree import is_low_precision


@dataclass(frozen=True)
class Mean:
    """How gradients are averaged. `form` is what is compiled, the rest are values."""

    weights: tuple[float, ...]
    divisor: int
    clip_factor: float

    @classmethod
    def of(cls, weights: Sequence[float], divisor: int, clip_factor: float) -> Mean:
        """Raises `ValueError` for no weights, a divisor below 1, or a negative or non-finite factor."""
        if not weights:
            raise ValueError("a mean of no gradients")
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
    """``factor * (w0 * g0 + w1 * g1 + ...) / divisor`` in that order. To be traced; see `Mean`.

    Sums of floats narrower than 32 bits are made in float32 and rounded once. An `Encoded` value is decoded as it is
    added: no decoded copy of a contribution exists.
    """
    _, weighted, divided, clipped = form
    weights, divisor, factor = scalars
    values = [_decoded(value) for value in values]
    dtype = values[0].dtype
    wide = jnp.float32 if is_low_precision(np.dtype(dtype)) else dtype
    total = None
    for index, value in enumerate(values):
        term = value.astype(wide)
        if weighted:
            term = term * weights[index].astype(wide)
        total = term if total is None else total + term
    assert total is not None
    if divided:
        total = total / divisor.astype(wide)
    if clipped:
        total = total * factor.astype(wide)
    return total.astype(dtype)


def _decoded(value: Any) -> Any:
    return value.decode() if isinstance(value, Encoded) else value


def state_mean(values: Sequence[Any], form: tuple[int, bool, bool, bool], scalars: Sequence[Any]) -> Any:
    """The model state of an update, ``(w0 * s0 + w1 * s1 + ...) / (w0 + w1 + ...)`` in that order. To be traced.

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
    result, equal = None, None
    for index, value in enumerate(values):
        term = value.astype(wide)
        if weighted:
            term = term * weights[index].astype(wide)
        result = term if result is None else result + term
        same = value == values[0]
        equal = same if equal is None else equal & same
    assert result is not None
    assert equal is not None
    return jnp.where(equal, values[0], (result / total.astype(wide)).astype(dtype))


FUSED: Final = 4
"""An update of at most so many contributions is one program for each number of them. `Kernels.folded` adds up more."""


class Kernels:
    """The jitted functions of one rule."""

    def __init__(self, rule: Rule) -> None:
        self._programs = rule.programs
        self._evaluate_advance = rule.advance
        self._jitted: dict[Any, Any] = {}

    def advance(self, shared: Sequence[jax.Array], wanted: tuple[int, ...]) -> tuple[list[jax.Array], list[jax.Array]]:
        """New shared states, and uniform scalars of this update."""
        if not shared and not wanted:
            return [], []
        evaluate = self._evaluate_advance
        function = self._get(("advance", wanted), lambda: jax.jit(lambda values: evaluate(values, wanted)))
        new, scalars = function(list(shared))
        return list(new), list(scalars)

    def shared(self, program: int) -> tuple[int, ...]:
        """The shared state leaves that a whole program reads."""
        whole = self._programs[program]
        assert isinstance(whole, WholeProgram)
        return whole.shared

    def stretch(self, program: int, how: Mean) -> Any:
        """``(param, states, gradients, uniform, scalars) -> (param, states)`` on one block; the first two donated."""
        elementwise, form = self._programs[program], how.form
        if isinstance(elementwise, StateProgram):
            state = self.state(how)
            return lambda _param, states, values, _uniform, scalars: (state(values, scalars), states)
        assert isinstance(elementwise, ElementwiseProgram)

        def update(param: Any, states: Any, values: Any, uniform: Any, scalars: Any) -> Any:
            return elementwise.run(uniform, mean(values, form, scalars), param, states)

        return self._get(("stretch", program, form), lambda: jax.jit(update, donate_argnums=(0, 1)))

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

    def folded(self, values: Sequence[Any], scalars: Sequence[Any], *, trained: bool) -> Any:
        """The mean of any number of contributions to one block, as `mean` or `state_mean`, without the clip factor.

        `FUSED` contributions are added at a time, in order, so the same three programs serve every number of them. The
        last group is filled up with contributions that do not count.

        Args:
            scalars: `Mean.scalars`, or of a block of the model state (`trained` is false) `Mean.state_scalars`.
        """
        first = values[0]
        dtype = first.dtype
        if not trained and not jnp.issubdtype(dtype, jnp.inexact):
            return self._get(("copy",), lambda: jax.jit(jnp.copy))(first)
        wide = jnp.float32 if is_low_precision(np.dtype(dtype)) else dtype
        missing = -len(values) % FUSED
        values = (*values, *(first,) * missing)
        weights = np.concatenate([scalars[0], np.zeros(missing, scalars[0].dtype)])
        counts = np.arange(len(values)) < len(values) - missing

        def add(total: Any, equal: Any, first: Any, group: Any, weights: Any, counts: Any) -> Any:
            for index, value in enumerate(group):
                term = jnp.where(counts[index], _decoded(value).astype(wide) * weights[index].astype(wide), 0)
                total = term if total is None else total + term
                if not trained:
                    equal = value == first if equal is None else equal & (value == first)
            return total, equal

        def start(*group: Any) -> Any:
            return add(None, None, *group)

        def finish(total: Any, equal: Any, first: Any, divisor: Any) -> Any:
            result = (total / divisor.astype(wide)).astype(dtype)
            return result if trained else jnp.where(equal, first, result)

        kind = (trained, str(np.dtype(dtype)))
        begin = self._get(("start", *kind), lambda: jax.jit(start))
        more = self._get(("add", *kind), lambda: jax.jit(add, donate_argnums=(0, 1)))
        end = self._get(("finish", *kind), lambda: jax.jit(finish))
        total, equal = begin(first, values[:FUSED], weights[:FUSED], counts[:FUSED])
        for at in range(FUSED, len(values), FUSED):
            group = slice(at, at + FUSED)
            total, equal = more(total, equal, first, values[group], weights[group], counts[group])
        return end(total, equal, first, scalars[1])

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
    """The jitted functions of a rule, the same for every engine of it in this process."""
    kernels: Kernels = rule.cache.setdefault("kernels", Kernels(rule))
    return kernels


def enable_x64() -> AbstractContextManager[Any]:
    """Within this context, this thread computes float64 in float64, regardless of `jax_enable_x64`."""
    context: Any = jax.enable_x64 if hasattr(jax, "enable_x64") else vars(jax.experimental)["enable_x64"]
    return cast("AbstractContextManager[Any]", context(True))
