"""Runs one pod of a job, from the arguments of `train` to the termination message of the pod."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

from backstay_rpc.refusals import RefusalCode
from backstay_spec import contract
from backstay_spec.contract import AFTER_TRAINING_FAILED, STOPPED_EARLY
from backstay_spec.names import ROLE_OF_LABEL

from .. import _faults, _instrument
from .._process import (
    SIGTERM_EXIT,
    Environment,
    Stop,
    configure,
    describe,
    end_after_script,
    end_process,
    exit_status,
    hand_over,
    keep_output,
    printed,
    show_role,
    write_termination,
)
from .._report import PodMetrics, process_age
from ..errors import BackstayError, CheckpointError, ConfigurationError, JobFailed, Refused, StorageError
from ._devices import use_devices
from ._formation import end_in_order, form_rank
from ._lifecycles import PodRunner

if TYPE_CHECKING:
    from .._result import Result
    from .._roles import Worker
    from .._script import Script
    from .._update import Wire

__all__ = ["fail", "initialize", "run"]

_LOG = logging.getLogger(__name__)
_FIRST: Final = 0.5  # seconds
_RETURNED: Final = threading.Event()


def initialize(environment: Environment) -> None:
    """Connect the pods of this rank now, and not in `run`. Raises as `form_rank`."""
    configure(environment.config.log_format, environment.name, environment.job)
    stop = Stop()
    stop.install()
    try:
        form_rank(environment, stop)
    finally:
        stop.release()


def run(environment: Environment, script: Script, began: float, checkpoint: object) -> Result:
    """Run the pod of this environment. Only workers return; the process of every other role ends.

    Args:
        began: when `train` was called, in seconds of `time.monotonic`.
        checkpoint: the argument `checkpoint` of `train`, which is for a single process.

    Raises:
        Exception: `fail` reports it.
    """
    from .._script import warn_of_plan

    configure(environment.config.log_format, environment.name, environment.job)
    _explain_unused(environment, checkpoint)
    if script.outer and environment.role == contract.ROLE_SERVER and environment.index == 0:
        _LOG.info("outer optimizer: %s", script.outer)
    if environment.most_steps is not None:
        script = replace(script, steps=min(script.steps, environment.most_steps))
    _faults.install(environment, os.environ)
    keep_output()
    if not environment.config.trace_megabytes:
        _instrument.keep(0)
    show_role(environment, standby=environment.standby)
    if script.stop_when is not None and not environment.config.evaluator:
        raise ConfigurationError(
            "stop_when needs evaluations, but this job has no evaluator: set spec.evaluator, or use "
            "backstay run --evaluator"
        )
    if script.evaluate is None and environment.config.evaluator:
        raise ConfigurationError(
            "this job has an evaluator, but train was called without evaluate: pass evaluate, or remove "
            "spec.evaluator and spec.checkpoint.keepBest (of `backstay run`: --evaluator and --keep-best)"
        )
    stop = Stop()
    stop.install()
    metrics = PodMetrics(environment.job, ROLE_OF_LABEL[environment.role], environment.index)
    if environment.role != contract.ROLE_WORKER and environment.checkpoint_uri is not None:
        from .._checkpoint import open_folder

        # An unknown scheme ends the job before JAX is imported and anything is compiled.
        open_folder(environment.checkpoint_uri)
    _share_compilations()
    members = form_rank(environment, stop)
    script = replace(script, spans=members.count > 1)
    use_devices(environment.role, os.environ)
    try:
        plan = script.plan(environment.config.shards, _wire_of(environment), environment.config.pods_per_rank)
    except SystemExit as end:
        _report_exit(environment, stop, end)
        raise
    if environment.role == contract.ROLE_SERVER and environment.index == 0 and not environment.standby:
        warn_of_plan(plan, script.local)
    now = time.monotonic()
    _LOG.debug("planned after %.2f s", now - began)
    _instrument.record("start", now - process_age(), now)
    pod = PodRunner(environment, script, plan, stop, metrics, members)
    if environment.role == contract.ROLE_EVALUATOR:
        _evaluate(pod)
    if environment.role == contract.ROLE_SERVER:
        end_after_script(pod.serve(), stop)
    return _work(pod)


def _work(pod: PodRunner) -> Result:
    from .._roles import Stopped

    environment = pod.environment
    worker: Worker | None = None
    try:
        if environment.trained is None:
            worker = pod.worker()
            result = pod.work(worker)
        else:
            result = pod.restore(environment.trained)
    except Stopped:
        write_termination(environment.termination_log, _last_message(worker))
        end_in_order()  # the pods of a rank have agreed on it
        pod.stop.call_script()
        sys.exit(SIGTERM_EXIT)
    except SystemExit as end:
        _report_exit(environment, pod.stop, end, {} if worker is None else worker.position)
        if environment.members == 1:
            raise
        # The end of an interpreter would wait in JAX for the other pods, which wait for this one.
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
        end_process(exit_status(end))
    except Exception as error:  # noqa: BLE001  # the end of this process
        if worker is None:
            pod.members.settle(error)
        fail(environment, error, {} if worker is None else worker.position)
    ended = {"step": result.step, "checkpoint": result.checkpoint or "", "metrics": dict(result.metrics)}
    ended |= _last_message(worker)
    if result.step < pod.script.steps and "reason" not in ended:
        ended["reason"] = STOPPED_EARLY
    hand_over(environment.termination_log, ended, pod.stop, pod.members.settle)
    _RETURNED.set()
    end_in_order()
    return result


def _report_exit(
    environment: Environment, stop: Stop, end: SystemExit, position: Mapping[str, int] | None = None
) -> None:
    """Write the termination message for ``sys.exit`` of a function of the script; none for an exit status of 0."""
    if exit_status(end) == 0 or stop.requested.is_set():
        return
    how = f"the script called sys.exit({end.code!r:.200}) in a function of train"
    write_termination(environment.termination_log, {**describe(end).fields(), "message": how, **(position or {})})


def _evaluate(pod: PodRunner) -> NoReturn:
    from .._roles import Stopped

    try:
        ended = pod.evaluate()
    except Stopped:
        end_after_script(SIGTERM_EXIT, pod.stop)
    write_termination(pod.environment.termination_log, ended)
    end_after_script(0, pod.stop)


def _explain_unused(environment: Environment, checkpoint: object) -> None:
    """In a job, only the TrainingJob selects the folder, because the operator mounts and watches it."""
    if checkpoint is None or environment.role != contract.ROLE_SERVER or environment.index != 0:
        return
    if environment.checkpoint_uri is None:
        _LOG.warning(
            "this job stores no checkpoints: the argument checkpoint of train is for a single process. Set "
            "spec.checkpoint of the TrainingJob, or use backstay run --checkpoint"
        )
    else:
        _LOG.info(
            "the argument checkpoint of train is for a single process: this job stores checkpoints in %s, as "
            "spec.checkpoint says",
            environment.checkpoint_uri,
        )


def _last_message(worker: Worker | None) -> dict[str, Any]:
    return {} if worker is None else worker.last_message


def _wire_of(environment: Environment) -> Wire:
    from .._update import Wire

    wire = environment.config.wire
    return Wire(wire.gradients, wire.parameters, wire.error_feedback)


def _share_compilations() -> None:
    """Keep short compilations in the cache too, if the environment names one. A replacement starts with them.

    https://docs.jax.dev/en/latest/persistent_compilation_cache.html
    """
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        import jax

        if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # type: ignore[no-untyped-call]
        if "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES" not in os.environ:
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)  # type: ignore[no-untyped-call]


def fail(environment: Environment, error: Exception, position: Mapping[str, int] | None = None) -> NoReturn:
    """End the pod: a traceback for an exception of the script, one line for an error that Backstay raised itself.

    Args:
        position: the version that a worker received last, for the termination message.
    """
    # The notes that JAX adds to an exception explain its traceback, which is in the log.
    fields = {**describe(error).fields(), **(position or {})}
    if isinstance(error, BackstayError) and not isinstance(error, ConfigurationError):
        fields.pop("traceback")
        print(f"backstay: {environment.name}: {error}", file=sys.stderr, flush=True)
    else:
        sys.stderr.write(printed(error))
    if isinstance(error, JobFailed):
        fields |= {"reason": error.reason, "message": error.message}
    elif _RETURNED.is_set():
        fields["result"] = AFTER_TRAINING_FAILED
    elif environment.role == contract.ROLE_SERVER and isinstance(error, ConfigurationError | CheckpointError):
        # Another start would end the same way, but a failing storage may work by then.
        if not isinstance(error, StorageError):
            fields["result"] = "Failed"
    elif isinstance(error, ConfigurationError) or (isinstance(error, Refused) and error.code == RefusalCode.INVALID):
        # A replacement would be refused too; whether that ends the job depends on whether the others train.
        fields["result"] = "Refused"
    write_termination(environment.termination_log, fields)
    if environment.role == contract.ROLE_WORKER and environment.members == 1:
        raise SystemExit(1) from None
    # The other pods of a rank end now. The end of an interpreter would wait for them in JAX.
    if environment.members > 1 and environment.member == 0:
        time.sleep(_FIRST)  # JAX aborts the other processes when this one ends, and they may write their messages
    end_process(1)
