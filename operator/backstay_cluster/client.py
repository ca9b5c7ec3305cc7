"""A small asynchronous client of any Kubernetes API server, over HTTP only. The node and the command use it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl as ssl_module
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Self

import aiohttp

MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
REQUEST_SECONDS = 30.0
SILENT_WATCH_SECONDS = 90.0  # a server sends bookmarks about once a minute; a watch without data for longer is dead


class ApiRequestError(Exception):
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
    def of(cls, code: int, body: Any, what: str) -> ApiRequestError:
        """Returns the error for an answer's code and body, a `Status` or anything else."""
        if isinstance(body, dict) and body.get("kind") == "Status":
            details = body.get("details") or {}
            code = int(body.get("code") or code)
            message = str(body.get("message") or what)
            return cls(code, str(body.get("reason") or ""), message, named=bool(details.get("name")))
        return cls(code, "", f"{what}: HTTP {code}: {str(body)[:200]}")


class Connection:
    """Requests to one API server; use as an async context manager, or call `close`.

    Args:
        url: the URL of the API server, such as `https://127.0.0.1:6443`.
        token: a bearer token; empty: none.
        ssl: a context that trusts an https server, and has the client's certificate; None: the usual verification.
        authorization: the Authorization header in place of a token.
        proxy: the URL of an HTTP proxy; empty: none.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        *,
        ssl: ssl_module.SSLContext | None = None,
        authorization: str = "",
        proxy: str = "",
        renew: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        """
        Args:
            url: the API server.
            token: the bearer token.
            ssl: the TLS context; None: that of the system's certificate authorities.
            authorization: the value of the header `Authorization`, in place of `token`.
            proxy: the URL of a proxy; empty: none.
            renew: called after an answer 401, because tokens expire: returns another value of `Authorization`, or an
                empty text if there is none; None: the first one does not expire.
        """
        self.url = url.rstrip("/")
        authorization = authorization or (f"Bearer {token}" if token else "")
        self._headers = {"Authorization": authorization} if authorization else {}
        self._ssl: ssl_module.SSLContext | bool = True if ssl is None else ssl
        self._proxy, self._renew, self._renewing = proxy or None, renew, asyncio.Lock()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    @contextlib.asynccontextmanager
    async def open(
        self,
        method: str,
        url: str,
        *,
        timeout: aiohttp.ClientTimeout,
        headers: Mapping[str, str] | None = None,
        **options: Any,
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """Begin one request with the credentials of this connection; its answer is a context.

        Args:
            method: the HTTP method.
            url: the path at the API server, or another URL.
            timeout: the deadlines.
            headers: more headers, also in place of those of this connection.
            options: further arguments of `aiohttp.ClientSession.request`.
        """
        if self._session is None or self._session.closed:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._ssl))
        is_path = url.startswith("/")
        where = self.url + url if is_path else url
        used = self._headers
        sent = {**used, **(headers or {})}
        async with self._session.request(
            method, where, timeout=timeout, headers=sent, proxy=self._proxy, **options
        ) as answer:
            # Behind the proxy, a pod may have answered.
            if answer.status != 401 or not is_path or "/proxy/" in url or not await self._renewed(used):
                yield answer
                return
        sent = {**self._headers, **(headers or {})}
        async with self._session.request(
            method, where, timeout=timeout, headers=sent, proxy=self._proxy, **options
        ) as answer:
            yield answer

    async def _renewed(self, used: Mapping[str, str]) -> bool:
        """Returns whether there are other credentials than those that were refused."""
        async with self._renewing:  # a plug-in runs once for all calls that were refused
            if self._headers == used and self._renew is not None and (authorization := await self._renew()):
                self._headers = {"Authorization": authorization}
        return self._headers != used

    async def exchange(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> Any:
        """Send one request. Returns the answer's JSON, or its text.

        Raises:
            ApiRequestError: the server refused.
            aiohttp.ClientError, OSError: no answer. A `TimeoutError` is an `OSError`.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Accept": "application/json"}
        if data is not None:
            headers["Content-Type"] = content_type
        timeout = aiohttp.ClientTimeout(total=seconds)
        async with self.open(method, path, timeout=timeout, params=params, data=data, headers=headers) as answer:
            return await self.checked(answer, f"{method} {path}")

    @staticmethod
    async def checked(answer: aiohttp.ClientResponse, what: str) -> Any:
        """Returns the JSON or the text of an answer.

        Raises:
            ApiRequestError: the server refused.
        """
        text = await answer.read()
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = text.decode(errors="replace")
        if answer.status >= 300:
            raise ApiRequestError.of(answer.status, parsed, what)
        return parsed


