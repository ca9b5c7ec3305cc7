"""The lifecycles of a pod: worker, parameter server, standby, evaluator; and training in one process.

A `Script` checks the arguments of `train`, and makes the `Plan` of a job. `Worker`, `Server`, `Standby` and `Evaluator`
carry it out in the pod of their role; `restored` replaces a worker whose job has ended. `train_alone` trains in one
process, and `train_local` is the reference that a synchronous job must equal. `Metrics` are those of a pod.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._alone import InterruptedAt, Report, train_alone
    from ._alone_storage import AloneStorage
    from ._evaluator import Evaluator
    from ._local import train_local
    from ._metrics import Metrics
    from ._reports import OnUpdate, StopWhen, Throttle
    from ._restored import restored
    from ._script import Plan, Script, check_alone, evaluated, warn_of_several
    from ._server import Server
    from ._standby import Standby
    from ._worker import Worker
    from ._worker_end import Stopped
    from ._worker_seconds import process_age

__all__ = [
    "AloneStorage",
    "Evaluator",
    "InterruptedAt",
    "Metrics",
    "OnUpdate",
    "Plan",
    "Report",
    "Script",
    "Server",
    "Standby",
    "StopWhen",
    "Stopped",
    "Throttle",
    "Worker",
    "check_alone",
    "evaluated",
    "process_age",
    "restored",
    "train_alone",
    "train_local",
    "warn_of_several",
]

_HOMES: Final = {
    "AloneStorage": "._alone_storage",
    "Evaluator": "._evaluator",
    "InterruptedAt": "._alone",
    "Metrics": "._metrics",
    "OnUpdate": "._reports",
    "Plan": "._script",
    "Report": "._alone",
    "Script": "._script",
    "Server": "._server",
    "Standby": "._standby",
    "StopWhen": "._reports",
    "Stopped": "._worker_end",
    "Throttle": "._reports",
    "Worker": "._worker",
    "check_alone": "._script",
    "evaluated": "._script",
    "process_age": "._worker_seconds",
    "restored": "._restored",
    "train_alone": "._alone",
    "train_local": "._local",
    "warn_of_several": "._script",
}

__getattr__ = lazily(__name__, _HOMES)
