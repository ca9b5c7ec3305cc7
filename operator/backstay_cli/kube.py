"""The few calls of the Kubernetes API that the commands make, on any cluster that a kubeconfig names."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self

import aiohttp
import yaml

from backstay_cli.jobfile import BadInput
from backstay_spec import contract

JOBS = f"/apis/{contract.API_VERSION}"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status, `reason` and the message are its own."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class JobApi(Protocol):
    """The calls that the commands about jobs make."""

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """The TrainingJob."""

    async def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """The TrainingJobs of a namespace; None: of all."""

    async def delete_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Delete a TrainingJob."""

    def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        """The log of a pod, as chunks of bytes."""

    async def pod_page(self, pod: dict[str, Any], path: str, timeout: float = 2.0, **headers: str) -> bytes | None:
        """A page of a pod's health port."""

    async def pods_of(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The job's pods."""

    async def events_of(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """The events about an object, oldest first."""


class Api:
    """An open connection; use as an async context manager."""

    def __init__(
        self, server: str, token: str = "", tls: ssl.SSLContext | None = None, *, header: str = "", proxy: str = ""
    ) -> None:
        """
        Args:
            server: the URL of the API server.
            token: a bearer token; empty: none.
            tls: trusts the server's certificate, and has the client's; None: the system's certificates.
            header: the Authorization header in place of a token.
            proxy: the URL of an HTTP proxy; empty: none.
        """
        self.server = server.rstrip("/")
        self._tls = tls if tls is not None else True
        self._proxy = proxy or None
        authorization = header or (f"Bearer {token}" if token else "")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": authorization} if authorization else {},
            timeout=aiohttp.ClientTimeout(total=30),
        )

    @classmethod
    def of_kubeconfig(cls, path: Path) -> Api:
        """Connect with the current context of a kubeconfig."""
        config = yaml.safe_load(path.read_text())
        by_name = {kind: {entry["name"]: entry for entry in config[kind]} for kind in ("contexts", "clusters", "users")}
        context = by_name["contexts"][config["current-context"]]["context"]
        cluster = by_name["clusters"][context["cluster"]]["cluster"]
        tls = None
        if authority := cluster.get("certificate-authority-data"):
            tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode())
        return cls(cluster["server"], by_name["users"][context["user"]]["user"]["token"], tls)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json", **parameters: str
    ) -> Any:
        """One call; `body` is sent as JSON.

        Raises:
            ApiError: the answer is not 2xx.
            aiohttp.ClientError: no answer.
        """
        headers = {} if body is None else {"Content-Type": content_type}
        async with self._session.request(
            method, self.server + path, json=body, params=parameters, headers=headers, ssl=self._tls, proxy=self._proxy
        ) as response:
            answer = _parsed(await response.read())
            if response.status >= 300:
                raise _refusal(response.status, answer)
            return answer

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """The TrainingJob."""
        job: dict[str, Any] = await self.request("GET", _path_of(namespace, name))
        return job

    async def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """The TrainingJobs of a namespace; None: of all."""
        where = "" if namespace is None else f"/namespaces/{_named('namespace', namespace)}"
        answer = await self.request("GET", f"{JOBS}{where}/{contract.PLURAL}")
        jobs: list[dict[str, Any]] = answer["items"]
        return jobs

    async def delete_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Delete a TrainingJob; the garbage collector deletes what it owns."""
        job: dict[str, Any] = await self.request(
            "DELETE", _path_of(namespace, name), {"propagationPolicy": "Background"}
        )
        return job

    async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        """The log of a pod, as chunks of bytes.

        Args:
            options: parameters of the API's request, such as ``follow="true"`` or ``tailLines="10"``.

        Raises:
            ApiError: there is no such pod, or it has no log yet.
        """
        url = f"{self.server}/api/v1/namespaces/{namespace}/pods/{pod}/log"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        parameters = {"container": contract.CONTAINER, **options}
        async with self._session.get(
            url, params=parameters, ssl=self._tls, proxy=self._proxy, timeout=limit
        ) as response:
            if response.status >= 300:
                raise _refusal(response.status, _parsed(await response.read()))
            async for chunk in response.content.iter_any():
                yield chunk

    async def pod_page(self, pod: dict[str, Any], path: str, timeout: float = 2.0, **headers: str) -> bytes | None:
        """A page of a pod's health port: from the pod itself on this machine, else through the API server.

        Args:
            pod: the pod.
            path: the path of the page, such as ``/status``.
            timeout: the timeout in seconds.
            headers: headers of the request; `_` stands for ``-`` in their names.

        Returns:
            The page; None if the pod does not serve it, cannot be reached, or may not be reached.
        """
        address, meta = pod.get("status", {}).get("podIP") or "", pod["metadata"]
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if address.startswith("127."):
            url = f"http://{address}:{contract.PORT_METRICS}{path}"
            sent["Authorization"] = ""  # the token is for the API server alone
        else:
            port = contract.PORT_METRICS
            url = f"{self.server}/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:{port}/proxy{path}"
        limit = aiohttp.ClientTimeout(total=timeout)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self._session.get(
                url, headers=sent, timeout=limit, ssl=self._tls, proxy=self._proxy
            ) as response:
                return await response.read() if response.status == 200 else None
        return None

    async def suspend(self, namespace: str, name: str) -> None:
        """Suspend a TrainingJob: the operator deletes its workers, then its servers, which store a checkpoint."""
        await self.request(
            "PATCH",
            _path_of(namespace, name),
            {"spec": {"runPolicy": {"suspend": True}}},
            content_type="application/merge-patch+json",
        )

    async def pods_of(self, namespace: str, name: str) -> list[dict[str, Any]]:
        """The job's pods."""
        answer = await self.request(
            "GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=f"{contract.LABEL_JOB}={name}"
        )
        pods: list[dict[str, Any]] = answer["items"]
        return pods

    async def events_of(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """The events about the object with that uid, oldest first."""
        answer = await self.request(
            "GET", f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.uid={uid}"
        )
        events: list[dict[str, Any]] = answer["items"]
        return sorted(events, key=lambda event: int(event["metadata"]["resourceVersion"]))


def _path_of(namespace: str, name: str) -> str:
    """The path of a TrainingJob.

    Raises:
        BadInput: one of the two cannot be a name. With an empty one, the path would mean all jobs of the namespace.
    """
    return f"{JOBS}/namespaces/{_named('namespace', namespace)}/{contract.PLURAL}/{_named('job', name)}"


def _named(kind: str, name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise BadInput(
            f"the {kind} {name!r} cannot exist: must be lowercase letters, digits, '-' and '.', and begin and end with "
            "a letter or digit"
        )
    return name


def _parsed(data: bytes) -> Any:
    """The JSON of an answer; a proxy in between may answer with something else."""
    try:
        return json.loads(data)
    except ValueError:
        return {"message": data[:200].decode(errors="replace")}


def _refusal(status: int, answer: Any) -> ApiError:
    if not isinstance(answer, dict):
        return ApiError(status, "", str(answer)[:200])
    return ApiError(status, answer.get("reason") or "", answer.get("message") or f"HTTP status {status}")
