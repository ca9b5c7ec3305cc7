"""Reconciles one job (O1): plans from the observed state, and carries the plan out, until no action is left."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from backstay_operator.cluster import Cluster
from backstay_operator.execute import Executor
from backstay_operator.job_metrics import training
from backstay_operator.memory import JobMemory
from backstay_operator.metrics import Metrics
from backstay_operator.progress import Round, carried, urgent
from backstay_operator.rights import NETWORK_POLICIES, PODS, SERVICES
from backstay_operator.rounds import round_of
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_spec import contract, names
from backstay_spec.causes import Blocked
from backstay_spec.goodput import PARTS, Account
from backstay_spec.observed import Contact, Observed, PlanSettings, Progress, Spent, Updates
from backstay_spec.plan import plan, refuse
from backstay_spec.planner.pods import worker_pods
from backstay_spec.token import token_for
from backstay_spec.types import ObjectMeta, TrainingJob, TrainingJobSpec
from backstay_spec.types_status import TrainingJobStatus, slot_key
from backstay_spec.validation import SpecErrors, parse_job

log = logging.getLogger(__name__)

_ROUNDS: Final = 6
_OVER: Final = ("Succeeded", "Failed")
# Seconds between two writes of a status in which only the progress of training changed (O8).
_PACE: Final = 10.0


@dataclass
class _Parsed:
    generation: int
    spec: TrainingJobSpec | SpecErrors


class Reconciler:
    """Brings one job's objects to the state that its spec describes; `Dispatcher` calls it for one job at a time.

    Args:
        cluster: the known objects.
        executor: carries plans out.
        settings: the planner's settings.
        key: the operator's key.
        metrics: the metrics of the operator and of the jobs.
        clock: a monotonic clock in seconds.
        now: the time of day, aware.
        leads: whether this operator may act.
        mark: reconciles a job soon.
        mark_after: reconciles a job after a number of seconds.
        follow: begins to call the servers of a job.
        poll_now: calls them without a pause.
    """

    def __init__(
        self,
        cluster: Cluster,
        executor: Executor,
        settings: PlanSettings,
        key: bytes,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime],
        leads: Callable[[], bool],
        mark: Callable[[JobKey], None] = lambda _: None,
        mark_after: Callable[[JobKey, float], None] = lambda *_: None,
        follow: Callable[[JobKey], None] = lambda _: None,
        poll_now: Callable[[JobKey], None] = lambda _: None,
    ) -> None:
        self._cluster = cluster
        self._executor = executor
        self._settings = settings
        self._key = key
        self._metrics = metrics
        self._clock = clock
        self._now = now
        self._leads = leads
        self._memories: dict[JobKey, JobMemory] = {}
        self._parsed: dict[JobKey, tuple[str, _Parsed]] = {}
        self._mark = mark
        self.mark_after = mark_after
        self._follow = follow
        self._poll_now = poll_now

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
        again: float | None = 0.0
        hurried = False
        for _ in range(_ROUNDS):
            job = self._cluster.job(key)
            if job is None:
                self._forget(key)
                return None
            memory = self._memory(key, job)
            memory.planned_at = self._clock()
            spec = self._spec(key, job)
            if isinstance(spec, SpecErrors):
                metadata = ObjectMeta.model_validate(job["metadata"])
                pods = self._cluster.objects(PODS, key)
                planned = refuse(metadata, _status(job), str(spec), self._now(), pods)
            else:
                typed = _typed(job, spec)
                memory.prune(key[1], typed.status.incarnations, typed.status.active)
                if spec.run_policy.suspend and not self._cluster.objects(PODS, key):
                    memory.progress = None  # the progress before the suspension is outdated
                planned = plan(typed, self._observed(key, memory, typed), self._now(), self._settings)
            hurried = hurried or _servers_changed(job, planned.status)
            done = await self._executor.carry_out(key, job, planned, memory)
            if not done.again or not self._leads():
                again = _soonest(planned.requeue_after, done.wait)
                break
        self._report(key)
        if self.round(key) is not None:
            self._follow(key)
            if hurried:
                self._poll_now(key)
        return again

    # The observed state.

    def _memory(self, key: JobKey, job: Json) -> JobMemory:
        uid = job["metadata"]["uid"]
        memory = self._memories.get(key)
        if memory is None or memory.uid != uid:
            if memory is not None:
                self._metrics.job.forget(key)
            memory = self._memories[key] = JobMemory(uid)
        return memory

    def _spec(self, key: JobKey, job: Json) -> TrainingJobSpec | SpecErrors:
        """The typed spec, validated once for each generation: an older CRD may have accepted an invalid one."""
        metadata = job["metadata"]
        kept = self._parsed.get(key)
        if kept is None or kept[0] != metadata["uid"] or kept[1].generation != metadata.get("generation", 0):
            whole = {"metadata": {"name": key[1], "namespace": key[0]}, "spec": job.get("spec")}
            spec: TrainingJobSpec | SpecErrors
            try:
                spec = parse_job({"apiVersion": contract.API_VERSION, "kind": contract.KIND, **whole}).spec
            except SpecErrors as errors:
                spec = errors
            kept = self._parsed[key] = (metadata["uid"], _Parsed(metadata.get("generation", 0), spec))
        return kept[1].spec

    def _observed(self, key: JobKey, memory: JobMemory, job: TrainingJob) -> Observed:
        pods = self._cluster.objects(PODS, key)
        seen = {pod["metadata"]["name"] for pod in pods}
        memory.missing -= seen
        memory.witnessed |= seen
        uids = {pod["metadata"]["uid"] for pod in pods}
        gated = {pod["metadata"]["uid"]: self._now() for pod in pods if _is_gated(pod)}
        memory.gated = {uid: at for uid, at in {**memory.gated, **gated}.items() if uid in uids}
        return Observed(
            pods=pods,
            services=self._cluster.objects(SERVICES, key),
            network_policies=self._cluster.objects(NETWORK_POLICIES, key),
            secret_ensured=memory.secret_at is not None,
            secret_at=memory.secret_at,
            secret_deleted=memory.secret_deleted,
            progress=memory.progress,
            contact=memory.contact,
            updates=memory.updates,
            spent=self._spent(memory, job, pods),
            gated=dict(memory.gated),
            witnessed=frozenset(memory.witnessed),
            missing=frozenset(memory.missing),
            refused=dict(memory.refused),
            status_written=memory.status_written,
        )

    def _spent(self, memory: JobMemory, job: TrainingJob, pods: Sequence[Json]) -> Spent | None:
        """The account of the worker pods' seconds, up to now."""
        now, status = self._now(), job.status
        account = memory.account
        if account is None:
            if status.phase in _OVER:
                return None  # it is complete, and this operator has no report that could improve it
            until = None if status.worker_seconds_until is None else status.worker_seconds_until.timestamp()
            account = Account.continued(status.worker_seconds, status.worker_seconds_gone, until, status.term)
            memory.account = account
        slots = job.spec.workers.replicas if status.phase in ("Starting", "Running") else 0
        account.observe(now.timestamp(), worker_pods(pods, memory.uid, now), slots, over=status.phase in _OVER)
        if account.until is None:
            return None
        gone = dict(zip(PARTS, account.gone, strict=True))
        return Spent(_seconds_of(account, now), gone, datetime.fromtimestamp(account.until, UTC))

    # The control channel.

    def round(self, key: JobKey) -> Round | None:
        """The calls to this job's servers; None: it has no servers to call, or this operator does not act."""
        job = self._cluster.job(key)
        memory = self._memories.get(key)
        if job is None or memory is None or not self._leads():
            return None
        spec = self._spec(key, job)
        status = job.get("status") or {}
        if isinstance(spec, SpecErrors) or status.get("phase") in _OVER:
            return None
        return round_of(
            spec,
            status,
            memory.uid,
            lambda: self._cluster.objects(PODS, key),
            token=token_for(self._key, memory.uid),
            job_seconds=lambda: _seconds_of(memory.account, self._now()).values(),
        )

    def on_contact(self, key: JobKey, contact: Contact) -> None:
        """A round of calls ended, with this result about which pods answer."""
        memory = self._memories.get(key)
        if memory is None:
            return
        before, memory.contact = memory.contact, contact
        changed = before is None or contact.hung_workers != before.hung_workers
        if contact.silent or changed or (before is not None and before.silent):
            self._mark(key)

    def took_over(self) -> None:
        """Drop the outdated records of which pods answer, and the accounts. Called when this operator begins to act.

        Another operator may have counted the same seconds, so the accounts continue from the statuses.
        """
        for memory in self._memories.values():
            memory.contact = None
            memory.account = None

    def on_progress(self, key: JobKey, progress: Progress) -> None:
        """The servers answered with this progress."""
        memory = self._memories.get(key)
        if memory is None:
            return
        if memory.account is not None:
            memory.account.report(progress.worker_seconds)
            if (start := progress.term_start) is not None:
                memory.account.progressed(start.term, start.step, progress.redone, progress.checkpoint_step or 0)
        progress = carried(memory.progress, progress)
        now_urgent = urgent(memory.progress, progress)
        memory.progress = progress
        if progress.step is not None:
            before = memory.updates
            memory.updates = (
                Updates(progress.step, progress.taken, coordinator=progress.coordinator)
                if before is None
                else before.after(progress.step, progress.taken, progress.coordinator)
            )
            # The condition Training becomes True again with the first update, and not with the next paced write.
            resumed = before is not None and before.step != progress.step and self._trains(key) is False
            now_urgent = now_urgent or resumed
        self._metrics.job.progress(key, progress, trains=self._trains(key) is not False)
        if now_urgent:
            self._mark(key)
        else:
            # Counted from the newest plan and not from the newest write. Otherwise a plan that finds nothing to write
            # would follow each round of calls. A plan that must not write progress yet requests another run.
            since = _PACE if memory.planned_at is None else self._clock() - memory.planned_at
            self.mark_after(key, max(0.0, _PACE - since))

    def _trains(self, key: JobKey) -> bool | None:
        """The status of the job's condition Training; None: it has no such condition yet."""
        job = self._cluster.job(key)
        return None if job is None else training(job)

    def ended(self, key: JobKey, raw: Mapping[str, Any]) -> None:
        """The watch showed that a pod has ended: the delay of its replacement is measured from now."""
        memory = self._memories.get(key)
        labels = raw["metadata"].get("labels") or {}
        role, index = labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX, "")
        if memory is not None and role in names.ROLE_OF_LABEL and index.isdigit():
            memory.ended.setdefault((role, int(index)), self._clock())

    # Metrics of the jobs.

    def _report(self, key: JobKey) -> None:
        job = self._cluster.job(key)
        if job is None:
            return
        spec = self._spec(key, job)
        memory = self._memories.get(key)
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
        self._memories.pop(key, None)
        self._parsed.pop(key, None)
        self._executor.forget(key)
        self._metrics.job.forget(key)


