"""A job is created exactly once, even if answers are lost, and its code belongs to it (T3, T8)."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from typing import Any

import aiohttp
import pytest

from backstay_client import ApiRequestError, JobExists
from backstay_client.creating import create_job_once
from backstay_client.kube import ApiCalls

JOB = {"metadata": {"name": "digits", "namespace": "default"}, "spec": {}}
CODE = {"metadata": {"name": "digits-code-1", "namespace": "default"}, "data": {}}


class LossyApi(ApiCalls):
    """An API server that stores objects, and loses chosen answers after it has acted.

    Attributes:
        calls: the method and the path of each request.
        lost: how many answers to POST of each plural are lost.
        refused: a path whose POST is refused.
    """

    def __init__(self) -> None:
        super().__init__("http://nowhere")
        self.objects: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, str]] = []
        self.lost: dict[str, int] = {}
        self.refused = ""

    async def exchange(self, method: str, path: str, *, body: Any = None, **rest: Any) -> Any:
        del rest
        kind = path.partition("/default/")[2].partition("/")[0]
        self.calls.append((method, kind))
        if method == "POST":
            if kind == self.refused:
                raise ApiRequestError(422, "Invalid", "spec.workers: no")
            place = f"{path}/{body['metadata']['name']}"
            if place in self.objects:
                raise ApiRequestError(409, "AlreadyExists", "it exists")
            created = copy.deepcopy(body)
            created["metadata"]["uid"] = f"uid-{len(self.objects)}"
            self.objects[place] = created
            if self.lost.get(kind, 0):
                self.lost[kind] -= 1
                raise aiohttp.ServerDisconnectedError
            return created
        if path not in self.objects:
            raise ApiRequestError(404, "NotFound", "there is none")
        if method == "DELETE":
            return self.objects.pop(path)
        if method == "PATCH":
            self.objects[path]["metadata"].update(body["metadata"])
        return self.objects[path]


def kinds(api: LossyApi) -> list[str]:
    return sorted(path.split("/default/")[1].split("/")[0] for path in api.objects)


@pytest.mark.parametrize("lost", [{}, {"configmaps": 1}, {"trainingjobs": 1}, {"trainingjobs": 1, "configmaps": 1}])
async def test_a_lost_answer_does_not_create_a_second_job_and_does_not_raise(
    lost: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    api = LossyApi()
    api.lost = dict(lost)
    monkeypatch.setattr("backstay_client.creating.asyncio.sleep", no_sleep)
    job = await create_job_once(api, JOB, CODE, embedded=False)
    assert kinds(api) == ["configmaps", "trainingjobs"]
    [code] = [one for path, one in api.objects.items() if "configmaps" in path]
    assert [owner["uid"] for owner in code["metadata"]["ownerReferences"]] == [job["metadata"]["uid"]]
    assert api.calls.count(("POST", "trainingjobs")) == 1 + lost.get("trainingjobs", 0)


async def no_sleep(seconds: float) -> None:
    del seconds


async def test_a_second_job_of_the_same_name_is_refused_and_leaves_no_code_behind() -> None:
    api = LossyApi()
    first = await create_job_once(api, JOB, CODE, embedded=False)
    second = {**CODE, "metadata": {**CODE["metadata"], "name": "digits-code-2"}}
    with pytest.raises(JobExists, match=r"a TrainingJob digits already, which is Pending: .*client\.job\('digits'\)"):
        await create_job_once(api, JOB, second, embedded=False)
    assert kinds(api) == ["configmaps", "trainingjobs"]
    assert [one["metadata"]["uid"] for path, one in api.objects.items() if "trainingjobs" in path] == [
        first["metadata"]["uid"]
    ]


async def test_a_job_that_is_refused_leaves_no_code_behind() -> None:
    api = LossyApi()
    api.refused = "trainingjobs"
    with pytest.raises(ApiRequestError, match=r"spec\.workers: no"):
        await create_job_once(api, JOB, CODE, embedded=False)
    assert kinds(api) == []


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("times", [1, 9])
async def test_after_an_error_of_the_server_the_job_may_exist_and_keeps_its_code(
    stored: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was stored, etcd answered too late, and the code of the job was deleted."""
    api = LossyApi()
    monkeypatch.setattr("backstay_client.creating.asyncio.sleep", no_sleep)
    exchange, left = api.exchange, times

    async def failing(method: str, path: str, **rest: Any) -> Any:
        nonlocal left
        if method == "POST" and "trainingjobs" in path and left:
            left -= 1
            if stored:
                with contextlib.suppress(ApiRequestError):
                    await exchange(method, path, **rest)
            raise ApiRequestError(504, "Timeout", "etcdserver: request timed out")
        return await exchange(method, path, **rest)

    monkeypatch.setattr(api, "exchange", failing)
    if times == 1:
        await create_job_once(api, JOB, CODE, embedded=False)
    else:
        with pytest.raises(ApiRequestError, match="etcdserver"):
            await create_job_once(api, JOB, CODE, embedded=False)
    assert kinds(api) == (["configmaps", "trainingjobs"] if stored or times == 1 else [])


@pytest.mark.parametrize("error", [aiohttp.ServerDisconnectedError, asyncio.CancelledError])
async def test_a_job_that_may_exist_after_an_interruption_keeps_its_code(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or the death of the API server, after the job was created and before its answer."""
    api = LossyApi()
    monkeypatch.setattr("backstay_client.creating.asyncio.sleep", no_sleep)
    exchange = api.exchange

    async def interrupted(method: str, path: str, **rest: Any) -> Any:
        found = await exchange(method, path, **rest)
        if "trainingjobs" in path:
            raise error
        return found

    monkeypatch.setattr(api, "exchange", interrupted)
    with pytest.raises((error, ApiRequestError)):
        await create_job_once(api, JOB, CODE, embedded=False)
    assert kinds(api) == ["configmaps", "trainingjobs"]


async def test_an_api_server_that_never_answers_ends_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """T8: four attempts."""
    api = LossyApi()
    api.lost = {"configmaps": 100}
    monkeypatch.setattr("backstay_client.creating.asyncio.sleep", no_sleep)

    async def dead(method: str, path: str, **rest: Any) -> Any:
        api.calls.append((method, path))
        raise aiohttp.ServerDisconnectedError

    monkeypatch.setattr(api, "exchange", dead)
    with pytest.raises(aiohttp.ServerDisconnectedError):
        await create_job_once(api, JOB, CODE, embedded=False)
    assert len(api.calls) == 4
