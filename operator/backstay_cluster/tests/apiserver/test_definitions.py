"""Errors of schemas and rules of custom resources have field and reason, and definitions are created and deleted."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.apiserver import cel
from backstay_cluster.apiserver.structural import Validator, default, prune

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
GROUP = "rules.example.com"
WIDGETS = f"/apis/{GROUP}/v1/namespaces/default/widgets"
SPEC = {
    "type": "object",
    "x-kubernetes-validations": [
        {
            "rule": "!has(self.low) || self.low <= self.high",
            "message": "low must not be above high",
            "fieldPath": ".low",
        },
        {"rule": "self.title == oldSelf.title", "message": "title is immutable"},
        {"rule": "!has(self.tags) || self.tags.all(t, t.matches('^[a-z]+$'))", "message": "tags are lower case"},
        {"rule": "size(self.title) < 6", "messageExpression": "'the title ' + self.title + ' is too long'"},
        {
            "rule": "!has(self.flag) || !self.flag",
            "reason": "FieldValueForbidden",
            "message": "the flag is not for you",
        },
    ],
    "properties": {
        "title": {"type": "string", "default": "w", "maxLength": 20},
        "low": {"type": "integer"},
        "high": {"type": "integer", "default": 3},
        "flag": {"type": "boolean"},
        "share": {
            "x-kubernetes-int-or-string": True,
            "allOf": [{"anyOf": [{"type": "integer"}, {"type": "string"}]}, {"pattern": "^[0-9]+%$"}],
        },
        "color": {"type": "string", "anyOf": [{"pattern": "^dark"}, {"pattern": "^light"}]},
        "ratio": {
            "type": "number",
            "minimum": 0,
            "exclusiveMinimum": True,
            "x-kubernetes-validations": [{"rule": "self <= 1.0", "message": "a ratio is at most 1"}],
        },
        # A real server estimates the cost of rules, and refuses definitions without limits for what they read.
        "tags": {
            "type": "array",
            "maxItems": 10,
            "items": {"type": "string", "maxLength": 20},
            "x-kubernetes-list-type": "set",
        },
        "ports": {
            "type": "array",
            "maxItems": 10,
            "x-kubernetes-list-type": "map",
            "x-kubernetes-list-map-keys": ["name"],
            "items": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {"type": "string", "maxLength": 20},
                    "port": {"type": "integer", "x-kubernetes-validations": [{"rule": "self >= oldSelf"}]},
                },
            },
        },
        "labels": {"type": "object", "additionalProperties": {"type": "string"}},
        "when": {"type": "string", "format": "date-time"},
        "count": {"type": "integer", "format": "int32"},
    },
}
STATUS = {"type": "object", "properties": {"phase": {"type": "string"}, "step": {"type": "integer"}}}


def definition(plural="widgets", kind="Widget", spec=SPEC):
    schema = {"type": "object", "required": ["spec"], "properties": {"spec": spec, "status": STATUS}}
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"plural": plural, "kind": kind},
            "versions": [version],
        },
    }


def widget(name="a", **spec):
    return {"apiVersion": f"{GROUP}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec}


def established(api, name):
    def conditions():
        found = api.get(f"{CRDS}/{name}").json["status"]["conditions"]
        return {c["type"]: c["status"] for c in found or []}

    for _ in range(2400):
        time.sleep(0.05)
        if conditions().get("Established") == "True":
            return
    raise AssertionError(f"{name} is not established: {conditions()}")


@pytest.fixture(scope="module")
def widgets(api):
    assert api.post(CRDS, definition()).status == 201
    established(api, f"widgets.{GROUP}")
    yield api
    api.delete(f"{CRDS}/widgets.{GROUP}")


@pytest.fixture
def clean(widgets):
    yield widgets
    widgets.delete(WIDGETS)


def causes(answer):
    assert answer.status == 422, answer
    return {c["field"]: (c["reason"], c["message"]) for c in answer.json["details"]["causes"]}


@pytest.mark.parametrize(
    ("spec", "field", "reason", "said"),
    [
        ({"low": 4}, "spec.low", "FieldValueInvalid", "low must not be above high"),
        ({"tags": ["a", "B"]}, "spec", "FieldValueInvalid", "tags are lower case"),
        ({"title": "toolong"}, "spec", "FieldValueInvalid", "the title toolong is too long"),
        ({"flag": True}, "spec", "FieldValueForbidden", "the flag is not for you"),
        ({"ratio": 2}, "spec.ratio", "FieldValueInvalid", "a ratio is at most 1"),
        ({"ratio": 0}, "spec.ratio", "FieldValueInvalid", "spec.ratio in body should be greater than 0"),
        ({"share": "5"}, "spec.share", "FieldValueInvalid", "spec.share in body should match '^[0-9]+%$'"),
        ({"color": "red"}, "<nil>", "FieldValueInvalid", '"spec.color" must validate at least one schema (anyOf)'),
        ({"share": True}, "spec.share", "FieldValueTypeInvalid", "must be of type integer,string"),
        ({"tags": ["a", "a"]}, "spec.tags[1]", "FieldValueDuplicate", 'Duplicate value: "a"'),
        (
            {"ports": [{"name": "p"}, {"name": "p"}]},
            "spec.ports[1]",
            "FieldValueDuplicate",
            'Duplicate value: {"name":"p"}',
        ),
        ({"ports": [{"port": 1}]}, "spec.ports[0].name", "FieldValueRequired", "Required value"),
        ({"labels": {"a": 1}}, "spec.labels.a", "FieldValueTypeInvalid", "must be of type string"),
        ({"when": "soon"}, "spec.when", "FieldValueTypeInvalid", "must be of type date-time"),
        ({"when": "2026-01-02T03:04:05"}, "spec.when", "FieldValueTypeInvalid", "must be of type date-time"),
        ({"when": "2026-01-02T03:04:05+0100"}, "spec.when", "FieldValueTypeInvalid", "must be of type date-time"),
        ({"low": 1.5}, "spec.low", "FieldValueTypeInvalid", 'must be of type integer: "number"'),
    ],
)
def test_an_invalid_definition_is_refused_with_field_and_reason(clean, spec, field, reason, said):
    answer = clean.post(WIDGETS, widget(**spec))
    assert answer.status == 422, answer
    found = [c["message"] for c in answer.json["details"]["causes"] if (c["field"], c["reason"]) == (field, reason)]
    assert any(said in message for message in found), answer.json


@pytest.mark.parametrize(
    "spec",
    [
        {"low": 3},
        {"share": "5%"},
        {"share": 5},
        {"color": "dark red"},
        {"ratio": 1},
        {"ratio": 0.5},
        {"count": 7.0},
        {"when": "2026-01-02t03:04:05.678z"},
        {"when": "2026-01-02T03:04:05+01:00"},
    ],
)
def test_valid_objects_are_accepted(clean, spec):
    answer = clean.post(WIDGETS, widget(**spec))
    assert answer.status == 201, answer
    assert answer.json["spec"] == {"title": "w", "high": 3, **spec}


def test_a_transition_rule_sees_what_was(clean):
    clean.post(WIDGETS, widget(name="a", ports=[{"name": "p", "port": 5}]))
    assert causes(clean.merge(f"{WIDGETS}/a", {"spec": {"title": "x"}}))["spec"][1].endswith("title is immutable")
    lower = {"spec": {"ports": [{"name": "q", "port": 1}, {"name": "p", "port": 4}]}}
    assert "failed rule: self >= oldSelf" in causes(clean.merge(f"{WIDGETS}/a", lower))["spec.ports[1].port"][1]
    higher = {"spec": {"ports": [{"name": "q", "port": 1}, {"name": "p", "port": 6}]}}
    assert clean.merge(f"{WIDGETS}/a", higher).status == 200


def test_status_and_spec_are_written_apart(clean):
    clean.post(WIDGETS, widget())
    one = clean.merge(f"{WIDGETS}/a", {"spec": {"high": 4}, "status": {"phase": "x"}}).json
    assert "status" not in one
    two = clean.merge(
        f"{WIDGETS}/a/status", {"spec": {"high": 5}, "status": {"step": 1}, "metadata": {"labels": {"a": "b"}}}
    )
    assert two.json["spec"]["high"] == 4
    assert two.json["status"] == {"step": 1}
    assert "labels" not in two.json["metadata"]
    assert (one["metadata"]["generation"], two.json["metadata"]["generation"]) == (2, 2)


def test_a_replace_must_name_the_version_it_replaces(clean):
    clean.post(WIDGETS, widget())
    found = causes(clean.put(f"{WIDGETS}/a", widget(high=9)))
    assert found["metadata.resourceVersion"][1].endswith("must be specified for an update")


def test_null_counts_as_absent(clean):
    answer = clean.post(WIDGETS, widget(high=None, low=None))
    assert answer.json["spec"] == {"title": "w", "high": 3}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"type": "thing"}, "type"),
        ({"properties": {"a": {}}}, "properties[a].type"),
        ({"properties": {"a": {"type": "array"}}}, "properties[a].items"),
        ({"x-kubernetes-validations": [{"rule": "self.("}]}, "x-kubernetes-validations[0].rule"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, "properties[a].pattern"),
        (
            {"properties": {"a": {"type": "string", "anyOf": [{}, {"type": "string"}]}}},
            "properties[a].anyOf[1].type",
        ),
        ({"properties": {"a": {"type": "string", "not": {"default": "a"}}}}, "properties[a].not.default"),
        (
            {"properties": {"a": {"type": "array", "items": {"type": "string"}, "allOf": [{"items": {"title": "t"}}]}}},
            "properties[a].allOf[0].items.title",
        ),
        (
            {
                "properties": {
                    "a": {"x-kubernetes-int-or-string": True, "anyOf": [{"type": "integer", "minimum": 0}, {}]}
                }
            },
            "properties[a].anyOf[0].type",
        ),
    ],
)
def test_a_definition_that_cannot_be_served_is_refused(api, change, field):
    found = causes(api.post(CRDS, definition("broken", "Broken", {"type": "object", **change})))
    assert f"spec.validation.openAPIV3Schema.properties[spec].{field}" in found


def test_different_schemas_of_two_versions_are_judged_each_at_its_place(api):
    crd = definition("broken", "Broken", {"type": "object", "properties": {"a": {}}})
    (version,) = crd["spec"]["versions"]
    other = {**version, "name": "v2", "storage": False, "schema": {"openAPIV3Schema": {"type": "object"}}}
    found = causes(api.post(CRDS, {**crd, "spec": {**crd["spec"], "versions": [other, version]}}))
    assert list(found) == ["spec.versions[1].schema.openAPIV3Schema.properties[spec].properties[a].type"]


def test_a_definition_goes_with_its_objects_and_can_come_back(api):
    crd, path = definition("doodads", "Doodad", {"type": "object"}), f"/apis/{GROUP}/v1/namespaces/default/doodads"
    for _ in range(2):
        assert api.post(CRDS, crd).status == 201
        established(api, f"doodads.{GROUP}")
        doodad = {"apiVersion": f"{GROUP}/v1", "kind": "Doodad", "metadata": {"name": "a"}, "spec": {}}
        for _ in range(200):
            answer = api.post(path, doodad)
            if answer.status == 201:
                break
        assert answer.status == 201
        assert api.delete(f"{CRDS}/doodads.{GROUP}").status == 200
        for _ in range(500):
            if api.get(f"{CRDS}/doodads.{GROUP}").status == 404 and api.get(path).status == 404:
                break
        assert api.get(path).status == 404
        assert api.get(f"{CRDS}/doodads.{GROUP}").status == 404


def test_a_changed_definition_is_served_as_changed(embedded):
    crd = definition("gizmos", "Gizmo", {"type": "object", "properties": {"a": {"type": "integer"}}})
    assert embedded.post(CRDS, crd).status == 201
    path = f"/apis/{GROUP}/v1/namespaces/default/gizmos"
    gizmo = {"apiVersion": f"{GROUP}/v1", "kind": "Gizmo", "metadata": {"name": "a"}, "spec": {"a": 1, "b": 2}}
    assert embedded.post(path, gizmo).json["spec"] == {"a": 1}
    more = {"op": "add", "path": "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/b"}
    change = [{**more, "value": {"type": "integer"}}]
    content = "application/json-patch+json"
    assert embedded.call("PATCH", f"{CRDS}/gizmos.{GROUP}", change, content_type=content).status == 200
    assert embedded.merge(f"{path}/a", {"spec": {"b": 2}}).json["spec"] == {"a": 1, "b": 2}
    assert embedded.delete(f"{CRDS}/gizmos.{GROUP}").status == 200


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*SPEC["properties"], "x", "port"]), inner)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_any_value_is_pruned_defaulted_and_judged(value):
    """No value crashes it, pruning and defaulting are idempotent, and pruned fields are not found again."""
    unknown = []
    prune(SPEC, value, "", unknown)
    default(SPEC, value)
    again, once = [], repr(value)
    prune(SPEC, value, "", again)
    default(SPEC, value)
    assert again == []
    assert repr(value) == once
    validator = Validator()
    validator.check(SPEC, value, "spec")
    if not validator.causes:
        cel.CelRules(SPEC).check(value)


@pytest.mark.parametrize(
    ("rule", "value", "holds"),
    [
        ("self.a__dash__b == 1 && self.__in__ == 2", {"a-b": 1, "in": 2}, True),
        ("'x' in self.map && self.map['x'] == 'y'", {"map": {"x": "y"}}, True),
        ("self.list.exists(i, i.n == 2) && self.list.exists_one(i, i.n == 1)", {"list": [{"n": 1}, {"n": 2}]}, True),
        ("self.list.map(i, i.n).filter(n, n > 1).size() == 1", {"list": [{"n": 1}, {"n": 2}]}, True),
        ("(has(self.s) ? self.s : 'none').startsWith('no')", {}, True),
        ("int(self.percent.replace('%', '')) <= 50", {"percent": "60%"}, False),
        ("type(self.share) == int ? self.share < 5 : self.share.endsWith('%')", {"share": "5%"}, True),
        ("self.share == 5", {"share": 5}, True),
        ("self.share == 5", {"share": "5"}, False),
        ("self.share != 5", {"share": "5"}, True),
        ("self.missing == 5 || self.share == 5", {"share": 5}, True),
        ("self.share in [5, '5%']", {"share": "5%"}, True),
        ("self.share in [5, '5%']", {"share": "6%"}, False),
        ("[self.share, 1] == ['5%', 1] && [[5, 1]] != [[self.share, 1]]", {"share": "5%"}, True),
        ("[true] == [1] || true in [1] || [true] in [[1]]", {}, False),
        ("self.s.contains('b') && self.s.lowerAscii() == 'abc'", {"s": "aBc"}, False),
    ],
)
def test_rules_speak_cel(rule, value, holds):
    schema = {
        "type": "object",
        "properties": {
            "a-b": {"type": "integer"},
            "in": {"type": "integer"},
            "map": {"type": "object", "additionalProperties": {"type": "string"}},
            "list": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "integer"}}}},
            "s": {"type": "string"},
            "percent": {"type": "string"},
            "share": {"x-kubernetes-int-or-string": True},
        },
        "x-kubernetes-validations": [{"rule": rule}],
    }
    found = cel.CelRules(schema).check(value)
    assert (found == []) == holds, found
