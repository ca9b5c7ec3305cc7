"""Runs the embedded cluster, with addresses, an API server and one node.

`EmbeddedCluster` runs in the caller's event loop. `ClusterProcess` runs it as a separate process, for callers without
an event loop. It also keeps the API server's work out of the caller's process.
"""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import logging
import os
import select
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

import yaml

from backstay_cluster.client import ApiClient, until_answered
from backstay_cluster.gc import GarbageCollector
from backstay_cluster.kubelet.kubelet import Kubelet
from backstay_cluster.kubelet.node import RUNNING, Machine, local_gpus, python_environment
from backstay_cluster.kubelet.preload import Preload
from backstay_cluster.kubelet.runtime import ProcessRuntime
from backstay_cluster.net import LoopbackBlock, claim_block
from backstay_cluster.realserver import RealServer, assets, new_token
from backstay_cluster.whole import write_whole

if TYPE_CHECKING:
    from backstay_cluster.apiserver import ApiServer

logger = logging.getLogger(__name__)
KUBECONFIG_NAME = "cluster.kubeconfig"
START_SECONDS = 120.0
STOP_SECONDS = 20.0
# Every container gets the address to bind (in a real cluster all addresses, here the pod's), and the pod's folder.
EXTRA_ENV = {"BACKSTAY_BIND": "$(POD_IP)", "BACKSTAY_KEEP": "$(POD_LOGS)"}
# The compilation cache that a pod shares with its replacement:
# https://docs.jax.dev/en/latest/persistent_compilation_cache.html
COMPILED_ENV = "JAX_COMPILATION_CACHE_DIR"
# By default XLA keeps some results for GPUs in the same folder, and its path is then a part of the name of each entry.
# The entries of an earlier cluster, in another folder, would not be found. An entry has these results in it, too.
NAMES_ENV = {"JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
# Folders that end with the cluster. The data folder may be the user's project, which has no such names.
COMPILED, _CONTROL_PLANE = ".compiled", ".control-plane"
_FIRST_LINE = "# An embedded cluster of Backstay wrote this file, and removes it when it stops.\n"


def kubeconfig(url: str, token: str, ca: bytes | None = None) -> str:
    """Returns a kubeconfig as YAML.

    Args:
        url: the URL of the API server.
        token: the bearer token.
        ca: PEM of the certificate authority of an https server.
    """
    cluster: dict[str, str] = {"server": url}
    if ca is not None:
        cluster["certificate-authority-data"] = base64.b64encode(ca).decode()
    return _FIRST_LINE + yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "backstay", "cluster": cluster}],
            "users": [{"name": "backstay", "user": {"token": token}}],
            "contexts": [
                {"name": "backstay", "context": {"cluster": "backstay", "user": "backstay", "namespace": "default"}}
            ],
            "current-context": "backstay",
        },
        sort_keys=False,
    )


