"""Liveness, readiness and metrics over HTTP.

Alive means that the watch receives events, not that HTTP answers. The operator's writes must come back through Kopf
(the Lease's renewals, and any pod, service or status). If the API server does not answer, the operator is not ready,
but it is alive.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class HealthVerdict:
    """Whether a check passed, and a reason."""

    passed: bool
    why: str


class Health:
    """Serves ``/healthz``, ``/readyz`` and ``/metrics``.

    Args:
        metrics: returns the text of a scrape.
        alive: returns the liveness verdict; called at each probe.
        ready: returns the readiness verdict.
    """

    def __init__(
        self,
        metrics: Callable[[], Awaitable[bytes]],
        alive: Callable[[], HealthVerdict],
        ready: Callable[[], HealthVerdict],
    ) -> None:
        self._metrics = metrics
        self._alive = alive
        self._ready = ready
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; port 0 selects a free port. Returns the port. Raises OSError if the port is in use."""
        app = web.Application()
        app.router.add_get("/healthz", self._answer(self._alive))
        app.router.add_get("/readyz", self._answer(self._ready))
        app.router.add_get("/metrics", self._export)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, shutdown_timeout=1.0)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @staticmethod
    def _answer(verdict: Callable[[], HealthVerdict]) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def answer(_: web.Request) -> web.Response:
            found = verdict()
            return web.Response(status=200 if found.passed else 503, text=found.why + "\n")

        return answer

    async def _export(self, _: web.Request) -> web.Response:
        return web.Response(body=await self._metrics(), headers={"Content-Type": CONTENT_TYPE_LATEST})
