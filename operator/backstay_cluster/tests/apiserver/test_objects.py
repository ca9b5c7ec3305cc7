"""Objects of any kind follow the rules of versions, names, finalizers, owners, grace, namespaces, and
authentication."""

import pytest

from .test_definitions import CRDS, definition

CORE = "/api/v1/namespaces/default"
MAPS, PODS = f"{CORE}/configmaps", f"{CORE}/pods"


def config_map(name, **meta):
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, **meta}}


def pod(name, **spec):
    containers = [{"name": "c", "image": "example.com/image:1"}]
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {"containers": containers, **spec}}


def owner(obj, **more):
    data = obj["metadata"]
    return {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": data["name"], "uid": data["uid"], **more}


def made(answer):
    assert answer.status == 201, answer
    return answer.json


@pytest.fixture
def clean(embedded):
    yield embedded
    for path in (MAPS, PODS, f"{CORE}/services", f"{CORE}/secrets"):
        for item in embedded.get(path).json["items"]:
            one = f"{path}/{item['metadata']['name']}"
            if item["metadata"].get("finalizers"):
                embedded.merge(one, {"metadata": {"finalizers": None}})
            embedded.delete(f"{one}?gracePeriodSeconds=0")
    embedded.delete("/api/v1/nodes/n1")


# Authentication (O7)


@pytest.mark.parametrize("path", ["/healthz", "/livez", "/readyz", "/readyz/ping"])
def test_o7_health_needs_no_token(embedded, path):
    embedded.token, token = "", embedded.token
    try:
        assert embedded.get(path).status == 200
    finally:
        embedded.token = token


@pytest.mark.parametrize("token", ["", "wrong", "a-token-for-test", "ä"])
@pytest.mark.parametrize("path", ["/version", "/api", "/apis", "/openapi/v3", PODS, "/nope", f"{PODS}?watch=1"])
def test_o7_nothing_else_is_answered_without_the_token(embedded, path, token):
    embedded.token, right = token.encode().decode("latin-1"), embedded.token
    try:
        answer = embedded.get(path)
    finally:
        embedded.token = right
    assert (answer.status, answer.json["reason"], answer.json["message"]) == (401, "Unauthorized", "Unauthorized")


def test_a_body_beyond_the_limit_is_refused(embedded):
    answer = embedded.post(MAPS, {**config_map("big"), "data": {"k": "x" * (4 << 20)}})
    assert (answer.status, answer.json["reason"]) == (413, "RequestEntityTooLarge")


@pytest.mark.parametrize("accept", ["application/vnd.kubernetes.protobuf,application/json", "*/*", "", "application/*"])
def test_answers_are_json_for_clients_that_accept_it(embedded, accept):
    assert embedded.get(PODS, accept=accept).json["kind"] == "PodList"


def test_a_client_that_does_not_accept_json_gets_an_error(embedded):
    assert embedded.get(PODS, accept="application/vnd.kubernetes.protobuf").status == 406


# Versions


def test_generated_names_never_collide(clean):
    names = {made(clean.post(MAPS, config_map("", generateName="x-")))["metadata"]["name"] for _ in range(30)}
    assert len(names) == 30


def test_a_replace_of_a_stale_version_is_a_conflict_and_changes_nothing(clean):
    first = made(clean.post(MAPS, config_map("a")))
    second = clean.merge(f"{MAPS}/a", {"data": {"k": "1"}}).json
    assert clean.put(f"{MAPS}/a", {**first, "data": {"k": "2"}}).json["reason"] == "Conflict"
    assert clean.get(f"{MAPS}/a").json == second


def test_a_replace_for_another_object_of_the_name_is_a_conflict(clean):
    old = made(clean.post(MAPS, config_map("a")))
    clean.delete(f"{MAPS}/a")
    made(clean.post(MAPS, config_map("a")))
    del old["metadata"]["resourceVersion"]
    answer = clean.put(f"{MAPS}/a", old)
    assert answer.status == 409
    assert "Precondition failed: UID in precondition" in answer.json["message"]


def test_a_write_that_changes_nothing_makes_no_version(clean):
    first = made(clean.post(MAPS, {**config_map("a"), "data": {"k": "v"}}))
    assert clean.put(f"{MAPS}/a", first).json == first
    assert clean.merge(f"{MAPS}/a", {"data": {"k": "v"}}).json == first


def test_what_only_the_server_sets_cannot_be_set(clean):
    first = made(clean.post(MAPS, config_map("a", uid="mine", creationTimestamp="2001-01-01T00:00:00Z", generation=7)))
    assert first["metadata"]["uid"] != "mine"
    changed = {"metadata": {"creationTimestamp": "2001-01-01T00:00:00Z", "deletionTimestamp": "2001-01-01T00:00:00Z"}}
    assert clean.merge(f"{MAPS}/a", changed).json == first


def test_names_of_url_and_body_must_agree(clean):
    made(clean.post(MAPS, config_map("a")))
    answer = clean.put(f"{MAPS}/a", config_map("b"))
    assert answer.json["message"] == "the name of the object (b) does not match the name on the URL (a)"


def test_an_unknown_field_is_pruned_with_a_warning(clean):
    answer = clean.post(PODS, pod("a", nonsense=1))
    assert answer.headers["Warning"] == '299 - "unknown field \\"spec.nonsense\\""'
    assert "nonsense" not in answer.json["spec"]


# Deletion


def test_a_running_pod_is_marked_and_goes_when_its_kubelet_reports_it(clean):
    """The order of things that the kubelet and the operator live by (O2)."""
    made(clean.post(PODS, pod("a", nodeName="n1", terminationGracePeriodSeconds=7)))
    marked = clean.delete(f"{PODS}/a").json["metadata"]
    assert marked["deletionGracePeriodSeconds"] == 7
    assert marked["deletionTimestamp"] > marked["creationTimestamp"]
    assert clean.delete(f"{PODS}/a").json["metadata"] == marked, "a second delete changes nothing"
    sooner = clean.delete(f"{PODS}/a?gracePeriodSeconds=3").json["metadata"]
    assert sooner["deletionGracePeriodSeconds"] == 3
    assert clean.delete(f"{PODS}/a", {"gracePeriodSeconds": 0}).status == 200
    assert clean.get(f"{PODS}/a").status == 404


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_a_pod_that_has_ended_is_deleted_immediately(clean, phase):
    made(clean.post(PODS, pod("a", nodeName="n1")))
    assert clean.merge(f"{PODS}/a/status", {"status": {"phase": phase}}).status == 200
    clean.delete(f"{PODS}/a")
    assert clean.get(f"{PODS}/a").status == 404


def test_the_reason_of_an_eviction_is_in_the_status_before_the_pod_ends(clean):
    made(clean.post(PODS, pod("a", nodeName="n1")))
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "a"}}
    assert clean.post(f"{PODS}/a/eviction", eviction).status == 201
    found = clean.get(f"{PODS}/a").json
    assert found["metadata"]["deletionTimestamp"]
    (condition,) = [c for c in found["status"]["conditions"] if c["type"] == "DisruptionTarget"]
    assert condition["reason"] == "EvictionByEvictionAPI"


