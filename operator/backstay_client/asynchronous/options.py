"""Turns what a user submits into a TrainingJob and its code."""

from __future__ import annotations

import copy
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from backstay_client.code.sources import SourceFiles, of_function, of_script
from backstay_client.errors import BadInput
from backstay_client.finding.clusters import FoundCluster
from backstay_client.jobfiles.jobfile import (
    LOCAL_IMAGE,
    check,
    folder_of,
    localise,
    read_job,
    relative_checkpoint,
    with_name,
    with_variables,
)
from backstay_client.jobfiles.script_job import ScriptOptions, escaped, job_of_command
from backstay_spec import contract
from backstay_spec.merge import merged
from backstay_spec.types import TrainingJob
from backstay_spec.whole import whole

__all__ = ["Submission", "SubmitOptions", "submission_of"]

_CHECKPOINTS = "checkpoints"
_FIELDS = {field.name for field in dataclasses.fields(ScriptOptions)}


class SubmitOptions(TypedDict, total=False):
    """The options of `Client.submit` and `Client.sweep`, which make the TrainingJob of a function or a script.

    They are those of ``backstay run``, and these:

    - `args`: the arguments. Of a function: a mapping of keyword arguments that JSON can hold. Of a script: a list of
      words, or a mapping of options.
    - `checkpoint`: a folder, any fsspec URI, or a mapping: `spec.checkpoint` of the TrainingJob.
    - `image`: the image of all pods. An embedded cluster needs none.
    - `env`: environment variables of all pods, by name.
    - `labels`: labels of the TrainingJob.
    - `spec`: fields of `spec` that no option has, which are merged over the others.
    """

    args: Mapping[str, Any] | Sequence[str] | None
    name: str | None
    workers: int | None
    gpus: int | None
    pods_per_rank: int | None
    servers: int | None
    standbys: int | None
    backups: int | str | None
    mode: str | None
    grace: str | None
    gradients: str | None
    parameters: str | None
    error_feedback: bool | None
    checkpoint: str | Path | Mapping[str, Any] | None
    every_steps: int | None
    every_seconds: int | None
    evaluator: bool | None
    keep_best: str | None
    continue_from: str | None
    image: str | None
    env: Mapping[str, str] | None
    labels: Mapping[str, str] | None
    spec: Mapping[str, Any] | None


@dataclass(frozen=True)
class Submission:
    """The objects to create.

    Attributes:
        job: a valid TrainingJob with a namespace.
        config_map: its code; None: it has none, or names a ConfigMap that exists.
    """

    job: dict[str, Any]
    config_map: dict[str, Any] | None


def submission_of(
    what: Callable[..., Any] | str | Path | TrainingJob | Mapping[str, Any],
    options: Mapping[str, Any],
    cluster: FoundCluster,
    image: str | None = None,
) -> Submission:
    """Returns the TrainingJob to create, and its code.

    Args:
        what: a function, the path of a script (.py) or of a TrainingJob (.yaml), or a TrainingJob.
        options: see `SubmitOptions`.
        cluster: the cluster that gets the job.
        image: the image of all pods, if the options have none.

    Raises:
        BadInput: the input is invalid.
    """
    if unknown := sorted(set(options) - _FIELDS - {"args", "image", "env", "labels", "spec"}):
        raise BadInput(
            f"{unknown[0]}= is not an option: must be one of {', '.join(sorted(SubmitOptions.__annotations__))}"
        )
    if isinstance(what, TrainingJob | Mapping) or (isinstance(what, str | Path) and Path(what).suffix != ".py"):
        return Submission(_whole_job(what, options, cluster), None)
    sources = of_script(Path(what)) if isinstance(what, str | Path) else of_function(what)
    return _of_sources(sources, options, cluster, image)


