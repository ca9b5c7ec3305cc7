"""Selects the cluster for a command from a kubeconfig, or from a run on this machine, which may have ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import yaml

from backstay_client.errors import BadInput
from backstay_client.finding.known_runs import KnownRun, known_runs
from backstay_client.finding.selection import is_path, select
from backstay_client.finding.stored_run import StoredApi, jobs_in
from backstay_client.kube import ApiCalls, ApiRequestError, JobApi
from backstay_client.words import count, current_folder, shortened

__all__ = [
    "ANSWER_SECONDS",
    "CHANGES_SECONDS",
    "FoundCluster",
    "NoSuchJob",
    "PodAccount",
    "Where",
    "account_of_pod",
    "default_kubeconfig",
    "named_kubeconfig",
    "open_cluster",
    "open_run",
    "runs_of",
]

_LOG = logging.getLogger(__name__)
_RENEW_SECONDS = 30.0  # for a plug-in that gives a token; without a person it does not wait for a login
_DEFAULT = Path("~/.kube/config")
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ANSWER_SECONDS = 5.0
"""How long a command waits for the cluster of one of several runs."""
CHANGES_SECONDS = 20.0
"""How long a command waits for the cluster of its run while that starts or stops."""


@dataclass(frozen=True)
class Where:
    """The user's options about the cluster. An option is None if it is not given."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    embedded: bool = True  # search for runs on this machine; a kubectl plugin does not
    local: bool = False  # only runs on this machine


@dataclass(frozen=True)
class FoundCluster:
    """An open connection, or a run that has ended.

    Attributes:
        api: the connection to the API server, or the stored jobs.
        namespace: the namespace for the command.
        name: the name of the cluster, to print.
        folder: the folder of an embedded cluster, with the logs of all pods; None: it is another cluster.
        note: a line to print on stderr, such as that several runs have the job; empty: none.
        job: the name of the job that is meant; None: not given.
        is_default: whether only the user's kubeconfig names the cluster, so that a run may be meant as well.
    """

    api: JobApi
    namespace: str
    name: str
    folder: Path | None = None
    note: str = ""
    job: str | None = None
    is_default: bool = False


class NoSuchJob(BadInput):
    """The cluster has no job of this name."""


