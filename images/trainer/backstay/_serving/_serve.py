"""`backstay.serve` is the lifecycle of a serving process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from backstay_spec.whole import number

from .._process import Stop, configure, end_process
from ..errors import ConfigurationError
from ._choice import CheckpointChoice, LoadedCheckpoint
from ._endpoints import Endpoints
from ._follower import CheckpointFollower
from ._inference import Inference
from ._metrics import ServingMetrics
from ._program import ServingProgram, padded_sizes
from ._protocol import kserve_messages
from ._settings import ServingPorts, ServingSettings
from ._signature import Signature, most_request_bytes

__all__ = ["serve"]

_LOG = logging.getLogger(__name__)


def serve(
    predict: Callable[[Any, Any, Any], Any],
    *,
    example: Any,
    checkpoint: str | os.PathLike[str] | None = None,
    batch: int | Sequence[int] = 32,
    delay: float = 0.0,
    name: str = "model",
    step: int | None = None,
    average: bool = False,
    like: Any = None,
    base: Any = True,
    ports: ServingPorts | None = None,
) -> None:
    """Answer requests of the Open Inference Protocol v2 with a trained model, until SIGTERM or Ctrl-C.

    Loads the newest complete checkpoint, compiles `predict` for padded batches, and then accepts requests over HTTP and
    gRPC. Follows newer checkpoints of the same job: each one answers requests after `predict` computed a batch of each
    size with it. A damaged checkpoint, or one of another model or job, is skipped with a message, and the served one
    stays. While there is no checkpoint, the process waits and is not ready.

    The variables ``BACKSTAY_SERVE_*`` of the environment replace arguments, so that a manifest of Kubernetes can set
    them (see the page about serving).

    Args:
        predict: ``predict(params, state, batch)`` returns a tree of arrays, whose first dimension is that of `batch`.
            It must be a pure function that `jax.jit` can compile, and compute each example on its own: requests of
            different clients share batches. `state` is None for a model without state.
        example: one input without the dimension of the batch: a tree of arrays, numbers or ``jax.ShapeDtypeStruct``.
            The names of inputs are the paths of its leaves, or ``input`` for one array. The values are not used.
        checkpoint: a job's ``checkpoint.uri``, whose newest complete checkpoint is served, or one manifest in it.
        batch: the largest number of examples in one batch. `predict` is compiled for it and for the powers of 2 below
            it. Or a list of all sizes to compile.
        delay: how long the first request of a batch waits for more, in seconds. With 0, requests wait only while the
            previous batch is computed.
        name: the name of the model in URLs.
        step: serve the checkpoint of this step, and do not follow newer ones.
        average: whether `predict` receives the moving average of a job with ``train(average=...)`` as its params.
        like: a tree with the structure of the parameters, or ``(params, state)``; see `backstay.load`.
        base: the source of arrays that were frozen (``train(frozen=...)``), as in `backstay.load`. True: the place
            where the job read them. They are read again for each checkpoint.
        ports: where to listen; by default HTTP on port 8080 and gRPC on port 8081.

    Raises:
        ConfigurationError: an argument or variable is invalid, `predict` raised, or it returned an invalid tree.
        CheckpointError: the checkpoint folder cannot be opened.
        OSError: a port cannot be bound.
    """
    settings = ServingSettings(name=name, step=step, ports=ServingPorts() if ports is None else ports)
    settings = settings.with_environment(os.environ)
    uri = os.environ.get("BACKSTAY_SERVE_CHECKPOINT") or checkpoint
    if uri is None:
        raise ConfigurationError("serve needs checkpoint=..., or BACKSTAY_SERVE_CHECKPOINT: a folder or a manifest")
    if not isinstance(uri, str | os.PathLike):
        raise ConfigurationError(f"checkpoint is {uri!r:.100}: must be a path or a URI")
    if not isinstance(average, bool):
        raise ConfigurationError(f"average is {average!r:.100}: must be True or False")
    if not callable(predict):
        raise ConfigurationError(f"predict is {type(predict).__name__}: must be a function (params, state, batch)")
    delay = number(delay)
    if isinstance(delay, bool) or not isinstance(delay, int | float) or not 0 <= delay <= 10:
        raise ConfigurationError(f"delay is {delay!r:.50}: must be a number of seconds from 0 to 10")
    signature, sizes = Signature.of(example), padded_sizes(batch)
    choice = CheckpointChoice(os.fspath(uri), step=settings.step, like=like, average=average, base=base)
    configure("text", "", "")
    _require_kserve()
    _ServingProcess(settings, choice, predict, signature, sizes, delay).run()


def _require_kserve() -> None:
    try:
        kserve_messages()
    except ImportError as error:
        raise ConfigurationError(
            f"serve needs the packages of the extra `serving`, and {error.name} is not installed: run "
            "pip install 'backstay[serving]', or use the image trainer with the tag serving"
        ) from None


class _ServingProcess:
    """One serving process, with two ports, a thread that computes batches, and one that follows checkpoints."""

    def __init__(
        self,
        settings: ServingSettings,
        choice: CheckpointChoice,
        predict: Callable[[Any, Any, Any], Any],
        signature: Signature,
        sizes: tuple[int, ...],
        delay: float,
    ) -> None:
        self._settings = settings
        self._metrics = ServingMetrics()
        self._inference = Inference(settings, self._metrics, delay)
        self._batcher = self._inference.batcher

        def program(loaded: LoadedCheckpoint) -> ServingProgram:
            began = time.monotonic()
            made = ServingProgram(predict, signature, sizes, (loaded.params, loaded.state), self._wake.is_set)
            _LOG.info("predict is compiled for batches of %s in %.1f s", list(sizes), time.monotonic() - began)
            return made

        self._follower = CheckpointFollower(choice, program, self._batcher, self._metrics, retry=settings.retry)
        self._inference.follower = self._follower
        self._metrics.gauge("ready").set_function(lambda: float(self._inference.ready))
        self._endpoints = Endpoints(self._inference, most_request_bytes(signature.tensors, sizes[-1]))
        self._wake = threading.Event()
        self._failed: BaseException | None = None

    def run(self) -> None:
        """Serve until SIGTERM or Ctrl-C. Raises what makes serving impossible."""
        stop = Stop()
        stop.install()
        stop.then(self._wake.set)
        self._endpoints.start()
        _LOG.info(
            "listening on %s: HTTP on port %d, gRPC on port %d",
            self._settings.bind,
            self._endpoints.http,
            self._endpoints.grpc,
        )
        batches = threading.Thread(target=self._batcher.run, name="backstay-batches", daemon=True)
        batches.start()
        follows = threading.Thread(target=self._follow, name="backstay-follow", daemon=True)
        follows.start()
        try:
            self._wake.wait()
            if self._failed is None:
                self._drain()
        except KeyboardInterrupt:
            _LOG.info("Ctrl-C: no further requests are accepted")
            self._wake.set()
        self._inference.draining = True
        deadline = time.monotonic() + self._settings.finish
        self._endpoints.stop()
        self._batcher.close()
        for thread in (batches, follows):
            thread.join(max(1.0, deadline - time.monotonic()))
        if self._failed is not None:
            raise self._failed
        if not batches.is_alive():
            _LOG.info("all requests are answered")
        if batches.is_alive() or follows.is_alive():
            # A thread that is inside of XLA when the interpreter ends would abort the process.
            _LOG.warning("a checkpoint is being prepared, or a batch computed: the process ends without its result")
            end_process(0)

    def _drain(self) -> None:
        """Answer requests, but be not ready, until load balancers send no more."""
        self._inference.draining = True
        _LOG.info("SIGTERM: the process is not ready, and answers requests for %g s more", self._settings.drain)
        time.sleep(self._settings.drain)

    def _follow(self) -> None:
        try:
            self._follower.run(self._wake, self._settings.look, self._settings.follow)
        except BaseException as error:  # noqa: BLE001  # `run` raises it
            self._failed = error
            self._wake.set()
