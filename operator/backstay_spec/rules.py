"""Defines every rule about a spec beyond its shape in one place, for the API server and for `backstay validate`.

Three tables:

- `BOUNDS`: one field alone (range, length, pattern). Becomes OpenAPI keywords in the CRD; `crd_check` applies them.
- `RULES`: fields against each other, and what a template may not contain. Each has a CEL expression for the API server
  and a Python predicate, over the same JSON with defaults filled in. A test checks that their verdicts agree.
- `CHANGES`: what may change while a job runs. From one path come both the CEL transition rule and the Python predicate.

Paths are as in `errors.SpecError`; ``[]`` stands for every item of a list, ``{}`` for every value of a map.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from backstay_spec import gpus, grace, places
from backstay_spec.contract import CONTAINER, ENV_PREFIX, GROUP, LABEL_JOB

__all__ = ["BOUNDS", "CHANGES", "MAX_NAME", "RULES", "FieldBound", "FieldChange", "FieldRule"]

MAX_NAME: Final = 40
"""The longest name of a job, because role, index, incarnation and a hash follow it in pod names of at most 63
characters."""

INT32_MAX: Final = 2**31 - 1
MAX_STRING: Final = 128 * 1024
"""The most bytes of one argument or environment variable with its name and its end, MAX_ARG_STRLEN of execve(2)."""
MAX_STRINGS: Final = 1024 * 1024
"""Bytes of the command, arguments and environment of a container. Linux gives them 2 MiB (a quarter of the stack's
limit); the rest is for what the image, `envFrom` and the operator add."""
DNS_LABEL: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
DNS_SUBDOMAIN: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"
CONTAINER_NAME: Final = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
_NAME = "the name of an object: lower-case letters, digits, '-' and '.', beginning and ending with a letter or a digit"
_CONTAINER = f"the name of a container: {CONTAINER} for the one that trains, or lower-case letters, digits and '-'"


@dataclass(frozen=True)
class FieldBound:
    """The bounds of one field alone; `None` where there is no such bound.

    Attributes:
        path: the field.
        valid: what would be valid, to be read after "must be"; a pattern has one.
    """

    path: str
    minimum: int | None = None
    maximum: int | None = None
    min_length: int | None = None
    max_length: int | None = None
    pattern: str | None = None
    min_items: int | None = None
    max_items: int | None = None
    min_properties: int | None = None
    max_properties: int | None = None
    valid: str = ""

    def keywords(self) -> dict[str, int | str]:
        """Returns the bound as OpenAPI v3 keywords."""
        words = {
            "minimum": self.minimum,
            "maximum": self.maximum,
            "minLength": self.min_length,
            "maxLength": self.max_length,
            "pattern": self.pattern,
            "minItems": self.min_items,
            "maxItems": self.max_items,
            "minProperties": self.min_properties,
            "maxProperties": self.max_properties,
        }
        return {word: value for word, value in words.items() if value is not None}


def _count(path: str, minimum: int, maximum: int = INT32_MAX) -> FieldBound:
    return FieldBound(path, minimum=minimum, maximum=maximum)


def _named(path: str, pattern: str = DNS_SUBDOMAIN, max_length: int = 253, valid: str = _NAME) -> FieldBound:
    return FieldBound(path, min_length=1, max_length=max_length, pattern=pattern, valid=valid)


TEMPLATES: Final = ("spec.parameterServers.template", "spec.workers.template", "spec.evaluator.template")
_ENVS: Final = ("spec.env", *(f"{template}.spec.containers[].env" for template in TEMPLATES))
_AMOUNTS: Final = tuple(
    f"{template}.spec.containers[].resources.{which}" for template in TEMPLATES for which in ("requests", "limits")
)
# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
QUANTITY: Final = r"^[+-]?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE][+-]?[0-9]+))?$"
_TEXTS: Final = (
    "spec.command",
    "spec.args",
    *(f"{template}.spec.containers[].{field}" for template in TEMPLATES for field in ("command", "args")),
)
_ENV_NAME = "the name of an environment variable: printable ASCII without '='"

# The lengths and numbers of items are for the API server, which refuses a CRD whose CEL rules could cost too much.
BOUNDS: Final[tuple[FieldBound, ...]] = (
    FieldBound(
        "spec.image",
        min_length=1,
        max_length=1024,
        pattern=r"^[^ \t\r\n]+$",
        valid="an image reference without spaces, such as ghcr.io/me/train:1",
    ),
    FieldBound("spec.command", max_items=4096),
    FieldBound("spec.args", max_items=4096),
    FieldBound("spec.env", max_items=256),
    FieldBound("spec.envFrom", max_items=64),
    FieldBound("spec.workingDir", min_length=1, max_length=1024),
    _named("spec.code.configMap"),
    _count("spec.parameterServers.replicas", 1, 256),
    _count("spec.parameterServers.standbys", 0, 1),
    _count("spec.parameterServers.maxRestarts", 0),
    _count("spec.workers.replicas", 1, 10_000),
    _count("spec.workers.podsPerRank", 1, 256),
    _count("spec.workers.stallSeconds", 1),
    _count("spec.workers.maxRestarts", 0),
    _count("spec.evaluator.maxRestarts", 0),
    FieldBound(
        "spec.update.backups",
        minimum=0,
        maximum=9_999,
        max_length=4,
        pattern=r"^(0|[1-9][0-9]?)%$",
        valid="a whole number of pods, or whole percents from '0%' to '99%'",
    ),
    FieldBound(
        "spec.update.grace",
        max_length=16,
        pattern=grace.PATTERN,
        valid="Auto, or a duration such as 0s, 500ms or 1m30s",
    ),
    _count("spec.update.maxNonFinite", 1),
    _count("spec.update.maxStaleness", 0),
    FieldBound(
        "spec.checkpoint.uri",
        min_length=1,
        max_length=1024,
        pattern=r"^([A-Za-z][A-Za-z0-9+.:-]*://|/).+$",
        valid="a URI such as s3://bucket/folder, or an absolute path (only `backstay run` accepts a relative one)",
    ),
    FieldBound(
        "spec.checkpoint.volume",
        min_properties=1,
        valid="the source of a volume, such as persistentVolumeClaim: {claimName: ckpt}",
    ),
    _count("spec.checkpoint.everySteps", 1),
    _count("spec.checkpoint.everySeconds", 0),
    _count("spec.checkpoint.keep", 1, 10_000),
    FieldBound(
        "spec.checkpoint.keepBest.metric",
        min_length=1,
        max_length=256,
        valid="the name of a number that evaluate returns, such as accuracy",
    ),
    _count("spec.trace.megabytes", 0, 256),
    _count("spec.runPolicy.activeDeadlineSeconds", 1),
    _count("spec.runPolicy.pendingDeadlineSeconds", 1),
    _count("spec.runPolicy.afterTrainingSeconds", 1),
    _count("spec.runPolicy.ttlSecondsAfterFinished", 0),
    _named("spec.scheduling.priorityClassName"),
    _named("spec.scheduling.schedulerName"),
    _named("spec.scheduling.queue", max_length=63),
    _named("spec.scheduling.gang.podGroup", max_length=63),
    FieldBound(
        "spec.scheduling.groupTopologyKey",
        min_length=1,
        max_length=317,
        pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
        valid="the name of a label of nodes, such as topology.kubernetes.io/zone",
    ),
    *(
        FieldBound(f"{env}[].name", min_length=1, max_length=256, pattern=r"^[ -<>-~]+$", valid=_ENV_NAME)
        for env in _ENVS
    ),
    *(FieldBound(f"{template}.metadata.labels", max_properties=64) for template in TEMPLATES),
    *(FieldBound(f"{template}.spec.containers", max_items=16) for template in TEMPLATES),
    *(_named(f"{template}.spec.containers[].name", CONTAINER_NAME, 63, valid=_CONTAINER) for template in TEMPLATES),
    *(FieldBound(f"{template}.spec.containers[].command", max_items=256) for template in TEMPLATES),
    *(FieldBound(f"{template}.spec.containers[].args", max_items=1024) for template in TEMPLATES),
    *(FieldBound(f"{template}.spec.containers[].env", max_items=256) for template in TEMPLATES),
    *(FieldBound(amount, max_properties=64) for amount in _AMOUNTS),
    *(
        FieldBound(
            f"{amount}{{}}", min_length=1, max_length=64, pattern=QUANTITY, valid="an amount such as 500m, 2 or 4Gi"
        )
        for amount in _AMOUNTS
    ),
    *(
        FieldBound(f"{env}[].value", max_length=MAX_STRING, valid="a string that Linux can pass to a program")
        for env in _ENVS
    ),
)


@dataclass(frozen=True)
class FieldRule:
    """Fields against each other.

    Attributes:
        at: path of the value that carries the rule, `self` in `cel`; empty for the object itself.
        field: the field that is reported, relative to `at`; empty for `at` itself.
        reads: fields that the rule reads, relative to `at`. The rule is skipped where one of them is malformed.
        cel: the rule for the API server; None where its limits on the cost of rules do not allow it. Then
            `backstay validate` refuses the job, and the operator fails it before it creates a pod.
        holds: the same for us: takes the JSON value at `at`, with defaults filled in.
        message: the requirement, and what would be valid.
    """

    at: str
    field: str
    reads: tuple[str, ...]
    cel: str | None
    holds: Callable[[Any], bool]
    message: str


def _few_backups(spec: Any) -> bool:
    backups = spec["update"]["backups"]
    return not isinstance(backups, int) or backups == 0 or backups < spec["workers"]["replicas"]


def _bytes(text: str) -> int:
    """Returns the bytes of a string as an argument of a program, with the byte that ends it."""
    return len(text.encode("utf-8", "replace")) + 1


def _short_value(env: Any) -> bool:
    # An unresolved reference such as $(OTHER) may become longer. Only the kernel can detect that.
    return "value" not in env or _bytes(env["name"]) + _bytes(env["value"]) <= MAX_STRING


def _strings_of(container: Any) -> int:
    listed = sum(_bytes(text) for field in ("command", "args") for text in container.get(field) or ())
    return listed + sum(_bytes(one["name"]) + _bytes(one.get("value") or "") for one in container.get("env") or ())


def _has_image(container: Any) -> bool:
    return container["name"] == CONTAINER or "image" in container


def _good_name(job: Any) -> bool:
    name = job["metadata"]["name"]
    return len(name) <= MAX_NAME and re.search(DNS_LABEL.replace("$", r"\Z"), name) is not None


RULES: Final[tuple[FieldRule, ...]] = (
    FieldRule(
        at="",
        field="metadata.name",
        reads=("metadata.name",),
        cel=f"size(self.metadata.name) <= {MAX_NAME} && self.metadata.name.matches('{DNS_LABEL}')",
        holds=_good_name,
        message=f"must be at most {MAX_NAME} lower-case letters, digits and '-'. The first must be a letter, and the "
        "last a letter or a digit, because pods and Services are named after the job",
    ),
    FieldRule(
        at="spec",
        field="workingDir",
        reads=("code", "workingDir"),
        cel="!(has(self.code) && has(self.workingDir))",
        holds=lambda spec: not ("code" in spec and "workingDir" in spec),
        message="must be left out together with spec.code, whose files are the working directory",
    ),
    FieldRule(
        at="spec",
        field="checkpoint.keepBest",
        reads=("checkpoint.keepBest", "evaluator"),
        cel="!has(self.checkpoint.keepBest) || has(self.evaluator)",
        holds=lambda spec: "keepBest" not in spec["checkpoint"] or "evaluator" in spec,
        message="must be left out unless spec.evaluator is set: the evaluator evaluates the checkpoints",
    ),
    FieldRule(
        at="spec",
        field="update.backups",
        reads=("update.backups", "workers.replicas"),
        cel="type(self.update.backups) != int || self.update.backups == 0 || "
        "self.update.backups < self.workers.replicas",
        holds=_few_backups,
        message="must be less than spec.workers.replicas, because an update needs at least one gradient; percents such "
        "as '5%' follow the number of workers",
    ),
    FieldRule(
        at="spec.update",
        field="backups",
        reads=("mode", "backups"),
        cel="self.mode == 'Sync' || (type(self.backups) == int ? self.backups == 0 : self.backups == '0%')",
        holds=lambda update: update["mode"] == "Sync" or update["backups"] in (0, "0%"),
        message="must be left out in mode Async, which never waits for a worker; backups are for mode Sync",
    ),
    FieldRule(
        at="spec.update",
        field="grace",
        reads=("mode", "grace"),
        cel="self.mode == 'Sync' || self.grace == '0s'",
        holds=lambda update: update["mode"] == "Sync" or update["grace"] == "0s",
        message="must be left out in mode Async, which never waits for a worker; it is for mode Sync",
    ),
    FieldRule(
        at="spec.update",
        field="weighting",
        reads=("mode", "weighting"),
        cel="self.mode == 'Sync' || self.weighting == 'Equal'",
        holds=lambda update: update["mode"] == "Sync" or update["weighting"] == "Equal",
        message="must be Equal in mode Async, where an update has one gradient; Examples is for mode Sync",
    ),
    FieldRule(
        at="spec.update",
        field="maxStaleness",
        reads=("mode", "maxStaleness"),
        cel="self.mode == 'Async' || !has(self.maxStaleness)",
        holds=lambda update: update["mode"] == "Async" or "maxStaleness" not in update,
        message="must be left out in mode Sync, where no gradient is stale; it is for mode Async",
    ),
    FieldRule(
        at="spec.update",
        field="stalenessDamping",
        reads=("mode", "stalenessDamping"),
        cel="self.mode == 'Async' || !self.stalenessDamping",
        holds=lambda update: update["mode"] == "Async" or not update["stalenessDamping"],
        message="must be false in mode Sync, where no gradient is stale; it is for mode Async",
    ),
    FieldRule(
        at="spec.update",
        field="overlap",
        reads=("mode", "overlap"),
        cel="self.mode == 'Async' || !self.overlap",
        holds=lambda update: update["mode"] == "Async" or not update["overlap"],
        message="must be false in mode Sync, where a gradient needs the newest parameters; it is for mode Async",
    ),
    FieldRule(
        at="spec.update",
        field="maxStaleness",
        reads=("maxStaleness", "overlap"),
        cel="!self.overlap || !has(self.maxStaleness) || self.maxStaleness >= 1",
        holds=lambda update: not update["overlap"] or update.get("maxStaleness", 1) >= 1,
        message="must be at least 1 with spec.update.overlap, where each gradient is computed without the worker's "
        "last one; or set spec.update.overlap to false",
    ),
    FieldRule(
        at="spec.wire",
        field="errorFeedback",
        reads=("gradients", "errorFeedback"),
        cel="!(has(self.errorFeedback) && self.errorFeedback) || self.gradients == 'Int8' || self.gradients == 'Int4'",
        holds=lambda wire: not wire.get("errorFeedback") or wire["gradients"] in ("Int8", "Int4"),
        message="must be false unless spec.wire.gradients is Int8 or Int4, whose rounding errors it feeds back",
    ),
    FieldRule(
        at="spec.checkpoint",
        field="volume",
        reads=("uri", "volume"),
        cel="!(has(self.uri) && has(self.volume))",
        holds=lambda checkpoint: not ("uri" in checkpoint and "volume" in checkpoint),
        message="must be left out together with spec.checkpoint.uri: checkpoints are stored in one place",
    ),
    FieldRule(
        at="spec.checkpoint",
        field="uri",
        reads=("uri",),
        cel=f"!has(self.uri) || !(self.uri.startsWith('memory:') || self.uri.matches('{places.NOT_WRITABLE}'))",
        holds=lambda its: not re.match(f"memory:|{places.NOT_WRITABLE}", its.get("uri", "")),
        message="must be a place to write that all servers share and that outlives them: not memory:// or http://",
    ),
    FieldRule(
        at="spec.checkpoint.volume",
        field="name",
        reads=("name",),
        cel="!has(self.name)",
        holds=lambda volume: "name" not in volume,
        message="must be left out, the operator names the volume; give the source alone, such as "
        "persistentVolumeClaim: {claimName: ckpt}",
    ),
    FieldRule(
        at="spec.checkpoint.volume",
        field="emptyDir",
        reads=("emptyDir",),
        cel="!has(self.emptyDir)",
        holds=lambda volume: "emptyDir" not in volume,
        message="must not be used, because it belongs to one pod and is deleted with it. Use a volume that all servers "
        "share, such as persistentVolumeClaim: {claimName: ckpt}",
    ),
    *(
        FieldRule(
            at=f"{env}[].name",
            field="",
            reads=("",),
            cel=f"!self.startsWith('{ENV_PREFIX}')",
            holds=lambda name: not name.startswith(ENV_PREFIX),
            message=f"must not begin with {ENV_PREFIX}: this prefix is reserved; choose another name",
        )
        for env in _ENVS
    ),
    *(
        FieldRule(
            at=f"{env}[]",
            field="valueFrom",
            reads=("value", "valueFrom"),
            cel="!(has(self.value) && has(self.valueFrom)) || self.value == ''",
            holds=lambda env: not ("value" in env and "valueFrom" in env) or env["value"] == "",
            message="must be left out together with value: a variable has one source",
        )
        for env in _ENVS
    ),
    *(
        FieldRule(
            at=f"{env}[]",
            field="value",
            reads=("name", "value"),
            cel=None,
            holds=_short_value,
            message=f"must be at most {MAX_STRING} bytes together with the variable's name, which is what Linux passes "
            "to a program; mount a file from a ConfigMap instead",
        )
        for env in _ENVS
    ),
    *(
        FieldRule(
            at=f"{texts}[]",
            field="",
            reads=("",),
            cel=None,
            holds=lambda text: _bytes(text) <= MAX_STRING,
            message=f"must be at most {MAX_STRING} bytes, which is what Linux passes to a program; mount a file from a "
            "ConfigMap instead",
        )
        for texts in _TEXTS
    ),
    *(
        FieldRule(
            at=at,
            field="",
            reads=("command", "args", "env"),
            cel=None,
            holds=lambda container: _strings_of(container) <= MAX_STRINGS,
            message=f"must have a command, arguments and an environment of at most {MAX_STRINGS} bytes together. "
            "Linux limits what it passes to a program. Mount files from a ConfigMap instead",
        )
        for at in ("spec", *(f"{template}.spec.containers[]" for template in TEMPLATES))
    ),
    FieldRule(
        at="spec.workers",
        field="podsPerRank",
        reads=("podsPerRank", "template.spec.containers"),
        cel=None,
        holds=gpus.whole,
        message="must be 1 where pods get a part of a GPU (nvidia.com/mig-* or nvidia.com/gpu.shared): NCCL connects "
        "whole GPUs only",
    ),
    FieldRule(
        at="spec.scheduling.gang",
        field="podGroup",
        reads=("podGroup", "by"),
        cel="self.by != 'Rank' || size(self.podGroup) <= 58",
        holds=lambda gang: gang["by"] != "Rank" or len(gang["podGroup"]) <= 58,
        message="must be at most 58 characters with by: Rank, because a hyphen and the rank follow it",
    ),
    *(
        FieldRule(
            at=f"{template}.spec.containers[]",
            field="image",
            reads=("name", "image"),
            cel=f"self.name == '{CONTAINER}' || has(self.image)",
            holds=_has_image,
            message=f"must be set: only the container {CONTAINER} gets the job's image. A container of another name "
            f"runs beside it; to change the one that trains, write name: {CONTAINER}",
        )
        for template in TEMPLATES
    ),
    *(
        FieldRule(
            at=f"{template}.metadata.labels",
            field="",
            reads=("",),
            cel=f"self.all(key, !key.startsWith('{GROUP}/'))",
            holds=lambda labels: not any(key.startswith(f"{GROUP}/") for key in labels),
            message=f"must have no label that begins with {GROUP}/ (such as {LABEL_JOB}): the operator finds its pods "
            "by them",
        )
        for template in TEMPLATES
    ),
    *(
        FieldRule(
            at=f"{template}.spec.containers",
            field="",
            reads=("",),
            cel="self.all(one, self.exists_one(other, other.name == one.name))",
            holds=lambda containers: len({one["name"] for one in containers}) == len(containers),
            message=f"must not have two containers of one name; the one that trains is called {CONTAINER}",
        )
        for template in TEMPLATES
    ),
)


_MARKS: Final = "?[]!"


@dataclass(frozen=True)
class FieldChange:
    """A field that may change only while the job is suspended.

    Attributes:
        steps: the path from spec to the field. A name that ends in ``?`` may be absent. A name that ends in ``[]`` is
            a list, and an absent list equals an empty one. With ``!``, only the presence of the field is compared.
    """

    steps: tuple[str, ...]

    @property
    def field(self) -> str:
        """The field, relative to spec."""
        return ".".join(step.rstrip(_MARKS) for step in self.steps)

    @property
    def message(self) -> str:
        """The advice for a person."""
        return "must not change while the job runs: set spec.runPolicy.suspend to true first, or start a new job"

    @property
    def cel(self) -> str:
        """The transition rule, where `self` is spec."""

        def present(root: str) -> str:
            parts, path = [], root
            for step in self.steps:
                path = f"{path}.{step.rstrip(_MARKS)}"
                if step.endswith("?"):
                    parts.append(f"has({path})")
                elif step.endswith("[]"):
                    parts.append(f"has({path}) && size({path}) > 0")
            return " && ".join(parts)

        if self.steps[-1].endswith("!"):
            return f"oldSelf.runPolicy.suspend || has(self.{self.field}) == has(oldSelf.{self.field})"
        same = f"self.{self.field} == oldSelf.{self.field}"
        if present("self"):
            new, old = present("self"), present("oldSelf")
            same = f"({new} ? {old} && {same} : !({old}))"
        return f"oldSelf.runPolicy.suspend || {same}"

    def allowed(self, new: Any, old: Any) -> bool:
        """Returns whether a job's spec `old` may become `new`, as far as this field goes; both with defaults filled
        in."""
        return bool(old["runPolicy"]["suspend"]) or _canonical(self._find(new)) == _canonical(self._find(old))

    def _find(self, spec: Any) -> Any:
        value = spec
        for step in self.steps:
            name = step.rstrip(_MARKS)
            if name not in value:
                return [] if step.endswith("[]") else None
            value = value[name]
        return True if self.steps[-1].endswith("!") else value


def _canonical(value: Any) -> str:
    """Returns text that is equal for equal JSON only (in Python, 1 == True)."""
    return json.dumps(value, sort_keys=True)


CHANGES: Final[tuple[FieldChange, ...]] = tuple(
    FieldChange(tuple(path.split(".")))
    for path in (
        "image",
        "command[]",
        "args[]",
        "env[]",
        "envFrom[]",
        "workingDir?",
        "code?",
        "parameterServers.replicas",
        "parameterServers.standbys",
        "parameterServers.template?",
        "workers.podsPerRank",
        "workers.template?",
        "evaluator!",
        "evaluator?.template?",
        "update.mode",
        "update.backups",
        "update.weighting",
        "update.maxNonFinite",
        "update.maxStaleness?",
        "update.stalenessDamping",
        "update.overlap",
        "wire",
        "checkpoint.uri?",
        "checkpoint.volume?",
        "checkpoint.keepBest?",
        "checkpoint.continueFrom",
        "trace",
        "scheduling",
    )
)
