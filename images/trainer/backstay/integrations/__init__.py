"""Adapters that make the arguments of `backstay.train` from models of other libraries.

`backstay.integrations.nnx` (Flax NNX), `.linen` (Flax Linen) and `.equinox`. Each is imported by name, and needs its
library: ``pip install backstay[flax]`` or ``pip install backstay[equinox]``.
"""

from __future__ import annotations

from ._adapter import Adapter

__all__ = ["Adapter"]
