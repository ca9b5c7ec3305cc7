"""Builds the Services, Secret and NetworkPolicy of a job."""

from __future__ import annotations

from typing import Any

from backstay_spec import contract, names
from backstay_spec.observed import PlanSettings
from backstay_spec.types import ObjectMeta


def owner_reference(job: ObjectMeta) -> dict[str, Any]:
    """Makes the garbage collector delete an object with its job.

    It does not block the job's deletion, which would need the right to set finalizers (O6).
    """
    return {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def object_meta(job: ObjectMeta, name: str, component: str) -> dict[str, Any]:
    """Returns the metadata that all objects of a job have in common."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": names.object_labels(job.name, job.uid, component),
        "ownerReferences": [owner_reference(job)],
    }


def secret(job: ObjectMeta) -> dict[str, Any]:
    """Returns the job's Secret, still without its token (`actions.CreateSecret.with_token`)."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": object_meta(job, names.secret_name(job.name, job.uid), "token"),
        "type": "Opaque",
        "immutable": True,
    }


def service(job: ObjectMeta, shard: int, incarnation: int, cluster_ip: str | None = None) -> dict[str, Any]:
    """Returns the Service of a shard, which selects one incarnation of its server (O3).

    Args:
        job: the owner of the Service.
        shard: the shard.
        incarnation: the incarnation of the server to which the Service routes; at least 1.
        cluster_ip: the address to request, when running pods have it; None: any.
    """
    slot = names.Slot(contract.ROLE_SERVER, shard)
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_meta(job, names.service_name(job.name, job.uid, shard), contract.ROLE_SERVER),
        "spec": {
            "type": "ClusterIP",
            # Servers exchange messages before they are ready, so they must be reachable before.
            "publishNotReadyAddresses": True,
            "selector": names.slot_labels(job.name, job.uid, slot, incarnation),
            "ports": [
                {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
                for name, port in (
                    (contract.PORT_NAME_CONTROL, contract.PORT_CONTROL),
                    (contract.PORT_NAME_DATA, contract.PORT_DATA),
                )
            ],
        },
    }
    manifest["metadata"]["labels"][contract.LABEL_ROLE] = slot.role
    manifest["metadata"]["labels"][contract.LABEL_INDEX] = str(shard)
    if cluster_ip is not None:
        manifest["spec"]["clusterIP"] = cluster_ip
    return manifest


def network_policies(job: ObjectMeta, settings: PlanSettings, pods_per_rank: int) -> list[dict[str, Any]]:
    """Returns the connections that the job's pods accept (O7). Policies add to each other.

    Pods of the job reach both RPC ports, and the operator reaches the control port. Everyone reaches the metrics port,
    which serves only health and metrics. Where ranks have several pods, a second policy opens all ports of workers to
    workers. JAX, Gloo and NCCL listen on ports that the system chooses. Servers stay closed.
    """

    def port(number: int) -> dict[str, Any]:
        return {"port": number, "protocol": "TCP"}

    members = {"matchLabels": names.job_labels(job.name, job.uid)}
    workers = {"matchLabels": names.job_labels(job.name, job.uid) | {contract.LABEL_ROLE: contract.ROLE_WORKER}}
    operator: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}}
    }
    if settings.operator_labels:
        operator["podSelector"] = {"matchLabels": dict(settings.operator_labels)}
    of_all = [
        {"from": [{"podSelector": members}], "ports": [port(contract.PORT_CONTROL), port(contract.PORT_DATA)]},
        {"from": [operator], "ports": [port(contract.PORT_CONTROL)]},
        {"ports": [port(contract.PORT_METRICS)]},
    ]
    found = [(names.network_policy_name(job.name, job.uid), members, of_all)]
    if pods_per_rank > 1:
        among_workers: list[dict[str, Any]] = [{"from": [{"podSelector": workers}]}]
        found.append((names.members_policy_name(job.name, job.uid), workers, among_workers))
    return [
        {
            "apiVersion": "networking.k8s.io/v1",
            "kind": "NetworkPolicy",
            "metadata": object_meta(job, name, "network"),
            "spec": {"podSelector": selected, "policyTypes": ["Ingress"], "ingress": rules},
        }
        for name, selected, rules in found
    ]


def address(cluster_ip: str) -> str:
    """``host:port`` of a Service's control port; an IPv6 address in brackets."""
    host = f"[{cluster_ip}]" if ":" in cluster_ip else cluster_ip
    return f"{host}:{contract.PORT_CONTROL}"


def host_of(text: str) -> str:
    """Returns the address in what `address` wrote."""
    return text.rpartition(":")[0].strip("[]")
