"""The operator as a process, and the embedded API server that it works against, whose requests are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Coroutine
from ipaddress import ip_network
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from between import LONG, put, until

from backstay_cluster.apiserver import ApiServer
from backstay_cluster.net import claim_block
from backstay_operator.kube import Kube
from backstay_operator.rights import JOBS, PODS, ResourceKind
from backstay_spec import contract

T = TypeVar("T")
Json = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
CRDS = ResourceKind("apiextensions.k8s.io", "v1", "customresourcedefinitions")
TOKEN = "a-token-for-the-test"
PATIENCE = LONG  # nothing here is timed


class RecordingServer(ApiServer):
    """Notes the method, path and query of each request of the operator's two clients."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.seen: list[tuple[str, str, dict[str, str], int]] = []

    async def _serve(self, http: web.BaseRequest) -> web.StreamResponse:
        status = 0  # a watch is recorded when its stream ends, however it does
        try:
            answer = await super()._serve(http)
            status = answer.status
        finally:
            if http.headers.get("X-Test") is None:
                self.seen.append((http.method, http.path, dict(http.query), status))
        return answer


class Cut:
    """A wire between the operator and the API server that can be cut."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        await self.cut()

    async def cut(self) -> None:
        self._open = False
        for writer in list(self._writers):
            writer.transport.abort()

    async def restore(self) -> None:
        self._open = True

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers |= {writer, back}
        try:
            await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer))
        finally:
            self._writers -= {writer, back}
            writer.transport.abort()
            back.transport.abort()

    @staticmethod
    async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.transport.abort()


class Api:
    """The API server in a thread with its own event loop, and a client for the test."""

    def __init__(self, folder: Path) -> None:
        self.loop = asyncio.new_event_loop()
        self._block = claim_block()
        self._thread = threading.Thread(target=self._run, name="api server")
        self._thread.start()
        self.server: RecordingServer
        self.cut: Cut
        self.do(self._start(folder))
        self.kubeconfig = str(folder / "operator.kubeconfig")
        self._own = folder / "test.kubeconfig"

    def _run(self) -> None:
        self.loop.run_forever()
        self.loop.close()

    async def _start(self, folder: Path) -> None:
        self.server = RecordingServer(token=TOKEN)
        await self.server.start()
        put(folder / "test.kubeconfig", self.server.kubeconfig())
        self.cut = Cut(int(self.server.url.rpartition(":")[2]))
        port = await self.cut.start()
        config = json.loads(self.server.kubeconfig())
        config["clusters"][0]["cluster"]["server"] = f"https://127.0.0.1:{port}"
        put(folder / "operator.kubeconfig", json.dumps(config))

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE)

    def call(self, question: Callable[[Kube], Awaitable[T]]) -> T:
        async def answer() -> T:
            async with Kube(str(self._own), headers={"X-Test": "1"}) as kube:  # the test's own requests
                return await question(kube)

        return self.do(answer())

    def close(self) -> None:
        try:
            self.do(self.cut.stop())
            self.do(self.server.stop())
            self.do(self._drain())
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._thread.join(PATIENCE)
            self._block.close()

    def address(self, number: int) -> str:
        """Returns a loopback address on which no other process listens."""
        return str(ip_network(self._block.pod_cidr)[number])

    async def _drain(self) -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    # Actions of a user and a kubelet.

    def all(self, resource: ResourceKind, namespace: str = "default") -> list[Json]:
        async def listed(kube: Kube) -> list[Json]:
            path = resource.path(namespace)
            return list((await kube.discover(path)).get("items") or [])

        return self.call(listed)

    def apply(self, job: Json) -> Json:
        return self.call(lambda kube: kube.create(JOBS, "default", job))

    def job(self, name: str) -> Json:
        return self.call(lambda kube: kube.get(JOBS, "default", name))

    def pods(self, job: str, role: str | None = None) -> list[Json]:
        return [
            pod
            for pod in self.all(PODS)
            if pod["metadata"].get("labels", {}).get(contract.LABEL_JOB) == job
            and role in (None, pod["metadata"]["labels"].get(contract.LABEL_ROLE))
        ]

    def set_status(self, pod: str, status: Json) -> None:
        self.call(lambda kube: kube.merge_patch(PODS, "default", pod, {"status": status}, "status"))

    def run_pods(self, job: str, server: str | None = None) -> None:
        for number, pod in enumerate(self.pods(job)):
            if pod["status"].get("phase") == "Pending":
                self.set_status(
                    pod["metadata"]["name"],
                    {
                        "phase": "Running",
                        "podIP": server if server and "-ps-" in pod["metadata"]["name"] else self.address(number + 1),
                        "conditions": [condition("True", "2026-01-01T00:00:05Z")],
                        "containerStatuses": [
                            container({"running": {"startedAt": "2026-01-01T00:00:01Z"}}, ready=True)
                        ],
                    },
                )

    def kill_pod(self, pod: str) -> None:
        ended = {"exitCode": 137, "startedAt": "2026-01-01T00:00:01Z", "finishedAt": "2026-01-01T00:01:00Z"}
        self.set_status(
            pod,
            {
                "phase": "Failed",
                "conditions": [condition("False", "2026-01-01T00:01:00Z")],
                "containerStatuses": [container({"terminated": ended}, ready=False)],
            },
        )


def condition(status: str, since: str) -> Json:
    return {"type": "Ready", "status": status, "lastTransitionTime": since}


def container(state: Json, *, ready: bool) -> Json:
    return {"name": "trainer", "ready": ready, "restartCount": 0, "image": "i", "imageID": "", "state": state}


class Process:
    """One operator."""

    def __init__(self, api: Api, folder: Path, name: str = "operator", *arguments: str, pod: str = "") -> None:
        self.log = folder / f"{name}.log"
        self._out = self.log.open("ab")
        self._start = self.log.stat().st_size
        environ = {key: value for key, value in os.environ.items() if not key.startswith("BACKSTAY")}
        environ |= {"BACKSTAY_OPERATOR_POD": pod} if pod else {}
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "backstay_operator", "--kubeconfig", api.kubeconfig),
                *("--key-file", str(folder / "key"), "--bind", "127.0.0.1", "--metrics-port", "0"),
                *arguments,
            ],
            stderr=self._out,
            env=environ | {"PYTHONPATH": str(ROOT / "operator"), "PYTHONWARNINGS": "error::ResourceWarning"},
        )

    def output(self) -> str:
        return self.log.read_bytes()[self._start :].decode()

    def wait_for_line(self, words: str) -> str:
        def found() -> str | None:
            assert self.process.poll() is None, f"the operator ended:\n{self.output()}"
            return next((line for line in self.output().splitlines() if words in line), None)

        return eventually(found)

    def get(self, path: str) -> tuple[int, str]:
        address = self.wait_for_line("metrics and probes on ").rpartition(" ")[2]
        try:
            with urllib.request.urlopen(f"http://{address}{path}", timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._out.close()


def eventually(question: Callable[[], T | None]) -> T:
    """Ask until the answer is true."""
    answer = until(question)
    assert answer is not None
    return answer
