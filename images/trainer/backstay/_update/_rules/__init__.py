"""Analyses what an optax optimizer does to each leaf, so that shards can do it separately with exact results.

An optimizer is a function over a whole tree, and a shard has only a part. `analyse` traces one update over the whole
tree's shapes and follows the dependencies of every output. It finds:

- leaves that are updated element by element, which may be cut anywhere and packed;
- leaves that must stay whole, and leaves that must stay together;
- state without a dependency on gradients, which every shard keeps for itself.

An unknown operation is treated as one that mixes all its inputs. So a mistake can cost balance, and never exactness.
"""

from __future__ import annotations

from ._advice import called
from ._flat import bind
from ._rule import ElementwiseProgram, Group, Program, Rule, StateProgram, WholeProgram, analyse, inner_program
from ._trace import StateSpec, Trace, key_impl, trace
from ._unchanged import only_trained, unchanged_parameters

__all__ = [
    "ElementwiseProgram",
    "Group",
    "Program",
    "Rule",
    "StateProgram",
    "StateSpec",
    "Trace",
    "WholeProgram",
    "analyse",
    "bind",
    "called",
    "inner_program",
    "key_impl",
    "only_trained",
    "trace",
    "unchanged_parameters",
]
