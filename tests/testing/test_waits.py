"""A wait of a test for its job ends with the cause: the pod that died, or why the job failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from backstay.errors import JobFailed
from backstay.testing import Job, Supervisor, _pods
from backstay.testing._run import forker_for

EXITS = 'echo "this is $SAYS"; exit $CODE'


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job of shells instead of training scripts."""
    with Job(["sh", "-c", EXITS], tmp_path, forker_for(Path(__file__))) as made:
        yield made


def ended(job: Job, start: Callable[..., Any], code: int) -> Any:
    pod = start(0, CODE=str(code), SAYS=start.__name__)
    pod.process.wait()
    return pod


def test_the_end_of_a_pod_that_another_death_caused_is_reported_by_the_first_death(job: Job) -> None:
    ended(job, job.server, 134)
    worker = ended(job, job.worker, 70)
    with pytest.raises(AssertionError, match=r"^parameter-server-0.* ended with exit code 134 .*worker-0(.|\n)*server"):
        worker.wait()
    worker.may_end_with(70)
    assert worker.wait() == 70, "the test expects this end, whatever became of the others"
    assert ended(job, job.worker, 0).wait() == 0


def test_a_wait_for_a_condition_ends_at_the_death_of_a_pod(job: Job) -> None:
    ended(job, job.server, 134)
    with pytest.raises(AssertionError, match=r"^parameter-server-0.* 134 in the wait until it trains:\nthis is serv"):
        job.until(lambda: False, "it trains")
    with pytest.raises(AssertionError, match=r"^parameter-server-0.* code 134"):
        job.until(lambda: 1 / 0, "it trains", ignoring=(ZeroDivisionError,))
    with pytest.raises(AssertionError, match=r"^parameter-server-0.* code 134"):
        job.until(lambda: 1 / 0, "it trains")
    job.may_end_with(134)
    assert job.until(lambda: "found", "it trains") == "found"
    with pytest.raises(ZeroDivisionError):
        job.until(lambda: 1 / 0, "it trains")


def test_a_wait_for_a_text_ends_with_its_pod_or_at_the_death_of_another(job: Job) -> None:
    worker = ended(job, job.worker, 0)
    job.wait_for(worker, "this is worker")
    with pytest.raises(AssertionError, match=r"^worker-0.* ended in the wait until worker-0.* prints 'step'"):
        job.wait_for(worker, "step")
    ended(job, job.server, 134)
    with pytest.raises(AssertionError, match=r"^parameter-server-0.* code 134"):
        job.wait_for(worker, "step")


def test_a_wait_that_nothing_ends_has_the_outputs(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_pods, "SECONDS", 0.0)
    ended(job, job.worker, 0)
    with pytest.raises(AssertionError, match=r"^the wait until it trains did not end within (.|\n)*this is worker"):
        job.until(lambda: False, "it trains")


def test_a_supervised_job_that_failed_ends_the_wait_with_its_reason(job: Job) -> None:
    job.environment |= {"CODE": "3", "SAYS": "the cause"}
    with contextlib.closing(Supervisor(job, max_restarts=0)) as supervisor:
        with pytest.raises(JobFailed, match="this is the cause"):
            supervisor.until(lambda: False)
        supervisor.until(lambda: supervisor.ended)


def test_a_busy_machine_has_more_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seconds of a limit are those of a machine without other work."""
    loads = iter([1e9, 1e9, 0.0])
    monkeypatch.setattr(_pods, "slack", lambda: next(loads))
    monkeypatch.setattr(_pods, "SECONDS", 1e-6)
    with pytest.raises(AssertionError, match="did not end within"):
        job.until(lambda: False, "it trains")
    assert next(loads, None) is None
