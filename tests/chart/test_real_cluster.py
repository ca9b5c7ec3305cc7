"""The chart passes strict validation of every object on a real Kubernetes API server with RBAC, and O6 from both sides.

An operator runs under the chart's ServiceAccount and its token. It must be able to do all its work, and it is refused
what it must not do.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import between
import pytest
import yaml
from between import LONG, put, slack

from backstay_cluster.net import claim_block
from backstay_cluster.realserver import API_PORT, ETCD_PORT, PEER_PORT, make_certificate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.tool("helm"),
    pytest.mark.tool("kubectl"),
    pytest.mark.tool("etcd", "kube-apiserver"),
]
# A server that does not answer yet; a URLError is an OSError.
until = partial(between.until, limit=240.0, ignoring=(OSError, subprocess.TimeoutExpired))


class Cluster:
    """A real etcd and kube-apiserver with RBAC; no node."""

    def __init__(self, tool: Callable[[str], str], folder: Path) -> None:
        self.folder = folder
        self._tool = tool
        self._kubectl = tool("kubectl")
        self._processes: list[subprocess.Popen[bytes]] = []
        self.token = secrets.token_hex(16)
        self.url = ""
        self._block = claim_block()  # its own address, on which no other process takes a port

    def start(self) -> None:
        host = self._block.node_ip
        certificate, key = make_certificate(self.folder, host)
        put(self.folder / "tokens.csv", f'{self.token},admin,admin,"system:masters"\n')
        client, peer, port = f"http://{host}:{ETCD_PORT}", f"http://{host}:{PEER_PORT}", API_PORT
        self.url = f"https://{host}:{port}"
        self.admin = self.kubeconfig("admin", self.token)
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )
        self._run(
            "kube-apiserver",
            f"--etcd-servers={client}",
            f"--bind-address={host}",
            f"--advertise-address={host}",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--anonymous-auth=false",
            # There is no controller manager that would make each namespace's default ServiceAccount.
            "--disable-admission-plugins=ServiceAccount",
            "--service-cluster-ip-range=10.0.0.0/24",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={certificate}",
            f"--service-account-signing-key-file={key}",
        )
        until(self._ready, "the API server is ready")
        # Its post-start hooks make the built-in roles; system:discovery is what lets clients find the API.
        until(
            lambda: self.kubectl("get", "clusterrole", "system:discovery", check=False).returncode == 0,
            "the built-in roles are there",
        )

    def _ready(self) -> bool:
        for process in self._processes:
            assert process.poll() is None, f"{process.args[0]} ended, see its log in {self.folder}"
        return self.kubectl("get", "--raw=/readyz", check=False).stdout == "ok"

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen([self._tool(name), *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10 * slack())
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._block.close()

    def kubeconfig(self, user: str, token: str) -> Path:
        file = self.folder / f"{user}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.folder / "node.crt")}
        put(
            file,
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "c", "cluster": cluster}],
                    "users": [{"name": user, "user": {"token": token}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": user}}],
                    "current-context": "c",
                }
            ),
        )
        return file

    def kubectl(
        self, *arguments: str, given: str | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self._kubectl, f"--kubeconfig={self.admin}", *arguments],
            input=given,
            capture_output=True,
            text=True,
            timeout=LONG,
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        assert not check or done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done

    def get(self, *arguments: str) -> list[dict[str, Any]]:
        found = json.loads(self.kubectl("get", *arguments, "-o", "json").stdout)
        return found.get("items", [found])

    def apply(self, manifests: str) -> str:
        return self.kubectl("apply", "--validate=strict", "--filename=-", given=manifests).stdout


@pytest.fixture(scope="module")
def cluster(tool: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tool, tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


JOB = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "spec": {
        "image": "example/trainer:1",
        "command": ["python", "train.py"],
        "parameterServers": {"replicas": 2, "template": {"metadata": {"labels": {"a": "b"}}}},
        "workers": {"replicas": 2},
        "runPolicy": {"ttlSecondsAfterFinished": 0},
    },
}


@contextlib.contextmanager
def operator(cluster: Cluster, namespace: str, environment: list[dict[str, Any]], key: bytes) -> Iterator[str]:
    """The operator with the environment of the chart's pod and the token of its ServiceAccount; yields its URL."""
    token = cluster.kubectl("create", "token", "backstay", f"--namespace={namespace}").stdout.strip()
    file = cluster.folder / f"{namespace}.key"
    put(file, key)
    env = {e["name"]: e["value"] for e in environment if "value" in e}
    env |= {
        "PATH": os.environ["PATH"],
        "BACKSTAY_OPERATOR_POD": f"operator/{namespace}",
        "BACKSTAY_OPERATOR_KUBECONFIG": str(cluster.kubeconfig(namespace, token)),
        "BACKSTAY_OPERATOR_KEY_FILE": str(file),
        "BACKSTAY_OPERATOR_BIND": "127.0.0.1",
        "BACKSTAY_OPERATOR_METRICS_PORT": "0",
        "BACKSTAY_OPERATOR_LOG_FORMAT": "text",
    }
    log = cluster.folder / f"operator-{namespace}.log"
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-m", "backstay_operator"], env=env, stdout=out, stderr=out)
    try:

        def port() -> str:
            assert process.poll() is None, log.read_text()
            _, _, tail = log.read_text().partition("metrics and probes on 127.0.0.1:")
            return tail.split("\n")[0].strip()

        yield f"http://127.0.0.1:{until(port, 'the operator listens')}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10 * slack())
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def fetch(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=LONG) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("values", ["defaults", "everything", "one-namespace", "bring-your-own"])
def test_every_object_passes_strict_validation(cluster: Cluster, helm: Any, root: Path, values: str) -> None:
    namespaces = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in ("strict", "research")
    ]
    cluster.apply(yaml.safe_dump_all(namespaces))
    cluster.apply((root / "helm/backstay/crds/backstay.dev_trainingjobs.yaml").read_text())
    objects = helm.objects(f"--values={root}/tests/chart/values/{values}.yaml", namespace="strict")
    kept = [o for o in objects if o["apiVersion"] != "monitoring.coreos.com/v1"]
    said = cluster.kubectl(
        "apply", "--validate=strict", "--dry-run=server", "--filename=-", given=yaml.safe_dump_all(kept)
    )
    assert len(said.stdout.splitlines()) == len(kept)
    assert "Warning" not in said.stderr


