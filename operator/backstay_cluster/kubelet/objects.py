"""Small pure functions that read Kubernetes objects, for several parts of the node."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from backstay_cluster import quantity

Object = dict[str, Any]
Key = tuple[str, str]  # namespace, name
DEFAULT_GRACE = 30.0


def key_of(obj: Mapping[str, Any]) -> Key:
    """Namespace ("" for cluster-wide objects) and name."""
    meta = obj["metadata"]
    return meta.get("namespace", ""), meta["name"]


def own_grace(pod: Mapping[str, Any]) -> float:
    """Returns the seconds for which the pod's containers may continue after SIGTERM; 0 is a valid number."""
    seconds = pod["spec"].get("terminationGracePeriodSeconds")
    return DEFAULT_GRACE if seconds is None else float(seconds)


def timestamp(seconds: float) -> str:
    """Returns the seconds since the epoch as a metav1.Time."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def micro_timestamp(seconds: float) -> str:
    """Returns the seconds since the epoch as a metav1.MicroTime."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def is_terminal(pod: Mapping[str, Any]) -> bool:
    """Returns whether the pod has ended and will not run again."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def is_ready(pod: Mapping[str, Any]) -> bool:
    """Returns whether the pod's Ready condition is True."""
    conditions = pod.get("status", {}).get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Returns whether an equality selector, such as a Service's, matches."""
    return all(labels.get(name) == value for name, value in selector.items())


def container_requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    """Returns the resources that a container requests; a limit without a request counts as a request."""
    resources = container.get("resources") or {}
    merged = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: quantity.value(value) for name, value in merged.items()}


def is_sidecar(container: Mapping[str, Any]) -> bool:
    """Returns whether an init container is a sidecar: it runs beside the containers that start after it."""
    return bool(container.get("restartPolicy") == "Always")


def pod_requests(pod: Mapping[str, Any]) -> dict[str, Decimal]:
    """Returns the resources that a pod requests, as the sum over its containers and sidecars. If an init container and
    the sidecars before it request more, they count."""
    total: dict[str, Decimal] = {}
    largest: dict[str, Decimal] = {}
    for container in pod["spec"].get("initContainers") or []:
        for name, value in container_requests(container).items():
            beside = total.get(name, Decimal(0)) + value
            largest[name] = max(largest.get(name, Decimal(0)), beside)
            if is_sidecar(container):
                total[name] = beside
    for container in pod["spec"].get("containers") or []:
        for name, value in container_requests(container).items():
            total[name] = total.get(name, Decimal(0)) + value
    return {name: max(total.get(name, Decimal(0)), largest.get(name, Decimal(0))) for name in {**total, **largest}}


def reference(obj: Mapping[str, Any], kind: str, api_version: str = "v1") -> Object:
    """Returns an ObjectReference, for example an event's `involvedObject`."""
    meta = obj["metadata"]
    ref = {
        "apiVersion": api_version,
        "kind": kind,
        "name": meta["name"],
        "namespace": meta.get("namespace"),
        "uid": meta.get("uid"),
        "resourceVersion": meta.get("resourceVersion"),
    }
    return {name: value for name, value in ref.items() if value is not None}
