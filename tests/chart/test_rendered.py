"""The rendered chart passes lint, snapshots, Kubernetes' own types, the values schema, and the comparison of rights.

The JSON schemas for kubeconform are derived here from the models of the `kubernetes` package, so nothing is downloaded.
These models are generated from the API server's own description. `pytest tests/chart --update-snapshots` rewrites the
snapshots.
"""

from __future__ import annotations

import json
import re
import subprocess
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes.client as k8s
import pytest
import yaml
from between import LONG, put

from backstay_operator.__main__ import parse
from backstay_operator.rights import LEASE_NAME, LEASE_RIGHTS, RIGHTS

pytestmark = pytest.mark.tool("helm")
HERE = Path(__file__).resolve().parent
VALUES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
KEY = re.compile(r'^(  "[-._a-zA-Z0-9]+": )"[A-Za-z0-9+/=]{88}"$', re.MULTILINE)
DASHBOARD = re.compile(r"^(  (backstay-[a-z]+\.json): \|-\n)(?:    .*\n|\n)+", re.MULTILINE)
LEADER, GOODPUT = "backstay_operator_leader", "training_job:backstay_goodput:ratio30m"
RULES = re.compile(r"^    - name: backstay\.recording\n(?:    .*\n)+", re.MULTILINE)


def values_of(name: str) -> str:
    return f"--values={HERE / 'values' / name}.yaml"


def test_lint_finds_nothing(helm: Any) -> None:
    for name in VALUES:
        done = helm.run("lint", "--strict", str(helm.chart), values_of(name))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", VALUES)
def test_rendered_as_the_snapshot_states(helm: Any, name: str, request: pytest.FixtureRequest) -> None:
    rendered, keys = KEY.subn(r'\1"<64 random letters, base64>"', helm.template(values_of(name)))
    assert keys == (0 if "vault-key" in rendered else 1)
    rendered = DASHBOARD.sub(r"\1    <\2>\n", rendered)
    rendered = RULES.sub("    <rules/backstay.yaml>\n", rendered)
    snapshot = HERE / "snapshots" / f"{name}.yaml"
    if request.config.getoption("--update-snapshots"):
        put(snapshot, rendered)
    assert rendered == snapshot.read_text(), "changed on purpose? pytest tests/chart --update-snapshots"


def test_names_that_yaml_would_read_as_numbers_are_texts(helm: Any) -> None:
    """The API server refuses a number, with a text that names no value of the chart."""
    names = {
        "nameOverride": "1",
        "fullnameOverride": "2024",
        "watchNamespace": "77",
        "serviceAccount.name": "13",
        "key.entry": "0x10",
        "priorityClassName": "12",
        "dashboard.label": "8",
    }
    more = ("metrics.podMonitor.enabled=true", "metrics.prometheusRule.enabled=true", "dashboard.enabled=true")
    values = (f"--set-string={name}={value}" for name, value in names.items())
    objects = helm.objects(*values, *(f"--set={value}" for value in more))
    texts = {"name", "namespace", "serviceAccountName", "secretName", "app.kubernetes.io/name", "value"}
    texts |= {"key", "priorityClassName"}
    found: list[Any] = []

    def collect(node: Any) -> None:
        if isinstance(node, dict):
            found.extend(value for key, value in node.items() if key in texts and not isinstance(value, dict | list))
            found.extend(node.get("matchNames") or ())
            found.extend(node.keys())
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            collect(inner)

    collect(objects)
    assert set(names.values()) <= set(found)
    assert all(isinstance(value, str) for value in found)


def test_each_rendering_makes_another_key(helm: Any) -> None:
    keys = {KEY.search(helm.template()).group(0) for _ in range(2)}
    assert len(keys) == 2


# Validity: Kubernetes' own types, as JSON schemas.


