"""Runs the lifecycle of a pod as worker, parameter server, standby or evaluator.

A `Script` checks the arguments of `train`, and makes the `ScriptPlan` of a job. `Worker`, `Server`, `Standby` and
`Evaluator` carry it out in the pod of their role; `restored` replaces a worker whose job has ended. They report to the
observers in `_observers`, which `_report` implements.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._beginning import on_processor
    from ._ending import Stopped
    from ._evaluator import Evaluator
    from ._observers import OnUpdate, StopWhen
    from ._restored import restored
    from ._script import Script, ScriptPlan, check_alone, epochs_of, evaluated, evaluation_of, warn_of_plan
    from ._server import Server, ServerContext
    from ._standby import Standby
    from ._worker import Worker
    from ._worker_protocol import Exchange, Fate, WorkerProtocol

__all__ = [
    "Evaluator",
    "Exchange",
    "Fate",
    "OnUpdate",
    "Script",
    "ScriptPlan",
    "Server",
    "ServerContext",
    "Standby",
    "StopWhen",
    "Stopped",
    "Worker",
    "WorkerProtocol",
    "check_alone",
    "epochs_of",
    "evaluated",
    "evaluation_of",
    "on_processor",
    "restored",
    "warn_of_plan",
]

_HOMES: Final = {
    "Evaluator": "._evaluator",
    "Fate": "._worker_protocol",
    "OnUpdate": "._observers",
    "Exchange": "._worker_protocol",
    "ScriptPlan": "._script",
    "Script": "._script",
    "Server": "._server",
    "ServerContext": "._server",
    "Standby": "._standby",
    "StopWhen": "._observers",
    "Stopped": "._ending",
    "Worker": "._worker",
    "WorkerProtocol": "._worker_protocol",
    "check_alone": "._script",
    "epochs_of": "._script",
    "evaluated": "._script",
    "evaluation_of": "._script",
    "on_processor": "._beginning",
    "restored": "._restored",
    "warn_of_plan": "._script",
}

__getattr__ = lazily(__name__, _HOMES)
