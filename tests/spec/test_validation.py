"""An invalid spec is refused with every mistake, its path, and the valid values."""

from __future__ import annotations

import copy
import datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay_spec.errors import SpecError, SpecErrors
from backstay_spec.manifests_pod import runtime_config
from backstay_spec.runtime import CheckpointConfig, RuntimeConfig
from backstay_spec.validation import check_update, parse_job

GOOD: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "digits", "namespace": "team", "labels": {"a": "b"}},
    "spec": {
        "image": "ghcr.io/me/train:1",
        "command": ["python", "train.py"],
        "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "code": {"configMap": "digits"},
        "parameterServers": {"replicas": 2, "standbys": 1},
        "workers": {
            "replicas": 5,
            "template": {
                "metadata": {"labels": {"team": "x"}, "creationTimestamp": None},
                "spec": {
                    "restartPolicy": "Never",
                    "nodeSelector": {"gpu": "yes"},
                    "containers": [{"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
                },
            },
        },
        "evaluator": {},
        "update": {"mode": "Sync", "backups": "5%"},
        "checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "c"}}, "everySteps": 200},
        "runPolicy": {"cleanPods": "None"},
        "scheduling": {"queue": "gpus", "gang": {"podGroup": "g"}},
    },
}


def with_field(path: str, value: Any) -> dict[str, Any]:
    """GOOD with one field changed, or taken away (`...`)."""
    job: dict[str, Any] = copy.deepcopy(GOOD)
    *way, last = path.split("/")
    here: Any = job
    for step in way:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is ...:
        del here[last]
    elif isinstance(here, list):
        here.insert(int(last), value)
    else:
        here[last] = value
    return job


def refusals(job: Any) -> list[str]:
    with pytest.raises(SpecErrors) as refused:
        parse_job(job)
    return [str(error) for error in refused.value.errors]


TRAINER = "spec/workers/template/spec/containers/0"
NAMED = (
    "must be the name of an object: lower-case letters, digits, '-' and '.', beginning and ending with a letter or a "
    "digit"
)
JOB_NAME = (
    "must be at most 40 lower-case letters, digits and '-'. The first must be a letter, and the last a letter or a "
    "digit, because pods and Services are named after the job"
)
BAD = [
    ("apiVersion", ..., "apiVersion: is missing: must be backstay.dev/v1alpha1"),
    ("apiVersion", "backstay.dev/v1", 'apiVersion: is "backstay.dev/v1": must be backstay.dev/v1alpha1'),
    ("kind", "Job", 'kind: is "Job": must be TrainingJob'),
    ("metadata", ..., "metadata.name: is missing: must be a name for the job, such as digits"),
    ("metadata", "digits", 'metadata: is "digits", a string: must be a mapping'),
    ("metadata/name", "Digits", f'metadata.name: is "Digits": {JOB_NAME}'),
    ("metadata/name", "a" * 41, f'metadata.name: is "{"a" * 41}": {JOB_NAME}'),
    ("metadata/name", 7, 'metadata.name: is 7, a number: must be a string; write "7" in quotes'),
    ("metadata/labels/n", 1, 'metadata.labels.n: is 1, a number: must be a string; write "1" in quotes'),
    ("spec", ..., "spec: is missing: must be a mapping that has at least an image"),
    ("spec", [], "spec: is a list: must be a mapping"),
    ("spce", {}, "spce: is not a field of a TrainingJob: did you mean spec?"),
    (
        "spec/image",
        ...,
        "spec.image: is missing: must be an image reference without spaces, such as ghcr.io/me/train:1",
    ),
    (
        "spec/image",
        "a b",
        'spec.image: is "a b": must be an image reference without spaces, such as ghcr.io/me/train:1',
    ),
    (
        "spec/image",
        None,
        "spec.image: is missing: must be an image reference without spaces, such as ghcr.io/me/train:1",
    ),
    (
        "spec/command",
        "python x.py",
        'spec.command: is "python x.py", a string: must be a list; write ["python", "x.py"]',
    ),
    ("spec/args", [1.5], 'spec.args[0]: is 1.5, a number: must be a string; write "1.5" in quotes'),
    ("spec/parameter_servers", {}, "spec.parameter_servers: is not a field of spec: did you mean parameterServers?"),
    (
        "spec/replicas",
        3,
        "spec.replicas: is not a field of spec: it belongs at spec.parameterServers.replicas or spec.workers.replicas",
    ),
    ("spec/backups", 1, "spec.backups: is not a field of spec: it belongs at spec.update.backups"),
    (
        "spec/checkpoint/interval",
        1,
        "spec.checkpoint.interval: is not a field of spec.checkpoint: its fields are uri, volume, everySteps, "
        "everySeconds, keep, keepBest, continueFrom",
    ),
    (
        "spec/workers/template/resources",
        {},
        "spec.workers.template.resources: is not a field of spec.workers.template: it belongs at "
        "spec.workers.template.spec.containers[].resources",
    ),
    ("spec/workers/replicas", 0, "spec.workers.replicas: is 0: must be between 1 and 10000"),
    (
        "spec/workers/replicas",
        "4",
        'spec.workers.replicas: is "4", a string: must be a whole number; write 4 without quotes',
    ),
    ("spec/workers/replicas", 2.5, "spec.workers.replicas: is 2.5: must be a whole number"),
    ("spec/workers/replicas", True, "spec.workers.replicas: is true: must be a whole number"),
    ("spec/workers/replicas", 10**30, f"spec.workers.replicas: is {10**30}: must be between 1 and 10000"),
    ("spec/workers/maxRestarts", -1, "spec.workers.maxRestarts: is -1: must be at least 0"),
    ("spec/workers/maxRestarts", 2**31, "spec.workers.maxRestarts: is 2147483648: must be at most 2147483647"),
    ("spec/parameterServers/standbys", 2, "spec.parameterServers.standbys: is 2: must be 0 or 1"),
    (
        "spec/update/backups",
        5,
        "spec.update.backups: is 5: must be less than spec.workers.replicas, because an update needs at least one "
        "gradient; percents such as '5%' follow the number of workers",
    ),
    (
        "spec/update/backups",
        "5.5%",
        "spec.update.backups: is \"5.5%\": must be a whole number of pods, or whole percents from '0%' to '99%'",
    ),
    (
        "spec/update/backups",
        [1],
        "spec.update.backups: is [1]: must be a whole number of pods, or whole percents from '0%' to '99%'",
    ),
    ("spec/update/mode", "sync", 'spec.update.mode: is "sync": must be Sync or Async; did you mean Sync?'),
    (
        "spec/update/maxStaleness",
        4,
        "spec.update.maxStaleness: is 4: must be left out in mode Sync, where no gradient is stale; it is for "
        "mode Async",
    ),
    (
        "spec/update/overlap",
        True,
        "spec.update.overlap: is true: must be false in mode Sync, where a gradient needs the newest parameters; it is "
        "for mode Async",
    ),
    (
        "spec/update",
        {"mode": "Async", "overlap": True, "maxStaleness": 0},
        "spec.update.maxStaleness: is 0: must be at least 1 with spec.update.overlap, where each gradient is computed "
        "without the worker's last one; or set spec.update.overlap to false",
    ),
    (
        "spec/update/stalenessDamping",
        True,
        "spec.update.stalenessDamping: is true: must be false in mode Sync, where no gradient is stale; it is for mode "
        "Async",
    ),
    (
        "spec/update/mode",
        "Async",
        'spec.update.backups: is "5%": must be left out in mode Async, which never waits for a worker; backups are for '
        "mode Sync",
    ),
    (
        "spec/checkpoint/uri",
        "s3://b/f",
        "spec.checkpoint.volume: must be left out together with spec.checkpoint.uri: checkpoints are stored in "
        "one place",
    ),
    (
        "spec/checkpoint/volume",
        {},
        "spec.checkpoint.volume: is empty: must be the source of a volume, such as persistentVolumeClaim: "
        "{claimName: ckpt}",
    ),
    (
        "spec/checkpoint/volume",
        {"emptyDir": {}},
        "spec.checkpoint.volume.emptyDir: must not be used, because it belongs to one pod and is deleted with "
        "it. Use a volume that all servers share, such as persistentVolumeClaim: {claimName: ckpt}",
    ),
    (
        "spec/checkpoint/volume/name",
        "v",
        'spec.checkpoint.volume.name: is "v": must be left out, the operator names the volume; give the source alone, '
        "such as persistentVolumeClaim: {claimName: ckpt}",
    ),
    (
        "spec/checkpoint",
        {"uri": "memory://a"},
        'spec.checkpoint.uri: is "memory://a": must be a place to write that all servers share and that outlives '
        "them: not memory:// or http://",
    ),
    ("spec/checkpoint/keep", 0, "spec.checkpoint.keep: is 0: must be between 1 and 10000"),
    (
        "spec/workingDir",
        "/x",
        'spec.workingDir: is "/x": must be left out together with spec.code, whose files are the working directory',
    ),
    ("spec/runPolicy/suspend", "yes", 'spec.runPolicy.suspend: is "yes", a string: must be true or false'),
    (
        "spec/runPolicy/cleanPods",
        "running",
        'spec.runPolicy.cleanPods: is "running": must be Running or All or None; did you mean Running?',
    ),
    ("spec/scheduling/queue", "A", f'spec.scheduling.queue: is "A": {NAMED}'),
    ("spec/scheduling/gang", {}, f"spec.scheduling.gang.podGroup: is missing: {NAMED}"),
    (
        "spec/scheduling/gang",
        {"podGroup": "g" * 59, "by": "Rank"},
        f'spec.scheduling.gang.podGroup: is "{"g" * 59}...: must be at most 58 characters with by: Rank, because a '
        "hyphen and the rank follow it",
    ),
    (
        "spec/env/0",
        {"name": "BACKSTAY_ROLE", "value": "x"},
        'spec.env[0].name: is "BACKSTAY_ROLE": must not begin with BACKSTAY_: this prefix is '
        "reserved; choose another name",
    ),
    (
        "spec/env/0",
        {"name": "A", "value": 1},
        'spec.env[0].value: is 1, a number: must be a string; write "1" in quotes',
    ),
    (
        "spec/env/0",
        {"name": "A", "value": True},
        'spec.env[0].value: is true: must be a string; write "true" in quotes',
    ),
    (
        "spec/env/0",
        {"name": "A", "value": "1", "valueFrom": {}},
        "spec.env[0].valueFrom: must be left out together with value: a variable has one source",
    ),
    (
        f"{TRAINER}/env",
        [{"name": "A"}, {"name": "BACKSTAY_TOKEN"}],
        'spec.workers.template.spec.containers[0].env[1].name: is "BACKSTAY_TOKEN": must not begin with '
        "BACKSTAY_: this prefix is reserved; choose another name",
    ),
    (
        f"{TRAINER}/name",
        ...,
        "spec.workers.template.spec.containers[0].name: is missing: must be the name of a container: trainer "
        "for the one "
        "that trains, or lower-case letters, digits and '-'",
    ),
    (
        "spec/workers/template/spec/containers/1",
        {"name": "trainer"},
        "spec.workers.template.spec.containers: must not have two containers of one name; the one that trains "
        "is called "
        "trainer",
    ),
    (
        "spec/workers/template/spec/restartPolicy",
        "Always",
        'spec.workers.template.spec.restartPolicy: is "Always": must be Never',
    ),
    (
        "spec/workers/template/metadata/labels/backstay.dev/role",
        "x",
        None,
    ),
    (
        "spec/workers/template/spec/tolerations",
        [{"key": datetime.date(2026, 1, 1)}],
        "spec.workers.template.spec.tolerations[0].key: is a date, which JSON does not have: must be a string; "
        "write it in "
        "quotes",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), BAD, ids=[f"{path}={value!r:.30}" for path, value, _ in BAD])
def test_a_mistake_is_named(path: str, value: Any, message: str | None) -> None:
    if message is None:  # a name with a slash in it
        job = copy.deepcopy(GOOD)
        job["spec"]["workers"]["template"]["metadata"]["labels"]["backstay.dev/role"] = value
        message = (
            "spec.workers.template.metadata.labels: must have no label that begins with backstay.dev/ (such as "
            "backstay.dev/job): the operator finds its pods by them"
        )
    else:
        job = with_field(path, value)
    assert refusals(job) == [message]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "this is null: must be a mapping, a TrainingJob"),
        ([], "this is a list: must be a mapping, a TrainingJob"),
        ("job", "this is a string: must be a mapping, a TrainingJob"),
    ],
)
def test_a_value_that_is_not_an_object_is_refused(value: Any, message: str) -> None:
    assert refusals(value) == [message]


