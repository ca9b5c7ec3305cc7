"""An evaluator's pod, which evaluates each new checkpoint, and the last, beside the training."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from backstay_rpc.control_pb2 import TRAINING, WAITING
from backstay_spec.contract import ALREADY_COMPLETE

from .. import _instrument
from .._checkpoint import load
from .._compute import Placement, is_out_of_memory
from .._process import Environment, Stop
from .._script import FrozenPart, Script, ScriptPlan
from .._transport import ControlClient, Heartbeats, JobState
from ..errors import CheckpointError, ConfigurationError, PeerLost, Refused
from ._ending import EvaluationGivenUp, begin_evaluation, raise_end, report_evaluation

__all__ = ["Evaluator"]

_LOG = logging.getLogger(__name__)


class Evaluator:
    """Requests the newest checkpoint from shard 0 and reports the result of `evaluate` to it.

    Attributes:
        ready: whether it has joined the servers.
    """

    def __init__(
        self,
        environment: Environment,
        script: Script,
        plan: ScriptPlan,
        stop: Stop,
        evaluated: Callable[[int, float], None],
    ) -> None:
        """
        Args:
            evaluated: called after each evaluation with its step and its seconds, whether it failed or not.

        Raises:
            ConfigurationError: the job has no checkpoints.
        """
        if environment.checkpoint_uri is None:
            raise ConfigurationError("the job has an evaluator, but no checkpoint: set spec.checkpoint")
        self._env, self._script, self._plan, self._stop = environment, script, plan, stop
        self._evaluated = evaluated
        self.ready = False
        self._control = ControlClient(
            environment.servers, environment.credentials, environment.peer, environment.timeouts
        )
        try:
            self._placement = script.placement
        except ConfigurationError as error:  # it may fit the devices of workers, which report it if not
            _LOG.info("evaluate gets whole arrays and no mesh: %s", error)
            self._placement = Placement()
        self._frozen = FrozenPart(script.beginning, plan.agreement, lambda: self._placement)
        self._lost = False
        self._found: tuple[int, dict[str, float], str, str] | None = None
        self._heart = Heartbeats(self._control, self._silent)

    def run(self) -> dict[str, Any]:
        """Evaluate until the job is done; returns this pod's termination message.

        Raises:
            Stopped, JobFailed, Refused, WaitedTooLong: for the same reasons as in a worker.
        """
        _instrument.follow_this_thread()
        try:
            job = self._run()
        finally:
            self._heart.close()
            self._control.leave()
            self._control.close()
        result = ALREADY_COMPLETE if job.already_complete else "Succeeded"
        return {"result": result, "step": job.checkpoint_step, "checkpoint": job.checkpoint}

    def _run(self) -> JobState:
        self._join()
        self._heart.start()
        self._heart.activity = WAITING
        # A heartbeat has the newest checkpoint, and training may store several within the usual interval.
        self._heart.set_interval(min(self._env.timeouts.evaluator_check, self._env.timeouts.heartbeat))
        seen: tuple[str, int] = ("", 0)  # as long as there is no checkpoint
        while True:
            job = self._heart.wait(
                lambda job: job.done or bool(job.failed) or (job.checkpoint, job.checkpoint_step) != seen,  # noqa: B023
                self._env.timeouts.evaluator_check,
            )
            raise_end(self._heart, job, self._stop)
            if self._lost and not job.done:  # before an evaluation: a server waits at its end for pods that have joined
                self._lost = False
                self._join()
                self._report()  # the server with the last report may have ended
            newest = (job.checkpoint, job.checkpoint_step)
            if job.checkpoint and newest != seen:
                seen = newest
                self._one(job.checkpoint, job.checkpoint_step)
                continue
            if job.done:
                return job

    def _join(self) -> None:
        replies = self._control.join_all(self._frozen.agreement, self._stop.requested.is_set)
        self._heart.expect([reply.incarnation for reply in replies])
        if not self._frozen.known:
            self._heart.start()  # reading may take long
            self._frozen.read(replies[0].frozen_from)
            self._join()  # with the digests
        self.ready = True

    def _silent(self, shard: int, why: str) -> None:
        del shard, why
        self._lost = True

    def _one(self, checkpoint: str, step: int) -> None:
        name = checkpoint.rpartition("/")[2]
        uri = f"{str(self._env.checkpoint_uri).rstrip('/')}/{name}"
        error, metrics = "", {}
        self._heart.activity = TRAINING
        began = time.monotonic()
        try:
            with self._announced(step, name), _instrument.span("evaluate", step):
                found = load(uri, like=self._plan.partition.tree.shapes())
                trained = found.params if found.average is None else found.average
                model = self._frozen.whole_model(self._placement.divide(trained), found.state)
                metrics = self._script.evaluation(*model, self._placement)
        except EvaluationGivenUp as given_up:
            _LOG.error("step %d is not evaluated: %s", step, given_up)
            error = str(given_up)
        except CheckpointError as failure:
            # `keep` newer checkpoints may exist, and the server deleted this one.
            _LOG.warning("the checkpoint of step %d could not be evaluated: %s", step, failure)
            error = str(failure)
        except Exception as failure:  # noqa: BLE001  # an error of the script costs the metrics, not the training
            _LOG.exception("evaluate raised at step %d", step)
            error = f"{type(failure).__name__}: {failure}"
            if is_out_of_memory(failure):
                error = f"{self._too_small()}: {error}"
        self._heart.activity = WAITING
        self._evaluated(step, time.monotonic() - began)
        self._found = step, metrics, error, name
        self._report()

    def _too_small(self) -> str:
        size = sum(leaf.nbytes for leaf in self._plan.partition.tree.leaves) / 1e9
        devices = len(self._placement.devices)
        return (
            f"the evaluator has too little memory. The model has {size:.3g} GB that train, and this pod {devices} "
            "devices. Give it more memory or the devices of a worker, or remove spec.evaluator: then workers evaluate"
        )

    @contextlib.contextmanager
    def _announced(self, step: int, name: str) -> Iterator[None]:
        """Report that this checkpoint is being evaluated; with `keepBest`, again and again.

        Each server of shard 0 must keep the checkpoint until then, also one that takes over meanwhile.

        Raises:
            EvaluationGivenUp: this pod must not evaluate.
        """
        # Before the files are read. With `keepBest` and `keep: 1`, the next checkpoint would delete them.
        begin_evaluation(self._control, step, name)
        config = self._env.config.checkpoint
        if config is None or config.keep_best is None:
            yield
            return
        ended = threading.Event()

        def announce() -> None:
            with contextlib.suppress(PeerLost, Refused):
                self._control.evaluates(step, name)

        def repeat() -> None:
            while not ended.wait(self._env.timeouts.heartbeat):
                announce()

        thread = threading.Thread(target=repeat, name="backstay-evaluates", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()  # a later report would keep the checkpoint after its evaluation

    def _report(self) -> None:
        """Report the newest evaluation, if there is one."""
        if self._found is not None:
            report_evaluation(self._control, self._stop, *self._found)
