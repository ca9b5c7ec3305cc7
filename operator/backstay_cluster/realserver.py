"""A real etcd and kube-apiserver in place of the small API server, when `KUBEBUILDER_ASSETS` names their folder.

They run the same tests as the small server; the rest of the embedded cluster is the same. Both listen on loopback only,
and authenticate requests by a token file. No controller manager runs, so the ServiceAccount admission is off, and
`gc.py` collects garbage.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backstay_cluster.apiserver import certs
from backstay_cluster.client import ApiClient, until_answered
from backstay_cluster.kubelet.runtime import Process, ProcessRuntime, StartError
from backstay_cluster.net import LoopbackBlock, claim_block

ASSETS = "KUBEBUILDER_ASSETS"
ETCD_PORT, PEER_PORT, API_PORT = 2379, 2380, 6443
READY_SECONDS = 240.0
STOP_SECONDS = 5.0


class AssetsError(Exception):
    """The real servers cannot be used."""


def assets(environ: Mapping[str, str] | None = None) -> Path | None:
    """Returns the folder of `etcd` and `kube-apiserver`, or None if the variable is not set.

    Raises:
        AssetsError: a program is missing in the folder.
    """
    named = (os.environ if environ is None else environ).get(ASSETS)
    if not named:
        return None
    folder = Path(named)
    missing = [name for name in ("etcd", "kube-apiserver") if not os.access(folder / name, os.X_OK)]
    if missing:
        raise AssetsError(
            f"{ASSETS} is {named!r}: {' and '.join(missing)} must be executable files there; "
            f"unset it to use the small API server"
        )
    return folder


def make_certificate(folder: Path, *hosts: str) -> tuple[Path, Path]:
    """Files of a self-signed certificate and its key, for `hosts` and 127.0.0.1. kube-apiserver and the kubelet
    authenticate each other by it. The key also signs tokens."""
    key, certificate = folder / "node.key", folder / "node.crt"
    made = certs.make_certificate([*hosts, "127.0.0.1", "localhost"], for_clients=True)
    certificate.write_text(made.pem)
    key.touch(mode=0o600)
    key.write_text(made.key)
    return certificate, key


class RealServer:
    """etcd and kube-apiserver, as processes that end with this one.

    Args:
        folder: the folder of the programs.
        data_dir: the folder for their data, keys and logs; created.
        service_cidr: the block of the Services' addresses.
        token: the bearer token of an administrator.
        service_accounts: whether pods need a ServiceAccount, and get its token in a volume. Without a controller
            manager, the caller must create the ServiceAccount `default` in each namespace.

    Attributes:
        url: the URL of the API server, https.
        certificate: PEM file of the server's certificate.
    """

    def __init__(
        self, folder: Path, data_dir: Path, service_cidr: str, token: str, *, service_accounts: bool = False
    ) -> None:
        self._folder = folder
        self._dir = data_dir
        self._cidr = service_cidr
        self._token = token
        self._service_accounts = service_accounts
        self._runtime = ProcessRuntime()
        self._processes: list[Process] = []
        self._block: LoopbackBlock | None = None  # of its addresses, so that no other process takes a port meanwhile
        self.url = ""
        self.certificate = data_dir / "node.crt"

    def client_tls(self) -> ssl.SSLContext:
        """Returns a context that trusts this server."""
        return ssl.create_default_context(cafile=str(self.certificate))

    def kubelet_tls(self) -> ssl.SSLContext:
        """Returns the context for the kubelet's port, which accepts only the API server with the shared certificate."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(self.certificate))
        context.load_cert_chain(self.certificate, self._dir / "node.key")
        context.verify_mode = ssl.CERT_REQUIRED
        return context

    async def start(self) -> None:
        """Start both, and wait until requests are answered.

        Raises:
            AssetsError: a process ended; the message has its log.
            NetworkError: no address is free.
            TimeoutError: the processes were not ready in time.
        """
        self._dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._block = claim_block()
        host = self._block.node_ip
        certificate, key = await asyncio.to_thread(make_certificate, self._dir, host)
        tokens = self._dir / "tokens.csv"
        tokens.touch(mode=0o600)
        tokens.write_text(f'{self._token},admin,admin,"system:masters"\n')
        etcd, peer = f"http://{host}:{ETCD_PORT}", f"http://{host}:{PEER_PORT}"
        await self._run(
            "etcd",
            f"--data-dir={self._dir / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=warn",
        )
        await self._run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            f"--bind-address={host}",
            f"--advertise-address={host}",
            f"--secure-port={API_PORT}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--anonymous-auth=false",
            *([] if self._service_accounts else ["--disable-admission-plugins=ServiceAccount"]),
            "--endpoint-reconciler-type=none",
            f"--service-cluster-ip-range={self._cidr}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificate}",
            f"--service-account-signing-key-file={key}",
            f"--kubelet-client-certificate={certificate}",
            f"--kubelet-client-key={key}",
            "--kubelet-preferred-address-types=InternalIP",
            "--profiling=false",
        )
        self.url = f"https://{host}:{API_PORT}"
        client = ApiClient(self.url, self._token, ssl=self.client_tls())
        ready = asyncio.ensure_future(until_answered(client, seconds=READY_SECONDS))
        waited: set[asyncio.Future[Any]] = {ready, *(process.exited for process in self._processes)}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if not ready.done():
                ended = next(process.id for process in self._processes if process.exited.done())
                last = (self._dir / f"{ended}.log").read_text(errors="replace").strip().splitlines()[-1:]
                raise AssetsError(f"{ended} ended before it was ready: {''.join(last) or 'it wrote no log'}")
            await ready
        finally:
            ready.cancel()
            await client.close()

    async def _run(self, name: str, *args: str) -> None:
        """Start a program through the spawner of containers, so that it ends when this process is killed by SIGKILL."""
        log = os.open(self._dir / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        env = {"PATH": os.defpath, "HOME": str(self._dir)}
        try:
            argv = [str(self._folder / name), *args]
            self._processes.append(await self._runtime.start(name, argv, env, str(self._dir), log))
        except StartError as error:
            raise AssetsError(f"{self._folder / name} cannot be run: {error}") from error
        finally:
            os.close(log)

    async def stop(self) -> None:
        """End both; their data stays in the folder."""
        for process in reversed(self._processes):
            self._runtime.kill(process, signal.SIGTERM)
            await asyncio.wait({process.exited}, timeout=STOP_SECONDS)
        self._processes.clear()
        await self._runtime.close()
        if self._block is not None:
            self._block.close()


def new_token() -> str:
    """Returns a bearer token."""
    return secrets.token_hex(24)
