"""The operator's tests share a clock that jumps, and a small API server in memory with injected failures."""

from __future__ import annotations

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar, cast

import looptime
import pytest

from backstay_operator import errors
from backstay_operator.backoff import Backoffs, Curve
from backstay_operator.bus import Bus, Changed
from backstay_operator.clocks import Clocks
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.events import EventSender
from backstay_operator.execute import Executor
from backstay_operator.known_jobs import KnownJobs
from backstay_operator.kube import Kube
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.overlay import Seen
from backstay_operator.reconcile import Reconciler
from backstay_operator.rights import JOBS, PODS, SERVICES, ResourceKind
from backstay_operator.slim import SLIM
from backstay_operator.watching import INDEXED, JobKey, job_key, own_key
from backstay_spec import contract
from backstay_spec.observed import PlanSettings

T = TypeVar("T")
Json = dict[str, Any]
KEY: JobKey = ("team", "digits")
SECRET_KEY = b"k" * 32


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop whose time jumps to the next timer when there is nothing else to do."""
    with asyncio.Runner(loop_factory=lambda: looptime.new_event_loop(start=0.0)) as runner:
        return runner.run(coroutine)


@pytest.fixture
def virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return run_virtual


class FakeKube:
    """The API as `Kube` offers it, in memory.

    Attributes:
        fail: asked before each request, as (verb, plural, name); what it returns is raised, and nothing is done.
        lose: the same after the request was carried out: the answer never comes.
        requests: every request, in order.
        history: every change, in order, for a watch to show.
    """

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], Json] = {}
        self.version = 100
        self.uids = 0
        self.fail: Callable[[str, str, str], Exception | None] = lambda *_: None
        self.lose: Callable[[str, str, str], Exception | None] = lambda *_: None
        self.requests: list[tuple[str, str, str]] = []
        self.history: list[tuple[str, ResourceKind, Json]] = []

    # Calls of the operator.

    async def get(self, resource: ResourceKind, namespace: str, name: str) -> Json:
        self._before("get", resource, name)
        return copy.deepcopy(self._found(resource, namespace, name))

    async def create(self, resource: ResourceKind, namespace: str, body: Mapping[str, Any]) -> Json:
        name = body["metadata"]["name"]
        self._before("create", resource, name)
        if (resource.plural, namespace, name) in self.objects:
            raise errors.AlreadyExists(f"create {name}", 409, "AlreadyExists", f"{name} already exists")
        answer = self.put(resource, namespace, cast(Json, copy.deepcopy(dict(body))))
        self._after("create", resource, name)
        return answer

    async def merge_patch(
        self,
        resource: ResourceKind,
        namespace: str,
        name: str,
        patch: Mapping[str, Any],
        subresource: str | None = None,
    ) -> Json:
        self._before("patch", resource, name if subresource is None else f"{name}/{subresource}")
        found = self._found(resource, namespace, name)
        wanted = (patch.get("metadata") or {}).get("resourceVersion")
        if wanted is not None and wanted != found["metadata"]["resourceVersion"]:
            raise errors.Conflict(f"patch {name}", 409, "Conflict", "changed")
        if subresource is not None:
            patch = {subresource: patch[subresource]}
        answer = self.change(resource, namespace, name, patch)
        self._after("patch", resource, name if subresource is None else f"{name}/{subresource}")
        return answer

    async def json_patch(self, resource: ResourceKind, namespace: str, name: str, patch: list[Json]) -> Json:
        self._before("patch", resource, name)
        found = copy.deepcopy(self._found(resource, namespace, name))
        for step in patch:
            parts = [part.replace("~1", "/").replace("~0", "~") for part in step["path"].split("/")[1:]]
            inner = found
            for part in parts[:-1]:
                inner = inner[part]
            if step["op"] == "test" and inner.get(parts[-1]) != step["value"]:
                raise errors.Invalid(f"patch {name}", 422, "Invalid", "test failed")
            inner[parts[-1]] = step["value"]
        return self.change(resource, namespace, name, found)

    async def delete(
        self, resource: ResourceKind, namespace: str, name: str, *, uid: str | None = None, grace: int | None = None
    ) -> Json:
        self._before("delete", resource, name)
        found = self._found(resource, namespace, name)
        if uid is not None and found["metadata"]["uid"] != uid:
            raise errors.Conflict(f"delete {name}", 409, "Conflict", "another uid")
        if resource == PODS and not found["metadata"].get("deletionTimestamp"):
            return self.change(resource, namespace, name, {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
        self.remove(resource, namespace, name)
        return {"kind": "Status"}

    async def metadata(
        self, resource: ResourceKind, namespace: str | None, _selector: str
    ) -> AsyncIterator[tuple[list[Json], str]]:
        self._before("list", resource, "")
        items = [
            {"metadata": copy.deepcopy(obj["metadata"])}
            for (plural, where, _), obj in self.objects.items()
            if plural == resource.plural and namespace in (None, where)
        ]
        yield items, str(self.version)

    # Actions of a user, a kubelet and the garbage collector.

    def put(self, resource: ResourceKind, namespace: str, body: Json) -> Json:
        self.uids += 1
        self.version += 1
        body["metadata"] |= {
            "namespace": namespace,
            "uid": f"uid-{self.uids}",
            "resourceVersion": str(self.version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        if resource == JOBS:
            body["metadata"].setdefault("generation", 1)
        if resource == SERVICES:
            body["spec"]["clusterIP"] = f"10.0.0.{self.uids}"
        if resource == PODS:
            body["status"] = {"phase": "Pending"}
        self.objects[resource.plural, namespace, body["metadata"]["name"]] = body
        self.history.append(("ADDED", resource, copy.deepcopy(body)))
        return copy.deepcopy(body)

    def change(self, resource: ResourceKind, namespace: str, name: str, patch: Mapping[str, Any]) -> Json:
        found = self.objects[resource.plural, namespace, name]
        before = copy.deepcopy(found)
        _merge(found, patch)
        found["metadata"]["resourceVersion"] = before["metadata"]["resourceVersion"]
        if found != before:
            self.version += 1
            found["metadata"]["resourceVersion"] = str(self.version)
            if resource == JOBS and found.get("spec") != before.get("spec"):
                found["metadata"]["generation"] += 1
            self.history.append(("MODIFIED", resource, copy.deepcopy(found)))
        return copy.deepcopy(found)

    def remove(self, resource: ResourceKind, namespace: str, name: str) -> None:
        gone = self.objects.pop((resource.plural, namespace, name))
        self.version += 1
        gone["metadata"]["resourceVersion"] = str(self.version)
        self.history.append(("DELETED", resource, gone))

    def all(self, resource: ResourceKind) -> list[Json]:
        return [obj for (plural, _, _), obj in sorted(self.objects.items()) if plural == resource.plural]

    def count(self, verb: str, plural: str) -> int:
        return sum(1 for request in self.requests if request[:2] == (verb, plural))

    def writes(self) -> list[tuple[str, str, str]]:
        return [request for request in self.requests if request[0] not in ("get", "list")]

    def _found(self, resource: ResourceKind, namespace: str, name: str) -> Json:
        try:
            return self.objects[resource.plural, namespace, name]
        except KeyError:
            raise errors.NotFound(f"{resource.plural} {name}", 404, "NotFound", f"{name} not found") from None

    def _before(self, verb: str, resource: ResourceKind, name: str) -> None:
        self.requests.append((verb, resource.plural, name))
        error = self.fail(verb, resource.plural, name)
        if error is not None:
            raise error

    def _after(self, verb: str, resource: ResourceKind, name: str) -> None:
        error = self.lose(verb, resource.plural, name)
        if error is not None:
            raise error


def _merge(into: Json, patch: Mapping[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            into.pop(name, None)
        elif isinstance(value, Mapping) and isinstance(into.get(name), dict):
            _merge(into[name], value)
        else:
            into[name] = copy.deepcopy(value)


class Operator:
    """One operator process without Kopf, whose watch shows the part of the history that the test selects."""

    def __init__(self, kube: FakeKube, *, seed: int = 0, settings: PlanSettings | None = None) -> None:
        self.kube = kube
        self.seconds = 0.0
        self.start = datetime(2026, 1, 1, tzinfo=UTC)
        self.metrics = OperatorMetrics(self.clock)
        self.marked: list[JobKey] = []
        self.bus = Bus()
        self.bus.subscribe(Changed, self._changed)
        clocks = Clocks(self.clock, self.now)
        self.cluster = ClusterOverlay(self.clock, self.metrics, self.bus)
        self.indexes: dict[ResourceKind, dict[JobKey, list[Seen[Json]]]] = {resource: {} for resource in INDEXED}
        for resource in INDEXED:
            self.cluster.attach(resource, self.indexes[resource])
        draw = random.Random(seed).random
        self.leads = True
        executor = Executor(
            cast(Kube, kube),
            self.cluster,
            SECRET_KEY,
            self.metrics,
            EventSender(cast(Kube, kube), "test", self.metrics, now=self.now, draw=draw),
            clocks=clocks,
            backoffs=Backoffs(Curve(first=0.2, most=30.0), draw),
        )
        self.reconciler = Reconciler(
            KnownJobs(self.cluster, clocks),
            executor,
            settings or PlanSettings("backstay-system"),
            SECRET_KEY,
            self.metrics,
            self.bus,
            leads=lambda: self.leads,
        )
        self.shown = 0

    def _changed(self, event: Changed) -> None:
        if event.after == 0:
            self.marked.append(event.key)

    def clock(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return self.start + timedelta(seconds=self.seconds)

    def show(self, count: int | None = None) -> None:
        """Let the watch show the next `count` changes (all without one)."""
        until = len(self.kube.history) if count is None else min(len(self.kube.history), self.shown + count)
        for kind, resource, obj in self.kube.history[self.shown : until]:
            self.shown += 1
            if resource not in self.indexes:
                continue
            key = own_key(obj) if resource == JOBS else job_key(obj)
            if key is None:
                continue
            index = self.indexes[resource]
            uid = obj["metadata"]["uid"]
            kept = [seen for seen in index.get(key, []) if seen.uid != uid]
            if kind != "DELETED":
                kept.append(Seen.of(obj, SLIM[resource](obj)))
            index[key] = kept
            if not kept:
                del index[key]
            self.cluster.event(resource, key, copy.deepcopy(obj), kind == "DELETED", False)

    def reconcile(self, key: JobKey = KEY) -> float | None:
        """Returns one run for a job, without time passing."""
        return asyncio.run(self.reconciler(key))

    def settle(self, key: JobKey = KEY, most: int = 40) -> None:
        """Watch and reconcile, with time passing, until nothing is written any more."""
        for _ in range(most):
            self.show()
            before = len(self.kube.writes())
            wait = self.reconcile(key)
            if len(self.kube.writes()) == before and self.shown == len(self.kube.history) and (wait or 60) > 5:
                return
            self.seconds += min(wait or 0.0, 6.0) + 0.01
        raise AssertionError(f"still writing after {most} runs: {self.kube.writes()[-5:]}")


@pytest.fixture
def kube() -> FakeKube:
    return FakeKube()


@pytest.fixture
def new_kube() -> type[FakeKube]:
    return FakeKube


@pytest.fixture
def operator_on() -> type[Operator]:
    return Operator


def job(name: str = "digits", **spec: Any) -> Json:
    return {
        "apiVersion": contract.API_VERSION,
        "kind": contract.KIND,
        "metadata": {"name": name},
        "spec": {
            "image": "example/train:1",
            "command": ["python", "train.py"],
            "parameterServers": {"replicas": 2},
            "workers": {"replicas": 3},
            **spec,
        },
    }


@pytest.fixture
def make_job() -> Callable[..., Json]:
    return job