def test_a_pod_is_bound_once(clean):
    made(clean.post(PODS, pod("a")))
    binding = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "a"},
        "target": {"kind": "Node", "name": "n1"},
    }
    assert clean.post(f"{PODS}/a/binding", binding).status == 201
    assert clean.get(f"{PODS}/a").json["spec"]["nodeName"] == "n1"
    assert clean.post(f"{PODS}/a/binding", binding).status == 409


def test_preconditions_of_a_delete(clean):
    first = made(clean.post(MAPS, config_map("a")))
    for wrong in ({"uid": "other"}, {"resourceVersion": "1"}):
        assert clean.delete(f"{MAPS}/a", {"preconditions": wrong}).json["reason"] == "Conflict"
    right = {"uid": first["metadata"]["uid"], "resourceVersion": first["metadata"]["resourceVersion"]}
    assert clean.delete(f"{MAPS}/a", {"preconditions": right}).status == 200


def test_a_dry_run_changes_nothing(clean):
    made(clean.post(MAPS, config_map("a")))
    before = clean.get(MAPS).json
    assert clean.post(f"{MAPS}?dryRun=All", config_map("b")).status == 201
    assert clean.merge(f"{MAPS}/a?dryRun=All", {"data": {"k": "v"}}).json["data"] == {"k": "v"}
    assert clean.delete(f"{MAPS}/a?dryRun=All").status == 200
    assert clean.get(MAPS).json == before
    assert clean.post(f"{MAPS}?dryRun=Some", config_map("b")).status == 400


# Owners


def family(api, *, block=True):
    parent = made(api.post(MAPS, config_map("parent")))
    child = made(api.post(MAPS, config_map("child", ownerReferences=[owner(parent, blockOwnerDeletion=block)])))
    made(api.post(MAPS, config_map("grandchild", ownerReferences=[owner(child, blockOwnerDeletion=block)])))


def names(api):
    return [o["metadata"]["name"] for o in api.get(MAPS).json["items"]]


def test_owners_background_takes_the_whole_family(clean):
    family(clean)
    clean.delete(f"{MAPS}/parent?propagationPolicy=Background")
    assert names(clean) == []


