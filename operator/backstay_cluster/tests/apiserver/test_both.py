"""The embedded server and a real kube-apiserver get the same requests, and give the same answers.

The requests are generated. They are TrainingJobs and custom resources (schemas and rules), and sequences of writes and
reads of pods. The sequences have conflicts, patches, the status subresource, selectors, finalizers, and a watch.
"""

import itertools
import time
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay_cluster.tests.limits import slack

from .test_definitions import CRDS, GROUP, WIDGETS, definition, established, widget
from .test_transcript import comparable, events

pytestmark = pytest.mark.tool("etcd", "kube-apiserver")
TRAININGJOBS = Path(__file__).parents[4] / "crds" / "backstay.dev_trainingjobs.yaml"
JOBS = "/apis/backstay.dev/v1alpha1/namespaces/default/trainingjobs"
NUMBER = itertools.count()


@pytest.fixture(scope="module")
def both(embedded, real):
    for api in (embedded, real):
        for crd in (definition("twins", "Twin"), yaml.safe_load(TRAININGJOBS.read_text())):
            assert api.post(CRDS, crd).status == 201
            established(api, crd["metadata"]["name"])
    twins = f"/apis/{GROUP}/v1/namespaces/default/twins"
    for api, path in itertools.product((embedded, real), (twins, JOBS)):
        began = time.monotonic()
        while api.get(path).status != 200:
            assert time.monotonic() < began + 120 * slack(), path
            time.sleep(0.02)
    yield embedded, real
    for name in (f"twins.{GROUP}", "trainingjobs.backstay.dev"):
        real.delete(f"{CRDS}/{name}")


def answer(api, method, path, body=None, **options):
    """Send a request; return the status, and the object or the error, without what may differ.

    Causes have another order, and the wording of a wrong type differs. The real server adds causes that name no field
    of the object, and those of the scale subresource.
    """
    found = api.call(method, path, body, **options)
    content = comparable(found.json)
    causes = (content.get("details") or {}).get("causes")
    if causes:
        named = {(cause["field"], cause["reason"]) for cause in causes if cause["field"].startswith(("spec", "meta"))}
        content["details"]["causes"] = sorted(named)
        content["message"] = ""
    return found.status, content


def same(both, *request, **options):
    embedded, real = (answer(api, *request, **options) for api in both)
    assert embedded == real
    return embedded


@pytest.mark.parametrize(
    "spec",
    [
        {"color": "red"},
        {"share": True},
        {"share": []},
        {"share": "5"},
        {"when": "soon"},
        {"when": 5},
        {"ratio": "x"},
        {"ratio": -1},
        {"tags": "x"},
        {"tags": [None]},
        {"tags": ["a"] * 11},
        {"ports": [1]},
        {"ports": [{"name": "p"}, {"name": "p"}, {"port": 2}]},
        {"count": "a"},
        {"count": 2**40},
        {"low": "1"},
        {"low": 4, "flag": True},
        {"labels": []},
        {"title": "x" * 30},
        {"flag": "true"},
        {"color": None, "high": None},
    ],
)
def test_an_object_of_a_definition_gets_the_same_answer(both, spec):
    status, _ = same(both, "POST", WIDGETS.replace("widgets", "twins"), {**widget(**spec), "kind": "Twin"})
    if status == 201:
        for api in both:
            assert api.delete(f"{WIDGETS.replace('widgets', 'twins')}/a").status == 200


