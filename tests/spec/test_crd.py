"""The committed CRD is the generated one, an API server takes it, and its defaults are the models' defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.crd import build_crd, main
from backstay_spec.crd_schema import metadata_schema, openapi_schema
from backstay_spec.crd_yaml import to_yaml
from backstay_spec.rules import BOUNDS, CHANGES, RULES
from backstay_spec.types import TrainingJob
from backstay_spec.validation import parse_job

ROOT = Path(__file__).resolve().parents[2]
CRD = ROOT / "crds" / "backstay.dev_trainingjobs.yaml"

# The keywords of a structural schema (apiextensions.k8s.io/v1) that we use.
KEYWORDS = {
    "description",
    "type",
    "format",
    "default",
    "enum",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "maxItems",
    "minProperties",
    "maxProperties",
    "items",
    "properties",
    "additionalProperties",
    "required",
    "anyOf",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-int-or-string",
    "x-kubernetes-validations",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
}


def schemas(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from schemas(inner, f"{path}.{name}".lstrip("."))
    for keyword, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if keyword in schema:
            yield from schemas(schema[keyword], f"{path}{mark}")


ALL = dict(schemas(openapi_schema()))


def test_the_committed_crd_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert CRD.read_text() == capsys.readouterr().out, "run `make generate`"
    assert yaml.safe_load(CRD.read_text()) == build_crd()


def test_the_schema_is_structural() -> None:
    """https://kubernetes.io/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions/"""
    for path, schema in ALL.items():
        assert set(schema) <= KEYWORDS, path
        loose = schema.get("x-kubernetes-preserve-unknown-fields") or schema.get("x-kubernetes-int-or-string")
        assert "type" in schema or loose, f"{path} has no type"
        if "x-kubernetes-int-or-string" in schema:
            assert "type" not in schema, path
            assert schema["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert "anyOf" not in schema, path
        assert not ("properties" in schema and "additionalProperties" in schema), path
        assert set(schema.get("required", ())) <= set(schema.get("properties", {})), path
        if "properties" in schema or "additionalProperties" in schema:
            assert schema["type"] == "object", path
        if "items" in schema:
            assert schema["type"] == "array", path
        if schema.get("type") == "array":
            assert "items" in schema, path
        if schema.get("x-kubernetes-list-type") == "map":
            keys = schema["x-kubernetes-list-map-keys"]
            assert set(keys) <= set(schema["items"]["required"]), path
    assert "default" not in ALL["metadata"]
    assert set(ALL["metadata"]) == {"type", "properties"}, "nothing of metadata but its name may be restricted"


def test_every_rule_of_the_tables_is_in_the_crd() -> None:
    rules = [one for schema in ALL.values() for one in schema.get("x-kubernetes-validations", [])]
    assert sorted(one["rule"] for one in rules) == sorted(
        [*(rule.cel for rule in RULES if rule.cel is not None), *(change.cel for change in CHANGES)]
    )
    for one in rules:
        assert "\n" not in one["message"]
        assert len(one["message"]) <= 2048
    for bound in BOUNDS:
        assert bound.keywords().items() <= ALL[bound.path].items(), bound.path


def test_a_rule_that_the_api_server_must_price_sees_bounded_values_only() -> None:
    """An API server refuses a CRD whose rules could cost too much; unbounded strings and lists are what costs."""
    for path, schema in ALL.items():
        rules = [one["rule"] for one in schema.get("x-kubernetes-validations", [])]
        if any(".all(" in rule for rule in rules):
            assert "maxItems" in schema or "maxProperties" in schema, path
        if any("self.startsWith" in rule for rule in rules):
            assert "maxLength" in schema, path
        if schema.get("type") == "array" and path.startswith("spec"):
            assert "maxItems" in schema, path


def test_a_default_stands_even_where_its_parent_is_absent() -> None:
    """The API server fills in a default only where the parent is: each parent that may be absent has one, and whole."""
    smallest = {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": "x"},
        "spec": {"image": "i"},
    }
    spec = openapi_schema()["properties"]["spec"]

    def fill(value: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
        """Defaulting as the API server does it: a default first, then the defaults within it."""
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = json.loads(json.dumps(inner["default"]))
            if isinstance(value.get(name), dict):
                assert inner.get("default", {}).items() <= fill(dict(inner.get("default", {})), inner).items()
                value[name] = fill(value[name], inner)
        return value

    by_crd = fill({"image": "i"}, spec)
    by_models = TrainingJob.model_validate(smallest).to_dict()["spec"]
    by_parser = parse_job(smallest).to_dict()["spec"]
    lists = ("command", "args", "env", "envFrom")
    assert all(by_models.pop(name) == [] == by_parser.pop(name) for name in lists), "absent and empty are the same"
    assert by_crd == by_models == by_parser
    for name in ("parameterServers", "workers", "update", "checkpoint", "runPolicy", "scheduling"):
        assert spec["properties"][name]["default"] == by_crd[name]


def test_the_defaults_are_the_designs() -> None:
    spec = parse_job(
        {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "x"}, "spec": {"image": "i"}}
    ).spec
    assert (spec.parameter_servers.replicas, spec.parameter_servers.standbys) == (1, 0)
    assert (spec.parameter_servers.max_restarts, spec.workers.max_restarts) == (10, 100)
    assert (spec.workers.replicas, spec.workers.stall_seconds) == (1, 300)
    assert (spec.update.mode, spec.update.backups, spec.update.max_non_finite) == ("Sync", 0, 3)
    assert (spec.update.grace, spec.update.weighting) == ("0s", "Equal")
    assert (spec.update.max_staleness, spec.update.staleness_damping) == (None, False)
    assert (spec.checkpoint.uri, spec.checkpoint.volume, spec.checkpoint.keep) == (None, None, 3)
    assert (spec.run_policy.suspend, spec.run_policy.clean_pods) == (False, "Running")
    assert spec.run_policy.pending_deadline_seconds == 600
    assert spec.evaluator is None


def test_every_field_is_described() -> None:
    for path, schema in ALL.items():
        if (
            path.removesuffix("{}").split("[]")[-1]
            and not path.endswith("{}")
            and path not in {"metadata", "metadata.name"}
        ):
            assert schema.get("description", "").endswith((".", "`")), path
    assert metadata_schema()["properties"]["name"]["type"] == "string"


def test_the_crd_is_served_as_the_design_states() -> None:
    crd = build_crd()
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    assert crd["metadata"]["name"] == "trainingjobs.backstay.dev"
    assert (names["kind"], names["plural"], names["shortNames"]) == ("TrainingJob", "trainingjobs", ["tj"])
    assert set(version["subresources"]) == {"status", "scale"}
    columns = [one["name"] for one in version["additionalPrinterColumns"] if not one.get("priority")]
    assert columns == ["Phase", "Step", "Examples/s", "Workers", "Age"]
    paths = [one["jsonPath"] for one in version["additionalPrinterColumns"]]
    for path in [*paths, *version["subresources"]["scale"].values()]:
        assert path == ".metadata.creationTimestamp" or path.lstrip(".") in ALL, path
    crd["spec"]["group"] = "changed"
    assert build_crd()["spec"]["group"] == "backstay.dev", "the caller owns what it gets"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8), JSON, max_size=4) | st.lists(JSON, max_size=3))
def test_yaml_comes_back_as_the_json_that_it_was(value: Any) -> None:
    assert yaml.load(to_yaml(value), Loader=yaml.SafeLoader) == value


@given(st.lists(st.text("ab :-#'\"", max_size=40), min_size=1, max_size=6).map(" ".join))
def test_long_text_survives_a_round_trip_through_yaml(text: str) -> None:
    assert yaml.safe_load(to_yaml({"description": [{"a": text * 3}, text]})) == {"description": [{"a": text * 3}, text]}
