"""The shared parts of a node's pods: its name and addresses, folders, devices, and components."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from backstay_cluster.kubelet.api import ApiClient, ApiError
from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.logs import LogSink
from backstay_cluster.kubelet.objects import Object
from backstay_cluster.kubelet.runtime import Runtime

GPU = "nvidia.com/gpu"
# Variables of the kubelet's environment that each container gets: this Python environment needs them; no credentials.
INHERITED = (
    "HOME",
    "USER",
    "LOGNAME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "PYTHONPATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "SSL_CERT_FILE",
    "SSL_CERT_DIR",
)
# Variables of a user's environment that no container gets: Backstay's own, access to an API server, GPUs, and
# variables about the user's shell and host. The kubelet assigns GPUs to pods that request them.
WITHHELD_PREFIXES = ("BACKSTAY_", "KUBERNETES_")
WITHHELD = frozenset(
    {"KUBECONFIG", "KUBEBUILDER_ASSETS", "CUDA_VISIBLE_DEVICES", "HOSTNAME", "PWD", "OLDPWD", "SHLVL", "_"}
)


class PoolEmptyError(Exception):
    """The pool has too few free items."""


class Pool:
    """Addresses or devices, each used by one pod at a time; the one that was free for longest is used first."""

    def __init__(self, items: Iterable[str]) -> None:
        self._free = deque(items)

    def take(self, count: int = 1) -> list[str]:
        """Take items out of the pool.

        Raises:
            PoolEmptyError: fewer than `count` are free.
        """
        if len(self._free) < count:
            raise PoolEmptyError(f"{count} requested, {len(self._free)} free")
        return [self._free.popleft() for _ in range(count)]

    def release(self, items: Iterable[str]) -> None:
        """Return items to the pool."""
        self._free.extend(items)


def pod_addresses(cidr: str, skip: int = 2) -> list[str]:
    """The addresses of a block, without the first `skip` (the block's own address and the node's)."""
    network = ipaddress.ip_network(cidr)
    return [str(network[i]) for i in range(skip, network.num_addresses)]


def python_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of an image: this Python's programs first on PATH, and unbuffered output for timely logs."""
    environ = os.environ if environ is None else environ
    # Not resolved: in a virtual environment the interpreter is a link, and the link's folder is needed.
    path = [str(Path(sys.executable).parent), *environ.get("PATH", os.defpath).split(os.pathsep)]
    env = {name: environ[name] for name in INHERITED if name in environ}
    return {**env, "PATH": os.pathsep.join(dict.fromkeys(path)), "PYTHONUNBUFFERED": "1"}


def user_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`python_environment` and the rest of the user's variables, without those that containers must not get."""
    environ = os.environ if environ is None else environ
    passed = {
        name: value
        for name, value in environ.items()
        if name not in WITHHELD and not name.startswith(WITHHELD_PREFIXES)
    }
    return {**passed, **python_environment(environ)}


def local_gpus(root: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """The indices of this machine's NVIDIA GPUs, in the form of `CUDA_VISIBLE_DEVICES`."""
    try:
        return [str(i) for i, _ in enumerate(sorted(root.iterdir()))]
    except OSError:
        return []


async def sleep_unless(sleep: Callable[[float], Awaitable[None]], seconds: float, event: asyncio.Event) -> bool:
    """Wait until `seconds` have passed or `event` is set. Returns whether the event is set."""
    tasks = {asyncio.ensure_future(sleep(seconds)), asyncio.ensure_future(event.wait())}
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    return event.is_set()


@dataclass
class Node:
    """The environment of a pod. Each part with an external effect is a field, so that tests can replace it."""

    client: ApiClient
    runtime: Runtime
    events: EventRecorder
    name: str
    ip: str
    data_dir: Path
    addresses: Pool
    gpus: Pool
    allocatable: dict[str, str]
    base_env: dict[str, str]
    extra_env: dict[str, str] = field(default_factory=dict)
    service_links: Callable[[str], dict[str, str]] = lambda _: {}
    sinks: dict[tuple[str, str, str], LogSink] = field(default_factory=dict)
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    retry_seconds: float = 1.0
    rss_seconds: float = 0.5
    log_max_bytes: int = 64 << 20

    @property
    def logs_dir(self) -> Path:
        """The folder of the `<namespace>/<pod>/<container>.log` files."""
        return self.data_dir / "pods"

    async def lookup(self, namespace: str, resource: str, name: str) -> Object | None:
        """An object of a namespace; None: it does not exist.

        Raises:
            ApiError: any other error of the API server.
        """
        try:
            return await self.client.get(f"/api/v1/namespaces/{namespace}/{resource}/{name}")
        except ApiError as error:
            if error.code == 404:
                return None
            raise


def service_links(services: Iterable[Object], namespace: str) -> dict[str, str]:
    """`X_SERVICE_HOST`, `X_SERVICE_PORT` and `X_SERVICE_PORT_NAME` of the namespace's Services that have an address."""
    env = {}
    for service in services:
        spec, name = service.get("spec") or {}, service["metadata"]["name"]
        ip, ports = spec.get("clusterIP"), spec.get("ports") or []
        # Without the API server's own Service: pods have no token for it.
        if (
            service["metadata"]["namespace"] != namespace
            or not ports
            or ip in (None, "", "None")
            or name == "kubernetes"
        ):
            continue
        prefix = name.upper().replace("-", "_") + "_SERVICE"
        env[f"{prefix}_HOST"] = ip
        env[f"{prefix}_PORT"] = str(ports[0]["port"])
        for port in ports:
            if port.get("name"):
                env[f"{prefix}_PORT_{port['name'].upper().replace('-', '_')}"] = str(port["port"])
    return env