def test_owners_orphan_leaves_the_children(clean):
    family(clean)
    clean.delete(f"{MAPS}/parent?propagationPolicy=Orphan")
    assert names(clean) == ["child", "grandchild"]
    assert "ownerReferences" not in clean.get(f"{MAPS}/child").json["metadata"]


def test_owners_foreground_waits_for_the_children(clean):
    family(clean)
    clean.merge(f"{MAPS}/child", {"metadata": {"finalizers": ["example.com/hold"]}})
    clean.delete(f"{MAPS}/parent?propagationPolicy=Foreground")
    parent = clean.get(f"{MAPS}/parent").json["metadata"]
    assert parent["finalizers"] == ["foregroundDeletion"]
    assert names(clean) == ["child", "parent"]
    clean.merge(f"{MAPS}/child", {"metadata": {"finalizers": None}})
    assert names(clean) == []


def test_owners_a_second_owner_keeps_the_child(clean):
    first, second = (made(clean.post(MAPS, config_map(n))) for n in ("first", "second"))
    made(clean.post(MAPS, config_map("child", ownerReferences=[owner(first), owner(second)])))
    clean.delete(f"{MAPS}/first")
    assert clean.get(f"{MAPS}/child").json["metadata"]["ownerReferences"] == [owner(second)]
    clean.delete(f"{MAPS}/second")
    assert names(clean) == []


def test_owners_a_child_of_an_owner_that_is_gone_is_not_kept(clean):
    """O2: a pod that is created shortly after the deletion of its job is deleted too."""
    gone = made(clean.post(MAPS, config_map("gone")))
    clean.delete(f"{MAPS}/gone")
    made(clean.post(MAPS, config_map("late", ownerReferences=[owner(gone)])))
    assert names(clean) == []


def test_owners_an_owner_of_a_kind_that_is_not_served_is_left_alone(clean):
    stranger = {"apiVersion": "example.com/v1", "kind": "Stranger", "name": "s", "uid": "u"}
    made(clean.post(MAPS, config_map("child", ownerReferences=[stranger])))
    assert names(clean) == ["child"]


# Namespaces


def test_a_namespace_goes_with_what_is_in_it_and_takes_nothing_new(clean):
    made(clean.post("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tmp"}}))
    inside = "/api/v1/namespaces/tmp/configmaps"
    made(clean.post(inside, config_map("a", finalizers=["example.com/hold"])))
    assert clean.delete("/api/v1/namespaces/tmp").json["status"]["phase"] == "Terminating"
    answer = clean.post(inside, config_map("b"))
    assert (answer.status, answer.json["details"]["causes"][0]["reason"]) == (403, "NamespaceTerminating")
    assert clean.get("/api/v1/namespaces/tmp").status == 200
    clean.merge(f"{inside}/a", {"metadata": {"finalizers": None}})
    assert clean.get("/api/v1/namespaces/tmp").status == 404


# Kinds


def service(name, **spec):
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": {"ports": [{"port": 1}], **spec}}


def test_each_service_has_its_own_address(clean):
    addresses = [made(clean.post(f"{CORE}/services", service(f"s{i}")))["spec"]["clusterIP"] for i in range(5)]
    assert len(set(addresses)) == 5
    assert all(a.startswith("127.96.") for a in addresses)
    taken = clean.post(f"{CORE}/services", service("t", clusterIP=addresses[0]))
    assert "provided IP is already allocated" in taken.json["message"]
    moved = clean.merge(f"{CORE}/services/s0", {"spec": {"clusterIP": "127.96.9.9", "clusterIPs": None}})
    assert "may not change once set" in moved.json["message"]
    clean.delete(f"{CORE}/services/s0")
    made(clean.post(f"{CORE}/services", service("t", clusterIP=addresses[0])))


def test_no_address_is_lost(clean):
    """The loop of a client that creates a Service again and again took all addresses of the network."""
    services = f"{CORE}/services"
    made(clean.post(services, service("s")))
    assert clean.post(services, service("s", clusterIP="127.96.7.7")).status == 409
    made(clean.post(services, service("t", clusterIP="127.96.7.7")))
    external = {"type": "ExternalName", "externalName": "a.example.com", "clusterIP": None, "clusterIPs": None}
    assert "clusterIP" not in clean.merge(f"{services}/t", {"spec": external}).json["spec"]
    clean.delete(f"{services}/t")
    made(clean.post(services, service("u", clusterIP="127.96.7.7")))
    made(clean.post(services, service("v", type="ExternalName", externalName="a.example.com")))
    moved = clean.merge(f"{services}/v", {"spec": {"type": "ClusterIP", "externalName": None}})
    assert moved.json["spec"]["clusterIP"].startswith("127.96.")