SPEC = {
    "image": "trainer:1",
    "command": ["python", "train.py"],
    "parameterServers": {"replicas": 2},
    "workers": {"replicas": 2},
}
PATHS = st.sampled_from(
    [
        ("image",),
        ("command",),
        ("args",),
        ("steps",),
        ("nothing",),
        ("evaluator",),
        ("seed",),
        ("parameterServers",),
        ("parameterServers", "replicas"),
        ("parameterServers", "standbys"),
        ("workers", "replicas"),
        ("workers", "gpus"),
        ("update", "mode"),
        ("update", "backups"),
        ("update", "quorum"),
        ("localSteps",),
        ("localSteps", "steps"),
        ("checkpoint",),
        ("checkpoint", "uri"),
        ("checkpoint", "keep"),
        ("checkpoint", "everySteps"),
        ("checkpoint", "keepBest"),
        ("checkpoint", "keepBest", "metric"),
        ("wire", "gradients"),
        ("code",),
        ("workingDir",),
        ("runPolicy", "maxRestarts"),
        ("runPolicy", "ttlSecondsAfterFinished"),
    ]
)
VALUES = st.sampled_from(
    [None, True, -1, 0, 1, 3, 2.5, 10**6, 10**12, "", "x", "Sync", "Async", "Int4", "Auto", [], ["a", 1], {}, {"x": 1}]
)


def edited(edits):
    spec = yaml.safe_load(yaml.safe_dump(SPEC))
    for path, value in edits:
        at = spec
        for name in path[:-1]:
            if not isinstance(at.get(name), dict):
                at[name] = {}
            at = at[name]
        at[path[-1]] = value
    return spec


@given(st.lists(st.tuples(PATHS, VALUES), min_size=1, max_size=4), st.lists(st.tuples(PATHS, VALUES), max_size=2))
@settings(max_examples=150)
def test_o2_any_training_job_gets_the_same_answer(both, edits, later):
    """O2: also a change of a stored job, which has transition rules."""
    name = f"job{next(NUMBER)}"
    job = {"apiVersion": "backstay.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": name}}
    status, _ = same(both, "POST", JOBS, {**job, "spec": edited(edits)})
    if status != 201:
        return
    if later:
        change = {"spec": edited(later)}
        same(both, "PATCH", f"{JOBS}/{name}", change, content_type="application/merge-patch+json")
    status = {"status": {"phase": "Running", "restarts": 3}, "spec": {"image": "other"}}
    same(both, "PATCH", f"{JOBS}/{name}/status", status, content_type="application/merge-patch+json")
    same(both, "DELETE", f"{JOBS}/{name}")


PODS = "/api/v1/namespaces/{}/pods"
POD_NAMES = st.sampled_from(["a", "b"])
LABELS = st.fixed_dictionaries({}, optional={"l": st.sampled_from(["1", "2", None]), "m": st.sampled_from(["", None])})
CHANGES = st.fixed_dictionaries(
    {},
    optional={
        "image": st.sampled_from(["new:2", "", 5]),
        "env": st.lists(
            st.sampled_from([{"name": "A", "value": "1"}, {"name": "B"}, {"name": "A", "$patch": "delete"}, {"x": 1}]),
            max_size=2,
        ),
        "name": st.sampled_from(["c", "other"]),
    },
)
OPERATIONS = st.one_of(
    st.tuples(st.just("create"), POD_NAMES, LABELS),
    st.tuples(st.just("create with a finalizer"), POD_NAMES, LABELS),
    st.tuples(st.just("merge"), POD_NAMES, LABELS),
    st.tuples(st.just("strategic"), POD_NAMES, CHANGES),
    st.tuples(st.just("json"), POD_NAMES, st.sampled_from(["add", "remove", "replace", "test"])),
    st.tuples(st.just("status"), POD_NAMES, st.sampled_from(["Running", "Failed", "Succeeded"])),
    st.tuples(st.just("replace"), POD_NAMES, st.booleans()),
    st.tuples(st.just("delete"), POD_NAMES, st.sampled_from(["", "uid", "version"])),
    st.tuples(st.just("release"), POD_NAMES, st.none()),
    st.tuples(
        st.just("list"),
        st.sampled_from(["", "l=1", "l in (1,2),!m", "l!=1"]),
        st.sampled_from(["", "status.phase=Running", "status.phase!=Running,metadata.name=a", "spec.image=x"]),
    ),
)