def _whole_job(what: Any, options: Mapping[str, Any], cluster: FoundCluster) -> dict[str, Any]:
    given = sorted(
        name for name, value in options.items() if value is not None and name not in {"name", "labels", "env"}
    )
    if given:
        raise BadInput(f"{given[0]}= is for a function or a script: change the TrainingJob instead")
    folder = Path.cwd()
    if isinstance(what, str | Path):
        folder, job = folder_of(Path(what)), read_job(Path(what))
    elif isinstance(what, TrainingJob):
        job = what.to_dict()
        job.pop("status", None)
    else:
        job = copy.deepcopy(dict(what))
    job.setdefault("apiVersion", contract.API_VERSION)
    job.setdefault("kind", contract.KIND)
    metadata = job.setdefault("metadata", {})
    if options.get("name") is not None:
        metadata["name"] = options["name"]
    job = with_name(job)
    if cluster.folder is not None and isinstance(what, str | Path) and not (job["spec"].get("code") or {}):
        job = localise(job, folder)  # as `backstay run` does
    return _finished(job, options, cluster)


def _of_sources(
    sources: SourceFiles, options: Mapping[str, Any], cluster: FoundCluster, image: str | None
) -> Submission:
    embedded = cluster.folder is not None
    image = options.get("image") or image or (LOCAL_IMAGE if embedded else None)
    if image is None:
        raise BadInput(
            "image= is missing: must be the name of a trainer image that the cluster can pull, for this call or for "
            "the whole client: Client(image=...)"
        )
    checkpoint = options.get("checkpoint")
    chosen: dict[str, Any] = {name: whole(options.get(name)) for name in _FIELDS - {"checkpoint"}}
    if chosen["backups"] is not None:
        chosen["backups"] = str(chosen["backups"])
    if chosen["name"] == "":
        raise BadInput("name='' is empty: must be a name, or None for the name of the function or the script")
    name = chosen["name"] or sources.name
    suffix = secrets.token_hex(3)
    if checkpoint is None and cluster.folder is not None:
        # So that the job has a result. Another job of this name, such as one of replace=, must not continue it. A
        # trial of a sweep that is started again does.
        own = (options.get("labels") or {}).get(contract.LABEL_SWEEP_ID) or suffix
        checkpoint = cluster.folder / _CHECKPOINTS / f"{name}-{own}"
    parts = dict(checkpoint) if isinstance(checkpoint, Mapping) else None
    text = None if checkpoint is None or parts is not None else str(checkpoint)
    if parts is not None and not (parts.get("uri") or parts.get("volume")):
        raise BadInput(f"checkpoint={parts!r:.200} names no place: must have uri or volume")
    if text is not None and not embedded and relative_checkpoint({"spec": {"checkpoint": {"uri": text}}}) is not None:
        raise BadInput(
            f"checkpoint={text!r} is a relative path, and pods of {cluster.name} have another folder: must be a URI "
            "such as s3://bucket/folder, an absolute path, or {'volume': {...}}"
        )
    command = sources.command(options.get("args"), Path.cwd() if embedded else None)
    # A whole spec.checkpoint replaces the options about checkpoints, whose place it is not checked with.
    stand_in = "/stand-in" if parts is not None else text
    words = [escaped(word) for word in command]
    job = job_of_command(words, ScriptOptions(**{**chosen, "checkpoint": stand_in}), name=name, image=image)
    spec = job["spec"]
    if parts is not None:
        spec["checkpoint"] = {**{key: value for key, value in spec["checkpoint"].items() if key != "uri"}, **parts}
    namespace = cluster.namespace
    config_map = sources.config_map(f"{name}-code-{suffix}", namespace)
    config_map["metadata"]["labels"] = {contract.LABEL_JOB: name}
    spec["code"] = {"configMap": config_map["metadata"]["name"]}
    if options.get("spec"):
        job["spec"] = merged(spec, dict(options["spec"]))
    return Submission(_finished(job, options, cluster), config_map)


def _finished(job: dict[str, Any], options: Mapping[str, Any], cluster: FoundCluster) -> dict[str, Any]:
    """Returns the job with its namespace, labels and variables, checked."""
    metadata = job["metadata"]
    metadata.setdefault("namespace", cluster.namespace)
    if labels := options.get("labels"):
        metadata["labels"] = {**(metadata.get("labels") or {}), **labels}
    if variables := options.get("env"):
        reserved = next((name for name in variables if name.startswith(contract.ENV_PREFIX)), None)
        if reserved is not None:
            raise BadInput(f"env: {reserved}: variables that begin with {contract.ENV_PREFIX} are set by the operator")
        job = with_variables(job, {name: str(value) for name, value in variables.items()})
    check(job, "the TrainingJob")
    return job
