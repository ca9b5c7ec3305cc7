"""The logs of a job are followed to its end, even after a lost connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backstay_client import ApiRequestError
from backstay_client.finding.clusters import FoundCluster
from backstay_client.reading.logs import WantedLogs, log_lines
from backstay_client.view.follow import view_of
from backstay_spec import contract
from backstay_spec.names import LABEL_JOB_UID


def pod_of(uid: str, name: str = "digits-worker-0-1") -> dict[str, Any]:
    labels = {contract.LABEL_ROLE: contract.ROLE_WORKER, contract.LABEL_INDEX: "0", contract.LABEL_INCARNATION: "1"}
    meta = {"name": name, "namespace": "default", "uid": f"{name}-{uid}", "labels": {**labels, LABEL_JOB_UID: uid}}
    return {"metadata": meta, "status": {"phase": "Running"}}


class FakeApi:
    """One worker, whose log breaks off where a part of `logs` ends. After the last part, the job has ended.

    Attributes:
        jobs: the uid of the job, for each look; the last one stays.
    """

    def __init__(self, *logs: bytes, jobs: tuple[str, ...] = ("one",)) -> None:
        self.logs, self.jobs, self.asked = list(logs), list(jobs), []

    async def get_job(self, namespace: str, name: str) -> dict[str, Any]:
        uid = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        return {"metadata": {"uid": uid}, "status": {"phase": "Running" if self.logs else "Succeeded"}}

    async def pods_of(self, namespace: str, name: str, uid: str = "") -> list[dict[str, Any]]:
        self.asked.append(uid)
        return [pod_of(uid)]

    async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        yield self.logs.pop(0)
        if self.logs:
            raise aiohttp.ClientPayloadError("the connection is gone")


async def lines_of(api: Any, wanted: WantedLogs, folder: Path | None = None) -> list[str]:
    return [line async for line in log_lines(FoundCluster(api, "default", "a cluster", folder), "digits", wanted)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backstay_client.reading.logs.LOOK_SECONDS", 0.01)


@pytest.mark.parametrize(
    ("logs", "lines"),
    [
        ((b"1\n2\n", b"1\n2\n3\n"), ["1", "2", "3"]),
        ((b"1\n2\n3", b"1\n2\n33\n4\n"), ["1", "2", "33", "4"]),
        ((b"1\n", b"1\n2\n", b"1\n2\n3\n"), ["1", "2", "3"]),
        ((b"1\n2\n", b"8\n9\n"), ["1", "2", "8", "9"]),
    ],
    ids=["more", "a part of a line", "twice", "rotated"],
)
async def test_a_pod_is_followed_again_after_a_lost_connection(logs: tuple[bytes, ...], lines: list[str]) -> None:
    assert await lines_of(FakeApi(*logs), WantedLogs("worker", 0, follow=True)) == lines


async def test_the_log_of_a_job_that_has_ended_is_whole_for_a_slow_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that were sent more than five seconds after the end of the job were missing, without a message."""
    monkeypatch.setattr("backstay_client.reading.logs.QUIET_SECONDS", 0.001)

    class Slow(FakeApi):
        async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
            self.logs.clear()
            for number in range(4000):
                yield b"%d\n" % number

    found = []
    where = FoundCluster(Slow(b""), "default", "a cluster", None)
    async for line in log_lines(where, "digits", WantedLogs("worker", 0, follow=True)):
        found.append(int(line))
        if len(found) in (1, 1500):
            time.sleep(0.1)  # noqa: ASYNC251  # as a terminal that is not read stops the event loop
            await asyncio.sleep(0.1)
    assert found == list(range(4000))


async def test_a_pod_that_prints_after_the_end_of_its_job_does_not_hold_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("backstay_client.reading.logs.QUIET_SECONDS", 0.001)

    class Prints(FakeApi):
        async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
            self.logs.clear()
            while True:
                yield b"1\n"
                await asyncio.sleep(0.001)

    assert set(await lines_of(Prints(b""), WantedLogs("worker", 0, follow=True))) == {"1"}


async def test_the_logs_end_when_another_job_has_the_name() -> None:
    api = FakeApi(b"1\n", b"of another job\n", jobs=("one", "one", "two"))
    assert await lines_of(api, WantedLogs("worker", 0, follow=True)) == ["1"]
    assert set(api.asked) == {"one"}


@pytest.mark.parametrize(("tail", "lines"), [(None, ["1", "2"]), (1, ["2"]), (2, ["1", "2"]), (3, ["1", "2"])])
async def test_the_end_of_a_kept_log_is_not_longer_than_the_log(
    tmp_path: Path, tail: int | None, lines: list[str]
) -> None:
    class Gone(FakeApi):
        async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
            raise ApiRequestError(404, "NotFound", "the pod is gone")
            yield b""

    place = tmp_path / "pods" / "default" / "digits-worker-0-1"
    place.mkdir(parents=True)
    (place / f"{contract.CONTAINER}.log").write_text("1\n2\n")
    assert await lines_of(Gone(), WantedLogs("worker", 0, tail=tail), tmp_path) == lines


def test_a_job_that_was_created_again_has_nothing_of_the_earlier_one() -> None:
    def job(uid: str, **status: Any) -> dict[str, Any]:
        return {"metadata": {"name": "digits", "namespace": "default", "uid": uid}, "status": status}

    before = view_of(job("one", phase="Succeeded", step=100, term=3), [pod_of("one")], [])
    assert view_of(job("one", phase="Succeeded"), [], [], before).report.step == 100
    again = view_of(job("two", phase="Running"), [], [], before)
    assert (again.report.step, again.pods) == (None, ())