def test_all_mistakes_are_reported_together_and_in_order() -> None:
    job = with_field("spec/workers/replicas", 0)
    job["metadata"]["name"] = "X"
    job["spec"]["update"] = {"mode": "Async", "backups": 7, "maxStalenes": 3}
    job["spec"]["checkpoint"]["keep"] = "3"
    paths = [one.split(": ")[0] for one in refusals(job)]
    assert paths == sorted(paths)
    assert set(paths) == {
        "metadata.name",
        "spec.checkpoint.keep",
        "spec.update.backups",
        "spec.update.maxStalenes",
        "spec.workers.replicas",
    }


def test_a_good_job_is_read_whole_and_comes_back_the_same() -> None:
    before = copy.deepcopy(GOOD)
    job = parse_job(GOOD)
    assert before == GOOD, "what was given is not changed"
    assert job.metadata.namespace == "team"
    assert job.spec.workers.template == GOOD["spec"]["workers"]["template"] | {
        "metadata": {"labels": {"team": "x"}, "creationTimestamp": None}
    }
    assert job.spec.update.backups == "5%"
    assert parse_job(job.to_dict()) == job


def test_what_the_api_server_adds_is_kept_and_a_newer_status_is_understood() -> None:
    job = copy.deepcopy(GOOD)
    job["metadata"] |= {
        "uid": "u",
        "generation": 3,
        "managedFields": [{"manager": "kubectl"}],
        "deletionTimestamp": None,
    }
    job["status"] = {
        "phase": "Running",
        "conditions": [
            {
                "type": "Running",
                "status": "True",
                "reason": "Quorum",
                "message": "",
                "lastTransitionTime": "2026-01-02T03:04:05Z",
            }
        ],
        "roles": {"Worker": {"desired": 5, "ready": 4}},
        "incarnations": {"worker-3": 2},
        "fromTheFuture": {"x": 1},
        "loss": 1,
    }
    read = parse_job(job)
    assert read.metadata.generation == 3
    assert read.metadata.model_extra == {"managedFields": [{"manager": "kubectl"}]}
    assert read.status.incarnations == {"worker-3": 2}
    assert read.status.roles["Worker"].ready == 4
    assert read.status.conditions[0].last_transition_time == datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    assert parse_job(read.to_dict()) == read


