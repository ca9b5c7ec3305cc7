"""Runs `init`: once in the life of a job, so its program is compiled quickly and not optimized."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from ..errors import ConfigurationError

__all__ = ["initial"]

# XLA takes seconds to optimize the random bits of each shape, and milliseconds to run them unoptimized.
_UNOPTIMIZED: Final = {"xla_backend_optimization_level": 0}
# Above it the unoptimized program may run for longer than the optimized one takes to compile.
_MOST_ELEMENTS: Final = 1_000_000
# Larger constants, such as weights that `init` reads from a file, would be compiled into the program.
_MOST_CONSTANT_BYTES: Final = 1 << 20


def initial(
    init: Callable[[Any], Any], seed: int, keep: Callable[[Any], Any] | None = None, *, compiled: bool = True
) -> Any:
    """The result of ``init(jax.random.key(seed))``, or the part of it that `keep` returns.

    On a CPU a small `init` runs as one program. Its floats may differ from those of `init` run operation by operation
    in the last bits; every pod, and a single process too, gets the same ones.

    Args:
        init: PRNG key -> parameters, a pytree of arrays.
        seed: the seed of the random key.
        keep: returns a part of the result. The rest is not computed, unless `init` cannot be compiled.
        compiled: whether `init` may run as one program. False: the result has the bits of ``init(key)``.

    Raises:
        ConfigurationError: an array that `init` returns is divided over several devices.
    """
    import jax

    function: Callable[[Any], Any] = init if keep is None else lambda key: keep(init(key))
    key = jax.random.key(seed)
    made = _made(function, key, part=keep is not None) if compiled else function(key)
    for path, leaf in jax.tree_util.tree_flatten_with_path(made)[0]:
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_fully_replicated:
            name = jax.tree_util.keystr(path) or "an array"
            raise ConfigurationError(
                f"init returned {name} divided over {len(leaf.sharding.device_set)} devices: must return whole arrays. "
                "To divide the model over the devices of a worker, pass mesh and sharding to train. Without them, loss "
                'may divide what it computes, with Mesh(np.asarray(jax.local_devices()), ("batch",))'
            )
    return made


def _made(init: Callable[[Any], Any], key: Any, *, part: bool) -> Any:
    """
    Args:
        part: whether `init` computes more than it returns, which only a compiled program leaves out.
    """
    import jax

    whole = jax.jit(init) if part else init
    try:
        if jax.default_backend() != "cpu":
            return whole(key)
        traced = jax.jit(init).trace(key)
        elements = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(traced.out_info))
        constants = sum(getattr(value, "nbytes", 0) for value in traced.jaxpr.consts)
        if constants > _MOST_CONSTANT_BYTES:
            return init(key)
        if jax.local_device_count() > 1 and "Sharding" in str(traced.jaxpr):
            return init(key)  # XLA may choose another sharding for the results than `init` names
        if elements > _MOST_ELEMENTS:
            return whole(key)
        program = traced.lower().compile(compiler_options=_UNOPTIMIZED)
    except Exception:  # noqa: BLE001  # without the program in between, the error is that of `init` itself
        return init(key)
    return program(key)
