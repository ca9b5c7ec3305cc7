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
    from ._alone import Report, train_alone
    from ._epochs import epochs_of
    from ._evaluator import Evaluator
    from ._local import train_local
    from ._metrics import Metrics
    from ._reports import OnUpdate, StopWhen, Throttle
    from ._restored import restored
    from ._script import Plan, Script, evaluation_of
    from ._server import Server
    from ._standby import Standby
    from ._worker import Worker
    from ._worker_end import Stopped
    from ._worker_seconds import process_age

__all__ = [
    "Evaluator",
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
    "epochs_of",
    "evaluation_of",
    "process_age",
    "restored",
    "train_alone",
    "train_local",
]

_HOMES: Final = {
    "Evaluator": "._evaluator",
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
    "epochs_of": "._epochs",
    "evaluation_of": "._script",
    "process_age": "._worker_seconds",
    "restored": "._restored",
    "train_alone": "._alone",
    "train_local": "._local",
}

__getattr__ = lazily(__name__, _HOMES)