def run(api, namespace, operation, stale):
    """Returns one operation on one server. `stale` has the first object of each name, whose version becomes
    outdated."""
    what, name, more = operation
    pods = PODS.format(namespace)
    path = f"{pods}/{name}"
    if what.startswith("create"):
        data = {"name": name, "labels": {k: v for k, v in more.items() if v is not None}}
        if what != "create":
            data["finalizers"] = ["example.com/hold"]
        container = {"name": "c", "image": "i", "env": [{"name": "A", "value": "0"}]}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 0, "nodeSelector": {"never": "match"}}
        return answer(api, "POST", pods, {"apiVersion": "v1", "kind": "Pod", "metadata": data, "spec": spec})
    if what == "merge":
        return answer(api, "PATCH", path, {"metadata": {"labels": more}}, content_type="application/merge-patch+json")
    if what == "strategic":
        container = {"name": "c", **more}
        body = {"spec": {"containers": [container]}}
        return answer(api, "PATCH", path, body, content_type="application/strategic-merge-patch+json")
    if what == "json":
        body = [{"op": more, "path": "/metadata/labels/l", "value": "2"}]
        return answer(api, "PATCH", path, body, content_type="application/json-patch+json")
    if what == "status":
        body = {"status": {"phase": more, "message": "m"}, "metadata": {"labels": {"not": "stored"}}}
        return answer(api, "PATCH", f"{path}/status", body, content_type="application/strategic-merge-patch+json")
    if what == "release":
        return answer(
            api, "PATCH", path, {"metadata": {"finalizers": None}}, content_type="application/merge-patch+json"
        )
    if what == "list":
        selectors = f"labelSelector={name.replace(' ', '%20')}&fieldSelector={more}"
        return answer(api, "GET", f"{pods}?{selectors}")
    now = api.get(path)
    if now.status == 200:
        stale.setdefault(name, now.json)
    old = stale.get(name, {"metadata": {"name": name, "uid": "x", "resourceVersion": "1"}})
    if what == "replace":
        if now.status != 200:
            return now.status, {}
        body = now.json if more else {**now.json, "metadata": old["metadata"]}
        body["spec"]["activeDeadlineSeconds"] = 100
        return answer(api, "PUT", path, body)
    wanted = {
        "uid": {"uid": old["metadata"]["uid"]},
        "version": {"resourceVersion": old["metadata"]["resourceVersion"]},
    }
    return answer(api, "DELETE", path, {"preconditions": wanted[more]} if more else None)


@given(st.lists(OPERATIONS, min_size=1, max_size=12))
@settings(max_examples=40)
def test_any_sequence_of_requests_has_the_same_answers_and_the_same_watch(both, operations):
    namespace = f"twin{next(NUMBER)}"
    body = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    answers, starts = [], []
    for api in both:
        assert api.post("/api/v1/namespaces", body).status == 201
        starts.append(api.get(PODS.format(namespace)).json["metadata"]["resourceVersion"])
        stale = {}
        answers.append([run(api, namespace, operation, stale) for operation in operations])
    for operation, embedded, real in zip(operations, *answers, strict=True):
        assert embedded == real, operation
    watched = []
    for api, start in zip(both, starts, strict=True):
        assert run(api, namespace, ("create", "last", {"l": "1"}), {})[0] == 201
        path = f"{PODS.format(namespace)}?watch=1&timeoutSeconds=60&labelSelector=l%3D1&resourceVersion={start}"
        watched.append(events(api.watch(path, last="last")))
    assert watched[0] == watched[1]


OWN_PODS = "/api/v1/namespaces/default/pods"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"


def pod(name, **more):
    containers = [{"name": "c", "image": "i"}]
    spec = {"containers": containers, "automountServiceAccountToken": False, **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def binding(name, **metadata):
    target = {"apiVersion": "v1", "kind": "Node", "name": "n"}
    return {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name, **metadata}, "target": target}


def removed(both, *paths):
    for api, path in itertools.product(both, paths):
        api.merge(path, {"metadata": {"finalizers": None}})
        api.delete(f"{path}?gracePeriodSeconds=0")