class EmbeddedCluster:
    """An API server and a node in this process; with `KUBEBUILDER_ASSETS`, the real API server in separate processes.

    Args:
        data_dir: the folder of logs and all other data; None: a temporary folder, removed at the end.
        kubeconfig_path: the kubeconfig to write; its name must end in `.kubeconfig`; None: in `data_dir`. A file that
            no embedded cluster has written is not replaced.
        kubelet: whether to run a node; without one, pods stay Pending (a `FakeKubelet` may be started instead).
        extra_env: environment of every container in addition to `EXTRA_ENV`; `$(POD_IP)` is the pod's address,
            `$(POD_LOGS)` the folder with its logs.
        base_env: the environment of the image; None: this Python environment's.
        preload: the modules to import once for all containers that run Python scripts; None: no modules.

    Attributes:
        url: the URL of the API server.
        token: the bearer token of an administrator.
        ca: PEM of the certificate that clients must trust; None for http.
        kubeconfig: path of the kubeconfig.
        logs_dir: the folder of the `<namespace>/<pod>/<container>.log` files.
        data_dir: the folder of all data.
        node: the kubelet; None: no node runs.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        kubeconfig_path: Path | str | None = None,
        kubelet: bool = True,
        extra_env: Mapping[str, str] | None = None,
        base_env: Mapping[str, str] | None = None,
        preload: Preload | None = None,
    ) -> None:
        self._temporary = data_dir is None
        self.data_dir = Path(tempfile.mkdtemp(prefix="backstay-")) if data_dir is None else Path(data_dir).absolute()
        self.kubeconfig = (
            self.data_dir / KUBECONFIG_NAME if kubeconfig_path is None else Path(kubeconfig_path).absolute()
        )
        if self.kubeconfig.suffix != ".kubeconfig":
            raise ValueError(f"kubeconfig {str(self.kubeconfig)!r}: the name must end in .kubeconfig")
        self.url = ""
        self.token = new_token()
        self._written = ""  # the content of the kubeconfig, if it was written
        self._folder: int | None = None  # the descriptor of the folder, which is locked
        self.node: Kubelet | None = None
        self._with_kubelet = kubelet
        self._extra_env = {**EXTRA_ENV, **(extra_env or {})}
        base_env = python_environment() if base_env is None else base_env
        own = {} if COMPILED_ENV in base_env else {COMPILED_ENV: str(self.data_dir / COMPILED), **NAMES_ENV}
        self._base_env = {**own, **base_env}
        self._preload = preload
        self._runtime: ProcessRuntime | None = None
        self._block: LoopbackBlock | None = None
        self._server: ApiServer | RealServer | None = None
        self._client: ApiClient | None = None
        self.ca: str | None = None
        self._tls: ssl.SSLContext | None = None
        self._collector: asyncio.Task[None] | None = None

    @property
    def logs_dir(self) -> Path:
        """The folder of the `<namespace>/<pod>/<container>.log` files; they stay when the pods are deleted."""
        return self.data_dir / "pods"

    def client(self) -> ApiClient:
        """Returns a new client of the API server; the caller closes it."""
        return ApiClient(self.url, self.token, ssl=self._tls)

    async def start(self) -> Self:
        """Start; returns when pods can be created and run.

        Raises:
            NetworkError: no addresses are available.
            AssetsError: `KUBEBUILDER_ASSETS` names servers that cannot be used.
            TimeoutError: the API server was not ready in time.
            ValueError: another cluster uses the folder, or another program wrote the kubeconfig.
        """
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._claim()
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    def _claim(self) -> None:
        """Lock the folder, because two clusters would remove each other's files. The lock ends with the process."""
        if self.kubeconfig.exists() and not self.kubeconfig.read_text(errors="replace").startswith(_FIRST_LINE):
            raise ValueError(
                f"kubeconfig {str(self.kubeconfig)!r}: another program wrote this file; choose another name"
            )
        folder = os.open(self.data_dir, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(folder)
            raise ValueError(f"another embedded cluster uses the folder {self.data_dir}; choose another one") from None
        self._folder = folder

    async def _start(self) -> None:
        self._block = claim_block()
        if self._with_kubelet:
            # First, because its imports take longer than all other steps.
            keep_open = (self._block.claim.fileno(),)
            self._runtime = ProcessRuntime(keep_open, preload=self._preload, base_env=self._base_env)
            self._runtime.open()
        folder = assets(os.environ)
        ca: bytes | None = None
        kubelet_tls: ssl.SSLContext | None = None
        if folder is None:
            from backstay_cluster.apiserver import ApiServer

            # The same token for the kubelet's port: the API server sends it when it forwards logs.
            server = ApiServer(host="127.0.0.1", port=0, token=self.token, service_cidr=self._block.service_cidr)
            self._server = server
            await server.start()
            self.url = server.url
            if server.ca is not None:
                ca = server.ca.encode()
                self._tls = ssl.create_default_context(cadata=server.ca)
        else:
            real = RealServer(folder, self.data_dir / _CONTROL_PLANE, self._block.service_cidr, self.token)
            self._server = real
            await real.start()
            self.url = real.url
            self._tls, kubelet_tls = real.client_tls(), real.kubelet_tls()
            ca = real.certificate.read_bytes()
        self._client = self.client()
        await until_answered(self._client)
        if folder is not None:
            self._collector = asyncio.create_task(GarbageCollector(self._client).run())
        self.ca = None if ca is None else ca.decode()
        self._written = kubeconfig(self.url, self.token, ca)
        self.kubeconfig.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.kubeconfig, self._written.encode(), 0o600)  # it has a token
        if self._runtime is not None:
            self.node = Kubelet(
                self._client,
                self.data_dir,
                self._block.pod_cidr,
                Machine(self._runtime, self._base_env, self._extra_env, local_gpus()),
                token=self.token,
                tls=kubelet_tls,
            )
            await self.node.start()

    async def stop(self) -> None:
        """End every container, then the API server; remove the kubeconfig, and a temporary folder."""
        if self._collector is not None:
            self._collector.cancel()
            await asyncio.gather(self._collector, return_exceptions=True)
            self._collector = None
        if self.node is not None:
            await self.node.stop()
            self.node = None
        if self._runtime is not None:
            await self._runtime.close()
            self._runtime = None
        if self._client is not None:
            await self._client.close()
            self._client = None
        if self._server is not None:
            await self._server.stop()
            self._server = None
        if self._block is not None:
            self._block.close()
            self._block = None
        if self._written and self.kubeconfig.exists() and self.kubeconfig.read_text() == self._written:
            self.kubeconfig.unlink()
        self._written = ""
        if self._folder is not None:  # the folder is this cluster's
            for name in (RUNNING, _CONTROL_PLANE, COMPILED):
                shutil.rmtree(self.data_dir / name, ignore_errors=True)
            os.close(self._folder)
            self._folder = None
        if self._temporary:
            shutil.rmtree(self.data_dir, ignore_errors=True)

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *_: object) -> None:
        await self.stop()


