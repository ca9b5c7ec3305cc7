"""Reads a TrainingJob from a YAML file, and prepares it for the embedded cluster.

Invalid input raises `BadInput`. The command prints its message and ends with exit status 2.
"""

from __future__ import annotations

import ast
import copy
import json
import re
import secrets
import shlex
import sys
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from backstay_client.errors import BadInput
from backstay_client.jobfiles import bounded_yaml
from backstay_spec import contract
from backstay_spec.advice import args_without_command
from backstay_spec.crd_check import display
from backstay_spec.errors import SpecError
from backstay_spec.places import refusal
from backstay_spec.validation import SpecErrors, parse_job

LOCAL_IMAGE = "backstay.dev/trainer:local"  # the embedded cluster runs every image with this machine's Python


_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")


def is_standard_input(path: Path) -> bool:
    """Returns whether the file is what is piped into the command."""
    return str(path) in {"-", "/dev/stdin"}


def folder_of(path: Path) -> Path:
    """Returns the folder that relative paths of a file start at, which is the current one for standard input."""
    return Path.cwd() if is_standard_input(path) else path.resolve().parent


def read_job(path: Path) -> dict[str, Any]:
    """Returns the TrainingJob in a YAML or JSON file, or in standard input for ``-``, validated.

    A relative `checkpoint.uri` becomes absolute, starting at the file's folder.

    Raises:
        BadInput: the file cannot be read, is not YAML, does not hold exactly one TrainingJob, or holds an invalid one.
    """
    loaded = load_job(path)
    return with_name(validated(loaded, path))


def with_name(job: dict[str, Any]) -> dict[str, Any]:
    """Returns a valid job with a name. Without one, it is its `generateName` and five random characters."""
    metadata = job["metadata"]
    if metadata.get("name") or not metadata.get("generateName"):
        return job
    random = "".join(secrets.choice(_RANDOM) for _ in range(5))
    return {**job, "metadata": {**metadata, "name": f"{metadata['generateName'][:_LONGEST_NAME]}{random}"}}


_RANDOM = "bcdfghjklmnpqrstvwxz2456789"  # without vowels, so that no words are made
_LONGEST_NAME = 35


def validated(loaded: LoadedJob, path: Path) -> dict[str, Any]:
    """Returns the job of a file, validated and with an absolute `checkpoint.uri`.

    Raises:
        BadInput: the job is invalid.
    """
    absolute = with_absolute_checkpoint(loaded.job, folder_of(path))
    check(absolute, str(path), loaded.written)
    found: dict[str, Any] = absolute
    return found


@dataclass(frozen=True)
class LoadedJob:
    """The objects in a file.

    Attributes:
        job: its one TrainingJob, as it was written.
        others: its other objects, in their order.
        written: the text of each scalar of the job that YAML does not take as a string, by its path.
    """

    job: Any
    others: tuple[dict[str, Any], ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)


def load_job(path: Path) -> LoadedJob:
    """Returns the one TrainingJob in a file, and the other objects beside it.

    Raises:
        BadInput: the file cannot be read, is not YAML, or does not hold exactly one TrainingJob.
    """
    refuse_other_files(path)
    text = _text_of(path)
    if (is_standard_input(path) or not path.is_file()) and _is_python(text):
        raise BadInput(f"{path} holds a Python script: each pod reads its script from a file, so it must be one (.py)")
    try:
        documents = bounded_yaml.load_all(text)
        scalars = bounded_yaml.scalars_of_all(text)
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {error}") from None
    except ValueError as error:
        raise BadInput(f"{path} holds an invalid value: {error}") from None
    documents, texts = _flat(documents, scalars)
    known = [number for number, document in enumerate(documents) if document is not None]
    jobs = [
        number
        for number in known
        if not isinstance(documents[number], dict) or documents[number].get("kind") == contract.KIND
    ]
    if len(known) == 1:
        jobs = known
    if len(jobs) != 1:
        raise BadInput(f"{path} holds {len(jobs)} TrainingJobs: must hold exactly one")
    beside = [number for number in known if number != jobs[0]]
    for number in beside:
        _check_other(f"{path}: document {number + 1}", documents[number], texts[number])
    return LoadedJob(documents[jobs[0]], tuple(documents[number] for number in beside), texts[jobs[0]])


