"""`backstay validate` and the API server have the same verdict. Each rule exists in CEL and in Python."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from backstay_cluster.apiserver.cel import program, to_cel
from backstay_spec.crd_check import FoundMistakes
from backstay_spec.crd_schema import openapi_schema, schema_of, spec_schema
from backstay_spec.errors import SpecError
from backstay_spec.rules import BOUNDS, CHANGES, RULES, FieldChange, FieldRule
from backstay_spec.types import TrainingJobSpec
from backstay_spec.validation import SpecErrors, broken, expand, parse_job

VALIDATIONS = "x-kubernetes-validations"
# The first program raises Python's recursion limit, which Hypothesis would find changed by an example.
program("true")


def cel(expression: str, value: Any, old: Any = None) -> bool:
    """Returns the verdict of an API server."""
    return verdict(expression, json.dumps(value), json.dumps(old))


@cache  # parts of generated jobs are often equal, and cel-python is slow
def verdict(expression: str, value: str, old: str) -> bool:
    known = {"self": to_cel(json.loads(value), {})}
    if old != "null":
        known["oldSelf"] = to_cel(json.loads(old), {})
    return bool(program(expression).evaluate(known))


def broken_by_cel(value: Any, schema: dict[str, Any], path: str = "") -> set[tuple[str, str]]:
    """(path, rule) of every CEL rule in a schema that a value breaks, transition rules aside."""
    broken = {
        (path, one["rule"])
        for one in schema.get(VALIDATIONS, [])
        if "oldSelf" not in one["rule"] and not cel(one["rule"], value)
    }
    if isinstance(value, dict):
        for name, inner in value.items():
            if name in schema.get("properties", {}):
                broken |= broken_by_cel(inner, schema["properties"][name], f"{path}.{name}".lstrip("."))
    if isinstance(value, list):
        for index, inner in enumerate(value):
            broken |= broken_by_cel(inner, schema["items"], f"{path}[{index}]")
    return broken


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


NAMES = st.sampled_from(["a", "digits", "x" * 40, "x" * 41, "9a", "a-", "A", "a.b", "a\n", "ä"])
ENV_NAMES = st.sampled_from(["A", "BACKSTAY_X", "BACKSTAY", "backstay_x", "A=B", "", "BACKSTAY_"])
ENV = st.lists(
    st.fixed_dictionaries(
        {"name": ENV_NAMES},
        optional={"value": st.sampled_from(["", "1"]), "valueFrom": st.just({"fieldRef": {"fieldPath": "x"}})},
    ),
    max_size=2,
)
AMOUNTS = st.sampled_from(["4Gi", 2, "lots", "", "1e3", "-1", 0.5])
LABELS = st.dictionaries(
    st.sampled_from(["app", "backstay.dev/job", "backstay.dev/other", "backstay.dev", "x.backstay.dev/a"]),
    st.just("v"),
    max_size=2,
)
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["trainer", "side", "B", ""])},
        optional={
            "image": st.just("a"),
            "env": ENV,
            "ports": st.just([]),
            "resources": st.fixed_dictionaries(
                {}, optional={"limits": st.dictionaries(st.just("memory"), AMOUNTS), "claims": st.just([])}
            ),
        },
    ),
    max_size=3,
)
TEMPLATES = optional(
    metadata=optional(labels=LABELS, annotations=st.just({"a": "b"})),
    spec=optional(
        restartPolicy=st.sampled_from(["Never", "Always", "OnFailure"]),
        containers=CONTAINERS,
        nodeSelector=st.sampled_from([{"a": "1"}, {"a": "2"}, {}]),
        priority=st.sampled_from([1, True]),
    ),
)
SMALL = st.integers(-1, 6)
BACKUPS = st.one_of(SMALL, st.sampled_from(["0%", "5%", "100%", "05%", "5", "-1%", "1000%", "5%\n", "٣%"]))
SPECS = st.fixed_dictionaries(
    {"image": st.sampled_from(["a", "b", "a b", ""])},
    optional={
        "command": st.sampled_from([[], ["python"], ["python", "x.py"]]),
        "env": ENV,
        "envFrom": st.sampled_from([[], [{"secretRef": {"name": "s"}}]]),
        "workingDir": st.sampled_from(["/x", "y"]),
        "code": st.sampled_from([{"configMap": "c"}, {"configMap": "D"}]),
        "parameterServers": optional(replicas=SMALL, standbys=SMALL, maxRestarts=SMALL, template=TEMPLATES),
        "workers": optional(replicas=SMALL, stallSeconds=SMALL, maxRestarts=SMALL, template=TEMPLATES),
        "evaluator": optional(template=TEMPLATES, maxRestarts=SMALL),
        "update": optional(
            mode=st.sampled_from(["Sync", "Async", "sync"]),
            backups=BACKUPS,
            grace=st.sampled_from(["Auto", "0s", "500ms", "1m30s", "1", "s", "auto", "-1s", "1s\n", "٣s"]),
            weighting=st.sampled_from(["Equal", "Examples", "equal"]),
            maxNonFinite=SMALL,
            maxStaleness=SMALL,
            stalenessDamping=st.booleans(),
            overlap=st.booleans(),
        ),
        "checkpoint": optional(
            uri=st.sampled_from(
                ["s3://b/f", "/x", "x", "memory://a", "", "http://a", "simplecache::https://a", "xhttp://a"]
            ),
            volume=st.sampled_from([{"hostPath": {"path": "/x"}}, {"name": "v", "emptyDir": {}}, {}]),
            everySteps=SMALL,
            everySeconds=SMALL,
            keep=SMALL,
        ),
        "runPolicy": optional(
            suspend=st.booleans(),
            activeDeadlineSeconds=SMALL,
            pendingDeadlineSeconds=SMALL,
            ttlSecondsAfterFinished=SMALL,
            cleanPods=st.sampled_from(["Running", "All", "None", "Some"]),
        ),
        "scheduling": optional(
            priorityClassName=st.sampled_from(["high", "High"]),
            schedulerName=st.just("volcano"),
            queue=st.sampled_from(["q", "q" * 64]),
            groupTopologyKey=st.sampled_from(["rack", "topology.kubernetes.io/zone", "a b", "/x"]),
            groupTopology=st.sampled_from(["Preferred", "Required", "Never"]),
            gang=st.fixed_dictionaries(
                {"podGroup": st.sampled_from(["g", "G", "g" * 59])},
                optional={
                    "kind": st.sampled_from(["Coscheduling", "Volcano", "Other"]),
                    "by": st.sampled_from(["Job", "Rank", "Pod"]),
                },
            ),
        ),
    },
)
JOBS = st.fixed_dictionaries(
    {
        "apiVersion": st.just("backstay.dev/v1alpha1"),
        "kind": st.just("TrainingJob"),
        "metadata": st.fixed_dictionaries({"name": NAMES}),
        "spec": SPECS,
    }
)


def refusals(job: dict[str, Any]) -> tuple[SpecError, ...]:
    try:
        parse_job(job)
    except SpecErrors as refused:
        return refused.errors
    return ()


def defaulted(job: dict[str, Any]) -> tuple[dict[str, Any], FoundMistakes]:
    """Returns a job as the API server's rules see it."""
    check = FoundMistakes()
    return check.value(job, openapi_schema(), "", ""), check


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(JOBS)
def test_cel_and_python_agree_on_every_rule_at_every_place(job: dict[str, Any]) -> None:
    value, check = defaulted(job)
    assert broken_by_cel(value, openapi_schema()) == {
        (path, rule.cel)
        for rule in RULES
        if rule.cel is not None
        for path, one in expand(value, rule.at.split(".") if rule.at else [], "")
        if not rule.holds(one)
    }
    reported = [error for rule in RULES for error in broken(rule, value, check)]
    assert set(refusals(job)) == {*check.errors, *reported}


