"""Applies the defaults, admission, permitted changes, and graceful deletion of pods."""

from __future__ import annotations

import difflib
import json
import random
from typing import TYPE_CHECKING, Any, Final

from backstay_cluster import quantity
from backstay_cluster.apiserver.errors import StatusCause, bad_request, forbidden, forbidden_field
from backstay_cluster.apiserver.objects import Obj, dig, now
from backstay_cluster.apiserver.pod_rules import check_spec
from backstay_cluster.apiserver.strategy import Strategy

if TYPE_CHECKING:
    from backstay_cluster.apiserver.resources import Resource
    from backstay_cluster.apiserver.rest import Api

_MUTABLE: Final = (
    "pod updates may not change fields other than `spec.containers[*].image`,`spec.initContainers[*].image`,"
    "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing tolerations),"
    "`spec.terminationGracePeriodSeconds` (allow it to be set to 1 if it was previously negative)"
)
_VOLUME_MODES: Final = ("secret", "configMap", "downwardAPI", "projected")
_SYSTEM_PRIORITIES: Final = {"system-node-critical": 2000001000, "system-cluster-critical": 2000000000}


class PodStrategy(Strategy):
    """The rules of pods."""

    returns_deleted = True

    def __init__(self, api: Api, resource: Resource) -> None:
        super().__init__(resource)
        self._api = api

    def default(self, obj: Obj) -> None:
        spec = obj.get("spec")
        if isinstance(spec, dict):
            default_spec(spec)
        status = obj.setdefault("status", {"phase": "Pending"})
        status.setdefault("phase", "Pending")
        status["qosClass"] = status.get("qosClass") or _qos(spec or {})
        for condition in status.get("conditions", ()):
            condition.setdefault("lastProbeTime", None)
            condition.setdefault("lastTransitionTime", None)
        for name in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
            for container in status.get(name, ()):
                for key, value in (("ready", False), ("restartCount", 0), ("image", ""), ("imageID", "")):
                    container.setdefault(key, value)
                container.setdefault("state", {})
                container.setdefault("lastState", {})

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        spec = obj.setdefault("spec", {})
        if spec.get("schedulingGates"):
            text = "Scheduling is blocked due to non-empty scheduling gates"
            condition = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": text}
            times = {"lastProbeTime": None, "lastTransitionTime": now()}
            obj.setdefault("status", {})["conditions"] = [{**condition, **times}]
        self._service_account(obj, spec)
        self._priority(obj, spec)
        present = spec.setdefault("tolerations", [])
        for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
            if not any(t.get("key") in {key, None, ""} and t.get("effect") in {None, "", "NoExecute"} for t in present):
                present.append({"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 300})

    def _service_account(self, obj: Obj, spec: Obj) -> None:
        name = spec.get("serviceAccountName") or spec.get("serviceAccount") or "default"
        spec["serviceAccountName"] = spec["serviceAccount"] = name
        data = obj["metadata"]
        account = self._api.find(self._api.registry.must("", "serviceaccounts"), (data["namespace"], name))
        if account is None:
            text = f'error looking up service account {data["namespace"]}/{name}: serviceaccount "{name}" not found'
            raise forbidden("", "pods", data["name"], text)
        mounted = spec.get("automountServiceAccountToken")
        if mounted is None:
            mounted = account.obj.get("automountServiceAccountToken")
        if mounted is False:
            return
        path = "/var/run/secrets/kubernetes.io/serviceaccount"
        containers = [*spec.get("initContainers", ()), *spec.get("containers", ())]
        without = [c for c in containers if all(m.get("mountPath") != path for m in c.get("volumeMounts", ()))]
        if not without:
            return
        volume = "kube-api-access-" + "".join(random.choices("bcdfghjklmnpqrstvwxz2456789", k=5))  # noqa: S311
        for container in without:
            container.setdefault("volumeMounts", []).append({"name": volume, "readOnly": True, "mountPath": path})
        namespace = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
        sources: list[Obj] = [
            {"serviceAccountToken": {"expirationSeconds": 3607, "path": "token"}},
            {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
            {"downwardAPI": {"items": [namespace]}},
        ]
        spec.setdefault("volumes", []).append({"name": volume, "projected": {"sources": sources, "defaultMode": 420}})

    def _priority(self, obj: Obj, spec: Obj) -> None:
        name = spec.get("priorityClassName")
        spec.setdefault("preemptionPolicy", "PreemptLowerPriority")
        if not name:
            spec["priority"] = 0
            for stored in self._api.select(self._api.registry.must("scheduling.k8s.io", "priorityclasses"), None).items:
                if stored.obj.get("globalDefault"):
                    spec["priority"] = stored.obj.get("value", 0)
                    spec["priorityClassName"] = stored.obj["metadata"]["name"]
            return
        if name in _SYSTEM_PRIORITIES:
            spec["priority"] = _SYSTEM_PRIORITIES[name]
            return
        found = self._api.find(self._api.registry.must("scheduling.k8s.io", "priorityclasses"), ("", name))
        if found is None:
            text = f"no PriorityClass with name {name} was found"
            raise forbidden("", "pods", obj["metadata"]["name"], text)
        spec["priority"] = found.obj.get("value", 0)
        spec["preemptionPolicy"] = found.obj.get("preemptionPolicy", "PreemptLowerPriority")

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        causes = check_spec(obj.get("spec") or {}, "spec")
        if old is None:
            return causes
        return causes + self._immutable(obj["spec"], old["spec"])

    @staticmethod
    def _immutable(spec: Obj, old: Obj) -> list[StatusCause]:
        for name in ("containers", "initContainers"):
            if len(spec.get(name, ())) != len(old.get(name, ())):
                return [forbidden_field("spec.containers", "pod updates may not add or remove containers")]
        masked = dict(spec)
        for name in ("containers", "initContainers"):
            if name in old:
                masked[name] = [
                    {**new, "image": before.get("image")} for new, before in zip(spec[name], old[name], strict=True)
                ]
        for name in ("activeDeadlineSeconds", "tolerations", "schedulingGates"):
            if name in old:
                masked[name] = old[name]
            else:
                masked.pop(name, None)
        if gates := _new_gates(spec, old):
            return gates
        kept = old.get("tolerations", [])
        if any(t not in spec.get("tolerations", []) for t in kept):
            return [
                forbidden_field(
                    "spec.tolerations", "existing toleration can not be modified except its tolerationSeconds"
                )
            ]
        if (old.get("terminationGracePeriodSeconds") or 0) < 0 and spec.get("terminationGracePeriodSeconds") == 1:
            masked["terminationGracePeriodSeconds"] = old["terminationGracePeriodSeconds"]
        if masked == old:
            return []
        one, other = (json.dumps(s, indent=1, sort_keys=True).splitlines() for s in (old, masked))
        changed = list(difflib.unified_diff(one, other, n=3, lineterm=""))[2:]
        return [forbidden_field("spec", _MUTABLE + "\n" + "\n".join(changed) + "\n")]

    def grace_period(self, obj: Obj, requested: int | None) -> int | None:
        spec = obj.get("spec") or {}
        period = requested if requested is not None else spec.get("terminationGracePeriodSeconds", 30)
        if not spec.get("nodeName") or dig(obj, "status", "phase") in {"Succeeded", "Failed"}:
            period = 0  # no process of the pod runs that would need the time
        return 1 if period < 0 else int(period)


def _new_gates(spec: Obj, old: Obj) -> list[StatusCause]:
    """Returns the errors of scheduling gates that were added."""
    known = old.get("schedulingGates") or ()
    return [
        forbidden_field(
            f"spec.schedulingGates[{at}].name",
            f"only deletion is allowed, but found new scheduling gate '{gate.get('name')}'",
        )
        for at, gate in enumerate(spec.get("schedulingGates") or ())
        if gate not in known
    ]


def default_spec(spec: Obj) -> None:
    """Fill in the defaults of a PodSpec."""
    spec.setdefault("restartPolicy", "Always")
    spec.setdefault("terminationGracePeriodSeconds", 30)
    spec.setdefault("dnsPolicy", "ClusterFirst")
    spec.setdefault("securityContext", {})
    spec.setdefault("schedulerName", "default-scheduler")
    spec.setdefault("enableServiceLinks", True)
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        _default_container(container)
    for volume in spec.get("volumes", ()):
        if set(volume) == {"name"}:
            volume["emptyDir"] = {}
        for name in _VOLUME_MODES:
            if isinstance(volume.get(name), dict):
                volume[name].setdefault("defaultMode", 420)
        if isinstance(volume.get("hostPath"), dict):
            volume["hostPath"].setdefault("type", "")
        _field_refs(dig(volume, "downwardAPI", "items") or [])
        for source in dig(volume, "projected", "sources") or []:
            _field_refs(dig(source, "downwardAPI", "items") or [])


def _field_refs(items: list[Any]) -> None:
    for item in items:
        if isinstance(item.get("fieldRef"), dict):
            item["fieldRef"].setdefault("apiVersion", "v1")


def _default_container(container: Obj) -> None:
    image = container.get("image", "")
    tag = image.split("@")[0].rsplit("/", 1)[-1].partition(":")[2]
    latest = "@" not in image and tag in {"", "latest"}
    container.setdefault("imagePullPolicy", "Always" if latest else "IfNotPresent")
    container.setdefault("terminationMessagePath", "/dev/termination-log")
    container.setdefault("terminationMessagePolicy", "File")
    resources = container.setdefault("resources", {})
    for name in ("limits", "requests"):
        for key, amount in (resources.get(name) or {}).items():
            try:
                resources[name][key] = quantity.canonical(amount)
            except ValueError as error:
                raise bad_request(str(error)) from None
    # The defaults are those of a real API server: the operator compares pods with what it has written.
    for key, amount in resources.get("limits", {}).items():
        resources.setdefault("requests", {}).setdefault(key, amount)
    for port in container.get("ports", ()):
        port.setdefault("protocol", "TCP")
    for variable in container.get("env", ()):
        reference = dig(variable, "valueFrom", "fieldRef")
        if isinstance(reference, dict):
            reference.setdefault("apiVersion", "v1")
    for name in ("livenessProbe", "readinessProbe", "startupProbe"):
        probe = container.get(name)
        if isinstance(probe, dict):
            for key, value in (("timeoutSeconds", 1), ("periodSeconds", 10), ("successThreshold", 1)):
                probe.setdefault(key, value)
            probe.setdefault("failureThreshold", 3)
            _default_handler(probe)
    for hook in (container.get("lifecycle") or {}).values():
        if isinstance(hook, dict):
            _default_handler(hook)


def _default_handler(handler: Obj) -> None:
    if isinstance(handler.get("httpGet"), dict):
        handler["httpGet"].setdefault("path", "/")
        handler["httpGet"].setdefault("scheme", "HTTP")
    if isinstance(handler.get("grpc"), dict):
        handler["grpc"].setdefault("service", "")


def _qos(spec: Obj) -> str:
    guaranteed, burstable = True, False
    for container in (*spec.get("containers", ()), *spec.get("initContainers", ())):
        resources = container.get("resources") or {}
        limits, requests = resources.get("limits") or {}, resources.get("requests") or {}
        for name in ("cpu", "memory"):
            burstable = burstable or name in limits or name in requests
            if name not in limits or requests.get(name, limits[name]) != limits[name]:
                guaranteed = False
    if not burstable:
        return "BestEffort"
    return "Guaranteed" if guaranteed else "Burstable"
