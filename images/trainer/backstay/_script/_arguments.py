"""Checks the arguments of `train`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from backstay_spec.whole import number, set_whole

from .._update import LocalSteps
from ..errors import ConfigurationError
from ._functions import shown

__all__ = ["check_arguments"]

_FLAGS: Final = ("has_state", "has_rng", "deterministic")
_OPTIONAL: Final = ("evaluate_every", "clip_norm", "average")
_WHOLE: Final[dict[str, tuple[int, float, str]]] = {
    "evaluate_every": (1, math.inf, "a whole number of updates, 1 or more"),
    "steps": (0, math.inf, "a whole number of updates, 0 or more"),
    "seed": (0, 2**32 - 1, "a whole number from 0 to 2**32 - 1"),
}
_NUMBERS: Final[dict[str, tuple[Callable[[float], bool], str]]] = {
    "clip_norm": (lambda value: 0.0 < value < math.inf, "a positive number, or None not to clip"),
    "average": (
        lambda value: 0.0 < value < 1.0,
        "the decay of the moving average, more than 0 and less than 1, such as 0.999",
    ),
    "log_every": (lambda value: 0.0 <= value < math.inf, "a number of seconds, 0 or more"),
}

_NOT_ORDINARY: Final = {
    "an async function": inspect.iscoroutinefunction,
    "an async generator": inspect.isasyncgenfunction,
    "a generator": inspect.isgeneratorfunction,
}


def check_arguments(script: Any) -> None:
    """Check the arguments of `train`, and replace the numbers and booleans of other libraries by those of Python.

    Args:
        script: a frozen dataclass with the arguments, as `Script` is.

    Raises:
        ConfigurationError: one is invalid, or needs another one that was left out.
    """
    _check_functions(script)
    _check_objects(script)
    _check_flags(script)
    _check_calls(script)
    _check_numbers(script)


def _check_functions(script: Any) -> None:
    for name in ("init", "loss", "batches"):
        if not callable(value := getattr(script, name)):
            hint = ", such as backstay.from_dataset(data, batch_size=32) makes" if name == "batches" else ""
            raise ConfigurationError(f"{name} is {type(value).__name__}: must be a function{hint}")
    for name in ("evaluate", "on_update", "stop_when"):
        if (value := getattr(script, name)) is not None and not callable(value):
            raise ConfigurationError(f"{name} is {type(value).__name__}: must be a function, or None")
    if script.stop_when is not None and script.evaluate is None:
        raise ConfigurationError("stop_when needs evaluations, but train was called without evaluate")
    if script.evaluate_every is not None and script.evaluate is None:
        raise ConfigurationError("evaluate_every is given without evaluate: give both, or leave it out")


def _check_objects(script: Any) -> None:
    optimizer, local = script.optimizer, script.local
    if not (callable(getattr(optimizer, "init", None)) and callable(getattr(optimizer, "update", None))):
        raise ConfigurationError(
            f"optimizer is {type(optimizer).__name__}: must be an optax.GradientTransformation, such as "
            "optax.adam(1e-3)"
        )
    if local is not None and not isinstance(local, LocalSteps):
        raise ConfigurationError(f"local is {type(local).__name__}: must be backstay.LocalSteps, or None")


def _check_flags(script: Any) -> None:
    for name in (*_FLAGS, "frozen", "frozen_state"):
        value = getattr(script, name)
        kind = type(value)
        if kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_"):  # which may not be imported yet
            object.__setattr__(script, name, bool(value))
        elif name in _FLAGS and kind is not bool:
            raise ConfigurationError(f"{name} is {shown(value)}: must be True or False")


def _check_calls(script: Any) -> None:
    """The functions can have the arguments with which they are called."""
    state, key = ("state",) * script.has_state, ("key",) * script.has_rng
    calls = {
        "init": ("key",),
        "loss": ("params", *state, "batch", *key),
        "batches": ("key",),
        "evaluate": ("params", *state),
        "on_update": ("step", "loss", "metrics"),
        "stop_when": ("metrics",),
    }
    for name, arguments in calls.items():
        function = getattr(script, name)
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


def _check_numbers(script: Any) -> None:
    set_whole(script, *_WHOLE)
    for name in (*_WHOLE, *_NUMBERS):
        value = number(getattr(script, name)) if name in _NUMBERS else getattr(script, name)
        if value is None and name in _OPTIONAL:
            continue
        if name in _WHOLE:
            low, high, valid = _WHOLE[name]
            fits = isinstance(value, int) and low <= value <= high
        else:
            in_range, valid = _NUMBERS[name]
            fits = isinstance(value, int | float) and in_range(value)
        if not fits or isinstance(value, bool):
            raise ConfigurationError(f"{name} is {shown(value)}: must be {valid}")
        object.__setattr__(script, name, value)


def _is_plain(function: object) -> bool:
    """Returns whether the signature of a callable is its own. Another one's may be that of the function that it
    wraps."""
    if type(function) is partial:
        return not hasattr(function, "__signature__") and _is_plain(function.func)
    if inspect.ismethod(function):
        return _is_plain(function.__func__)
    return inspect.isfunction(function) and not hasattr(function, "__signature__")
