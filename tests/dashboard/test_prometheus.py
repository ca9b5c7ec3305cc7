"""A real Prometheus scrapes a real job as the chart's PodMonitors say, and every panel of the dashboard has data.

The cluster is the embedded one, its operator and its pods are real processes. Prometheus' configuration is made from
the rendered PodMonitors the way the Prometheus Operator makes it; but Debian's Prometheus is built without Kubernetes
discovery, so the test writes down what that would find, as targets with the same `__meta_kubernetes_...` labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

from backstay_cli.kube import JOBS
from backstay_cli.session import Session, start_session
from backstay_spec import contract

T = TypeVar("T")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.tool("prometheus"),
    pytest.mark.tool("helm"),
    pytest.mark.timeout(300),
]
JOB = "watched"
NAMESPACE = "default"
WINDOW = "10s"
# Nothing of these need happen in a good run of a job without standbys: no error of the operator, no update skipped.
MAY_BE_EMPTY = {("Reconciles", "B"), ("Servers", "C")}

SCRIPT = """
import time

import jax
import jax.numpy as jnp
import optax

import backstay


def batches(key):
    time.sleep(0.05)  # the run lasts as long as the test looks at it, and takes the machine for a part of it only
    return key.rng.normal(size=(8, 4)).astype("float32")


