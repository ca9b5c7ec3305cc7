"""The connections of the HTTP server, so that stopping it leaves none behind.

aiohttp drops a connection when its protocol has ended. Under TLS, the socket stays open until the other side has ended
the connection too, which may never happen. A program that stops a server and then its event loop would leak the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from aiohttp import web


class Connections(web.Server):
    """A server that keeps a list of its open sockets."""

    def __init__(self, handler: Any, **options: Any) -> None:
        super().__init__(handler, **options)
        self._sockets: dict[asyncio.Transport, Any] = {}

    def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
        """aiohttp calls this for a new connection."""
        super().connection_made(handler, transport)
        self._sockets = {t: s for t, s in self._sockets.items() if s.fileno() != -1}
        self._sockets[transport] = transport.get_extra_info("socket")

    async def closed(self, seconds: float) -> None:
        """Cut the open connections and wait until they are closed, at most `seconds`."""
        for transport in self._sockets:
            # In Python 3.11.2 a TLS transport that is closed already raises here: it has lost its protocol.
            with contextlib.suppress(AttributeError):
                transport.abort()
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while any(s.fileno() != -1 for s in self._sockets.values()) and loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self._sockets.clear()
