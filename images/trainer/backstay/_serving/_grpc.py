"""The Open Inference Protocol v2 over gRPC, with KServe's messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from concurrent import futures
from typing import Any, Final

import grpc
from grpc import aio

from .._version import __version__
from ._batcher import RequestRefused
from ._inference import Inference
from ._protocol import answer_grpc, kserve_messages, read_grpc

__all__ = ["grpc_server", "servicer"]

_LOG = logging.getLogger(__name__)
_MOST_BYTES: Final = 1 << 30


def servicer(inference: Inference) -> Any:
    """Returns the methods of the protocol."""
    messages, services = kserve_messages()

    async def answered(context: Any, answer: Callable[[], Awaitable[Any]]) -> Any:
        try:
            inference.check_token(_authorization(context))
            return await answer()
        except RequestRefused as refused:
            await context.abort(refused.grpc_code, refused.text)
        except Exception:  # noqa: BLE001  # the client gets no details, the log does
            _LOG.exception("a call could not be answered")
            await context.abort(grpc.StatusCode.INTERNAL, "the call could not be answered: see the log")

    class Servicer(services.GRPCInferenceServiceServicer):  # type: ignore[misc, name-defined]
        """The calls of the protocol. Models are loaded and unloaded by this process alone."""

        async def ServerLive(self, request: Any, context: Any) -> Any:  # noqa: N802  # the protocol's names
            return messages.ServerLiveResponse(live=inference.live)

        async def ServerReady(self, request: Any, context: Any) -> Any:  # noqa: N802
            return messages.ServerReadyResponse(ready=inference.ready)

        async def ModelReady(self, request: Any, context: Any) -> Any:  # noqa: N802
            return messages.ModelReadyResponse(ready=inference.ready_for(request.name, request.version))

        async def ServerMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
            async def answer() -> Any:
                return messages.ServerMetadataResponse(name="backstay", version=__version__)

            return await answered(context, answer)

        async def ModelMetadata(self, request: Any, context: Any) -> Any:  # noqa: N802
            async def answer() -> Any:
                inference.program_for(request.name, request.version)
                return messages.ModelMetadataResponse(**inference.metadata())

            return await answered(context, answer)

        async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: N802
            began = time.monotonic()
            status = 401  # until the token was compared

            async def answer() -> Any:
                nonlocal status
                status = 500
                try:
                    program = inference.program_for(request.model_name, request.model_version)
                    size = request.ByteSize()
                    if size > program.most_bytes:
                        raise RequestRefused(413, f"the request has {size} bytes: at most {program.most_bytes}")
                    call = read_grpc(request, program)
                    result = await inference.answer(call, request.model_version)
                    content = answer_grpc(call, result, program, inference.name)
                    status = 200
                    return content
                except RequestRefused as refused:
                    status = refused.status
                    raise
                except asyncio.CancelledError:  # the client cancelled the call, or its deadline has passed
                    status = 499
                    raise

            try:
                return await answered(context, answer)
            finally:
                inference.metrics.request("grpc", status, time.monotonic() - began)

    return Servicer()


def _authorization(context: Any) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            return str(value)
    return None


def grpc_server(inference: Inference, bind: str, port: int, largest: int) -> tuple[aio.Server, int]:
    """Returns the server of gRPC, which is not started, and its port. To be called in the event loop.

    Args:
        largest: the largest request in bytes.

    Raises:
        OSError: the port cannot be bound.
    """
    server = aio.server(
        futures.ThreadPoolExecutor(1),
        options=[
            ("grpc.max_receive_message_length", min(largest, _MOST_BYTES)),
            ("grpc.max_send_message_length", _MOST_BYTES),
            ("grpc.so_reuseport", 0),
            # A client that is stopped, or whose node is lost, is disconnected (T8).
            ("grpc.keepalive_time_ms", 20_000),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.max_concurrent_streams", 100),
        ],
        maximum_concurrent_rpcs=inference.settings.connections,
    )
    _, services = kserve_messages()
    services.add_GRPCInferenceServiceServicer_to_server(servicer(inference), server)
    host = f"[{bind}]" if ":" in bind else bind
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise OSError(f"gRPC cannot listen on {bind} port {port}: {error}") from None
    return server, bound
