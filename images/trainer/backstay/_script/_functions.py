"""Checks the functions that a script passes to `train`, and what `evaluate` returns."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from ..errors import ConfigurationError

__all__ = ["OnUpdate", "StopWhen", "check_calls", "evaluation_of", "shown"]

OnUpdate = Callable[[int, float, Mapping[str, float]], object]
"""The argument `on_update` of `train`."""

StopWhen = Callable[[Mapping[str, float]], bool]
"""The argument `stop_when` of `train`."""

MOST_METRICS: Final = 1000
"""Metrics in an evaluation, which must fit into a call and a report (`backstay_rpc.limits`)."""

_SHOWN: Final = 80

_NOT_ORDINARY: Final = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def evaluation_of(
    evaluate: Callable[..., Mapping[str, float]], params: Any, state: Any = None, *, has_state: bool = False
) -> dict[str, float]:
    """The result of `evaluate`, as numbers.

    Args:
        evaluate: a function of `params`, or with `has_state` of `params` and `state`.

    Raises:
        ConfigurationError: the result is not a mapping of names to numbers, or `evaluate` called `sys.exit`.
        Exception: any that `evaluate` raises.
    """
    from .._update import check_metric_name

    try:
        returned = evaluate(params, state) if has_state else evaluate(params)
    except SystemExit as left:
        raise ConfigurationError(
            f"evaluate called sys.exit({shown(left.code)}): must return {{name: number}}. Only stop_when ends "
            "training early"
        ) from None
    if not isinstance(returned, Mapping):
        raise ConfigurationError(f"evaluate returned {type(returned).__name__}: must be {{name: number}}")
    if len(returned) > MOST_METRICS:
        raise ConfigurationError(f"evaluate returned {len(returned)} metrics: must be at most {MOST_METRICS}")
    metrics: dict[str, float] = {}
    for name, value in returned.items():
        text = str(name)
        check_metric_name("evaluate returned", text)
        try:
            metrics[text] = float(value)
        except (TypeError, ValueError, OverflowError):
            raise ConfigurationError(
                f"evaluate returned {shown(text)}: {type(value).__name__}: must be a number"
            ) from None
    return metrics


def check_calls(functions: Mapping[str, Any], *, has_state: bool, has_rng: bool) -> None:
    """Check that the functions of a script can have the arguments with which they are called.

    Args:
        functions: the functions by the names of the arguments of `train`. Other arguments may be among them.

    Raises:
        ConfigurationError: one cannot.
    """
    state, key = ("state",) * has_state, ("key",) * has_rng
    calls = {
        "init": ("key",),
        "loss": ("params", *state, "batch", *key),
        "batches": ("key",),
        "evaluate": ("params", *state),
        "on_update": ("step", "loss", "metrics"),
        "stop_when": ("metrics",),
    }
    for name, arguments in calls.items():
        function = functions[name]
        if not _is_plain(function):
            continue
        for kind, is_kind in _NOT_ORDINARY.items():
            if is_kind(function):
                raise ConfigurationError(f"{name} is {kind}: must be an ordinary function, which returns its result")
        try:
            inspect.signature(function, follow_wrapped=False).bind(*arguments)
        except (TypeError, ValueError) as error:  # the second one is about the arguments of a partial function
            raise ConfigurationError(
                f"{name} is called as {name}({', '.join(arguments)}), and cannot be: {error}"
            ) from None


def _is_plain(function: object) -> bool:
    """Whether the signature of a callable is its own. Another one's may be that of the function that it wraps."""
    if type(function) is partial:
        return not hasattr(function, "__signature__") and _is_plain(function.func)
    if inspect.ismethod(function):
        return _is_plain(function.__func__)
    return inspect.isfunction(function) and not hasattr(function, "__signature__")


def shown(value: object) -> str:
    """A value for a message, which is cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