def schema_of(written: str, path: tuple[str, ...] = ()) -> dict[str, Any]:
    """Returns the JSON schema of a type as the `kubernetes` package writes it: ``List[V1Container]``."""
    listed = re.fullmatch(r"[Ll]ist\[(.*)\]", written)
    if listed:
        return {"type": "array", "items": schema_of(listed.group(1), path)}
    mapped = re.fullmatch(r"[Dd]ict\[str, (.*)\]", written)
    if mapped:
        return {"type": "object", "additionalProperties": schema_of(mapped.group(1), path)}
    simple = {
        "str": {"type": "string"},
        "int": {"type": "integer"},
        "bool": {"type": "boolean"},
        "float": {"type": "number"},
        "datetime": {"type": "string"},
        "bytes": {"type": "string", "pattern": "^[A-Za-z0-9+/]*={0,2}$"},
        "object": {},
    }
    if written in simple:
        return simple[written]
    if written in path:
        return {}  # a type within itself, such as a JSON schema's: not in anything that the chart renders
    model = getattr(k8s, written)
    properties = {
        model.attribute_map[field]: schema_of(kind, (*path, written)) for field, kind in model.openapi_types.items()
    }
    required = [
        info.serialization_alias or info.alias or name
        for name, info in model.model_fields.items()
        if info.is_required()
    ]
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": required}


# The Prometheus Operator's API is not in that package. These are the fields that the chart uses, from
# https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PodMonitor
DRAFT = "http://json-schema.org/draft-07/schema#"
DURATION = {"type": "string", "pattern": "^(([0-9]+)(ms|s|m|h))+$"}


def closed(properties: dict[str, Any], required: Sequence[str] = ()) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties, "required": list(required)}


def pod_monitor() -> dict[str, Any]:
    texts = {"type": "array", "items": {"type": "string"}}
    relabeling = closed(
        {
            "sourceLabels": {"type": "array", "items": {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}},
            "targetLabel": {"type": "string"},
            "regex": {"type": "string"},
            "replacement": {"type": "string"},
            "action": {"enum": ["replace", "keep", "drop", "labeldrop", "labelkeep", "labelmap"]},
        }
    )
    endpoint = closed(
        {
            "port": {"type": "string"},
            "path": {"type": "string"},
            "interval": DURATION,
            "scrapeTimeout": DURATION,
            "honorLabels": {"type": "boolean"},
            "relabelings": {"type": "array", "items": relabeling},
            "metricRelabelings": {"type": "array", "items": relabeling},
        },
        ["port"],
    )
    spec = closed(
        {
            "jobLabel": {"type": "string"},
            "selector": schema_of("V1LabelSelector"),
            "namespaceSelector": closed({"any": {"type": "boolean"}, "matchNames": texts}),
            "podMetricsEndpoints": {"type": "array", "items": endpoint, "minItems": 1},
        },
        ["selector", "podMetricsEndpoints"],
    )
    text = {"type": "string"}
    meta = schema_of("V1ObjectMeta")
    return closed({"apiVersion": text, "kind": text, "metadata": meta, "spec": spec}, ["metadata", "spec"])


def prometheus_rule() -> dict[str, Any]:
    """https://prometheus-operator.dev/docs/api-reference/api/#monitoring.coreos.com/v1.PrometheusRule"""
    text = {"type": "string"}
    texts = {"type": "object", "additionalProperties": text}
    rule = closed(
        {"record": text, "alert": text, "expr": text, "for": DURATION, "labels": texts, "annotations": texts}, ["expr"]
    )
    group = closed({"name": text, "rules": {"type": "array", "items": rule, "minItems": 1}}, ["name", "rules"])
    spec = closed({"groups": {"type": "array", "items": group, "minItems": 3}}, ["groups"])
    meta = schema_of("V1ObjectMeta")
    return closed({"apiVersion": text, "kind": text, "metadata": meta, "spec": spec}, ["metadata", "spec"])


MODELS = {
    "ClusterRole": "V1ClusterRole",
    "ClusterRoleBinding": "V1ClusterRoleBinding",
    "ConfigMap": "V1ConfigMap",
    "Deployment": "V1Deployment",
    "NetworkPolicy": "V1NetworkPolicy",
    "PodDisruptionBudget": "V1PodDisruptionBudget",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "Secret": "V1Secret",
    "Service": "V1Service",
    "ServiceAccount": "V1ServiceAccount",
}