def named_kubeconfig(where: Where, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the kubeconfig that the options or KUBECONFIG name, or None if they name none, or only runs on this
    machine.

    Raises:
        BadInput: the file does not exist.
    """
    if where.kubeconfig is not None:
        if not where.kubeconfig.is_file():
            raise BadInput(f"--kubeconfig: there is no file {where.kubeconfig}")
        return where.kubeconfig
    named = [Path(name).expanduser() for name in environ.get("KUBECONFIG", "").split(os.pathsep) if name]
    if not named or where.local:
        return None
    found = next((path for path in named if path.is_file()), None)
    if found is None:
        raise BadInput(f"KUBECONFIG names {named[0]}, which does not exist")
    return found


def default_kubeconfig(where: Where) -> Path | None:
    """Returns the user's kubeconfig, or None if there is none, or only runs on this machine count."""
    try:
        path = _DEFAULT.expanduser()
    except RuntimeError:  # no HOME, and no entry of this user in the system's list
        return None
    return path if path.is_file() and not where.local else None


@dataclass(frozen=True)
class PodAccount:
    """The account of a pod that may use the API server of its cluster.

    Attributes:
        url: the URL of the API server.
        folder: the folder with the token, the certificate and the namespace.
    """

    url: str
    folder: Path

    @property
    def namespace(self) -> str:
        """The namespace of the pod."""
        return (self.folder / "namespace").read_text().strip() or "default"

    def connect(self) -> ApiCalls:
        """Returns a connection. The kubelet replaces the token in the file before it expires.

        Raises:
            BadInput: the account cannot be used.
        """
        try:
            tls = ssl.create_default_context(cafile=self.folder / "ca.crt") if self.url.startswith("https") else None
            return ApiCalls(self.url, ssl=tls, authorization=self._authorization(), renew=self._renewed)
        except (OSError, ssl.SSLError) as error:
            raise BadInput(f"the account of this pod in {self.folder} cannot be used: {error}") from None

    def _authorization(self) -> str:
        return f"Bearer {(self.folder / 'token').read_text().strip()}"

    async def _renewed(self) -> str:
        try:
            return self._authorization()
        except OSError:
            return ""


def account_of_pod(environ: Mapping[str, str] = os.environ, folder: Path = _ACCOUNT) -> PodAccount | None:
    """Returns the account of the pod that this process runs in, or None if it runs in none, or the pod has none.

    https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
    """
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT")
    if not host or not port or not (folder / "token").is_file():
        return None
    return PodAccount(f"https://{f'[{host}]' if ':' in host else host}:{port}", folder)


def runs_of(where: Where) -> list[KnownRun]:
    """Returns the runs on this machine that a command may use, the newest first."""
    return known_runs(current_folder()) if where.embedded else []


async def _jobs_of(run: KnownRun, namespace: str | None = None) -> list[str]:
    """Returns the names of a run's jobs. The cluster of `backstay up` gets new ones at any time."""
    if run.job or not run.lives:
        return jobs_in(run)
    # A cluster that is being started must not fail a command about another run. A TimeoutError is an OSError.
    with contextlib.suppress(BadInput, ApiRequestError, aiohttp.ClientError, OSError):
        async with asyncio.timeout(ANSWER_SECONDS), open_run(run, namespace, wait=False) as cluster:
            return [job["metadata"]["name"] for job in await cluster.api.list_jobs(None)]
    return jobs_in(run)


@contextlib.asynccontextmanager
async def open_cluster(where: Where, job: str | None = None) -> AsyncIterator[FoundCluster]:
    """Connect to the cluster that `where` selects, or read the run that has ended.

    Args:
        job: the job's name, or the folder of its run; None: not given.

    Raises:
        BadInput: there is no kubeconfig, or it cannot be used; or several runs are meant.
    """
    if job is not None and is_path(job) and where.embedded and where.kubeconfig is None and where.context is None:
        where = replace(where, local=True)
    path = named_kubeconfig(where)
    # The user's choice first; without one, a run on this machine, then the kubeconfig, then the account of this pod.
    is_default = False
    if path is None:
        runs, default = runs_of(where), default_kubeconfig(where)
        in_pod = default is None and not where.local and account_of_pod() is not None
        names = {run.folder: await _jobs_of(run) for run in runs} if job is not None else {}
        selection = select(runs, names, job, current_folder() or Path(), has_default=default is not None or in_pod)
        if selection is not None:
            run = selection.run
            async with open_run(run, where.namespace, selection.others) as cluster:
                yield replace(cluster, job=(run.job or None) if selection.by_folder else job)
            return
        if default is None and (account := account_of_pod()) is not None:
            async with account.connect() as api:
                yield FoundCluster(api, where.namespace or account.namespace, "the cluster of this pod", job=job)
            return
        assert default is not None
        path = default
        is_default = True
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
    plain = is_embedded and where.context is None
    async with ApiCalls.of_kubeconfig(path) if plain else await _connect(path, name) as api:
        folder = path.parent if is_embedded else None
        yield FoundCluster(api, namespace, shown, folder, job=job, is_default=is_default)


@contextlib.asynccontextmanager
async def open_run(
    run: KnownRun, namespace: str | None = None, others: int = 0, *, wait: bool = True
) -> AsyncIterator[FoundCluster]:
    """Connect to the cluster of a run, or read what it stored.

    Args:
        namespace: the namespace for the command; None: that of the run's job.
        others: the number of other runs with a job of the same name.
        wait: whether to wait `CHANGES_SECONDS` for a cluster that starts or stops.

    Raises:
        BadInput: the cluster of the run is still being started or stopped.
    """
    place, namespace = shortened(str(run.folder)), namespace or run.namespace
    note = f"{count(others + 1, 'run')} on this machine have this job; this one is in {place}" if others else ""
    api = await _connection(run, CHANGES_SECONDS if wait else 0.0)
    if api is None:
        yield FoundCluster(StoredApi(run), namespace, f"the ended run in {place}", run.folder, note)
        return
    async with api:
        yield FoundCluster(api, namespace, f"the embedded cluster in {place}", run.folder, note)


async def _connection(run: KnownRun, seconds: float) -> ApiCalls | None:
    """Returns the connection to the cluster of a run, when it listens, or None if the run has ended.

    Raises:
        BadInput: neither within this time.
    """
    deadline = time.monotonic() + seconds
    while run.lives:
        with contextlib.suppress(OSError, LookupError, TypeError, yaml.YAMLError):
            api = ApiCalls.of_kubeconfig(run.kubeconfig)
            await _check_listens(api.url)
            return api
        if time.monotonic() >= deadline:
            place = shortened(str(run.folder))
            raise BadInput(f"the cluster of the run in {place} is being started or stopped: try again")
        await asyncio.sleep(0.1)
    return None


async def _check_listens(url: str) -> None:
    """Raises `OSError` if no process listens there."""
    parts = urlsplit(url)
    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def _connect(path: Path, context: str) -> ApiCalls:
    """
    Args:
        context: the name of a context. The current one may be another when the credentials are read again.
    """
    # Imported here, because it takes half a second of a processor.
    from kubernetes.aio import config as kubeconfig
    from kubernetes.aio.client import Configuration

    async def load() -> tuple[Configuration, str]:
        """Returns what the file has now, and the value of the header `Authorization`. A plug-in runs again."""
        found = Configuration()
        await kubeconfig.load_kube_config(  # type: ignore[no-untyped-call]
            config_file=str(path), context=context, client_configuration=found, persist_config=False
        )
        return found, await found.get_api_key_with_prefix("BearerToken", alias="authorization") or ""

    async def renew() -> str:
        try:
            async with asyncio.timeout(_RENEW_SECONDS):
                found, authorization = await load()
        except Exception as error:  # noqa: BLE001  # the call fails with the answer 401, which is the cause
            _LOG.warning("the credentials in %s could not be read again: %s", path, error or type(error).__name__)
            return ""
        return authorization if found.host == loaded.host else ""

    try:
        loaded, header = await load()
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
    return ApiCalls(loaded.host, ssl=tls, authorization=header, proxy=loaded.proxy or "", renew=renew)
