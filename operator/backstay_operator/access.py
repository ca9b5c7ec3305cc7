"""The address of the API server and the credentials for it, loaded once for both clients of the operator.

Kopf watches with one session, and the operator writes with another. Both use what is loaded here, so both connect to
the same cluster with the same identity. This module reads a service account, and a kubeconfig with a token. The
`kubernetes` package reads all other kubeconfigs (client certificates, plug-ins, OIDC), and is imported only for them.
"""

from __future__ import annotations

import base64
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import kopf
import yaml

USER_AGENT: Final = "backstay-operator"
_SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The kubelet replaces the token in the file before it expires.
_TOKEN_SECONDS: Final = 60.0
_CLUSTER: Final = frozenset({"server", "certificate-authority", "certificate-authority-data"})


class AccessError(Exception):
    """No credentials for an API server were found. The message states what was tried."""


@dataclass(frozen=True)
class ApiCredentials:
    """The API server, and how the operator authenticates.

    Attributes:
        host: the server's URL.
        token: returns the bearer token; None: a client certificate, or nothing, authenticates the operator.
        ca_path, ca_data: the certificate authority of the server, as a file or as PEM; neither: the system's.
        verify: whether the server's certificate is checked.
        cert_file, key_file: the certificate and the key of a client.
        proxy: URL of a proxy.
    """

    host: str
    token: Callable[[], Awaitable[str | None]]
    ca_path: str | None = None
    ca_data: str | None = None
    verify: bool = True
    cert_file: str | None = None
    key_file: str | None = None
    proxy: str | None = None

    def tls(self) -> ssl.SSLContext:
        """Returns the TLS context for the connections of the operator's client."""
        context = ssl.create_default_context(cafile=self.ca_path, cadata=self.ca_data)
        if self.cert_file:
            context.load_cert_chain(self.cert_file, keyfile=self.key_file)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context


async def load(kubeconfig: str | None) -> ApiCredentials:
    """Read the credentials from a kubeconfig, or else those of the pod's service account.

    Args:
        kubeconfig: the path of a kubeconfig, or None for the service account of the pod that runs this process.

    Raises:
        AccessError: the file, or the service account, cannot be used.
    """
    if kubeconfig is None:
        return _service_account(os.environ)
    return _plain(kubeconfig) or await _by_package(kubeconfig)


def _service_account(environ: Mapping[str, str], folder: Path = _SERVICE_ACCOUNT) -> ApiCredentials:
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    ca = folder / "ca.crt"
    if not host or not port:
        raise _no_service_account("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT are not set")
    if not ca.is_file():
        raise _no_service_account(f"there is no file {ca}")
    token = _ApiTokenFile(folder / "token")
    token.read()
    return ApiCredentials(f"https://{f'[{host}]' if ':' in host else host}:{port}", token, ca_path=str(ca))


def _no_service_account(why: str) -> AccessError:
    hint = "outside a cluster, name a kubeconfig with --kubeconfig or KUBECONFIG"
    return AccessError(f"the service account of this pod cannot be used: {why}; {hint}")


class _ApiTokenFile:
    """The token in a file, read again once a minute."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._token, self._read_at = "", clock()

    def read(self) -> str:
        """Read the file now.

        Raises:
            AccessError: the token cannot be read, or is empty.
        """
        try:
            token = self._path.read_text().strip()
        except OSError as error:
            raise _no_service_account(str(error)) from error
        if not token:
            raise _no_service_account(f"{self._path} is empty")
        self._token, self._read_at = token, self._clock()
        return token

    async def __call__(self) -> str:
        if self._clock() - self._read_at < _TOKEN_SECONDS:
            return self._token
        return self.read()


def _plain(kubeconfig: str) -> ApiCredentials | None:
    """Returns the credentials of a kubeconfig that has a token and a server, or None if it is not such a file."""
    try:
        config = yaml.safe_load(Path(kubeconfig).read_text())
        named = {kind: {one["name"]: one for one in config[kind]} for kind in ("contexts", "clusters", "users")}
        context = named["contexts"][config["current-context"]]["context"]
        cluster: dict[str, Any] = named["clusters"][context["cluster"]]["cluster"]
        user: dict[str, Any] = named["users"][context["user"]]["user"]
        if set(user) != {"token"} or not cluster.keys() <= _CLUSTER:
            return None
        token, server, file = user["token"], cluster["server"], cluster.get("certificate-authority")
        data = base64.b64decode(cluster.get("certificate-authority-data") or "", validate=True).decode("ascii")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return None  # the package reports the mistake in it
    if not (isinstance(token, str) and token and isinstance(server, str)):
        return None

    async def constant() -> str:
        return token

    ca_path = str(Path(kubeconfig).parent / file) if file and not data else None
    return ApiCredentials(server.rstrip("/"), constant, ca_path=ca_path, ca_data=data or None)


async def _by_package(kubeconfig: str) -> ApiCredentials:
    from kubernetes.aio import config
    from kubernetes.aio.client import Configuration

    loaded = Configuration()
    try:
        await config.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=kubeconfig, client_configuration=loaded, persist_config=False
        )
    except (config.ConfigException, OSError) as error:
        raise AccessError(f"the kubeconfig {kubeconfig} cannot be used: {error}") from error

    async def token() -> str | None:
        try:
            value: str | None = await loaded.get_api_key_with_prefix("BearerToken", alias="authorization")
        except config.ConfigException as error:
            raise AccessError(f"the token of {kubeconfig} cannot be read: {error}") from error
        return None if value is None else value.rpartition(" ")[2].strip()

    data = None if loaded.ssl_ca_cert else loaded.ca_cert_data
    return ApiCredentials(
        loaded.host,
        token,
        ca_path=loaded.ssl_ca_cert,
        ca_data=data.decode() if isinstance(data, bytes) else data,
        verify=loaded.verify_ssl,
        cert_file=loaded.cert_file,
        key_file=loaded.key_file,
        proxy=loaded.proxy or None,
    )


async def kopf_login(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """Returns the same credentials in Kopf's form. Kopf calls this function again when the API server answers 401."""
    loaded = await load(kubeconfig)
    token = await loaded.token()
    return kopf.ConnectionInfo(
        server=loaded.host,
        ca_path=loaded.ca_path,
        ca_data=loaded.ca_data,
        insecure=not loaded.verify,
        scheme="Bearer" if token else None,
        token=token,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
        proxy_url=loaded.proxy,
    )
