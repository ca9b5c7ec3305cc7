"""Makes the tables that `kubectl get` prints. The server defines the columns, and kubectl only aligns them."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from backstay_cluster.apiserver import codec
from backstay_cluster.apiserver.objects import Obj, dig, encode
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.store import Stored


@dataclass(frozen=True)
class Column:
    """A column, which is always shown with priority 0, and with `-o wide` with priority 1."""

    name: str
    cell: Callable[[Obj], Any]
    type: str = "string"
    priority: int = 0
    description: str = ""
    format: str = ""


def age(stamp: str | None) -> str:
    """Returns the time since a timestamp in kubectl's format, such as 5s, 3m12s, 4h or 2d."""
    if not stamp:
        return "<unknown>"
    try:
        then = datetime.datetime.fromisoformat(stamp)
    except ValueError:
        return "<invalid>"
    if then.tzinfo is None:
        return "<invalid>"
    return duration(int((datetime.datetime.now(datetime.UTC) - then).total_seconds()))


def duration(seconds: int) -> str:
    """Returns a length of time in at most two units."""
    if seconds < -1:
        return "<invalid>"
    seconds = max(0, seconds)
    minutes, hours, days = seconds // 60, seconds // 3600, seconds // 86400
    if seconds < 120:
        return f"{seconds}s"
    if minutes < 10:
        return f"{minutes}m{seconds % 60}s" if seconds % 60 else f"{minutes}m"
    if hours < 3:
        return f"{minutes}m"
    if hours < 8:
        return f"{hours}h{minutes % 60}m" if minutes % 60 else f"{hours}h"
    if hours < 48:
        return f"{hours}h"
    if days < 8:
        return f"{days}d{hours % 24}h" if hours % 24 else f"{days}d"
    if days < 730:
        return f"{days}d"
    return f"{days // 365}y{days % 365}d" if days % 365 else f"{days // 365}y"


def _or_none(value: Any) -> str:
    return str(value) if value not in {None, ""} else "<none>"


def _pod_status(obj: Obj) -> str:
    status = obj.get("status") or {}
    reason = status.get("reason") or status.get("phase") or "Unknown"
    ready_containers = False
    # The order of these tests is that of `kubectl get pods`, whose users compare both.
    if not _has_condition(status, "Initialized") and (initializing := _init_status(obj)):
        return initializing
    for container in reversed(status.get("containerStatuses") or ()):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if waiting and waiting.get("reason"):
            reason = waiting["reason"]
        elif ended:
            number = f"Signal:{ended['signal']}" if ended.get("signal") else f"ExitCode:{ended.get('exitCode')}"
            reason = ended.get("reason") or number
        elif state.get("running") and container.get("ready"):
            ready_containers = True
    if reason == "Completed" and ready_containers:
        reason = "Running" if _has_condition(status, "Ready") else "NotReady"
    if obj["metadata"].get("deletionTimestamp"):
        return "Unknown" if status.get("reason") == "NodeLost" else "Terminating"
    return str(reason)


def _has_condition(status: Obj, kind: str) -> bool:
    return any(c.get("type") == kind and c.get("status") == "True" for c in status.get("conditions") or ())


def _init_status(obj: Obj) -> str:
    """Returns the STATUS of a pod whose init containers are not complete; empty if they are."""
    sidecars = _sidecars(obj)
    for at, container in enumerate(dig(obj, "status", "initContainerStatuses") or ()):
        state = container.get("state") or {}
        ended, waiting = state.get("terminated"), state.get("waiting")
        if ended and ended.get("exitCode") == 0:
            continue
        if container.get("name") in sidecars and container.get("started"):
            continue
        if ended:
            return f"Init:{ended.get('reason') or 'ExitCode:' + str(ended.get('exitCode'))}"
        if waiting and waiting.get("reason") not in {None, "", "PodInitializing"}:
            return f"Init:{waiting['reason']}"
        return f"Init:{at}/{len(dig(obj, 'spec', 'initContainers') or [])}"
    return ""


