"""The operator runs as a process with Kopf against the embedded API server (O1, O2, O5, O6)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml
from between import put

from backstay_operator import access, errors
from backstay_operator.metrics import metric_names
from backstay_operator.rights import (
    DISCOVERY,
    EVENTS,
    JOBS,
    LEASE_NAME,
    LEASE_RIGHTS,
    LEASES,
    NETWORK_POLICIES,
    PODS,
    RIGHTS,
    SERVICES,
)
from backstay_rpc import control_pb2, control_pb2_grpc
from backstay_spec import contract
from backstay_spec.job_report import JobReport, TermStart
from backstay_spec.token import token_for

from .processes import CRDS, PATIENCE, ROOT, TOKEN, Api, Json, Process, container, eventually


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    it = Api(tmp_path_factory.mktemp("api"))
    try:
        crd = yaml.safe_load(next((ROOT / "crds").glob("*trainingjobs*.yaml")).read_text())
        # Cluster-scoped: its path has no namespace.
        it.call(lambda kube: kube._send("create", "crd", "POST", CRDS.path(None), "create the CRD", body=crd))
        yield it
    finally:
        it.close()


@pytest.fixture
def start(api: Api, tmp_path: Path) -> Iterator[Callable[..., Process]]:
    running: list[Process] = []

    def started(*arguments: str, name: str = "operator", pod: str = "") -> Process:
        running.append(Process(api, tmp_path, name, *arguments, pod=pod))
        return running[-1]

    yield started
    for process in running:
        process.stop(signal.SIGKILL)
    with contextlib.suppress(errors.NotFound):
        api.call(lambda kube: kube.delete(LEASES, "default", LEASE_NAME))


def make(name: str, **spec: Any) -> Json:
    return {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "example/train:1",
            "command": ["python", "train.py"],
            "parameterServers": {"replicas": 1},
            "workers": {"replicas": 2},
            **spec,
        },
    }


def running(api: Api, name: str, pods: int) -> list[Json]:
    found = eventually(lambda: (them := api.pods(name)) and len(them) == pods and them)
    api.run_pods(name)
    eventually(lambda: api.job(name).get("status", {}).get("phase") == "Running")
    return found


def test_t8_a_job_that_is_nested_too_deep_fails_with_the_reason(api: Api, start: Callable[..., Process]) -> None:
    """The API server keeps unknown fields of a template at any depth; reading them must not end in silence."""
    start()
    deep: Json = {}
    inner = deep
    for _ in range(700):
        inner["a"] = inner = {}
    api.apply(make("deep", workers={"replicas": 1, "template": {"spec": {"affinity": deep}}}))
    status = eventually(lambda: (found := api.job("deep").get("status", {})).get("phase") == "Failed" and found)
    assert "is nested more than 64 deep" in str(status["conditions"])
    assert "spec.workers" in str(status["conditions"])


def test_a_job_trains_through_the_loss_of_its_workers_its_operator_and_the_api_server(
    api: Api, start: Callable[..., Process]
) -> None:
    """One story tests O2, O5 and the probes, because starting processes takes the time here."""
    operator = start()
    api.apply(make("story"))
    pods = running(api, "story", 3)
    for resource in (SERVICES, NETWORK_POLICIES):
        assert [one["metadata"]["labels"][contract.LABEL_JOB] for one in api.all(resource)] == ["story"]
    assert operator.get("/healthz") == (200, "ok\n")
    eventually(lambda: operator.get("/readyz") == (200, "ok: acting\n"))

    # O4: what is misspelt in a template is not left out in silence.
    api.apply(make("misspelt", workers={"replicas": 1, "template": {"spec": {"nodeSelectr": {"gpu": "a100"}}}}))
    eventually(lambda: api.job("misspelt").get("status", {}).get("phase") == "Failed")
    failed = next(one for one in api.job("misspelt")["status"]["conditions"] if one["type"] == "Failed")
    assert failed["reason"] == "InvalidPod"
    assert "nodeSelectr" in failed["message"]

    # Only the dead worker is replaced.
    dead = api.pods("story", "worker")[0]["metadata"]["name"]
    api.kill_pod(dead)
    eventually(lambda: len(api.pods("story")) == 4)
    kept = {pod["metadata"]["uid"] for pod in pods}
    assert kept <= {pod["metadata"]["uid"] for pod in api.pods("story")}
    api.run_pods("story")
    eventually(lambda: api.job("story")["status"]["roles"]["Worker"] == counts(2, 2, 1))

    # The operator is killed and started again: no pod restarted, no count lost, immediately though it held the Lease.
    operator.stop(signal.SIGKILL)
    before = {pod["metadata"]["uid"] for pod in api.pods("story")}
    dead = api.pods("story", "worker")[-1]["metadata"]["name"]
    api.kill_pod(dead)  # no operator observed it
    operator = start(name="second")
    eventually(lambda: len(api.pods("story")) == 5)
    assert before <= {pod["metadata"]["uid"] for pod in api.pods("story")}
    api.run_pods("story")
    eventually(lambda: api.job("story")["status"]["roles"]["Worker"] == counts(2, 2, 2))

    # The API server does not answer for a while: the operator waits, alive but not ready, and continues.
    eventually(lambda: operator.get("/readyz")[0] == 200)
    api.do(api.cut.cut())
    alive = [pod for pod in api.pods("story", "worker") if pod["status"]["phase"] == "Running"]
    api.kill_pod(alive[0]["metadata"]["name"])
    eventually(lambda: operator.get("/readyz")[0] == 503)
    assert operator.get("/healthz")[0] == 200
    api.do(api.cut.restore())
    eventually(lambda: any(pod["status"]["phase"] == "Pending" for pod in api.pods("story", "worker")))
    eventually(lambda: operator.get("/readyz")[0] == 200)

    # The exported metrics are in the list of names; a job's series are removed with it.
    status, text = operator.get("/metrics")
    assert status == 200
    exported = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line.startswith("backstay_")}
    assert exported <= metric_names()
    restarts = 'backstay_job_restarts_total{namespace="default",role="Worker",training_job="story"}'
    eventually(lambda: restarts in operator.get("/metrics")[1])
    text = operator.get("/metrics")[1]
    assert 'backstay_operator_jobs{phase="Running"} 1.0' in text
    uid = api.job("story")["metadata"]["uid"]
    api.call(lambda kube: kube.delete(JOBS, "default", "story", uid=uid))
    eventually(lambda: 'training_job="story"' not in operator.get("/metrics")[1])
    eventually(lambda: not api.pods("story"))
    assert "fault in the operator" not in operator.output()
    assert operator.stop() == 0
    lease = api.call(lambda kube: kube.get(LEASES, "default", LEASE_NAME))
    assert lease["spec"]["holderIdentity"] == ""


def counts(desired: int, ready: int, restarts: int) -> Json:
    return {"desired": desired, "ready": ready, "restarts": restarts, "disruptions": 0}


class Shard(control_pb2_grpc.ControlServicer):
    """A server's control service, which gives its prepared answer to callers with the token."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.reply = control_pb2.ProgressReply(
            incarnation=1,
            term=1,
            step=41,
            world=2,
            report=JobReport(loss=0.25, term_start=TermStart(1, 0)).encoded(),
        )
        self.asked: list[control_pb2.ProgressRequest] = []

    async def Progress(self, request: Any, context: Any) -> Any:  # noqa: N802
        if ("authorization", f"Bearer {self.token}") not in [tuple(pair) for pair in context.invocation_metadata()]:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no token")
        self.asked.append(request)
        return self.reply


