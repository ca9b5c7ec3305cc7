"""Runs both ports of a serving process in one event loop, and ends them without a failed answer."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import Any

import uvicorn

from .._process import listening_socket
from ._connections import bounded_protocol
from ._grpc import grpc_server
from ._inference import Inference
from ._rest import RestApplication

__all__ = ["Endpoints"]

_LOG = logging.getLogger(__name__)


class Endpoints:
    """The ports of HTTP and gRPC, in their own thread.

    Attributes:
        http, grpc: the numbers of the ports, after `start`.
    """

    def __init__(self, inference: Inference, largest: int) -> None:
        """
        Args:
            largest: the largest request of gRPC in bytes.

        Raises:
            OSError: the port of HTTP cannot be bound.
        """
        self._inference, self._largest = inference, largest
        settings = inference.settings
        try:
            self._socket = listening_socket(settings.bind, settings.ports.http)
        except OSError as error:
            raise OSError(f"HTTP cannot listen on {settings.bind} port {settings.ports.http}: {error}") from None
        self.http: int = self._socket.getsockname()[1]
        self.grpc = 0
        self._loop = asyncio.new_event_loop()
        inference.attach(self._loop)
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="backstay-endpoints", daemon=True)

    def start(self) -> None:
        """Answer requests. Raises `OSError` if the port of gRPC cannot be bound."""
        self._thread.start()
        self._started.wait()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Accept no further connections, answer what was accepted, and return then, or after `finish` seconds."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:  # noqa: BLE001  # `start` raises it
            self._error = error
            if self._started.is_set():
                _LOG.exception("the ports are closed")
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        settings = self._inference.settings
        application: Any = RestApplication(self._inference)
        rest = uvicorn.Server(
            uvicorn.Config(
                application,
                http=bounded_protocol(settings),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(settings.idle),
                timeout_graceful_shutdown=int(settings.finish),
            )
        )
        remote, self.grpc = grpc_server(self._inference, settings.bind, settings.ports.grpc, self._largest)
        await remote.start()
        serving = asyncio.create_task(rest.serve([self._socket]))
        self._started.set()
        await self._stop.wait()
        rest.should_exit = True
        await asyncio.gather(serving, remote.stop(settings.finish))
