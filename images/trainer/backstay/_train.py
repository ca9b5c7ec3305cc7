"""Defines `train`, which is the same call in one process and in every pod of a job."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from backstay_spec import contract

from ._coordination import MODES
from ._data import BatchKey
from ._process import (
    Bar,
    Environment,
    Interrupts,
    Reporter,
    configure,
    on_terminal,
)
from ._result import Result
from ._script import Script
from ._update import LocalSteps, OwnGradients, default_outer
from .errors import ConfigurationError

if TYPE_CHECKING:
    import optax

    from ._checkpoint import StartFrom, StoreTo
    from ._compute import MeshAxes, ModelSharding
    from ._script import OnUpdate, StopWhen
    from ._single import AloneStorage, InterruptedAt
    from ._update import Wire

__all__ = ["initialize", "train"]

_LOG = logging.getLogger(__name__)
_CALLED: list[int] = []  # the process that called `train`; a process that it forks inherits it
_NOTICE: Final = "backstay: training stores a checkpoint after this update, and ends. Press Ctrl-C again to end now."


class _Signalled(Exception):  # noqa: N818
    """A signal ended training in one process; `train` raises `reason`."""

    def __init__(self, reason: KeyboardInterrupt | SystemExit) -> None:
        super().__init__(str(reason))
        self.reason = reason


def initialize() -> None:
    """Connect the pods of this rank, so that JAX knows all of their devices.

    A script that uses a device of JAX before it calls `train` calls this first. In a rank of one pod, in servers and in
    a single process it does nothing.

    Raises:
        ConfigurationError: in a single process, the environment is not valid.
    """
    environment: Environment | None = None
    try:
        environment = Environment.read(os.environ)
        if environment is None or environment.members == 1:
            return
        from ._pod import initialize as connect

        connect(environment)
    except Exception as error:
        if environment is None:
            raise
        from ._pod import fail

        fail(environment, error)


def train(
    *,
    init: Callable[[Any], Any],
    loss: Callable[..., Any] | None = None,
    gradients: Callable[..., Any] | None = None,
    batches: Callable[[BatchKey], Any],
    optimizer: optax.GradientTransformation | None = None,
    steps: int,
    evaluate: Callable[..., Mapping[str, float]] | None = None,
    has_state: bool = False,
    has_rng: bool = False,
    seed: int = 0,
    clip_norm: float | None = None,
    deterministic: bool = False,
    log_every: float = 5.0,
    start_from: str | os.PathLike[str] | StartFrom | None = None,
    checkpoint: str | os.PathLike[str] | StoreTo | None = None,
    on_update: OnUpdate | None = None,
    stop_when: StopWhen | None = None,
    evaluate_every: int | None = None,
    wire: Wire | None = None,
    local: LocalSteps | None = None,
    average: float | None = None,
    frozen: Any = None,
    frozen_state: Any = None,
    mesh: MeshAxes | None = None,
    sharding: ModelSharding | None = None,
) -> Result:
    """Train a model: in this process, or as one pod of a job, if the environment names a job.

    Args:
        init: ``init(key)`` returns the parameters, any pytree of arrays; with `has_state` the pair
            ``(params, state)``. `key` is ``jax.random.key(seed)``. `init` must return the same values in every pod.
        loss: ``loss(params, batch)`` returns a floating-point scalar, or ``(scalar, {name: scalar})``; with `has_state`
            ``loss(params, state, batch)`` returns ``(scalar, new_state)``, or ``(scalar, new_state, {name: scalar})``;
            with `has_rng` a key is its last argument.
        gradients: instead of `loss`, a function with the same arguments that returns ``(result, gradients)``, such as
            ``jax.value_and_grad(loss)``. `result` is what `loss` would return, and `gradients` has the tree, shapes and
            dtypes of the parameters. For gradients that are not those of one loss, such as in a GAN. For complex
            parameters, return the conjugates of what JAX computes, because optimizers of optax subtract them.
        batches: ``batches(key)`` returns the batch of a `BatchKey`, any pytree of arrays. It must be a pure function.
            Another thread calls it before the batch is needed.
        optimizer: any optax optimizer that shards can compute exactly. With `local`, this is the outer optimizer, and
            it is optional. The default is SGD with learning rate 0.7. In Sync mode, the default has Nesterov momentum
            0.9. In Async mode, it has no momentum, and contributions are weighted by ``1 / (1 + staleness)``.
        steps: the number of updates, counted from the start of the first run.
        evaluate: ``evaluate(params)`` returns ``{name: number}``; with `has_state` it is ``evaluate(params, state)``.
            `train` calls it once after the last update or, in a job with an evaluator, for each checkpoint. With
            `average`, it gets the average of the parameters.
        has_state: whether the model has a state: values that gradients do not train, such as batch statistics, any
            pytree of arrays. The new state of an update is the weighted mean of the new states of its ranks. Integers
            and booleans have no mean: the update uses those of the lowest rank.
        has_rng: whether `loss` gets a random key, `BatchKey.key`. The key depends only on (seed, step, rank), so a
            replacement of a worker gets the same key.
        seed: the seed of `init` and of the keys of batches.
        clip_norm: upper bound of the norm of the mean gradient, over all parameters; with `local`, of the mean
            contribution. `optax.clip_by_global_norm` in the inner optimizer bounds the gradients of local steps.
        deterministic: whether XLA must select kernels that give the same bits in every run.
        log_every: seconds between lines of progress. A single process on a terminal shows a progress bar instead.
        start_from: the source of the initial parameters, instead of `init`: a checkpoint of Backstay, a safetensors
            file or a folder of them, or an Orbax checkpoint. The parameters are found by their names. `StartFrom` maps
            names, or loads a part. The optimizer's state is new, and the first update makes version 1. A job that
            already has its own checkpoints continues from those.
        checkpoint: in a single process, the folder for checkpoints, or a `StoreTo`. The same script, started again,
            continues from the newest one. Ctrl-C, SIGTERM and SIGHUP store one. Without this argument, the environment
            variable ``BACKSTAY_CHECKPOINT`` can name the folder. In a job, `spec.checkpoint` decides instead.
        on_update: ``on_update(step, loss, metrics)`` is called at most once a second, and after the last update. In a
            job, the server of shard 0 calls it in another thread, so it does not delay updates. `metrics` is the mean
            over the ranks of the update of the metrics that `loss` returned.
        stop_when: ``stop_when(metrics)`` is called with the result of each evaluation, in the same process as
            `on_update`. When it returns true, training ends with the next update, and the job succeeds
            (``StoppedEarly``). A job needs an evaluator for this.
        evaluate_every: in a single process, the number of updates between two calls of `evaluate`. The default with
            `stop_when` is a twentieth of `steps`; without it, `evaluate` is called only at the end. In a job, the
            evaluator evaluates each checkpoint.
        wire: how tensors are encoded between workers and servers. In a job, `spec.wire` of the TrainingJob selects the
            encoding, and a different argument is an error. One process rounds like a job, so that you can compare
            results.
        local: optimizer steps that each worker makes by itself between two updates.
        average: the decay of an exponential moving average of the parameters, such as 0.999. The servers compute the
            average in each update, and checkpoints contain it. `evaluate` gets it, and `Result.average` has it after
            training.
        frozen: the parameters that do not train: ``frozen(name)`` returns True for the name of such a parameter, such
            as ``layers.0.kernel``; or a pytree of booleans, with the structure of the parameters or of its upper part.
            They may be arrays of any numbers. `loss` and `evaluate` get them in their places. The optimizer and
            `clip_norm` get only what trains, and have None in the places of frozen parameters. Without this argument,
            the parameters that `optimizer` provably never changes are frozen, such as those of `optax.set_to_zero`;
            the optimizer still gets their places, and `clip_norm` does not count them. ``False``: none are frozen.
        frozen_state: the arrays of the model state that keep their values, such as statistics of a base: a function or
            a pytree, as for `frozen`. ``True``: all of the state; ``False``: nothing. They do not travel, and new
            values that `loss` returns for them are not used.
        mesh: the axes of the mesh of all devices of a worker, by name, such as ``{"batch": 2, "model": 4}``; one of the
            sizes may be -1, which is the rest. Or a function that gets the devices and returns a `jax.sharding.Mesh`
            of them. Batches are divided along the first axis. Without this argument, the one axis is ``batch``.
            With `mesh` or `sharding`, `jax.shard_map` finds the mesh within `loss` and `evaluate`.
        sharding: where the parameters lie. ``"replicate"``, the default: each device has all of them. ``"fsdp"``: each
            device has a part of each large array, and gathers an array while it computes with it; batches are divided
            over all devices. Or a function of the mesh and of a pytree like the parameters, with a
            `jax.ShapeDtypeStruct` for each. It returns such a tree with a `jax.sharding.PartitionSpec` for each
            parameter or for a part of the tree; None means whole. The state of an optimizer lies as its parameters do.
            Servers do not use it. An evaluator uses both if the mesh fits its devices; otherwise `evaluate` gets whole
            arrays there, and no mesh.

    Returns:
        The last parameters and model state. `train` returns only in a single process and in workers: parameter servers
        and evaluators end their process. The job succeeds when the script of worker 0 has ended with exit code 0
        (`Result.is_leader`).

    Raises:
        ConfigurationError: an argument is invalid.
        CheckpointError: in a single process, `start_from` or the folder of `checkpoint` cannot be used, or does not fit
            `init`.
        KeyboardInterrupt: in a single process with `checkpoint`, Ctrl-C. The message names the checkpoint.
        JobFailed: in a single process, when gradients are not finite.
    """
    began = time.monotonic()
    _refuse_in_child()
    environment: Environment | None = None
    try:
        environment = Environment.read(os.environ)
        _refuse_without_jit()
        _refuse_within_mesh()
        if environment is not None:
            _once()
        mode = MODES["Sync" if environment is None else environment.config.mode]
        late = mode.uses_older_versions()
        outer, described = optimizer, ""
        if optimizer is None and isinstance(local, LocalSteps):
            outer, described = default_outer(local, late=late)
        script = Script(
            init=init,
            loss=_loss_or(gradients, loss),
            batches=batches,
            optimizer=outer,
            steps=steps,
            evaluate=evaluate,
            has_state=has_state,
            has_rng=has_rng,
            seed=seed,
            clip_norm=clip_norm,
            deterministic=deterministic,
            log_every=log_every,
            start_from=_start(start_from),
            on_update=on_update,
            stop_when=stop_when,
            evaluate_every=evaluate_every,
            wire=wire,
            local=local,
            damps=optimizer is None and late,
            outer=described,
            average=average,
            frozen=frozen,
            frozen_state=frozen_state,
            mesh=mesh,
            sharding=sharding,
        )
        if environment is None:
            return _alone(script, _store_to(checkpoint))
        from ._pod import run

        return run(environment, script, began, checkpoint)
    except _Signalled as ended:
        raise ended.reason from None  # from here, because its message says all
    except Exception as error:
        if environment is None:
            raise
        from ._pod import fail

        fail(environment, error)


def _refuse_without_jit() -> None:
    """Training compiles ahead of time, which JAX then refuses with a message about an internal path."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.config.jax_disable_jit:
        raise ConfigurationError(
            "jit is disabled, by JAX_DISABLE_JIT or jax.disable_jit(), and train compiles loss ahead of time: enable "
            "it. To debug without it, call loss(params, batch) by itself; jax.debug.print and jax.debug.breakpoint "
            "work in train"
        )


