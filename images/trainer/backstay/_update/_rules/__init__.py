"""What an optax optimizer does to each leaf, so that shards can do it apart and still be exact.

An optimizer is a function over a whole tree, and a shard has only a part. `analyse` traces one update over the whole
tree's shapes and follows what every output depends on. It finds leaves that are updated element by element (they may
be cut anywhere and packed), leaves that must stay whole, leaves that must stay together, and state that no gradient
reaches, which every shard keeps for itself. What it does not understand is treated as mixing everything it reads: the
mistakes it can make cost balance, never exactness.
"""

from __future__ import annotations

from ._advice import called
from ._rule import ElementwiseProgram, Group, Program, Rule, StateProgram, WholeProgram, analyse, inner_program
from ._trace import StateSpec, key_impl

__all__ = [
    "ElementwiseProgram",
    "Group",
    "Program",
    "Rule",
    "StateProgram",
    "StateSpec",
    "WholeProgram",
    "analyse",
    "called",
    "inner_program",
    "key_impl",
]
