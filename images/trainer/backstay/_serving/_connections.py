"""Bounds the connections of HTTP, by the size and the time of a request's head, and closes idle and unread ones."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, ClassVar, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ._settings import ServingSettings

__all__ = ["bounded_protocol"]

_HEAD_BYTES: Final = 1 << 16
_SPARE: Final = 64
"""Connections above the limit, for probes."""

_TOO_LONG: Final = b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _BoundedConnection(HttpToolsProtocol):
    """One connection. A client that sends or reads too slowly is disconnected (T8)."""

    settings: ClassVar[ServingSettings]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._head = 0  # bytes of a head that is not whole
        self._in_head = True
        self._in_body = False
        self._watch: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        # asyncio does this only for sockets with an explicit protocol. Without it, a body waits 40 ms for its head.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        limit = self.settings.connections
        if len(self.connections) > limit:
            idle = [other for other in self.connections if other is not self and _idle(other)]
            if idle:
                idle[0].transport.abort()
            elif len(self.connections) > limit + _SPARE:
                transport.abort()
                return
        self._limit(self.settings.head)

    def connection_lost(self, exc: Exception | None) -> None:
        self._release()
        self._read()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # Without this limit, the answer of the next request would wait for a client that reads nothing.
        self._read()
        self._unread = self.loop.call_later(self.settings.send, self.transport.abort)

    def resume_writing(self) -> None:
        self._read()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._in_head and self._watch is None:
            self._limit(self.settings.head)
        before = self._in_head
        super().data_received(data)
        if before and self._in_head:
            self._head += len(data)
            if self._head > _HEAD_BYTES and not self.transport.is_closing():
                self.transport.write(_TOO_LONG)
                self.transport.close()

    def on_message_begin(self) -> None:
        self._next_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._release()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._release()
        super().on_message_complete()
        if self.cycle.response_complete:  # it was refused before its end
            self._next_head()
            self._limit(self.settings.head)

    def on_response_complete(self) -> None:
        if not self._in_body:
            self._next_head()
        super().on_response_complete()
        if self.transport.is_closing():
            self._limit(self.settings.send)  # what is written may never be read
        elif self._in_body:
            self._limit(self.settings.receive)  # the rest of the body is read and dropped

    def _next_head(self) -> None:
        self._in_head, self._head = True, 0

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._limit(self.settings.send)

    def _limit(self, seconds: float) -> None:
        self._release()
        self._watch = self.loop.call_later(seconds, self.transport.abort)

    def _read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None


def _idle(connection: Any) -> bool:
    return connection.cycle is not None and connection.cycle.response_complete


def bounded_protocol(settings: ServingSettings) -> type[HttpToolsProtocol]:
    """Returns the protocol of connections with these bounds, for uvicorn."""
    return type("BoundedConnection", (_BoundedConnection,), {"settings": settings})