def test_cel_and_python_agree_on_every_kind_of_update() -> None:
    """Few enough to try them all."""
    kinds = itertools.product(
        ("Sync", "Async"),
        (0, 1, 2, "0%", "1%", "100%"),
        ({}, {"maxStaleness": 0}, {"maxStaleness": 1}),
        (True, False),
        (1, 2, 3),
        ("0s", "Auto"),
        ("Equal", "Examples"),
    )
    rules = [rule for rule in RULES if "update" in f"{rule.at}.{rule.field}"]
    assert len(rules) == 8
    for mode, backups, bound, damping, replicas, grace, weighting in kinds:
        update = {"mode": mode, "backups": backups, "stalenessDamping": damping, "grace": grace, **bound}
        update["overlap"] = damping
        update["weighting"] = weighting
        spec = {"update": update, "workers": {"replicas": replicas}}
        for rule in rules:
            assert rule.cel is not None
            # An expression depends on nothing that it does not name, as it has no macro over all of `self`.
            assert not re.search(r"\bself\b(?!\.)|\bself\.(all|exists|exists_one|map|filter)\(", rule.cel)
            named = {name: value for name, value in update.items() if name in rule.cel}
            value, part = (spec, {**spec, "update": named}) if rule.at == "spec" else (update, named)
            assert cel(rule.cel, part) == rule.holds(value), (rule.cel, value)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(TEMPLATES, TEMPLATES, st.booleans())
