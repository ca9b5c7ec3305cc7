"""Answers requests with a trained model, from its newest complete checkpoint (`backstay.serve`).

- `_serve`: the function, and the lifecycle of the process; `_settings`: its ports, bounds and environment variables.
- `_signature`: the names, shapes and dtypes of tensors; `_program`: `predict`, compiled for padded batches.
- `_choice`: which checkpoint to serve; `_follower`: loads it, checks it, and replaces the version that is served.
- `_batcher`: the queue of requests, the batches that one thread computes, and the reasons to refuse a request.
- `_protocol`: the Open Inference Protocol v2 as arrays; `_rest` and `_grpc` receive requests, `_connections` within
  bounds, and `_endpoints` runs both; `_inference`: calls, on their way to a batch and back.
- `_metrics`: the metrics of a serving process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._serve import serve
    from ._settings import ServingPorts

__all__ = ["ServingPorts", "serve"]

_HOMES: Final = {"ServingPorts": "._settings", "serve": "._serve"}

__getattr__ = lazily(__name__, _HOMES)
