"""`plan`: what to do about one job, as a pure function of the job, what is observed, and the time (O1).

It is called whenever something may have changed, looks at everything, and says what is still missing; it keeps no
memory but the job's status, so it may be called twice, late, or by another process. `backstay_spec.observed` is what
goes in, `backstay_spec.actions` is what comes out and how to carry it out.

The order of things in a job's life:

1. Secret, NetworkPolicy and one Service a shard; their addresses go into the pods' environment.
2. A pod for each place (`plan_slots`), replaced as it dies or succeeded by its standby (`plan_standbys`), until a
   server tells the outcome (`plan_end`).
3. Clean-up, and at last the job's own deletion.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from backstay_spec import contract, manifests, manifests_pod, names, plan_standbys, status
from backstay_spec.actions import (
    CreateNetworkPolicy,
    CreatePod,
    CreateSecret,
    CreateService,
    DeletePod,
    PatchService,
    Plan,
)
from backstay_spec.causes import Blocked
from backstay_spec.events import normal, warning
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Manifest, Observed, PlanSettings, Progress
from backstay_spec.plan_draft import Draft
from backstay_spec.plan_end import apply_active_deadline, apply_outcome, clean_up, suspend
from backstay_spec.plan_places import (
    REFUSED_RETRY,
    Hindered,
    Places,
    newest_pod,
    record_seen,
    serving_incarnation,
)
from backstay_spec.plan_pods import PodView, is_deleting, is_owned, own_pods
from backstay_spec.plan_slots import Slots, desired_slots, remove_superfluous
from backstay_spec.quorum import quorum_of
from backstay_spec.types import ObjectMeta, TrainingJob
from backstay_spec.types_status import TrainingJobStatus

__all__ = ["plan", "refuse"]

# How often a Secret is made that may have been deleted.
SECRET_RETRY: Final = timedelta(seconds=10)
ADDRESS_PATIENCE: Final = timedelta(seconds=20)
# Containers that have not started by then are worth a word.
SLOW_START: Final = timedelta(seconds=30)
_INVALID_SPEC: Final = "InvalidSpec"
_INCARNATION_PATH: Final = "/spec/selector/" + contract.LABEL_INCARNATION.replace("~", "~0").replace("/", "~1")


def plan(job: TrainingJob, observed: Observed, now: datetime, settings: PlanSettings) -> Plan:
    """What to do about `job` now.

    Args:
        job: as the API server has it, with the status that was last written. Its spec has passed the rules; one that
            has not goes to `refuse`.
        observed: its objects and its servers' answers.
        now: aware.
        settings: the operator's.
    """
    if job.metadata.deletion_timestamp is not None:
        return Plan()  # the garbage collector does the rest
    draft = Draft(job.metadata, job.status, now)
    draft.pods = own_pods(observed.pods, job.metadata.uid)
    record_seen(draft)
    if not draft.finished():
        apply_outcome(draft, observed.progress)
    if not draft.finished():
        _run(draft, job, observed, settings)
    if draft.finished():
        draft.actions.clear()
        clean_up(draft, job)
    _count_pods(draft, job)
    return draft.plan(observed)


def refuse(
    metadata: ObjectMeta, old: TrainingJobStatus, message: str, now: datetime, pods: Sequence[Manifest] = ()
) -> Plan:
    """The plan for a job whose spec breaks a rule that the API server did not hold: it fails, and its pods end.

    Args:
        metadata, old: the job's, of which more could not be read.
        message: what is wrong and what would be right.
        now: aware.
        pods: as in `Observed`; some may run when a running job is edited.
    """
    draft = Draft(metadata, old, now)
    ended_before = draft.finished()
    draft.fail(_INVALID_SPEC, message)
    failed = draft.conditions.get(status.FAILED)
    if failed is not None and failed.reason == _INVALID_SPEC:
        draft.actions.extend(
            DeletePod(pod.name, pod.uid, None, _INVALID_SPEC)
            for found in own_pods(pods, metadata.uid).values()
            for pod in found
            if not (pod.deleting or pod.terminal)
        )
    return Plan(actions=tuple(draft.actions)) if ended_before else draft.plan(Observed())


def _run(draft: Draft, job: TrainingJob, observed: Observed, settings: PlanSettings) -> None:
    _describe_checkpoints(draft, job, observed.progress)
    if job.spec.run_policy.suspend:
        suspend(draft)
        return
    _start(draft)
    apply_active_deadline(draft, job.spec.run_policy)
    if draft.finished():
        return
    slots = desired_slots(job)
    shards = job.spec.parameter_servers.replicas
    services = _services(job.metadata, observed.services)
    addresses = [
        _cluster_ip(services.get(names.service_name(job.metadata.name, job.metadata.uid, i))) for i in range(shards)
    ]
    servers = [manifests.address(ip) for ip in addresses if ip is not None]
    can_create = observed.secret_ensured and len(servers) == shards
    judged = Places(draft, job, observed, can_create=can_create)
    judge = Slots(judged)
    wanted = set(slots)
    for key in set(draft.backoff) - {key for slot in slots for key in (slot.key, plan_standbys.backoff_key(slot))}:
        del draft.backoff[key]
    for slot in slots:
        judge.judge(slot)
        if draft.finished():
            return
    _apply_pending_deadline(draft, job, judged.hindered)
    if draft.finished():
        return
    if can_create:
        _note_scale(draft, job)
        for role in ROLE_OF_LABEL.values():
            draft.desired[role] = sum(1 for slot in slots if ROLE_OF_LABEL[slot.role] == role)
        draft.desired["ParameterServer"] *= 1 + job.spec.parameter_servers.standbys
    starved = any(h.obstacle.blocked is Blocked.CONFIG for h in judged.hindered)
    _ensure_infrastructure(draft, job, observed, settings, services, starved=starved)
    if job.spec.parameter_servers.standbys:
        _point_services(draft, job, services)  # nobody waits for a new pod, but for the one that serves now
    for birth in judged.births:
        active = serving_incarnation(draft, birth.slot.index) if birth.slot.role == contract.ROLE_SERVER else 0
        draft.actions.append(
            CreatePod(
                manifests_pod.pod(job, birth.slot, birth.incarnation, servers, settings.log_format, active),
                birth.slot.role,
                birth.slot.index,
                birth.incarnation,
                birth.cause,
            )
        )
    if not job.spec.parameter_servers.standbys:
        _point_services(draft, job, services)
    remove_superfluous(draft, wanted, observed.progress)
    if can_create:
        _end_misled(draft, addresses)
    _describe_pods(draft, slots, judged, observed.progress, can_create=can_create)
    plan_standbys.describe(judged)


def _start(draft: Draft) -> None:
    """The job runs, for the first time or again: the time that it may run begins."""
    if status.holds(draft.conditions, status.SUSPENDED):
        draft.condition(status.SUSPENDED, False, "Resumed", "spec.runPolicy.suspend is false")
        draft.events.append(normal("Resumed", "creating the job's pods again"))
    if draft.old.start_time is None:
        draft.fields["start_time"] = status.whole_seconds(draft.now)


def _services(meta: ObjectMeta, found: Sequence[Manifest]) -> dict[str, Manifest]:
    return {s["metadata"]["name"]: s for s in found if is_owned(s, meta.uid) and not is_deleting(s)}


def _cluster_ip(service: Manifest | None) -> str | None:
    ip = (service.get("spec") or {}).get("clusterIP") if service is not None else None
    return ip if isinstance(ip, str) and ip not in ("", "None") else None


def _ensure_infrastructure(
    draft: Draft,
    job: TrainingJob,
    observed: Observed,
    settings: PlanSettings,
    services: dict[str, Manifest],
    *,
    starved: bool,
) -> None:
    """Create what is missing of Secret, NetworkPolicy and Services; what was refused is tried again in a while.

    Nobody may look whether the Secret is still there (O7), so it is also made while a pod is `starved`: lacks a Secret
    or a ConfigMap that it names.
    """
    meta = job.metadata

    def due(name: str) -> bool:
        refusal = observed.refused.get(name)
        if refusal is None or draft.now >= refusal.at + REFUSED_RETRY:
            return True
        draft.wake_at(refusal.at + REFUSED_RETRY)
        return False

    secret_due = not observed.secret_ensured
    if starved and observed.secret_at is not None:
        secret_due = draft.now >= observed.secret_at + SECRET_RETRY
        draft.wake_at(max(draft.now, observed.secret_at) + SECRET_RETRY)
    if secret_due and due(names.secret_name(meta.name, meta.uid)):
        draft.actions.append(CreateSecret(manifests.secret(meta)))
    policy = names.network_policy_name(meta.name, meta.uid)
    if due(policy) and not any(
        p["metadata"]["name"] == policy and is_owned(p, meta.uid) and not is_deleting(p)
        for p in observed.network_policies
    ):
        draft.actions.append(CreateNetworkPolicy(manifests.network_policy(meta, settings)))
    for shard in range(job.spec.parameter_servers.replicas):
        name = names.service_name(meta.name, meta.uid, shard)
        if name not in services and due(name):
            refusal = observed.refused.get(name)
            # The address that living pods know; unless it is refused for long, because somebody else has it now. Right
            # after a Service was deleted its address is refused too, until the API server has freed it.
            taken = (
                refusal is not None
                and refusal.reason == "Invalid"
                and draft.now >= (refusal.since or refusal.at) + ADDRESS_PATIENCE
            )
            known = None if taken else _known_address(draft, shard)
            incarnation = serving_incarnation(draft, shard)
            draft.actions.append(CreateService(manifests.service(meta, shard, incarnation, known)))


def _known_address(draft: Draft, shard: int) -> str | None:
    """The address of a shard's Service that the job's living pods were started with."""
    for pods in draft.pods.values():
        for pod in pods:
            if pod.alive and (known := _addresses_of(pod)):
                return known[shard] or None if shard < len(known) else None
    return None


def _addresses_of(pod: PodView) -> list[str]:
    """The addresses of the shards' Services that a pod was started with; empty when they cannot be read."""
    for container in (pod.raw.get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == contract.ENV_SERVERS:
                return [manifests.host_of(known) for known in str(variable.get("value") or "").split(",")]
    return []


def _end_misled(draft: Draft, addresses: Sequence[str | None]) -> None:
    """Delete the pods that look for a shard's server where no Service is any more: they would do so for ever (T8)."""
    ended = {action.uid for action in draft.actions if isinstance(action, DeletePod)}
    draft.actions.extend(
        DeletePod(pod.name, pod.uid, None, "AddressChanged")
        for pods in draft.pods.values()
        for pod in pods
        if pod.alive and pod.uid not in ended and (known := _addresses_of(pod)) and known != list(addresses)
    )


def _point_services(draft: Draft, job: TrainingJob, services: dict[str, Manifest]) -> None:
    """Let each shard's Service select the incarnation that serves (O3)."""
    for shard in range(job.spec.parameter_servers.replicas):
        name = names.service_name(job.metadata.name, job.metadata.uid, shard)
        service = services.get(name)
        if service is None:
            continue
        selector = (service.get("spec") or {}).get("selector") or {}
        selected, wished = selector.get(contract.LABEL_INCARNATION), str(serving_incarnation(draft, shard))
        if selected != wished:
            draft.actions.append(
                PatchService(
                    name,
                    (
                        {"op": "test", "path": _INCARNATION_PATH, "value": selected},
                        {"op": "replace", "path": _INCARNATION_PATH, "value": wished},
                    )
                    if selected is not None
                    else ({"op": "add", "path": _INCARNATION_PATH, "value": wished},),
                )
            )


def _apply_pending_deadline(draft: Draft, job: TrainingJob, hindered: Sequence[Hindered]) -> None:
    """End the job if a pod that it cannot do without could not be started in time: a server, or so many workers that
    no update has its quorum."""
    if not hindered:
        return
    limit = timedelta(seconds=job.spec.run_policy.pending_deadline_seconds)
    world = job.spec.workers.replicas
    quorum = quorum_of(job.spec.update.backups, world) if job.spec.update.mode == "Sync" else 1
    missing = sum(1 for h in hindered if h.slot.role == contract.ROLE_WORKER)
    for h in hindered:
        if (
            h.standby
            or h.slot.role == contract.ROLE_EVALUATOR
            or (h.slot.role == contract.ROLE_WORKER and world - missing >= quorum)
        ):
            continue
        if draft.now >= h.since + limit:
            failed = "did not join" if h.obstacle.blocked is Blocked.NOT_JOINED else "could not be started"
            draft.fail(
                h.obstacle.blocked,
                f"{h.slot.text} {failed} within spec.runPolicy.pendingDeadlineSeconds "
                f"({job.spec.run_policy.pending_deadline_seconds} s): {h.obstacle.text}",
            )
            return
        draft.wake_at(h.since + limit)


def _slow(draft: Draft, judged: Places) -> list[Hindered]:
    """The places whose pods take longer to start than one expects."""
    found = []
    for h in judged.hindered:
        if h.obstacle.blocked is Blocked.NOT_STARTED:
            if draft.now >= h.since + SLOW_START:
                found.append(h)
            else:
                draft.wake_at(h.since + SLOW_START)
    return found


def _note_scale(draft: Draft, job: TrainingJob) -> None:
    before, after = draft.desired.get("Worker", 0), job.spec.workers.replicas
    if before not in (0, after):
        draft.events.append(normal("Scaled", f"workers: {before} -> {after}"))


def _describe_checkpoints(draft: Draft, job: TrainingJob, progress: Progress | None) -> None:
    if job.spec.checkpoint.uri is None and job.spec.checkpoint.volume is None:
        message = "spec.checkpoint names neither uri nor volume: nothing is stored, and what a server held dies with it"
        if draft.condition(status.CHECKPOINTING, False, "NotConfigured", message):
            draft.events.append(warning("NotConfigured", message))
    elif progress is not None and progress.checkpoint_error:
        if draft.condition(status.CHECKPOINTING, False, "WriteFailed", progress.checkpoint_error):
            draft.events.append(warning("CheckpointFailed", progress.checkpoint_error))
    else:
        known = draft.conditions.get(status.CHECKPOINTING)
        if progress is not None or known is None or known.reason != "WriteFailed":
            draft.condition(status.CHECKPOINTING, True, "Configured", "checkpoints are stored")


def _describe_pods(
    draft: Draft, slots: Sequence[Slot], judged: Places, progress: Progress | None, *, can_create: bool
) -> None:
    """The conditions PodsCreated, PodsReady and Running."""
    newest = {slot: newest_pod(draft, slot) for slot in slots}
    ready = {slot for slot, pod in newest.items() if pod is not None and pod.alive and pod.ready}
    _describe_creation(draft, judged, newest, can_create=can_create)

    starting = (Blocked.NOT_STARTED, Blocked.NOT_JOINED)
    obstacles = [h for h in judged.hindered if h.obstacle.blocked not in starting] or _slow(draft, judged)
    message = f"{len(ready)} of {len(slots)} pods are ready"
    if len(ready) == len(slots):
        draft.condition(status.PODS_READY, True, "AllReady", message)
    elif obstacles:
        worst = obstacles[0]
        text = f"{worst.text}: {worst.obstacle.text}"
        if draft.condition(status.PODS_READY, False, worst.obstacle.blocked, f"{message}; {text}"):
            draft.events.append(warning(worst.obstacle.blocked, text))
    else:
        backing_off = [slot.text for slot in slots if draft.waits(slot.key) is not None]
        if backing_off:
            draft.condition(
                status.PODS_READY, False, "BackingOff", f"{message}; waiting: {', '.join(backing_off[:10])}"
            )
        else:
            draft.condition(status.PODS_READY, False, "NotReady", message)

    if status.holds(draft.conditions, status.RUNNING):
        return
    serving = all(slot in ready for slot in slots if slot.role == contract.ROLE_SERVER)
    working = any(slot.role == contract.ROLE_WORKER for slot in ready)
    stepped = progress is not None and (progress.step or 0) > (draft.old.step or 0)
    if (serving and working) or stepped:
        draft.condition(status.RUNNING, True, "Training", "the servers serve, and workers work")
        draft.events.append(normal("Running", f"training has begun: {message}"))
    elif any(pod is not None and pod.started for pod in newest.values()):
        draft.condition(status.RUNNING, False, status.REASON_STARTING, "pods are starting")
    else:
        draft.condition(status.RUNNING, False, status.REASON_PENDING, "no pod has started")


def _describe_creation(draft: Draft, judged: Places, newest: dict[Slot, PodView | None], *, can_create: bool) -> None:
    """PodsCreated is Unknown from the status that records a new incarnation until all are seen: an operator that finds
    it so, and a pod missing, cannot know that it ever was."""
    before = draft.conditions.get(status.PODS_CREATED)
    if judged.refused:
        first = next(h for h in judged.hindered if h.obstacle.blocked in (Blocked.REFUSED, Blocked.POD_INVALID))
        draft.condition(status.PODS_CREATED, False, first.obstacle.blocked, f"{first.slot.text}: {first.obstacle.text}")
    elif judged.births:
        if before is None or before.status != "False":
            draft.condition(status.PODS_CREATED, None, "Creating", "pods are being created")
    elif not can_create:
        if before is None:
            draft.condition(status.PODS_CREATED, None, "Preparing", "Secret and Services are being created")
    elif all(pod is not None or draft.waits(slot.key) is not None for slot, pod in newest.items()):
        draft.created_late = True


def _count_pods(draft: Draft, job: TrainingJob) -> None:
    """The counters of the status: ready pods of each role, and the workers for the scale subresource."""
    ready: Counter[str] = Counter()
    existing = {
        slot for slot, pods in draft.pods.items() if slot.role == contract.ROLE_WORKER and any(p.alive for p in pods)
    }
    for slot in draft.pods:
        pod = newest_pod(draft, slot)
        if pod is not None and pod.alive and pod.ready:
            ready[ROLE_OF_LABEL[slot.role]] += 1
        if slot.key in draft.active:
            standbys = (p for p in draft.pods[slot] if p.incarnation > draft.active[slot.key])
            ready[ROLE_OF_LABEL[slot.role]] += sum(1 for p in standbys if p.alive and p.ready)
    for role in ROLE_OF_LABEL.values():
        draft.ready[role] = min(ready[role], draft.desired.get(role, 0))
    for action in draft.actions:
        if isinstance(action, CreatePod) and action.role == contract.ROLE_WORKER:
            existing.add(Slot(action.role, action.index))
    draft.fields["replicas"] = len(existing)
    selector = {**names.job_labels(job.metadata.name, job.metadata.uid), contract.LABEL_ROLE: contract.ROLE_WORKER}
    draft.fields["selector"] = ",".join(f"{key}={value}" for key, value in selector.items())
