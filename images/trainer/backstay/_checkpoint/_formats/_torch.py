"""Translates names and layouts of PyTorch, in which the files of Hugging Face's libraries are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from ..._update import MODEL_STATE
from ...errors import ConfigurationError

__all__ = ["TorchNames"]

_Array = NDArray[np.generic]
_KERNEL: Final = "kernel"
_LAST: Final = {_KERNEL: "weight", "scale": "weight", "embedding": "weight"}
_LAST_OF_STATE: Final = {"mean": "running_mean", "var": "running_var"}


@dataclass(frozen=True)
class TorchNames:
    """The names and layouts that PyTorch gives to parameters named as in Flax.

    It is a `mapping` of `StartFrom`, and its method `exported` is a `translate` of `export`. It translates the last
    part of a name, and its array:

    - ``kernel`` is ``weight``. With two dimensions it is transposed: (outputs, inputs). With more, the last two come
      first, in reverse: (outputs, inputs, height, width).
    - ``scale`` and ``embedding`` are ``weight``, with the same array.
    - ``mean`` and ``var`` of the model state are ``running_mean`` and ``running_var``.
    - All others stay. Characters that names of Backstay escape, such as a dot in a key, are in the file as they are.

    Other layouts need another mapping. An example is ``Conv1D`` of GPT-2, whose weight is not transposed, or a kernel
    with a dimension for the heads.

    Attributes:
        rename: pairs of a regular expression and its replacement, as of `re.sub`, which are applied to a name in their
            order, after the last part is translated: ``[(r"^base\\.", "model."), (r"layers_(\\d+)", r"layers.\\1")]``.

    Raises:
        ConfigurationError: `rename` is not a sequence of such pairs.
    """

    rename: Sequence[tuple[str, str]] = ()

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "rename", tuple(self.rename))  # a generator has its items once
            for pair in self.rename:
                pattern, replacement = (pair,) if isinstance(pair, str) else pair  # a pair of letters is a text
                re.sub(pattern, replacement, "")
        except (TypeError, ValueError, re.error) as error:
            raise ConfigurationError(
                f"TorchNames: rename is {self.rename!r:.200} ({error}): must be a list of pairs of a regular "
                r'expression and its replacement, such as [(r"^base\.", "model.")]'
            ) from None

    def name(self, name: str) -> str:
        """Returns the name in the file.

        Args:
            name: the name of a parameter, such as ``layers.0.kernel``, or of a model state: ``state/norm.mean``.
        """
        of_state = name.startswith(MODEL_STATE)
        head, dot, last = name.removeprefix(MODEL_STATE).rpartition(".")
        found = unquote(head + dot + (_LAST_OF_STATE if of_state else _LAST).get(last, last))
        for pattern, replacement in self.rename:
            found = re.sub(pattern, replacement, found)
        return found

    def __call__(self, name: str, arrays: Mapping[str, _Array]) -> _Array | str | None:
        """Returns the value of a parameter, as `StartFrom.mapping` returns it."""
        found = self.name(name)
        if found not in arrays:
            return None
        if not _is_kernel(name):
            return found
        array = arrays[found]
        return array if array.ndim < 2 else array.transpose((*range(2, array.ndim), 1, 0))

    def exported(self, name: str, array: _Array) -> tuple[str, _Array]:
        """Returns the name and the array in the file, as `export` writes them."""
        if _is_kernel(name) and array.ndim > 1:
            array = array.transpose((array.ndim - 1, array.ndim - 2, *range(array.ndim - 2)))
        return self.name(name), array


def _is_kernel(name: str) -> bool:
    return name.rpartition(".")[2] == _KERNEL and not name.startswith(MODEL_STATE)
