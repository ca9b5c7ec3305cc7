"""Selects the cluster for a command: a kubeconfig, or the embedded cluster that was started in this folder."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from backstay_cli.jobfile import BadInput
from backstay_cli.kube import Api
from backstay_cli.words import shortened

__all__ = ["Cluster", "Where", "find", "open_cluster"]

_DEFAULT = Path("~/.kube/config")
_CONNECT_SECONDS = 0.5


@dataclass(frozen=True)
class Where:
    """The user's options about the cluster; None: not given."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    embedded: bool = True  # search for an embedded cluster in this folder; a kubectl plugin does not


@dataclass(frozen=True)
class Cluster:
    """An open connection.

    Attributes:
        api: the connection to the API server.
        namespace: the namespace for the command.
        name: the name of the cluster, to print.
        folder: the folder of an embedded cluster, with the logs of all pods; None: it is another cluster.
    """

    api: Api
    namespace: str
    name: str
    folder: Path | None = None


def find(where: Where, environ: Mapping[str, str] = os.environ, folder: Path | None = None) -> Path:
    """The kubeconfig to use: the one that is named, else KUBECONFIG, else that of the newest embedded cluster that runs
    in `folder`, else the user's.

    Args:
        folder: the folder of the command; None: the current one.

    Raises:
        BadInput: no cluster is known.
    """
    if where.kubeconfig is not None:
        if not where.kubeconfig.is_file():
            raise BadInput(f"--kubeconfig: there is no file {where.kubeconfig}")
        return where.kubeconfig
    named = [Path(name).expanduser() for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if named:
        found = next((path for path in named if path.is_file()), None)
        if found is None:
            raise BadInput(f"KUBECONFIG names {named[0]}, which does not exist")
        return found
    runs = (folder or Path.cwd()) / ".backstay" / "runs"
    embedded = sorted(runs.glob("*/backstay.kubeconfig"), key=_changed, reverse=True) if where.embedded else []
    for path in embedded:
        if _answers(path):
            return path
    if (default := _DEFAULT.expanduser()).is_file():
        return default
    if embedded:
        raise BadInput(
            f"no cluster is running: the embedded cluster of {shortened(str(embedded[0].parent))} has ended. Its logs "
            "are in that folder. Start one with `backstay run` or `backstay up`, or set KUBECONFIG"
        )
    raise BadInput(
        "no cluster is known: start one with `backstay run` or `backstay up` in this folder, or name a kubeconfig with "
        "--kubeconfig or KUBECONFIG"
    )


def _changed(path: Path) -> float:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def _answers(kubeconfig: Path) -> bool:
    """Whether a server listens at the address in an embedded cluster's kubeconfig."""
    try:
        config = yaml.safe_load(kubeconfig.read_text())
        url = urlsplit(config["clusters"][0]["cluster"]["server"])
        with socket.create_connection((url.hostname or "", url.port or 443), timeout=_CONNECT_SECONDS):
            return True
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return False


@contextlib.asynccontextmanager
async def open_cluster(where: Where) -> AsyncIterator[Cluster]:
    """Connect to the cluster that `where` selects.

    Raises:
        BadInput: there is no kubeconfig, or it cannot be used.
    """
    path = find(where)
    try:
        config = yaml.safe_load(path.read_text())
        if not isinstance(config, dict):
            raise TypeError("it is not a kubeconfig")
        name = where.context or config.get("current-context") or ""
        contexts = {entry["name"]: entry.get("context") or {} for entry in config.get("contexts") or []}
    except (OSError, AttributeError, LookupError, TypeError, yaml.YAMLError) as error:
        raise BadInput(f"the kubeconfig {path} cannot be read: {error}") from None
    if name not in contexts:
        valid = ", ".join(sorted(contexts)) or "none"
        raise BadInput(f"the kubeconfig {path} has no context {name!r}: it has {valid}")
    namespace = where.namespace or contexts[name].get("namespace") or "default"
    is_embedded = path.name == "backstay.kubeconfig"
    shown = f"the embedded cluster in {shortened(str(path.parent))}" if is_embedded else f"{name} ({path})"
    async with await _connect(path, where.context, is_embedded=is_embedded) as api:
        yield Cluster(api, namespace, shown, path.parent if is_embedded else None)


async def _connect(path: Path, context: str | None, *, is_embedded: bool) -> Api:
    if is_embedded and context is None:
        return Api.of_kubeconfig(path)
    # Imported here, because it takes half a second of a processor.
    from kubernetes.aio import config as kubeconfig
    from kubernetes.aio.client import Configuration

    loaded = Configuration()
    try:
        await kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(path), context=context, client_configuration=loaded, persist_config=False
        )
        header = await loaded.get_api_key_with_prefix("BearerToken", alias="authorization")
        tls = None
        if loaded.host.startswith("https"):
            authority = loaded.ssl_ca_cert or None
            tls = ssl.create_default_context(cafile=authority)
            if getattr(loaded, "ca_cert_data", None) and not authority:
                tls.load_verify_locations(cadata=loaded.ca_cert_data)
            if not loaded.verify_ssl:
                tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
            if loaded.cert_file:
                tls.load_cert_chain(loaded.cert_file, loaded.key_file)
    except (kubeconfig.ConfigException, OSError, ssl.SSLError) as error:
        raise BadInput(f"the kubeconfig {path} cannot be used: {error}") from None
    return Api(loaded.host, tls=tls, header=header or "", proxy=loaded.proxy or "")
