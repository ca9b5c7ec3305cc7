"""Reconciles one job (O1), and takes note of what its servers answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from backstay_operator.bus import Bus, Called, Changed, LeadChanged, PodEnded, Progressed, Serves
from backstay_operator.execute import Executor
from backstay_operator.job_metrics import training
from backstay_operator.known_jobs import OVER, KnownJobs
from backstay_operator.kubernetes_job import KubernetesJob
from backstay_operator.memory import OperatorMemory
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.progress import Round
from backstay_operator.rights import PODS
from backstay_operator.rounds import round_of
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_rpc.answers import carried, urgent
from backstay_spec import contract, names
from backstay_spec.observed import PlanSettings, Progress
from backstay_spec.planner.pods import is_owned
from backstay_spec.supervision import settle
from backstay_spec.token import token_for
from backstay_spec.types_status import slot_key
from backstay_spec.validation import SpecErrors

# Seconds between two writes of a status in which only the progress of training changed (O8).
_PACE: Final = 10.0


class Reconciler:
    """Brings one job's objects to the state that its spec describes; `Dispatcher` calls it for one job at a time.

    Args:
        known: the jobs and what is known of them.
        executor: carries plans out.
        settings: the planner's settings.
        key: the operator's key.
        metrics: the metrics of the operator and of the jobs.
        bus: has `Called`, `Progressed`, `PodEnded` and `LeadChanged`, and gets `Changed` and `Serves`.
        leads: whether this operator may act.
    """

    def __init__(
        self,
        known: KnownJobs,
        executor: Executor,
        settings: PlanSettings,
        key: bytes,
        metrics: OperatorMetrics,
        bus: Bus,
        *,
        leads: Callable[[], bool],
    ) -> None:
        self._known = known
        self._cluster = known.cluster
        self._executor = executor
        self._settings = settings
        self._key = key
        self._metrics = metrics
        self._bus = bus
        self._leads = leads
        self._clock, self._now = known.clocks.seconds, known.clocks.now
        bus.subscribe(Called, self._called)
        bus.subscribe(Progressed, self._progressed)
        bus.subscribe(PodEnded, self._ended)
        bus.subscribe(LeadChanged, lambda _: known.took_over())

    async def __call__(self, key: JobKey) -> float | None:
        """Reconcile `key`. Returns the seconds after which it must run again, even if no event arrives.

        Raises:
            backstay_operator.errors.KubeError: the status could not be written.
        """
        if not self._leads():
            return None
        started = self._clock()
        try:
            return await self._reconcile(key)
        finally:
            self._metrics.reconciles.inc()
            self._metrics.reconcile_seconds.observe(self._clock() - started)

    async def _reconcile(self, key: JobKey) -> float | None:
        job = KubernetesJob(self._known, self._executor, key, leads=self._leads, replaced=self._metrics.job.forget)
        again = await settle(job, self._settings, self._now)
        if self._cluster.job(key) is None:
            self._forget(key)
            return None
        self._report(key)
        if self.round(key) is not None:
            self._bus.send(Serves(key, now=job.servers_changed))
        return again

    # The control channel.

    def round(self, key: JobKey) -> Round | None:
        """Returns the calls to this job's servers, or None if it has no servers to call, or this operator does not
        act."""
        job = self._cluster.job(key)
        memory = self._known.memory(key)
        if job is None or memory is None or not self._leads():
            return None
        spec = self._known.spec(key, job)
        status = job.get("status") or {}
        if isinstance(spec, SpecErrors) or status.get("phase") in OVER:
            return None
        return round_of(
            spec,
            status,
            memory.uid,
            lambda: self._cluster.objects(PODS, key),
            token=token_for(self._key, memory.uid),
            job_seconds=lambda: self._known.seconds(memory).values(),
        )

    def _called(self, event: Called) -> None:
        memory, contact = self._known.memory(event.key), event.contact
        if memory is None or not self._is_of(memory, event) or not self._leads():
            return
        before, memory.contact = memory.contact, contact
        changed = before is None or contact.hung_workers != before.hung_workers
        if contact.silent or changed or (before is not None and before.silent):
            self._bus.send(Changed(event.key))

    def _is_of(self, memory: OperatorMemory, event: Called | Progressed) -> bool:
        """Returns whether an answer is of this job, and not of an earlier one with its name."""
        return event.token in ("", token_for(self._key, memory.uid))

    def _progressed(self, event: Progressed) -> None:
        key, progress = event.key, event.progress
        memory, report = self._known.memory(key), progress.report
        job = self._cluster.job(key)
        if memory is None or not self._is_of(memory, event) or not self._leads():
            return  # a follower reports nothing, and another operator plans this job
        if job is None or (job.get("status") or {}).get("phase") in OVER:
            return  # it has ended during the round
        if memory.account is not None:
            memory.account.report(progress.worker_seconds)
            if (start := report.term_start) is not None:
                stored = 0 if report.checkpoint is None else report.checkpoint.step
                memory.account.progressed(start.term, start.step, report.steps_redone or 0, stored)
        progress = carried(memory.progress, progress)
        now_urgent = urgent(memory.progress, progress)
        memory.progress = progress
        if report.step is not None:
            before = memory.updates
            memory.reported(report.step, progress.taken, progress.coordinator)
            # The condition Training becomes True again with the first update, and not with the next paced write.
            resumed = before is not None and before.step != report.step and self._trains(key) is False
            now_urgent = now_urgent or resumed
        self._metrics.job.progress(key, progress, trains=self._trains(key) is not False)
        if now_urgent:
            self._bus.send(Changed(key))
        else:
            # Counted from the newest plan and not from the newest write. Otherwise a plan that finds nothing to write
            # would follow each round of calls. A plan that must not write progress yet requests another run.
            since = _PACE if memory.planned_at is None else self._clock() - memory.planned_at
            self._bus.send(Changed(key, after=max(0.0, _PACE - since)))

    def _trains(self, key: JobKey) -> bool | None:
        """Returns the status of the job's condition Training, or None if it has no such condition yet."""
        job = self._cluster.job(key)
        return None if job is None else training(job)

    def _ended(self, event: PodEnded) -> None:
        """The delay of the pod's replacement is measured from now. Its last report is in the next plan."""
        memory, job = self._known.memory(event.key), self._cluster.job(event.key)
        labels = event.raw["metadata"].get("labels") or {}
        role, index = labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX, "")
        if memory is None or job is None or not is_owned(event.raw, memory.uid):
            return  # an earlier job may have had this name
        if role not in names.ROLE_OF_LABEL or not index.isdigit():
            return
        memory.stopped(event.raw)
        status, key = job.get("status") or {}, slot_key(role, int(index))
        current = {str((status.get(field) or {}).get(key)) for field in ("incarnations", "active")}
        # A pod that has its replacement may still end, be deleted and be shown.
        if labels.get(contract.LABEL_INCARNATION) in current:
            memory.ended.setdefault((role, int(index)), self._clock())

    # Metrics of the jobs.

    def _report(self, key: JobKey) -> None:
        job = self._cluster.job(key)
        if job is None or not self._leads():
            return
        spec = self._known.spec(key, job)
        memory = self._known.memory(key)
        progress = None if memory is None else memory.progress
        self._metrics.job.report(
            key,
            job,
            None if isinstance(spec, SpecErrors) else spec,
            self._cluster.objects(PODS, key),
            progress,
            _in_sync(job, progress),
        )

    def _forget(self, key: JobKey) -> None:
        self._known.forget(key)
        self._executor.forget(key)
        self._metrics.job.forget(key)


def _in_sync(job: Json, progress: Progress | None) -> int | None:
    """Returns the number of shards that would lose nothing with their server; None without standbys."""
    active: Mapping[str, int] = (job.get("status") or {}).get("active") or {}
    if not active or progress is None:
        return None
    return sum(
        progress.followed(shard, active.get(slot_key(contract.ROLE_SERVER, shard), 0)) for shard in progress.in_sync
    )
