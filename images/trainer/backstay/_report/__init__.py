"""Reports of a pod for people and the operator: metrics, pages, event files, timelines, and the seconds of workers.

`Metrics` are those of a pod, on its `HttpPort`. `JobObserver` follows the decisions of the coordinator and makes the
report that the operator reads. `Reports` writes event files, `Tracing` the timeline, `WorkerSeconds` goodput.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._black_box import hang_report
    from ._event_files import EventFiles
    from ._http import HttpPort
    from ._job_observer import JobObserver
    from ._learning_rate import LearningRate
    from ._metrics import Metrics
    from ._overlap import OverlapTimer
    from ._reports import FLUSH_REMOTE_SECONDS, FLUSH_SECONDS, OnUpdate, Reports, StopWhen, Throttle
    from ._status_page import StatusPage
    from ._timeline import Tracing
    from ._traffic import Carried
    from ._utilization import Utilization
    from ._worker_seconds import WorkerSeconds, process_age

__all__ = [
    "FLUSH_REMOTE_SECONDS",
    "FLUSH_SECONDS",
    "Carried",
    "EventFiles",
    "HttpPort",
    "JobObserver",
    "LearningRate",
    "Metrics",
    "OnUpdate",
    "OverlapTimer",
    "Reports",
    "StatusPage",
    "StopWhen",
    "Throttle",
    "Tracing",
    "Utilization",
    "WorkerSeconds",
    "hang_report",
    "process_age",
]

_HOMES: Final = {
    "OverlapTimer": "._overlap",
    "Carried": "._traffic",
    "EventFiles": "._event_files",
    "FLUSH_REMOTE_SECONDS": "._reports",
    "FLUSH_SECONDS": "._reports",
    "HttpPort": "._http",
    "JobObserver": "._job_observer",
    "LearningRate": "._learning_rate",
    "Metrics": "._metrics",
    "OnUpdate": "._reports",
    "Reports": "._reports",
    "StatusPage": "._status_page",
    "StopWhen": "._reports",
    "Throttle": "._reports",
    "Tracing": "._timeline",
    "Utilization": "._utilization",
    "WorkerSeconds": "._worker_seconds",
    "hang_report": "._black_box",
    "process_age": "._worker_seconds",
}

__getattr__ = lazily(__name__, _HOMES)