def test_the_example_of_serving_passes_strict_validation(cluster: Cluster, root: Path) -> None:
    cluster.kubectl(
        *("apply", "--validate=strict", "--dry-run=server"), f"--filename={root}/examples/digits/serve.yaml"
    )


@pytest.mark.parametrize("watch", ["", "team"])
def test_o6_the_operator_can_work_with_the_chart_s_rights_and_no_more(
    cluster: Cluster, helm: Any, root: Path, watch: str
) -> None:
    namespace, jobs_in = ("one", watch) if watch else ("all", "elsewhere")
    cluster.apply((root / "helm/backstay/crds/backstay.dev_trainingjobs.yaml").read_text())
    names = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (namespace, jobs_in)]
    cluster.apply(yaml.safe_dump_all(names))
    manifests = helm.template(f"--set=watchNamespace={watch}", namespace=namespace)
    cluster.apply(manifests)
    deployment = next(o for o in yaml.safe_load_all(manifests) if o["kind"] == "Deployment")
    environment = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    selector = f"--selector=backstay.dev/job={namespace}"
    job = {**JOB, "metadata": {"name": namespace, "namespace": jobs_in}}

    with operator(cluster, namespace, environment, secrets.token_hex(32).encode()) as url:
        until(lambda: fetch(f"{url}/readyz") == (200, "ok: acting\n"), "the operator acts")
        cluster.apply(json.dumps(job))
        pods = until(
            lambda: len(found := cluster.get("pods", f"--namespace={jobs_in}", selector)) == 4 and found, "four pods"
        )
        for kind, count in (("services", 2), ("secrets", 1), ("networkpolicies", 1)):
            assert len(cluster.get(kind, f"--namespace={jobs_in}", selector)) == count
        # A dead worker is replaced; a deleted one, too.
        worker = next(p for p in pods if p["metadata"]["labels"]["backstay.dev/role"] == "worker")
        died = {"status": {"phase": "Failed", "reason": "Evicted", "message": "the test says so"}}
        cluster.kubectl(
            "patch",
            f"--namespace={jobs_in}",
            "pod",
            worker["metadata"]["name"],
            "--subresource=status",
            "--type=merge",
            f"--patch={json.dumps(died)}",
        )
        until(
            lambda: any(
                p["metadata"]["labels"]["backstay.dev/incarnation"] == "2"
                for p in cluster.get("pods", f"--namespace={jobs_in}", selector)
            ),
            "the worker is replaced",
        )
        until(lambda: cluster.get("events", f"--namespace={jobs_in}"), "there are events")
        # Training ends, then the script of worker 0; the job is deleted by its ttl.
        last = {"worker": {"result": "Trained", "step": 1}, "parameter-server": {"result": "Succeeded", "step": 1}}
        for role, said in last.items():
            pod = max(
                (
                    p
                    for p in cluster.get("pods", f"--namespace={jobs_in}", selector)
                    if p["metadata"]["labels"]["backstay.dev/role"] == role
                    and p["metadata"]["labels"]["backstay.dev/index"] == "0"
                ),
                key=lambda p: int(p["metadata"]["labels"]["backstay.dev/incarnation"]),
            )
            ended = {"exitCode": 0, "message": json.dumps(said), "reason": "Completed"}
            container = {"name": "trainer", "image": "i", "imageID": "i", "ready": False, "restartCount": 0}
            state = {**container, "state": {"terminated": ended}}
            cluster.kubectl(
                "patch",
                f"--namespace={jobs_in}",
                "pod",
                pod["metadata"]["name"],
                "--subresource=status",
                "--type=merge",
                f"--patch={json.dumps({'status': {'phase': 'Succeeded', 'containerStatuses': [state]}})}",
            )
        until(lambda: not cluster.get("trainingjobs", f"--namespace={jobs_in}"), "the job is deleted by its ttl")
        metrics = fetch(f"{url}/metrics")[1]
        assert 'code="403"' not in metrics
        assert 'verb="create"' in metrics

    me = f"--as=system:serviceaccount:{namespace}:backstay"

    def can(*what: str) -> bool:
        return cluster.kubectl("auth", "can-i", me, *what, check=False).stdout.startswith("yes")

    assert can("create", "pods", f"--namespace={jobs_in}")
    for what in (
        ("get", "secrets"),
        ("list", "secrets"),
        ("create", "pods", "--subresource=exec"),
        ("update", "trainingjobs.backstay.dev", "--subresource=scale"),
        ("update", "trainingjobs.backstay.dev"),
        ("patch", "trainingjobs.backstay.dev"),
        ("create", "rolebindings.rbac.authorization.k8s.io"),
        ("get", "configmaps"),
        ("update", "services"),
        ("deletecollection", "services"),
        ("get", "leases.coordination.k8s.io"),
        ("update", "leases.coordination.k8s.io/another"),
    ):
        assert not can(*what, f"--namespace={jobs_in}"), what
    assert can("create", "pods", "--namespace=default") == (not watch)