@pytest.fixture(scope="session")
def schemas(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("schemas")
    made = {kind: schema_of(model) for kind, model in MODELS.items()} | {
        "PodMonitor": pod_monitor(),
        "PrometheusRule": prometheus_rule(),
    }
    for kind, schema in made.items():
        put(folder / f"{kind.lower()}.json", json.dumps({"$schema": DRAFT, **schema}))
    return folder


@pytest.fixture
def conform(tool: Callable[[str], str], schemas: Path) -> Callable[[str], subprocess.CompletedProcess[str]]:
    def check(manifests: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [
                tool("kubeconform"),
                "-strict",
                "-summary",
                f"-schema-location={schemas}/{{{{.ResourceKind}}}}.json",
                "-output=json",
                "-",
            ],
            input=manifests,
            capture_output=True,
            text=True,
            timeout=LONG,
        )

    return check


@pytest.mark.tool("kubeconform")
@pytest.mark.parametrize("name", VALUES)
def test_every_object_is_valid(helm: Any, conform: Any, name: str) -> None:
    rendered = helm.template(values_of(name))
    done = conform(rendered)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["valid"] == len([o for o in yaml.safe_load_all(rendered) if o])
    assert summary["skipped"] == 0


@pytest.mark.tool("kubeconform")
@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), "two"),
        (("spec", "template", "spec", "containers", 0, "livenessprobe"), {}),
        (("spec", "template", "spec", "containers", 0, "securityContext", "privileged"), "no"),
        (("spec", "selector"), None),
    ],
)
def test_the_validation_refuses_mistakes(helm: Any, conform: Any, path: Sequence[Any], value: Any) -> None:
    deployment = next(o for o in helm.objects() if o["kind"] == "Deployment")
    at = deployment
    for key in path[:-1]:
        at = at[key]
    if value is None:
        del at[path[-1]]
    else:
        at[path[-1]] = value
    done = conform(yaml.safe_dump(deployment))
    assert done.returncode != 0
    assert str(path[-1]) in done.stdout


# The values schema.

WRONG: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "an unknown value": ({"replica": 1}, "replica"),
    "an unknown nested value": ({"metrics": {"podMonitors": {}}}, "podMonitors"),
    "a log level": ({"log": {"level": "LOUD"}}, "/log/level"),
    "text for a number": ({"replicas": "many"}, "/replicas"),
    "a negative number": ({"replicas": -1}, "/replicas"),
    "a privileged port": ({"metrics": {"port": 80}}, "/metrics/port"),
    "not a digest": ({"image": {"digest": "latest"}}, "/image/digest"),
    "a pull policy": ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    "not a namespace": ({"watchNamespace": "a,b"}, "/watchNamespace"),
    "a label that is no text": ({"podLabels": {"a": 1}}, "/podLabels/a"),
    "a label of the selector": (
        {"podLabels": {"app.kubernetes.io/instance": "x"}},
        "/podLabels/app.kubernetes.io~1instance",
    ),
    "a label that the chart sets": (
        {"metrics": {"prometheusRule": {"labels": {"helm.sh/chart": "x"}}}},
        "/metrics/prometheusRule/labels",
    ),
    "the label of a dashboard that the chart sets": (
        {"dashboard": {"label": "app.kubernetes.io/name"}},
        "/dashboard/label",
    ),
    "an annotation that the chart sets": (
        {"podAnnotations": {"kubectl.kubernetes.io/default-container": "x"}},
        "/podAnnotations",
    ),
    "an unknown role": ({"metrics": {"prometheusRule": {"podPricePerHour": {"worker": 1}}}}, "worker"),
    "not a share": ({"metrics": {"prometheusRule": {"goodputBelow": 2}}}, "/metrics/prometheusRule/goodputBelow"),
    "not a duration": ({"metrics": {"podMonitor": {"interval": "15"}}}, "/metrics/podMonitor/interval"),
    "a pull secret without a name": ({"imagePullSecrets": [{}]}, "/imagePullSecrets/0"),
    "what the chart itself sets": (
        {"extraEnv": [{"name": "BACKSTAY_OPERATOR_KEY_FILE", "value": "/tmp/k"}]},
        "/extraEnv/0/name",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_values_schema_refuses(helm: Any, tmp_path: Path, case: str) -> None:
    values, named = WRONG[case]
    file = tmp_path / "values.yaml"
    put(file, yaml.safe_dump(dict(values)))
    done = helm.run("template", "x", str(helm.chart), f"--values={file}")
    assert done.returncode != 0
    assert "values don't meet the specifications of the schema" in done.stderr
    assert named in done.stderr


def leaves(value: Any, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    if isinstance(value, dict) and value:
        return {leaf for key, inner in value.items() for leaf in leaves(inner, (*path, str(key)))}
    return {path}


def test_every_value_is_in_the_schema_and_in_the_readme(chart: Path) -> None:
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())
    table = set(re.findall(r"^\| `([^`]+)` \|", (chart / "README.md").read_text(), re.MULTILINE))
    free = ("resources", "podSecurityContext", "securityContext")
    found = {".".join(path) for path in leaves({k: v for k, v in values.items() if k not in free})} | set(free)
    assert table == found

    def check(given: Any, known: Mapping[str, Any], where: str) -> None:
        if known.get("additionalProperties") is not False:
            return
        assert set(given) <= set(known["properties"]), where
        for key, inner in given.items():
            check(inner, known["properties"][key], f"{where}.{key}")

    check(values, schema, "values")
    assert set(schema["properties"]) - {"global"} == set(values)


# The rights of the operator, and how it is run.


def rights_of(rules: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], frozenset[str]]:
    """RBAC rules as (group, resource) -> verbs."""
    found: dict[tuple[str, str], set[str]] = {}
    for rule in rules:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                found.setdefault((group, resource), set()).update(rule["verbs"])
    return {key: frozenset(verbs) for key, verbs in found.items()}


