"""The functions that a script passes to `train`, and the result of `evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from ..errors import ConfigurationError

__all__ = ["OnUpdate", "StopWhen", "evaluation_of", "shown"]

OnUpdate = Callable[[int, float, Mapping[str, float]], object]
"""The argument `on_update` of `train`."""

StopWhen = Callable[[Mapping[str, float]], bool]
"""The argument `stop_when` of `train`."""

MOST_METRICS: Final = 1000
"""Metrics in an evaluation, which must fit into a call and a report (`backstay_rpc.limits`)."""

_SHOWN: Final = 80


def evaluation_of(
    evaluate: Callable[..., Mapping[str, float]], params: Any, state: Any = None, *, has_state: bool = False
) -> dict[str, float]:
    """Returns the result of `evaluate`, as numbers.

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


def shown(value: object) -> str:
    """Returns a value for a message, which is cut after 80 characters."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
