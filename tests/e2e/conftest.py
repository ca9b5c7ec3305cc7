"""All end-to-end tests use one cluster with the operator, embedded, or what KUBECONFIG names when BACKSTAY_E2E=cluster.

With KUBEBUILDER_ASSETS, a real kube-apiserver serves the embedded cluster's API. A cluster in KUBECONFIG has the
operator already (`helm install`), and a token in its kubeconfig. Its nodes are this machine, with its files and its
processes, because the tests kill processes themselves. BACKSTAY_E2E_IMAGE is the trainer's image there. All objects are
created in the namespace `backstay-e2e`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pytest
from between import LONG, until

from backstay_client.embedded.preload import preload
from backstay_client.embedded.session import start_session
from backstay_client.kube import JOBS, ApiCalls, ApiRequestError
from backstay_spec import contract
from backstay_spec.causes import Cause

T = TypeVar("T")
SCRIPTS = Path(__file__).parent / "scripts"
WAIT = 180.0
PAUSE = 0.3  # each call asks the API server, which takes as much of a processor as a job that waits
NO_ANSWER = (aiohttp.ClientError, OSError)
_names = itertools.count()


class Cluster:
    """A cluster for tests with blocking calls, each with a deadline."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.namespace = "default"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._stack = contextlib.AsyncExitStack()
        self._fails: dict[str, bool] = {}  # each job that was created and not deleted -> whether it has to fail
        self.api: ApiCalls
        self.kubeconfig: Path

    def start(self) -> None:
        self._thread.start()

        async def begin() -> None:
            session = await self._stack.enter_async_context(start_session(self.folder, preload=preload()))
            self.api, self.kubeconfig = session.api, session.kubeconfig

        self.run(begin())

    def place(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Returns the spec with what says where the scripts are. A busy machine pauses workers for longer than one
        would wait for them."""
        workers = {"stallSeconds": 600, **spec.get("workers", {})}
        return {"image": "backstay.dev/trainer:local", "workingDir": str(SCRIPTS), **spec, "workers": workers}

    def stop(self) -> None:
        try:
            self.run(self._stack.aclose())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LONG)
            self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LONG)

    def submit(
        self, spec: dict[str, Any], *, env: dict[str, str] | None = None, name: str = "", fails: bool = False
    ) -> str:
        """Create a TrainingJob that runs tiny.py; its name. Only if it `fails` may its pods end with an error."""
        name = name or f"t{next(_names)}"
        variables = [{"name": key, "value": value} for key, value in (env or {}).items()]
        spec = self.place({"command": ["python", "tiny.py"], "env": variables, **spec})
        job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": name}, "spec": spec}
        path = f"{JOBS}/namespaces/{self.namespace}/{contract.PLURAL}"
        self.run(self.api.request("POST", path, job, fieldValidation="Strict"))
        self._fails[name] = fails
        return name

    def job(self, name: str) -> dict[str, Any]:
        return self.run(self.api.get_job(self.namespace, name))

    def pods(self, name: str) -> list[dict[str, Any]]:
        return self.run(self.api.pods_of(self.namespace, name))

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.run(self.api.events_of(self.namespace, self.job(name)["metadata"]["uid"]))

    def patch(self, name: str, body: list[dict[str, Any]]) -> None:
        path = f"{JOBS}/namespaces/{self.namespace}/{contract.PLURAL}/{name}"

        self.run(self.api.request("PATCH", path, body, content_type="application/json-patch+json"))

    def delete(self, name: str) -> None:
        path = f"{JOBS}/namespaces/{self.namespace}/{contract.PLURAL}/{name}"
        self._fails.pop(name, None)
        with contextlib.suppress(ApiRequestError):
            self.run(self.api.request("DELETE", path, propagationPolicy="Background"))
        until(lambda: not self.pods(name), f"the pods of {name} are gone", limit=WAIT, pause=PAUSE, ignoring=NO_ANSWER)

    def delete_pod(self, pod: str) -> None:
        """Delete a pod as `kubectl delete pod` does."""

        async def send() -> None:
            await self.api.request("DELETE", f"/api/v1/namespaces/{self.namespace}/pods/{pod}")

        self.run(send())

    def wait(self, what: str, holds: Callable[[], Any], seconds: float = WAIT) -> Any:
        """Wait until `holds` gives something true; how long that takes is not judged, only that it ends.

        A pod that ends with an error ends it too, unless the job `fails`: the operator would replace such a pod again
        and again. The message then begins with that pod. The state of each job follows.
        """
        checks = itertools.count()

        def once() -> Any:
            if not (found := holds()) and next(checks) % 4 == 3:
                self._check_pods()
            return found

        try:
            return until(once, what, limit=seconds, pause=PAUSE, ignoring=NO_ANSWER)
        except AssertionError as error:
            states = "".join(f"\n{self.describe(job)}" for job in self._fails)
            raise AssertionError(f"{error}{states}") from None

    def _check_pods(self) -> None:
        """Raise an AssertionError about a pod that has ended with an error, if it is not of a job that fails."""
        for job in [name for name, fails in self._fails.items() if not fails]:
            for pod in self.pods(job):
                if "deletionTimestamp" in pod["metadata"]:  # its exit code is how it handles SIGTERM
                    continue
                for container in pod["status"].get("containerStatuses", ()):
                    code = container.get("state", {}).get("terminated", {}).get("exitCode", 0)
                    # Tests kill pods with signals.
                    if 0 < code < 128 and code != contract.GROUP_LOST_EXIT:
                        name = pod["metadata"]["name"]
                        raise AssertionError(f"{name} ended with exit code {code}:\n{self.log(name)[-1500:]}")

    def wait_for_end(self, name: str, seconds: float = 240) -> dict[str, Any]:
        """Returns the status of a job that has ended as it has to."""

        def ended() -> dict[str, Any] | None:
            status = self.job(name).get("status", {})
            return status if status.get("phase") in {"Succeeded", "Failed"} else None

        status: dict[str, Any] = self.wait(f"{name} ended", ended, seconds)
        assert status["phase"] == ("Failed" if self._fails[name] else "Succeeded"), self.describe(name)
        return status

    def describe(self, name: str) -> str:
        """Returns the state of a job that failed a test, for people."""
        try:
            return self._describe(name)
        except (*NO_ANSWER, ApiRequestError) as error:
            return f"{name}: {error!r}"

    def _describe(self, name: str) -> str:
        lines = [json.dumps(self.job(name).get("status", {}), indent=1)]
        lines += [f"{event['reason']}: {event['message']}" for event in self.events(name)]
        for pod in self.pods(name):
            log = self.log(pod["metadata"]["name"])
            lines.append(f"--- {pod['metadata']['name']} {pod['status'].get('phase')}\n{log[-1500:]}")
        return "\n".join(lines)

    def log(self, pod: str) -> str:
        path = self.folder / "pods" / self.namespace / pod / f"{contract.CONTAINER}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def deaths(self, name: str) -> list[tuple[str, int, str]]:
        """Returns the deaths of a job's pods, in order: slot, incarnation and cause.

        A test compares the causes, and no number of restarts. Servers have no setting like `stallSeconds`: one that a
        busy machine keeps from its processor is replaced as `Stalled`.
        """
        entries = self.job(name)["status"].get("history", [])
        return [(one["slot"], one["incarnation"], one["reason"]) for one in entries if one.get("incarnation")]

    def deaths_with_cause(self, name: str) -> list[tuple[str, int, str]]:
        """Returns the deaths that a busy machine does not explain."""
        return [death for death in self.deaths(name) if death[2] != Cause.STALLED]

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        conditions = self.job(name).get("status", {}).get("conditions", [])
        return next((condition for condition in conditions if condition["type"] == kind), {})

    def processes(self, pod: str) -> list[int]:
        """Returns the processes of a pod, found by their environment; really running ones, to be really killed."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if f"{contract.ENV_POD_NAME}={pod}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def kill(self, pod: str) -> None:
        for pid in self.processes(pod):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Foreign(Cluster):
    """The cluster that a kubeconfig names. Its pods run as this user and see the tests' folder where it is."""

    def __init__(self, folder: Path, kubeconfig: Path) -> None:
        super().__init__(folder)
        self.kubeconfig = kubeconfig
        self.namespace = "backstay-e2e"
        self._image = os.environ.get("BACKSTAY_E2E_IMAGE", "ghcr.io/backstay-dev/trainer:0.1.0-cpu")
        self._logs: dict[str, str] = {}

    def start(self) -> None:
        self._thread.start()

        async def begin() -> None:
            self.api = await self._stack.enter_async_context(ApiCalls.of_kubeconfig(self.kubeconfig))
            meta = {"name": self.namespace}
            scripts = {path.name: path.read_text() for path in SCRIPTS.glob("*.py")}
            configuration = {"metadata": {"name": "scripts"}, "data": scripts}
            for path, body in (("", {"metadata": meta}), (f"/{self.namespace}/configmaps", configuration)):
                try:
                    await self.api.request("POST", f"/api/v1/namespaces{path}", body)
                except ApiRequestError as error:
                    if error.reason != "AlreadyExists":
                        raise
            await self.api.request("PUT", f"/api/v1/namespaces/{self.namespace}/configmaps/scripts", configuration)

        self.run(begin())

    def place(self, spec: dict[str, Any]) -> dict[str, Any]:
        folder = str(self.folder.parent)
        template = {
            "spec": {
                # Root without capabilities, if that is who tests: it reads and writes what is its own.
                "securityContext": {"runAsNonRoot": False, "runAsUser": os.getuid(), "runAsGroup": os.getgid()},
                "volumes": [{"name": "tests", "hostPath": {"path": folder}}],
                "containers": [{"name": contract.CONTAINER, "volumeMounts": [{"name": "tests", "mountPath": folder}]}],
            }
        }
        roles = {
            role: {**(spec.get(role) or {}), "template": template}
            for role in ("parameterServers", "workers", "evaluator")
            if role != "evaluator" or role in spec
        }
        return {"image": self._image, "code": {"configMap": "scripts"}, **spec, **roles}

    def log(self, pod: str) -> str:
        async def read() -> str:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
            async with self.api.open("GET", path, timeout=aiohttp.ClientTimeout(LONG)) as response:
                return await response.text(errors="replace") if response.status == 200 else ""

        # Keep the text: the pod may be deleted at the next read.
        self._logs[pod] = self.run(read()) or self._logs.get(pod, "")
        return self._logs[pod]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    if os.environ.get("BACKSTAY_E2E") == "cluster":
        made: Cluster = Foreign(folder, Path(os.environ["KUBECONFIG"]))
    else:
        made = Cluster(folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def submit(cluster: Cluster) -> Iterator[Callable[..., str]]:
    """Submit jobs that are deleted after the test."""
    with contextlib.ExitStack() as jobs:

        def one(spec: dict[str, Any], **options: Any) -> str:
            name = cluster.submit(spec, **options)
            jobs.callback(cluster.delete, name)
            return name

        yield one
