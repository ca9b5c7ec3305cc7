"""Makes the arguments of `backstay.train` from Flax Linen models (`adapt`). Needs ``pip install backstay[flax]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from flax.core import meta, unfreeze

from ..errors import ConfigurationError
from ._adapter import Adapter, check_function, scalar_and_metrics

__all__ = ["LinenModule", "adapt"]

_PARAMS = "params"


class LinenModule:
    """A Linen module with its variables, called as ``module.apply`` is called, without the variables.

    Attributes:
        module: the module.
        params: its parameters.
        state: its other collections, by name, as of the last call.
    """

    def __init__(self, module: nn.Module, params: Any, state: Mapping[str, Any], rngs: Any, *, mutable: bool) -> None:
        self.module = module
        self.params = params
        self.state = dict(state)
        self._rngs = rngs
        self._mutable = mutable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module. In training the collections of the state change, in evaluation they do not.

        Each call in training gets other random numbers.
        """
        variables = {_PARAMS: self.params, **self.state}
        if not self._mutable:
            return self.module.apply(variables, *args, **kwargs)
        rngs, self._rngs = self._rngs, {name: jax.random.fold_in(key, 1) for name, key in self._rngs.items()}
        made, changed = self.module.apply(variables, *args, rngs=rngs, mutable=list(self.state), **kwargs)
        self.state.update(unfreeze(changed))
        return made


def adapt(
    module: nn.Module,
    loss: Callable[[LinenModule, Any], Any],
    evaluate: Callable[[LinenModule], Mapping[str, float]] | None = None,
    *,
    example: Sequence[Any],
    options: Mapping[str, Any] | None = None,
    rngs: Sequence[str] = ("dropout",),
    frozen: Any = None,
    frozen_state: Any = None,
) -> Adapter:
    """Make the arguments of `train` from a Linen module.

    The collection ``params`` are the parameters; the other collections that ``module.init`` makes, such as
    ``batch_stats``, are the model state.

    Args:
        module: the model.
        loss: ``loss(net, batch)`` returns a scalar, or ``(scalar, {name: scalar})``. ``net(x, train=True)`` calls the
            module with its variables and keeps the new state; see `LinenModule`.
        evaluate: ``evaluate(net)`` returns ``{name: number}``; calls of `net` do not change the state.
        example: positional arguments for ``module.init``, of the shapes and dtypes that the module is called with.
        options: keyword arguments for ``module.init``.
        rngs: names of the streams of random numbers that the module reads, besides ``params``. Their keys are of the
            key of the step.
        frozen: as in `train`; names are such as ``dense.kernel``, without ``params``.
        frozen_state: as in `train`; names are such as ``batch_stats.bn.mean``.

    Raises:
        ConfigurationError: an argument is something else, or the module has no parameters.
    """
    check_function("loss", loss)
    check_function("evaluate", evaluate, optional=True)
    if not isinstance(module, nn.Module):
        raise ConfigurationError(f"module is {type(module).__name__}: must be a flax.linen.Module")
    if isinstance(rngs, str) or not all(isinstance(name, str) for name in rngs):
        raise ConfigurationError(f"rngs is {rngs!r}: must be a sequence of names, such as ('dropout',)")
    names = tuple(rngs)

    def keys_of(key: Any, first: int = 0) -> dict[str, Any]:
        return {name: jax.random.fold_in(key, first + number) for number, name in enumerate(names)}

    def variables_of(key: Any) -> tuple[Any, dict[str, Any]]:
        made = module.init({_PARAMS: key, **keys_of(key, 1)}, *example, **(options or {}))
        # Metadata about the layout over devices is not a part of the arrays.
        variables = dict(unfreeze(meta.unbox(made)))
        return variables.pop(_PARAMS, {}), variables

    params, state = jax.eval_shape(variables_of, jax.random.key(0))
    if not jax.tree.leaves(params):
        raise ConfigurationError("module.init made no parameters: nothing can be trained")
    has_state = bool(jax.tree.leaves(state))

    def init(key: Any) -> Any:
        params, state = variables_of(key)
        return (params, state) if has_state else params

    def loss_of(params: Any, *rest: Any) -> Any:
        values = list(rest)
        key = values.pop() if names else None
        batch = values.pop()
        net = LinenModule(module, params, values[0] if values else {}, keys_of(key) if names else {}, mutable=True)
        scalar, metrics = scalar_and_metrics(loss(net, batch))
        return (scalar, net.state, metrics) if has_state else (scalar, metrics)

    def rebuild(params: Any, state: Any = None) -> LinenModule:
        return LinenModule(module, params, state or {}, {}, mutable=False)

    def evaluation(params: Any, state: Any = None) -> Mapping[str, float]:
        assert evaluate is not None
        return evaluate(rebuild(params, state))

    return Adapter(
        init=init,
        loss=loss_of,
        evaluate=None if evaluate is None else evaluation,
        has_state=has_state,
        has_rng=bool(names),
        model=rebuild,
        frozen=frozen,
        frozen_state=frozen_state,
    )
