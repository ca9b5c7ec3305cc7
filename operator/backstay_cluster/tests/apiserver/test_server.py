"""The server is tested from outside by ports, certificates, invalid bytes on the wire, counted work, and its own
data."""

import asyncio
import json
import re
import socket
import ssl
import threading
from dataclasses import replace
from importlib import resources

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster import quantity
from backstay_cluster.apiserver import ApiServer, typegen
from backstay_cluster.apiserver.certs import make_certificate
from backstay_cluster.apiserver.errors import ApiError
from backstay_cluster.apiserver.handlers import Call
from backstay_cluster.apiserver.protobuf import decode_protobuf
from backstay_cluster.apiserver.request import locate
from backstay_cluster.apiserver.tables import duration
from backstay_cluster.tests.limits import LONG

TOKEN = "a-token-for-tests"
PODS = "/api/v1/namespaces/default/pods"
CORE = "/api/v1/namespaces/default"


def test_a_port_that_is_taken_is_an_error_that_leaves_nothing_open(start):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="address already in use"):
        start(port=taken.getsockname()[1])


def test_a_server_without_a_token_is_not_made():
    with pytest.raises(ValueError, match="token"):
        ApiServer(token="")


def test_stopping_ends_the_watches_of_all_clients(start):
    server = start()
    opened, found = threading.Event(), []
    reader = threading.Thread(target=lambda: found.append(server.watch(f"{PODS}?watch=1", opened=opened.set)))
    reader.start()
    assert opened.wait(LONG)
    server.stop()
    reader.join(LONG)
    assert found == [[]]


def test_without_tls_it_serves_plain_http(start):
    server = start(tls=False)
    assert server.url.startswith("http://")
    assert server.get(PODS).status == 200


def test_the_certificate_is_taken_by_the_strictest_client(embedded):
    context = ssl.create_default_context(cadata=embedded.server.ca)
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    host, port = re.fullmatch(r"https://(.*):(\d+)", embedded.url).groups()
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
        assert ("IP Address", "127.0.0.1") in tls.getpeercert()["subjectAltName"]


def test_a_certificate_of_another_server_is_refused(embedded):
    context = ssl.create_default_context(cadata=make_certificate(["127.0.0.1"]).pem)
    host, port = re.fullmatch(r"https://(.*):(\d+)", embedded.url).groups()
    with socket.create_connection((host, int(port))) as plain, pytest.raises(ssl.SSLCertVerificationError):
        context.wrap_socket(plain, server_hostname=host)


def test_the_private_key_is_not_shown():
    assert "PRIVATE" not in repr(make_certificate(["localhost"]))


def test_the_table_of_built_in_types_is_fresh():
    """`python -m backstay_cluster.apiserver.typegen` writes the same file again."""
    found = resources.files("backstay_cluster.apiserver").joinpath("data/types.json").read_text()
    assert json.loads(found) == typegen.generate()


