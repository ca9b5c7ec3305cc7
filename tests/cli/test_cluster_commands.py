"""The commands about jobs select a cluster, and write and return what they should."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import between
import pytest
import typer
import yaml
from aiohttp import web
from between import LONG, put
from digits import PAGE, PODS, job, stamp
from rich.console import Console
from trace_format import check, spans, timeline
from trace_format import step as step_of
from typer.testing import CliRunner

from backstay_cli import cluster_commands
from backstay_cli.cluster_commands import with_cluster
from backstay_cli.main import app
from backstay_cli.plugin import app as plugin
from backstay_client.errors import BadInput
from backstay_client.finding.clusters import (
    PodAccount,
    Where,
    default_kubeconfig,
    named_kubeconfig,
    open_cluster,
    runs_of,
)
from backstay_client.kube import ApiRequestError
from backstay_spec import contract
from backstay_spec.names import LABEL_JOB_UID

RUNNER = CliRunner()


def kubeconfig(path: Path, server: str, **more: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "one",
        "contexts": [{"name": "one", "context": {"cluster": "c", "user": "u", **more}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {"token": "secret"}}],
    }
    put(path, yaml.safe_dump(config))
    return path


def test_a_named_kubeconfig_must_exist_and_comes_before_runs_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = kubeconfig(tmp_path / "home" / ".kube" / "config", "http://127.0.0.1:1")
    assert named_kubeconfig(Where(), {}) is None
    assert named_kubeconfig(Where(), {"KUBECONFIG": str(own)}) == own
    assert named_kubeconfig(Where(local=True), {"KUBECONFIG": str(own)}) is None
    with pytest.raises(BadInput, match="KUBECONFIG names"):
        named_kubeconfig(Where(), {"KUBECONFIG": "/does/not/exist"})
    with pytest.raises(BadInput, match="--kubeconfig: there is no file"):
        named_kubeconfig(Where(kubeconfig=tmp_path / "none"), {"KUBECONFIG": str(own)})
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_kubeconfig(Where()) == own
    assert default_kubeconfig(Where(local=True)) is None
    assert runs_of(Where(embedded=False)) == [], "kubectl's plugin takes kubectl's cluster"


class FakeApi:
    """An API server with one job, and the log of one pod."""

    def __init__(self) -> None:
        self.deleted: list[str] = []
        self.headers: list[str] = []
        self.refused: set[str] = set()  # values of Authorization
        self.selectors: list[str] = []
        self.timeline = b""  # of shard 0's server
        self.status: dict[str, Any] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.headers.append(request.headers.get("Authorization", ""))
        if self.headers[-1] in self.refused:
            return web.json_response({"message": "Unauthorized", "reason": "Unauthorized"}, status=401)
        self.selectors.append(request.query.get("labelSelector", ""))
        path = request.path
        base = f"/apis/{contract.API_VERSION}/namespaces/default/{contract.PLURAL}"
        if path == base:
            return web.json_response({"items": [job()]})
        if path == f"{base}/digits":
            if request.method == "DELETE":
                self.deleted.append("digits")
            return web.json_response(job(**self.status))
        if path.endswith("/pods/digits-parameter-server-0-2:9400/proxy/trace"):
            return web.Response(body=self.timeline)
        if path.endswith("/pods"):
            return web.json_response({"items": [] if self.deleted else PODS})
        if path.endswith("/events"):
            return web.json_response({"items": []})
        if path.endswith("/pods/digits-worker-0-1:9400/proxy/status"):
            return web.json_response(PAGE)
        if path.endswith("/log"):
            name = path.split("/")[-2]
            if name == "digits-worker-1-2":
                return web.json_response({"message": "is waiting to start", "reason": "BadRequest"}, status=400)
            lines = [f"{name} says {n}" for n in range(5)][-int(request.query.get("tailLines", "5")) :]
            return web.Response(text="\n".join(lines) + "\n\x1b[31mred\x1b[0m")
        return web.json_response({"message": f"{path} not found", "reason": "NotFound"}, status=404)


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    """In a thread, because the commands have their own event loop."""
    import threading

    fake, ready, loop = FakeApi(), threading.Event(), asyncio.new_event_loop()
    port = [0]

    async def serve() -> None:
        runner = web.AppRunner(web.Application())
        runner.app.router.add_route("*", "/{tail:.*}", fake.answer)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port[0] = runner.addresses[0][1]
        ready.set()
        await stop.wait()
        await runner.cleanup()

    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert ready.wait(LONG)
    monkeypatch.setenv("KUBECONFIG", str(kubeconfig(tmp_path / "config", f"http://127.0.0.1:{port[0]}")))
    yield fake
    loop.call_soon_threadsafe(stop.set)
    thread.join(LONG)
    loop.close()


PLUGIN = """
import json, pathlib, sys
place = pathlib.Path(sys.argv[1])
number = len(list(place.iterdir()))
(place / str(number)).touch()
print(json.dumps({"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
                  "status": {"token": f"token-{number}"}}))
