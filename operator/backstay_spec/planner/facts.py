"""Parses the job, its objects and the time once into the immutable input of the planner's policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from backstay_spec import contract, manifests, names, status
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Contact, Manifest, Observed, PlanSettings, Progress, RefusedCreate
from backstay_spec.planner.pods import PodView, created_at, is_deleting, is_owned, lost_at, own_pods
from backstay_spec.types import ObjectMeta, TrainingJob, TrainingJobSpec
from backstay_spec.types_status import Condition, TrainingJobStatus

__all__ = ["FRESH", "Facts", "desired_slots", "facts_of"]

# A round of calls ends every 2 s, or every 3.5 s at most while a server does not answer.
FRESH: Final = timedelta(seconds=5)
# A clock that differs by more is a fault of the cluster.
SKEW: Final = timedelta(seconds=10)


@dataclass(frozen=True, slots=True)
class Facts:
    """The state of one job for one call of `plan`.

    Attributes:
        job, observed, now, settings: the arguments of `plan`.
        pods: the job's own pods by slot, oldest incarnation first.
        services: the job's own Services by name, without those that are being deleted.
        addresses: the ClusterIP of each shard's Service; None: it has no address yet.
        conditions: the conditions of the status that was last written, by type.
    """

    job: TrainingJob
    observed: Observed
    now: datetime
    settings: PlanSettings
    pods: Mapping[Slot, Sequence[PodView]]
    services: Mapping[str, Manifest]
    addresses: tuple[str | None, ...]
    conditions: Mapping[str, Condition]

    @property
    def meta(self) -> ObjectMeta:
        """The job's metadata."""
        return self.job.metadata

    @property
    def spec(self) -> TrainingJobSpec:
        """The job's spec."""
        return self.job.spec

    @property
    def old(self) -> TrainingJobStatus:
        """The status that was last written."""
        return self.job.status

    @property
    def progress(self) -> Progress | None:
        """The newest answers of the servers."""
        return self.observed.progress

    @property
    def contact(self) -> Contact | None:
        """The newest round of calls. It is None if that is too old to prove anything, because the operator was paused,
        was not the leader, or is late. The operator then calls again before it judges."""
        known = self.observed.contact
        return known if known is not None and self.now - known.taken <= FRESH else None

    @property
    def shards(self) -> range:
        """The shards of the parameters, one active server each."""
        return range(self.spec.parameter_servers.replicas)

    @property
    def has_standbys(self) -> bool:
        """Whether each shard has a standby beside its active server."""
        return self.spec.parameter_servers.standbys > 0

    @property
    def can_create(self) -> bool:
        """Whether pods can be created: the Secret and the addresses of all Services exist."""
        return self.observed.secret_ensured and None not in self.addresses

    @property
    def server_addresses(self) -> list[str]:
        """The addresses of the shards' Services in the form for pods; those without a ClusterIP are left out."""
        return [manifests.address(ip) for ip in self.addresses if ip is not None]

    @property
    def needed_world(self) -> int:
        """The number of ranks of which updates need a quorum. Ranks by which the job was scaled up belong to it once
        they have joined."""
        desired = self.spec.workers.replicas
        reported = None if self.progress is None else self.progress.report.world
        return min(desired, reported or self.old.world or desired)

    @property
    def trained(self) -> bool:
        """Whether an update was applied, in this run or in one that this run continues."""
        reported = None if self.progress is None else self.progress.report.step
        known = self.old.step if reported is None else reported
        return bool(known)

    @property
    def done(self) -> bool:
        """Whether the coordinator reported that training is complete and that the pods are leaving."""
        return self.progress is not None and self.progress.done

    def pod_name(self, slot: Slot, incarnation: int) -> str:
        """Returns the name of a slot's pod, or of the first pod of its rank."""
        return self.pod_names(slot, incarnation)[0]

    def members(self, slot: Slot) -> tuple[int | None, ...]:
        """Returns the members of a slot's rank, as `names.pod_name` takes them."""
        return names.members_of(slot, self.spec.workers.pods_per_rank)

    def pod_names(self, slot: Slot, incarnation: int) -> tuple[str, ...]:
        """Returns the names of the pods of a slot's rank, in the order of `members`."""
        meta, pods = self.meta, self.spec.workers.pods_per_rank
        return names.pod_names(meta.name, meta.uid, slot, incarnation, pods)

    def absent(self, slot: Slot, incarnation: int) -> tuple[str, ...]:
        """Returns the names of the pods of a slot's rank that are not observed."""
        view = self.pod(slot, incarnation)
        there = set() if view is None else {pod.name for pod in view.pods}
        return tuple(name for name in self.pod_names(slot, incarnation) if name not in there)

    def pod(self, slot: Slot, incarnation: int) -> PodView | None:
        """Returns the slot's pod of one incarnation, if it exists. The pods of a rank are one view
        (`pods.together`)."""
        return next((p for p in self.pods.get(slot, ()) if p.incarnation == incarnation), None)

    def refusal(self, slot: Slot, incarnation: int) -> RefusedCreate | None:
        """Returns the API server's last refusal to create this pod, or one of its rank."""
        found = (self.observed.refused.get(name) for name in self.pod_names(slot, incarnation))
        return next((refusal for refusal in found if refusal is not None), None)

    def lost_at(self, slot: Slot, incarnation: int) -> datetime:
        """Returns when a slot lost its pod of this incarnation, or when it first lacked one if it had none.

        An operator that started later does not know when a pod vanished. The job then lacked one, of any slot.
        """
        created = self.conditions.get(status.PODS_CREATED)
        lacked = self.now if created is None or created.status != "False" else created.last_transition_time
        at = lost_at(self.pod(slot, incarnation)) or self.observed.vacant.get(slot) or lacked
        return max(at, self.old.start_time or at)

    def is_of_this_run(self, pod: PodView, skew: timedelta = SKEW) -> bool:
        """Returns whether a pod was created since the job began to run, or was resumed: earlier pods may have had
        another spec.

        Args:
            skew: how far the clock of the API server may be behind the operator's.
        """
        made, start = created_at(pod), self.old.start_time
        return made is not None and start is not None and made >= start - skew

    def was_desired(self, slot: Slot) -> bool:
        """Returns whether the last status had this slot. If not, this operator deleted its old pods, and they are not
        lost."""
        role = self.old.roles.get(ROLE_OF_LABEL[slot.role])
        return role is not None and slot.index < role.desired

    def outlived_suspension(self, slot: Slot) -> bool:
        """Returns whether the job resumes, when a pod that is still alive was created from a spec that may have changed
        since."""
        role = self.old.roles.get(ROLE_OF_LABEL[slot.role])
        return status.SUSPENDED in self.conditions and (role is None or role.desired == 0)


