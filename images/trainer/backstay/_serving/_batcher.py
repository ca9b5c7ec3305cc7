"""The queue of requests, and the batches that one thread computes from it.

A batch is computed by one version of the model, and a request is in one batch: no answer mixes two versions.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import grpc
from numpy.typing import NDArray

from ._metrics import ServingMetrics
from ._program import ServedVersion, ServingProgram

__all__ = ["BatchAnswer", "Batcher", "QueuedRequest", "RequestRefused"]

_LOG = logging.getLogger(__name__)

_GRPC: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
}


class RequestRefused(Exception):  # noqa: N818  # as in "connection refused"
    """A request that is not answered with a result.

    Attributes:
        status: the status of HTTP: 4xx for a mistake of the client, 429 and 503 for a request to repeat later, 500 for
            an error of the model.
        text: the reason, for the client.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text

    @property
    def grpc_code(self) -> grpc.StatusCode:
        """The status of gRPC."""
        return _GRPC.get(self.status, grpc.StatusCode.UNKNOWN)


@dataclass(frozen=True)
class BatchAnswer:
    """The outputs for one request, and the version that computed them."""

    version: ServedVersion
    outputs: Sequence[NDArray[Any]] = field(repr=False)


@dataclass(eq=False)
class QueuedRequest:
    """A request that waits for its batch.

    Attributes:
        arrays: its inputs, in the order of the signature.
        rows: the number of its examples.
        version: the version that must answer it; None: any.
        wanted: whether the client still waits.
        ticket: what the receiver of answers needs to find the client.
        arrived: when it was queued; `Batcher.submit` sets it.
    """

    arrays: Sequence[NDArray[Any]]
    rows: int
    version: str | None = None
    wanted: Callable[[], bool] = lambda: True
    ticket: Any = None
    arrived: float = 0.0


Answered: TypeAlias = list[tuple[QueuedRequest, "BatchAnswer | RequestRefused"]]


class Batcher:
    """Makes batches of queued requests: when the previous batch has ended, and the oldest request waited `delay`.

    A full batch does not wait. All methods are thread-safe.
    """

    def __init__(
        self,
        metrics: ServingMetrics,
        answer: Callable[[Answered], None],
        *,
        delay: float,
        patience: float,
        batches: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            answer: receives the answers of a batch; it must not block.
            delay: how long a batch waits for more requests, in seconds.
            patience: how long a request may wait, in seconds.
            batches: how many full batches may wait.
            clock: returns seconds.
        """
        self._metrics, self._answer, self._clock = metrics, answer, clock
        self._delay, self._patience, self._batches = delay, patience, batches
        self._changed = threading.Condition()
        self._queue: collections.deque[QueuedRequest] = collections.deque()
        self._rows = 0
        self._busy_since: float | None = None
        self._closed = False
        self._current: tuple[ServingProgram, ServedVersion] | None = None
        metrics.gauge("queued_examples").set_function(lambda: self._rows)

    @property
    def current(self) -> tuple[ServingProgram, ServedVersion] | None:
        """The version that answers the next batch, and its program, or None if none is loaded."""
        return self._current

    def use(self, program: ServingProgram, version: ServedVersion) -> None:
        """Answer all later batches with `version`. The batch that is being computed keeps its version."""
        with self._changed:
            self._current = program, version
            self._changed.notify_all()

    def busy_for(self) -> float:
        """For how many seconds the present batch has been computed; 0 between two batches."""
        since = self._busy_since
        return 0.0 if since is None else self._clock() - since

    @property
    def idle(self) -> bool:
        """Whether no request waits, and no batch is being computed."""
        with self._changed:
            return not self._queue and self._busy_since is None

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request.

        Raises:
            RequestRefused: with 429 if too many requests wait, with 503 if no version is loaded or the process ends.
        """
        with self._changed:
            if self._closed:
                raise RequestRefused(503, "this process ends: send the request to another one")
            if self._current is None:
                raise RequestRefused(503, "no checkpoint is loaded yet: try again later")
            most = self._batches * self._current[0].largest
            if self._rows + request.rows > most:
                raise RequestRefused(429, f"{self._rows} examples wait already, at most {most} may: try again later")
            request.arrived = self._clock()
            self._queue.append(request)
            self._rows += request.rows
            self._changed.notify()

    def close(self) -> None:
        """Accept no further requests, and end `run` after the last answer."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run(self) -> None:
        """Compute batches until `close`, and until the queue is empty."""
        while self._wait():
            self.step()

    def step(self) -> None:
        """Compute one batch of the requests that wait now."""
        with self._changed:
            if self._current is None:
                return
            program, version = self._current
            taken, late = self._take(program.largest, version)
            self._busy_since = self._clock()
        if late:
            self._answer(late)
        try:
            if taken:
                self._answer(self._compute(program, version, taken))
        finally:
            self._busy_since = None

    def _wait(self) -> bool:
        """Wait for a batch. Returns False if there will be none."""
        with self._changed:
            while True:
                if not self._queue:
                    if self._closed:
                        return False
                    self._changed.wait()
                    continue
                assert self._current is not None  # `submit` checked it
                left = self._queue[0].arrived + self._delay - self._clock()
                if left <= 0 or self._closed or self._rows >= self._current[0].largest:
                    return True
                self._changed.wait(left)

    def _take(self, largest: int, version: ServedVersion) -> tuple[list[QueuedRequest], Answered]:
        taken: list[QueuedRequest] = []
        refused: Answered = []
        rows = 0
        now = self._clock()
        while self._queue and rows + self._queue[0].rows <= largest:
            request = self._queue.popleft()
            self._rows -= request.rows
            waited = now - request.arrived
            self._metrics.histogram("queue_seconds").observe(waited)
            if not request.wanted():
                continue
            if waited > self._patience:
                refused.append((request, RequestRefused(503, f"the request waited {waited:.1f} s for its batch")))
            elif request.version not in (None, version.version):
                text = f"version {request.version} is not served: version {version.version} is"
                refused.append((request, RequestRefused(404, text)))
            else:
                taken.append(request)
                rows += request.rows
        return taken, refused

    def _compute(self, program: ServingProgram, version: ServedVersion, taken: list[QueuedRequest]) -> Answered:
        rows = sum(request.rows for request in taken)
        size = program.size_for(rows)
        began = self._clock()
        try:
            outputs = program.run(version, program.signature.batch([request.arrays for request in taken], size), rows)
        except Exception as error:  # noqa: BLE001  # it fails the requests of this batch and no others
            _LOG.exception("predict raised for a batch of %d examples at step %d", rows, version.step)
            refusal = RequestRefused(500, f"predict raised {type(error).__name__} at step {version.step}: see the log")
            return [(request, refusal) for request in taken]
        self._metrics.histogram("predict_seconds").observe(self._clock() - began)
        self._metrics.histogram("batch_examples").observe(rows)
        self._metrics.counter("padding_examples").inc(size - rows)
        self._metrics.counter("examples").labels(version.version).inc(rows)
        answered: Answered = []
        at = 0
        for request in taken:
            own = [output[at : at + request.rows] for output in outputs]
            answered.append((request, BatchAnswer(version, own)))
            at += request.rows
        return answered
