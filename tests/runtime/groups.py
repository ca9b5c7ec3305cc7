"""Jobs whose ranks have several pods, which JAX runs as one."""

from __future__ import annotations

import json

import numpy as np
from between import LONG

from backstay._faults import ENV_FAULTS
from backstay.testing import Job, Pod
from backstay_spec import contract
from backstay_spec.causes import is_group_lost

JAX_ABORTS, GROUP_LOST_EXIT = 134, contract.GROUP_LOST_EXIT


class GroupJob(Job):
    """A job whose ranks have several pods, which write their results into its folder."""

    def variables(self, name: str) -> dict[str, str]:
        return {"BACKSTAY_JOB": "group", "OUT": str(self.folder / f"{name}.npz"), "LET": str(self.folder / "let")}

    @property
    def members(self) -> int:
        return int(self.config.get("pods_per_rank", 1))

    def rank(self, rank: int, incarnation: int = 1, *, faults: dict[int, str] | None = None) -> list[Pod]:
        """Start the pods of a rank. `faults`: of a pod."""
        return [
            self.start(
                contract.ROLE_WORKER,
                rank,
                incarnation,
                environment={contract.ENV_MEMBER: str(member), ENV_FAULTS: (faults or {}).get(member, "")},
            )
            for member in range(self.members)
        ]

    def reference(self) -> dict[str, np.ndarray]:
        """Returns the parameters of the same script in one process with one device, without a job."""
        out, log = self.folder / "reference.npz", self.folder / "reference.log"
        loop = {**self.forker.environ, **self.environment, "KIND": "", "DEVICES": "1", "OUT": str(out)}
        assert self.forker.start(self._argv, loop, log).wait(LONG) == 0, log.read_text(errors="replace")
        return dict(np.load(out))

    def params(self, pod: Pod) -> dict[str, np.ndarray]:
        return dict(np.load(self.folder / f"{pod.name}.npz"))


def trained(job: GroupJob) -> dict[str, np.ndarray]:
    """Returns the parameters of a whole job, which each of its pods has."""
    servers = [job.server(shard, 1) for shard in range(job.shards)]
    workers = [pod for rank in range(job.workers) for pod in job.rank(rank)]
    others = [*servers, *([job.start(contract.ROLE_EVALUATOR, 0)] if job.config.get("evaluator") else [])]
    assert [pod.wait() for pod in (*workers, *others)] == [0] * (len(workers) + len(others))
    found = [job.params(pod) for pod in workers[: job.members]]
    for other in found[1:]:
        assert all((found[0][name] == other[name]).all() for name in found[0])
    return found[0]


def ends_too(pod: Pod) -> None:
    """The pod ends because another one of its rank is lost, as the planner finds. If JAX's connection to the first pod
    breaks before Backstay's, JAX aborts the process."""
    pod.job.may_end_with(GROUP_LOST_EXIT, JAX_ABORTS)
    code, message = pod.wait(), json.dumps(pod.final_message()) if pod.final_message() else pod.output()[-2048:]
    state = {"terminated": {"exitCode": code, "message": message}}
    assert is_group_lost({"status": {"containerStatuses": [{"name": contract.CONTAINER, "state": state}]}}), message


def same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float = 1e-7) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=1e-9, err_msg=name)