def _refuse_within_mesh() -> None:
    """
    Raises:
        ConfigurationError: `train` is called within `jax.set_mesh` of a mesh whose axes have the type ``Explicit``.
    """
    jax = sys.modules.get("jax")
    if jax is None:
        return
    axes = jax.sharding.get_abstract_mesh()
    explicit = [name for name, kind in zip(axes.axis_names, axes.axis_types, strict=True) if "Explicit" in str(kind)]
    if explicit:
        raise ConfigurationError(
            f"train is called within jax.set_mesh of a mesh whose axis {explicit[0]!r} is of the type Explicit: call "
            "it outside, and pass mesh= to train"
        )


def _refuse_in_child() -> None:
    """`multiprocessing` imports the script again in each process that it spawns, which is not the pod and must not
    train in its place.

    Raises:
        ConfigurationError: this is such a process, or one that the pod's process forked after it had called `train`.
    """
    processes = sys.modules.get("multiprocessing.process")
    # True while a spawned process imports the script; Python's own check of the same mistake reads it too.
    spawned = processes is not None and getattr(processes.current_process(), "_inheriting", False)
    if spawned or (_CALLED and _CALLED[0] != os.getpid()):
        raise ConfigurationError(
            "train was called in a process that multiprocessing started. Such a process imports or continues the "
            "script: call train under `if __name__ == '__main__':`, and only in the first process."
        )


