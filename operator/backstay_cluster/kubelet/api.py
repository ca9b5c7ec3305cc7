"""A small asynchronous Kubernetes client. The parts of the node use any API server, over HTTP only."""

from __future__ import annotations

import asyncio
import json
import ssl as ssl_module
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from backstay_cluster.kubelet.objects import Object

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
REQUEST_SECONDS = 30.0
SILENT_WATCH_SECONDS = 90.0  # a server sends bookmarks about once a minute; a watch without data for longer is dead


class ApiError(Exception):
    """The API server answered with an error, or did not answer.

    Attributes:
        code: the HTTP status, 0 when there was no answer.
        reason: the reason in the Status, such as `NotFound`.
        named: whether the answer is about a named object, and not about a resource that is not served at all.
    """

    def __init__(self, code: int, reason: str, message: str, *, named: bool = False) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.named = named

    @classmethod
    def of(cls, code: int, body: Any, what: str) -> ApiError:
        """The error for an answer's code and body, a `Status` or anything else."""
        if isinstance(body, dict) and body.get("kind") == "Status":
            details = body.get("details") or {}
            code = int(body.get("code") or code)
            message = str(body.get("message") or what)
            return cls(code, str(body.get("reason") or ""), message, named=bool(details.get("name")))
        return cls(code, "", f"{what}: HTTP {code}: {str(body)[:200]}")


class ApiClient:
    """Requests to one API server with a bearer token.

    Args:
        url: the URL of the API server, such as `http://127.0.0.1:8001`.
        token: the bearer token.
        ssl: a context that trusts an https server; None for the usual verification.
    """

    def __init__(self, url: str, token: str, *, ssl: ssl_module.SSLContext | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}", "Accept": "application/json"}
        self._ssl: ssl_module.SSLContext | bool = True if ssl is None else ssl
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=aiohttp.TCPConnector(limit=64, ssl=self._ssl)
            )
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Object:
        """One request; `path` starts with `/api`.

        Raises:
            ApiError: the server answered with an error, or did not answer (code 0).
        """
        data = None if body is None else json.dumps(body).encode()
        what = f"{method} {path}"
        try:
            async with self._open().request(
                method,
                self.url + path,
                params=params,
                data=data,
                headers={"Content-Type": content_type} if data is not None else None,
                timeout=aiohttp.ClientTimeout(total=seconds),
            ) as answer:
                text = await answer.read()
                code = answer.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "NoAnswer", f"{what}: {error or type(error).__name__}") from error
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = text.decode(errors="replace")
        if code >= 400:
            raise ApiError.of(code, parsed, what)
        if not isinstance(parsed, dict):
            raise ApiError(0, "BadAnswer", f"{what}: the answer is not a JSON object")
        return parsed

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> Object:
        """GET an object or a list."""
        return await self.request("GET", path, params=params)

    async def create(self, path: str, body: Object) -> Object:
        """POST an object to its collection."""
        return await self.request("POST", path, body=body)

    async def patch(self, path: str, body: Any, content_type: str = MERGE_PATCH) -> Object:
        """PATCH; a JSON merge patch by default."""
        return await self.request("PATCH", path, body=body, content_type=content_type)

    async def delete(self, path: str, body: Object | None = None) -> Object:
        """DELETE, with DeleteOptions."""
        return await self.request("DELETE", path, body=body)

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[Object]:
        """The events of one watch until the server ends it.

        Raises:
            ApiError: the watch was refused, broke, sent nothing for too long, or sent an ERROR event (410: too old).
        """
        what = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENT_WATCH_SECONDS)
        try:
            async with self._open().get(self.url + path, params={**params, "watch": "true"}, timeout=timeout) as answer:
                if answer.status >= 400:
                    text = await answer.text()
                    try:
                        raise ApiError.of(answer.status, json.loads(text), what)
                    except ValueError:
                        raise ApiError.of(answer.status, text, what) from None
                try:
                    rest = b""
                    async for data in answer.content.iter_any():
                        # Lines are split here: the reader's own are limited in length, objects are not.
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            if line.strip():
                                event = json.loads(line)
                                if event["type"] == "ERROR":
                                    raise ApiError.of(int(event["object"].get("code") or 500), event["object"], what)
                                yield event
                finally:
                    # The end of a watch that its reader leaves early does not matter: do not wait for the end of TLS.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiError(0, "NoAnswer", f"{what}: {error or type(error).__name__}") from error


async def until_answered(client: ApiClient, path: str = "/readyz", *, seconds: float = 60.0) -> None:
    """Wait until the API server answers a request for `path` with success.

    Raises:
        TimeoutError: no success within `seconds`.
    """
    error: ApiError | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await client.request("GET", path, seconds=5.0)
                except ApiError as caught:
                    error = caught
                    if caught.reason == "BadAnswer":  # answered `ok`, which is not JSON
                        return
                    await asyncio.sleep(0.05)
                else:
                    return
    except TimeoutError:
        raise TimeoutError(f"the API server at {client.url} was not ready within {seconds:.0f} s: {error}") from error