def _typed(job: Json, spec: TrainingJobSpec) -> TrainingJob:
    return TrainingJob(
        metadata=ObjectMeta.model_validate(job["metadata"]),
        spec=spec,
        status=_status(job),
    )


def _status(job: Json) -> TrainingJobStatus:
    return TrainingJobStatus.model_validate(job.get("status") or {})


def _is_gated(pod: Json) -> bool:
    """Whether the pod has scheduling gates, which another controller removes."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(c.get("type") == "PodScheduled" and c.get("reason") == Blocked.GATED for c in conditions)


def _in_sync(job: Json, progress: Progress | None) -> int | None:
    """The number of shards that would lose nothing with their server; None without standbys."""
    active: Mapping[str, int] = (job.get("status") or {}).get("active") or {}
    if not active or progress is None:
        return None
    return sum(
        progress.followed(shard, active.get(slot_key(contract.ROLE_SERVER, shard), 0)) for shard in progress.in_sync
    )


def _servers_changed(job: Json, status: Mapping[str, Any] | None) -> bool:
    """Whether the new status has other servers than the old one, in a job with standbys."""

    def servers(of: Mapping[str, Any]) -> tuple[Any, dict[str, int]]:
        numbers = (of.get("incarnations") or {}).items()
        return of.get("active") or {}, {slot: n for slot, n in numbers if slot.startswith(contract.ROLE_SERVER)}

    return status is not None and bool(status.get("active")) and servers(job.get("status") or {}) != servers(status)


def _seconds_of(account: Account | None, now: datetime) -> dict[str, float]:
    """The seconds of all worker pods by part, in the order of `PARTS`; empty before the first one had a node."""
    return {} if account is None or account.until is None else account.seconds(now.timestamp())


def _soonest(planned: timedelta | None, failed: float | None) -> float | None:
    waits = [wait for wait in (planned.total_seconds() if planned is not None else None, failed) if wait is not None]
    return min(waits, default=None)
