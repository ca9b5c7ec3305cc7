"""Creates TrainingJobs, with what they need: their code, and on an embedded cluster their namespace and volumes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import aiohttp

from backstay_client.errors import JobExists
from backstay_client.kube import ApiCalls, ApiRequestError
from backstay_cluster.client import MERGE_PATCH
from backstay_spec import contract

__all__ = ["HELD", "OtherRefused", "claims_of", "create_job", "create_job_once", "create_others"]

HELD: Final = {
    ("v1", "ConfigMap"): "configmaps",
    ("v1", "PersistentVolumeClaim"): "persistentvolumeclaims",
    ("v1", "Secret"): "secrets",
}
"""The kinds that a file may have beside its job for the embedded cluster: the names of their resources."""

_SUBMISSION = f"{contract.GROUP}/submission"
_ATTEMPTS = 4
_PAUSE = 0.5

_T = TypeVar("_T")


async def create_job(api: ApiCalls, job: dict[str, Any], *, embedded: bool) -> dict[str, Any]:
    """Create a TrainingJob.

    Args:
        job: a valid TrainingJob with a namespace.
        embedded: whether its namespace and the PersistentVolumeClaims of its pods are created, too.

    Raises:
        ApiRequestError: the API server refuses it.
    """
    namespace = job["metadata"]["namespace"]
    if embedded:
        with contextlib.suppress(ApiRequestError):
            await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": namespace}})
        for claim in claims_of(job):
            with contextlib.suppress(ApiRequestError):
                await api.request(
                    "POST",
                    f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
                    {
                        "metadata": {"name": claim},
                        "spec": {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": "1Gi"}}},
                    },
                )
    return await api.create_job(job)


class OtherRefused(Exception):  # noqa: N818
    """The API server refused an object beside the job; the message names it."""


async def create_others(api: ApiCalls, others: Iterable[Mapping[str, Any]], namespace: str) -> None:
    """Create objects of the kinds in `HELD` on an embedded cluster, or replace those of an earlier run.

    Args:
        namespace: the namespace of objects that name none.

    Raises:
        OtherRefused: the API server refuses one.
    """
    for one in others:
        resource = HELD.get((str(one.get("apiVersion")), str(one.get("kind"))))
        if resource is None:
            continue
        meta = one.get("metadata") or {}
        place = f"/api/v1/namespaces/{meta.get('namespace') or namespace}"
        with contextlib.suppress(ApiRequestError):
            await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": place.rpartition("/")[2]}})
        try:
            try:
                await api.request("POST", f"{place}/{resource}", dict(one))
            except ApiRequestError as error:
                if error.reason != "AlreadyExists":
                    raise
                if resource != "persistentvolumeclaims":  # its specification never changes
                    path = f"{place}/{resource}/{meta['name']}"
                    await api.request("PATCH", path, dict(one), content_type=MERGE_PATCH)
        except ApiRequestError as error:
            who = f"the {one['kind']} {meta.get('name') or meta.get('generateName')}"
            raise OtherRefused(f"the API server refused {who}: {error}") from error


async def create_job_once(
    api: ApiCalls, job: dict[str, Any], config_map: dict[str, Any] | None, *, embedded: bool
) -> dict[str, Any]:
    """Create a TrainingJob with its code, exactly once: a call whose answer was lost is repeated.

    The ConfigMap belongs to the job, and is deleted with it.

    Args:
        job: a valid TrainingJob with a namespace.
        config_map: the job's code, with a name that nothing else has; None: the job has none.
        embedded: see `create_job`.

    Raises:
        JobExists: the namespace has a job of this name.
        ApiRequestError: the API server refuses it.
        aiohttp.ClientError, OSError: the API server does not answer.
    """
    meta = job["metadata"]
    mark = secrets.token_hex(8)
    job = {**job, "metadata": {**meta, "annotations": {**(meta.get("annotations") or {}), _SUBMISSION: mark}}}
    place = f"/api/v1/namespaces/{meta['namespace']}/configmaps"
    if config_map is not None:
        # Created first: if this process ended now, pods would wait for it indefinitely.
        name = config_map["metadata"]["name"]
        await _once(lambda: api.request("POST", place, config_map), lambda: api.request("GET", f"{place}/{name}"))
    try:
        created = await _once(
            lambda: create_job(api, job, embedded=embedded),
            lambda: _own_job(api, meta["namespace"], meta["name"], mark),
        )
    except (ApiRequestError, JobExists) as error:
        # After any other error the job may exist, and need its code.
        may_exist = isinstance(error, ApiRequestError) and error.code >= 500 and await _may_exist(api, meta)
        if config_map is not None and not may_exist:
            with contextlib.suppress(ApiRequestError, aiohttp.ClientError, OSError):
                await api.request("DELETE", f"{place}/{config_map['metadata']['name']}")
        raise
    if config_map is not None:
        owner = {
            "apiVersion": contract.API_VERSION,
            "kind": contract.KIND,
            "name": meta["name"],
            "uid": created["metadata"]["uid"],
        }
        # The job runs in any case; a ConfigMap without an owner only stays after it.
        with contextlib.suppress(ApiRequestError, aiohttp.ClientError, OSError):
            await api.request(
                "PATCH",
                f"{place}/{config_map['metadata']['name']}",
                {"metadata": {"ownerReferences": [owner]}},
                content_type=MERGE_PATCH,
            )
    return created


async def _once(create: Callable[[], Awaitable[_T]], existing: Callable[[], Awaitable[_T]]) -> _T:
    """Create an object, again if no answer came.

    Args:
        existing: returns the object that exists already, or raises if a lost call of this one did not create it.
    """
    for attempt in range(_ATTEMPTS):
        try:
            return await create()
        except ApiRequestError as error:
            if error.reason == "AlreadyExists":
                return await existing()
            if (error.code < 500 and error.code != 429) or attempt == _ATTEMPTS - 1:
                raise
        except (aiohttp.ClientError, OSError):
            if attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep(_PAUSE * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


async def _may_exist(api: ApiCalls, meta: Mapping[str, Any]) -> bool:
    """Returns whether the job exists, or whether that is not known."""
    try:
        await api.get_job(meta["namespace"], meta["name"])
    except ApiRequestError as error:
        return error.code != 404
    except (aiohttp.ClientError, OSError):
        return True
    return True


async def _own_job(api: ApiCalls, namespace: str, name: str, mark: str) -> dict[str, Any]:
    """Returns the existing job, if the call with this mark created it.

    Raises:
        JobExists: another call did.
    """
    found = await api.get_job(namespace, name)
    if (found["metadata"].get("annotations") or {}).get(_SUBMISSION) == mark:
        return found
    status = found.get("status") or {}
    step = f" at step {status['step']}" if status.get("step") else ""
    raise JobExists(
        f"the namespace {namespace} has a TrainingJob {name} already, which is {status.get('phase', 'Pending')}{step}: "
        f"follow that one with client.job({name!r}), delete it, submit with another name=, or with replace=True if it "
        "has ended"
    )


def claims_of(job: dict[str, Any]) -> list[str]:
    """Returns the PersistentVolumeClaims that a job's pods mount, which are made for it on this machine."""
    found: list[str] = []

    def walk(node: Any) -> None:
        if isinstance(node, dict):
            claim = node.get("persistentVolumeClaim")
            if isinstance(claim, dict) and isinstance(claim.get("claimName"), str):
                found.append(claim["claimName"])
            for child in node.values():
                walk(child)
        elif isinstance(node, list):
            for child in node:
                walk(child)

    walk(job["spec"])
    return sorted(set(found))