class ClusterProcess:
    """An embedded cluster as a process, for callers without an event loop; it ends with the caller, however that ends.

    Args:
        data_dir: as for `EmbeddedCluster`.
        kubeconfig_path: as for `EmbeddedCluster`.
        log_file: the file for its own log; None: this process' stderr.
        kubelet: as for `EmbeddedCluster`.
        environ: the process' environment.
        preload: as for `EmbeddedCluster`.

    Attributes:
        url: the URL of the API server.
        token: the bearer token.
        ca: PEM of the certificate that clients must trust; None for http.
        kubeconfig: path of the kubeconfig.
        logs_dir: the folder of the `<namespace>/<pod>/<container>.log` files.
        pid: the id of the process.
    """

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        kubeconfig_path: Path | str | None = None,
        log_file: Path | str | None = None,
        kubelet: bool = True,
        environ: Mapping[str, str] | None = None,
        preload: Preload | None = None,
    ) -> None:
        self._args = [] if data_dir is None else ["--data-dir", str(data_dir)]
        self._args += [] if kubeconfig_path is None else ["--kubeconfig", str(kubeconfig_path)]
        self._args += [] if kubelet else ["--no-kubelet"]
        self._args += [] if preload is None else ["--preload", preload.to_json()]
        self._log_file = log_file
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self.url = self.token = ""
        self.ca: str | None = None
        self.kubeconfig = self.logs_dir = Path()

    def client(self) -> ApiClient:
        """Returns a new client of the API server; the caller, which has an event loop, closes it."""
        tls = None if self.ca is None else ssl.create_default_context(cadata=self.ca)
        return ApiClient(self.url, self.token, ssl=tls)

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return None if self._process is None else self._process.pid

    def start(self, seconds: float = START_SECONDS) -> Self:
        """Start, and wait until pods can be created.

        Raises:
            RuntimeError: the cluster ended before it was ready; its message is in its log.
            TimeoutError: the cluster was not ready in time.
        """
        ready_r, ready_w = os.pipe()
        log: IO[Any] | None = None if self._log_file is None else Path(self._log_file).open("ab")  # noqa: SIM115
        command = [sys.executable, "-P", "-m", "backstay_cluster", "--ready-fd", str(ready_w)]
        try:
            self._process = subprocess.Popen(
                [*command, "--die-with-parent", str(os.getpid()), *self._args],
                pass_fds=(ready_w,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env=None if self._environ is None else dict(self._environ),
                # The caller handles a Ctrl-C in the terminal: it may need the cluster for a little longer.
                start_new_session=True,
            )
        finally:
            os.close(ready_w)
            if log is not None:
                log.close()
        with os.fdopen(ready_r, "rb", buffering=0) as ready:
            data, deadline = b"", time.monotonic() + seconds
            while not data.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([ready], [], [], left)[0]:
                    self.stop()
                    raise TimeoutError(f"the embedded cluster was not ready within {seconds:.0f} s")
                chunk = ready.read(4096)
                if not chunk:
                    code = self._process.wait()
                    self._process = None
                    where = f": see {self._log_file}" if self._log_file else ""
                    raise RuntimeError(f"the embedded cluster ended with exit code {code} before it was ready{where}")
                data += chunk
        started = json.loads(data)
        self.url, self.token, self.ca = started["url"], started["token"], started["ca"]
        self.kubeconfig, self.logs_dir = Path(started["kubeconfig"]), Path(started["logsDir"])
        return self

    def stop(self) -> None:
        """End it, and all its containers."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("the embedded cluster did not stop within %.0f s: killed", STOP_SECONDS)
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
