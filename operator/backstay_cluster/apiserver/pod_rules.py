"""The rules of a PodSpec that a user's template is likely to break, with the real server's messages."""

from __future__ import annotations

import re
from typing import Any, Final

from backstay_cluster import quantity
from backstay_cluster.apiserver.errors import StatusCause, invalid_value, not_supported, required
from backstay_cluster.apiserver.metadata import check_labels, label, qualified_name, subdomain
from backstay_cluster.apiserver.objects import Obj

_ENV_NAME: Final = re.compile(r"[^=\x00-\x1f\x7f]+")
_NOT_SOURCES: Final = {"name"}


def _duplicate(field: str, value: str) -> StatusCause:
    return StatusCause(field, "FieldValueDuplicate", f'Duplicate value: "{value}"')


def _missing(field: str, value: str) -> StatusCause:
    return StatusCause(field, "FieldValueNotFound", f'Not found: "{value}"')


def check_spec(spec: Obj, path: str) -> list[StatusCause]:
    """Returns the errors of a PodSpec at `path`, as causes."""
    causes: list[StatusCause] = []
    volumes = _volumes(spec.get("volumes", []), f"{path}.volumes", causes)
    if not spec.get("containers"):
        causes.append(required(f"{path}.containers"))
    names: set[str] = set()
    for group in ("initContainers", "containers"):
        for at, container in enumerate(spec.get(group, [])):
            _container(container, f"{path}.{group}[{at}]", volumes, names, causes)
    _one_of(spec, "restartPolicy", ("Always", "Never", "OnFailure"), path, causes)
    _one_of(spec, "dnsPolicy", ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"), path, causes)
    deadline = spec.get("activeDeadlineSeconds")
    if deadline is not None and not 1 <= deadline <= 2**31 - 1:
        causes.append(
            invalid_value(f"{path}.activeDeadlineSeconds", deadline, "must be between 1 and 2147483647, inclusive")
        )
    grace = spec.get("terminationGracePeriodSeconds", 0)
    if grace < 0:
        causes.append(
            invalid_value(f"{path}.terminationGracePeriodSeconds", grace, "must be greater than or equal to 0")
        )
    causes += check_labels(spec.get("nodeSelector"), f"{path}.nodeSelector")
    for name, rule in (("nodeName", subdomain), ("serviceAccountName", subdomain), ("hostname", label)):
        if spec.get(name):
            causes += [invalid_value(f"{path}.{name}", spec[name], text) for text in rule(spec[name])]
    for at, toleration in enumerate(spec.get("tolerations", [])):
        _toleration(toleration, f"{path}.tolerations[{at}]", causes)
    return causes


def _one_of(owner: Obj, name: str, allowed: tuple[str, ...], path: str, causes: list[StatusCause]) -> None:
    value = owner.get(name)
    if value and value not in allowed:
        causes.append(not_supported(f"{path}.{name}", value, sorted(allowed)))


def _volumes(volumes: list[Obj], path: str, causes: list[StatusCause]) -> set[str]:
    names: set[str] = set()
    for at, volume in enumerate(volumes):
        name, here = volume.get("name", ""), f"{path}[{at}]"
        if not name:
            causes.append(required(f"{here}.name"))
        elif texts := label(name):
            causes += [invalid_value(f"{here}.name", name, text) for text in texts]
        elif name in names:
            causes.append(_duplicate(f"{here}.name", name))
        names.add(name)
        sources = [s for s in volume if s not in _NOT_SOURCES]
        if not sources:
            causes.append(required(here, "must specify a volume type"))
        causes += [
            StatusCause(f"{here}.{extra}", "FieldValueForbidden", "Forbidden: may not specify more than 1 volume type")
            for extra in sources[1:]
        ]
        for source, key in (("secret", "secretName"), ("configMap", "name"), ("hostPath", "path")):
            if isinstance(volume.get(source), dict) and not volume[source].get(key):
                causes.append(required(f"{here}.{source}.{key}"))
        claim = volume.get("persistentVolumeClaim")
        if isinstance(claim, dict) and not claim.get("claimName"):
            causes.append(required(f"{here}.persistentVolumeClaim.claimName"))
    return names


def _container(container: Obj, path: str, volumes: set[str], names: set[str], causes: list[StatusCause]) -> None:
    name = container.get("name", "")
    if not name:
        causes.append(required(f"{path}.name"))
    elif texts := label(name):
        causes += [invalid_value(f"{path}.name", name, text) for text in texts]
    elif name in names:
        causes.append(_duplicate(f"{path}.name", name))
    names.add(name)
    image = container.get("image", "")
    if not image:
        causes.append(required(f"{path}.image"))
    elif image != image.strip():
        causes.append(invalid_value(f"{path}.image", image, "must not have leading or trailing whitespace"))
    _one_of(container, "imagePullPolicy", ("Always", "IfNotPresent", "Never"), path, causes)
    _one_of(container, "terminationMessagePolicy", ("FallbackToLogsOnError", "File"), path, causes)
    _ports(container.get("ports", []), f"{path}.ports", causes)
    _env(container, path, causes)
    _mounts(container.get("volumeMounts", []), f"{path}.volumeMounts", volumes, causes)
    _resources(container.get("resources") or {}, f"{path}.resources", causes)
    for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
        if isinstance(container.get(probe), dict):
            _probe(container[probe], f"{path}.{probe}", causes)


def _ports(ports: list[Obj], path: str, causes: list[StatusCause]) -> None:
    names: set[str] = set()
    for at, port in enumerate(ports):
        here, number = f"{path}[{at}]", port.get("containerPort")
        if not number:
            causes.append(required(f"{here}.containerPort"))
        elif not 1 <= number <= 65535:
            causes.append(invalid_value(f"{here}.containerPort", number, "must be between 1 and 65535, inclusive"))
        name = port.get("name")
        if name:
            if len(name) > 15:
                causes.append(invalid_value(f"{here}.name", name, "must be no more than 15 characters"))
            elif not re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name) or not re.search(r"[a-z]", name):
                text = "must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)"
                causes.append(invalid_value(f"{here}.name", name, text))
            elif name in names:
                causes.append(_duplicate(f"{here}.name", name))
            names.add(name)
        _one_of(port, "protocol", ("SCTP", "TCP", "UDP"), here, causes)