def test_requests_of_another_form_are_refused(clean):
    made(clean.post(f"{CORE}/services", service("s")))
    for options in ({"preconditions": "x"}, {"propagationPolicy": []}):
        assert clean.delete(f"{CORE}/services/s", options).status in (400, 422)
    for versions in ([], [{"served": True, "storage": True, "schema": {"openAPIV3Schema": {"type": "object"}}}]):
        crd = definition("nameless", "Nameless")
        crd["spec"]["versions"] = versions
        assert clean.post(CRDS, crd).status == 422
    event = {"metadata": {"name": "e"}, "involvedObject": {"namespace": "default"}}
    made(clean.post(f"{CORE}/events", {**event, "lastTimestamp": "2024-01-01T00:00:00"}))
    table = "application/json;as=Table;v=v1;g=meta.k8s.io"
    assert clean.get(f"{CORE}/events", accept=table).status == 200


def test_o3_one_patch_moves_a_service_only_if_it_is_where_it_was(clean):
    made(clean.post(f"{CORE}/services", service("s", selector={"incarnation": "1"})))
    path = "/spec/selector/incarnation"
    move = [{"op": "test", "path": path, "value": "1"}, {"op": "replace", "path": path, "value": "2"}]
    content = "application/json-patch+json"
    done = clean.call("PATCH", f"{CORE}/services/s", move, content_type=content)
    assert done.json["spec"]["selector"] == {"incarnation": "2"}
    assert clean.call("PATCH", f"{CORE}/services/s", move, content_type=content).status == 422


def test_a_lease_changes_hands_by_version_only(clean):
    leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
    lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}}
    first = made(clean.post(leases, {**lease, "spec": {"holderIdentity": "a"}}))
    assert clean.put(f"{leases}/l", {**first, "spec": {"holderIdentity": "b"}}).status == 200
    assert clean.put(f"{leases}/l", {**first, "spec": {"holderIdentity": "c"}}).json["reason"] == "Conflict"
    assert clean.delete(f"{leases}/l").status == 200


@pytest.mark.parametrize(
    ("change", "field", "said"),
    [
        ({"restartPolicy": "Sometimes"}, "spec.restartPolicy", "Unsupported value"),
        ({"containers": [{"name": "c"}]}, "spec.containers[0].image", "Required value"),
        ({"containers": [{"name": "C", "image": "i"}]}, "spec.containers[0].name", "RFC 1123 label"),
        ({"containers": [{"name": "c", "image": "i"}] * 2}, "spec.containers[1].name", "Duplicate value"),
        (
            {"volumes": [{"name": "v", "emptyDir": {}, "secret": {"secretName": "s"}}]},
            "spec.volumes[0].secret",
            "more than 1",
        ),
        (
            {"containers": [{"name": "c", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}]},
            "spec.containers[0].volumeMounts[0].name",
            'Not found: "v"',
        ),
        (
            {"containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}]},
            "spec.containers[0].resources.requests",
            "must be less than or equal to cpu limit of 1",
        ),
        (
            {"tolerations": [{"operator": "Equal"}]},
            "spec.tolerations[0].operator",
            "must be Exists when `key` is empty",
        ),
    ],
)
def test_o4_a_pod_that_cannot_be_is_refused_with_the_field(clean, change, field, said):
    answer = clean.post(PODS, pod("a", **change))
    assert (answer.status, answer.json["reason"]) == (422, "Invalid")
    causes = {c["field"]: c["message"] for c in answer.json["details"]["causes"]}
    assert said in causes[field]


def test_a_pod_of_a_service_account_that_is_not_there_is_forbidden(clean):
    answer = clean.post(PODS, pod("a", serviceAccountName="nobody"))
    assert (answer.status, answer.json["reason"]) == (403, "Forbidden")


def test_o6_a_pod_without_a_token_has_no_volume_for_it(clean):
    assert "volumes" not in made(clean.post(PODS, pod("a", automountServiceAccountToken=False)))["spec"]


def test_a_secret_of_bytes_that_are_none_is_refused(clean):
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "data": {"k": "no base64!"}}
    answer = clean.post(f"{CORE}/secrets", secret)
    assert (answer.status, answer.json["reason"]) == (400, "BadRequest")
    assert "illegal base64 data at input byte 2" in answer.json["message"]


def test_resources_are_written_in_canonical_form(clean):
    amounts = {"cpu": "0.5", "memory": "1024Mi", "example.com/gpu": 1}
    container = {"name": "c", "image": "i", "resources": {"limits": amounts}}
    found = made(clean.post(PODS, pod("a", containers=[container])))
    canonical = {"cpu": "500m", "memory": "1Gi", "example.com/gpu": "1"}
    assert found["spec"]["containers"][0]["resources"] == {"limits": canonical, "requests": canonical}
    assert found["status"]["qosClass"] == "Guaranteed"
