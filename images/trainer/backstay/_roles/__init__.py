"""The lifecycles of a pod: worker, parameter server, standby, evaluator.

A `Script` checks the arguments of `train`, and makes the `Plan` of a job. `Worker`, `Server`, `Standby` and `Evaluator`
carry it out in the pod of their role; `restored` replaces a worker whose job has ended.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._continued import log_continued
    from ._epochs import epochs_of
    from ._evaluator import Evaluator
    from ._manifests import Identity, ManifestStorage
    from ._restored import restored
    from ._script import Plan, Script, check_alone, evaluated, evaluation_of, warn_of_several
    from ._server import Server
    from ._standby import Standby
    from ._storing import file_of, patiently
    from ._worker import Worker
    from ._worker_end import Stopped

__all__ = [
    "Evaluator",
    "Identity",
    "ManifestStorage",
    "Plan",
    "Script",
    "Server",
    "Standby",
    "Stopped",
    "Worker",
    "check_alone",
    "epochs_of",
    "evaluated",
    "evaluation_of",
    "file_of",
    "log_continued",
    "patiently",
    "restored",
    "warn_of_several",
]

_HOMES: Final = {
    "Evaluator": "._evaluator",
    "Identity": "._manifests",
    "ManifestStorage": "._manifests",
    "Plan": "._script",
    "Script": "._script",
    "Server": "._server",
    "Standby": "._standby",
    "Stopped": "._worker_end",
    "Worker": "._worker",
    "check_alone": "._script",
    "epochs_of": "._epochs",
    "evaluated": "._script",
    "evaluation_of": "._script",
    "file_of": "._storing",
    "log_continued": "._continued",
    "patiently": "._storing",
    "restored": "._restored",
    "warn_of_several": "._script",
}

__getattr__ = lazily(__name__, _HOMES)