FIELDS = """
metadata name labels spec containers image ports env status conditions
type rules data stringData group versions names schema openAPIV3Schema properties
replicas template volumes ownerReferences uid selector finalizers clusterIP resources limits
cpu op path value involvedObject deleteOptions target x
"""
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(FIELDS.split()),
            inner,
            max_size=4,
        )
    ),
    max_leaves=14,
)
CONTAINER = {
    "name": "c",
    "image": "i",
    "env": [{"name": "E", "value": "1"}, {"name": "F", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    "ports": [{"name": "p", "containerPort": 1}],
    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}},
    "readinessProbe": {"httpGet": {"port": 1}},
}
POD_SPEC = {
    "containers": [CONTAINER],
    "initContainers": [{"name": "i", "image": "i"}],
    "volumes": [{"name": "v", "emptyDir": {}}, {"name": "w", "projected": {"sources": [{"secret": {"name": "s"}}]}}],
    "tolerations": [{"key": "a", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}],
    "nodeSelector": {"a": "b"},
}
OWNER = {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "u", "controller": True}
META = {"name": "n", "labels": {"a": "b"}, "annotations": {"a": "b"}, "finalizers": ["a/b"], "ownerReferences": [OWNER]}
STATUS = {
    "phase": "Running",
    "conditions": [{"type": "Ready", "status": "True"}],
    "containerStatuses": [{"name": "c", "ready": True, "state": {"terminated": {"exitCode": 1}}}],
}
RULES = [{"rule": "self.a > 1", "message": "m"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer", "default": 1}}, "x-kubernetes-validations": RULES}
VERSION = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": SCHEMA}, "subresources": {}}
DEFINITION = {"group": "g.io", "scope": "Namespaced", "names": {"plural": "ns", "kind": "N"}, "versions": [VERSION]}
ABOUT = {"kind": "Pod", "name": "p", "namespace": "default"}
# Where to send what: objects that would be taken as they are, before something in them is replaced.
PATHS = st.sampled_from(
    [
        (PODS, {"metadata": META, "spec": POD_SPEC, "status": STATUS}),
        (f"{CORE}/services", {"metadata": META, "spec": {"ports": [{"port": 1}], "selector": {"a": "b"}}}),
        (f"{CORE}/secrets", {"metadata": META, "data": {"k": "dg=="}, "stringData": {"l": "v"}, "type": "t"}),
        (f"{CORE}/configmaps", {"metadata": META, "data": {"k": "v"}, "immutable": True}),
        (f"{CORE}/events", {"metadata": META, "involvedObject": ABOUT, "source": {"component": "c"}, "count": 1}),
        ("/api/v1/namespaces", {"metadata": META, "spec": {"finalizers": []}}),
        ("/api/v1/nodes", {"metadata": META, "status": {"conditions": [], "addresses": []}}),
        (
            "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
            {"metadata": {"name": "ns.g.io"}, "spec": DEFINITION},
        ),
        (f"{PODS}/p/eviction", {"metadata": META, "deleteOptions": {"preconditions": {"uid": "u"}}}),
        (f"{PODS}/p/binding", {"metadata": META, "target": {"name": "n"}}),
        (f"{PODS}/p/status", {"metadata": {"name": "p"}, "status": STATUS}),
        (f"{PODS}/p", {"metadata": {"name": "p"}, "spec": POD_SPEC, "status": STATUS}),
    ]
)


@st.composite
def bodies(draw, valid):
    """Returns any JSON, or a valid object with any JSON somewhere in it."""
    if draw(st.integers(0, 4)) == 0:
        return draw(JSON)
    if isinstance(valid, dict) and valid and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(valid)))
        return {**valid, key: draw(bodies(valid[key]))}
    if isinstance(valid, list) and valid and draw(st.integers(0, 4)):
        at = draw(st.integers(0, len(valid) - 1))
        return [*valid[:at], draw(bodies(valid[at])), *valid[at + 1 :]]
    return draw(JSON)


PATCHES = st.sampled_from(
    [
        "application/json",
        "application/merge-patch+json",
        "application/json-patch+json",
        "application/strategic-merge-patch+json",
    ]
)


@given(st.data(), PATHS, st.sampled_from(["POST", "POST", "PUT", "PATCH", "DELETE"]), PATCHES)
def test_no_body_makes_the_server_fail(data, where, method, content_type):
    """Every body of any shape is taken or refused with a status: nothing raises anything but the API's own
    errors."""
    path, valid = where
    body = data.draw(bodies(valid))
    server = ApiServer(token=TOKEN, tls=False)
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "image": "i"}]}}
    server.api.create(server.api.registry.must("", "pods"), "default", pod)
    call = Call(method, "", {}, "", content_type, json.dumps(body).encode())
    target = locate(server.api.registry, path)
    serve = server._subresources if server._subresources.serves(target) else server._handlers
    try:
        answer = serve.dispatch(target, call)
    except ApiError as error:
        assert 400 <= error.code < 500  # noqa: PT017
        json.dumps(error.status())
    else:
        json.loads(answer.body)
        table = Call("GET", "", {}, "application/json;as=Table;v=v1;g=meta.k8s.io")
        json.loads(server._handlers.collection(replace(target, name="", subresource=""), table).body)
    server._controllers.drain()


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"-Infinity", b"1e999", b"9" * 400, b"9" * 5000])
def test_a_number_that_json_does_not_have_is_a_bad_request(embedded, number):
    body = b'{"metadata":{"name":"n"},"data":{"a":' + number + b"}}"
    assert embedded.post(f"{CORE}/configmaps", body).status == 400


def test_a_body_that_is_nested_too_deeply_is_a_bad_request(embedded):
    for depth in (300, 3000, 100_000):
        body = b'{"metadata":' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
        assert embedded.post(PODS, body).status in {400, 422}
        assert embedded.merge(f"{CORE}/serviceaccounts/default", body).status in {200, 400}


@given(st.binary(max_size=40), st.sampled_from(["Namespace", "ConfigMap", "Secret", "Pod"]))
def test_no_bytes_make_the_protobuf_reader_fail(body, kind):
    for data in (body, b"k8s\x00" + body):
        try:
            decode_protobuf(data, kind)
        except ApiError as error:
            assert error.code in {400, 415}  # noqa: PT017


