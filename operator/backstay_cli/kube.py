"""The few calls of the Kubernetes API that following a job takes, on any cluster that a kubeconfig names by token."""

from __future__ import annotations

import base64
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiohttp
import yaml

from backstay_spec import contract

JOBS = f"/apis/{contract.API_VERSION}"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class ApiError(Exception):
    """The API server refused; `status` is the HTTP status, `reason` and the message are its own."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason


class Api:
    """An open connection; use as an async context manager."""

    def __init__(self, server: str, token: str, tls: ssl.SSLContext | None = None) -> None:
        self.server = server
        self._tls = tls if tls is not None else True
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(total=30)
        )

    @classmethod
    def of_kubeconfig(cls, path: Path) -> Api:
        """Connect as the current context of a kubeconfig says."""
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
            aiohttp.ClientError: there is none.
        """
        headers = {} if body is None else {"Content-Type": content_type}
        async with self._session.request(
            method, self.server + path, json=body, params=parameters, headers=headers, ssl=self._tls
        ) as response:
            answer = await response.json(content_type=None)
            if response.status >= 300:
                raise ApiError(response.status, answer.get("reason", ""), answer.get("message", str(answer)))
            return answer

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        """The TrainingJob."""
        job: dict[str, Any] = await self.request("GET", f"{JOBS}/namespaces/{namespace}/{contract.PLURAL}/{name}")
        return job

    async def suspend(self, namespace: str, name: str) -> None:
        """Suspend a TrainingJob: the operator deletes its workers, then its servers, which store a checkpoint."""
        await self.request(
            "PATCH",
            f"{JOBS}/namespaces/{namespace}/{contract.PLURAL}/{name}",
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

    async def text(self, url: str, timeout: float) -> str:
        """A page of another server, such as a pod's metrics, without our token."""
        limit = aiohttp.ClientTimeout(total=timeout)
        async with self._session.get(url, timeout=limit, headers={"Authorization": ""}) as response:
            return await response.text()
