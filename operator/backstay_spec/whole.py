"""Numbers that users pass, which may be those of NumPy or JAX."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["number", "set_whole", "whole"]


def whole(value: Any) -> Any:
    """Returns the `int` of a whole number of any type, such as ``np.int64(3)`` or ``jnp.asarray(3)``.

    Everything else is returned unchanged, and so are booleans: the caller refuses them.
    """
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def number(value: Any) -> Any:
    """Returns the `float` of a real number of any type, such as ``np.float32(0.5)`` or ``jnp.asarray(0.5)``.

    Everything else is returned unchanged, and so are booleans and `int`.
    """
    if isinstance(value, bool | int | str | bytes) or value is None or getattr(value, "dtype", None) == "bool":
        return value
    try:
        return float(value)
    except (TypeError, ValueError):
        return value


def set_whole(instance: object, *names: str) -> None:
    """Replace these attributes of a frozen dataclass by `whole` of them."""
    for name in names:
        object.__setattr__(instance, name, whole(getattr(instance, name)))