class ApiClient(Connection):
    """The calls of the parts of a node. A server that does not answer is an `ApiRequestError` too (code 0)."""

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        seconds: float = REQUEST_SECONDS,
    ) -> dict[str, Any]:
        """Send one request. `path` starts with `/api`.

        Raises:
            ApiRequestError: the server answered with an error, or did not answer (code 0).
        """
        what = f"{method} {path}"
        try:
            parsed = await self.exchange(
                method, path, body=body, params=params, content_type=content_type, seconds=seconds
            )
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiRequestError(0, "NoAnswer", f"{what}: {error or type(error).__name__}") from error
        if not isinstance(parsed, dict):
            raise ApiRequestError(0, "BadAnswer", f"{what}: the answer is not a JSON object")
        return parsed

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        """GET an object or a list."""
        return await self.request("GET", path, params=params)

    async def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST an object to its collection."""
        return await self.request("POST", path, body=body)

    async def patch(self, path: str, body: Any, content_type: str = MERGE_PATCH) -> dict[str, Any]:
        """PATCH; a JSON merge patch by default."""
        return await self.request("PATCH", path, body=body, content_type=content_type)

    async def delete(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """DELETE, with DeleteOptions."""
        return await self.request("DELETE", path, body=body)

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncGenerator[dict[str, Any]]:
        """Yields the events of one watch until the server ends it.

        Raises:
            ApiRequestError: the watch was refused, broke, sent nothing for too long, or sent an ERROR event (410: too
                old).
        """
        what = f"watch {path}"
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REQUEST_SECONDS, sock_read=SILENT_WATCH_SECONDS)
        try:
            async with self.open("GET", path, timeout=timeout, params={**params, "watch": "true"}) as answer:
                if answer.status >= 300:
                    await self.checked(answer, what)
                try:
                    rest = b""
                    async for data in answer.content.iter_any():
                        # Lines are split here: the reader's own are limited in length, objects are not.
                        *lines, rest = (rest + data).split(b"\n")
                        for line in lines:
                            if line.strip():
                                event = json.loads(line)
                                if event["type"] == "ERROR":
                                    raise ApiRequestError.of(
                                        int(event["object"].get("code") or 500), event["object"], what
                                    )
                                yield event
                finally:
                    # The end of a watch that its reader leaves early does not matter: do not wait for the end of TLS.
                    if answer.connection is not None and answer.connection.transport is not None:
                        answer.connection.transport.abort()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise ApiRequestError(0, "NoAnswer", f"{what}: {error or type(error).__name__}") from error


async def until_answered(client: ApiClient, path: str = "/readyz", *, seconds: float = 60.0) -> None:
    """Wait until the API server answers a request for `path` with success.

    Raises:
        TimeoutError: no success within `seconds`.
    """
    error: ApiRequestError | None = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await client.request("GET", path, seconds=5.0)
                except ApiRequestError as caught:
                    error = caught
                    if caught.reason == "BadAnswer":  # answered `ok`, which is not JSON
                        return
                    await asyncio.sleep(0.05)
                else:
                    return
    except TimeoutError:
        raise TimeoutError(f"the API server at {client.url} was not ready within {seconds:.0f} s: {error}") from error