"""


def test_a_token_that_has_expired_is_replaced(
    cluster: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plug-in of a cloud gives tokens for 15 minutes to an hour. Waits, sweeps and followed logs take longer."""
    (tmp_path / "calls").mkdir()
    own = tmp_path / "config"
    config = yaml.safe_load(own.read_text())
    config["users"].append({"name": "other", "user": {"token": "of another cluster"}})
    other = {"name": "other", "context": {"cluster": config["clusters"][0]["name"], "user": "other"}}
    config["contexts"].append(other)
    arguments = ["-c", PLUGIN, str(tmp_path / "calls")]
    config["users"][0]["user"] = {
        "exec": {
            "apiVersion": "client.authentication.k8s.io/v1",
            "command": sys.executable,
            "args": arguments,
            "interactiveMode": "Never",
        }
    }
    put(own, yaml.safe_dump(config))

    async def call() -> None:
        async with open_cluster(Where()) as found:
            await found.api.get_job("default", "digits")
            cluster.refused = {"Bearer token-0"}
            names = await asyncio.gather(*(found.api.get_job("default", "digits") for _ in range(3)))
            assert len(names) == 3
            config["current-context"] = "other"  # as `kubectl config use-context` does
            between.put(own, yaml.safe_dump(config))
            cluster.refused |= {"Bearer token-1"}
            await found.api.get_job("default", "digits")
            between.put(own, "")
            cluster.refused = {f"Bearer token-{number}" for number in range(9)}
            with pytest.raises(ApiRequestError, match="401"):
                await found.api.get_job("default", "digits")

    asyncio.run(call())
    assert set(cluster.headers) == {"Bearer token-0", "Bearer token-1", "Bearer token-2"}


def test_the_account_of_a_pod_is_read_again(cluster: FakeApi, tmp_path: Path) -> None:
    token = tmp_path / "token"
    put(token, "one")
    url = yaml.safe_load((tmp_path / "config").read_text())["clusters"][0]["cluster"]["server"]

    async def call() -> None:
        async with PodAccount(url, tmp_path).connect() as api:
            await api.get_job("default", "digits")
            cluster.refused = {"Bearer one"}
            with pytest.raises(ApiRequestError, match="401"):
                await api.get_job("default", "digits")
            between.put(token, "two")
            await api.get_job("default", "digits")

    asyncio.run(call())
    assert cluster.headers == ["Bearer one", "Bearer one", "Bearer one", "Bearer two"]


def test_the_end_of_a_deleted_job_is_that_of_its_pods(cluster: FakeApi) -> None:
    result = RUNNER.invoke(app, ["delete", "digits"])
    assert result.exit_code == 0, result.stderr
    assert cluster.selectors[-1] == f"{contract.LABEL_JOB}=digits,{LABEL_JOB_UID}={job()['metadata']['uid']}"


def test_status_of_a_job_on_any_cluster(cluster: FakeApi) -> None:
    for command in (app, plugin):
        result = RUNNER.invoke(command, ["status", "digits", "-o", "json"])
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["step"] == 240, "shard 0's server does not answer: the status counts"
    assert set(cluster.headers) == {"Bearer secret"}
    said = RUNNER.invoke(app, ["status"])
    assert "step 240 of 400" in said.stdout
    assert "which the operator writes every 10 s" in said.stdout
    assert yaml.safe_load(RUNNER.invoke(app, ["status", "-o", "yaml"]).stdout)["name"] == "digits"


