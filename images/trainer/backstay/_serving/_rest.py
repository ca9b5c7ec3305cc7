"""The Open Inference Protocol v2 over HTTP, with probes and metrics, as an ASGI application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import unquote

import orjson
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from .._version import __version__
from ._batcher import RequestRefused
from ._inference import Inference
from ._protocol import JSON_LENGTH, answer_rest, read_rest

__all__ = ["RestApplication"]

_LOG = logging.getLogger(__name__)
_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_PAGES: Final = (
    "there are GET /v2, /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/ready and /metrics, and "
    "POST /v2/models/NAME/infer"
)

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


@dataclass(frozen=True)
class _RestAnswer:
    status: int
    body: bytes
    kind: str = _JSON
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def refusal(cls, refused: RequestRefused) -> _RestAnswer:
        """Returns the answer to a request that is refused."""
        headers = {}
        if refused.status in (429, 503):
            headers["retry-after"] = "1"
        if refused.status == 401:
            headers["www-authenticate"] = "Bearer"
        if refused.status in (408, 413):
            headers["connection"] = "close"  # the rest of the body is not read
        return cls(refused.status, orjson.dumps({"error": refused.text}), headers=headers)


class RestApplication:
    """Answers the requests of HTTP. Probes and metrics need no token (O7)."""

    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._receiving = 0

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request, as ASGI defines it."""
        if scope["type"] != "http":
            return
        began = time.monotonic()
        # In `path`, a slash inside of a word cannot be distinguished from one between words.
        words = [unquote(word) for word in scope["raw_path"].decode("latin-1").split("/")[1:]]
        infers = words[-1:] == ["infer"]
        try:
            answer = await self._route(scope, words, receive)
        except RequestRefused as refused:
            answer = _RestAnswer.refusal(refused)
        except Exception:  # noqa: BLE001  # the client gets no details, the log does
            _LOG.exception("a request for %s could not be answered", scope["path"][:200])
            answer = _RestAnswer.refusal(RequestRefused(500, "the request could not be answered: see the log"))
        if infers:
            self._inference.metrics.request("http", answer.status, time.monotonic() - began)
        await self._send(answer, send)

    async def _route(self, scope: _Message, words: list[str], receive: _Receive) -> _RestAnswer:
        inference = self._inference
        match scope["method"], words:
            case "GET", ["v2", "health", "live"]:
                return _state(inference.live, "live")
            case "GET", ["v2", "health", "ready"]:
                return _state(inference.ready, "ready")
            case "GET", ["metrics"]:
                return _RestAnswer(200, inference.metrics.page(), CONTENT_TYPE_LATEST)
            case "GET", ["v2", "models", name, "ready"]:
                return _state(inference.ready_for(name, None), "ready")
            case "GET", ["v2", "models", name, "versions", version, "ready"]:
                return _state(inference.ready_for(name, version), "ready")
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        inference.check_token(headers.get("authorization"))
        match scope["method"], words:
            case "GET", ["v2"]:
                server = {"name": "backstay", "version": __version__, "extensions": ["binary_tensor_data"]}
                return _RestAnswer(200, orjson.dumps(server))
            case "GET", ["v2", "models", name] | ["v2", "models", name, "versions", _]:
                inference.program_for(name, words[4] if len(words) > 4 else None)
                return _RestAnswer(200, orjson.dumps(inference.metadata()))
            case "POST", ["v2", "models", name, "infer"]:
                return await self._infer(name, None, headers, receive)
            case "POST", ["v2", "models", name, "versions", version, "infer"]:
                return await self._infer(name, version, headers, receive)
            case _:
                raise RequestRefused(404, _PAGES)

    async def _infer(self, name: str, version: str | None, headers: dict[str, str], receive: _Receive) -> _RestAnswer:
        inference = self._inference
        program = inference.program_for(name, version)
        # The body has no name here, so that a request that waits keeps its arrays only.
        call = read_rest(await self._body(headers, receive, program.most_bytes), headers.get(JSON_LENGTH), program)
        answer = await inference.answer(call, version)
        content, length = answer_rest(call, answer, program, inference.name)
        if length is None:
            return _RestAnswer(200, content)
        return _RestAnswer(200, content, _BINARY, {JSON_LENGTH: str(length)})

    async def _body(self, headers: dict[str, str], receive: _Receive, most: int) -> bytes:
        if headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused(400, "the body has a Content-Encoding: it must have none")
        declared = headers.get("content-length", "0")
        size = int(declared) if declared.isdigit() and len(declared) < 20 else 0
        too_large = RequestRefused(413, f"the body is larger than {most} bytes, the largest valid request")
        if size > most:
            raise too_large
        held = 0
        parts = []
        try:
            async with asyncio.timeout(self._inference.settings.receive):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise RequestRefused(408, "the connection was closed before the end of the body")
                    part = message.get("body", b"")
                    self._receiving += len(part)
                    held += len(part)
                    if held > most:
                        raise too_large
                    # A valid request that is larger than `receiving` would be refused each time.
                    if self._receiving > max(self._inference.settings.receiving, most):
                        raise RequestRefused(503, "too many bodies are being received: try again later")
                    parts.append(part)
                    if not message.get("more_body", False):
                        return parts[0] if len(parts) == 1 else b"".join(parts)
        except TimeoutError:
            seconds = self._inference.settings.receive
            raise RequestRefused(408, f"the body was not received within {seconds:g} s") from None
        finally:
            self._receiving -= held

    async def _send(self, answer: _RestAnswer, send: _Send) -> None:
        headers = {"content-type": answer.kind, "content-length": str(len(answer.body)), **answer.headers}
        if self._inference.draining:
            headers["connection"] = "close"  # the client's next connection goes to another process
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        async with asyncio.timeout(self._inference.settings.send):
            await send({"type": "http.response.start", "status": answer.status, "headers": raw})
            await send({"type": "http.response.body", "body": answer.body})


def _state(holds: bool, word: str) -> _RestAnswer:
    status = 200 if holds else HTTPStatus.SERVICE_UNAVAILABLE
    return _RestAnswer(status, orjson.dumps({word: holds}))