def test_the_key_survives_upgrades_and_a_reinstall(cluster: Cluster, helm: Any) -> None:
    """O7: a token that was made before must still be valid afterwards."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return helm.run(*arguments, "--namespace=release", kubeconfig=cluster.admin)

    def key() -> str:
        (secret,) = cluster.get("secret", "backstay-key", "--namespace=release")
        return secret["data"]["key"]

    chart = str(helm.chart)
    # A CRD that another test applied is left as it is by helm.
    done = run("install", "backstay", chart, "--create-namespace")
    assert done.returncode == 0, done.stderr
    assert "kubectl --namespace release rollout status deployment/backstay" in done.stdout
    first = key()
    for _ in range(2):
        done = run("upgrade", "backstay", chart, "--set=log.level=DEBUG")
        assert done.returncode == 0, done.stderr
        assert "show crds" in done.stdout
        assert key() == first
    done = run("uninstall", "backstay")
    assert done.returncode == 0, done.stderr
    assert cluster.get("deployments", "--namespace=release") == []
    assert key() == first
    assert cluster.get("crd", "trainingjobs.backstay.dev")
    done = run("install", "backstay", chart)
    assert done.returncode == 0, done.stderr
    assert key() == first
    # A rendering that cannot see the key, as in Argo CD, would replace it: refused.
    blind = helm.template(namespace="release")
    refused = cluster.kubectl("apply", "--filename=-", given=blind, check=False)
    assert refused.returncode != 0
    assert "immutable" in refused.stderr
    assert key() == first
