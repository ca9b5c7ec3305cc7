"""Runs `init`: once in the life of a job, so its program is compiled quickly and not optimized.

A server of a large model computes only the arrays of which it holds a part, so a model may be larger than its memory.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Final

import numpy as np

from ..errors import ConfigurationError

__all__ = ["initial"]

# XLA takes seconds to optimize the random bits of each shape, and milliseconds to run them unoptimized.
_UNOPTIMIZED: Final = {"xla_backend_optimization_level": 0}
# Above it the unoptimized program may run for longer than the optimized one takes to compile.
_MOST_ELEMENTS: Final = 1_000_000
# Larger constants, such as weights that `init` reads from a file, would be compiled into the program.
_MOST_CONSTANT_BYTES: Final = 1 << 20


def initial(
    init: Callable[[Any], Any],
    seed: int,
    keep: Callable[[Any], Any] | None = None,
    *,
    compiled: bool = True,
    needed: Collection[int] | None = None,
) -> Any:
    """Returns the result of ``init(jax.random.key(seed))``, or the part of it that `keep` returns.

    On a CPU a small `init` runs as one program. Its floats may differ from those of `init` run operation by operation
    in the last bits; every pod, and a single process too, gets the same ones.

    Args:
        init: PRNG key -> parameters, a pytree of arrays.
        seed: the seed of the random key.
        keep: returns a part of the result. The rest is not computed, unless `init` cannot be compiled.
        compiled: whether `init` may run as one program. False: the result has the bits of ``init(key)``.
        needed: which leaves of the result are needed; None: all. Of a large model the others may be
            `jax.ShapeDtypeStruct`: they are not computed. Those that are have the same bits as without it.

    Raises:
        ConfigurationError: an array that `init` returns is divided over several devices.
    """
    import jax

    function: Callable[[Any], Any] = init if keep is None else lambda key: keep(init(key))
    made = _made(function, seed, part=keep is not None, needed=needed) if compiled else function(jax.random.key(seed))
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated:
            name = jax.tree_util.keystr(path) or "an array"
            raise ConfigurationError(
                f"init returned {name} divided over {len(leaf.sharding.device_set)} devices: must return whole arrays. "
                "To divide the model over the devices of a worker, pass mesh and sharding to train. Without them, loss "
                'may divide what it computes, with Mesh(np.asarray(jax.local_devices()), ("batch",))'
            )
    return made


def _made(init: Callable[[Any], Any], seed: int, *, part: bool, needed: Collection[int] | None) -> Any:
    """
    Args:
        seed: the seed of the key. A program that makes the key too spares two programs.
        part: whether `init` computes more than it returns, which only a compiled program leaves out.
        needed: as in `initial`.
    """
    import jax

    def seeded(number: Any) -> Any:
        return init(jax.random.key(number))

    def direct(function: Callable[[Any], Any] = init) -> Any:
        return function(jax.random.key(seed))

    whole = jax.jit(init) if part else init
    number = jax.device_put(np.int64(operator.index(seed)))
    try:
        if jax.default_backend() != "cpu":
            return direct(whole)
        traced = jax.jit(seeded).trace(number)
        elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(traced.out_info))
        constants = sum(getattr(value, "nbytes", 0) for value in traced.jaxpr.consts)
        if constants > _MOST_CONSTANT_BYTES:
            return direct()
        if jax.local_device_count() > 1 and "Sharding" in str(traced.jaxpr):
            return direct()  # XLA may choose another sharding for the results than `init` names
        if elements > _MOST_ELEMENTS:
            return direct(whole) if part or needed is None else _evaluated(traced, number, needed)
        program = traced.lower().compile(compiler_options=_UNOPTIMIZED)
    except Exception:  # noqa: BLE001  # without the program in between, the error is that of `init` itself
        return direct()
    return program(number)


def _evaluated(traced: Any, seed: Any, needed: Collection[int]) -> Any:
    """Run a traced `init` operation by operation, as Python runs it, without those that no needed leaf depends on.

    Each intermediate array is freed after its last use. A function that `init` compiles itself stays one operation,
    because a part of it could have other bits.

    Args:
        traced: what ``jax.jit(seeded).trace(seed)`` returned.
        needed: as in `initial`.
    """
    import jax
    from jax.extend.core import Literal

    from .._update import bind

    def variables(atoms: Iterable[Any]) -> list[Any]:
        return [atom for atom in atoms if not isinstance(atom, Literal)]

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    def result(atom: Any, described: Any) -> Any:
        if isinstance(atom, Literal):
            return jax.numpy.asarray(atom.val, described.dtype)
        return values[atom] if atom in wanted else described

    jaxpr = traced.jaxpr.jaxpr
    # An array at two places is an error, which each server has to find.
    places = Counter(variables(jaxpr.outvars))
    wanted = set(variables(jaxpr.outvars[number] for number in needed))
    wanted |= {atom for atom, count in places.items() if count > 1}
    used, equations = set(wanted), []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not used.isdisjoint(equation.outvars):
            used.update(variables(equation.invars))
            equations.append(equation)
    equations.reverse()
    last = {atom: number for number, equation in enumerate(equations) for atom in variables(equation.invars)}
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*traced.jaxpr.consts, seed), strict=True))
    for number, equation in enumerate(equations):
        with equation.ctx.manager:  # what the script had set around it, such as jax.threefry_partitionable
            made = bind(equation.primitive, equation.params, [read(atom) for atom in equation.invars])
        values |= {atom: value for atom, value in zip(equation.outvars, made, strict=True) if atom in used}
        del made
        for atom in variables(equation.invars):
            if last[atom] == number and atom not in wanted:
                values.pop(atom, None)
    described, structure = jax.tree.flatten(traced.out_info)
    return jax.tree.unflatten(structure, [result(*each) for each in zip(jaxpr.outvars, described, strict=True)])
