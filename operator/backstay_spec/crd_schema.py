"""Makes a structural schema from models and rules: the schema of a TrainingJob in the API server.

A structural schema has a type at every level, and neither references nor unions. It is therefore built from the models
and not from JSON Schema. `crd_check` applies the same schema to the input of a person. Source:
https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Any, Final, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from backstay_spec.rules import BOUNDS, CHANGES, RULES
from backstay_spec.template import Anything, Shape
from backstay_spec.types import ObjectMeta, TrainingJob, TrainingJobSpec
from backstay_spec.types_status import TrainingJobStatus

__all__ = ["PRESERVE", "Schema", "metadata_schema", "openapi_schema", "schema_of", "spec_schema", "status_schema"]

Schema: TypeAlias = dict[str, Any]

PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING: Final = "x-kubernetes-int-or-string"
VALIDATIONS: Final = "x-kubernetes-validations"
LIST_TYPE: Final = "x-kubernetes-list-type"
LIST_MAP_KEYS: Final = "x-kubernetes-list-map-keys"

_SCALARS: Final[Mapping[Any, Schema]] = {
    bool: {"type": "boolean"},
    int: {"type": "integer", "format": "int64"},
    float: {"type": "number"},
    str: {"type": "string"},
    datetime: {"type": "string", "format": "date-time"},
    dict[str, Any]: {"type": "object", PRESERVE: True},
}


def _text(doc: str | None) -> str:
    """Returns a docstring as a description, with joined lines, and reST's double backquotes as single ones."""
    return " ".join((doc or "").replace("``", "`").split())


def _of_annotation(annotation: Any, shape: type[BaseModel] | None) -> Schema:
    if annotation in (int | str, Union[int, str]):  # noqa: UP007  # the same type, written as pydantic may keep it
        return {INT_OR_STRING: True, "anyOf": [{"type": "integer"}, {"type": "string"}]}
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        (inner,) = (one for one in args if one is not type(None))
        return _of_annotation(inner, shape)
    if origin is Literal:
        return {"type": "string", "enum": list(args)}
    if origin is list:
        return {"type": "array", "items": _of_annotation(args[0], shape)}
    if shape is Anything:
        return {PRESERVE: True}
    if shape is not None:
        return schema_of(shape)
    if annotation in _SCALARS:
        return dict(_SCALARS[annotation])
    if origin is dict:
        return {"type": "object", "additionalProperties": _of_annotation(args[1], None)}
    if hasattr(annotation, "__metadata__"):
        return _of_annotation(annotation.__origin__, None)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return schema_of(annotation)
    raise TypeError(f"no structural schema for {annotation!r}")


def _default_of(field: FieldInfo) -> Any:
    """Returns the default as JSON, or None where an absent field says the same (absent, empty list, empty string)."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined or default is None or default in ([], {}, ""):
        return None
    if isinstance(default, BaseModel):
        # Written out whole: the API server judges a default by the rules before it fills in defaults within it.
        return {
            key: value for key, value in default.model_dump(mode="json", by_alias=True).items() if value is not None
        }
    return default


def schema_of(model: type[BaseModel]) -> Schema:
    """Returns the structural schema of a model, without any rule.

    Raises:
        TypeError: a field has a type that a structural schema cannot say.
    """
    properties: Schema = {}
    required = []
    for name, field in model.model_fields.items():
        shape = next((mark.model for mark in field.metadata if isinstance(mark, Shape)), None)
        schema = _of_annotation(field.annotation, shape)
        described: Schema = {"description": _text(field.description or schema.pop("description", ""))}
        schema.pop("description", None)
        described.update(schema)
        default = _default_of(field)
        if default is not None and issubclass(model, BaseModel) and not issubclass(model, ObjectMeta):
            described["default"] = default
        if field.is_required():
            required.append(field.alias or name)
        properties[field.alias or name] = described
    schema = {"description": _text(model.__doc__), "type": "object"}
    if properties:
        schema["properties"] = properties
    if required:
        schema["required"] = required
    if model.model_config.get("extra") == "allow":
        schema[PRESERVE] = True
    return schema


def _reach(schema: Schema, path: str) -> Schema:
    """Returns the part of a schema at a path such as ``env[].name`` or ``limits{}``."""
    here = schema
    for part in path.split(".") if path else ():
        name = part.rstrip("[]{}")
        here = here["properties"][name]
        if part.endswith("[]"):
            here = here["items"]
        elif part.endswith("{}"):
            here = here["additionalProperties"]
    return here


def _cel(rule: str, message: str, field: str) -> Schema:
    entry: Schema = {"rule": rule, "message": message}
    if field:
        entry["message"] = f"{field.rpartition('.')[2]} {message}"
        entry["fieldPath"] = f".{field}"
    return entry


@cache
def _whole() -> Schema:
    """Schema of the whole object, metadata aside; every rule is in it."""
    root: Schema = {
        "description": _text(TrainingJob.__doc__),
        "type": "object",
        "properties": {
            "apiVersion": {"description": "The version of this API.", "type": "string"},
            "kind": {"description": "TrainingJob.", "type": "string"},
            "metadata": {"type": "object", "properties": {"name": {"type": "string"}}},
            "spec": schema_of(TrainingJobSpec),
            "status": schema_of(TrainingJobStatus),
        },
        "required": ["spec"],
    }
    for bound in BOUNDS:
        part = _reach(root, bound.path)
        part.update(bound.keywords())
        if part.get("format") == "int64" and part.get("maximum", 2**31) < 2**31:
            part["format"] = "int32"
    for rule in RULES:
        if rule.cel is None:
            continue
        part = root if rule.field == "metadata.name" else _reach(root, rule.at)
        part.setdefault(VALIDATIONS, []).append(_cel(rule.cel, rule.message, rule.field))
    spec = root["properties"]["spec"]
    for change in CHANGES:
        spec.setdefault(VALIDATIONS, []).append(_cel(change.cel, change.message, change.field))
    conditions = root["properties"]["status"]["properties"]["conditions"]
    conditions[LIST_TYPE] = "map"
    conditions[LIST_MAP_KEYS] = ["type"]
    return root


def openapi_schema() -> Schema:
    """Returns the schema of a TrainingJob for the CRD. Treat it as read-only: it is shared."""
    return _whole()


def spec_schema() -> Schema:
    """Returns the part of `openapi_schema` for spec."""
    spec: Schema = _whole()["properties"]["spec"]
    return spec


def status_schema() -> Schema:
    """Returns the part of `openapi_schema` for status."""
    status: Schema = _whole()["properties"]["status"]
    return status


@cache
def metadata_schema() -> Schema:
    """Returns the fields of metadata that Backstay uses; the API server checks the others."""
    return schema_of(ObjectMeta)