def _sidecars(obj: Obj) -> set[str]:
    """Returns the names of the init containers that run beside the others."""
    return {c["name"] for c in dig(obj, "spec", "initContainers") or () if c.get("restartPolicy") == "Always"}


def _counted_statuses(obj: Obj) -> list[Obj]:
    """Returns the statuses of the sidecars and of the containers that are not init containers."""
    sidecars = _sidecars(obj)
    beside = [s for s in dig(obj, "status", "initContainerStatuses") or () if s.get("name") in sidecars]
    return [*beside, *(dig(obj, "status", "containerStatuses") or ())]


def _pod_ready(obj: Obj) -> str:
    ready = sum(bool(status.get("ready")) for status in _counted_statuses(obj))
    return f"{ready}/{len(dig(obj, 'spec', 'containers') or []) + len(_sidecars(obj))}"


def _pod_restarts(obj: Obj) -> str:
    statuses = _counted_statuses(obj)
    count = sum(int(s.get("restartCount", 0)) for s in statuses)
    ends = [dig(s, "lastState", "terminated", "finishedAt") for s in statuses]
    newest = max((e for e in ends if e), default=None)
    return f"{count} ({age(newest)} ago)" if count and newest else str(count)


def _gates(obj: Obj) -> str:
    gates = dig(obj, "spec", "readinessGates") or []
    if not gates:
        return "<none>"
    true = {c["type"] for c in dig(obj, "status", "conditions") or [] if c.get("status") == "True"}
    return f"{sum(g.get('conditionType') in true for g in gates)}/{len(gates)}"


def _service_ports(obj: Obj) -> str:
    ports = dig(obj, "spec", "ports") or []
    shown = [
        f"{p['port']}:{p['nodePort']}/{p['protocol']}" if p.get("nodePort") else f"{p['port']}/{p['protocol']}"
        for p in ports
    ]
    return ",".join(shown) or "<none>"


def _pairs(labels: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in sorted((labels or {}).items())) or "<none>"


def _event_object(obj: Obj) -> str:
    about = obj.get("involvedObject") or {}
    name = f"{about.get('kind', '').lower()}/{about.get('name', '')}"
    return name if about.get("kind") else f"{about.get('name', '')}"


def _event_source(obj: Obj) -> str:
    source = obj.get("source") or {}
    component = source.get("component") or obj.get("reportingComponent") or ""
    host = source.get("host") or obj.get("reportingInstance") or ""
    return ", ".join(p for p in (component, host) if p)


def _event_last(obj: Obj) -> str:
    series = dig(obj, "series", "lastObservedTime")
    return age(series or obj.get("lastTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp"))


def _event_first(obj: Obj) -> str:
    return age(obj.get("firstTimestamp") or obj.get("eventTime") or obj["metadata"].get("creationTimestamp"))


def _node_status(obj: Obj) -> str:
    ready = next((c for c in dig(obj, "status", "conditions") or [] if c.get("type") == "Ready"), None)
    text = "Unknown" if ready is None else "Ready" if ready.get("status") == "True" else "NotReady"
    return text + (",SchedulingDisabled" if dig(obj, "spec", "unschedulable") else "")


def _address(kind: str) -> Callable[[Obj], str]:
    def cell(obj: Obj) -> str:
        found = next((a["address"] for a in dig(obj, "status", "addresses") or [] if a.get("type") == kind), None)
        return _or_none(found)

    return cell


def _at(*path: str, otherwise: Any = "<none>") -> Callable[[Obj], Any]:
    def cell(obj: Obj) -> Any:
        value = dig(obj, *path)
        return otherwise if value in {None, ""} else value

    return cell


def _count(*path: str) -> Callable[[Obj], int]:
    return lambda obj: len(dig(obj, *path) or ())


def _age_cell(obj: Obj) -> str:
    return age(obj["metadata"].get("creationTimestamp"))


