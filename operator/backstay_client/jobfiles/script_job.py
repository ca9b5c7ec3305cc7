"""Builds a TrainingJob from a script and options.

Invalid input raises `BadInput`, whose text names the options.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

from backstay_client.errors import BadInput
from backstay_client.jobfiles.jobfile import LOCAL_IMAGE, absolute_checkpoint, localise
from backstay_spec import contract
from backstay_spec.runtime import BestMode
from backstay_spec.types import GradientCodec, ParameterCodec, UpdateMode
from backstay_spec.validation import SpecErrors, parse_job


@dataclass(frozen=True)
class ScriptOptions:
    """The options of `backstay run` for a script; None is the default of the TrainingJob, or of the field's comment.

    Attributes:
        servers: parameter servers (shards). Default: 1.
        standbys: hot standbys of each shard, 0 or 1.
        workers: all workers, including backups. Default: 2.
        gpus: the NVIDIA GPUs of each worker's pods. Default: 0, so that they compute on processors.
        pods_per_rank: the pods of each worker, whose devices JAX uses as one mesh.
        backups: a number of pods, or percents such as ``5%``.
        mode: ``Sync`` or ``Async``, in any case, and so are the codecs and ``Auto``.
        grace: a duration such as ``500ms``, or ``Auto``.
        gradients: the codec of gradients: ``Exact``, ``BFloat16``, ``Int8`` or ``Int4``.
        parameters: the codec of parameters: ``Exact`` or ``BFloat16``.
        error_feedback: whether workers add rounding errors to their next contributions.
        name: the job's name. Default: made of the script's name.
        checkpoint: a folder or an fsspec URI.
        every_steps: store a checkpoint after this many updates.
        every_seconds: store a checkpoint after this many seconds; 0: not by time.
        evaluator: whether a pod evaluates each checkpoint.
        keep_best: keep the checkpoint with the largest value of a metric, ``accuracy:Max``, or with the smallest,
            ``loss:Min``. There is an evaluator then.
        continue_from: ``SameJob`` or ``Any``: whose checkpoints in the folder the job may continue.
    """

    servers: int | None = None
    standbys: int | None = None
    workers: int | None = None
    gpus: int | None = None
    pods_per_rank: int | None = None
    backups: str | None = None
    mode: str | None = None
    grace: str | None = None
    gradients: str | None = None
    parameters: str | None = None
    error_feedback: bool | None = None
    name: str | None = None
    checkpoint: str | None = None
    every_steps: int | None = None
    every_seconds: int | None = None
    evaluator: bool | None = None
    keep_best: str | None = None
    continue_from: str | None = None

    def given(self) -> list[str]:
        """Returns the options that were given, as the user writes them."""
        return [_as_option(field.name) for field in fields(self) if getattr(self, field.name) is not None]


def job_of_script(
    script: Path, options: ScriptOptions = ScriptOptions(), arguments: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a TrainingJob that runs `script` with the default settings, validated.

    Raises:
        BadInput: the script does not exist, or an option is invalid.
    """
    if not script.is_file():
        raise BadInput(f"{script} does not exist or is not a file")
    name = name_of_script(script)
    words = [escaped(word) for word in (script.name, *arguments)]
    return job_of_command(["python", *words], options, name=name, written=_as_option)


def escaped(word: str) -> str:
    """Returns a word of a command that Kubernetes does not expand, as ``$(NAME)`` by a variable, and ``$$`` by ``$``.

    https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/
    """
    return word.replace("$", "$$")


