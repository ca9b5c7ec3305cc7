"""Train JAX models on Kubernetes with parameter servers, and keep training when pods die.

    import backstay, jax, optax

    result = backstay.train(init=init, loss=loss, batches=batches, optimizer=optax.adam(1e-3), steps=500)

The same script trains in one process without a cluster, and becomes a parameter server, a worker or an evaluator
inside a job's pod. Names are loaded when they are first used, because a replacement's start-up is lost training time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

from ._lazy import lazily
from ._version import __version__ as __version__

if TYPE_CHECKING:
    from backstay_client import AsyncClient, Client

    from . import errors
    from ._checkpoint import Checkpoint, StartFrom, StoreTo, TorchNames, export, load
    from ._compute import gather
    from ._data import BatchKey, TokenFile, from_dataset, from_iterator
    from ._result import History, Result
    from ._serving import ServingPorts, serve
    from ._train import initialize, train
    from ._update import LocalSteps, Wire, outer_optimizer
    from .errors import BackstayError

__all__ = [
    "AsyncClient",
    "BackstayError",
    "BatchKey",
    "Checkpoint",
    "Client",
    "History",
    "LocalSteps",
    "Result",
    "ServingPorts",
    "StartFrom",
    "StoreTo",
    "TokenFile",
    "TorchNames",
    "Wire",
    "errors",
    "export",
    "from_dataset",
    "from_iterator",
    "gather",
    "initialize",
    "load",
    "outer_optimizer",
    "serve",
    "train",
]

_HOMES: Final = {
    "AsyncClient": "backstay_client",
    "Client": "backstay_client",
    "BackstayError": ".errors",
    "BatchKey": "._data",
    "Checkpoint": "._checkpoint",
    "LocalSteps": "._update",
    "History": "._result",
    "Result": "._result",
    "ServingPorts": "._serving",
    "StartFrom": "._checkpoint",
    "StoreTo": "._checkpoint",
    "TokenFile": "._data",
    "TorchNames": "._checkpoint",
    "export": "._checkpoint",
    "Wire": "._update",
    "from_dataset": "._data",
    "from_iterator": "._data",
    "gather": "._compute",
    "initialize": "._train",
    "load": "._checkpoint",
    "outer_optimizer": "._update",
    "serve": "._serving",
    "train": "._train",
}

_load = lazily(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    return importlib.import_module(".errors", __name__) if name == "errors" else _load(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