@example({"spec": {"nodeSelector": {"a": "1"}}}, {"spec": {"priority": 1}}, False)
def test_cel_and_python_agree_on_what_may_change_in_a_template(
    old: dict[str, Any], new: dict[str, Any], suspended: bool
) -> None:
    change = next(change for change in CHANGES if change.field == "workers.template")
    before = {"runPolicy": {"suspend": suspended}, "workers": {"template": old}}
    for after in ({"workers": {"template": new}}, {"workers": {}}, before):
        assert cel(change.cel, after, before) == change.allowed(after, before)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(SPECS, SPECS, st.sampled_from(range(len(CHANGES))))
@example({}, {"update": {"mode": "Sync", "backups": "0%"}}, [c.field for c in CHANGES].index("update.backups"))
def test_cel_and_python_agree_on_what_may_change(old: dict[str, Any], new: dict[str, Any], which: int) -> None:
    change = CHANGES[which]
    before = FoundMistakes().value({**old, "image": "i"}, spec_schema(), "spec", "spec")
    for after in (FoundMistakes().value({**new, "image": "i"}, spec_schema(), "spec", "spec"), before):
        assert cel(change.cel, after, before) == change.allowed(after, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.field)
def test_a_change_states_which_of_its_steps_may_be_absent(change: FieldChange) -> None:
    """The marks of a step must be those of the models: a field without a default may be absent."""
    schema = schema_of(TrainingJobSpec)
    for step in change.steps:
        name = step.rstrip("?[]!")
        always = name in schema.get("required", ()) or "default" in schema["properties"][name]
        assert always == (name == step), step
        schema = schema["properties"][name]
        assert (schema.get("type") == "array") == step.endswith("[]")


def test_everything_is_fixed_while_a_job_runs_but_for_what_the_design_lets_change() -> None:
    """The design names workers.replicas, maxRestarts, stallSeconds, grace, intervals and keep of checkpoints, and
    runPolicy."""
    free = set()
    fixed = {change.field for change in CHANGES}
    assert "evaluator" in fixed, "whether there is one"
    for name, schema in spec_schema()["properties"].items():
        if name in fixed and name != "evaluator":
            continue
        free |= {f"{name}.{inner}" for inner in schema.get("properties", {name: {}})} - fixed
    assert free == {
        "workers.replicas",
        "workers.stallSeconds",
        "workers.maxRestarts",
        "parameterServers.maxRestarts",
        "evaluator.maxRestarts",
        "update.grace",
        "checkpoint.everySteps",
        "checkpoint.everySeconds",
        "checkpoint.keep",
        *(f"runPolicy.{name}" for name in spec_schema()["properties"]["runPolicy"]["properties"]),
    }


@pytest.mark.parametrize(
    ("spec", "field", "stated"),
    [
        ({"env": [{"name": "A", "value": "x" * 200_000}]}, "spec.env[0].value", "of at most 131072 characters"),
        ({"env": [{"name": "A", "value": "é" * 65_536}]}, "spec.env[0].value", "at most 131072 bytes"),
        ({"args": ["a", "x" * 131_072]}, "spec.args[1]", "at most 131072 bytes"),
        (
            {"env": [{"name": f"A{n}", "value": "x" * 100_000} for n in range(6)], "args": ["x" * 100_000] * 5},
            "spec",
            "1048576 bytes together",
        ),
    ],
)
def test_what_linux_cannot_pass_to_a_program_is_refused_naming_field_and_limit(
    spec: dict[str, Any], field: str, stated: str
) -> None:
    """It would fail after a minute, in the container: "argument list too long"."""
    template = {"containers": [{"name": "trainer", **spec}]}
    prefix = "spec.workers.template.spec.containers[0]"
    for here, where in ((spec, field), ({"workers": {"template": {"spec": template}}}, field.replace("spec", prefix))):
        job = {"metadata": {"name": "a"}, "spec": {"image": "i", **here}}
        (error,) = refusals({"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", **job})
        assert error.path == where
        assert stated in error.message


