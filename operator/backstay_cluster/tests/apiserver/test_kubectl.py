"""The real kubectl works against the API server, as people and scripts use it."""

import http.server
import json
import os
import subprocess
import threading
import urllib.parse

import pytest

from backstay_cluster.tests.files import put
from backstay_cluster.tests.limits import LONG

pytestmark = pytest.mark.tool("kubectl")

GADGETS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "gadgets.kubectl.example.com"},
    "spec": {
        "group": "kubectl.example.com",
        "scope": "Namespaced",
        "names": {"kind": "Gadget", "plural": "gadgets", "shortNames": ["gd"], "categories": ["all"]},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {
                    "status": {},
                    "scale": {"specReplicasPath": ".spec.size", "statusReplicasPath": ".status.size"},
                },
                "additionalPrinterColumns": [
                    {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
                    {"name": "Mode", "type": "string", "jsonPath": ".spec.mode"},
                ],
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "required": ["spec"],
                        "properties": {
                            "spec": {
                                "type": "object",
                                "description": "What the gadget shall be.",
                                "properties": {
                                    "size": {"type": "integer", "maximum": 10, "description": "How large it is."},
                                    "mode": {"type": "string", "default": "A"},
                                },
                            },
                            "status": {"type": "object", "properties": {"size": {"type": "integer"}}},
                        },
                    }
                },
            }
        ],
    },
}
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "p1", "labels": {"app": "x"}},
    "spec": {"containers": [{"name": "c", "image": "example.com/image:1"}]},
}


def gadget(name, **spec):
    return {"apiVersion": "kubectl.example.com/v1", "kind": "Gadget", "metadata": {"name": name}, "spec": spec}


