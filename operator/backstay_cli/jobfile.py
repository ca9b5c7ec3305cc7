"""From what the user names (a YAML file, or a script and options) to a TrainingJob that the embedded cluster can run.

A mistake in it is a `BadInput`, which the command prints as it is and answers with exit status 2.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from backstay_spec import contract
from backstay_spec.validation import SpecErrors, parse_job

LOCAL_IMAGE = "backstay.dev/trainer:local"  # the embedded cluster runs every image with this machine's Python


class BadInput(Exception):  # noqa: N818  # it is what the user gave, not what went wrong in here
    """What the user gave cannot be run; the message says what is wrong with it and what would be right."""


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which plain YAML loaders silently drop the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} stands twice in one mapping", key_node.start_mark
                )
            if isinstance(key, Hashable):
                seen.add(key)
        return super().construct_mapping(node, deep)


def is_standard_input(path: Path) -> bool:
    """Whether the file is what is piped into the command."""
    return str(path) in {"-", "/dev/stdin"}


def folder_of(path: Path) -> Path:
    """Where a file's relative paths begin: its folder; the current one where it is piped in."""
    return Path.cwd() if is_standard_input(path) else path.resolve().parent


def read_job(path: Path) -> dict[str, Any]:
    """The TrainingJob in a YAML (or JSON) file, or in what is piped in for ``-``, checked.

    Raises:
        BadInput: the file cannot be read, is no YAML, holds not exactly one TrainingJob, or a wrong one.
    """
    try:
        text = sys.stdin.buffer.read().decode() if is_standard_input(path) else path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    try:
        # The loader is a SafeLoader.
        documents = [document for document in yaml.load_all(text, _UniqueKeyLoader) if document is not None]
    except yaml.YAMLError as error:
        raise BadInput(f"{path} is not YAML: {error}") from None
    except RecursionError:
        raise BadInput(f"{path} is nested too deeply") from None
    jobs = [
        document for document in documents if not isinstance(document, dict) or document.get("kind") == contract.KIND
    ]
    if len(documents) == 1:
        jobs = documents
    if len(jobs) != 1:
        raise BadInput(f"{path} holds {len(jobs)} TrainingJobs: must be one")
    check(jobs[0], str(path))
    job: dict[str, Any] = jobs[0]
    return job


def check(job: Any, where: str) -> None:
    """Refuse a wrong TrainingJob with all its mistakes, a line each.

    Raises:
        BadInput: it is wrong.
    """
    try:
        parse_job(job)
    except SpecErrors as errors:
        lines = "".join(f"\n  {error}" for error in errors.errors)
        count = f"{len(errors.errors)} mistakes" if len(errors.errors) > 1 else "a mistake"
        raise BadInput(f"{where} has {count}:{lines}") from None


def job_of_script(
    script: Path,
    *,
    servers: int,
    workers: int,
    backups: str,
    mode: str,
    name: str | None = None,
    checkpoint: str | None = None,
    arguments: tuple[str, ...] = (),
) -> dict[str, Any]:
    """A TrainingJob that runs `script` with the default settings, checked.

    Raises:
        BadInput: there is no such script, or an option is wrong.
    """
    if not script.is_file():
        raise BadInput(f"there is no script {script}")
    update: dict[str, Any] = {"mode": mode}
    if backups not in {"", "0"}:
        update["backups"] = int(backups) if re.fullmatch(r"-?\d+", backups) else backups
    spec: dict[str, Any] = {
        "image": LOCAL_IMAGE,
        "command": ["python", script.name, *arguments],
        "parameterServers": {"replicas": servers},
        "workers": {"replicas": workers},
        "update": update,
    }
    if checkpoint is not None:
        spec["checkpoint"] = {"uri": checkpoint if "://" in checkpoint else str(Path(checkpoint).resolve())}
    job = {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": name or _name_of(script)},
        "spec": spec,
    }
    check(job, "the job made of the command line")
    return job


def _name_of(script: Path) -> str:
    """A name that a job may have, after the script, or after its folder when it is called train.py like most."""
    stem = script.resolve().parent.name if script.stem in {"train", "main"} else script.stem
    cleaned = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    cleaned = re.sub(r"^[^a-z]+", "", cleaned)[:40].strip("-")
    return cleaned or "job"


def localise(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The same job for this machine: a relative or missing `workingDir` is taken from `folder`, which is also the
    `code`."""
    job = copy.deepcopy(job)
    spec = job["spec"]
    spec.pop("code", None)
    # A Path joined with an absolute one is the absolute one.
    spec["workingDir"] = str((folder / spec.get("workingDir", ".")).resolve())
    job.setdefault("metadata", {}).setdefault("namespace", "default")
    job.pop("status", None)
    return job


def claims_of(job: dict[str, Any]) -> list[str]:
    """The PersistentVolumeClaims that a job's pods mount: on this machine they are made for it."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            claim = node.get("persistentVolumeClaim")
            if isinstance(claim, dict) and isinstance(claim.get("claimName"), str):
                found.append(claim["claimName"])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(job["spec"])
    return sorted(set(found))
