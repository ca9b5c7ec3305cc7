"""Decides about the Secret, the NetworkPolicy and the Services of a job, and about pods that use a Service's old
address (O3)."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any, Final

from backstay_spec import contract, manifests, names
from backstay_spec.actions import (
    Action,
    CreateNetworkPolicy,
    CreateSecret,
    CreateService,
    DeleteNetworkPolicy,
    PatchService,
)
from backstay_spec.causes import Blocked, Obstacle, refusal_obstacle
from backstay_spec.observed import UNCOUNTED
from backstay_spec.planner.creating import REFUSED_RETRY
from backstay_spec.planner.deleting import deletions
from backstay_spec.planner.effects import Effects, Obstructed
from backstay_spec.planner.facts import Facts, desired_slots
from backstay_spec.planner.pods import PodView, is_deleting, is_owned
from backstay_spec.planner.record import Record

__all__ = ["missing", "refused", "repointed", "with_old_address"]

# The time between two creations of a Secret that may have been deleted.
SECRET_RETRY: Final = timedelta(seconds=10)
ADDRESS_PATIENCE: Final = timedelta(seconds=20)
_INCARNATION_PATH: Final = "/spec/selector/" + contract.LABEL_INCARNATION.replace("~", "~0").replace("/", "~1")


def missing(facts: Facts, record: Record, *, lacks_config: bool) -> Effects:
    """Create the missing objects among Secret, NetworkPolicy and Services; refused ones are tried again later.

    The operator cannot read Secrets (O7). So the Secret is also created while a pod reports that a Secret or a
    ConfigMap is missing.

    Args:
        lacks_config: whether there is such a pod.
    """
    return _missing_secret(facts, lacks_config) + _missing_policy(facts) + _missing_services(facts, record)


def _missing_secret(facts: Facts, lacks_config: bool) -> Effects:
    meta, observed = facts.meta, facts.observed
    due, waits = not observed.secret_ensured, Effects()
    if lacks_config and observed.secret_at is not None:
        due = facts.now >= observed.secret_at + SECRET_RETRY
        waits = Effects(wake=max(facts.now, observed.secret_at) + SECRET_RETRY)
    if not due:
        return waits
    return waits + _if_due(facts, names.secret_name(meta.name, meta.uid), CreateSecret(manifests.secret(meta)))


def _missing_policy(facts: Facts) -> Effects:
    meta, pods_per_rank = facts.meta, facts.spec.workers.pods_per_rank
    found = {
        policy["metadata"]["name"]: policy["metadata"]["uid"]
        for policy in facts.observed.network_policies
        if is_owned(policy, meta.uid) and not is_deleting(policy)
    }
    policies = manifests.network_policies(meta, facts.settings, pods_per_rank)
    wanted = {policy["metadata"]["name"]: policy for policy in policies}
    effects = Effects()
    for name, policy in wanted.items():
        if name not in found:
            effects += _if_due(facts, name, CreateNetworkPolicy(policy))
    if effects.actions or effects.wake:
        return effects
    # `podsPerRank` was changed while the job was suspended. One policy cannot forbid what another one allows.
    return Effects(actions=tuple(DeleteNetworkPolicy(name, uid) for name, uid in found.items() if name not in wanted))


def _missing_services(facts: Facts, record: Record) -> Effects:
    effects = Effects()
    for shard in facts.shards:
        name = names.service_name(facts.meta.name, facts.meta.uid, shard)
        if name in facts.services:
            continue
        # The address that running pods use, unless it is refused for long because another Service has it. Immediately
        # after the deletion of a Service its address is refused too, until the API server has released it.
        refusal = facts.observed.refused.get(name)
        taken = (
            refusal is not None
            and refusal.reason == "Invalid"
            and facts.now >= (refusal.since or refusal.at) + ADDRESS_PATIENCE
        )
        known = None if taken else _known_address(facts, shard)
        manifest = manifests.service(facts.meta, shard, record.selected(shard), known)
        effects += _if_due(facts, name, CreateService(manifest))
    return effects


def refused(facts: Facts, record: Record) -> Effects:
    """Returns the obstacle of each slot without a living pod, if the API server refuses an object that new pods need.

    Such an object is the job's Secret, or the Service of a shard. Pods that run do not need it to be created again.
    """
    meta = facts.meta
    needed = {} if facts.observed.secret_ensured else {names.secret_name(meta.name, meta.uid): "Secret"}
    services = (names.service_name(meta.name, meta.uid, shard) for shard in facts.shards)
    needed |= {name: "Service" for name in services if name not in facts.services}
    known = ((name, facts.observed.refused.get(name)) for name in needed)
    name, refusal = next(((name, found) for name, found in known if found is not None), ("", None))
    if refusal is None:
        return Effects()
    text = f"the {needed[name]} {name}: {refusal_obstacle(refusal.reason, refusal.message).text}"
    obstacle = Obstacle(Blocked.REFUSED, text)
    tried = facts.now if refusal.reason in UNCOUNTED else refusal.since or refusal.at
    found = []
    for slot in desired_slots(facts.job):
        pod = facts.pod(slot, record.current(slot))
        if pod is None or not pod.alive:
            # While its pod ran, the refusal counted for nothing.
            since = max(tried, facts.lost_at(slot, record.current(slot))) if facts.trained else tried
            found.append(Obstructed(slot, obstacle, since))
    return Effects(obstructed=tuple(found))


def _if_due(facts: Facts, name: str, action: Action) -> Effects:
    refusal = facts.observed.refused.get(name)
    if refusal is None or facts.now >= refusal.at + REFUSED_RETRY:
        return Effects(actions=(action,))
    return Effects(wake=refusal.at + REFUSED_RETRY)


def repointed(facts: Facts, record: Record) -> Effects:
    """Each shard's Service selects the incarnation of the active server (O3)."""
    patches = []
    for shard in facts.shards:
        name = names.service_name(facts.meta.name, facts.meta.uid, shard)
        service = facts.services.get(name)
        if service is None:
            continue
        selector: dict[str, Any] = (service.get("spec") or {}).get("selector") or {}
        selected, wanted = selector.get(contract.LABEL_INCARNATION), str(record.selected(shard))
        if selected is None:
            patches.append(PatchService(name, ({"op": "add", "path": _INCARNATION_PATH, "value": wanted},)))
        elif selected != wanted:
            test = {"op": "test", "path": _INCARNATION_PATH, "value": selected}
            change = {"op": "replace", "path": _INCARNATION_PATH, "value": wanted}
            patches.append(PatchService(name, (test, change)))
    return Effects(actions=tuple(patches))


def with_old_address(facts: Facts, deleted: Collection[str]) -> Effects:
    """Delete the pods that call a shard at an address that no Service has any more: they would never stop (T8).

    Args:
        deleted: uids of the pods that this plan deletes already.
    """
    current = list(facts.addresses)
    return Effects(
        actions=tuple(
            action
            for pods in facts.pods.values()
            for pod in pods
            if pod.alive and (known := _addresses_of(pod)) and known != current
            for action in deletions(pod, None, "AddressChanged", deleted)
        )
    )


def _known_address(facts: Facts, shard: int) -> str | None:
    """Returns the address of a shard's Service with which the job's running pods were started."""
    for pods in facts.pods.values():
        for pod in pods:
            if pod.alive and (known := _addresses_of(pod)):
                return known[shard] or None if shard < len(known) else None
    return None


def _addresses_of(pod: PodView) -> list[str]:
    """Returns the addresses of the shards' Services with which a pod was started; empty if they cannot be read."""
    for container in (pod.raw.get("spec") or {}).get("containers") or ():
        for variable in container.get("env") or ():
            if variable.get("name") == contract.ENV_SERVERS:
                return [manifests.host_of(known) for known in str(variable.get("value") or "").split(",")]
    return []