class Kubectl:
    def __init__(self, folder, config):
        self.folder = folder
        put(folder / "x.kubeconfig", config)
        self.environment = {"KUBECONFIG": str(folder / "x.kubeconfig"), "HOME": str(folder), "PATH": os.environ["PATH"]}

    def run(self, *arguments, stdin=None):
        text = json.dumps(stdin) if isinstance(stdin, dict) else stdin
        return subprocess.run(
            ["kubectl", *arguments],
            input=text,
            text=True,
            capture_output=True,
            env=self.environment,
            cwd=self.folder,
            timeout=LONG,
        )

    def __call__(self, *arguments, stdin=None):
        done = self.run(*arguments, stdin=stdin)
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}\n{done.stdout}{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def kubectl(embedded, tmp_path_factory):
    found = Kubectl(tmp_path_factory.mktemp("kubectl"), embedded.server.kubeconfig())
    found("create", "-f", "-", stdin=GADGETS)
    found("wait", "--for=condition=Established", "crd/gadgets.kubectl.example.com", "--timeout=600s")
    return found


@pytest.fixture
def fresh(kubectl):
    yield kubectl
    kubectl("delete", "gadgets,pods,configmaps,secrets", "--all", "--wait=false")


@pytest.fixture
def kubelet():
    """A kubelet that only has logs. `asked` has the requests that it received."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            parts = urllib.parse.urlsplit(self.path)
            server.asked.append((parts.path, dict(urllib.parse.parse_qsl(parts.query)), self.headers["Authorization"]))
            missing = "previous" in parts.query
            self.send_response(400 if missing else 200)
            self.end_headers()
            text = "previous terminated container not found" if missing else "line 1\nline 2\n"
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_apply_creates_then_updates_then_finds_nothing_to_do(fresh):
    assert "created" in fresh("apply", "-f", "-", stdin=gadget("a", size=1))
    assert "configured" in fresh("apply", "-f", "-", stdin=gadget("a", size=2))
    assert "unchanged" in fresh("apply", "-f", "-", stdin=gadget("a", size=2))
    assert fresh("get", "gd", "a", "-o", "jsonpath={.spec.size} {.spec.mode} {.metadata.generation}") == "2 A 2"


def test_apply_of_a_built_in_type_merges_its_lists(fresh):
    fresh("apply", "-f", "-", stdin=POD)
    changed = {**POD, "metadata": {"name": "p1", "labels": {"other": "y"}}}
    assert "configured" in fresh("apply", "-f", "-", stdin=changed)
    assert json.loads(fresh("get", "pod", "p1", "-o", "jsonpath={.metadata.labels}")) == {"other": "y"}


def test_apply_refuses_an_unknown_field_by_name(fresh):
    done = fresh.run("apply", "-f", "-", stdin=gadget("a", size=1, sise=2))
    assert done.returncode == 1
    assert 'strict decoding error: unknown field "spec.sise"' in done.stderr
    done = fresh.run("apply", "--validate=false", "-f", "-", stdin=gadget("a", size=1, sise=2))
    assert done.returncode == 0
    assert fresh("get", "gd", "a", "-o", "jsonpath={.spec}") == '{"mode":"A","size":1}'


def test_apply_shows_each_invalid_field_and_the_reason(fresh):
    done = fresh.run("apply", "-f", "-", stdin=gadget("a", size=11))
    assert done.returncode == 1
    assert 'The Gadget "a" is invalid: spec.size: Invalid value: 11:' in done.stderr


def test_server_side_apply_is_refused_with_what_to_do_instead(fresh):
    done = fresh.run("apply", "--server-side", "-f", "-", stdin=gadget("a", size=1))
    assert done.returncode == 1
    assert "use client-side apply" in done.stderr


def test_get_prints_the_columns_of_the_definition(fresh):
    fresh("apply", "-f", "-", stdin=gadget("a", size=3))
    head, row = fresh("get", "gadgets").splitlines()
    assert (head.split(), row.split()) == (["NAME", "SIZE", "MODE"], ["a", "3", "A"])


def test_get_pods_and_all(fresh):
    fresh("apply", "-f", "-", stdin=POD)
    fresh("apply", "-f", "-", stdin=gadget("a", size=3))
    head, row = fresh("get", "pods").splitlines()
    assert head.split() == ["NAME", "READY", "STATUS", "RESTARTS", "AGE"]
    assert row.split()[:4] == ["p1", "0/1", "Pending", "0"]
    assert "p1" in fresh("get", "pods", "-A", "-o", "wide")
    everything = fresh("get", "all", "-o", "name")
    assert "pod/p1" in everything
    assert "gadget.kubectl.example.com/a" in everything
    for kind in (
        "services",
        "secrets",
        "configmaps",
        "nodes",
        "namespaces",
        "events",
        "serviceaccounts",
        "crds",
        "pvc",
    ):
        fresh("get", kind)


@pytest.mark.parametrize(
    ("initialized", "side", "main", "columns"),
    [
        ("False", {"state": {"running": {}}, "started": False}, {"waiting": {}}, ["0/2", "Init:0/1", "0"]),
        ("True", {"state": {"running": {}}, "started": True, "ready": True}, {"running": {}}, ["2/2", "Running", "0"]),
        ("True", {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}, {"running": {}}, ["1/2", "Running", "0"]),
        ("True", {"state": {"terminated": {"exitCode": 143}}}, {"running": {}}, ["1/2", "Running", "0"]),
    ],
)
def test_get_pods_counts_a_sidecar_as_a_container(fresh, initialized, side, main, columns):
    inits = [{"name": "side", "image": "x", "restartPolicy": "Always"}]
    fresh("apply", "-f", "-", stdin={**POD, "spec": {**POD["spec"], "initContainers": inits}})
    common = {"image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {
        "phase": "Pending" if initialized == "False" else "Running",
        "conditions": [{"type": "Initialized", "status": initialized}],
        "initContainerStatuses": [{**common, "name": "side", **side}],
        "containerStatuses": [{**common, "name": "c", "state": main, "ready": "running" in main}],
    }
    fresh("patch", "pod", "p1", "--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    assert fresh("get", "pods").splitlines()[1].split()[1:4] == columns


def test_describe(fresh):
    fresh("apply", "-f", "-", stdin=POD)
    uid = fresh("get", "pod", "p1", "-o", "jsonpath={.metadata.uid}")
    about = {"kind": "Pod", "apiVersion": "v1", "name": "p1", "namespace": "default", "uid": uid}
    event = {"apiVersion": "v1", "kind": "Event", "metadata": {"generateName": "p1."}, "involvedObject": about}
    fresh("create", "-f", "-", stdin={**event, "reason": "Tried", "message": "a message", "type": "Normal"})
    text = fresh("describe", "pod", "p1")
    assert "example.com/image:1" in text
    assert "a message" in text
    fresh("apply", "-f", "-", stdin=gadget("a", size=3))
    assert "Size:  3" in fresh("describe", "gd", "a")
    assert "a message" in fresh("get", "events")


def test_scale_patch_edit_of_fields_and_wait(fresh):
    fresh("apply", "-f", "-", stdin=gadget("a", size=3))
    assert "scaled" in fresh("scale", "gd/a", "--replicas=5")
    fresh("wait", "--for=jsonpath={.spec.size}=5", "gd/a", "--timeout=600s")
    fresh("patch", "gd", "a", "--type=merge", "-p", '{"spec":{"size":6}}')
    fresh("patch", "gd", "a", "--type=json", "-p", '[{"op":"test","path":"/spec/size","value":6}]')
    fresh("patch", "gd", "a", "--subresource=status", "--type=merge", "-p", '{"status":{"size":2}}')
    fresh("label", "gd", "a", "x=y")
    fresh("annotate", "gd", "a", "x=y")
    assert fresh("get", "gd", "-l", "x=y", "-o", "jsonpath={.items[*].spec.size}") == "6"
    done = fresh.run("scale", "gd/a", "--replicas=50")
    assert done.returncode == 1
    assert "less than or equal to 10" in done.stderr


def test_get_watch_shows_what_is_there_and_what_comes(fresh):
    fresh("apply", "-f", "-", stdin=gadget("a", size=1))
    command = ["kubectl", "get", "gd", "-w", "--output-watch-events"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=fresh.environment) as watch:
        try:
            lines = [watch.stdout.readline().split() for _ in range(2)]
            fresh("apply", "-f", "-", stdin=gadget("a", size=2))
            lines.append(watch.stdout.readline().split())
            fresh("delete", "gd", "a")
            lines.append(watch.stdout.readline().split())
        finally:
            watch.kill()
    assert lines == [
        ["EVENT", "NAME", "SIZE", "MODE"],
        ["ADDED", "a", "1", "A"],
        ["MODIFIED", "a", "2", "A"],
        ["DELETED", "a", "2", "A"],
    ]


def test_delete_waits_until_it_is_gone(fresh):
    fresh("apply", "-f", "-", stdin=POD)
    assert 'pod "p1" deleted' in fresh("delete", "pod", "p1", "--now")
    fresh("apply", "-f", "-", stdin=gadget("a", size=1))
    fresh("delete", "gd", "a", "--cascade=foreground")
    assert "NotFound" in fresh.run("get", "gd", "a").stderr


def test_logs_come_from_the_kubelet_of_the_pods_node(fresh, embedded, kubelet):
    status = {
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": kubelet.server_port}},
    }
    embedded.delete("/api/v1/nodes/n1")
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n1"}, "status": status}
    assert embedded.post("/api/v1/nodes", node).status == 201
    fresh("apply", "-f", "-", stdin=POD)
    target = {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {"name": "p1"},
        "target": {"kind": "Node", "name": "n1"},
    }
    assert embedded.post("/api/v1/namespaces/default/pods/p1/binding", target).status == 201
    assert fresh("logs", "p1", "--tail=2", "-f") == "line 1\nline 2\n"
    path, options, authorization = kubelet.asked[0]
    assert path == "/containerLogs/default/p1/c"
    assert options == {"tailLines": "2", "follow": "true"}
    assert authorization == f"Bearer {embedded.token}"
    assert "previous terminated container" in fresh.run("logs", "p1", "-p").stderr
    assert "container d is not valid for pod p1" in fresh.run("logs", "p1", "-c", "d").stderr
    fresh("delete", "pod", "p1", "--force", "--grace-period=0")


def test_explain_and_api_resources_know_definitions_and_built_in_types(kubectl):
    assert "How large it is." in kubectl("explain", "gd.spec")
    assert "terminationGracePeriodSeconds" in kubectl("explain", "pod.spec")
    listed = kubectl("api-resources")
    assert "gadgets" in listed
    assert "leases" in listed


def test_commands_that_send_protobuf(fresh):
    fresh("create", "namespace", "zz")
    fresh("create", "configmap", "cm", "--from-literal=k=v")
    assert fresh("get", "cm", "cm", "-o", "jsonpath={.data.k}") == "v"
    fresh("create", "secret", "generic", "s", "--from-literal=k=v")
    assert fresh("get", "secret", "s", "-o", "jsonpath={.data.k}") == "dg=="
    fresh("create", "configmap", "inside", "-n", "zz", "--from-literal=k=v")
    fresh("delete", "namespace", "zz", "--timeout=600s")
    assert "NotFound" in fresh.run("get", "namespace", "zz").stderr
    done = fresh.run("create", "serviceaccount", "robot")
    assert "ServiceAccount is accepted as application/json only" in done.stderr


def test_diff_and_dry_run_change_nothing(fresh):
    fresh("apply", "-f", "-", stdin=gadget("a", size=1))
    assert "(server dry run)" in fresh("apply", "--dry-run=server", "-f", "-", stdin=gadget("a", size=2))
    assert fresh("get", "gd", "a", "-o", "jsonpath={.spec.size}") == "1"
    assert "created (server dry run)" in fresh("create", "--dry-run=server", "-f", "-", stdin=gadget("b", size=2))
    assert "NotFound" in fresh.run("get", "gd", "b").stderr


def test_o7_no_call_is_answered_without_the_token(fresh):
    done = fresh.run("--token=wrong", "get", "pods")
    assert done.returncode == 1
    assert "Unauthorized" in done.stderr or "must be logged in" in done.stderr
    assert fresh("version", "-o", "json").count("v1.36") >= 1
