"""Prepares the schema and the rules of a definition's version for use in every request."""

from __future__ import annotations

from typing import Any, Final

from backstay_cluster.apiserver import cel, types
from backstay_cluster.apiserver.errors import StatusCause, bad_request, invalid_value, required
from backstay_cluster.apiserver.objects import Obj, copy, dig, show_go
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.strategy import Strategy
from backstay_cluster.apiserver.structural import BLOCKING, UNCHECKED, Validator, default, prune

_WRONG_KIND: Final = "__kind__"  # passed from decoding to validation, never stored


class CustomType:
    """One version of a definition."""

    def __init__(self, resource: Resource, version: Obj) -> None:
        self.resource = resource
        self.schema: Obj = dig(version, "schema", "openAPIV3Schema") or {}
        self.subresources: Obj = version.get("subresources") or {}
        self.scale: Obj | None = self.subresources.get("scale")
        self.columns: list[Obj] = version.get("additionalPrinterColumns") or [
            {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}
        ]
        self.selectable = tuple(f["jsonPath"].lstrip(".") for f in version.get("selectableFields") or ())
        self.warning: str | None = None
        if version.get("deprecated"):
            text = f"{resource.group_version} {resource.kind} is deprecated"
            self.warning = version.get("deprecationWarning") or text
        self._rules = cel.CelRules(self.schema)

    def decode(self, obj: Obj) -> tuple[Obj, list[str]]:
        """Returns the object without fields that are not in the schema, and the paths of these fields.

        Raises:
            ApiError: 400 for metadata that cannot be read or another version.
        """
        kind, version = obj.get("kind"), obj.get("apiVersion")
        if not kind or not version:
            name = "Kind" if not kind else "apiVersion"
            raise bad_request(f"Object '{name}' is missing in the object of the request")
        if version != self.resource.group_version:
            raise bad_request(
                f"the API version in the data ({version}) does not match the expected API version "
                f"({self.resource.group_version})"
            )
        clean: Obj = copy(obj)
        unknown: list[str] = []
        try:
            clean["metadata"], lost = types.decode("V1ObjectMeta", obj.get("metadata") or {})
        except (types.TypeMismatch, AttributeError) as error:
            raise bad_request(
                f'{kind} in version "{self.resource.version}" cannot be handled as a {kind}: {error}'
            ) from None
        unknown += [f"metadata.{path}" for path in lost]
        if kind == self.resource.kind:
            prune(self.schema, clean, "", unknown, root=True)
        else:
            clean[_WRONG_KIND] = kind  # as in the real server, such an object gets no defaults and is then refused
        clean.pop("apiVersion", None)
        clean.pop("kind", None)
        return clean, unknown

    def validate(self, obj: Obj, old: Obj | None, *, status: bool = False) -> list[StatusCause]:
        """Returns the errors of an object; with `status`, of an object after a write to its status."""
        wrong = obj.get(_WRONG_KIND)
        causes: list[StatusCause] = []
        if wrong:
            causes.append(invalid_value("kind", wrong, f"must be {self.resource.kind}"))
        validator = Validator()
        body = {k: v for k, v in obj.items() if k not in {"metadata", _WRONG_KIND}}
        if status:
            part = (self.schema.get("properties") or {}).get("status")
            if isinstance(part, dict) and "status" in body:
                validator.check(part, body["status"], "status", "")
        else:
            schema = {
                k: v for k, v in self.schema.items() if k not in {"properties", "required", "additionalProperties"}
            }
            properties = self.schema.get("properties") or {}
            schema["properties"] = {k: v for k, v in properties.items() if k not in {"metadata", "apiVersion", "kind"}}
            needed = self.schema.get("required") or ()
            schema["required"] = [n for n in needed if n not in {"metadata", "apiVersion", "kind"}]
            validator.check(schema, body, "")
        causes += validator.causes
        causes += self._scale_causes(obj)
        if any(c.reason in BLOCKING for c in causes):
            return [*causes, UNCHECKED]
        return causes + self._rules.check(self._rule_view(obj), None if old is None else self._rule_view(old))

    def _rule_view(self, obj: Obj) -> Obj:
        data = obj.get("metadata") or {}
        shown = {k: data[k] for k in ("name", "generateName") if k in data}
        return {**{k: v for k, v in obj.items() if k != _WRONG_KIND}, "metadata": shown}

    def _scale_causes(self, obj: Obj) -> list[StatusCause]:
        causes: list[StatusCause] = []
        for name in ("specReplicasPath", "statusReplicasPath") if self.scale else ():
            path = (self.scale or {}).get(name, "")
            value = dig(obj, *path.lstrip(".").split("."))
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                text = f"{path} accessor error: {show_go(value)} is of the type {_go_type(value)}, expected int64"
                causes.append(invalid_value(path, 0, text))
            elif value < 0:
                causes.append(invalid_value(path, value, "should be a non-negative integer"))
        return causes


def _go_type(value: Any) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, str):
        return "string"
    if isinstance(value, float):
        return "float64"
    return "map[string]interface {}" if isinstance(value, dict) else "[]interface {}"


class CustomStrategy(Strategy):
    """The rules of objects of a definition."""

    unconditional_update = False
    status_keeps_metadata = True

    def __init__(self, resource: Resource, custom: CustomType) -> None:
        super().__init__(resource)
        self.custom = custom

    def default(self, obj: Obj) -> None:
        if _WRONG_KIND not in obj:
            default(self.custom.schema, obj)

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        if not obj.get("metadata"):
            return [required("metadata")]
        return self.custom.validate(obj, old)

    def validate_status(self, obj: Obj, old: Obj) -> list[StatusCause]:
        return self.custom.validate(obj, old, status=True)