backstay.train(
    init=lambda key: {"w": jax.random.normal(key, (4, 2))},
    loss=lambda params, batch: jnp.mean((batch @ params["w"] - 1.0) ** 2),
    batches=batches,
    optimizer=optax.adam(1e-2),
    steps=100_000,
    evaluate=lambda params: {"norm": float(jnp.linalg.norm(params["w"]))},
)
"""


def until(what: str, ask: Callable[[], T], seconds: float = 90.0) -> T:
    """Ask until the answer is true; how long that takes is not judged, only that it ends."""
    end = time.monotonic() + seconds
    while True:
        answer: T | None = None
        with contextlib.suppress(OSError):
            answer = ask()
        if answer:
            return answer
        assert time.monotonic() < end, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.2)


class Cluster:
    """The embedded cluster with the operator, for blocking callers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = contextlib.AsyncExitStack()
        self._session: Session | None = None

    def __enter__(self) -> Cluster:
        self._thread.start()
        try:
            self._session = self._run(self._stack.enter_async_context(start_session(self.folder)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10)
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(90)

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._run(self.session.api.request(method, path, body))

    def pods(self) -> list[dict[str, Any]]:
        return self._run(self.session.api.pods_of(NAMESPACE, JOB))

    def server(self) -> str:
        """The pod of shard 0's server that is not over; empty while there is none."""
        wanted = {contract.LABEL_ROLE: contract.ROLE_SERVER, contract.LABEL_INDEX: "0"}
        names = (
            pod["metadata"]["name"]
            for pod in self.pods()
            if wanted.items() <= pod["metadata"]["labels"].items() and pod.get("status", {}).get("phase") != "Failed"
        )
        return next(names, "")

    def kill(self, pod: str) -> None:
        """SIGKILL to the processes of a pod, which are found by their environment."""
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{contract.ENV_POD_NAME}={pod}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        os.kill(int(entry.name), signal.SIGKILL)

    def log_of(self, pod: str) -> str:
        return "".join(file.read_text(errors="replace") for file in (self.folder / "pods").rglob(f"{pod}/*.log"))

    def operator_address(self) -> str:
        text = (self.folder / "operator.log").read_text()
        _, mark, tail = text.partition("metrics and probes on ")
        return tail.split("\n")[0].strip() if mark and "\n" in tail else ""

    def logs(self) -> str:
        found = [self.folder / "operator.log", *sorted((self.folder / "pods").rglob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in found)


def meta(label: str) -> str:
    """The name that Prometheus gives to a Kubernetes label or annotation."""
    return "".join(c if c.isalnum() else "_" for c in label)


def scrape_config(monitor: dict[str, Any], targets: dict[str, Any]) -> dict[str, Any]:
    """What the Prometheus Operator makes of a PodMonitor with one endpoint; `targets` says where the pods are found."""
    spec = monitor["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    rules: list[dict[str, Any]] = []
    if "file_sd_configs" in targets:
        rules.append(
            {"source_labels": ["__meta_kubernetes_pod_phase"], "regex": "(Failed|Succeeded)", "action": "drop"}
        )
        for label, value in spec["selector"].get("matchLabels", {}).items():
            rules.append(
                {"source_labels": [f"__meta_kubernetes_pod_label_{meta(label)}"], "regex": value, "action": "keep"}
            )
        for wanted in spec["selector"].get("matchExpressions", []):
            assert wanted["operator"] == "Exists"
            present = f"__meta_kubernetes_pod_labelpresent_{meta(wanted['key'])}"
            rules.append({"source_labels": [present], "regex": "true", "action": "keep"})
        port = "__meta_kubernetes_pod_container_port_name"
        rules.append({"source_labels": [port], "regex": endpoint["port"], "action": "keep"})
        for source, target in (("namespace", "namespace"), ("pod_container_name", "container"), ("pod_name", "pod")):
            rules.append({"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target})
    rules.append(
        {"target_label": "job", "replacement": f"{monitor['metadata']['namespace']}/{monitor['metadata']['name']}"}
    )
    if "jobLabel" in spec:
        source = f"__meta_kubernetes_pod_label_{meta(spec['jobLabel'])}"
        rules.append({"source_labels": [source], "regex": "(.+)", "target_label": "job"})

    def snake(given: dict[str, Any]) -> dict[str, Any]:
        names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
        return {names.get(key, key): value for key, value in given.items()}

    return {
        "job_name": monitor["metadata"]["name"],
        "metrics_path": endpoint["path"],
        "scrape_interval": "1s",
        "scrape_timeout": "1s",
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": rules + [snake(r) for r in endpoint.get("relabelings", [])],
        "metric_relabel_configs": [snake(r) for r in endpoint.get("metricRelabelings", [])],
        **targets,
    }


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What Prometheus' discovery of the role `pod` finds: one target for each port of each container.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#pod
    """
    found = []
    for pod in pods:
        prefix = "__meta_kubernetes_pod_"
        labels = {
            "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
            f"{prefix}name": pod["metadata"]["name"],
            f"{prefix}phase": pod.get("status", {}).get("phase", ""),
        }
        for name, value in pod["metadata"]["labels"].items():
            labels |= {f"{prefix}label_{meta(name)}": value, f"{prefix}labelpresent_{meta(name)}": "true"}
        address = pod.get("status", {}).get("podIP")
        for container in pod["spec"]["containers"] if address else []:
            for port in container.get("ports", []):
                of_port = {f"{prefix}container_name": container["name"], f"{prefix}container_port_name": port["name"]}
                found.append({"targets": [f"{address}:{port['containerPort']}"], "labels": {**labels, **of_port}})
    return found


class Prometheus:
    """A Prometheus of its own on loopback."""

    def __init__(self, program: str, folder: Path, config: dict[str, Any]) -> None:
        self._program = program
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Prometheus:
        self._folder.mkdir()
        file = self._folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(self._config))
        with contextlib.closing(socket.socket()) as one:
            one.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{one.getsockname()[1]}"
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    self._program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address={self.url.removeprefix('http://')}",
                ],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "HOME": str(self._folder)},
            )
        try:
            until("Prometheus is ready", self._ready, 60)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as answer:
            return bool(answer.status == 200)

    def log(self) -> str:
        return (self._folder / "log").read_text()

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query, those that are numbers."""
        given = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{given}", timeout=10) as answer:
            found = json.load(answer)["data"]["result"]
        return [sample for sample in found if math.isfinite(float(sample["value"][1]))]


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster with a job that trains until the end of the test."""
    (tmp_path / "train.py").write_text(SCRIPT)
    with Cluster(tmp_path / "cluster") as cluster:
        checkpoint = {"uri": str(tmp_path / "checkpoints"), "everySeconds": 1}
        spec = {
            "image": "backstay.dev/trainer:local",
            "command": ["python", "train.py"],
            "workingDir": str(tmp_path),
            "parameterServers": {"replicas": 2},
            "workers": {"replicas": 2},
            "evaluator": {},
            "update": {"mode": "Sync", "backups": 1},
            "checkpoint": checkpoint,
        }
        job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": JOB}, "spec": spec}
        cluster.request("POST", f"{JOBS}/namespaces/{NAMESPACE}/{contract.PLURAL}", job)
        yield cluster


def test_every_panel_has_data(
    watched: Cluster, helm: Any, dashboard: Any, tool: Callable[[str], str], tmp_path: Path
) -> None:
    monitors = {
        monitor["metadata"]["name"]: monitor
        for monitor in helm.objects("--set=metrics.podMonitor.enabled=true")
        if monitor["kind"] == "PodMonitor"
    }
    pods_file = tmp_path / "pods.json"

    def discover() -> None:
        beside = tmp_path / "pods.part"
        beside.write_text(json.dumps(discovered(watched.pods())))
        beside.replace(pods_file)  # Prometheus watches the folder

    discover()
    discovery = {"files": [str(pods_file)]}
    operator = {"targets": [until("the operator listens", watched.operator_address)], "labels": {"pod": "operator"}}
    config = {
        "global": {"evaluation_interval": "1m"},
        "scrape_configs": [
            scrape_config(monitors["backstay-jobs"], {"file_sd_configs": [discovery]}),
            scrape_config(monitors["backstay-operator"], {"static_configs": [operator]}),
        ],
    }
    with Prometheus(tool("prometheus"), tmp_path / "prometheus", config) as prometheus:

        def trains() -> bool:
            discover()
            return bool(prometheus.query(f'backstay_job_step{{job="{JOB}"}} > 20'))

        try:
            until("Prometheus sees the job train", trains)
        except AssertionError as error:
            pytest.fail(f"{error}\n{watched.logs()}\n{prometheus.log()[-1500:]}")
        # A death, for the panels that show deaths.
        victim = next(p for p in watched.pods() if p["metadata"]["labels"][contract.LABEL_ROLE] == contract.ROLE_WORKER)
        watched.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{victim['metadata']['name']}")

        queries = list(dashboard.queries())
        empty: list[str] = []

        def all_have_data() -> bool:
            discover()
            empty[:] = [
                f"{query.panel} {query.ref}: {expr}"
                for query in queries
                if (query.panel, query.ref) not in MAY_BE_EMPTY
                and not prometheus.query(expr := query.filled(NAMESPACE, JOB, WINDOW))
            ]
            return not empty

        try:
            until("every panel has data", all_have_data)
        except AssertionError as error:
            listed = "\n".join(empty)
            pytest.fail(f"{error}\n{listed}\n{watched.logs()}\n{prometheus.log()[-1500:]}")

        # What is shown is what happened.
        def ask(title: str, ref: str = "A") -> list[dict[str, Any]]:
            (query,) = (q for q in queries if (q.panel, q.ref) == (title, ref))
            return prometheus.query(query.filled(NAMESPACE, JOB, WINDOW))

        parts = {"batch_wait", "compute", "push", "update_wait", "pull"}
        assert {s["metric"]["part"] for s in ask("Step of the mean worker")} == parts
        assert {s["metric"]["direction"] for s in ask("Tensors on the wire")} == {"sent", "received"}
        assert {"applied", "late"} <= {s["metric"]["outcome"] for s in ask("Gradients by what became of them")}
        assert {(s["metric"]["role"], s["metric"]["cause"]) for s in ask("Pods replaced")} == {("Worker", "Deleted")}
        assert float(ask("Pods lost", "B")[0]["value"][1]) == 1
        assert float(ask("Pods lost", "A")[0]["value"][1]) == 0
        assert {s["metric"]["phase"] for s in ask("Jobs by phase") if float(s["value"][1]) > 0} == {"Running"}
        # The labels of a training pod's series are Kubernetes', and are not there twice.
        (world,) = prometheus.query('backstay_world{role="ParameterServer", index="0"}')
        assert {"job": JOB, "namespace": NAMESPACE}.items() <= world["metric"].items()
        assert not [label for label in world["metric"] if label.startswith("exported_")]

        # The coordinator dies without a standby: what its successor writes in its log is what the panels show.
        first = watched.server()
        watched.kill(first)
        until("another coordinator is there", lambda: watched.server() not in ("", first))
        second = watched.server()

        def redone() -> list[str]:
            discover()
            return re.findall(r": ([0-9]+) updates are redone", watched.log_of(second))

        truth = [0]

        def shown() -> bool:
            truth[:] = [sum(map(int, redone()))]
            stepped = prometheus.query(f'backstay_updates_total{{job="{JOB}", index="0", pod="{second}"}} > 20')
            return bool(stepped) and [float(s["value"][1]) for s in ask("Steps redone")] == [truth[0]]

        try:
            until("the panel shows the updates that the new coordinator makes again", shown)
        except (AssertionError, ValueError) as error:
            shows = ask("Steps redone")
            pytest.fail(f"{error}\ntruth {truth}, shown {shows}\n{watched.logs()}\n{prometheus.log()[-1500:]}")
        for panel in ("Age of the newest checkpoint", "Checkpoints", "Loss over time", "Updates", "Pods joining"):
            (sample,) = ask(panel)
            assert float(sample["value"][1]) >= 0, panel
        assert not prometheus.query('backstay_loss{role="ParameterServer", index!="0"}')