def test_scheduling_gates_are_removed_and_not_added(both):
    gates = [{"name": "example.com/a"}, {"name": "example.com/b"}]
    for number, (patch, kind) in enumerate(
        [
            ({"schedulingGates": gates[:1]}, MERGE),
            ({"schedulingGates": None}, MERGE),
            ({"schedulingGates": [{"name": "example.com/a", "$patch": "delete"}]}, STRATEGIC),
            ({"schedulingGates": [*gates, {"name": "example.com/c"}]}, MERGE),
        ]
    ):
        name = f"gated-{number}"
        assert same(both, "POST", OWN_PODS, pod(name, schedulingGates=gates))[0] == 201
        assert same(both, "POST", f"{OWN_PODS}/{name}/binding", binding(name))[0] == 409
        status, found = same(both, "PATCH", f"{OWN_PODS}/{name}", {"spec": patch}, content_type=kind)
        if number == 3:
            assert status == 422
        else:
            assert len(found["spec"].get("schedulingGates", [])) == (1, 0, 1)[number]
        removed(both, f"{OWN_PODS}/{name}")


def test_a_pod_is_bound_only_if_it_is_the_one_that_was_chosen(both):
    assert same(both, "POST", OWN_PODS, pod("chosen"))[0] == 201
    for api in both:
        wrong = api.post(f"{OWN_PODS}/chosen/binding", binding("chosen", uid="another"))
        assert wrong.status == 409
        assert "Precondition failed: UID in precondition: another" in wrong.json["message"]
        own = api.get(f"{OWN_PODS}/chosen").json["metadata"]["uid"]
        assert api.post(f"{OWN_PODS}/chosen/binding", binding("chosen", uid=own)).status == 201
    removed(both, f"{OWN_PODS}/chosen")


def test_a_second_delete_moves_the_end_of_the_grace_period(both):
    for api in both:
        assert api.post(OWN_PODS, pod("leaving")).status == 201
        assert api.post(f"{OWN_PODS}/leaving/binding", binding("leaving")).status == 201
        ends = []
        for grace in (100, 40, 70):
            assert api.delete(f"{OWN_PODS}/leaving?gracePeriodSeconds={grace}").status == 200
            found = api.get(f"{OWN_PODS}/leaving").json["metadata"]
            ends.append((datetime.fromisoformat(found["deletionTimestamp"]), found["deletionGracePeriodSeconds"]))
        assert [(ends[0][0] - end).total_seconds() for end, _ in ends] == [0, 60, 60]
        assert [grace for _, grace in ends] == [100, 40, 40]
    removed(both, f"{OWN_PODS}/leaving")


def test_finalizers_follow_the_same_rules(both):
    twins = WIDGETS.replace("widgets", "twins")
    for finalizers in (["cleanup"], ["a b/c"], ["example.com/x"], ["/x"], ["a/b/c"]):
        marked = pod("marked")
        marked["metadata"]["finalizers"] = finalizers
        same(both, "POST", OWN_PODS, marked)
        twin = {**widget(), "kind": "Twin"}
        twin["metadata"] = {"name": "marked", "finalizers": finalizers}
        if same(both, "POST", twins, twin)[0] == 201:
            assert same(both, "DELETE", f"{twins}/marked")[0] == 200
            more = {"metadata": {"finalizers": [*finalizers, "example.com/late"]}}
            assert same(both, "PATCH", f"{twins}/marked", more, content_type=MERGE)[0] == 422
        removed(both, f"{OWN_PODS}/marked", f"{twins}/marked")


def test_half_of_a_surrogate_pair_is_replaced_and_the_kind_stays_readable(both):
    env = [{"name": "A", "value": "x\udcffy"}, {"name": "B", "value": "\U0001f600"}]
    assert same(both, "POST", OWN_PODS, pod("odd", containers=[{"name": "c", "image": "i", "env": env}]))[0] == 201
    for api in both:
        found = api.get(f"{OWN_PODS}/odd").json["spec"]["containers"][0]["env"]
        assert [one["value"] for one in found] == ["x\ufffdy", "\U0001f600"]
        assert api.get(OWN_PODS).status == 200
    removed(both, f"{OWN_PODS}/odd")