def _check_other(place: str, found: Mapping[str, Any], written: Mapping[str, str]) -> None:
    """Raises `BadInput` if an object beside the job has a form that no API server takes."""
    for name in ("apiVersion", "kind"):
        if not isinstance(found.get(name), str):
            raise BadInput(f"{place}: {name} is {found.get(name)!r}: must be a string")
    place = f"{place}, a {found['kind']}"
    meta = found.get("metadata")
    if not isinstance(meta, Mapping) or not isinstance(meta.get("name") or meta.get("generateName"), str):
        raise BadInput(f"{place}: metadata is {meta!r}: must be a mapping with a name")
    texts = {"Secret": ("data", "stringData"), "ConfigMap": ("data",)}.get(found["kind"], ())
    for name in texts:
        values = found.get(name) or {}
        if not isinstance(values, Mapping):
            raise BadInput(f"{place}: {name} is {values!r}: must be a mapping")
        for key, value in values.items():
            if not isinstance(value, str):
                text = written.get(f"{name}.{key}", str(value))
                raise BadInput(f"{place}: {name}.{key} is {value!r}: must be a string: write {json.dumps(text)}")


def _flat(documents: Sequence[Any], scalars: Sequence[Mapping[str, str]]) -> tuple[list[Any], list[Mapping[str, str]]]:
    """Returns the documents, and the items of each ``kind: List`` in its place."""
    objects, texts = list[Any](), list[Mapping[str, str]]()
    for document, written in zip(documents, scalars, strict=True):
        items = document.get("items") if isinstance(document, dict) and document.get("kind") == "List" else None
        if not isinstance(items, list):
            objects.append(document)
            texts.append(written)
            continue
        for number, item in enumerate(items):
            begin = f"items[{number}]."
            objects.append(item)
            texts.append({path.removeprefix(begin): text for path, text in written.items() if path.startswith(begin)})
    return objects, texts


