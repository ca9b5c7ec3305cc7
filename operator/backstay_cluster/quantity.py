"""Reads, compares and writes quantities (`500m`, `1Gi`) in Kubernetes' canonical form. The API server and the kubelet
use this module."""

from __future__ import annotations

import re
from decimal import ROUND_UP, Decimal
from typing import Final

PATTERN: Final = r"^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$"
_DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY: Final = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}


def _split(text: str) -> tuple[Decimal, str]:
    found = re.fullmatch(r"([+-]?(?:\d+\.?\d*|\.\d+))(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?", text)
    if found is None:
        raise ValueError(
            f"{text!r} is not a quantity: must be a number with an optional suffix, such as 500m, 2 or 1Gi; quantities "
            f"must match the regular expression '{PATTERN}'"
        )
    return Decimal(found[1]), found[2] or ""


def value(amount: str | int | float) -> Decimal:
    """Returns the number that a quantity represents.

    Args:
        amount: the quantity, such as ``500m``, ``1Gi``, ``2e3`` or 4.

    Raises:
        ValueError: the text is not a quantity.
    """
    number, suffix = _split(str(amount).strip())
    if suffix in _BINARY:
        return number * Decimal(2 ** _BINARY[suffix])
    if suffix in _DECIMAL:
        return number.scaleb(_DECIMAL[suffix])
    return number.scaleb(int(suffix[1:]))


def canonical(text: str) -> str:
    """Returns the form in which the API returns a quantity: no fraction, the largest suffix that allows that.

    Raises:
        ValueError: the text is not a quantity.
    """
    number, suffix = _split(text)
    amount = value(text)
    if amount == 0:
        return "0"
    if suffix in _BINARY and amount % 1 == 0:
        for name, power in reversed(_BINARY.items()):
            if amount % 2**power == 0:
                return f"{int(amount) >> power}{name}" if amount > 0 else f"-{int(-amount) >> power}{name}"
        return str(int(amount))
    amount = amount.quantize(Decimal("1e-9"), rounding=ROUND_UP)
    if suffix[:1] in {"e", "E"} and suffix != "E":
        for power in (18, 15, 12, 9, 6, 3):
            if amount.scaleb(-power) % 1 == 0:
                return f"{int(amount.scaleb(-power))}e{power}"
    for name, power in sorted(_DECIMAL.items(), key=lambda item: -item[1]):
        scaled = amount.scaleb(-power)
        if scaled % 1 == 0:
            return f"{int(scaled)}{name}"
    return str(number)  # pragma: no cover  # nano is the smallest unit and divides every rounded amount
