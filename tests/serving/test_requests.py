"""Requests of both protocols are answered without sockets, by the ASGI application and the methods of gRPC."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import quote, unquote

import numpy as np
import pytest

from backstay._serving._grpc import servicer
from backstay._serving._inference import Inference
from backstay._serving._metrics import ServingMetrics
from backstay._serving._program import ServedVersion, ServingProgram
from backstay._serving._protocol import kserve_messages
from backstay._serving._rest import RestApplication
from backstay._serving._settings import ServingSettings
from backstay._serving._signature import Signature


class Served:
    """A model whose batches are not computed."""

    def __init__(self, **settings: Any) -> None:
        self.inference = Inference(ServingSettings(**settings), ServingMetrics(), delay=0.0)
        self.program = ServingProgram(
            lambda params, state, x: x, Signature.of(np.zeros(2, np.float32)), (1,), ({}, None)
        )
        self.inference.batcher.use(self.program, ServedVersion(5, "manifest", {}, None))
        self.application = RestApplication(self.inference)

    async def call(self, method: str, path: str, parts: Iterable[Any] = (b"",)) -> tuple[int, Any]:
        """Returns the status and the JSON of the answer. A part that is a future is awaited, and is empty."""
        left, sent = list(parts), list[Any]()

        async def receive() -> Any:
            part = left.pop(0)
            if not isinstance(part, bytes):
                await part
                part = b""
            return {"type": "http.request", "body": part, "more_body": bool(left)}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": method, "path": unquote(path), "raw_path": path.encode(), "headers": []}
        await self.application(scope, receive, send)
        return sent[0]["status"], json.loads(sent[1]["body"])


@pytest.mark.parametrize("name", ["a/b", "50%", "%2F", "a b", "ä", "?", "a/infer"])
def test_a_model_with_any_name_can_be_reached_over_http(name: str) -> None:
    served = Served(name=name)
    path = f"/v2/models/{quote(name, safe='')}"
    status, answer = asyncio.run(served.call("GET", path))
    assert (status, answer["name"]) == (200, name)
    assert asyncio.run(served.call("GET", f"{path}/ready")) == (200, {"ready": True})


def test_o7_a_valid_request_above_the_bound_of_all_bodies_is_received() -> None:
    served = Served(receiving=1000)
    part = b" " * (served.program.most_bytes // 4)
    status, answer = asyncio.run(served.call("POST", "/v2/models/model/infer", [part] * 4))
    assert (status, "the body is not JSON" in answer["error"]) == (400, True)


def test_o7_bodies_above_the_bound_together_are_refused_until_the_first_has_arrived() -> None:
    served = Served(receiving=1000)
    part = b" " * (served.program.most_bytes // 4)

    async def both() -> list[int]:
        rest = asyncio.get_running_loop().create_future()
        first = asyncio.create_task(served.call("POST", "/v2/models/model/infer", [part, part, rest, part]))
        await asyncio.sleep(0)
        statuses = [(await served.call("POST", "/v2/models/model/infer", [part] * count))[0] for count in (3, 2)]
        rest.set_result(None)
        statuses.append((await first)[0])
        return [*statuses, (await served.call("POST", "/v2/models/model/infer", [part] * 4))[0]]

    assert asyncio.run(both()) == [503, 400, 400, 400]


class Called:
    """The context of a gRPC call."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


def test_a_grpc_call_that_the_client_cancels_is_counted_with_499() -> None:
    served = Served()
    messages, _ = kserve_messages()
    tensor = messages.ModelInferRequest.InferInputTensor(
        name="input", datatype="FP32", shape=[1, 2], contents={"fp32_contents": [1, 2]}
    )

    async def cancelled() -> None:
        request = messages.ModelInferRequest(model_name="model", inputs=[tensor])
        call = asyncio.create_task(servicer(served.inference).ModelInfer(request, Called()))
        await asyncio.sleep(0)
        assert not served.inference.batcher.idle
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    served.inference.attach(loop := asyncio.new_event_loop())
    loop.run_until_complete(cancelled())
    loop.close()
    count = served.inference.metrics.registry.get_sample_value
    labels = {"protocol": "grpc", "status": "499"}
    assert count("backstay_serving_requests_total", labels) == 1
    assert count("backstay_serving_requests_total", {**labels, "status": "500"}) is None
