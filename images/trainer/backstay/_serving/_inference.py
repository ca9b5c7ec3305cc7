"""The requests of both protocols, on their way to a batch and back."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import Any

from ._batcher import Answered, BatchAnswer, Batcher, QueuedRequest, RequestRefused
from ._follower import CheckpointFollower
from ._metrics import ServingMetrics
from ._program import ServingProgram
from ._protocol import InferenceCall
from ._settings import ServingSettings

__all__ = ["Inference"]


class Inference:
    """Answers calls with batches. Its coroutines run in one event loop, batches in one thread.

    Attributes:
        draining: whether the process is about to end: it answers, but is not ready.
    """

    def __init__(self, settings: ServingSettings, metrics: ServingMetrics, delay: float) -> None:
        """
        Args:
            delay: how long a batch waits for more requests, in seconds.
        """
        self.settings, self.metrics = settings, metrics
        self.draining = False
        self.follower: CheckpointFollower | None = None
        self.batcher = Batcher(
            metrics,
            self._answered,
            delay=delay,
            patience=settings.patience,
            batches=settings.queued_batches,
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer in this event loop."""
        self._loop = loop

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.settings.name

    @property
    def ready(self) -> bool:
        """Whether the process accepts requests, and wants them."""
        return self.batcher.current is not None and not self.draining

    def ready_for(self, name: str, version: str | None) -> bool:
        """Returns whether requests for this model and version are accepted; None and an empty text: any version."""
        current = self.batcher.current
        return self.ready and name == self.name and current is not None and version in (None, "", current[1].version)

    @property
    def live(self) -> bool:
        """Whether batches are computed. A batch that takes too long makes the process not live (T8)."""
        return self.batcher.busy_for() < self.settings.stuck

    def check_token(self, authorization: str | None) -> None:
        """Compare the token of a call. Raises `RequestRefused` with 401 (O7)."""
        token = self.settings.token
        if token is not None and not hmac.compare_digest(f"Bearer {token}".encode(), (authorization or "").encode()):
            raise RequestRefused(401, "the request must have the header Authorization: Bearer TOKEN, with the token")

    def program_for(self, name: str, version: str | None) -> ServingProgram:
        """Returns the program that answers requests for a model.

        Raises:
            RequestRefused: with 404 for another model or version, with 503 if no version is loaded.
        """
        current = self.batcher.current
        if current is None:
            status = "" if self.follower is None else f": {self.follower.status}"
            raise RequestRefused(503, f"the model is not ready{status}")
        if name != self.name:
            raise RequestRefused(404, f"there is no model {name[:100]!r}: this process serves {self.name}")
        if version not in (None, "", current[1].version):
            raise RequestRefused(404, f"version {version!r:.50} is not served: version {current[1].version} is")
        return current[0]

    async def answer(self, call: InferenceCall, version: str | None) -> BatchAnswer:
        """Returns the answer to a call.

        Raises:
            RequestRefused: the queue is full, the call waited too long, or `predict` raised.
        """
        assert self._loop is not None
        future: asyncio.Future[BatchAnswer] = self._loop.create_future()
        request = QueuedRequest(call.arrays, call.rows, version or None, lambda: not future.done(), future)
        self.batcher.submit(request)
        try:
            return await asyncio.wait_for(future, self.settings.patience + self.settings.stuck)
        except TimeoutError:
            raise RequestRefused(503, "the model did not answer in time") from None

    def _answered(self, answered: Answered) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no client waits any more
            self._loop.call_soon_threadsafe(_deliver, answered)

    def metadata(self) -> dict[str, Any]:
        """Returns the names, data types and shapes of the model's tensors.

        Raises:
            RequestRefused: with 503 if no version is loaded.
        """
        current = self.batcher.current
        program = self.program_for(self.name, None)
        assert current is not None  # `program_for` checked it
        return {
            "name": self.name,
            "versions": [current[1].version],
            "platform": "backstay",
            **{
                kind: [
                    {"name": tensor.name, "datatype": tensor.datatype, "shape": [-1, *tensor.shape]}
                    for tensor in tensors
                ]
                for kind, tensors in (("inputs", program.signature.tensors), ("outputs", program.outputs))
            },
        }


def _deliver(answered: Answered) -> None:
    for request, answer in answered:
        future: asyncio.Future[BatchAnswer] = request.ticket
        if future.done():  # the client left
            continue
        if isinstance(answer, BatchAnswer):
            future.set_result(answer)
        else:
            future.set_exception(answer)