@given(st.binary(max_size=60))
def test_garbage_over_http_is_a_bad_request(body):
    server = ApiServer(token=TOKEN, tls=False)
    target = locate(server.api.registry, PODS)
    with pytest.raises(ApiError) as caught:
        server._handlers.dispatch(target, Call("POST", PODS, {}, "", "application/json", b"{" + body))
    assert caught.value.code in {400, 422}


@given(st.integers(1, 10**6), st.sampled_from(["n", "u", "m", "", "k", "M", "G", "Ki", "Mi", "Gi", "e3", "E-1"]))
def test_a_canonical_quantity_is_the_same_amount_and_stays_as_it_is(number, suffix):
    text = f"{number}{suffix}"
    canonical = quantity.canonical(text)
    assert quantity.value(canonical) == quantity.value(text)
    assert quantity.canonical(canonical) == canonical


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("0.5", "500m"),
        ("1000m", "1"),
        ("1024Mi", "1Gi"),
        ("1500Mi", "1500Mi"),
        ("0", "0"),
        ("1e3", "1e3"),
        ("1.5Gi", "1536Mi"),
    ],
)
def test_canonical_quantities(text, canonical):
    assert quantity.canonical(text) == canonical


@pytest.mark.parametrize("text", ["", "x", "1Q", "1 Gi", "--1", "1.2.3"])
def test_an_invalid_quantity_is_refused(text):
    with pytest.raises(ValueError, match="quantities must match"):
        quantity.value(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (125, "2m5s"), (3599, "59m"), (3 * 3600 + 60, "3h1m"), (49 * 3600, "2d1h")],
)
def test_ages_are_written_as_kubectl_does(seconds, text):
    assert duration(seconds) == text


def test_a_change_costs_only_the_watches_that_can_see_it(embedded):
    """A thousand pods do not make it quadratic: what is counted is work, not time."""
    api = embedded.server.api
    maps = api.registry.must("", "configmaps")
    called = {"default": 0, "kube-system": 0}

    def count(space):
        def listener(_):
            called[space] += 1

        return listener

    def run():
        stops = [api.store.listen(maps.storage, space, count(space)) for space in called]
        encoded = set()
        for at in range(1000):
            api.create(maps, "default", {"metadata": {"name": f"m{at}"}})
        for stored in api.select(maps, "default").items:
            encoded.add(id(stored.body))
            assert stored.body is stored.body, "an object is encoded once"
        for stop in stops:
            stop()
        return len(encoded)

    assert embedded.within(run) == 1000
    assert called == {"default": 1000, "kube-system": 0}
    assert len(embedded.get(f"{CORE}/configmaps").json["items"]) == 1000


def test_starting_and_stopping_leaves_the_loop_clean():
    async def life():
        async with ApiServer(token=TOKEN) as server:
            assert server.url.startswith("https://127.0.0.1:")
        return [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]

    loop = asyncio.new_event_loop()
    try:
        assert loop.run_until_complete(life()) == []
    finally:
        loop.close()


@pytest.mark.parametrize("token", ["n\u00e4in", "\udcff", "Bearer", ""])
def test_o7_a_token_of_any_bytes_is_refused_and_not_an_error_of_the_server(embedded, token):
    host, port = re.fullmatch(r"https://(.*):(\d+)", embedded.url).groups()
    context = ssl.create_default_context(cadata=embedded.server.ca)
    with socket.create_connection((host, int(port))) as plain, context.wrap_socket(plain, server_hostname=host) as tls:
        line = f"Authorization: Bearer {token}".encode(errors="surrogateescape")
        tls.sendall(b"GET /api HTTP/1.1\r\nHost: a\r\n" + line + b"\r\nConnection: close\r\n\r\n")
        answer = b""
        while more := tls.recv(4096):
            answer += more
    assert answer.split()[1] in (b"401", b"400"), answer


@pytest.mark.parametrize("body", [b'{"a": ' + b"9" * 6000 + b"}", b"[" * 100_000, b'{"a":' * 100_000])
@pytest.mark.parametrize("kind", ["application/json", "application/json-patch+json", "application/merge-patch+json"])
def test_o7_numbers_and_nesting_without_bound_are_refused(embedded, body, kind):
    patch = "patch" in kind
    path = f"{PODS}/a" if patch else PODS
    if patch:
        embedded.post(PODS, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": POD_SPEC})
    answer = embedded.call("PATCH" if patch else "POST", path, body, content_type=kind)
    assert answer.status in {400, 422}, answer