def test_whole_numbers_may_be_written_as_yaml_tools_send_them() -> None:
    assert parse_job(with_field("spec/workers/replicas", 6.0)).spec.workers.replicas == 6


def test_a_name_that_the_api_server_makes_up_must_fit_too() -> None:
    job = with_field("metadata/name", ...)
    job["metadata"]["generateName"] = "digits-"
    assert parse_job(job).metadata.name == ""
    job["metadata"]["generateName"] = "a" * 36
    (message,) = refusals(job)
    assert message.startswith("metadata.name: ")


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("spec/command", ["python", "t.py", "a\udcff"], "spec.command[2]"),
        ("spec/workingDir", "/\udcff", "spec.workingDir"),
        ("spec/env", [{"name": "A", "value": "\udcff"}], "spec.env[0].value"),
        ("spec/workers/template/metadata", {"labels": {"a": "\udcff"}}, "spec.workers.template.metadata.labels.a"),
        ("metadata/labels", {"\udcff": "a"}, 'metadata.labels["\\udcff"]'),
        (
            "spec/workers/template/spec",
            {"nodeSelector": {"\udcff": "a"}},
            'spec.workers.template.spec.nodeSelector["\\udcff"]',
        ),
    ],
)
def test_what_is_not_utf8_is_named_because_kubernetes_would_store_something_else(
    path: str, value: Any, place: str
) -> None:
    (message,) = refusals(with_field(path, value))
    assert message.startswith(f"{place}: is ")
    assert message.endswith("which is not UTF-8 text: must be UTF-8, as all text in Kubernetes")