def test_the_reports_of_servers_reach_the_status_and_a_stalled_worker_is_replaced(
    api: Api, start: Callable[..., Process], tmp_path: Path
) -> None:
    """O8: by the pod's address, with the job's token."""
    address = api.address(200)
    operator = start()
    api.apply(make("calls"))
    eventually(lambda: len(api.pods("calls")) == 3)
    shard = Shard(token_for((tmp_path / "key").read_bytes().strip(), api.job("calls")["metadata"]["uid"]))

    async def serve() -> grpc.aio.Server:
        server = grpc.aio.server()
        control_pb2_grpc.add_ControlServicer_to_server(shard, server)
        server.add_insecure_port(f"{address}:{contract.PORT_CONTROL}")
        await server.start()
        return server

    async def end(server: grpc.aio.Server) -> None:
        await server.stop(None)

    server = api.do(serve())
    try:
        # Not immediately, because progress alone changes a status only every 10 s.
        shard.reply.stalled.add(rank=1, incarnation=1, reason="no gradient for 300 s")
        shard.reply.contributed[1] = 1  # it has worked: its replacement does not back off
        api.run_pods("calls", address)
        eventually(lambda: api.job("calls")["status"]["incarnations"]["worker-1"] == 2)
        status = api.job("calls")["status"]
        assert (status["step"], status["loss"], status["world"], status["term"]) == (41, 0.25, 2, 1)
        asked = shard.asked[0]
        assert (asked.shard, asked.expected_incarnation, asked.world) == (0, 1, 2)
        assert asked.incarnations["worker-1"] == 1
        step = 'backstay_job_step{namespace="default",training_job="calls"} 41.0'
        eventually(lambda: step in operator.get("/metrics")[1])

        def stalled_and_alive() -> list[Json]:
            named = [pod for pod in api.pods("calls") if pod["metadata"]["name"].startswith("calls-worker-1-1-")]
            return [pod for pod in named if not pod["metadata"].get("deletionTimestamp")]

        eventually(lambda: not stalled_and_alive())
        wanted = 'backstay_operator_pods_replaced_total{cause="Stalled",role="Worker"} 1.0'
        eventually(lambda: wanted in operator.get("/metrics")[1])
        assert "fault in the operator" not in operator.output()
    finally:
        api.do(end(server))
    uid = api.job("calls")["metadata"]["uid"]
    api.call(lambda kube: kube.delete(JOBS, "default", "calls", uid=uid))


