"""Names that a package imports when they are first used, so that a process that needs none of them starts sooner."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazily"]


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns the ``__getattr__`` of a package (PEP 562).

    Args:
        package: its name, ``__name__``.
        homes: the module of each name, relative to the package, such as ``._tree``, or another package.
    """

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(home, package), name)

    return load
