"""The few calls of the Kubernetes API that the commands make, on any cluster that a kubeconfig names."""

from __future__ import annotations

import base64
import contextlib
import re
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final, Protocol

import aiohttp
import yaml

from backstay_client.errors import BadInput
from backstay_cluster.client import MERGE_PATCH, ApiRequestError, Connection
from backstay_spec import contract
from backstay_spec.names import LABEL_JOB_UID

__all__ = ["CRDS", "JOBS", "ApiCalls", "ApiRequestError", "JobApi", "is_transient"]

JOBS = f"/apis/{contract.API_VERSION}"
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


_LATER: Final = frozenset({0, 429, 500, 502, 503, 504})
"""Codes of answers of an API server that is overloaded or restarts, and 0 if it did not answer."""


def is_transient(error: ApiRequestError | aiohttp.ClientError | OSError) -> bool:
    """Returns whether the same call may succeed later."""
    return not isinstance(error, ApiRequestError) or error.code in _LATER


class JobApi(Protocol):
    """The calls that the commands about jobs make."""

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Returns the TrainingJob."""

    async def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """Returns the TrainingJobs of a namespace, or of all if it is None."""

    async def delete_job(self, namespace: str, name: str, uid: str = "") -> dict[str, Any]:
        """Delete a TrainingJob; the API server refuses one with another `uid` than this, with 409."""

    def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        """Returns the log of a pod, as chunks of bytes."""

    async def pod_page(self, pod: dict[str, Any], path: str, timeout: float = 2.0, **headers: str) -> bytes | None:
        """Returns a page of a pod's health port."""

    async def pods_of(self, namespace: str, name: str, uid: str = "") -> list[dict[str, Any]]:
        """Returns the job's pods.

        Args:
            uid: the job's uid; empty: also the pods of earlier jobs with this name.
        """

    async def events_of(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Returns the events about an object, oldest first."""


class ApiCalls(Connection):
    """The calls on an open connection."""

    @classmethod
    def of_kubeconfig(cls, path: Path) -> ApiCalls:
        """Connect with the current context of a kubeconfig."""
        config = yaml.safe_load(path.read_text())
        by_name = {kind: {entry["name"]: entry for entry in config[kind]} for kind in ("contexts", "clusters", "users")}
        context = by_name["contexts"][config["current-context"]]["context"]
        cluster = by_name["clusters"][context["cluster"]]["cluster"]
        tls = None
        if authority := cluster.get("certificate-authority-data"):
            tls = ssl.create_default_context(cadata=base64.b64decode(authority).decode())
        return cls(cluster["server"], by_name["users"][context["user"]]["user"]["token"], ssl=tls)

    async def request(
        self, method: str, path: str, body: Any = None, *, content_type: str = "application/json", **parameters: str
    ) -> Any:
        """Make one call. `body` is sent as JSON.

        Raises:
            ApiRequestError: the answer is not 2xx.
            aiohttp.ClientError: no answer.
        """
        return await self.exchange(method, path, body=body, params=parameters, content_type=content_type)

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """Returns the TrainingJob."""
        job: dict[str, Any] = await self.request("GET", _path_of(namespace, name))
        return job

    async def list_jobs(self, namespace: str | None) -> list[dict[str, Any]]:
        """Returns the TrainingJobs of a namespace, or of all if it is None."""
        where = "" if namespace is None else f"/namespaces/{_named('namespace', namespace)}"
        answer = await self.request("GET", f"{JOBS}{where}/{contract.PLURAL}")
        jobs: list[dict[str, Any]] = answer["items"]
        return jobs

    async def delete_job(self, namespace: str, name: str, uid: str = "") -> dict[str, Any]:
        """Delete a TrainingJob; the garbage collector deletes what it owns.

        Args:
            uid: the uid that the job must have; empty: any.

        Raises:
            ApiRequestError: 409, another job has the name now.
        """
        options: dict[str, Any] = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        job: dict[str, Any] = await self.request("DELETE", _path_of(namespace, name), options)
        return job

    async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        """Yields the log of a pod, as chunks of bytes.

        Args:
            options: parameters of the API's request, such as ``follow="true"`` or ``tailLines="10"``.

        Raises:
            ApiRequestError: there is no such pod, or it has no log yet.
        """
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}/log"
        limit = aiohttp.ClientTimeout(total=None, sock_connect=30)
        parameters = {"container": contract.CONTAINER, **options}
        async with self.open("GET", path, timeout=limit, params=parameters) as response:
            if response.status >= 300:
                await self.checked(response, f"GET {path}")
            async for chunk in response.content.iter_any():
                yield chunk

    async def pod_page(self, pod: dict[str, Any], path: str, timeout: float = 2.0, **headers: str) -> bytes | None:
        """Returns a page of a pod's health port, from the pod itself on this machine, else through the API server.

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
            url = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:{port}/proxy{path}"
        limit = aiohttp.ClientTimeout(total=timeout)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError):
            async with self.open("GET", url, timeout=limit, headers=sent) as response:
                return await response.read() if response.status == 200 else None
        return None

    async def create_job(self, job: dict[str, Any]) -> dict[str, Any]:
        """Create a TrainingJob in the namespace of its metadata. Unknown fields are errors."""
        namespace = _named("namespace", job["metadata"]["namespace"])
        path = f"{JOBS}/namespaces/{namespace}/{contract.PLURAL}"
        created: dict[str, Any] = await self.request("POST", path, job, fieldValidation="Strict")
        return created

    async def patch_job(self, namespace: str, name: str, patch: dict[str, Any]) -> dict[str, Any]:
        """Change the fields of a TrainingJob that a merge patch names."""
        path = _path_of(namespace, name)
        job: dict[str, Any] = await self.request("PATCH", path, patch, content_type=MERGE_PATCH)
        return job

    async def suspend(self, namespace: str, name: str) -> None:
        """Suspend a TrainingJob, so that the operator deletes its workers, then its servers, which store a
        checkpoint."""
        await self.patch_job(namespace, name, {"spec": {"runPolicy": {"suspend": True}}})

    async def pods_of(self, namespace: str, name: str, uid: str = "") -> list[dict[str, Any]]:
        """See `JobApi`."""
        selector = f"{contract.LABEL_JOB}={name}" + (f",{LABEL_JOB_UID}={uid}" if uid else "")
        answer = await self.request("GET", f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector)
        pods: list[dict[str, Any]] = answer["items"]
        return pods

    async def events_of(self, namespace: str, uid: str) -> list[dict[str, Any]]:
        """Returns the events about the object with that uid, oldest first."""
        answer = await self.request(
            "GET", f"/api/v1/namespaces/{namespace}/events", fieldSelector=f"involvedObject.uid={uid}"
        )
        events: list[dict[str, Any]] = answer["items"]
        return sorted(events, key=lambda event: int(event["metadata"]["resourceVersion"]))


def _path_of(namespace: str, name: str) -> str:
    """Returns the path of a TrainingJob.

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