def test_of_two_operators_one_acts_and_the_other_takes_over(api: Api, start: Callable[..., Process]) -> None:
    first = start(name="one")
    first.wait_for_line("this operator acts")
    second = start(name="two")
    second.wait_for_line("another operator holds the Lease")
    eventually(lambda: second.get("/readyz") == (200, "ok: another operator acts\n"))
    assert second.get("/healthz")[0] == 200
    api.apply(make("shared"))
    running(api, "shared", 3)
    assert "backstay_operator_reconciles_total 0.0" in second.get("/metrics")[1]
    assert first.stop() == 0
    second.wait_for_line("this operator acts")
    dead = api.pods("shared", "worker")[0]["metadata"]["name"]
    api.kill_pod(dead)
    eventually(lambda: len(api.pods("shared")) == 4)
    uid = api.job("shared")["metadata"]["uid"]
    api.call(lambda kube: kube.delete(JOBS, "default", "shared", uid=uid))


def test_an_uninstalled_operator_leaves_no_lease_that_is_held(api: Api, start: Callable[..., Process]) -> None:
    """The operator's rights are deleted first, so it cannot release the Lease, which is deleted with the pod (O2)."""
    spec = {"containers": [{"name": "operator", "image": "example/operator:1"}], "terminationGracePeriodSeconds": 0}
    manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator-0"}, "spec": spec}
    pod = api.call(lambda kube: kube.create(PODS, "default", manifest))["metadata"]
    installed = start(name="installed", pod=f"operator-0/{pod['uid']}")
    installed.wait_for_line("this operator acts")
    installed.stop(signal.SIGKILL)  # as if each of its last requests were refused
    assert api.call(lambda kube: kube.get(LEASES, "default", LEASE_NAME))["spec"]["holderIdentity"]
    api.call(lambda kube: kube.delete(PODS, "default", "operator-0", uid=pod["uid"], grace=0))
    eventually(lambda: not api.all(LEASES))
    again = start(name="again")
    again.wait_for_line("this operator acts")
    assert "another operator holds the Lease" not in again.output()