def test_a_nesting_bomb_is_refused() -> None:
    bomb: Any = []
    for _ in range(100_000):
        bomb = [bomb]
    try:
        (message,) = refusals(with_field("spec/workers/template/spec/affinity", bomb))
        assert message == ("spec.workers.template.spec.affinity: is nested more than 64 deep: no field of a pod is")
    finally:
        while bomb:
            bomb = bomb.pop()


PATHS = [
    "metadata",
    "status",
    "spec",
    "spec/env",
    "spec/envFrom",
    "spec/workers",
    "spec/update/backups",
    "spec/checkpoint/volume",
    "spec/workers/template",
    "spec/workers/template/metadata/labels",
    "spec/workers/template/spec/containers",
    "spec/workers/template/spec/containers/0",
    "spec/workers/template/spec/containers/0/env",
    "spec/scheduling/gang",
    "status/conditions",
    "status/startTime",
]
KEYS = st.sampled_from(["name", "env", "spec", "metadata", "replicas", "value", "containers", "uid"]) | st.text(
    max_size=3
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["\ud800", "5%", "2026-01-01", b"", datetime.date(2026, 1, 1)])
)
ANY = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.integers(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(PATHS), ANY)
def test_anything_is_read_or_refused(path: str, value: Any) -> None:
    job = with_field(path, value)
    try:
        read = parse_job(job)
    except SpecErrors as refused:
        str(refused).encode()
        return
    assert parse_job(read.to_dict()) == read
    assert RuntimeConfig.model_validate_json(runtime_config(read.spec).model_dump_json()) == runtime_config(read.spec)