def job_of_command(
    command: Sequence[str],
    options: ScriptOptions,
    *,
    name: str,
    image: str = LOCAL_IMAGE,
    written: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Returns a TrainingJob that runs a command with the default settings, validated.

    Args:
        command: the command of every role.
        name: the job's name, if the options have none.
        image: the image of every role.
        written: returns an option's name as the user writes it, for errors.

    Raises:
        BadInput: an option is invalid.
    """
    # Without a folder these options would have no effect, and nothing would show it.
    if options.checkpoint is None:
        for option in ("every_steps", "every_seconds", "evaluator", "keep_best", "continue_from"):
            if getattr(options, option) is not None:
                needed = f"{written(option)} needs {written('checkpoint')}"
                raise BadInput(f"{needed}, the folder or URI of the checkpoints")
    servers: dict[str, Any] = {"replicas": 1 if options.servers is None else options.servers}
    if options.standbys is not None:
        servers["standbys"] = options.standbys
    update: dict[str, Any] = {"mode": _spelled(options.mode or "Sync", UpdateMode)}
    backups = str(options.backups or "0")
    if backups != "0":
        update["backups"] = int(backups) if re.fullmatch(r"-?\d{1,9}", backups) else backups
    if options.grace is not None:
        update["grace"] = "Auto" if options.grace.lower() == "auto" else options.grace
    workers: dict[str, Any] = {"replicas": 2 if options.workers is None else options.workers}
    if options.pods_per_rank is not None:
        workers["podsPerRank"] = options.pods_per_rank
    if options.gpus is not None and (type(options.gpus) is not int or options.gpus < 0):
        raise BadInput(f"{written('gpus')} is {options.gpus!r}: must be a whole number, 0 or more")
    if options.gpus:
        limits = {"nvidia.com/gpu": str(options.gpus)}
        container = {"name": contract.CONTAINER, "resources": {"limits": limits}}
        workers["template"] = {"spec": {"containers": [container]}}
    spec: dict[str, Any] = {
        "image": image,
        "command": list(command),
        "parameterServers": servers,
        "workers": workers,
        "update": update,
    }
    wire: dict[str, Any] = {
        "gradients": None if options.gradients is None else _spelled(options.gradients, GradientCodec),
        "parameters": None if options.parameters is None else _spelled(options.parameters, ParameterCodec),
        "errorFeedback": options.error_feedback,
    }
    if wire := {name: value for name, value in wire.items() if value is not None}:
        spec["wire"] = wire
    best: dict[str, str] | None = None
    if options.keep_best is not None:
        metric, colon, extreme = (part.strip() for part in options.keep_best.rpartition(":"))
        if not colon:
            raise BadInput(
                f"{written('keep_best')} {extreme} lacks the metric or the direction: must be METRIC:Max to keep the "
                "largest value, such as accuracy:Max, or METRIC:Min"
            )
        best = {"metric": metric, "mode": _spelled(extreme, BestMode)}
    if options.evaluator or best is not None:
        spec["evaluator"] = {}
    if (checkpoint := options.checkpoint) is not None:
        uri = absolute_checkpoint(checkpoint, Path())
        more = {
            "everySteps": options.every_steps,
            "everySeconds": options.every_seconds,
            "keepBest": best,
            "continueFrom": options.continue_from,
        }
        spec["checkpoint"] = {"uri": uri, **{name: value for name, value in more.items() if value is not None}}
    job = {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": options.name or name},
        "spec": spec,
    }
    try:
        parse_job(job)
    except SpecErrors as errors:
        raise BadInput("\nerror: ".join(_of_options(str(error), written) for error in errors.errors)) from None
    return job


_WORDS = "the script with its arguments"
_OPTIONS = {
    "metadata.name": "name",
    "spec.command": _WORDS,
    "spec.parameterServers.replicas": "servers",
    "spec.parameterServers.standbys": "standbys",
    "spec.workers.replicas": "workers",
    "spec.workers.podsPerRank": "pods_per_rank",
    "spec.update.backups": "backups",
    "spec.update.mode": "mode",
    "spec.update.grace": "grace",
    "spec.wire.gradients": "gradients",
    "spec.wire.parameters": "parameters",
    "spec.wire.errorFeedback": "error_feedback",
    "spec.checkpoint.uri": "checkpoint",
    "spec.checkpoint.everySteps": "every_steps",
    "spec.checkpoint.everySeconds": "every_seconds",
    "spec.checkpoint.keepBest.metric": "keep_best",
    "spec.checkpoint.keepBest.mode": "keep_best",
    "spec.checkpoint.continueFrom": "continue_from",
}
_FIELD = re.compile("(" + "|".join(re.escape(path) + r"\b" for path in _OPTIONS) + r")(?:\[(\d+)\])?")


def _as_option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _of_options(error: str, written: Callable[[str], str]) -> str:
    """Returns an error that names the options in place of the fields that they set."""

    def option(found: re.Match[str]) -> str:
        name = _OPTIONS[found.group(1)]
        if name != _WORDS:
            return written(name)
        return name if found.group(2) is None else f"word {found.group(2)} of {name}"  # word 0 is "python"

    return _FIELD.sub(option, error).replace(": is ", " is ", 1)


def _spelled(word: str, valid: Any) -> str:
    """Returns the valid value that differs from `word` in case only; `word` itself if there is none."""
    return next((one for one in get_args(valid) if one.lower() == word.lower()), word)


def name_of_script(script: Path) -> str:
    """Returns a valid job name, from the script's name, or its folder's for a script train.py or main.py."""
    return job_name(script.resolve().parent.name if script.stem in {"train", "main"} else script.stem)


def job_name(text: str) -> str:
    """Returns a valid job name, made of a text."""
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    cleaned = re.sub(r"^[^a-z]+", "", cleaned)[:40].strip("-")
    return cleaned or "job"


def localise_script(job: dict[str, Any], script: Path) -> dict[str, Any]:
    """Returns the job of a script for this machine, which runs in the current folder as with ``python``."""
    job = localise(job, Path.cwd())
    job["spec"]["command"][1] = escaped(str(script))
    return job