def _env(container: Obj, path: str, causes: list[StatusCause]) -> None:
    for at, variable in enumerate(container.get("env", [])):
        here, name = f"{path}.env[{at}]", variable.get("name", "")
        if not name:
            causes.append(required(f"{here}.name"))
        elif not _ENV_NAME.fullmatch(name):
            text = "a valid environment variable name must consist only of printable ASCII characters other than '='"
            causes.append(invalid_value(f"{here}.name", name, text))
        source = variable.get("valueFrom")
        if isinstance(source, dict):
            if variable.get("value"):
                text = "may not be specified when `value` is not empty"
                causes.append(invalid_value(f"{here}.valueFrom", "", text))
            if not source:
                text = "must specify one of: `fieldRef`, `resourceFieldRef`, `configMapKeyRef` or `secretKeyRef`"
                causes.append(invalid_value(f"{here}.valueFrom", "", text))
            for name in ("configMapKeyRef", "secretKeyRef"):
                if isinstance(source.get(name), dict):
                    causes += [
                        required(f"{here}.valueFrom.{name}.{key}")
                        for key in ("name", "key")
                        if not source[name].get(key)
                    ]


def _mounts(mounts: list[Obj], path: str, volumes: set[str], causes: list[StatusCause]) -> None:
    paths: set[str] = set()
    for at, mount in enumerate(mounts):
        here = f"{path}[{at}]"
        if not mount.get("name"):
            causes.append(required(f"{here}.name"))
        elif mount["name"] not in volumes:
            causes.append(_missing(f"{here}.name", mount["name"]))
        where = mount.get("mountPath", "")
        if not where:
            causes.append(required(f"{here}.mountPath"))
        elif where in paths:
            causes.append(invalid_value(f"{here}.mountPath", where, "must be unique"))
        paths.add(where)


