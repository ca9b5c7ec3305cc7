"""Finds clusters, runs and jobs, and reads their states, logs and records, for the `backstay` command and programs.

`Client` and `AsyncClient` are for programs. The rooms, from top to bottom: `blocking` has the first, and `asynchronous`
the second. `code` collects the source of what is submitted. `embedded` starts an embedded cluster. `show` draws.
`reading` reads logs and records. `finding` selects the cluster or the run that a user means. `view` describes a job.
`jobfiles` builds TrainingJobs.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from backstay_client.asynchronous.client import AsyncClient
    from backstay_client.asynchronous.job import AsyncJobHandle
    from backstay_client.asynchronous.options import SubmitOptions
    from backstay_client.asynchronous.sweep_options import SweepOptions
    from backstay_client.blocking.client import Client
    from backstay_client.blocking.job import JobHandle
    from backstay_client.embedded.session import SessionError
    from backstay_client.errors import (
        BadInput,
        ClusterUnreachable,
        JobDeleted,
        JobExists,
        MissingPackage,
        NoResult,
        SweepFailed,
        SweepInUse,
        TrainingFailed,
    )
    from backstay_client.finding.clusters import NoSuchJob
    from backstay_client.kube import ApiRequestError
    from backstay_client.pod_ends import PodsRemain
    from backstay_client.reading.curve import TrainingCurve
    from backstay_client.reading.history import JobHistory
    from backstay_client.show.job_list import Jobs
    from backstay_client.sweeps.results import SweepResult
    from backstay_client.view.status import JobStatus

__all__ = [
    "ApiRequestError",
    "AsyncClient",
    "AsyncJobHandle",
    "BadInput",
    "Client",
    "ClusterUnreachable",
    "JobDeleted",
    "JobExists",
    "JobHandle",
    "JobHistory",
    "JobStatus",
    "Jobs",
    "MissingPackage",
    "NoResult",
    "NoSuchJob",
    "PodsRemain",
    "SessionError",
    "SubmitOptions",
    "SweepFailed",
    "SweepInUse",
    "SweepOptions",
    "SweepResult",
    "TrainingCurve",
    "TrainingFailed",
]

_HOMES: Final = {
    "ApiRequestError": "kube",
    "AsyncClient": "asynchronous.client",
    "AsyncJobHandle": "asynchronous.job",
    "BadInput": "errors",
    "Client": "blocking.client",
    "ClusterUnreachable": "errors",
    "JobDeleted": "errors",
    "JobExists": "errors",
    "JobHandle": "blocking.job",
    "JobHistory": "reading.history",
    "JobStatus": "view.status",
    "Jobs": "show.job_list",
    "MissingPackage": "errors",
    "NoResult": "errors",
    "NoSuchJob": "finding.clusters",
    "PodsRemain": "pod_ends",
    "SessionError": "embedded.session",
    "SubmitOptions": "asynchronous.options",
    "SweepFailed": "errors",
    "SweepInUse": "errors",
    "SweepOptions": "asynchronous.sweep_options",
    "SweepResult": "sweeps.results",
    "TrainingCurve": "reading.curve",
    "TrainingFailed": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        raise ImportError(f"{name} needs the package {error.name}: pip install 'backstay[cli]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
