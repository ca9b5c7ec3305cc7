"""Tests training scripts with whole jobs of real pods as processes, with faults at chosen steps, without Kubernetes.

    from backstay import testing

    def test_training_survives_a_lost_worker():
        result = testing.run("train.py", workers=3, backups=1, faults="kill worker/1 @5")
        assert result.result.step == 100

`run` is enough for most tests. A test that acts in the middle of training starts the pods of a `Job` one by one.
`train_local` is the loop in one process that a synchronous job must equal.
"""

from .._single import train_local
from ._pods import Job, Pod, Ports
from ._processes import KILLED, TERMINATED, Forker, PodProcess
from ._recording import Contribution, Death, JobResult, Rollback, Update
from ._run import run
from ._service import Service
from ._supervisor import ProcessJob, Supervisor

__all__ = [
    "KILLED",
    "TERMINATED",
    "Contribution",
    "Death",
    "Forker",
    "Job",
    "JobResult",
    "Pod",
    "PodProcess",
    "Ports",
    "ProcessJob",
    "Rollback",
    "Service",
    "Supervisor",
    "Update",
    "run",
    "train_local",
]