def _text_of(path: Path) -> str:
    try:
        return sys.stdin.buffer.read().decode() if is_standard_input(path) else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        why = f"{error.reason} at byte {error.start}: must be a script (.py) or a TrainingJob (.yaml)"
        raise BadInput(f"{path} is not UTF-8 text: {why}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None


def is_script(path: Path) -> bool:
    """Returns whether a file is a Python script, by the end of its name, or else by its content."""
    if path.suffix == ".py":
        return True
    if path.suffix in {".yaml", ".yml", ".json", ".ipynb"} or is_standard_input(path) or not path.is_file():
        return False
    try:
        with tokenize.open(path) as file:  # in the encoding that Python reads it in
            return _is_python(file.read())
    except (OSError, ValueError, SyntaxError):  # a UnicodeDecodeError is a ValueError
        return False


def _is_python(text: str) -> bool:
    if text.startswith("#!"):
        return "python" in text.partition("\n")[0]
    try:
        ast.parse(text)
    except (ValueError, SyntaxError):
        return False
    # A short YAML file may be valid Python: `kind: TrainingJob` is an annotation.
    try:
        documents = bounded_yaml.load_all(text)
    except (yaml.YAMLError, ValueError):
        return True
    return not any(isinstance(document, dict) and document for document in documents)


def refuse_other_files(path: Path) -> None:
    """Refuse a path that is not a TrainingJob and would only give confusing errors.

    Raises:
        BadInput: the path is that of a folder, a notebook or a script.
    """
    if path.is_dir():
        raise BadInput(f"{path} is a folder: must be the path of a training script (.py) or a TrainingJob (.yaml)")
    if path.suffix == ".ipynb":
        raise BadInput(
            f"{path} is a notebook: backstay runs Python scripts (.py) and TrainingJobs (.yaml). Convert the notebook "
            f"with `jupyter nbconvert --to script {shlex.quote(str(path))}`, and run the script."
        )
    if is_script(path):
        raise BadInput(f"{path} is a Python script: this command reads TrainingJobs (.yaml)")


def with_absolute_checkpoint(job: Any, folder: Path) -> Any:
    """`job`, and where its `checkpoint.uri` is a relative path, a copy with that path below `folder`."""
    uri = relative_checkpoint(job)
    if uri is None:
        return job
    job = copy.deepcopy(job)
    job["spec"]["checkpoint"]["uri"] = absolute_checkpoint(uri, folder)
    return job


def relative_checkpoint(job: Any) -> str | None:
    """Returns the `checkpoint.uri` of a job, validated or not, if it is a relative path, which a cluster refuses."""
    for key in ("spec", "checkpoint", "uri"):
        job = job.get(key) if isinstance(job, dict) else None
    return job if isinstance(job, str) and job and not job.startswith("/") and _URI.match(job) is None else None


def absolute_checkpoint(uri: str, folder: Path) -> str:
    """Returns a URI as it is, and a path as one below `folder`."""
    if _URI.match(uri):
        return uri
    if (why := refusal(uri)) is not None:
        raise BadInput(why)
    return str((folder / Path(uri).expanduser()).resolve())


_IN_QUOTES = re.compile(r'; write ".*?" in quotes')


def check(job: Any, where: str, written: Mapping[str, str] = MappingProxyType({})) -> None:
    """Refuse an invalid TrainingJob with all its mistakes, one per line.

    Args:
        written: `LoadedJob.written`; the advice to quote a value quotes what the user wrote.

    Raises:
        BadInput: the job is invalid.
    """
    try:
        parse_job(job)
    except SpecErrors as errors:
        lines = "".join(f"\n  {_as_written(error, written)}" for error in errors.errors)
        count = f"{len(errors.errors)} mistakes" if len(errors.errors) > 1 else "a mistake"
        raise BadInput(f"{where} has {count}:{lines}") from None


def _as_written(error: SpecError, written: Mapping[str, str]) -> str:
    text = written.get(error.path)
    return str(error) if text is None else _IN_QUOTES.sub(lambda _: f"; write {display(text)} in quotes", str(error))


def variables_of(settings: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that ``--env`` sets by ``NAME=VALUE``, or by ``NAME`` with its value in `environ`.

    Raises:
        BadInput: a name is invalid, or has no value in `environ`.
    """
    found: dict[str, str] = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not name or not name.isascii() or not name.isprintable():
            raise BadInput(f"--env {setting!r} has no valid name: must be NAME=VALUE, or NAME for the current value")
        if name.startswith(contract.ENV_PREFIX):
            raise BadInput(f"--env {name}: variables that begin with {contract.ENV_PREFIX} are set by the operator")
        if not equals:
            if name not in environ:
                raise BadInput(f"--env {name}: the variable is not set here; set it, or write --env {name}=VALUE")
            value = environ[name]
        found[name] = value
    return found


def with_variables(job: dict[str, Any], variables: Mapping[str, str]) -> dict[str, Any]:
    """Returns a copy of `job` with these variables in every pod. They replace the job's own of the same name."""
    if not variables:
        return job
    job = copy.deepcopy(job)
    kept = [entry for entry in job["spec"].get("env") or [] if entry.get("name") not in variables]
    job["spec"]["env"] = [*kept, *({"name": name, "value": value} for name, value in variables.items())]
    return job


def localise(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the same job for this machine, with a relative or missing `workingDir` taken from `folder`, which is also
    the `code`."""
    job = copy.deepcopy(job)
    spec = job["spec"]
    spec.pop("code", None)
    # A Path joined with an absolute one is the absolute one.
    spec["workingDir"] = str((folder / (spec.get("workingDir") or ".")).resolve())
    metadata = job.setdefault("metadata", {})
    metadata["namespace"] = metadata.get("namespace") or "default"
    job.pop("status", None)
    return job


def refuse_what_cannot_run(job: dict[str, Any], path: Path) -> None:
    """Refuse a valid job that would wait indefinitely on this machine, or fail in each pod.

    Raises:
        BadInput: the job is suspended, has arguments and no command, or its checkpoint folder is a file or needs a
            package that is not installed.
    """
    uri = (job["spec"].get("checkpoint") or {}).get("uri")
    if isinstance(uri, str):
        _refuse_checkpoint_folder(uri)
    if (job["spec"].get("runPolicy") or {}).get("suspend"):
        raise BadInput(
            f"{path}: spec.runPolicy.suspend is true, so the job would create no pods and never end. Set it to false, "
            "or use `backstay up` and kubectl"
        )
    for text in args_without_command(parse_job(job).spec):
        raise BadInput(f"{path}: {text}")


def _refuse_checkpoint_folder(uri: str) -> None:
    try:
        is_file = Path(uri.removeprefix("file://")).is_file()
    except OSError as error:
        raise BadInput(f"the checkpoint folder {uri} cannot be read: {error.strerror}") from None
    if is_file:
        raise BadInput(f"the checkpoint folder {uri} is a file: must be a folder, or a path that does not exist")
    scheme = uri.partition("://")[0].rpartition("::")[2]
    if "://" not in uri or scheme == "file":
        return
    try:
        import fsspec
    except ImportError:
        return
    try:
        fsspec.get_filesystem_class(scheme)
    except (ImportError, ValueError) as error:
        raise BadInput(
            f"the checkpoint folder {uri} cannot be opened on this machine: {error}. It must be a path, or a URI with "
            "a scheme that fsspec supports, such as s3 or gs, whose package is installed"
        ) from None


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse a file that cannot be written later, before the work that takes long. Leaves no new file.

    Raises:
        BadInput: the file cannot be written.
    """
    try:
        existed = path.exists()
        if path.is_fifo():  # to open it would wait for its reader
            return
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise BadInput(f"{option} {path} cannot be written: {error.strerror or error}") from None