def test_the_rights_are_those_that_are_used_and_no_others(api: Api, start: Callable[..., Process]) -> None:
    """O6: every request in the whole life of jobs is in the table, and every entry of the table is used."""
    api.server.seen.clear()
    operator = start("--log-format", "json")
    api.apply(make("rights", workers={"replicas": 1}, runPolicy={"cleanPods": "All"}))
    running(api, "rights", 2)
    gone = api.pods("rights", "worker")[0]["metadata"]
    # Deleted while no operator looks: a live GET must find that out.
    operator.stop(signal.SIGKILL)
    api.call(lambda kube: kube.delete(PODS, "default", gone["name"], grace=0))
    operator = start("--log-format", "json", name="second")
    eventually(lambda: [p for p in api.pods("rights", "worker") if p["metadata"]["name"] != gone["name"]])
    api.run_pods("rights")
    # A server dies: its Service is pointed at the next one. Again and again: the event is counted up.
    server = api.pods("rights", contract.ROLE_SERVER)[0]["metadata"]["name"]
    api.kill_pod(server)
    eventually(lambda: service_incarnation(api) == "2")
    # A worker's number is scaled up and down, so that a pod is deleted; at the end the job deletes itself.
    change = {"spec": {"runPolicy": {"suspend": True}}}
    api.call(lambda kube: kube.merge_patch(JOBS, "default", "rights", change))
    eventually(lambda: not terminated(api, "rights"))
    eventually(lambda: api.job("rights")["status"]["phase"] == "Suspended")
    change = {"spec": {"runPolicy": {"suspend": False}, "image": "example/train:2"}}
    api.call(lambda kube: kube.merge_patch(JOBS, "default", "rights", change))
    for role in (contract.ROLE_SERVER, contract.ROLE_WORKER):
        eventually(lambda role=role: any(pod["status"]["phase"] == "Pending" for pod in api.pods("rights", role)))
    for line in operator.output().splitlines():
        assert set(json.loads(line)) >= {"time", "level", "message"}
    finish(api)
    # It has ended: what its pods used is deleted after them, and then the job itself, as its time to live has passed.
    eventually(lambda: not terminated(api, "rights") and not api.all(SERVICES) and not api.all(NETWORK_POLICIES))
    change = {"spec": {"runPolicy": {"ttlSecondsAfterFinished": 0}}}
    api.call(lambda kube: kube.merge_patch(JOBS, "default", "rights", change))
    eventually(lambda: "rights" not in [job["metadata"]["name"] for job in api.all(JOBS)])
    operator.stop()

    used: dict[tuple[str, str], set[str]] = {}
    for method, path, query, status in api.server.seen:
        assert status not in (400, 405, 415), (method, path, query, status)
        if method == "GET" and (path in DISCOVERY or path.count("/") == (2 if path.startswith("/api/") else 3)):
            continue  # a discovery document
        group, resource, verb = parsed(method, path, query)
        used.setdefault((group, resource), set()).add(verb)
    may = {key: set(verbs) for key, verbs in {**RIGHTS, **LEASE_RIGHTS}.items()}
    for key, verbs in used.items():
        assert verbs <= may.get(key, set()), f"{key}: {verbs - may.get(key, set())} used, and not in rights.py"
    # The remaining rights are used after failures, which separate tests inject.
    rare = {
        (JOBS.group, JOBS.plural): {"get"},  # a conflict on the status
        (SERVICES.group, SERVICES.plural): {"get"},  # a name that is taken; a patch whose test fails
        (NETWORK_POLICIES.group, NETWORK_POLICIES.plural): {"get"},  # a name that is taken
        (EVENTS.group, EVENTS.plural): {"patch"},  # the same event again
    }
    for key, verbs in may.items():
        assert verbs - used.get(key, set()) <= rare.get(key, set()), f"{key}: {verbs} granted, {used.get(key)} used"


def terminated(api: Api, job: str) -> list[Json]:
    """A kubelet ends what is being deleted. Returns what still runs."""
    for pod in api.pods(job):
        if pod["metadata"].get("deletionTimestamp"):
            with contextlib.suppress(errors.NotFound):
                api.call(lambda kube, name=pod["metadata"]["name"]: kube.delete(PODS, "default", name, grace=0))
    return [pod for pod in api.pods(job) if pod["status"]["phase"] not in ("Failed", "Succeeded")]


def service_incarnation(api: Api) -> str:
    (service,) = [one for one in api.all(SERVICES) if one["metadata"]["labels"][contract.LABEL_JOB] == "rights"]
    return str(service["spec"]["selector"][contract.LABEL_INCARNATION])


def finish(api: Api) -> None:
    """Training ends, and the script of worker 0 too."""
    api.run_pods("rights")
    (server,) = [p for p in api.pods("rights", contract.ROLE_SERVER) if p["status"].get("phase") == "Running"]
    workers = [p for p in api.pods("rights", contract.ROLE_WORKER) if p["status"].get("phase") == "Running"]
    worker = next(p for p in workers if p["metadata"]["labels"][contract.LABEL_INDEX] == "0")
    said = {"result": "Succeeded", "step": 5, "checkpoint": "", "metrics": {}}
    for pod, last in ((worker, {"result": "Trained", "step": 5}), (server, said)):
        ended = {
            "exitCode": 0,
            "message": json.dumps(last),
            "startedAt": "2026-01-01T00:00:01Z",
            "finishedAt": "2026-01-01T00:01:00Z",
        }
        state = container({"terminated": ended}, ready=False)
        api.set_status(pod["metadata"]["name"], {"phase": "Succeeded", "containerStatuses": [state]})


