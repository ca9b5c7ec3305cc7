"""The memory of one job that a supervisor keeps between two plans, beside the job's objects.

It may be lost: a supervisor that starts again reads a few objects again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime

from backstay_spec import contract, names
from backstay_spec.causes import Blocked, condition_of, parse_time, parsed, terminated_state
from backstay_spec.job_report import JobReport
from backstay_spec.observed import (
    HELD,
    TAKEN,
    Contact,
    Manifest,
    Observed,
    Progress,
    RefusedCreate,
    Spent,
    Updates,
)
from backstay_spec.planner.pods import own_pods

__all__ = ["JobMemory"]


@dataclass
class JobMemory:
    """The memory of one job by its uid, so that a job that was created again under an old name starts with an empty
    memory.

    Attributes:
        uid: the job's uid.
        secret_at, secret_deleted, witnessed, vacant, progress, contact, updates, gated, missing, refused, begun,
            status_written: see `backstay_spec.observed.Observed`.
        filled: the slots of which a pod was observed to live.
        in_queue: the uids of the pods that had scheduling gates in the last observation.
    """

    uid: str
    secret_at: datetime | None = None
    secret_deleted: bool = False
    witnessed: set[str] = field(default_factory=set)
    filled: set[names.Slot] = field(default_factory=set)
    vacant: dict[names.Slot, datetime] = field(default_factory=dict)
    progress: Progress | None = None
    contact: Contact | None = None
    updates: Updates | None = None
    gated: dict[str, datetime] = field(default_factory=dict)
    in_queue: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    refused: dict[str, RefusedCreate] = field(default_factory=dict)
    begun: datetime | None = None
    status_written: datetime | None = None

    def observed(
        self,
        pods: Iterable[Manifest],
        services: Iterable[Manifest],
        network_policies: Iterable[Manifest],
        now: datetime,
        spent: Spent | None = None,
    ) -> Observed:
        """Returns the input of the next plan, with these objects of the job and the content of this memory."""
        pods, services, policies = tuple(pods), tuple(services), tuple(network_policies)
        self.begun = self.begun or now
        seen = {pod["metadata"]["name"] for pod in pods}
        self.missing -= seen
        self.witnessed |= seen
        living = {slot for slot, views in own_pods(pods, self.uid).items() if any(view.alive for view in views)}
        self.filled |= living
        self.vacant = {slot: self.vacant.get(slot, now) for slot in self.filled - living}
        there = seen.union(found["metadata"]["name"] for found in (*services, *policies))
        self.refused = {name: why for name, why in self.refused.items() if name not in there or why.reason == TAKEN}
        self.gated = {uid: at for pod in pods if (at := self._gated_until(uid := pod["metadata"]["uid"], pod, now))}
        self.in_queue = {pod["metadata"]["uid"] for pod in pods if _is_gated(pod)}
        return Observed(
            pods=pods,
            services=services,
            network_policies=policies,
            secret_ensured=self.secret_at is not None,
            secret_at=self.secret_at,
            secret_deleted=self.secret_deleted,
            progress=self.progress,
            contact=self.contact,
            updates=self.updates,
            spent=spent,
            gated=dict(self.gated),
            witnessed=frozenset(self.witnessed),
            vacant=dict(self.vacant),
            missing=frozenset(self.missing),
            refused=dict(self.refused),
            begun=self.begun,
            status_written=self.status_written,
        )

    def _gated_until(self, uid: str, pod: Manifest, now: datetime) -> datetime | None:
        """See `Observed.gated`. Between two plans of a job whose pods all wait, hours may pass. So what counts is the
        first plan that observes that the gates are gone."""
        if uid in self.in_queue or _is_gated(pod):
            return now
        return self.gated.get(uid) or _admitted_at(pod, now)

    def refuse(self, name: str, reason: str, message: str, now: datetime) -> None:
        """Record that the create of an object was refused."""
        self.refused[name] = RefusedCreate(reason, message, now).after(self.refused.get(name))

    def hold(self, name: str, why: str, now: datetime) -> None:
        """Record that an object is not created now, if no refusal of it is known."""
        if name not in self.refused:
            self.refuse(name, HELD, why, now)

    def reported(self, step: int, at: datetime, coordinator: int) -> None:
        """Record that the coordinator of this incarnation reported a step."""
        before = self.updates
        self.updates = (
            Updates(step, at, coordinator=coordinator) if before is None else before.after(step, at, coordinator)
        )

    def stopped(self, pod: Manifest) -> None:
        """Take the report in the termination message of shard 0's server, which a server that is stopped writes last.
        A pod is shown for the last time when it is deleted."""
        labels, state = pod["metadata"].get("labels") or {}, terminated_state(pod)
        of_shard_0 = (labels.get(contract.LABEL_ROLE), labels.get(contract.LABEL_INDEX)) == (contract.ROLE_SERVER, "0")
        message = parsed(state.get("message") or "") if of_shard_0 and state is not None else None
        known = self.progress
        if message is None or "result" in message or known is None:
            return
        report = JobReport.in_message(message)
        if None not in (report.term, report.step) and known.report.reached <= report.reached:
            self.progress = replace(known, report=report.over(known.report))

    def prune(
        self, job: str, incarnations: dict[str, int], active: dict[str, int], workers: int, pods_per_rank: int
    ) -> None:
        """Drop entries about pods that are neither the newest of their slot nor serve it.

        Args:
            workers: the number of ranks. When the job is scaled up again, an old refusal of a higher rank, and how
                long it has had no pod, no longer count.
        """
        current = set()
        for key, incarnation in (*incarnations.items(), *active.items()):
            role, _, index = key.rpartition("-")
            if role in names.ROLE_OF_LABEL and index.isdigit():
                slot = names.Slot(role, int(index))
                found = names.pod_names(job, self.uid, slot, incarnation, pods_per_rank)
                current |= set(found)
                if role == contract.ROLE_WORKER and slot.index >= workers:
                    self.refused = {name: why for name, why in self.refused.items() if name not in found}
        self.filled = {slot for slot in self.filled if slot.role != contract.ROLE_WORKER or slot.index < workers}
        self.missing &= current
        self.witnessed &= current


def _is_gated(pod: Manifest) -> bool:
    """Returns whether the pod has scheduling gates, which another controller removes."""
    return condition_of(pod, "PodScheduled").get("reason") == Blocked.GATED


def _admitted_at(pod: Manifest, now: datetime) -> datetime | None:
    """Returns when a pod of a queue lost its gates, for an operator that has not observed it with them; else None.

    A pod that is not scheduled yet may have lost them now: its condition does not say.
    """
    found = condition_of(pod, "PodScheduled")
    if contract.LABEL_QUEUE not in (pod["metadata"].get("labels") or {}):
        return None
    if found.get("status") != "True":
        return now if found else None
    return parse_time(found.get("lastTransitionTime"))