def test_a_job_that_does_not_exist_and_a_cluster_that_does_not_answer(
    cluster: FakeApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = RUNNER.invoke(app, ["status", "nope"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "not found" in result.stderr
    away = kubeconfig(tmp_path / "away", "http://127.0.0.1:1")
    for command in (["status"], ["list"], ["top"], ["logs"], ["delete", "a"]):
        result = RUNNER.invoke(app, [*command, "--kubeconfig", str(away)])
        assert result.exit_code == 1, command
        assert "does not answer" in result.stderr
    result = RUNNER.invoke(app, ["status", "--context", "two"])
    assert result.exit_code == 2
    assert "has no context 'two': it has one" in result.stderr
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    assert RUNNER.invoke(app, ["list"]).exit_code == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["status"], ["list", "-o", "json"], ["logs"]])
def test_an_output_that_is_full_is_an_error_of_one_line(cluster: FakeApi, command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "backstay_cli.main", *command], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 1
    assert ended.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-"])
def test_the_standard_streams_may_be_closed(cluster: FakeApi, closed: str) -> None:
    """A daemon closes them. The next file that the command opens must not become its output."""
    command = f"{shlex.join([sys.executable, '-m', 'backstay_cli.main', 'list'])} {closed}"
    ended = subprocess.run(["sh", "-c", command], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "")
    assert "Traceback" not in ended.stderr  # which may name runs that other tests have left


def test_a_folder_that_was_deleted_is_named_only_where_it_is_needed(cluster: FakeApi, tmp_path: Path) -> None:
    place = tmp_path / "gone"
    place.mkdir()
    script = tmp_path / "train.py"
    put(script, "")

    def ended(*arguments: str) -> subprocess.CompletedProcess[str]:
        inside = (
            f"cd {place} && rmdir {place} && exec {shlex.join([sys.executable, '-m', 'backstay_cli.main', *arguments])}"
        )
        place.mkdir(exist_ok=True)
        return subprocess.run(["sh", "-c", inside], capture_output=True, text=True)

    assert ended("list").returncode == 0
    runs = ended("run", str(script))
    assert (runs.returncode, runs.stderr) == (2, "error: the current folder was deleted: change to another one\n")


def test_a_closed_output_ends_the_command_without_a_message(cluster: FakeApi) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "backstay_cli.main", "logs"]
    ended = subprocess.run(command, stdout=writes, stderr=subprocess.PIPE, text=True)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_the_timeline_is_read_from_the_server_else_beside_the_checkpoints(cluster: FakeApi, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    result = RUNNER.invoke(app, ["trace", "digits", "-o", str(out)])
    assert result.exit_code == 2
    assert "no timeline of the job digits was found" in result.stderr
    cluster.status = {"checkpoint": {"uri": f"file://{tmp_path}/step-200", "step": 200}}
    put(tmp_path / "trace-000000000001-u-1.pb.gz", gzip.compress(timeline(spans("worker", 0, step_of(0, "f")))))
    result = RUNNER.invoke(app, ["trace", "-o", str(out)])
    assert result.exit_code == 0, result.stderr
    assert f"from {tmp_path}/trace-000000000001-u-1.pb.gz" in result.stdout
    cluster.timeline = timeline(spans("worker", 1, step_of(0, "f")))
    assert "from pod digits-parameter-server-0-2" in RUNNER.invoke(plugin, ["trace", "-o", str(out)]).stdout
    trace = json.loads(out.read_text())
    check(trace)
    assert "worker 1" in str(trace)
    cluster.timeline = b"<html>"
    assert "it is not a timeline" in RUNNER.invoke(app, ["trace", "-o", str(out)]).stderr


def test_the_history_of_a_job_has_what_its_status_has_dropped(cluster: FakeApi, tmp_path: Path) -> None:
    said = RUNNER.invoke(app, ["history", "digits"])
    assert said.exit_code == 0, said.stderr
    for text in (
        "digits in namespace default: Running",
        "step 240 of 400",
        "1 worker pod died: Crashed",
        "1 server pod died: OutOfMemory",
        "! worker 1 died: exit code 137 (SIGKILL); trains again after 4 s",
        "! server 0 died: out of memory; back to the checkpoint of step 200: 12 updates are redone",
    ):
        assert text in said.stdout, said.stdout
    old = {"time": stamp(-1000), "type": "Warning", "reason": "Evicted", "message": "died long ago", "slot": "worker-0"}
    record = {"job": "digits", "namespace": "default", "uid": "u", "unixSeconds": 1.0, "status": {"history": [old]}}
    put(tmp_path / "history-000000000001-u.json", json.dumps(record))
    put(tmp_path / "history-000000000002-other.json", json.dumps({**record, "uid": "other"}))
    put(tmp_path / "history-000000000003-u.json", "{")
    cluster.status = {"checkpoint": {"uri": f"{tmp_path}/step-200", "step": 200}}
    found = json.loads(RUNNER.invoke(app, ["history", "-o", "json"]).stdout)
    assert [entry["reason"] for entry in found["history"]][:2] == ["Evicted", "Running"]
    assert (found["phase"], found["deaths"]) == ("Running", {"Evicted": 1, "Crashed": 1, "OutOfMemory": 1})
    missing = RUNNER.invoke(app, ["history", "nope"])
    assert (missing.exit_code, "--from" in missing.stderr) == (2, True)
    assert RUNNER.invoke(app, ["history", "--from", str(tmp_path / "none")]).exit_code == 2


def test_logs_of_chosen_pods(cluster: FakeApi) -> None:
    one = RUNNER.invoke(app, ["logs", "digits", "--rank", "0", "--tail", "2"])
    assert one.stdout.splitlines() == [
        "digits-worker-0-1 says 3",
        "digits-worker-0-1 says 4",
        "\\x1b[31mred\\x1b[0m",
    ]
    every = RUNNER.invoke(app, ["logs", "digits", "--role", "worker"])
    assert every.stdout.splitlines()[0] == "worker 0    | digits-worker-0-1 says 0"
    before = RUNNER.invoke(app, ["logs", "digits", "--role", "server", "--rank", "0", "--previous"])
    assert before.stdout.splitlines()[0] == "digits-parameter-server-0-1 says 0"
    none = RUNNER.invoke(app, ["logs", "digits", "--rank", "0", "--previous"])
    assert (none.exit_code, none.stdout) == (2, "")
    assert "has been replaced" in none.stderr
    missing = RUNNER.invoke(app, ["logs", "digits", "--rank", "7"])
    assert missing.exit_code == 2
    assert "no pod with role worker with rank 7" in missing.stderr
    assert RUNNER.invoke(app, ["logs", "--previous", "--follow"]).exit_code == 2


@pytest.mark.parametrize("name", ["", " ", "..", "../pods/x", "digits/status", "digits?x=y", "digits%2Fx", "Digits"])
def test_a_name_that_cannot_exist_reaches_no_server(cluster: FakeApi, name: str) -> None:
    """``backstay delete "$JOB"`` with an empty variable meant the path of all jobs."""
    of_namespace = [["delete", "-n", name, "digits"], ["list", "-n", name]] if name else []  # "" is the context's
    for words in (["delete", "--", name], ["status", "--", name], *of_namespace):
        refused = RUNNER.invoke(app, words)
        assert refused.exit_code == 2, refused.output
        is_path = "/" in name or name == ".."  # of the folder of a run, also with KUBECONFIG
        of_run = is_path and words[0] == "status"
        assert (f"{name} is not the folder of a run" if of_run else f"{name!r} cannot exist") in refused.stderr
    assert not cluster.headers


@pytest.mark.usefixtures("cluster")
def test_an_error_without_a_text_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    async def silent(cluster: object) -> None:
        raise TimeoutError

    with pytest.raises(typer.Exit):
        with_cluster(Where(None, None, None, embedded=True), silent)
    assert "does not answer: TimeoutError" in capsys.readouterr().err


def test_a_file_that_is_not_a_kubeconfig_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "empty", "")
    refused = RUNNER.invoke(app, ["list", "--kubeconfig", str(tmp_path / "empty")])
    assert refused.exit_code == 2
    assert "empty cannot be read: it is not a kubeconfig" in refused.stderr


