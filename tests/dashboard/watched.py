"""A job on the embedded cluster, with everything that can happen to it, and a real Prometheus that watches.

Used by the test of the dashboards and by `docs/pictures.py`. The operator and the pods are real processes. Prometheus'
configuration is made from the rendered PodMonitors and PrometheusRule the way the Prometheus Operator makes it; but
Debian's Prometheus is built without Kubernetes discovery, so `discovered` writes what that would find, as targets with
the same `__meta_kubernetes_...` labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import between
import yaml
from between import LONG, put, slack

from backstay_client.embedded.preload import preload
from backstay_client.embedded.session import Session, start_session
from backstay_client.kube import JOBS
from backstay_cluster.net import claim_block
from backstay_spec import contract

T = TypeVar("T")
JOB = "watched"
NAMESPACE = "default"
GOAL = 100_000
RATE, BATCH = 1e-2, (8, 4)
SLOW_RANK = 2
FAULTS = "kill worker/1 @40; fill server/0#* @60 5s; kill server/0 @100"
VALUES = (
    "--set=metrics.podMonitor.enabled=true,metrics.prometheusRule.enabled=true",
    '--set-json=metrics.prometheusRule.podPricePerHour={"Worker": 2.5}',
)

# The run lasts as long as the test, and takes the machine for a part of the time only.
SCRIPT = f"""
import time

import jax
import jax.numpy as jnp
import optax

import backstay


def batches(key):
    time.sleep(0.3 if key.rank == {SLOW_RANK} else 0.1)
    return key.rng.normal(size={BATCH}).astype("float32")


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1.0) ** 2), {{"tokens": jnp.float32(batch.size)}}


backstay.train(
    init=lambda key: {{"w": jax.random.normal(key, (4, 2))}},
    loss=loss,
    batches=batches,
    optimizer=optax.inject_hyperparams(optax.adam)(learning_rate={RATE}),
    clip_norm=1.0,
    steps={GOAL},
    evaluate=lambda params: {{"norm": float(jnp.linalg.norm(params["w"]))}},
)
"""


def spec_of(folder: Path, faults: str) -> dict[str, Any]:
    """Returns a synchronous job with standbys, a slow worker, and faults by script (docs/faults.md)."""
    return {
        "image": "backstay.dev/trainer:local",
        "command": ["python", "train.py"],
        "workingDir": str(folder),
        "env": [{"name": "FAULT_INJECTION", "value": faults}],
        "parameterServers": {"replicas": 1, "standbys": 1},
        "workers": {"replicas": 3},
        "evaluator": {},
        "update": {"mode": "Sync", "backups": 1},
        "checkpoint": {"uri": str(folder / "checkpoints"), "everySeconds": 2},
    }


def until(what: str, ask: Callable[[], T], seconds: float = 240.0) -> T:
    """Ask until the answer is true; how long that takes is not judged, only that it ends.

    An answer takes the time of Prometheus or of the API server, and changes with a scrape.
    """
    return between.until(ask, what, limit=seconds, pause=0.5, ignoring=(OSError,))


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
            self._session = self._run(self._stack.enter_async_context(start_session(self.folder, preload=preload())))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LONG)
            self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONG)

    @property
    def session(self) -> Session:
        assert self._session is not None
        return self._session

    def request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._run(self.session.api.request(method, path, body))

    def pods(self) -> list[dict[str, Any]]:
        return self._run(self.session.api.pods_of(NAMESPACE, JOB))

    def start(self, spec: dict[str, Any]) -> None:
        """Create the job."""
        job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": JOB}, "spec": spec}
        self.request("POST", f"{JOBS}/namespaces/{NAMESPACE}/{contract.PLURAL}", job)

    def status(self) -> dict[str, Any]:
        """Returns the status of the job."""
        job = self.request("GET", f"{JOBS}/namespaces/{NAMESPACE}/{contract.PLURAL}/{JOB}")
        found: dict[str, Any] = job.get("status") or {}
        return found

    def kill_servers(self) -> None:
        """SIGKILL to every server at the same time, the standby's too; the processes are found by their environment."""
        servers = {
            f"{contract.ENV_POD_NAME}={pod['metadata']['name']}".encode()
            for pod in self.pods()
            if pod["metadata"]["labels"][contract.LABEL_ROLE] == contract.ROLE_SERVER
        }
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if servers & set((entry / "environ").read_bytes().split(b"\0")):
                        os.kill(int(entry.name), signal.SIGKILL)

    def log(self) -> str:
        """Returns the logs of all pods."""
        return "".join(file.read_text(errors="replace") for file in (self.folder / "pods").rglob("*.log"))

    def delete_worker(self, rank: int) -> None:
        """A disruption."""
        wanted = {contract.LABEL_ROLE: contract.ROLE_WORKER, contract.LABEL_INDEX: str(rank)}
        for pod in self.pods():
            if wanted.items() <= pod["metadata"]["labels"].items() and pod.get("status", {}).get("phase") == "Running":
                self.request("DELETE", f"/api/v1/namespaces/{NAMESPACE}/pods/{pod['metadata']['name']}")

    def operator_address(self) -> str:
        text = (self.folder / "operator.log").read_text()
        _, mark, tail = text.partition("metrics and probes on ")
        return tail.split("\n")[0].strip() if mark and "\n" in tail else ""

    def logs(self) -> str:
        found = [self.folder / "operator.log", *sorted((self.folder / "pods").rglob("*.log"))]
        return "\n".join(f"--- {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in found)


def meta(label: str) -> str:
    """Returns the name that Prometheus gives to a Kubernetes label or annotation."""
    return "".join(c if c.isalnum() else "_" for c in label)


def scrape_config(monitor: dict[str, Any], targets: dict[str, Any], interval: str = "1s") -> dict[str, Any]:
    """Returns the configuration that the Prometheus Operator makes of a PodMonitor with one endpoint.

    `targets` is the place of the pods.
    """
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
        "scrape_interval": interval,
        "scrape_timeout": interval,
        "honor_labels": endpoint.get("honorLabels", False),
        "relabel_configs": rules + [snake(r) for r in endpoint.get("relabelings", [])],
        "metric_relabel_configs": [snake(r) for r in endpoint.get("metricRelabelings", [])],
        **targets,
    }