def parsed(method: str, path: str, query: dict[str, str]) -> tuple[str, str, str]:
    """(group, resource[/subresource], verb) as RBAC sees a request."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[0] == "api" else (parts[1], parts[3:])
    if rest[0] == "namespaces" and len(rest) > 2:
        rest = rest[2:]
    resource = rest[0] if len(rest) < 3 else f"{rest[0]}/{rest[2]}"
    named = len(rest) > 1
    if method == "GET":
        verb = "watch" if query.get("watch") in ("true", "1") else "get" if named else "list"
    else:
        verb = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]
    return group, resource, verb


def test_the_operator_waits_for_its_crd_and_reports_it(start: Callable[..., Process], tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    other = Api(bare)
    process = None
    try:
        process = Process(other, bare)
        process.wait_for_line("waiting for the CustomResourceDefinition trainingjobs.backstay.dev")
        assert process.get("/healthz")[0] == 200
        assert process.get("/readyz")[0] == 503
        assert process.stop() == 0
    finally:
        if process is not None:
            process.stop(signal.SIGKILL)
        other.close()


def test_it_ends_with_the_process_that_started_it(api: Api, tmp_path: Path) -> None:
    """`backstay run` may be killed; what it started must not stay behind."""
    script = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen(sys.argv[1:])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "backstay_operator", "--die-with-parent", "--kubeconfig", api.kubeconfig]
    command += ["--key-file", str(tmp_path / "key"), "--bind", "127.0.0.1", "--metrics-port", "0"]
    environ = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    with (tmp_path / "log").open("wb") as log:
        parent = subprocess.Popen(
            [sys.executable, "-c", script, *command], stdout=subprocess.PIPE, stderr=log, env=environ
        )
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        eventually(lambda: b"acts now" in (tmp_path / "log").read_bytes())
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    try:
        eventually(lambda: not alive(child))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_it_never_imports_jax_nor_the_other_parts() -> None:
    """The kubernetes package takes memory and time; it is imported only for kubeconfigs that need it."""
    script = (
        "import sys, backstay_operator.__main__\n"
        "bad = {'jax', 'optax', 'pyarrow', 'kubernetes', 'backstay', 'backstay_cli', 'backstay_cluster'}\n"
        "bad &= set(sys.modules)\n"
        "sys.exit(', '.join(sorted(bad)) or None)\n"
    )
    environ = os.environ | {"PYTHONPATH": str(ROOT / "operator")}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True)


def test_a_wrong_start_states_what_would_be_valid(api: Api, tmp_path: Path) -> None:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("BACKSTAY")}
    environ |= {"PYTHONPATH": str(ROOT / "operator")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "backstay_operator", *arguments],
            env=environ,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )

    no_key = run("--kubeconfig", api.kubeconfig)
    assert no_key.returncode == 2
    assert "--key-file" in no_key.stderr
    put(tmp_path / "key", "short")
    short = run("--kubeconfig", api.kubeconfig, "--key-file", str(tmp_path / "key"))
    assert short.returncode == 2
    assert "at least 32 random bytes" in short.stderr
    key = str(tmp_path / "good")
    missing = run(
        "--kubeconfig", str(tmp_path / "nowhere"), "--key-file", key, "--metrics-port", "0", "--bind", "127.0.0.1"
    )
    assert missing.returncode == 2
    assert "nowhere cannot be used" in missing.stderr


def test_credentials_are_read_the_same_for_both_clients(api: Api) -> None:
    async def both() -> tuple[Any, Any]:
        return await access.load(api.kubeconfig), await access.kopf_login(api.kubeconfig)

    ours, kopfs = api.do(both())
    assert kopfs.server == ours.host
    assert (kopfs.scheme, kopfs.token) == ("Bearer", TOKEN)
    assert kopfs.as_ssl_context().check_hostname


def test_no_credentials_is_an_error_that_names_what_was_tried() -> None:
    with pytest.raises(access.AccessError, match=r"service account of this pod.*--kubeconfig"):
        asyncio.run(access.load(None))
