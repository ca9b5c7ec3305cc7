"""Checks and accepts CustomResourceDefinitions, and turns them into resources that the server serves."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from backstay_cluster.apiserver import cel
from backstay_cluster.apiserver.custom import CustomStrategy, CustomType
from backstay_cluster.apiserver.errors import StatusCause, forbidden_field, invalid_value, not_supported, required
from backstay_cluster.apiserver.objects import Obj, dig, now
from backstay_cluster.apiserver.resources import Resource
from backstay_cluster.apiserver.strategy import Strategy

if TYPE_CHECKING:
    from backstay_cluster.apiserver.rest import Api

STORAGE: Final = ("apiextensions.k8s.io", "customresourcedefinitions")
CLEANUP: Final = "customresourcecleanup.apiextensions.k8s.io"
_JUNCTORS: Final = ("allOf", "anyOf", "oneOf")
_INT_OR_STRING: Final = [{"type": "integer"}, {"type": "string"}]
_NOT_IN_JUNCTORS: Final = {
    "default": "undefined",
    "description": "empty",
    "nullable": "false",
    "title": "empty",
    "type": "empty",
    "x-kubernetes-preserve-unknown-fields": "false",
}
_TYPES: Final = ("array", "boolean", "integer", "number", "object", "string")


class DefinitionStrategy(Strategy):
    """The rules of definitions."""

    returns_deleted = True
    plain_mark = True

    def default(self, obj: Obj) -> None:
        spec = obj.setdefault("spec", {})
        spec.setdefault("conversion", {"strategy": "None"})
        names = spec.setdefault("names", {})
        if names.get("kind"):
            names.setdefault("singular", names["kind"].lower())
            names.setdefault("listKind", names["kind"] + "List")
        if not obj.get("status"):
            stored = [v.get("name") for v in spec.get("versions", ()) if v.get("storage")]
            names_none = {"plural": "", "kind": ""}
            obj["status"] = {"conditions": None, "acceptedNames": names_none, "storedVersions": stored}

    def validate(self, obj: Obj, old: Obj | None) -> list[StatusCause]:
        spec, causes = obj["spec"], []
        names, group = spec["names"], spec.get("group")
        for name, value in (("spec.group", group), ("spec.scope", spec.get("scope"))):
            if not value:
                causes.append(required(name))
        causes += [required(f"spec.names.{n}") for n in ("plural", "kind") if not names.get(n)]
        wanted = f"{names.get('plural')}.{group}"
        if obj["metadata"].get("name", wanted) != wanted:
            text = 'must be spec.names.plural+"."+spec.group'
            causes.append(invalid_value("metadata.name", obj["metadata"]["name"], text))
        if spec.get("scope") and spec["scope"] not in {"Namespaced", "Cluster"}:
            causes.append(not_supported("spec.scope", spec["scope"], ["Cluster", "Namespaced"]))
        versions = spec.get("versions") or []
        causes += [required(f"spec.versions[{at}].name") for at, one in enumerate(versions) if not one.get("name")]
        if sum(bool(v.get("storage")) for v in versions) != 1:
            text = "must have exactly one version marked as storage version"
            causes.append(invalid_value("spec.versions", [v.get("name") for v in versions], text))
        schemas = [dig(version, "schema", "openAPIV3Schema") for version in versions]
        for at, schema in enumerate(schemas):
            path = f"spec.versions[{at}].schema.openAPIV3Schema"
            if not isinstance(schema, dict):
                causes.append(required(path))
            elif schemas.count(schema) < len(schemas):
                _structural(schema, path, causes, root=True)
            elif at == 0:  # one schema for all versions is moved out of them before it is checked
                _structural(schema, "spec.validation.openAPIV3Schema", causes, root=True)
        if old is not None:
            causes += [
                invalid_value(f"spec.{path}", dig(spec, *path.split(".")), "field is immutable")
                for path in ("group", "scope", "names.plural", "names.kind")
                if dig(spec, *path.split(".")) != dig(old, "spec", *path.split("."))
            ]
        return causes

    def before_delete(self, obj: Obj) -> Obj:
        data = dict(obj["metadata"])
        data["finalizers"] = [*data.get("finalizers", []), CLEANUP]
        terminating = {
            "type": "Terminating",
            "status": "True",
            "lastTransitionTime": now(),
            "reason": "InstanceDeletionPending",
            "message": "CustomResourceDefinition marked for deletion; CustomResource deletion will begin soon",
        }
        status = dict(obj["status"])
        status["conditions"] = [*(status.get("conditions") or []), terminating]
        return {**obj, "metadata": data, "status": status}


def _structural(schema: Any, path: str, causes: list[StatusCause], *, root: bool = False) -> None:
    if not isinstance(schema, dict):
        causes.append(invalid_value(path, schema, "must be a schema"))
        return
    kind = schema.get("type")
    # A real API server refuses what it could not prune. So a mistake in our CRD is found without one.
    if (
        not kind
        and not schema.get("x-kubernetes-int-or-string")
        and not schema.get("x-kubernetes-preserve-unknown-fields")
    ):
        where = "must not be empty at the root" if root else "must not be empty for specified object fields"
        causes.append(required(f"{path}.type", where))
    elif kind and kind not in _TYPES:
        causes.append(not_supported(f"{path}.type", kind, list(_TYPES)))
    if root and kind and kind != "object":
        causes.append(invalid_value(f"{path}.type", kind, "must be object at the root"))
    if kind == "array" and not isinstance(schema.get("items"), dict):
        causes.append(required(f"{path}.items", "must be specified"))
    if schema.get("properties") and schema.get("additionalProperties"):
        text = "additionalProperties and properties are mutual exclusive"
        causes.append(StatusCause(f"{path}.additionalProperties", "FieldValueForbidden", f"Forbidden: {text}"))
    if schema.get("pattern"):
        try:
            re.compile(schema["pattern"])
        except re.error as error:
            causes.append(
                invalid_value(f"{path}.pattern", schema["pattern"], f"must be a valid regular expression: {error}")
            )
    for at, rule in enumerate(schema.get("x-kubernetes-validations") or ()):
        here = f"{path}.x-kubernetes-validations[{at}].rule"
        text = (rule.get("rule") or "").strip()
        problem = cel.compile_error(text) if text else None
        if not text:
            causes.append(required(here, "rule is not specified"))
        elif problem:
            causes.append(invalid_value(here, rule["rule"], f"compilation failed: {problem}"))
    for name, part in (schema.get("properties") or {}).items():
        _structural(part, f"{path}.properties[{name}]", causes)
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            _structural(schema[name], f"{path}.{name}", causes)
    _value_validations(_without_int_or_string(schema), path, causes)


def _without_int_or_string(schema: Obj) -> Obj:
    """Returns the schema without the alternative of types that only an integer or a string may have."""
    if schema.get("x-kubernetes-int-or-string"):
        if schema.get("anyOf") == _INT_OR_STRING:
            return {**schema, "anyOf": []}
        if (schema.get("allOf") or [None])[0] == {"anyOf": _INT_OR_STRING}:
            return {**schema, "allOf": [{}, *schema["allOf"][1:]]}
    return schema


def _value_validations(schema: Obj, path: str, causes: list[StatusCause]) -> None:
    """Schemas in allOf, anyOf, oneOf and not only restrict values, and do not declare types or defaults.

    https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/
    """
    parts = [(f"{path}.{name}[{at}]", part) for name in _JUNCTORS for at, part in enumerate(schema.get(name) or ())]
    if "not" in schema:
        parts.append((f"{path}.not", schema["not"]))
    for here, part in parts:
        if isinstance(part, dict):
            _only_restricts(part, here, causes)


def _only_restricts(part: Obj, path: str, causes: list[StatusCause]) -> None:
    causes += [
        forbidden_field(f"{path}.{name}", f"must be {wanted} to be structural")
        for name, wanted in _NOT_IN_JUNCTORS.items()
        if part.get(name)
    ]
    for name, inner in (part.get("properties") or {}).items():
        if isinstance(inner, dict):
            _only_restricts(inner, f"{path}.properties[{name}]", causes)
    if isinstance(part.get("items"), dict):
        _only_restricts(part["items"], f"{path}.items", causes)
    _value_validations(part, path, causes)


class Definitions:
    """The custom types that are served. It follows the definitions in the store."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.types: dict[tuple[str, str, str], CustomType] = {}
        api.use(STORAGE, DefinitionStrategy)

    def type_of(self, resource: Resource) -> CustomType:
        """Returns the type that the definition of a custom resource describes."""
        return self.types[resource.group, resource.version, resource.plural]

    def establish(self, name: str) -> None:
        """Accept a new definition, and serve its current content."""
        resource = self.api.registry.must(*STORAGE)

        def accept(obj: Obj) -> None:
            status = obj["status"] = dict(obj["status"])
            status["acceptedNames"] = obj["spec"]["names"]
            present = {c["type"]: c for c in status.get("conditions") or []}
            for kind, reason, message in (
                ("NamesAccepted", "NoConflicts", "no conflicts found"),
                ("Established", "InitialNamesAccepted", "the initial names have been accepted"),
            ):
                present.setdefault(
                    kind,
                    {"type": kind, "status": "True", "lastTransitionTime": now(), "reason": reason, "message": message},
                )
            status["conditions"] = list(present.values())

        stored = self.api.modify(resource, ("", name), accept)
        if stored is not None:
            self._serve(stored.obj)

    def _serve(self, obj: Obj) -> None:
        spec = obj["spec"]
        names, group = spec["names"], spec["group"]
        self.forget(obj)
        ordered = sorted(spec["versions"], key=lambda v: not v.get("storage"))
        for version in ordered:
            if not version.get("served"):
                continue
            parts = version.get("subresources") or {}
            resource = Resource(
                group=group,
                version=version["name"],
                plural=names["plural"],
                kind=names["kind"],
                namespaced=spec["scope"] == "Namespaced",
                singular=names.get("singular", ""),
                short_names=tuple(names.get("shortNames") or ()),
                categories=tuple(names.get("categories") or ()),
                verbs=("delete", "deletecollection", "get", "list", "patch", "create", "update", "watch"),
                status="status" in parts,
                scale="scale" in parts,
                list_kind=names.get("listKind", ""),
                custom=True,
                generation=True,
            )
            custom = self.types[group, version["name"], names["plural"]] = CustomType(resource, version)
            if version is ordered[0]:
                self.api.use(resource.storage, partial(CustomStrategy, custom=custom))
            self.api.registry.add(resource)

    def forget(self, obj: Obj) -> None:
        """Stop serving the definition."""
        spec = obj["spec"]
        group, plural = spec["group"], spec["names"]["plural"]
        for key in [k for k in self.types if k[0] == group and k[2] == plural]:
            del self.types[key]
        self.api.registry.remove(group, plural)

    def resources_of(self, obj: Obj) -> list[Resource]:
        """Returns the resources that a definition has added."""
        spec = obj["spec"]
        return [r for r in self.api.registry.all() if r.storage == (spec["group"], spec["names"]["plural"])]
