"""Kopf lists and watches, keeps the indexes, and reports which job must be reconciled again (O1).

Only `on.event` and `index` are used. They write nothing to any object, need no finalizer, and keep state only in
memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

import kopf

from backstay_operator import access, errors
from backstay_operator.kube import Kube
from backstay_operator.overlay import Seen
from backstay_operator.rights import JOBS, LEASES, NETWORK_POLICIES, PODS, SERVICES, ResourceKind
from backstay_operator.settings import kopf_settings
from backstay_spec import contract

JobKey: TypeAlias = tuple[str, str]  # namespace, name

log = logging.getLogger(__name__)

#: The resources that are watched and kept in an index; the operator's Lease is watched too.
INDEXED: Final = (JOBS, PODS, SERVICES, NETWORK_POLICIES)

#: Called for each event: resource, key, object, whether it was deleted, whether it came from a list (not a watch).
Sink: TypeAlias = Callable[[ResourceKind, JobKey, Mapping[str, Any], bool, bool], None]


def job_key(body: Mapping[str, Any]) -> JobKey | None:
    """Returns the job that a pod or Service is labelled with."""
    metadata = body.get("metadata") or {}
    name = (metadata.get("labels") or {}).get(contract.LABEL_JOB)
    return (metadata.get("namespace") or "", name) if name else None


def own_key(body: Mapping[str, Any]) -> JobKey:
    """Returns the key of a job itself."""
    return body["metadata"].get("namespace") or "", body["metadata"]["name"]


class KopfWatch:
    """Runs Kopf.

    Args:
        kubeconfig: see `access.load`.
        namespace: the namespace to watch; None: all.
        slim: resource -> a function that selects the part of an object that is kept in memory.
        sink: called for each event, after the indexes are updated, and not before all first lists are complete.
        indexed: called with the index of each resource when Kopf starts.
        lease: called with the operator's Lease at each of its events, and whether it was deleted.
        me: the identity of this process. Otherwise Kopf uses the user's name, and a pod's user often has none.
    """

    def __init__(
        self,
        kubeconfig: str | None,
        namespace: str | None,
        *,
        slim: Mapping[ResourceKind, Callable[[Mapping[str, Any]], Any]],
        sink: Sink,
        indexed: Callable[[ResourceKind, Mapping[JobKey, Iterable[Seen[Any]]]], None],
        lease: Callable[[Mapping[str, Any], bool], None],
        me: str,
    ) -> None:
        self._kubeconfig = kubeconfig
        self._namespace = namespace
        self._slim = slim
        self._sink = sink
        self._indexed = indexed
        self._lease = lease
        self._me: Any = me
        self._stop = asyncio.Event()
        self.started = asyncio.Event()

    def stop(self) -> None:
        """Make `run` return."""
        self._stop.set()

    async def run(self) -> None:
        """Watch until `stop`, or until Kopf ends with an exception, which escapes."""
        await kopf.operator(
            registry=self._registry(),
            settings=kopf_settings(),
            standalone=True,
            identity=self._me,
            clusterwide=self._namespace is None,
            namespaces=() if self._namespace is None else (self._namespace,),
            stop_flag=self._stop,
            ready_flag=self.started,
        )

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()

        @kopf.on.login(registry=registry, retries=None, backoff=2.0)
        async def login(**_: Any) -> kopf.ConnectionInfo:
            try:
                return await access.kopf_login(self._kubeconfig)
            except access.AccessError as error:
                raise kopf.TemporaryError(str(error), delay=2.0) from error

        for resource in INDEXED:
            self._watch(registry, resource, own_key if resource == JOBS else job_key)

        @kopf.on.event(*LEASES, registry=registry, id="lease")
        async def lease(event: kopf.RawEvent, **_: Any) -> None:
            self._lease(event["object"], event["type"] == "DELETED")

        @kopf.on.startup(registry=registry)
        async def startup(**kwargs: Any) -> None:
            for resource in INDEXED:
                self._indexed(resource, kwargs[_index_name(resource)])

        return registry

    def _watch(
        self,
        registry: kopf.OperatorRegistry,
        resource: ResourceKind,
        key_of: Callable[[Mapping[str, Any]], JobKey | None],
    ) -> None:
        slim = self._slim[resource]

        @kopf.index(*resource, registry=registry, id=_index_name(resource))
        async def index(body: kopf.Body, **_: Any) -> dict[JobKey, Seen[Any]]:
            raw = dict(body)
            key = key_of(raw)
            return {} if key is None else {key: Seen.of(raw, slim(raw))}

        @kopf.on.event(*resource, registry=registry, id=f"{resource.plural}_event")
        async def event(event: kopf.RawEvent, **_: Any) -> None:
            raw: Mapping[str, Any] = event["object"]
            key = key_of(raw)
            if key is not None:
                self._sink(resource, key, raw, event["type"] == "DELETED", event["type"] is None)


def _index_name(resource: ResourceKind) -> str:
    return f"index_{resource.plural}"


async def wait_for_crd(kube: Kube, *, pause: float = 1.0) -> None:
    """Return once the API server serves TrainingJobs; until then log a warning from time to time."""
    path = f"/apis/{JOBS.group}/{JOBS.version}"
    tries = 0
    while True:
        try:
            found = await kube.discover(path)
            if any(item.get("name") == JOBS.plural for item in found.get("resources") or []):
                return
            why = "it is not served yet"
        except errors.KubeError as error:
            why = str(error)
        if tries % 30 == 0:
            log.warning("waiting for the CustomResourceDefinition %s.%s: %s", JOBS.plural, JOBS.group, why)
        tries += 1
        await asyncio.sleep(pause if tries > 10 else pause / 10)
