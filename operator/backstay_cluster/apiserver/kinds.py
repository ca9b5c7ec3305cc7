"""The built-in kinds that have their own rules, except pods (see `pods`) and definitions (see `definitions`)."""

from __future__ import annotations

import base64
import ipaddress
from functools import partial
from typing import TYPE_CHECKING, Final

from backstay_cluster.apiserver import metadata
from backstay_cluster.apiserver.errors import (
    StatusCause,
    forbidden,
    forbidden_field,
    invalid_value,
    not_supported,
    required,
)
from backstay_cluster.apiserver.objects import Obj
from backstay_cluster.apiserver.pods import PodStrategy
from backstay_cluster.apiserver.strategy import Strategy

if TYPE_CHECKING:
    from backstay_cluster.apiserver.resources import Resource
    from backstay_cluster.apiserver.rest import Api


class NamespaceStrategy(Strategy):
    """The finalizer `kubernetes` keeps a namespace until its content is deleted (`controllers` does that)."""

    name_rule = staticmethod(metadata.label)
    returns_deleted = True
    plain_mark = True

    def __init__(self, api: Api, resource: Resource) -> None:
        super().__init__(resource)
        self._api = api

    def default(self, obj: Obj) -> None:
        data = obj["metadata"]
        if data.get("name"):
            data.setdefault("labels", {})["kubernetes.io/metadata.name"] = data["name"]
        obj.setdefault("status", {"phase": "Active"})

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        obj["spec"] = {"finalizers": ["kubernetes"]}

    def before_update(self, obj: Obj, old: Obj) -> None:
        obj["spec"] = old.get("spec", {})

    def before_delete(self, obj: Obj) -> Obj:
        return {**obj, "status": {**obj.get("status", {}), "phase": "Terminating"}}

    def created(self, obj: Obj) -> None:
        accounts = self._api.registry.must("", "serviceaccounts")
        self._api.create(accounts, obj["metadata"]["name"], {"metadata": {"name": "default"}})

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        return []


