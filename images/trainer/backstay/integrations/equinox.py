"""Makes the arguments of `backstay.train` from Equinox models (`adapt`). Needs ``pip install backstay[equinox]``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax

from ..errors import ConfigurationError
from ._adapter import Adapter, Path, cast, check_function, frozen_beside, keys_of, nest, pick, scalar_and_metrics

__all__ = ["adapt"]


def adapt(
    make: Any,
    loss: Callable[..., Any],
    evaluate: Callable[..., Mapping[str, float]] | None = None,
    *,
    has_rng: bool = False,
    trained: Any = eqx.is_inexact_array,
    compute_dtype: Any = None,
    frozen: Any = None,
    frozen_state: Any = None,
) -> Adapter:
    """Make the arguments of `train` from an Equinox model.

    The arrays that `trained` selects are the parameters. The model's other arrays are frozen parameters. An
    ``eqx.nn.State`` is the model state. An array that occurs several times in the model is one parameter, as
    with ``eqx.nn.Shared``. All other fields, functions and sizes for example, are what `make` gives them.

    Args:
        make: ``make(key)`` returns the model, or ``(model, state)`` as ``eqx.nn.make_with_state`` does; or such a model
            or pair, whose values training starts from.
        loss: ``loss(model, batch)`` returns a scalar, or ``(scalar, {name: scalar})``. Where `make` returns a state,
            ``loss(model, state, batch)`` returns ``(scalar, new_state)``, or ``(scalar, new_state, {name: scalar})``.
            With `has_rng` a key is its last argument.
        evaluate: ``evaluate(model)``, or ``evaluate(model, state)``, returns ``{name: number}``; the model is in
            inference mode (``eqx.nn.inference_mode``).
        has_rng: whether `loss` gets a random key, such as for dropout.
        trained: what ``eqx.partition`` takes: a function of a leaf, or a tree of booleans.
        compute_dtype: a floating-point dtype, in which `loss` gets the floating-point arrays of the parameters and the
            batch. Gradients and updates keep the parameters' dtype. Arrays that `trained` does not select keep their
            dtype too. None: as they are.
        frozen: as in `train`, of the arrays that `trained` selects; names are such as ``layers.0.weight``.
        frozen_state: as in `train`, of the arrays of the ``eqx.nn.State``.

    Raises:
        ConfigurationError: an argument is something else, or the model has no parameters.
    """
    check_function("loss", loss)
    check_function("evaluate", evaluate, optional=True)
    model = _EquinoxModel(make, trained)

    def loss_of(params: Any, *rest: Any) -> Any:
        values = list(rest)
        key = values.pop() if has_rng else None
        batch = values.pop()
        held = values[0] if values else {}
        net, state = model.merge(params, held, compute_dtype)
        arguments = [net, *([state] if model.stateful else []), cast(batch, compute_dtype)]
        result = loss(*arguments, *([key] if has_rng else []))
        if not model.stateful:
            return scalar_and_metrics(result)
        if not isinstance(result, tuple) or len(result) < 2 or not isinstance(result[1], eqx.nn.State):
            raise ConfigurationError(
                "loss returned no state: for a model with a state it must be (scalar, new_state), or "
                "(scalar, new_state, {name: scalar})"
            )
        scalar, metrics = scalar_and_metrics((result[0], *result[2:]) if len(result) > 2 else result[0])
        return scalar, model.state_of(result[1]), metrics

    def rebuild(params: Any, state: Any = None) -> Any:
        net, own = model.merge(params, state or {})
        net = eqx.nn.inference_mode(net)
        return (net, own) if model.stateful else net

    def evaluation(params: Any, state: Any = None) -> Mapping[str, float]:
        assert evaluate is not None
        made = rebuild(params, state)
        return evaluate(*made) if model.stateful else evaluate(made)

    return Adapter(
        init=model.init,
        loss=loss_of,
        evaluate=None if evaluate is None else evaluation,
        has_state=model.stateful,
        has_rng=has_rng,
        model=rebuild,
        frozen=frozen_beside(model.fixed, frozen),
        frozen_state=frozen_state,
    )


class _EquinoxModel:
    """A model without its arrays, and where those are in trees of dicts.

    Attributes:
        stateful: whether the model has an ``eqx.nn.State``.
    """

    def __init__(self, make: Any, trained: Any) -> None:
        self._make = make if callable(make) and not isinstance(make, eqx.Module) else lambda key: make
        self._trained = trained
        found: list[tuple[list[int], list[bool]]] = []

        def record(key: Any) -> Any:
            pair = self._new(key)
            found.append(self._examine(pair))
            return pair

        self._template = eqx.filter_eval_shape(record, jax.random.key(0))
        self.stateful = self._template[1] is not None
        first, is_trained = found[0]
        arrays = [
            keys_of(path)
            for path, leaf in jax.tree_util.tree_leaves_with_path(self._template[0])
            if isinstance(leaf, jax.ShapeDtypeStruct)
        ]
        self._first = first  # of each array of the model, the first array that is the same
        self._own = [index for index, same in enumerate(first) if same == index]
        self._names: list[Path] = [arrays[index] for index in self._own]
        self._fixed = frozenset(index for index in self._own if not is_trained[index])
        self._states: list[Path] = []
        if self.stateful:
            self._states = [
                (str(marker), *keys_of(path))
                for marker, value in _items(self._template[1])
                for path, _ in jax.tree_util.tree_leaves_with_path(value)
            ]
        if len(self._fixed) == len(self._own):
            raise ConfigurationError("the model has no arrays that `trained` selects: nothing can be trained")

    @property
    def fixed(self) -> dict[Any, Any]:
        """For each parameter, whether it is one that `trained` does not select."""
        return nest(self._names, [index in self._fixed for index in self._own])

    def init(self, key: Any) -> Any:
        model, state = self._new(key)
        arrays = [leaf for leaf in jax.tree.leaves(model) if eqx.is_array(leaf)]
        params = nest(self._names, [arrays[index] for index in self._own])
        return (params, self.state_of(state)) if self.stateful else params

    def merge(self, params: Any, held: Mapping[str, Any], dtype: Any = None) -> tuple[Any, Any]:
        """Returns the model and its ``eqx.nn.State``, or None. `dtype`: of the floating-point arrays that `trained`
        selects."""
        values = dict(zip(self._own, pick(params, self._names), strict=True))
        values |= {index: cast(values[index], dtype) for index in self._own if index not in self._fixed}
        model = _filled(self._template[0], [values[same] for same in self._first])
        state = _filled(self._template[1], pick(held["state"], self._states)) if self.stateful else None
        return model, state

    def state_of(self, state: Any) -> dict[str, Any]:
        """Returns the model state, out of an ``eqx.nn.State``."""
        return {"state": nest(self._states, jax.tree.leaves(state))}

    def _new(self, key: Any) -> tuple[Any, Any]:
        made = self._make(key)
        if isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], eqx.nn.State):
            return made
        return made, None

    def _examine(self, pair: tuple[Any, Any]) -> tuple[list[int], list[bool]]:
        """Returns the index of the first equal array for each array of the model, and whether each array is trained."""
        model, _ = pair
        chosen, _ = eqx.partition(model, self._trained)
        marks = jax.tree.leaves(
            jax.tree.map(lambda leaf, own: own is not None, model, chosen, is_leaf=lambda leaf: leaf is None)
        )
        every = jax.tree.leaves(model, is_leaf=lambda leaf: leaf is None)
        pairs = [(leaf, mark) for leaf, mark in zip(every, marks, strict=True) if eqx.is_array(leaf)]
        seen: dict[int, int] = {}
        return [seen.setdefault(id(leaf), index) for index, (leaf, _) in enumerate(pairs)], [mark for _, mark in pairs]


def _items(state: Any) -> list[tuple[Any, Any]]:
    """Returns the markers and values of an ``eqx.nn.State``, in the order of its leaves."""
    values, markers = state.tree_flatten()
    return list(zip(markers, values, strict=True))


def _filled(template: Any, arrays: list[Any]) -> Any:
    """`template` with `arrays` in place of its abstract ones."""
    leaves, treedef = jax.tree.flatten(template)
    remaining = iter(arrays)
    return jax.tree.unflatten(
        treedef, [next(remaining) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf for leaf in leaves]
    )
