"""Computes the loss and gradient of a batch on the process's devices, between a worker's pull and push.

- A `Computation` makes a `ComputedContribution` from a `Start`: `GradientComputation` one gradient (`GradientFn`),
  `LocalComputation` several steps (`LocalProgram`, `LocalTraining`). `Layout` is what it needs of the wire.
- An `Encoder` encodes the blocks of a contribution while they are sent (`Sending`).
- A `Placement` puts parameters and batches on devices. `initial` calls a script's `init`. `Base` is the frozen part of
  a model.
"""

from __future__ import annotations

from ._base import Base
from ._contribution import Computation, ComputedContribution, GradientComputation, Layout, Start, Summary
from ._encoding import Encoder, Sending
from ._flops import peak_of
from ._gather import gather
from ._gradient import Gradient, GradientFn, examples_of
from ._initial import initial
from ._local_steps import AHEAD, LocalComputation, LocalProgram, LocalTraining
from ._placement import Placement, is_out_of_memory, placement_of
from ._sharding import MeshAxes, ModelSharding

__all__ = [
    "AHEAD",
    "Base",
    "Computation",
    "ComputedContribution",
    "Encoder",
    "Gradient",
    "GradientComputation",
    "GradientFn",
    "Layout",
    "LocalComputation",
    "LocalProgram",
    "LocalTraining",
    "MeshAxes",
    "ModelSharding",
    "Placement",
    "Sending",
    "Start",
    "Summary",
    "examples_of",
    "gather",
    "initial",
    "is_out_of_memory",
    "peak_of",
    "placement_of",
]
