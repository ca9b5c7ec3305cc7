"""Reports a pod to people and the operator by metrics, pages, event files, timelines, and the seconds of workers.

The lifecycles of `_roles` call the observers in `_roles/_observers.py`. `ServerReports` and `WorkerMeasurements` are
such observers. They set the `PodMetrics` of the pod, which its `HttpPort` shows. On shard 0, a `JobObserver` (`_job`)
receives the decisions of the coordinator, and makes the report that the operator reads.

Names are loaded when they are first used: a pod does not import the modules of other roles.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._lazy import lazily

if TYPE_CHECKING:
    from ._http import HttpPort
    from ._metrics import PodMetrics
    from ._reports import EpochLines, Throttle
    from ._server_reports import ServerReports
    from ._worker_measurements import WorkerMeasurements
    from ._worker_seconds import WorkerSeconds, process_age

__all__ = [
    "EpochLines",
    "HttpPort",
    "PodMetrics",
    "ServerReports",
    "Throttle",
    "WorkerMeasurements",
    "WorkerSeconds",
    "process_age",
]

_HOMES: Final = {
    "EpochLines": "._reports",
    "HttpPort": "._http",
    "PodMetrics": "._metrics",
    "ServerReports": "._server_reports",
    "Throttle": "._reports",
    "WorkerMeasurements": "._worker_measurements",
    "WorkerSeconds": "._worker_seconds",
    "process_age": "._worker_seconds",
}

__getattr__ = lazily(__name__, _HOMES)
