"""The shared parts of a node's pods, such as its name and addresses, folders, devices, and components."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import itertools
import os
import platform
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.events import EventRecorder
from backstay_cluster.kubelet.logs import LogSink
from backstay_cluster.kubelet.objects import Object
from backstay_cluster.kubelet.preload import without_gpu
from backstay_cluster.kubelet.runtime import Runtime

GPU = "nvidia.com/gpu"
RUNNING = ".running"
"""The folder of the pods that run, in the data folder."""
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
    """Returns the addresses of a block, without the first `skip` (the block's own address and the node's)."""
    network = ipaddress.ip_network(cidr)
    return [str(network[i]) for i in range(skip, network.num_addresses)]


def python_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Returns the environment of an image, with this Python's programs first on PATH, and unbuffered output for timely
    logs."""
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


def local_gpus(root: Path = Path("/proc/driver/nvidia/gpus"), environ: Mapping[str, str] = os.environ) -> list[str]:
    """Returns this machine's NVIDIA GPUs in the form of `CUDA_VISIBLE_DEVICES`: all, or those of that variable."""
    try:
        found = [str(i) for i, _ in enumerate(sorted(root.iterdir()))]
    except OSError:
        return []
    chosen = environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return found
    words = dict.fromkeys(word.strip() for word in chosen.split(","))
    # As CUDA does: what follows the first invalid name is not visible.
    return list(itertools.takewhile(lambda word: word in found or word.startswith(("GPU-", "MIG-")), words))


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until `event` is set, at most `seconds`. Returns whether the event is set."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()


@dataclass(frozen=True)
class NodeFacts:
    """The facts that the API shows about a node.

    Attributes:
        name: the node's name.
        ip: the node's address.
        labels: the node's labels.
        allocatable: the resources that pods may use.
    """

    name: str
    ip: str
    labels: Mapping[str, str]
    allocatable: Mapping[str, str]

    @classmethod
    def of(cls, name: str, ip: str, allocatable: Mapping[str, str]) -> NodeFacts:
        """Returns the facts of a node of this machine, with the labels that Kubernetes gives to each node."""
        arch = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": arch}
        return cls(name, ip, labels, allocatable)


@dataclass(frozen=True)
class Machine:
    """The runtime of containers, and the environment and devices that each container gets from this machine.

    Attributes:
        runtime: starts and ends processes.
        image: the environment of the image.
        extra_env: environment of every container; `$(POD_IP)` in a value is the pod's address, `$(POD_LOGS)` the
            folder with its logs.
        gpus: names of the devices, in the form of `CUDA_VISIBLE_DEVICES`.
        without_gpu: environment of each container without a GPU.
    """

    runtime: Runtime
    image: Mapping[str, str]
    extra_env: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[str] = ()
    without_gpu: Mapping[str, str] = field(default_factory=without_gpu)


@dataclass
class PodNode:
    """The environment of a pod."""

    client: ApiClient
    events: EventRecorder
    facts: NodeFacts
    machine: Machine
    data_dir: Path
    addresses: Pool
    service_links: Callable[[str], dict[str, str]] = lambda _: {}
    gpus: Pool = field(init=False)
    sinks: dict[tuple[str, str, str], LogSink] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.gpus = Pool(self.machine.gpus)

    @property
    def logs_dir(self) -> Path:
        """The folder of the `<namespace>/<pod>/<container>.log` files."""
        return self.data_dir / "pods"

    async def lookup(self, namespace: str, resource: str, name: str) -> Object | None:
        """Returns an object of a namespace, or None if it does not exist.

        Raises:
            ApiRequestError: any other error of the API server.
        """
        try:
            return await self.client.get(f"/api/v1/namespaces/{namespace}/{resource}/{name}")
        except ApiRequestError as error:
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
