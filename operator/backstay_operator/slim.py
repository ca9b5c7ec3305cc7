"""The parts of a watched object that are kept in memory: those that the planner and the progress calls read.

A pod from the API server is 10 kB of JSON, most of it managedFields and the spec that the operator wrote. With 2000
pods this would be most of the operator's memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from backstay_operator.rights import JOBS, NETWORK_POLICIES, PODS, SERVICES, ResourceKind
from backstay_spec import contract

Json = dict[str, Any]

_CONTAINER: Final = ("name", "state", "lastState", "ready", "restartCount", "started", "image")
_STATUS: Final = ("phase", "reason", "message", "podIP", "startTime")
_CONDITION: Final = ("type", "status", "reason", "message", "lastTransitionTime")
_LAST_APPLIED: Final = "kubectl.kubernetes.io/last-applied-configuration"


def _metadata(body: Mapping[str, Any], *, annotations: bool) -> Json:
    kept = dict(body["metadata"])
    kept.pop("managedFields", None)
    if not annotations:
        kept.pop("annotations", None)
    return kept


def pod(body: Mapping[str, Any]) -> Json:
    """Returns the identity, owner, node and state of a pod."""
    status: Mapping[str, Any] = body.get("status") or {}
    kept: Json = {field: status[field] for field in _STATUS if field in status}
    for field in ("containerStatuses", "initContainerStatuses"):
        if status.get(field):
            kept[field] = [_only(container, _CONTAINER) for container in status[field]]
    if status.get("conditions"):
        kept["conditions"] = [_only(condition, _CONDITION) for condition in status["conditions"]]
    spec: Mapping[str, Any] = body.get("spec") or {}
    kept_spec = _only(spec, ("nodeName", "schedulingGates"))
    kept_spec["containers"] = [
        # A lost Service is created again with the address that its job's running pods have. A worker that was created
        # after training is recognized by its variable.
        {"name": contract.CONTAINER, "env": [var]}
        for container in spec.get("containers") or []
        if container.get("name") == contract.CONTAINER
        for var in container.get("env") or []
        if var.get("name") in (contract.ENV_SERVERS, contract.ENV_TRAINED)
    ]
    if spec.get("initContainers"):
        # A sidecar that runs or failed is not the reason why a pod does not start or died.
        kept_spec["initContainers"] = [_only(each, ("name", "restartPolicy")) for each in spec["initContainers"]]
    return {"metadata": _metadata(body, annotations=False), "spec": kept_spec, "status": kept}


def service(body: Mapping[str, Any]) -> Json:
    """Returns the owner and the selector of a Service."""
    spec: Mapping[str, Any] = body.get("spec") or {}
    return {"metadata": _metadata(body, annotations=False), "spec": dict(spec)}


def policy(body: Mapping[str, Any]) -> Json:
    """Returns the owner of a NetworkPolicy."""
    return {"metadata": _metadata(body, annotations=False)}


def job(body: Mapping[str, Any]) -> Json:
    """Returns the whole object without managedFields."""
    kept = dict(body)
    kept["metadata"] = _metadata(body, annotations=True)
    annotations = kept["metadata"].get("annotations")
    if annotations:
        kept["metadata"]["annotations"] = {k: v for k, v in annotations.items() if k != _LAST_APPLIED}
    return kept


def _only(source: Mapping[str, Any], fields: tuple[str, ...]) -> Json:
    return {field: source[field] for field in fields if field in source}


SLIM: Final[Mapping[ResourceKind, Callable[[Mapping[str, Any]], Json]]] = {
    JOBS: job,
    PODS: pod,
    SERVICES: service,
    NETWORK_POLICIES: policy,
}
