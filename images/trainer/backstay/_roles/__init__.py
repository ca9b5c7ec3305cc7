"""Runs the lifecycle of a pod as worker, parameter server, standby or evaluator.

`Worker`, `Server`, `Standby` and `Evaluator` carry out the `ScriptPlan` of a job in the pod of their role; `restored`
replaces a worker whose job has ended. They report to the observers in `_observers`, which `_report` implements.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._ending import Stopped
    from ._evaluator import Evaluator
    from ._server import Server, ServerContext
    from ._standby import Standby
    from ._stored_result import restored
    from ._worker import Worker
    from ._worker_protocol import Exchange, Fate, WorkerProtocol

__all__ = [
    "Evaluator",
    "Exchange",
    "Fate",
    "Server",
    "ServerContext",
    "Standby",
    "Stopped",
    "Worker",
    "WorkerProtocol",
    "restored",
]

_HOMES: Final = {
    "Evaluator": "._evaluator",
    "Fate": "._worker_protocol",
    "Exchange": "._worker_protocol",
    "Server": "._server",
    "ServerContext": "._server",
    "Standby": "._standby",
    "Stopped": "._ending",
    "Worker": "._worker",
    "WorkerProtocol": "._worker_protocol",
    "restored": "._stored_result",
}

__getattr__ = lazily(__name__, _HOMES)
