"""Parses a person's input as a TrainingJob, or lists all its mistakes.

The operator, `backstay run` and `backstay validate` use this module. The CRD has the same schema and the same rules, so
the API server accepts a job that is valid here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from backstay_spec.contract import API_VERSION, KIND
from backstay_spec.crd_check import FoundMistakes, display, join, kind_of
from backstay_spec.crd_schema import metadata_schema, openapi_schema, spec_schema, status_schema
from backstay_spec.errors import SpecError, SpecErrors
from backstay_spec.rules import CHANGES, RULES, FieldRule
from backstay_spec.types import TrainingJob

__all__ = ["SpecError", "SpecErrors", "check_update", "parse_job"]

_GENERATED = "xxxxx"  # an API server appends as many characters to generateName


def parse_job(obj: object) -> TrainingJob:
    """Reads a TrainingJob from JSON (or YAML that was loaded), with defaults filled in.

    Args:
        obj: any JSON value; not changed.

    Raises:
        SpecErrors: the TrainingJob is invalid; it has every mistake that was found, not only the first.
    """
    if not isinstance(obj, Mapping):
        raise SpecErrors([SpecError("", f"this is {kind_of(obj)}: must be a mapping, a TrainingJob")])
    check = FoundMistakes()
    for name, valid in (("apiVersion", API_VERSION), ("kind", KIND)):
        if name not in obj:
            check.refuse(name, f"is missing: must be {valid}")
        elif obj[name] != valid:
            check.refuse(name, f"is {display(obj[name])}: must be {valid}")
    fields = openapi_schema()["properties"]
    outer = {"type": "object", "properties": {name: {} for name in fields}}
    check.value({name: None for name in obj if name not in fields}, outer, "", "")
    job: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": _metadata(obj.get("metadata"), check),
        "status": check.value(_or_empty(obj.get("status")), status_schema(), "status", "status", lenient=True),
    }
    if obj.get("spec") is None:
        check.refuse("spec", "is missing: must be a mapping that has at least an image")
    else:
        job["spec"] = check.value(obj["spec"], spec_schema(), "spec", "spec")
    for rule in RULES:
        check.errors.extend(broken(rule, job, check))
    if check.errors:
        raise SpecErrors(check.errors)
    if not job["metadata"].get("generateName") or obj["metadata"].get("name") is not None:
        return _typed(job)
    return _typed({**job, "metadata": {**job["metadata"], "name": ""}})


def _or_empty(value: Any) -> Any:
    return {} if value is None else value


def _metadata(value: Any, check: FoundMistakes) -> Any:
    metadata = check.value(_or_empty(value), metadata_schema(), "metadata", "metadata")
    if metadata is not None and not metadata.get("name") and check.usable("metadata.name"):
        prefix = metadata.get("generateName")
        if isinstance(prefix, str) and prefix:
            metadata["name"] = prefix + _GENERATED
        else:
            check.refuse("metadata.name", "is missing: must be a name for the job, such as digits")
    return metadata


def _typed(job: dict[str, Any]) -> TrainingJob:
    """The models must take what the schema took; what they refuse nevertheless is a mistake too."""
    try:
        return TrainingJob.model_validate(job)
    except ValidationError as error:
        raise SpecErrors(
            SpecError(_path_of(one["loc"]), f"{one['msg'][:1].lower()}{one['msg'][1:]}") for one in error.errors()
        ) from error


def _path_of(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path = f"{path}[{part}]" if isinstance(part, int) else join(path, part)
    return path


def expand(value: Any, steps: list[str], path: str) -> Iterator[tuple[str, Any]]:
    """(path, value) of every place that a rule is about; nothing where it is absent."""
    if not steps:
        yield path, value
        return
    name = steps[0].removesuffix("[]")
    if not isinstance(value, Mapping) or value.get(name) is None:
        return
    here, inner = join(path, name), value[name]
    if not steps[0].endswith("[]"):
        yield from expand(inner, steps[1:], here)
    elif isinstance(inner, list):
        for index, one in enumerate(inner):
            yield from expand(one, steps[1:], f"{here}[{index}]")


def broken(rule: FieldRule, job: Mapping[str, Any], check: FoundMistakes) -> Iterator[SpecError]:
    for path, value in expand(job, rule.at.split(".") if rule.at else [], ""):
        if all(check.usable(_within(path, read)) for read in rule.reads) and not rule.holds(value):
            field = _within(path, rule.field)
            shown = next((one for _, one in expand(value, rule.field.split(".") if rule.field else [], "")), None)
            if isinstance(shown, bool | int | float | str):
                yield SpecError(field, f"is {display(shown)}: {rule.message}")
            else:
                yield SpecError(field, rule.message)


def _within(path: str, field: str) -> str:
    return f"{path}.{field}" if path and field else path or field


def check_update(old: TrainingJob, new: TrainingJob) -> None:
    """Whether a job may be edited from `old` to `new`.

    While a job runs, its number of workers, its budgets, deadlines, checkpoint intervals and run policy may change.
    While it is suspended (`old` is), every field may change.

    Raises:
        SpecErrors: fields that must not change have changed; the error lists all of them.
    """
    before, after = old.to_dict()["spec"], new.to_dict()["spec"]
    errors = [
        SpecError(f"spec.{change.field}", change.message) for change in CHANGES if not change.allowed(after, before)
    ]
    if errors:
        raise SpecErrors(errors)