@given(ANY)
def test_anything_at_all_is_refused(value: Any) -> None:
    with pytest.raises(SpecErrors):
        parse_job(value)


def test_a_running_job_may_be_scaled_and_given_other_budgets_and_no_more() -> None:
    old = parse_job(GOOD)
    new = copy.deepcopy(GOOD)
    new["spec"]["workers"] |= {"replicas": 9, "maxRestarts": 5, "stallSeconds": 60}
    new["spec"].setdefault("update", {})["grace"] = "Auto"
    new["spec"]["checkpoint"] |= {"keep": 9, "everySeconds": 5, "everySteps": 7}
    new["spec"]["runPolicy"] = {"suspend": True, "cleanPods": "All", "activeDeadlineSeconds": 60}
    new["spec"]["parameterServers"]["maxRestarts"] = 1
    new["spec"]["evaluator"] = {"maxRestarts": 1}
    check_update(old, parse_job(new))
    new["spec"]["image"] = "other"
    new["spec"]["update"]["backups"] = 1
    del new["spec"]["evaluator"]
    right = "must not change while the job runs: set spec.runPolicy.suspend to true first, or start a new job"
    with pytest.raises(SpecErrors) as refused:
        check_update(old, parse_job(new))
    assert refused.value.errors == tuple(
        SpecError(path, right) for path in ("spec.evaluator", "spec.image", "spec.update.backups")
    )
    check_update(parse_job(with_field("spec/runPolicy/suspend", True)), parse_job(new))


def test_the_runtime_configuration_of_a_spec() -> None:
    assert runtime_config(parse_job(GOOD).spec) == RuntimeConfig(
        shards=2,
        workers=5,
        mode="Sync",
        backups="5%",
        standbys=1,
        evaluator=True,
        checkpoint=CheckpointConfig(uri="/backstay/checkpoints", every_steps=200, every_seconds=60, keep=3),
    )
    job = with_field("spec/checkpoint", {"uri": "s3://b/f", "everySeconds": 0})
    assert runtime_config(parse_job(job).spec).checkpoint == CheckpointConfig(uri="s3://b/f", keep=3)
    assert runtime_config(parse_job(with_field("spec/checkpoint", {})).spec).checkpoint is None