def _once() -> None:
    """A pod has one role in one job, whose servers leave when it is done.

    Raises:
        ConfigurationError: this process has called `train` before.
    """
    if _CALLED:
        raise ConfigurationError(
            "train was called a second time in one pod: a job trains once. For several stages make several jobs; each "
            "of them may start from what backstay.load returns for the previous job."
        )
    _CALLED.append(os.getpid())


def _loss_or(gradients: Any, loss: Any) -> Any:
    """
    Raises:
        ConfigurationError: not exactly one of both is given, or `gradients` is not a function.
    """
    if (gradients is None) == (loss is None):
        raise ConfigurationError("train needs either loss or gradients: give one of them")
    if gradients is None:
        return loss
    if not callable(gradients):
        raise ConfigurationError(f"gradients is {type(gradients).__name__}: must be a function")
    return OwnGradients(gradients)


def _start(start_from: str | os.PathLike[str] | StartFrom | None) -> StartFrom | None:
    if start_from is None:
        return None
    from ._checkpoint import StartFrom

    return start_from if isinstance(start_from, StartFrom) else StartFrom(_path("start_from", start_from, "StartFrom"))


def _store_to(checkpoint: str | os.PathLike[str] | StoreTo | None) -> StoreTo | None:
    """Returns the place where one process stores checkpoints, or None if it stores none."""
    checkpoint = checkpoint or os.environ.get(contract.ENV_CHECKPOINT) or None
    if checkpoint is None:
        return None
    from ._checkpoint import StoreTo

    return checkpoint if isinstance(checkpoint, StoreTo) else StoreTo(_path("checkpoint", checkpoint, "StoreTo"))