@pytest.mark.parametrize("watch", ["", "research"])
def test_o6_the_rights_are_those_that_the_operator_uses(helm: Any, watch: str) -> None:
    objects = helm.objects(f"--set=watchNamespace={watch}", "--set=rbac.aggregate=false")
    roles = [o for o in objects if o["kind"] in ("ClusterRole", "Role")]
    main = next(o for o in roles if not o["metadata"]["name"].endswith("-lease"))
    lease = next(o for o in roles if o["metadata"]["name"].endswith("-lease"))
    assert len(roles) == 2
    assert main["kind"] == ("Role" if watch else "ClusterRole")
    assert main["metadata"].get("namespace") == (watch or None)
    assert lease["metadata"]["namespace"] == (watch or "backstay-system")

    granted = rights_of(main["rules"])
    (leases,) = LEASE_RIGHTS
    assert granted.pop(leases, frozenset()) == (frozenset() if watch else frozenset({"list", "watch"}))
    assert granted == RIGHTS
    assert rights_of(lease["rules"]) == LEASE_RIGHTS
    for rule in (*main["rules"], *lease["rules"]):
        if rule["resources"] == [leases[1]]:
            assert rule.get("resourceNames") == (None if rule["verbs"] == ["create"] else [LEASE_NAME])
        assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]

    account = next(o for o in objects if o["kind"] == "ServiceAccount")["metadata"]
    for binding in (o for o in objects if o["kind"].endswith("Binding")):
        assert binding["subjects"] == [
            {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        ]


def test_the_roles_for_people_are_each_enough_alone(helm: Any, root: Path) -> None:
    """`kubectl apply` reads before it writes, and a reader of jobs also reads their pods' logs. The docs name both."""
    roles = {
        o["metadata"]["name"]: rights_of(o["rules"])
        for o in helm.objects("--namespace=backstay-system")
        if o["kind"] == "ClusterRole"
    }
    edit, view = roles["backstay-system-backstay-edit"], roles["backstay-system-backstay-view"]
    jobs = ("backstay.dev", "trainingjobs")
    assert edit[jobs] >= {"get", "list", "watch", "create", "update", "patch", "delete"}
    assert set(edit) == {jobs, ("backstay.dev", "trainingjobs/scale")}, "no right on pods or Secrets"
    assert view == {
        key: frozenset({"get", "list", "watch"})
        for key in (
            jobs,
            ("backstay.dev", "trainingjobs/status"),
            ("backstay.dev", "trainingjobs/scale"),
            ("", "pods"),
            ("", "pods/log"),
            ("", "events"),
        )
    }
    for page in ("docs/cluster.md", "helm/backstay/README.md"):
        text = (root / page).read_text()
        assert all(f"`{name}`" in text for name in roles if name.endswith(("-view", "-edit"))), page


@pytest.mark.parametrize("name", VALUES)
def test_the_operator_understands_how_the_chart_runs_it(helm: Any, name: str) -> None:
    objects = helm.objects(values_of(name))
    pod = next(o for o in objects if o["kind"] == "Deployment")["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    options = parse([], {e["name"]: e["value"] for e in container["env"] if "value" in e})
    (port,) = container["ports"]
    assert options.metrics_port == port["containerPort"]
    assert options.operator_namespace == "backstay-system"
    assert options.operator_labels.items() <= pod["metadata"]["labels"].items()
    assert (
        options.namespace
        == (next((o for o in objects if o["kind"] == "Role"), None) or {}).get("metadata", {}).get("namespace")
        or options.namespace is None
    )
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    key = next(v for v in pod["spec"]["volumes"] if v["name"] == "key")["secret"]
    assert options.key_file == f"{mounts['key']}/{key['items'][0]['path']}"
    given = [o for o in objects if o["kind"] == "Secret"]
    assert all(s["metadata"]["name"] == key["secretName"] and set(s["data"]) == {key["items"][0]["key"]} for s in given)
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_the_pod_is_allowed_where_the_restricted_standard_is_enforced(helm: Any) -> None:
    """https://kubernetes.io/docs/concepts/security/pod-security-standards/#restricted, and a read-only root besides."""
    spec = next(o for o in helm.objects() if o["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert {next(iter(set(v) - {"name"})) for v in spec["volumes"]} <= {"secret", "emptyDir", "configMap", "projected"}


def test_the_chart_is_this_version_s(root: Path, chart: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    described = yaml.safe_load((chart / "Chart.yaml").read_text())
    assert described["version"] == described["appVersion"] == project["version"]
    assert (chart / "crds" / "backstay.dev_trainingjobs.yaml").read_bytes() == (
        root / "crds" / "backstay.dev_trainingjobs.yaml"
    ).read_bytes(), "make generate"


def test_the_dashboards_and_rules_arrive_whole(helm: Any, chart: Path) -> None:
    config = next(o for o in helm.objects("--set=dashboard.enabled=true") if o["kind"] == "ConfigMap")
    assert config["metadata"]["labels"]["grafana_dashboard"] == "1"
    for name in ("fleet", "job", "operator"):
        made = json.loads((chart / f"dashboards/{name}.json").read_text())
        assert json.loads(config["data"][f"backstay-{name}.json"]) == made
    values = "--set=metrics.prometheusRule.enabled=true,metrics.prometheusRule.goodputBelow=0.3"
    (rule,) = (o for o in helm.objects(values) if o["kind"] == "PrometheusRule")
    made = (chart / "rules/backstay.yaml").read_text()
    for text, number, own in (
        (LEADER, 2, f'{LEADER}{{namespace="backstay-system",pod=~"backstay-[a-z0-9]+(-[a-z0-9]+)?"}}'),
        (f"{GOODPUT} < 0.5", 1, f"{GOODPUT}{{}} < 0.3"),
    ):
        assert made.count(text) == number
        made = made.replace(text, own)
    assert rule["spec"]["groups"] == yaml.safe_load(made)["groups"], "of its own operator and jobs"
    (rule,) = (o for o in helm.objects(values.replace("=0.3", "=null")) if o["kind"] == "PrometheusRule")
    assert f"{GOODPUT}{{}} < 0.5" in str(rule), "a value that is removed is the default"
