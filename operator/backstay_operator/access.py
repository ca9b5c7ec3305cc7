"""How the operator finds and proves itself to the API server, once, for both of its clients.

Kopf watches with a session of its own and we write with the `kubernetes` package; both are given what is loaded here,
so that there is one answer to "which cluster, as whom".
"""

from __future__ import annotations

from typing import Final

import kopf
from kubernetes.aio import config
from kubernetes.aio.client import Configuration

USER_AGENT: Final = "backstay-operator"


class AccessError(Exception):
    """No way to the API server was found; the message says what was tried."""


async def load(kubeconfig: str | None) -> Configuration:
    """Read the credentials, from a file if one is named, else those that a pod is given.

    Args:
        kubeconfig: the path of a kubeconfig, or None for the service account of the pod that this runs in.

    Raises:
        AccessError: the file, or the service account, cannot be used.
    """
    loaded = Configuration()
    try:
        if kubeconfig:
            await config.load_kube_config(  # type: ignore[no-untyped-call]
                config_file=kubeconfig, client_configuration=loaded, persist_config=False
            )
        else:
            config.load_incluster_config(client_configuration=loaded)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        where = f"the kubeconfig {kubeconfig}" if kubeconfig else "the service account of this pod"
        hint = "" if kubeconfig else "; outside a cluster name a file with --kubeconfig or KUBECONFIG"
        raise AccessError(f"{where} cannot be used: {error}{hint}") from error
    return loaded


async def bearer(configuration: Configuration) -> str | None:
    """The value of the Authorization header, or None where a client certificate, or nothing, proves who we are.

    Raises:
        AccessError: the token was to be read again, and cannot be.
    """
    try:
        value: str | None = await configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
    except config.ConfigException as error:
        raise AccessError(f"the service account's token cannot be read: {error}") from error
    if value is None:
        return None
    scheme, _, token = value.rpartition(" ")
    return f"{scheme.title() or 'Bearer'} {token.strip()}"


async def kopf_login(kubeconfig: str | None) -> kopf.ConnectionInfo:
    """The same credentials as Kopf wants them; called again by Kopf when the API server answers 401."""
    loaded = await load(kubeconfig)
    header = await bearer(loaded)
    scheme, token = header.split(" ", 1) if header else (None, None)
    return kopf.ConnectionInfo(
        server=loaded.host,
        ca_path=loaded.ssl_ca_cert,
        ca_data=None if loaded.ssl_ca_cert else loaded.ca_cert_data,
        insecure=not loaded.verify_ssl,
        scheme=scheme,
        token=token,
        certificate_path=loaded.cert_file,
        private_key_path=loaded.key_file,
        proxy_url=loaded.proxy or None,
    )