def _path(name: str, value: Any, other: str) -> str:
    try:
        path: str = os.fspath(value)
        return path
    except TypeError:
        raise ConfigurationError(
            f"{name} is {value!r:.200}: must be a path, a URI or a backstay.{other}, or None"
        ) from None


def _alone(script: Script, to: StoreTo | None) -> Result:
    from ._coordination import Rate
    from ._report import EpochLines, Throttle
    from ._script import check_alone, evaluated
    from ._single import AloneStorage, InterruptedAt, StepReport, train_alone

    bar = Bar(sys.stderr, script.steps) if on_terminal(sys.stderr) else None
    configure("text", "", "", bar)
    if script.outer:
        _LOG.info("outer optimizer: %s", script.outer)
    batches = script.batches_of_update
    reporter, rate, throttle = Reporter(script.log_every, script.steps, batches, bar), Rate(), Throttle()
    epochs = EpochLines(script.log_every)
    every = script.evaluate_every or (max(1, script.steps // 20) if script.stop_when is not None else 0)
    evaluation: tuple[int | None, dict[str, float]] = None, {}

    def on_update(update: StepReport) -> bool:
        nonlocal evaluation
        now = time.monotonic()
        rate.add(now, update.examples if update.applied else 0)
        stops, last = False, update.step == script.steps
        if update.model is not None and not last:
            params, state = update.model
            with reporter.without_bar():
                metrics = evaluated(script, params, state)
                if metrics:
                    evaluation = update.step, metrics
                    _log_evaluation(update.step, metrics)
                    stops = script.stop_when is not None and bool(script.stop_when(metrics))
        if last or stops or reporter.due(now):  # reading the loss takes its time
            reporter.report(now, update.step, update.loss, rate.per_second(now), update.metrics, force=last or stops)
        if script.on_update is not None and throttle.due(now, force=last or stops):
            with reporter.without_bar():
                script.on_update(update.step, update.loss, update.metrics)
        for epoch in update.ended:
            epochs.ended(now, epoch, update.step)
        if stops:
            _LOG.info("stop_when ends training: the evaluation of step %d", update.step)
        return stops

    try:
        plan = check_alone(script, stores=to is not None)
        if to is None or plan is None:
            result = train_alone(script, model_every=every, on_update=on_update)
        else:
            with AloneStorage(script, plan, to, evaluation=lambda: evaluation) as storage:
                result = train_alone(
                    script,
                    model_every=every,
                    on_update=on_update,
                    storage=storage,
                    interrupts=Interrupts(_NOTICE),
                )
    except InterruptedAt as signalled:
        raise _Signalled(_reason(signalled, storage)) from None
    finally:
        epochs.close()
        if bar is not None:
            bar.leave()
    if result.metrics:
        _log_evaluation(result.step, result.metrics)
    return result


def _reason(signalled: InterruptedAt, storage: AloneStorage) -> KeyboardInterrupt | SystemExit:
    """Returns the exception that ends `train` after a signal, as in any script. Those of SIGTERM and SIGHUP are
    logged."""
    step = signalled.step
    if storage.stored == step:
        text = f"training ended after step {step}, which is stored in {storage.newest}: the same command continues"
    elif not storage.error:
        text = "training ended before its first update"
    else:
        kept = f"the newest checkpoint is of step {storage.stored}" if storage.newest else "there is no checkpoint"
        text = f"training ended after step {step}, which could not be stored: {storage.error}; {kept}"
    if signalled.number == signal.SIGINT:
        return KeyboardInterrupt(text)
    _LOG.info("%s", text)
    return SystemExit(128 + signalled.number)


def _log_evaluation(step: int, metrics: Mapping[str, float]) -> None:
    shown = "  ".join(f"{name} {value:.6g}" for name, value in metrics.items())
    _LOG.info("evaluation of step %d  %s", step, shown)