def test_top_fails_in_a_terminal_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_commands, "_console", lambda: Console(force_terminal=True))
    dead = kubeconfig(tmp_path / "config", "http://127.0.0.1:9")
    assert RUNNER.invoke(app, ["top", "--kubeconfig", str(dead)]).exit_code == 1


def test_list_top_and_delete(cluster: FakeApi) -> None:
    listed = RUNNER.invoke(app, ["list", "-o", "json"])
    assert [one["name"] for one in json.loads(listed.stdout)] == ["digits"]
    assert "60 %" in RUNNER.invoke(app, ["list"]).stdout
    assert "digits" in RUNNER.invoke(app, ["top"]).stdout
    assert "worker 1" in RUNNER.invoke(app, ["top", "digits"]).stdout
    gone = RUNNER.invoke(app, ["delete", "digits", "nope"])
    assert gone.exit_code == 1
    assert gone.stdout == "deleted digits\n"
    assert "no TrainingJob nope" in gone.stderr
    assert cluster.deleted == ["digits"]


def test_a_kubeconfig_with_a_client_certificate_is_used(tmp_path: Path) -> None:
    """The `kubernetes` package reads what is more than a token; an unusable certificate is invalid input."""
    path = kubeconfig(tmp_path / "config", "https://127.0.0.1:1")
    config = yaml.safe_load(path.read_text())
    garbage = base64.b64encode(b"-----BEGIN CERTIFICATE-----").decode()
    config["users"][0]["user"] = {"client-certificate-data": garbage, "client-key-data": garbage}
    put(path, yaml.safe_dump(config))
    result = RUNNER.invoke(app, ["list", "--kubeconfig", str(path)])
    assert result.exit_code == 2
    assert "cannot be used" in result.stderr


@pytest.mark.parametrize("command", ["backstay", "kubectl-backstay"])
def test_a_terminal_without_unicode_gets_question_marks(cluster: FakeApi, command: str) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    program = Path(sys.executable).with_name(command)
    done = subprocess.run(
        [program, "status", "digits"], capture_output=True, env=environment, timeout=LONG, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"step 240 of 400" in done.stdout
    assert b"?" in done.stdout


def test_the_end_of_a_pipe_is_not_reported_as_an_error_of_the_server(
    cluster: FakeApi, capsys: pytest.CaptureFixture[str]
) -> None:
    async def write(_: object) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        with_cluster(Where(None, None, None, embedded=True), write)
    assert capsys.readouterr().err == ""