def discovered(pods: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the result of Prometheus' discovery of the role `pod`, with one target for each port of each container.

    https://prometheus.io/docs/prometheus/latest/configuration/configuration/#pod
    """
    found = []
    for pod in pods:
        prefix = "__meta_kubernetes_pod_"
        labels = {
            "__meta_kubernetes_namespace": pod["metadata"]["namespace"],
            f"{prefix}name": pod["metadata"]["name"],
            f"{prefix}phase": pod.get("status", {}).get("phase", ""),
            f"{prefix}node_name": pod["spec"].get("nodeName", ""),
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
    """A Prometheus on loopback."""

    def __init__(self, program: str, folder: Path, config: dict[str, Any]) -> None:
        self._program = program
        self._folder = folder
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""

    def __enter__(self) -> Prometheus:
        self._folder.mkdir()
        file = self._folder / "prometheus.yml"
        put(file, yaml.safe_dump(self._config))
        self._block = claim_block()  # its own address, where no other process takes the port
        self.url = f"http://{self._block.node_ip}:9090"
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
            until("Prometheus is ready", self._ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.logs()
        with urllib.request.urlopen(f"{self.url}/-/ready", timeout=10 * slack()) as answer:
            return bool(answer.status == 200)

    def logs(self) -> str:
        return (self._folder / "log").read_text()

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(10 * slack())
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._block.close()

    def query(self, expression: str, at: float | None = None) -> list[dict[str, Any]]:
        """Returns the samples of an instant query that are numbers. The query is at a Unix time, or now if it is
        None."""
        given = urllib.parse.urlencode({"query": expression} | ({} if at is None else {"time": at}))
        with urllib.request.urlopen(f"{self.url}/api/v1/query?{given}", timeout=LONG) as answer:
            found = json.load(answer)["data"]["result"]
        return [sample for sample in found if math.isfinite(float(sample["value"][1]))]

    def series(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """Returns the result of a range query; `values` are pairs of Unix time and text."""
        given = urllib.parse.urlencode({"query": expression, "start": start, "end": end, "step": step})
        with urllib.request.urlopen(f"{self.url}/api/v1/query_range?{given}", timeout=LONG) as answer:
            found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return found

    def rules(self) -> list[dict[str, Any]]:
        """Returns every rule, with its health and its alerts."""
        with urllib.request.urlopen(f"{self.url}/api/v1/rules", timeout=LONG) as answer:
            return [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]


class Watch:
    """A Prometheus that watches a cluster as the chart's objects say; call `discover` now and then.

    Args:
        objects: what helm renders with PodMonitors and the PrometheusRule.
        program: Prometheus.
        interval: seconds between two scrapes, and between two evaluations of the rules.
    """

    def __init__(
        self, cluster: Cluster, objects: list[dict[str, Any]], program: str, folder: Path, interval: str = "1s"
    ) -> None:
        self._cluster, self._pods = cluster, folder / "pods.json"
        self.discover()
        monitors = {o["metadata"]["name"]: o for o in objects if o["kind"] == "PodMonitor"}
        (rule,) = (o for o in objects if o["kind"] == "PrometheusRule")
        put(folder / "rules.yaml", yaml.safe_dump({"groups": rule["spec"]["groups"]}))
        address = until("the operator listens", cluster.operator_address)
        operator = {"targets": [address], "labels": {"pod": "operator"}}
        discovery = {"files": [str(self._pods)], "refresh_interval": "5s"}
        config = {
            "global": {"evaluation_interval": interval},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": [
                scrape_config(monitors["backstay-jobs"], {"file_sd_configs": [discovery]}, interval),
                scrape_config(monitors["backstay-operator"], {"static_configs": [operator]}, interval),
            ],
        }
        self.prometheus = Prometheus(program, folder / "prometheus", config)

    def discover(self) -> None:
        """Write down which pods there are."""
        put(self._pods, json.dumps(discovered(self._cluster.pods())))  # Prometheus watches the folder


def counts(cluster: Cluster, role: str) -> dict[str, int]:
    found: dict[str, int] = (cluster.status().get("roles") or {}).get(role) or {}
    return found


def whole(cluster: Cluster) -> bool:
    """Returns whether all pods are ready, and a standby holds what the server does."""
    roles = cluster.status().get("roles") or {}
    conditions = {c["type"]: c["status"] for c in cluster.status().get("conditions") or ()}
    ready = all(r["ready"] == r["desired"] for r in roles.values())
    return len(roles) == 3 and ready and conditions.get("StandbysInSync") == conditions.get("Training") == "True"


def are_unstored(cluster: Cluster, asked: Callable[[str], Any]) -> bool:
    """Returns whether a kill now loses an update that a worker has received, because the next update was made of it.

    A kill at another time would lose none, or one that only the killed server has known.
    """

    def newest() -> int:
        folder = Path(cluster.status()["checkpoint"]["uri"]).parent
        return max(int(path.name.split("-")[1]) for path in folder.glob("step-*.manifest.json"))

    step = newest()
    return bool(asked(f"backstay_job_step > {step + 1}")) and newest() == step


def suffer(cluster: Cluster, watch: Watch, calm: float) -> None:
    """Everything happens, one thing after another, with `calm` seconds after the last."""

    def seen(what: str, ask: Callable[[], Any]) -> None:
        def look() -> Any:
            watch.discover()
            return ask()

        until(what, look)

    asked = watch.prometheus.query
    seen("Prometheus sees the job train", lambda: asked("backstay_job_step > 20"))
    cluster.delete_worker(0)
    seen("a worker was deleted", lambda: counts(cluster, "Worker").get("disruptions"))
    seen("a worker has crashed", lambda: counts(cluster, "Worker").get("restarts"))
    seen("the disk was full", lambda: asked("backstay_checkpoint_failures_total > 0"))
    seen("the alert fires", lambda: asked('ALERTS{alertname="BackstayCheckpointsFail", alertstate="firing"}'))
    seen("a standby took over", lambda: counts(cluster, "ParameterServer").get("restarts"))
    seen("the job is whole again", lambda: whole(cluster))
    term = cluster.status()["term"]
    seen("there are updates that no checkpoint has", lambda: are_unstored(cluster, asked))
    cluster.kill_servers()
    seen("the job is back at a checkpoint", lambda: cluster.status().get("term", 0) > term)
    seen("updates are redone", lambda: asked("backstay_job_steps_redone_total > 0"))
    seen("the job is whole again", lambda: whole(cluster))
    seen("the slow rank is named", lambda: asked(f'backstay_straggler_delay_seconds{{rank="{SLOW_RANK}"}}'))
    end = time.monotonic() + calm
    while time.monotonic() < end:
        watch.discover()
        time.sleep(1)
