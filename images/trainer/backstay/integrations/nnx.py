"""Makes the arguments of `backstay.train` from Flax NNX models (`adapt`). Needs ``pip install backstay[flax]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ..errors import ConfigurationError
from ._adapter import Adapter, Path, check_function, frozen_beside, nest, pick, scalar_and_metrics

__all__ = ["adapt"]


def adapt(
    make: Callable[[nnx.Rngs], Any] | nnx.Module,
    loss: Callable[..., Any],
    evaluate: Callable[[Any], Mapping[str, float]] | None = None,
    *,
    trained: Any = nnx.Param,
    has_rngs: bool = False,
    frozen: Any = None,
    frozen_state: Any = None,
) -> Adapter:
    """Make the arguments of `train` from an NNX model.

    Variables of the type `trained` are the parameters. Other variables of the type ``nnx.Param`` are frozen parameters.
    All other variables, such as batch statistics, are the model state. Streams of random numbers are neither: each step
    seeds all streams of the model from the key of the step. Variables that the forward pass adds to the model, such as
    intermediates, are dropped. A variable that occurs several times in the model is one parameter.

    Args:
        make: ``make(rngs)`` returns the model; or a model, whose values training starts from.
        loss: ``loss(model, batch)`` returns a scalar, or ``(scalar, {name: scalar})``; `model` is in training mode
            (``model.train()``). It may change the model's state.
        evaluate: ``evaluate(model)`` returns ``{name: number}``; `model` is in evaluation mode (``model.eval()``).
        trained: an NNX filter, such as ``nnx.LoRAParam``. The variables that it does not select are not trained. Batch
            statistics and streams of random numbers are never trained, even if it selects them.
        has_rngs: whether `loss` gets an ``nnx.Rngs`` of the step as its last argument, for models that take it when
            they are called.
        frozen: as in `train`, of the variables that `trained` selects; names are such as ``body.kernel``.
        frozen_state: as in `train`; names are such as ``bn.mean``.

    Raises:
        ConfigurationError: `make`, `loss` or `evaluate` is something else.
    """
    check_function("loss", loss)
    check_function("evaluate", evaluate, optional=True)
    if not isinstance(make, nnx.Module):
        check_function("make", make)
    model = _NnxModel(make, trained)

    def loss_of(params: Any, *rest: Any) -> Any:
        values = list(rest)
        key: Any = values.pop() if model.has_rng or has_rngs else None
        batch = values.pop()
        net = model.merge(params, values[0] if values else {}, key)
        net.train()
        own = () if not has_rngs else (nnx.Rngs(jax.random.fold_in(key, model.streams)),)
        scalar, metrics = scalar_and_metrics(loss(net, batch, *own))
        return (scalar, model.state_of(net), metrics) if model.has_state else (scalar, metrics)

    def rebuild(params: Any, state: Any = None) -> Any:
        net = model.merge(params, {} if state is None else state, None)
        net.eval()
        return net

    def evaluation(params: Any, state: Any = None) -> Mapping[str, float]:
        assert evaluate is not None
        return evaluate(rebuild(params, state))

    return Adapter(
        init=model.init,
        loss=loss_of,
        evaluate=None if evaluate is None else evaluation,
        has_state=model.has_state,
        has_rng=model.has_rng or has_rngs,
        model=rebuild,
        frozen=frozen_beside(model.fixed, frozen),
        frozen_state=frozen_state,
    )


class _NnxModel:
    """A model's graph without its values, and where those are in trees of dicts."""

    def __init__(self, make: Any, trained: Any) -> None:
        self._make = make
        # A filter by path also selects the statistics and the streams of the layers there. No gradient trains those.
        own = nnx.All(trained, nnx.Not(nnx.Any(nnx.RngState, nnx.BatchStat)))
        self._filters = (own, nnx.RngState, nnx.Param, ...)
        # A typed key, because an integer would be the seed of every stream.
        abstract = nnx.eval_shape(lambda: self._new(jax.random.key(0)))
        if not isinstance(abstract, nnx.Module):
            raise ConfigurationError(f"make returned {type(abstract).__name__}: must return an nnx.Module")
        self._graph, *self._templates = nnx.split(abstract, *self._filters)
        params, rngs, fixed, rest = ([path for path, _ in nnx.to_flat_state(each)] for each in self._templates)
        self._params: list[Path] = params
        self._rngs: list[Path] = rngs
        self._fixed: list[Path] = fixed
        self._rest: list[Path] = rest
        if not params:
            raise ConfigurationError(f"the model has no variables that {trained} selects: nothing can be trained")

    @property
    def fixed(self) -> dict[Any, Any]:
        """For each parameter, whether it is one that `trained` does not select."""
        flags = [False] * len(self._params) + [True] * len(self._fixed)
        return nest([*self._params, *self._fixed], flags)

    @property
    def has_state(self) -> bool:
        return bool(self._rest)

    @property
    def has_rng(self) -> bool:
        return bool(self._rngs)

    @property
    def streams(self) -> int:
        """The number of variables of random numbers."""
        return len(self._rngs)

    def init(self, key: Any) -> Any:
        _, params, _, fixed, rest = nnx.split(self._new(key), *self._filters)
        arrays = [*_values(params, self._params), *_values(fixed, self._fixed)]
        values = nest([*self._params, *self._fixed], arrays)
        return (values, nest(self._rest, _values(rest, self._rest))) if self.has_state else values

    def merge(self, params: Any, state: Any, key: Any) -> Any:
        """Returns the model with these values. `key` is that of its streams of random numbers, or None for any."""
        if key is None:
            key = jax.random.key(0)
        values = [pick(params, self._params), self._seeds(key), pick(params, self._fixed), pick(state, self._rest)]
        paths = [self._params, self._rngs, self._fixed, self._rest]
        states = [_filled(*each) for each in zip(self._templates, paths, values, strict=True)]
        return nnx.merge(self._graph, *states)

    def state_of(self, model: Any) -> dict[Any, Any]:
        """Returns the state of `model`, without the variables that were not in it at first."""
        *_, rest = nnx.split(model, *self._filters)
        return nest(self._rest, _values(rest, self._rest))

    def _new(self, key: Any) -> Any:
        return nnx.clone(self._make) if isinstance(self._make, nnx.Module) else self._make(nnx.Rngs(key))

    def _seeds(self, key: Any) -> list[Any]:
        seeds = []
        for number, (_, variable) in enumerate(nnx.to_flat_state(self._templates[1])):
            value = variable.get_value()
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                seeds.append(jnp.zeros(value.shape, value.dtype))  # the count of keys that were drawn
                continue
            own = jax.random.fold_in(key, number)
            seeds.append(jax.random.split(own, value.shape) if value.shape else own)
        return seeds


def _values(state: Any, paths: list[Path]) -> list[Any]:
    flat = dict(nnx.to_flat_state(state))
    return [flat[path].get_value() for path in paths]


def _filled(template: Any, paths: list[Path], values: list[Any]) -> Any:
    """Returns a state like `template` with other values."""
    flat = dict(nnx.to_flat_state(template))
    return nnx.from_flat_state([(path, flat[path].replace(value)) for path, value in zip(paths, values, strict=True)])
