"""The space of a sweep, from short forms or from Optuna's distributions."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from typing import Any

from backstay_client.errors import BadInput
from backstay_client.show.frames import needed
from backstay_spec.whole import whole

__all__ = ["as_text", "distributions_of", "example_of", "number_of_choices", "optuna"]

_VALID = (
    "must be a list of choices, (low, high), (low, high, 'log'), or a distribution of Optuna such as "
    "optuna.distributions.FloatDistribution"
)


def optuna() -> Any:
    """Returns the module `optuna`.

    Raises:
        MissingPackage: Optuna is not installed.
    """
    return needed("optuna", "a sweep", "'backstay[sweeps]'")


def distributions_of(space: Mapping[str, Any]) -> dict[str, Any]:
    """Optuna's distribution of each argument.

    Args:
        space: a list of choices; ``(low, high)`` for all numbers between, whole ones if both are whole;
            ``(low, high, "log")`` for the same on a logarithmic scale; or a distribution. For each argument by its
            name.

    Raises:
        BadInput: the space is invalid.
    """
    if not isinstance(space, Mapping) or not space:
        raise BadInput("space: is empty: must be a mapping from arguments to what they may be")
    return {name: _distribution(name, values) for name, values in space.items()}


def _distribution(name: str, values: Any) -> Any:
    kinds = optuna().distributions
    try:
        if isinstance(values, kinds.BaseDistribution):
            return values
        if isinstance(values, list):
            choices = [_plain(value) for value in values]
            for one, other in itertools.combinations(choices, 2):
                if one == other:  # Optuna does not distinguish 1, 1.0 and True
                    raise ValueError(f"{one!r} and {other!r} are equal")
            return kinds.CategoricalDistribution(choices)
        if isinstance(values, tuple) and len(values) in {2, 3} and values[2:] in {(), ("log",)}:
            low, high, log = _plain(values[0]), _plain(values[1]), len(values) == 3
            for end in (low, high):
                if isinstance(end, bool | str) or not math.isfinite(end):  # float() takes all of these
                    raise ValueError(f"{end!r} is not a finite number")
            if isinstance(low, int) and isinstance(high, int):
                return kinds.IntDistribution(low, high, log=log)
            return kinds.FloatDistribution(float(low), float(high), log=log)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadInput(f"space[{name!r}]: is {values!r}: {error}: {_VALID}") from None
    raise BadInput(f"space[{name!r}]: is {values!r}: {_VALID}")


def _plain(value: Any) -> Any:
    """Returns a number of NumPy or JAX as one of Python. Everything else is returned unchanged."""
    value = whole(value)
    return value.item() if getattr(value, "shape", None) == () else value


def example_of(distributions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one value of each argument, to check before the first trial that the function takes them."""
    return {name: one.choices[0] if hasattr(one, "choices") else one.low for name, one in distributions.items()}


def number_of_choices(distributions: Mapping[str, Any]) -> int | None:
    """Returns the number of choices of all arguments together, or None if an argument has a range."""
    if all(hasattr(one, "choices") for one in distributions.values()):
        return math.prod(len(one.choices) for one in distributions.values())
    return None


def as_text(distributions: Mapping[str, Any]) -> str:
    """Returns the space as JSON, by which a sweep recognises its own."""
    to_json = optuna().distributions.distribution_to_json
    return json.dumps({name: json.loads(to_json(one)) for name, one in sorted(distributions.items())})