class SecretStrategy(Strategy):
    """`stringData` becomes `data`; the type is immutable, and an immutable Secret does not change."""

    def default(self, obj: Obj) -> None:
        for key, text in (obj.pop("stringData", None) or {}).items():
            obj.setdefault("data", {})[key] = base64.b64encode(text.encode()).decode()
        obj.setdefault("type", "Opaque")

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        causes = _immutable_data(obj, old)
        causes += _data_keys(obj.get("data") or {}, "data")
        if old is not None and obj["type"] != old.get("type"):
            causes.append(invalid_value("type", obj["type"], "field is immutable"))
        size = sum(len(v) * 3 // 4 for v in (obj.get("data") or {}).values())
        if size > 1024 * 1024:
            causes.append(StatusCause("data", "FieldValueTooLong", "Too long: may not be more than 1048576 bytes"))
        return causes


class ConfigMapStrategy(Strategy):
    """Keys are file names; an immutable ConfigMap does not change."""

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        causes = _immutable_data(obj, old)
        data, binary = obj.get("data") or {}, obj.get("binaryData") or {}
        causes += _data_keys(data, "data") + _data_keys(binary, "binaryData")
        for key in sorted(data.keys() & binary.keys()):
            causes.append(invalid_value(f"binaryData[{key}]", key, "duplicate of key present in data"))
        if sum(len(v.encode()) for v in (*data.values(), *binary.values())) > 1024 * 1024:
            causes.append(StatusCause("", "FieldValueTooLong", "Too long: may not be more than 1048576 bytes"))
        return causes


def _immutable_data(obj: Obj, old: Obj | None) -> list[StatusCause]:
    if old is None or not old.get("immutable"):
        return []
    causes = []
    if not obj.get("immutable"):
        causes.append(forbidden_field("immutable", "field is immutable when `immutable` is set"))
    causes += [
        forbidden_field(name, "field is immutable when `immutable` is set")
        for name in ("data", "binaryData")
        if obj.get(name) != old.get(name)
    ]
    return causes


def _data_keys(data: Obj, path: str) -> list[StatusCause]:
    import re

    causes = []
    for key in data:
        if key in {".", ".."} or not re.fullmatch(r"[-._a-zA-Z0-9]+", key):
            text = (
                "a valid config key must consist of alphanumeric characters, '-', '_' or '.' (e.g. 'key.name',  or "
                "'KEY_NAME',  or 'key-name', regex used for validation is '[-._a-zA-Z0-9]+')"
            )
            causes.append(invalid_value(f"{path}[{key}]", key, text))
    return causes


class ServiceStrategy(Strategy):
    """A Service gets an address of the service network, and keeps it until it is deleted."""

    name_rule = staticmethod(metadata.label_1035)
    returns_deleted = True

    def __init__(self, resource: Resource, network: str) -> None:
        super().__init__(resource)
        self.network = ipaddress.ip_network(network)
        self.taken: dict[str, str] = {}  # address -> uid
        self._next = 0

    def default(self, obj: Obj) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("type", "ClusterIP")
        spec.setdefault("sessionAffinity", "None")
        if spec["type"] != "ExternalName":
            spec.setdefault("internalTrafficPolicy", "Cluster")
            spec.setdefault("ipFamilies", ["IPv4"])
            spec.setdefault("ipFamilyPolicy", "SingleStack")
        if spec["sessionAffinity"] == "ClientIP":
            spec.setdefault("sessionAffinityConfig", {"clientIP": {"timeoutSeconds": 10800}})
        for port in spec.get("ports", ()):
            port.setdefault("protocol", "TCP")
            if port.get("targetPort") in {None, 0, ""} and "port" in port:
                port["targetPort"] = port["port"]
        obj.setdefault("status", {"loadBalancer": {}}).setdefault("loadBalancer", {})

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        spec = obj["spec"]
        if self.validate(obj, None) or spec["type"] == "ExternalName":
            return
        requested = spec.get("clusterIP")
        if requested == "None":
            spec["clusterIPs"] = ["None"]
            return
        spec["clusterIP"] = requested or self._free()
        spec["clusterIPs"] = [spec["clusterIP"]]

    def created(self, obj: Obj) -> None:
        # Only now: a Service of this name may have existed.
        if (address := obj["spec"].get("clusterIP")) and address != "None":
            self.taken[address] = obj["metadata"]["uid"]

    def _free(self) -> str:
        size = self.network.num_addresses - 2
        for _ in range(size):
            self._next = self._next % size + 1
            address = str(self.network[self._next])
            if address not in self.taken:
                return address
        raise forbidden("", "services", "", f"no address of the service network {self.network} is free")

    def before_update(self, obj: Obj, old: Obj) -> None:
        spec, before = obj["spec"], old["spec"]
        if before["type"] == "ExternalName" and spec["type"] != "ExternalName" and not spec.get("clusterIP"):
            spec["clusterIP"] = self._free()
            spec["clusterIPs"] = [spec["clusterIP"]]
            self.taken[spec["clusterIP"]] = obj["metadata"]["uid"]
        for name in ("clusterIP", "clusterIPs", "ipFamilies", "ipFamilyPolicy"):
            if not spec.get(name) and before.get(name) and spec["type"] != "ExternalName":
                spec[name] = before[name]

    def deleted(self, obj: Obj) -> None:
        # A Service that became an ExternalName has no address any more, and its last one is not free yet.
        self.taken = {address: uid for address, uid in self.taken.items() if uid != obj["metadata"]["uid"]}

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        spec = obj["spec"]
        causes: list[StatusCause] = []
        kinds = ["ClusterIP", "ExternalName", "LoadBalancer", "NodePort"]
        if spec["type"] not in kinds:
            causes.append(not_supported("spec.type", spec["type"], kinds))
        address = spec.get("clusterIP")
        ports = spec.get("ports", [])
        if not ports and address != "None" and spec["type"] != "ExternalName":
            causes.append(required("spec.ports"))
        if spec["type"] == "ExternalName" and not spec.get("externalName"):
            causes.append(required("spec.externalName"))
        causes += self._ports(ports)
        causes += metadata.check_labels(spec.get("selector"), "spec.selector")
        if old is not None and old["spec"].get("clusterIP") and address != old["spec"]["clusterIP"]:
            if spec["type"] != "ExternalName":
                text = "may not change once set"
                causes.append(invalid_value("spec.clusterIPs[0]", spec.get("clusterIPs", [address]), text))
        elif old is None and address and address != "None" and self.taken.get(address) != obj["metadata"].get("uid"):
            causes += self._check_address(address)
        return causes

    def _check_address(self, address: str) -> list[StatusCause]:
        path, shown = "spec.clusterIPs[0]", address
        try:
            inside = ipaddress.ip_address(address) in self.network
        except ValueError:
            return [invalid_value(path, shown, "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")]
        if not inside:
            text = f"failed to allocate IP {address}: the provided network does not match the current range"
            return [invalid_value("spec.clusterIPs", [shown], text)]
        if address in self.taken:
            text = f"failed to allocate IP {address}: provided IP is already allocated"
            return [invalid_value("spec.clusterIPs", [shown], text)]
        return []

    @staticmethod
    def _ports(ports: list[Obj]) -> list[StatusCause]:
        causes: list[StatusCause] = []
        names: set[str] = set()
        numbers: set[tuple[int, str]] = set()
        for at, port in enumerate(ports):
            path, number = f"spec.ports[{at}]", port.get("port")
            if len(ports) > 1 and not port.get("name"):
                causes.append(required(f"{path}.name"))
            elif port.get("name"):
                causes += [invalid_value(f"{path}.name", port["name"], t) for t in metadata.label(port["name"])]
                if port["name"] in names:
                    causes.append(
                        StatusCause(f"{path}.name", "FieldValueDuplicate", f'Duplicate value: "{port["name"]}"')
                    )
                names.add(port["name"])
            if number is None or not 1 <= number <= 65535:
                causes.append(invalid_value(f"{path}.port", number or 0, "must be between 1 and 65535, inclusive"))
            elif (number, port["protocol"]) in numbers:
                text = f'Duplicate value: {{"protocol":"{port["protocol"]}","port":{number}}}'
                causes.append(StatusCause(path, "FieldValueDuplicate", text))
            else:
                numbers.add((number, port["protocol"]))
            if port["protocol"] not in {"TCP", "UDP", "SCTP"}:
                causes.append(not_supported(f"{path}.protocol", port["protocol"], ["SCTP", "TCP", "UDP"]))
        return causes


_EVENT_LIMIT: Final = 8192


class EventStrategy(Strategy):
    """Events are a log: the oldest ones are deleted when there are too many (a real server: after an hour)."""

    create_on_update = True

    def __init__(self, api: Api, resource: Resource) -> None:
        super().__init__(resource)
        self._api = api

    def default(self, obj: Obj) -> None:
        for name in ("eventTime", "firstTimestamp", "lastTimestamp"):
            obj.setdefault(name, None)
        obj.setdefault("source", {})
        obj.setdefault("reportingComponent", "")
        obj.setdefault("reportingInstance", "")

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        namespace = obj["metadata"].get("namespace")
        about = (obj.get("involvedObject") or {}).get("namespace", "")
        if about == "" and namespace in {"default", "kube-system"}:
            return []
        if about != namespace:
            return [invalid_value("involvedObject.namespace", about, "does not match event.namespace")]
        return []

    def created(self, obj: Obj) -> None:
        storage = self._api.store.storage(self.resource.storage)
        if storage.count <= _EVENT_LIMIT:
            return
        every = [s for space in storage.spaces.values() for s in space.values()]
        every.sort(key=lambda s: s.version)
        for stored in every[: _EVENT_LIMIT // 8]:  # many at the same time, so that sorting is rare
            self._api.remove(self.resource, stored.key)


class ReturnedStrategy(Strategy):
    """Kinds whose deletion returns the object."""

    returns_deleted = True


class ClaimStrategy(ReturnedStrategy):
    """A claim is bound immediately: its volume is a folder of the one node, which the kubelet creates."""

    def before_create(self, obj: Obj, *, dry_run: bool) -> None:
        del dry_run
        spec = obj.get("spec") or {}
        capacity = (spec.get("resources") or {}).get("requests") or {}
        obj["status"] = {"phase": "Bound", "accessModes": spec.get("accessModes") or [], "capacity": dict(capacity)}


class LeaseStrategy(Strategy):
    """A replace of a missing Lease creates it."""

    create_on_update = True


class NodeStrategy(Strategy):
    """A node reports its resources when it is created."""

    keeps_status_on_create = True

    def default(self, obj: Obj) -> None:
        obj.setdefault("spec", {})
        obj.setdefault("status", {})


def install(api: Api, network: str) -> None:
    """Add the rules of the built-in kinds to `api`; Services get addresses of `network`."""
    api.use(("", "namespaces"), partial(NamespaceStrategy, api))
    api.use(("", "pods"), partial(PodStrategy, api))
    api.use(("", "secrets"), SecretStrategy)
    api.use(("", "configmaps"), ConfigMapStrategy)
    api.use(("", "services"), partial(ServiceStrategy, network=network))
    api.use(("", "events"), partial(EventStrategy, api))
    api.use(("", "nodes"), NodeStrategy)
    api.use(("", "serviceaccounts"), ReturnedStrategy)
    api.use(("", "persistentvolumeclaims"), ClaimStrategy)
    api.use(("coordination.k8s.io", "leases"), LeaseStrategy)
    for namespace in ("default", "kube-system"):
        api.create(api.registry.must("", "namespaces"), "", {"metadata": {"name": namespace}})
