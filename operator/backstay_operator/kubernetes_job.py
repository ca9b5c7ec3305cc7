"""Implements `JobObjects` for one job in Kubernetes, read from the watches and changed by API calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backstay_operator.execute import Executor
from backstay_operator.known_jobs import KnownJobs
from backstay_operator.memory import OperatorMemory
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_spec import contract
from backstay_spec.actions import Plan
from backstay_spec.supervision import Done, SeenJob

__all__ = ["KubernetesJob"]


class KubernetesJob:
    """One job during one run of the reconciler.

    Args:
        known: the known jobs.
        executor: carries plans out.
        key: the job's namespace and name.
        leads: whether this operator may act.
        replaced: called when the job is another one than an earlier job with the same name.

    Attributes:
        servers_changed: whether a plan changed the servers of a job with standbys: they must be called soon.
    """

    def __init__(
        self,
        known: KnownJobs,
        executor: Executor,
        key: JobKey,
        *,
        leads: Callable[[], bool],
        replaced: Callable[[JobKey], None],
    ) -> None:
        self._known = known
        self._executor = executor
        self._key = key
        self._leads = leads
        self._replaced = replaced
        self._planned_from: tuple[Json, OperatorMemory] = {}, OperatorMemory("")
        self.servers_changed = False

    async def observed(self) -> SeenJob | None:
        """See `JobObjects`."""
        job = self._known.cluster.job(self._key)
        if job is None or not self._leads():
            return None
        memory, replaced = self._known.remember(self._key, job)
        if replaced:
            self._replaced(self._key)
        memory.planned_at = self._known.clocks.seconds()
        self._planned_from = job, memory
        return self._known.snapshot(self._key, job, memory)

    async def write_status(self, planned: Plan) -> bool:
        """See `JobObjects`.

        Raises:
            backstay_operator.errors.KubeError: the status could not be written.
        """
        job, memory = self._planned_from
        self.servers_changed = self.servers_changed or _servers_changed(job, planned.status)
        return await self._executor.write_status(self._key, job, planned, memory)

    async def carry_out(self, planned: Plan) -> Done:
        """See `JobObjects`."""
        job, memory = self._planned_from
        return await self._executor.carry_out(self._key, job, planned, memory)


def _servers_changed(job: Json, status: Mapping[str, Any] | None) -> bool:
    """Returns whether the new status has other servers than the old one, in a job with standbys."""

    def servers(of: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
        numbers = (of.get("incarnations") or {}).items()
        return of.get("active") or {}, {slot: n for slot, n in numbers if slot.startswith(contract.ROLE_SERVER)}

    return status is not None and bool(status.get("active")) and servers(job.get("status") or {}) != servers(status)
