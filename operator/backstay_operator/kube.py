"""The operator's writes, and the few reads that no watch provides: JSON over HTTP. Kopf watches.

The generated models of the `kubernetes` package are not used. They would triple the memory of a pod, and drop unknown
fields.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode
from urllib.request import getproxies

import aiohttp

from backstay_operator import access, errors
from backstay_operator.rights import PODS, ResourceKind

Json = dict[str, Any]

MERGE_PATCH: Final = "application/merge-patch+json"
JSON_PATCH: Final = "application/json-patch+json"
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"

CONNECTIONS: Final = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _KubeClient:
    """Credentials and the connections that were opened with them."""

    credentials: access.ApiCredentials
    session: aiohttp.ClientSession


class Kube:
    """One connection pool to one API server.

    Args:
        kubeconfig: the path of a kubeconfig, or None inside a cluster.
        timeout: seconds that one request may take.
        observe: called after each request: verb as in RBAC, resource (with /subresource), status code (0: no answer),
            seconds.
        headers: sent with each request.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        *,
        timeout: float = 10.0,
        observe: Callable[[str, str, int, float], None] = lambda *_: None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._headers = dict(headers or {})
        self._kubeconfig = kubeconfig
        self._timeout = timeout
        self._observe = observe
        self._client: _KubeClient | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Kube:
        await self._open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; a later request opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await client.session.close()

    async def _open(self) -> _KubeClient:
        async with self._opening:
            if self._client is None:
                credentials = await access.load(self._kubeconfig)
                connector = aiohttp.TCPConnector(limit=CONNECTIONS, ssl=credentials.tls())
                # With `trust_env` aiohttp searches for proxies and a netrc file in a thread, twice for each request.
                proxies = bool(getproxies())
                session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=proxies)
                self._client = _KubeClient(credentials, session)
            return self._client

    async def get(self, resource: ResourceKind, namespace: str, name: str) -> Json:
        """Read one object."""
        return await self._request("get", resource, namespace, name)

    async def create(self, resource: ResourceKind, namespace: str, body: Mapping[str, Any]) -> Json:
        """Create an object. Returns the object as stored.

        Part of a pod is a user's template, so a field that is unknown to the API server is an error. Otherwise a
        misspelt `nodeSelector` would be dropped with a warning in an answer, and would select any node.
        """
        query = {"fieldValidation": "Strict"} if resource == PODS else None
        return await self._request("create", resource, namespace, body=body, query=query)

    async def replace(self, resource: ResourceKind, namespace: str, name: str, body: Mapping[str, Any]) -> Json:
        """Replace an object; a stale `resourceVersion` in it is a Conflict."""
        return await self._request("update", resource, namespace, name, body=body)

    async def merge_patch(
        self,
        resource: ResourceKind,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        subresource: str | None = None,
    ) -> Json:
        """Applies a JSON merge patch (RFC 7386), where null removes, and lists are replaced whole."""
        return await self._request(
            "patch", resource, namespace, name, body=patch, subresource=subresource, content=MERGE_PATCH
        )

    async def json_patch(self, resource: ResourceKind, namespace: str, name: str, patch: list[Json]) -> Json:
        """Returns JSON patch (RFC 6902); a failing `test` is Invalid."""
        return await self._request("patch", resource, namespace, name, body=patch, content=JSON_PATCH)

    async def delete(
        self, resource: ResourceKind, namespace: str, name: str, *, uid: str | None = None, grace: int | None = None
    ) -> Json:
        """Delete an object.

        Args:
            resource: the kind.
            namespace: the object's namespace.
            name: the object's name.
            uid: delete only the object with this uid; another object of that name is a Conflict.
            grace: seconds; replaces the object's own grace period.

        Returns:
            The object (if it terminates gracefully) or a Status.
        """
        body: Json = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        if uid is not None:
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return await self._request("delete", resource, namespace, name, body=body)

    async def metadata(
        self, resource: ResourceKind, namespace: str | None, selector: str
    ) -> AsyncIterator[tuple[list[Json], str]]:
        """List objects without their specs, 500 at a time.

        Args:
            resource: the kind.
            namespace: the namespace to list; None: all.
            selector: a label selector; "" for all.

        Yields:
            The objects of each page (their `metadata` at least), and the list's resourceVersion; one page at least.
        """
        token = ""
        while True:
            query = {"limit": "500"} | ({"labelSelector": selector} if selector else {})
            query |= {"continue": token} if token else {}
            page = await self._request("list", resource, namespace, query=query, accept=METADATA_ONLY)
            yield page.get("items") or [], str(page.get("metadata", {}).get("resourceVersion", ""))
            token = page.get("metadata", {}).get("continue") or ""
            if not token:
                return

    async def discover(self, path: str) -> Json:
        """Read a discovery document, such as ``/apis/backstay.dev/v1alpha1``."""
        return await self._send("get", "discovery", "GET", path, path)

    async def _request(
        self,
        verb: str,
        resource: ResourceKind,
        namespace: str | None,
        name: str | None = None,
        *,
        body: Any = None,
        subresource: str | None = None,
        content: str = "application/json",
        query: Mapping[str, str] | None = None,
        accept: str = "application/json",
    ) -> Json:
        method = {"create": "POST", "update": "PUT", "patch": "PATCH", "delete": "DELETE"}.get(verb, "GET")
        path = quote(resource.path(namespace, name, subresource))
        kind = resource.plural if subresource is None else f"{resource.plural}/{subresource}"
        what = f"{verb} {kind} {'/'.join(part for part in (namespace, name) if part)}"
        if query:
            path += "?" + urlencode(query)
        return await self._send(verb, kind, method, path, what, body=body, content=content, accept=accept)

    async def _send(
        self,
        verb: str,
        kind: str,
        method: str,
        path: str,
        what: str,
        *,
        body: Any = None,
        content: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        try:
            client = await self._open()
        except access.AccessError as error:
            raise errors.Unreachable(f"{what}: {error}") from error
        headers = {"Accept": accept, "User-Agent": access.USER_AGENT, "Content-Type": content}
        started = time.monotonic()
        code = 0
        try:
            token = await client.credentials.token()
            if token is not None:
                headers["Authorization"] = f"Bearer {token}"
            async with client.session.request(
                method,
                client.credentials.host + path,
                headers=headers,
                data=None if body is None else json.dumps(body).encode(),
                timeout=aiohttp.ClientTimeout(total=self._timeout),
                proxy=client.credentials.proxy,
                allow_redirects=False,
            ) as answer:
                raw = await answer.read()
                code = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError, access.AccessError) as error:
            raise errors.Unreachable(f"{what}: no answer: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            # Another request got 401 and closed the session while this one waited for a connection.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise errors.Unreachable(f"{what}: its connection was closed") from None
        finally:
            self._observe(verb, kind, code, time.monotonic() - started)
        document = _parse(raw)
        if code >= 400:
            if code == 401 and self._client is client:
                # A token may have been rotated: the next request reads the credentials again.
                await self.close()
            raise errors.answered(what, code, document, answer.headers.get("Retry-After"))
        return document


def _parse(raw: bytes) -> Json:
    try:
        document = json.loads(raw)
    except ValueError:
        return {"message": raw[:200].decode("utf-8", "replace")}
    return document if isinstance(document, dict) else {}