def facts_of(job: TrainingJob, observed: Observed, now: datetime, settings: PlanSettings) -> Facts:
    """Returns the facts for one call of `plan`, with the same arguments."""
    meta = job.metadata
    services = {s["metadata"]["name"]: s for s in observed.services if is_owned(s, meta.uid) and not is_deleting(s)}
    return Facts(
        job=job,
        observed=observed,
        now=now,
        settings=settings,
        pods=own_pods(observed.pods, meta.uid),
        services=services,
        addresses=tuple(
            _cluster_ip(services.get(names.service_name(meta.name, meta.uid, shard)))
            for shard in range(job.spec.parameter_servers.replicas)
        ),
        conditions={c.type: c for c in job.status.conditions},
    )


def desired_slots(job: TrainingJob) -> list[Slot]:
    """Returns the slots of a running job, servers first."""
    spec = job.spec
    slots = [Slot(contract.ROLE_SERVER, i) for i in range(spec.parameter_servers.replicas)]
    slots += [Slot(contract.ROLE_WORKER, i) for i in range(spec.workers.replicas)]
    if spec.evaluator is not None:
        slots.append(Slot(contract.ROLE_EVALUATOR, 0))
    return slots


def _cluster_ip(service: Manifest | None) -> str | None:
    spec: Mapping[str, Any] = (service.get("spec") or {}) if service is not None else {}
    ip = spec.get("clusterIP")
    return ip if isinstance(ip, str) and ip not in ("", "None") else None
