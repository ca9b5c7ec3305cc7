"""Serves container logs on the kubelet's port, which the API server forwards to `kubectl logs`."""

from __future__ import annotations

import hmac
import ssl
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path

from aiohttp import web

from backstay_cluster.kubelet.logs import LogOptions, LogSink, previous_of

NEWLINE_TYPE = "text/plain"


def log_options(query: Mapping[str, str], now: float) -> LogOptions:
    """PodLogOptions from a query.

    Raises:
        ValueError: a value is invalid.
    """

    def number(name: str) -> int | None:
        if not query.get(name):
            return None
        value = int(query[name])
        if value < 0:
            raise ValueError(f"{name} is {value}: must be 0 or more")
        return value

    def flag(name: str) -> bool:
        return query.get(name, "").lower() in ("1", "true")

    since = None
    if (seconds := number("sinceSeconds")) is not None:
        since = now - seconds
    elif query.get("sinceTime"):
        since = datetime.fromisoformat(query["sinceTime"]).timestamp()
    return LogOptions(flag("follow"), number("tailLines"), since, flag("timestamps"), number("limitBytes"))


class KubeletServer:
    """Serves only `/containerLogs/{namespace}/{pod}/{container}` and `/healthz`.

    Args:
        sinks: the containers' logs by namespace, pod and container.
        token: the bearer token of callers; with `tls`, a client certificate is required instead.
        tls: a context that requires a client certificate, which a real API server sends.
    """

    def __init__(
        self,
        sinks: Mapping[tuple[str, str, str], LogSink],
        token: str,
        *,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sinks = sinks
        self._token = token
        self._tls = tls
        self._runner: web.AppRunner | None = None

    async def start(self, host: str) -> int:
        """Listen on a free port of `host`; returns it."""
        app = web.Application(middlewares=[self._authenticate])
        app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", self._logs)
        app.router.add_get("/healthz", self._healthz)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, 0, ssl_context=self._tls)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _authenticate(self, request: web.Request, handler: Callable[[web.Request], object]) -> web.StreamResponse:
        if self._tls is None and request.path != "/healthz":
            header = request.headers.get("Authorization", "")
            if not hmac.compare_digest(header.encode(errors="surrogateescape"), f"Bearer {self._token}".encode()):
                raise web.HTTPUnauthorized(text="Unauthorized")
        return await handler(request)  # type: ignore[misc,no-any-return]

    async def _healthz(self, _: web.Request) -> web.StreamResponse:
        return web.Response(text="ok")

    async def _logs(self, request: web.Request) -> web.StreamResponse:
        info = request.match_info
        sink = self._sinks.get((info["namespace"], info["pod"], info["container"]))
        if sink is None:
            text = f"container {info['container']!r} of pod {info['namespace']}/{info['pod']} has no log here yet\n"
            raise web.HTTPNotFound(text=text)
        try:
            options = log_options(request.query, time.time())
        except ValueError as error:
            raise web.HTTPBadRequest(text=f"{error}\n") from error
        if request.query.get("previous", "").lower() in ("1", "true"):
            return self._previous(previous_of(sink.path), info["container"])
        response = web.StreamResponse(headers={"Content-Type": NEWLINE_TYPE})
        await response.prepare(request)
        async for data in sink.read(options):
            await response.write(data)
        await response.write_eof()
        return response

    def _previous(self, path: Path, container: str) -> web.StreamResponse:
        if not path.exists():
            raise web.HTTPNotFound(text=f"previous terminated container {container!r} not found\n")
        return web.FileResponse(path)