def _resources(resources: Obj, path: str, causes: list[StatusCause]) -> None:
    limits: dict[str, Any] = resources.get("limits") or {}
    requests: dict[str, Any] = resources.get("requests") or {}
    for group, amounts in (("limits", limits), ("requests", requests)):
        for name, amount in amounts.items():
            here = f"{path}.{group}[{name}]"
            causes += [invalid_value(here, name, text) for text in qualified_name(name)]
            if quantity.value(amount) < 0:
                causes.append(invalid_value(here, amount, "must be greater than or equal to 0"))
            standard = name in {"cpu", "memory", "ephemeral-storage"} or name.startswith("hugepages-")
            if "/" not in name and not standard:
                causes.append(invalid_value(here, name, "must be a standard resource type or fully qualified"))
                causes.append(invalid_value(here, name, "must be a standard resource for containers"))
            if "/" in name and quantity.value(amount) % 1:
                causes.append(invalid_value(here, amount, "must be an integer"))
    # A device cannot be shared, so its request is its limit.
    for name, amount in requests.items():
        limit = limits.get(name)
        if "/" in name and limit is None:
            causes.append(required(f"{path}.limits", "Limit must be set for non overcommitable resources"))
        elif limit is not None and "/" in name and quantity.value(amount) != quantity.value(limit):
            text = f"must be equal to {name} limit of {limit}"
            causes.append(invalid_value(f"{path}.requests", amount, text))
        elif limit is not None and quantity.value(amount) > quantity.value(limit):
            text = f"must be less than or equal to {name} limit of {limit}"
            causes.append(invalid_value(f"{path}.requests", amount, text))


def _probe(probe: Obj, path: str, causes: list[StatusCause]) -> None:
    handlers = [h for h in ("exec", "httpGet", "tcpSocket", "grpc") if isinstance(probe.get(h), dict)]
    if not handlers:
        causes.append(required(path, "must specify a handler type"))
    causes += [
        StatusCause(f"{path}.{extra}", "FieldValueForbidden", "Forbidden: may not specify more than 1 handler type")
        for extra in handlers[1:]
    ]
    if isinstance(probe.get("exec"), dict) and not probe["exec"].get("command"):
        causes.append(required(f"{path}.exec.command"))
    for name in ("initialDelaySeconds", "timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"):
        if probe.get(name, 0) < 0:
            causes.append(invalid_value(f"{path}.{name}", probe[name], "must be greater than or equal to 0"))
    if path.endswith(("livenessProbe", "startupProbe")) and probe.get("successThreshold", 1) != 1:
        causes.append(invalid_value(f"{path}.successThreshold", probe["successThreshold"], "must be 1"))


def _toleration(toleration: Obj, path: str, causes: list[StatusCause]) -> None:
    if toleration.get("key"):
        causes += [invalid_value(f"{path}.key", toleration["key"], t) for t in qualified_name(toleration["key"])]
    operator = toleration.get("operator", "Equal")
    if operator not in {"Equal", "Exists"}:
        causes.append(not_supported(f"{path}.operator", operator, ["Equal", "Exists"]))
    if operator == "Exists" and toleration.get("value"):
        causes.append(
            invalid_value(f"{path}.operator", toleration["value"], "value must be empty when `operator` is 'Exists'")
        )
    if not toleration.get("key") and operator != "Exists":
        causes.append(
            invalid_value(
                f"{path}.operator",
                operator,
                'operator must be Exists when `key` is empty, which means "match all values and all keys"',
            )
        )
    if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
        causes.append(
            invalid_value(
                f"{path}.effect",
                toleration.get("effect", ""),
                "effect must be 'NoExecute' when `tolerationSeconds` is set",
            )
        )
    _one_of(toleration, "effect", ("NoExecute", "NoSchedule", "PreferNoSchedule"), path, causes)