def test_the_longest_value_that_linux_passes_is_valid() -> None:
    """execve(2) counts name, "=", value and the end, and allows 128 KiB."""
    for length, right in ((131_069, True), (131_070, False)):
        value = "x" * length
        done = subprocess.run(["/bin/true"], env={"A": value}, check=False) if right else None
        assert done is None or done.returncode == 0
        if not right:
            with pytest.raises(OSError, match="too long"):
                subprocess.run(["/bin/true"], env={"A": value}, check=False)
        job = {"metadata": {"name": "a"}, "spec": {"image": "i", "env": [{"name": "A", "value": value}]}}
        found = refusals({"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", **job})
        assert (not found) == right


def test_a_container_without_image_is_a_misspelt_trainer_and_a_sidecar_has_one() -> None:
    for name, image, right in (("trainer", {}, True), ("trainr", {}, False), ("proxy", {"image": "envoy:1"}, True)):
        template = {"spec": {"containers": [{"name": name, **image}]}}
        job = {"metadata": {"name": "a"}, "spec": {"image": "i", "workers": {"template": template}}}
        found = refusals({"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", **job})
        assert (not found) == right
        assert all("write name: trainer" in error.message for error in found)


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.10gb", "nvidia.com/gpu.shared", "nvidia.com/gpu"])
@pytest.mark.parametrize("pods", [1, 2])
def test_a_rank_of_several_pods_needs_whole_gpus(resource: str, pods: int) -> None:
    container = {"name": "trainer", "resources": {"limits": {resource: 1}}}
    workers = {"podsPerRank": pods, "template": {"spec": {"containers": [container]}}}
    job = {"metadata": {"name": "a"}, "spec": {"image": "i", "workers": workers}}
    found = refusals({"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", **job})
    if pods == 1 or resource == "nvidia.com/gpu":
        assert not found
    else:
        (error,) = found
        assert error.path == "spec.workers.podsPerRank"
        assert "must be 1 where pods get a part of a GPU" in error.message


def test_an_amount_that_is_none_is_refused_by_its_name() -> None:
    template = {"spec": {"containers": [{"name": "trainer", "resources": {"limits": {"memory": "lots"}}}]}}
    job = {"metadata": {"name": "a"}, "spec": {"image": "i", "workers": {"template": template}}}
    (error,) = refusals({"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", **job})
    assert error.path == "spec.workers.template.spec.containers[0].resources.limits.memory"
    assert error.message == 'is "lots": must be an amount such as 500m, 2 or 4Gi'


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.at}:{rule.field}")
def test_every_rule_states_where_it_is_and_what_would_be_valid(rule: FieldRule) -> None:
    assert rule.message.startswith("must ")
    assert rule.cel is None or len(rule.cel) < 400
    if rule.field and rule.at:
        here = openapi_schema()
        for part in f"{rule.at}.{rule.field}".split("."):
            here = here["properties"][part.removesuffix("[]")]
            here = here["items"] if part.endswith("[]") else here


def test_every_pattern_means_the_same_to_python_and_to_the_api_server() -> None:
    """RE2 has no look-around and no back-references, and its classes are ASCII: Python's \\d, \\w, \\s are not."""
    for bound in BOUNDS:
        if bound.pattern:
            assert bound.valid, bound.path
            assert re.fullmatch(r"\^.*\$", bound.pattern)
            assert not re.search(r"\(\?|\\[dwsDWSbB1-9AZz]", bound.pattern)


def test_every_number_in_the_spec_has_a_range() -> None:
    """Without a maximum the API server would take numbers that no program can hold."""

    def numbers(schema: dict[str, Any], path: str) -> None:
        if schema.get("type") == "integer" or "x-kubernetes-int-or-string" in schema:
            assert "minimum" in schema, path
            assert "maximum" in schema, path
        for name, inner in schema.get("properties", {}).items():
            numbers(inner, f"{path}.{name}")
        if "items" in schema:
            numbers(schema["items"], f"{path}[]")

    numbers(spec_schema(), "spec")
