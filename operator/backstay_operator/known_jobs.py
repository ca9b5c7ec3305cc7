"""The known jobs, each with its valid spec, its objects, and the memory of earlier runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from backstay_operator.clocks import Clocks
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.memory import OperatorMemory
from backstay_operator.rights import NETWORK_POLICIES, PODS, SERVICES
from backstay_operator.slim import Json
from backstay_operator.watching import JobKey
from backstay_spec import contract
from backstay_spec.goodput import PARTS, Account
from backstay_spec.observed import Spent
from backstay_spec.planner.pods import worker_pods
from backstay_spec.supervision import SeenJob
from backstay_spec.types import ObjectMeta, TrainingJobSpec
from backstay_spec.types_status import TrainingJobStatus
from backstay_spec.validation import SpecErrors, parse_job

__all__ = ["OVER", "KnownJobs"]

OVER: Final = ("Succeeded", "Failed")
"""Phases of a job that has ended."""


@dataclass
class _Parsed:
    uid: str
    generation: int
    spec: TrainingJobSpec | SpecErrors


class KnownJobs:
    """The jobs of the watched namespaces, as far as this operator needs them.

    Args:
        cluster: the known objects.
        clocks: the operator's clocks.
    """

    def __init__(self, cluster: ClusterOverlay, clocks: Clocks) -> None:
        self.cluster = cluster
        self.clocks = clocks
        self._memories: dict[JobKey, OperatorMemory] = {}
        self._parsed: dict[JobKey, _Parsed] = {}

    def memory(self, key: JobKey) -> OperatorMemory | None:
        """Returns the memory of a job, or None if this operator has not planned it yet."""
        return self._memories.get(key)

    def remember(self, key: JobKey, job: Json) -> tuple[OperatorMemory, bool]:
        """Returns the memory of an existing job, and whether it replaces that of an earlier job with the same name."""
        uid = job["metadata"]["uid"]
        before = self._memories.get(key)
        if before is not None and before.uid == uid:
            return before, False
        memory = self._memories[key] = OperatorMemory(uid)
        return memory, before is not None

    def forget(self, key: JobKey) -> None:
        """Drop everything about a job that no longer exists."""
        self._memories.pop(key, None)
        self._parsed.pop(key, None)

    def took_over(self) -> None:
        """Drop the answers from before, and the accounts. Called when this operator begins to act.

        It has called no server since then, so the training of each job would seem to have stopped. Another operator may
        have counted the same seconds, so the accounts continue from the statuses.
        """
        for memory in self._memories.values():
            memory.contact = memory.progress = memory.updates = None
            memory.account = memory.begun = None
            memory.refused = {}

    def spec(self, key: JobKey, job: Json) -> TrainingJobSpec | SpecErrors:
        """Returns the typed spec, or the errors of one that an older CRD accepted. A spec is validated once for each
        generation."""
        metadata = job["metadata"]
        uid, generation = metadata["uid"], metadata.get("generation", 0)
        kept = self._parsed.get(key)
        if kept is None or (kept.uid, kept.generation) != (uid, generation):
            whole = {"metadata": {"name": key[1], "namespace": key[0]}, "spec": job.get("spec")}
            spec: TrainingJobSpec | SpecErrors
            try:
                spec = parse_job({"apiVersion": contract.API_VERSION, "kind": contract.KIND, **whole}).spec
            except SpecErrors as errors:
                spec = errors
            kept = self._parsed[key] = _Parsed(uid, generation, spec)
        return kept.spec

    def snapshot(self, key: JobKey, job: Json, memory: OperatorMemory) -> SeenJob:
        """Returns the input of the next plan for a job."""
        spec, status = self.spec(key, job), TrainingJobStatus.model_validate(job.get("status") or {})
        pods = self.cluster.objects(PODS, key)
        spent: Spent | None = None
        if not isinstance(spec, SpecErrors):
            workers = spec.workers
            memory.prune(key[1], status.incarnations, status.active, workers.replicas, workers.pods_per_rank)
            if spec.run_policy.suspend and not pods and status.phase == "Suspended":
                # The status has the last report, and the progress before the suspension is outdated.
                memory.progress = memory.updates = None
            spent = self._spent(memory, spec, status, pods)
        services, policies = self.cluster.objects(SERVICES, key), self.cluster.objects(NETWORK_POLICIES, key)
        observed = memory.observed(pods, services, policies, self.clocks.now(), spent)
        return SeenJob(ObjectMeta.model_validate(job["metadata"]), spec, status, observed)

    def _spent(
        self, memory: OperatorMemory, spec: TrainingJobSpec, status: TrainingJobStatus, pods: Sequence[Json]
    ) -> Spent | None:
        """Returns the account of the worker pods' seconds, up to now."""
        now = self.clocks.now()
        account = memory.account
        if account is None:
            if status.phase in OVER:
                return None  # it is complete, and this operator has no report that could improve it
            until = None if status.worker_seconds_until is None else status.worker_seconds_until.timestamp()
            account = Account.continued(status.worker_seconds, status.worker_seconds_gone, until, status.term)
            memory.account = account
        slots = spec.workers.replicas if status.phase in ("Starting", "Running") else 0
        account.observe(now.timestamp(), worker_pods(pods, memory.uid, now), slots, over=status.phase in OVER)
        if account.until is None:
            return None
        gone = dict(zip(PARTS, account.gone, strict=True))
        return Spent(self.seconds(memory), gone, datetime.fromtimestamp(account.until, UTC))

    def seconds(self, memory: OperatorMemory) -> dict[str, float]:
        """Returns the seconds of all worker pods by part, in the order of `PARTS`; empty before the first one had a
        node."""
        account = memory.account
        return {} if account is None or account.until is None else account.seconds(self.clocks.now().timestamp())