_NAME: Final = Column("Name", lambda o: o["metadata"]["name"], format="name", description="The object's name.")
_AGE: Final = Column("Age", _age_cell, description="Time since the object was created.")
_COLUMNS: Final[dict[tuple[str, str], tuple[Column, ...]]] = {
    ("", "pods"): (
        _NAME,
        Column("Ready", _pod_ready, description="Containers that are ready, of all."),
        Column("Status", _pod_status, description="The state of the containers, in one word."),
        Column("Restarts", _pod_restarts, description="How often containers were restarted."),
        _AGE,
        Column("IP", _at("status", "podIP"), priority=1, description="The pod's address."),
        Column("Node", _at("spec", "nodeName"), priority=1, description="The node that runs the pod."),
        Column("Nominated Node", _at("status", "nominatedNodeName"), priority=1, description="Where it preempts."),
        Column("Readiness Gates", _gates, priority=1, description="Gates that are open, of all."),
    ),
    ("", "services"): (
        _NAME,
        Column("Type", _at("spec", "type")),
        Column("Cluster-IP", _at("spec", "clusterIP")),
        Column("External-IP", _at("spec", "externalName")),
        Column("Port(s)", _service_ports),
        _AGE,
        Column("Selector", lambda o: _pairs(dig(o, "spec", "selector")), priority=1),
    ),
    ("", "events"): (
        Column("Last Seen", _event_last),
        Column("Type", _at("type", otherwise="")),
        Column("Reason", _at("reason", otherwise="")),
        Column("Object", _event_object),
        Column("Subobject", _at("involvedObject", "fieldPath", otherwise=""), priority=1),
        Column("Source", _event_source, priority=1),
        Column("Message", lambda o: str(o.get("message", "")).strip()),
        Column("First Seen", _event_first, priority=1),
        Column("Count", lambda o: dig(o, "series", "count") or o.get("count") or 1, priority=1),
        Column("Name", lambda o: o["metadata"]["name"], priority=1, format="name"),
    ),
    ("", "secrets"): (_NAME, Column("Type", _at("type")), Column("Data", _count("data")), _AGE),
    ("", "configmaps"): (
        _NAME,
        Column("Data", lambda o: len(o.get("data") or ()) + len(o.get("binaryData") or ())),
        _AGE,
    ),
    ("", "namespaces"): (_NAME, Column("Status", _at("status", "phase")), _AGE),
    ("", "nodes"): (
        _NAME,
        Column("Status", _node_status),
        Column("Roles", lambda o: "<none>"),
        _AGE,
        Column("Version", _at("status", "nodeInfo", "kubeletVersion")),
        Column("Internal-IP", _address("InternalIP"), priority=1),
        Column("External-IP", _address("ExternalIP"), priority=1),
        Column("OS-Image", _at("status", "nodeInfo", "osImage"), priority=1),
        Column("Kernel-Version", _at("status", "nodeInfo", "kernelVersion"), priority=1),
        Column("Container-Runtime", _at("status", "nodeInfo", "containerRuntimeVersion"), priority=1),
    ),
    ("", "persistentvolumeclaims"): (
        _NAME,
        Column("Status", _at("status", "phase", otherwise="")),
        Column("Volume", _at("spec", "volumeName", otherwise="")),
        Column("Capacity", _at("status", "capacity", "storage", otherwise="")),
        Column("StorageClass", _at("spec", "storageClassName", otherwise="")),
        _AGE,
    ),
}
_GENERIC: Final = (_NAME, _AGE)


def _custom_columns(columns: list[Obj]) -> tuple[Column, ...]:
    found = [_NAME]
    for described in columns:
        path, kind = described["jsonPath"], described.get("type", "string")
        found.append(
            Column(
                described["name"],
                _jsonpath(path, kind),
                type=kind,
                priority=described.get("priority", 0),
                format=described.get("format", ""),
                description=described.get("description")
                or f"Custom resource definition column (in JSONPath format): {path}",
            )
        )
    return tuple(found)


