"""A pod's volumes as folders of the host, and the environment of its containers.

Both need objects of the API (ConfigMaps, Secrets, claims), which they read through one `Lookup`. A missing object
raises `NotReadyError`. The kubelet reports it as the kubelet of Kubernetes does, and tries again.
"""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Awaitable, Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

from backstay_cluster import quantity
from backstay_cluster.kubelet.expand import clean_path, expand
from backstay_cluster.kubelet.objects import Object
from backstay_cluster.whole import write_whole

Lookup = Callable[
    [str, str], Awaitable[Object | None]
]  # (resource such as `configmaps`, name) -> object in the namespace


class NotReadyError(Exception):
    """A container cannot be created yet.

    Attributes:
        reason: the reason of the waiting state, or of the event for a volume.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def field_of(pod: Mapping[str, Any], path: str, *, pod_ip: str, host_ip: str) -> str:
    """Returns the value of a fieldRef (the downward API).

    Raises:
        NotReadyError: the field is not supported.
    """
    meta, spec = pod["metadata"], pod["spec"]
    simple = {
        "metadata.name": meta["name"],
        "metadata.namespace": meta["namespace"],
        "metadata.uid": meta["uid"],
        "spec.nodeName": spec.get("nodeName", ""),
        "spec.serviceAccountName": spec.get("serviceAccountName", "default"),
        "status.podIP": pod_ip,
        "status.podIPs": pod_ip,
        "status.hostIP": host_ip,
        "status.hostIPs": host_ip,
    }
    if path in simple:
        return str(simple[path])
    for kind in ("labels", "annotations"):
        values: dict[str, str] = meta.get(kind) or {}
        if path.startswith(f"metadata.{kind}['") and path.endswith("']"):
            return values.get(path[len(f"metadata.{kind}['") : -2], "")
        if path == f"metadata.{kind}":
            return "\n".join(
                f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in sorted(values.items())
            )
    raise NotReadyError("CreateContainerConfigError", f"fieldRef {path!r} is not supported")


def resource_of(container: Mapping[str, Any], ref: Mapping[str, Any], allocatable: Mapping[str, str]) -> str:
    """Returns the value of a resourceFieldRef, in whole divisors, rounded up; without a limit, the node's value.

    Raises:
        NotReadyError: the field is not supported.
    """
    kind, _, name = str(ref["resource"]).partition(".")
    resources = container.get("resources") or {}
    value = (resources.get(kind) or {}).get(name)
    if value is None and kind == "requests":
        value = (resources.get("limits") or {}).get(name, "0")
    if value is None:
        value = allocatable.get(name)
    if value is None or kind not in ("limits", "requests"):
        raise NotReadyError("CreateContainerConfigError", f"resourceFieldRef {ref['resource']!r} is not supported")
    divisor = quantity.value(ref.get("divisor") or "1") or Decimal(1)
    return str(int((quantity.value(value) / divisor).to_integral_value(ROUND_CEILING)))


def decoded(kind: str, obj: Mapping[str, Any]) -> dict[str, bytes]:
    """Returns the entries of a ConfigMap or Secret as bytes."""
    data = obj.get("data") or {}
    if kind == "secrets":
        return {name: base64.b64decode(value) for name, value in data.items()}
    binary = obj.get("binaryData") or {}
    return {name: value.encode() for name, value in data.items()} | {
        name: base64.b64decode(value) for name, value in binary.items()
    }


async def _entries(lookup: Lookup, kind: str, name: str, *, optional: bool, reason: str) -> dict[str, bytes] | None:
    obj = await lookup(kind, name)
    if obj is not None:
        return decoded(kind, obj)
    if optional:
        return None
    raise NotReadyError(reason, f'{kind.removesuffix("s")} "{name}" not found')


async def environment(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    lookup: Lookup,
    base: Mapping[str, str],
    links: Mapping[str, str],
    *,
    pod_ip: str,
    host_ip: str,
    allocatable: Mapping[str, str],
) -> dict[str, str]:
    """Returns a container's environment from `base` (of the image), `links` (of the node), then envFrom, then env in
    its order.

    A `$(VAR)` can refer to all variables except those of `base`.

    Raises:
        NotReadyError: `CreateContainerConfigError`, a referenced object is missing.
    """
    reason = "CreateContainerConfigError"
    own: dict[str, str] = {}
    for source in container.get("envFrom") or []:
        for kind, field in (("configmaps", "configMapRef"), ("secrets", "secretRef")):
            if ref := source.get(field):
                found = await _entries(lookup, kind, ref["name"], optional=bool(ref.get("optional")), reason=reason)
                prefix = source.get("prefix") or ""
                own |= {prefix + name: value.decode(errors="replace") for name, value in (found or {}).items()}
    for entry in container.get("env") or []:
        name, source = entry["name"], entry.get("valueFrom") or {}
        # In the order of the list, because an entry may refer to those above it, as in a real kubelet.
        value: str | None = expand(entry.get("value") or "", {**links, **own})
        if ref := source.get("fieldRef"):
            value = field_of(pod, ref["fieldPath"], pod_ip=pod_ip, host_ip=host_ip)
        elif ref := source.get("resourceFieldRef"):
            value = resource_of(container, ref, allocatable)
        for kind, field in (("configmaps", "configMapKeyRef"), ("secrets", "secretKeyRef")):
            if ref := source.get(field):
                optional = bool(ref.get("optional"))
                found = await _entries(lookup, kind, ref["name"], optional=optional, reason=reason)
                data = (found or {}).get(ref["key"])
                if data is None and not optional:
                    what = "ConfigMap" if kind == "configmaps" else "Secret"
                    where = f"{what} {pod['metadata']['namespace']}/{ref['name']}"
                    raise NotReadyError(reason, f"couldn't find key {ref['key']} in {where}")
                value = None if data is None else data.decode(errors="replace")
        if value is not None:
            own[name] = value
    for name, value in own.items():
        if "\0" in name or "\0" in value or "=" in name or not name:
            raise NotReadyError(
                reason, f"env {name!r}: a name must not be empty or hold `=`, nor name or value a NUL byte"
            )
    return {**base, **links, **own}


class Volumes:
    """Creates the folders of one pod's volumes.

    Args:
        pod: the pod.
        root: the pod's own folder; removed with the pod.
        claims: the folder of the persistent volume claims; it stays when pods are removed.
        lookup: finds ConfigMaps, Secrets and claims of the pod's namespace.
        field: the value of a downward API field.
    """

    def __init__(
        self, pod: Mapping[str, Any], root: Path, claims: Path, lookup: Lookup, field: Callable[[str], str]
    ) -> None:
        self._pod = pod
        self._root = root
        self._claims = claims
        self._lookup = lookup
        self._field = field

    async def mount(self) -> dict[str, Path]:
        """Volume name -> folder (or file, if a hostPath is a file).

        Raises:
            NotReadyError: `FailedMount`.
        """
        made = {}
        for volume in self._pod["spec"].get("volumes") or []:
            try:
                made[volume["name"]] = await self._one(volume, self._root / volume["name"])
            except (NotReadyError, OSError) as error:
                raise NotReadyError(
                    "FailedMount", f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}'
                ) from error
        return made

    async def _one(self, volume: Mapping[str, Any], path: Path) -> Path:
        if (host := volume.get("hostPath")) is not None:
            return host_path(Path(host["path"]), host.get("type") or "")
        if (claim := volume.get("persistentVolumeClaim")) is not None:
            name = claim["claimName"]
            if await self._lookup("persistentvolumeclaims", name) is None:
                raise NotReadyError("FailedMount", f'persistentvolumeclaim "{name}" not found')
            path = self._claims / self._pod["metadata"]["namespace"] / name
            path.mkdir(parents=True, exist_ok=True)
            return path
        path.mkdir(parents=True, exist_ok=True)
        if volume.get("emptyDir") is not None:
            path.chmod(0o777)
            return path
        sources = volume["projected"].get("sources") or [] if volume.get("projected") else [volume]
        mode = int((volume.get("projected") or {}).get("defaultMode") or 0o644)
        # The volume that admission adds for calls to the API. This cluster issues no tokens for service accounts, so
        # the volume holds only the rest. A pod rarely uses it, and must not wait forever for it.
        for_api = any("serviceAccountToken" in source for source in sources)
        for source in sources:
            if "serviceAccountToken" not in source:
                await self._project(source, path, mode, lenient=for_api)
        return path

    async def _project(self, source: Mapping[str, Any], path: Path, mode: int, *, lenient: bool = False) -> None:
        for kind, field in (("configmaps", "configMap"), ("secrets", "secret")):
            if (spec := source.get(field)) is not None:
                name = spec.get("secretName") or spec.get("name")
                optional = bool(spec.get("optional")) or lenient
                found = await _entries(self._lookup, kind, name, optional=optional, reason="FailedMount")
                if found is None:
                    return
                mode = int(spec.get("defaultMode") or mode)
                items = spec.get("items") or [{"key": key, "path": key} for key in found]
                for item in items:
                    # A real kubelet mounts an optional volume without the keys that are missing.
                    if item["key"] not in found:
                        if optional:
                            continue
                        raise NotReadyError("FailedMount", f"references non-existent config key: {item['key']}")
                    write(path, item["path"], found[item["key"]], int(item.get("mode") or mode))
                return
        if (spec := source.get("downwardAPI")) is not None:
            mode = int(spec.get("defaultMode") or mode)
            for item in spec.get("items") or []:
                ref = item.get("fieldRef")
                if ref is None:
                    raise NotReadyError(
                        "FailedMount", "a downwardAPI volume with a resourceFieldRef is not supported here"
                    )
                write(path, item["path"], self._field(ref["fieldPath"]).encode(), int(item.get("mode") or mode))
            return
        kinds = ", ".join(sorted(set(source) - {"name"})) or "nothing"
        raise NotReadyError("FailedMount", f"a volume of {kinds} is not supported by this kubelet")

    def remove(self) -> None:
        """Remove the files of this pod; claims and host paths stay."""
        shutil.rmtree(self._root, ignore_errors=True)


def write(root: Path, name: str, data: bytes, mode: int) -> None:
    """Write a file of a projected volume. A reader finds all of it.

    Raises:
        NotReadyError: its path is outside of the volume.
    """
    if name.startswith("/") or ".." in Path(name).parts:
        raise NotReadyError("FailedMount", f"path {name!r} must be relative and must not contain '..'")
    file = root / name
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, data, mode)


def host_path(path: Path, kind: str) -> Path:
    """Returns the path of a hostPath; created if its type requires that.

    Raises:
        NotReadyError: the path does not have the required type.
    """
    if kind == "DirectoryOrCreate":
        path.mkdir(parents=True, exist_ok=True)
    elif kind == "FileOrCreate" and not path.exists():
        path.touch()
    checks = {"Directory": path.is_dir, "File": path.is_file, "Socket": path.is_socket, "FileOrCreate": path.is_file}
    if kind in checks and not checks[kind]():
        raise NotReadyError("FailedMount", f"hostPath type check failed: {path} is not a {kind}")
    return path


def mount_paths(container: Mapping[str, Any], volumes: Mapping[str, Path]) -> dict[str, str]:
    """Path in the container -> path on the host, for each of the container's volumeMounts.

    Raises:
        NotReadyError: a mount's volume does not exist, or its subPath is outside of the volume.
    """
    paths = {}
    for mount in container.get("volumeMounts") or []:
        if mount["name"] not in volumes:
            raise NotReadyError(
                "CreateContainerConfigError", f'volumeMount "{mount["name"]}" has no volume of that name'
            )
        host = volumes[mount["name"]]
        if sub := mount.get("subPath"):
            if sub.startswith("/") or ".." in Path(sub).parts:
                raise NotReadyError("CreateContainerConfigError", f"subPath {sub!r} must be relative without '..'")
            host = host / sub
            if not host.exists():
                host.mkdir(parents=True)
        paths[clean_path(mount["mountPath"])] = str(host)
    return paths