def _jsonpath(path: str, kind: str) -> Callable[[Obj], Any]:
    steps = _steps(path)

    def cell(obj: Obj) -> Any:
        values = _walk([obj], steps)
        if not values or values[0] is None:
            return None
        value = values[0]
        if kind == "integer" and isinstance(value, float):
            return int(value)
        if kind in {"integer", "number", "boolean"}:
            return value
        if kind == "date":
            return age(value) if isinstance(value, str) else "<invalid>"
        if len(values) > 1:
            return ",".join(_text(v) for v in values)
        return _text(value)

    return cell


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


_STEP: Final = re.compile(
    r"\.(?P<name>(?:\\.|[^.\[\]])+)|\[(?P<index>-?\d+)\]|\['(?P<quoted>[^']*)'\]|\[(?P<all>\*)\]"
    r"|\[\?\(@\.(?P<key>[\w.]+)\s*==\s*[\"'](?P<value>[^\"']*)[\"']\)\]"
)


def _steps(path: str) -> list[Callable[[Any], list[Any]]]:
    text = path.strip("{}")
    text = text.removeprefix("$")
    text = text if text.startswith((".", "[")) else "." + text
    steps: list[Callable[[Any], list[Any]]] = []
    at = 0
    while at < len(text):
        found = _STEP.match(text, at)
        if found is None:
            return [lambda _: []]  # a path that this server does not support yields no values
        at = found.end()
        steps.append(_step(found))
    return steps


def _step(found: re.Match[str]) -> Callable[[Any], list[Any]]:
    name = found["quoted"] if found["quoted"] is not None else found["name"]
    if name is not None:
        plain = re.sub(r"\\(.)", r"\1", name)
        if plain == "*":
            return lambda v: list(v.values()) if isinstance(v, dict) else v if isinstance(v, list) else []
        return lambda v: [v[plain]] if isinstance(v, dict) and plain in v else []
    if found["index"] is not None:
        index = int(found["index"])
        return lambda v: [v[index]] if isinstance(v, list) and -len(v) <= index < len(v) else []
    if found["all"]:
        return lambda v: v if isinstance(v, list) else list(v.values()) if isinstance(v, dict) else []
    keys, wanted = found["key"].split("."), found["value"]
    return lambda v: [e for e in v if str(dig(e, *keys)) == wanted] if isinstance(v, list) else []


def _walk(values: list[Any], steps: list[Callable[[Any], list[Any]]]) -> list[Any]:
    for step in steps:
        values = [found for value in values for found in step(value)]
    return values


def _columns(resource: Resource, custom: list[Obj] | None) -> tuple[Column, ...]:
    return _COLUMNS.get(resource.storage, _GENERIC) if custom is None else _custom_columns(custom)


def _row(resource: Resource, columns: tuple[Column, ...], stored: Stored, include: str) -> Obj:
    row: Obj = {"cells": [c.cell(stored.obj) for c in columns]}
    if include == "Object":
        row["object"] = codec.full(resource, stored.obj)
    elif include == "Metadata":
        data = stored.obj["metadata"]
        row["object"] = {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": data}
    return row


def table(resource: Resource, items: list[Stored], data: Obj, custom: list[Obj] | None, include: str) -> Obj:
    """Returns the Table of some objects; `data` becomes its metadata, `include` is Metadata, Object or None."""
    columns = _columns(resource, custom)
    return {
        "kind": "Table",
        "apiVersion": "meta.k8s.io/v1",
        "metadata": data,
        "columnDefinitions": [
            {"name": c.name, "type": c.type, "format": c.format, "description": c.description, "priority": c.priority}
            for c in columns
        ],
        "rows": [_row(resource, columns, stored, include) for stored in items],
    }


def table_event(resource: Resource, custom: list[Obj] | None, include: str) -> Callable[[Stored], bytes]:
    """Returns the function with which a watch writes one object as a Table; only the first has column definitions."""
    columns = _columns(resource, custom)
    first = True

    def render(stored: Stored) -> bytes:
        nonlocal first
        data = {"resourceVersion": str(stored.version)}
        shown = table(resource, [stored], data, custom, include)
        shown["rows"] = [_row(resource, columns, stored, include)]
        if not first:
            shown["columnDefinitions"] = None
        first = False
        return encode(shown)

    return render
