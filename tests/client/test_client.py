"""The client takes a function to its result on an embedded cluster, and reports failures on the way."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from between import LONG, put, until

import backstay
from backstay_client import (
    ApiRequestError,
    AsyncClient,
    AsyncJobHandle,
    BadInput,
    Client,
    ClusterUnreachable,
    JobDeleted,
    JobExists,
    JobHandle,
    NoResult,
    NoSuchJob,
    SessionError,
    TrainingFailed,
)
from backstay_client.embedded.run_folder import new_folder
from backstay_client.finding.clusters import account_of_pod
from backstay_client.finding.known_runs import read_run
from backstay_client.kube import ApiCalls
from backstay_spec import contract

pytestmark = pytest.mark.e2e


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """The file that lets the training continue."""
    return tmp_path / "gate"


@pytest.fixture
def held(client: Client, training: ModuleType, gate: Path) -> Iterator[JobHandle]:
    """A running job that waits at its fourth update until the gate is opened."""
    job = client.submit(
        training.train, name=f"held-{os.urandom(3).hex()}", workers=1, args={"hold": 3, "gate": str(gate)}
    )
    until(lambda: (status := job.status).phase == "Running" and (status.step or 0) >= 3)
    yield job
    gate.touch()
    job.delete(wait=False)


def test_a_function_is_submitted_and_answers_with_its_result(
    client: Client, training: ModuleType, tmp_path: Path
) -> None:
    """T4: the whole path, with what a user reads on it."""
    job = client.submit(training.train, workers=2, args={"rate": 0.25, "steps": 30})
    shown = io.StringIO()
    with contextlib.redirect_stderr(shown):
        status = job.wait()
    assert (job.name, status.phase, status.step, status.succeeded) == ("training", "Succeeded", 30, True)
    result = job.result()
    assert (result.step, result.metrics) == (30, {"w": pytest.approx(1 - 0.5**30, rel=1e-6)})
    assert result.params["w"] == pytest.approx(1 - 0.5**30, rel=1e-6)
    assert "training is Succeeded" in shown.getvalue()
    assert "the rate is 0.25" in list(job.logs(rank=0))
    assert all(line.startswith(("worker 0", "worker 1")) for line in job.logs(role="worker"))
    frame = job.metrics()
    assert list(frame.columns) == ["loss", "size", "evaluation/w"]
    assert list(frame.index) == list(range(1, 31))
    assert list(frame["loss"]) == [pytest.approx(0.25**step, rel=1e-5) for step in range(30)]
    assert [entry.reason for entry in job.history().entries][-1] == "Succeeded"
    assert "training in namespace default: Succeeded" in str(job.history())
    assert job.trace(tmp_path / "trace.json").out.stat().st_size > 1000
    html = job._repr_html_()
    assert "<svg" in html
    assert "Succeeded" in html
    assert job.name in [one.name for one in client.list()]
    assert "<td>training</td>" in client.list()._repr_html_()
    with pytest.raises(JobExists, match="which is Succeeded at step 30"):
        client.submit(training.train, workers=2)
    again = client.submit(training.train, workers=1, args={"steps": 1}, replace=True)
    assert again.uid != job.uid
    assert again.wait(progress=False).step == 1, "it does not continue the first one"
    assert again.result().params["w"] == pytest.approx(0.2)
    with pytest.raises(JobDeleted, match="another one of this name was created"):
        job.status  # noqa: B018
    for read in (lambda: list(job.logs()), job.history, lambda: job.trace(tmp_path / "other.json")):
        with pytest.raises(JobDeleted, match="another one of this name was created"):
            read()
    again.delete()
    again.delete()
    with pytest.raises(NoSuchJob, match="there is no TrainingJob training in namespace default"):
        client.job("training")


def test_a_failed_job_raises_with_the_exception_of_the_script(client: Client, training: ModuleType) -> None:
    job = client.submit(training.train, name="fails", workers=1, args={"diverges": True, "steps": 9})
    with pytest.raises(TrainingFailed, match="not finite") as caught:
        job.wait(progress=False)
    assert caught.value.reason == "NonFiniteGradients"
    status = job.wait(progress=False, check=False)
    assert (status.phase, status.succeeded, status.reason) == ("Failed", False, "NonFiniteGradients")
    with pytest.raises(NoResult, match=r"is Failed, and has reported no checkpoint: NonFiniteGradients: "):
        job.result()


def test_a_job_that_is_deleted_ends_the_wait_for_it(client: Client, held: JobHandle) -> None:
    """T8: by another client, while this one waits."""
    deleting = threading.Thread(target=lambda: client.job(held.name).delete(wait=False))
    deleting.start()
    with pytest.raises(JobDeleted, match="was deleted"):
        held.wait(progress=False)
    deleting.join()


def test_workers_are_added_and_a_suspended_job_continues_from_its_checkpoint(
    client: Client, held: JobHandle, gate: Path
) -> None:
    held.scale(2)
    until(lambda: held.status.workers == 2)
    with pytest.raises(ApiRequestError, match="workers"):
        held.scale(0)
    held.suspend()
    assert held.status.phase == "Suspended"
    assert held.result().step == 3
    gate.touch()
    held.resume()
    assert held.wait(progress=False).step == 40


async def test_the_blocking_client_works_inside_a_running_event_loop(client: Client, training: ModuleType) -> None:
    """A notebook has a running loop, which the client must not need."""
    assert asyncio.get_running_loop().is_running()
    assert isinstance(client.list(), list)


async def test_the_asynchronous_client_has_the_same_names(client: Client, training: ModuleType, tmp_path: Path) -> None:
    for blocking, asynchronous in ((Client, AsyncClient), (JobHandle, AsyncJobHandle)):
        public = {name for name in vars(blocking) if not name.startswith("_")}
        assert public == {name for name in vars(asynchronous) if not name.startswith("_")} - {
            "api",
            "cluster",
            "cluster_of",
            "raise_if_ended",
            "sweep_states",
            "watch",
        }
    async with AsyncClient(kubeconfig_of(client)) as other:
        job = await other.submit(training.train, name="awaited", workers=1, args={"steps": 5})
        status = await job.wait(progress=False)
        assert status.succeeded
        assert (await job.result()).step == 5
        assert "the rate is 0.1" in [line async for line in job.logs(rank=0)]
        assert list((await job.metrics()).index) == [1, 2, 3, 4, 5]
        await job.delete()
        with pytest.raises(JobDeleted):
            await job.status()


def kubeconfig_of(client: Client) -> Path:
    """Returns the kubeconfig of a client's own cluster, whose representation names the folder."""
    return Path(repr(client).rpartition(" in ")[2].rstrip(">")) / "backstay.kubeconfig"


COUNTS = """
import sys, numpy as np, optax, backstay
backstay.train(init=lambda key: {'w': np.zeros((), 'float32')}, loss=lambda p, b: (p['w'] - b) ** 2,
    batches=lambda key: np.float32(1), optimizer=optax.sgd(0.1), steps=int(sys.argv[1]))
"""


def test_a_script_a_yaml_file_and_a_mapping_are_submitted_too(client: Client, user_folder: Path) -> None:
    script = user_folder / "counts.py"
    put(script, COUNTS)
    place = {"uri": str(user_folder / "kept"), "everySteps": 2}
    job = client.submit(
        script, workers=1, args=[4], env={"COLOUR": "blue"}, labels={"team": "vision"}, checkpoint=place
    )
    assert job.wait(progress=False).step == 4
    assert list((user_folder / "kept").glob("*.manifest.json"))
    again = client.submit(script, workers=1, args=[4], labels={"team": "vision"}, checkpoint=place, replace=True)
    assert again.wait(progress=False).reason == "AlreadyComplete"
    assert list(again.metrics().index) == [1, 2, 3, 4], "of the job that has trained"
    assert [one.name for one in client.list(labels={"team": "vision"})] == ["counts"]
    spec = {
        "image": "any",
        "command": ["python", str(script), "3"],
        "workingDir": str(user_folder),
        "workers": {"replicas": 1},
    }
    mapped = client.submit({"metadata": {"name": "mapped"}, "spec": spec})
    put(
        user_folder / "job.yaml",
        "apiVersion: backstay.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: from-yaml}\n"
        "spec: {image: any, command: [python, counts.py, '2'], workers: {replicas: 1}}\n",
    )
    read = client.submit("job.yaml")
    assert (mapped.wait(progress=False).step, read.wait(progress=False).step) == (3, 2)
    with pytest.raises(NoResult, match="stores no checkpoints: submit it with checkpoint="):
        read.result()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"workers": 0}, r"workers is 0: must be"),
        ({"wrkers": 2}, r"wrkers= is not an option: must be one of args, backups"),
        ({"name": "Not Valid"}, 'name is "Not Valid": must be'),
        ({"name": ""}, "name='' is empty: must be a name"),
        ({"checkpoint": {"everySteps": 3}}, r"checkpoint=\{'everySteps': 3\} names no place: must have uri or volume"),
        ({"checkpoint": {"uri": "memory://a"}}, r"spec\.checkpoint\.uri: is \"memory://a\": must be a place"),
        ({"mode": "Eventually"}, 'mode is "Eventually": must be Sync or Async'),
        ({"spec": {"wurkers": {}}}, r"spec\.wurkers"),
        ({"env": {"BACKSTAY_JOB": "x"}}, r"env: BACKSTAY_JOB: variables that begin with BACKSTAY_"),
        ({"every_steps": 2, "checkpoint": None, "backups": 9}, r"backups is 9"),
    ],
)
def test_invalid_options_are_refused_by_the_names_that_the_user_wrote(
    client: Client, training: ModuleType, options: dict[str, object], error: str
) -> None:
    before = {job.name for job in client.list()}
    with pytest.raises(BadInput, match=error):
        client.submit(training.train, **options)  # type: ignore[arg-type]
    assert {job.name for job in client.list()} == before


def test_options_of_a_script_are_refused_for_a_whole_job(client: Client) -> None:
    with pytest.raises(BadInput, match="workers= is for a function or a script"):
        client.submit({"metadata": {"name": "whole"}, "spec": {"image": "any"}}, workers=3)
    with pytest.raises(BadInput, match=r"the TrainingJob has 2 mistakes|the TrainingJob has a mistake"):
        client.submit({"metadata": {"name": "whole"}, "spec": {"workers": {"replicas": -1}}})
    with pytest.raises(BadInput, match=r"there-is-none\.yaml"):
        client.submit("there-is-none.yaml")


def test_a_pod_does_not_submit_the_job_that_it_belongs_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without `if __name__ == '__main__'` would submit itself in each pod."""
    monkeypatch.setenv(contract.ENV_JOB, "digits")
    with pytest.raises(BadInput, match=r"a pod of the TrainingJob digits.*__main__"):
        backstay.Client()


INTERRUPTED = """
import sys
from backstay_client import Client
with Client(sys.argv[1]) as client:
    job = client.job(sys.argv[2])
    try:
        print("waits", flush=True)
        job.wait(progress=False)
    except KeyboardInterrupt:
        print("interrupted", job.status.phase, flush=True)
"""


def test_a_timeout_ctrl_c_and_a_deletion_of_another_job_leave_a_job_whose_logs_are_followed_to_its_end(
    client: Client, held: JobHandle, gate: Path
) -> None:
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.2 s: it is Running at step 3, and continues"):
        held.wait(0.2, progress=False)
    assert held.status.phase == "Running"

    words = [sys.executable, "-c", INTERRUPTED, str(kubeconfig_of(client)), held.name]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=LONG)[0] == "interrupted Running\n"
            assert process.returncode == 0
        finally:
            process.kill()

    # T8: two programs; the other one deletes the job, and creates one of the same name, before the request arrives.
    async def delete() -> None:
        async with ApiCalls.of_kubeconfig(kubeconfig_of(client)) as api:
            await api.delete_job(held.namespace, held.name, "the uid of the job before")

    with pytest.raises(ApiRequestError) as refused:
        asyncio.run(delete())
    assert refused.value.code == 409
    assert held.status.phase == "Running"

    lines = held.logs(follow=True, rank=0)
    first = next(lines)
    gate.touch()
    found = [first, *lines]
    assert "the rate is 0.1" in found
    assert any("step 40/40" in line for line in found)
    assert held.wait(progress=False).succeeded


def processes_of(folder: Path, module: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if module.encode() in words and os.fsencode(folder) in b" ".join(words):
                    found.append(int(entry.name))
    return found


def test_a_dead_api_server_ends_every_wait_with_its_reason(
    training: ModuleType, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8: the owner of the cluster gets its death as an error, and another client that nothing answers.

    O7: before, the environment is on no command line, which every user of a machine reads.
    """
    monkeypatch.setenv("FSSPEC_S3_SECRET", "not-for-others")
    folder = tmp_path / "run"
    with Client.local(folder) as owner, Client(folder / "backstay.kubeconfig") as other:
        for pid in processes_of(folder, "backstay_cluster") + processes_of(folder, "backstay_operator"):
            assert b"not-for-others" not in Path(f"/proc/{pid}/cmdline").read_bytes()
        job = owner.submit(training.train, workers=1, args={"hold": 3, "gate": str(gate)})
        same = other.job(job.name)
        until(lambda: (same.status.step or 0) >= 3)
        for pid in processes_of(folder, "backstay_cluster"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(ClusterUnreachable, match=r"has not answered for .*The job training may still run"):
            same.wait(progress=False, patience=0.5)
        with pytest.raises(SessionError, match="the cluster died"):
            job.wait(progress=False)
    until(lambda: not processes_of(folder, "backstay_operator"))
    run = read_run(folder)
    assert run is not None
    assert not run.lives, "it is closed, though this process lives"
    assert run.result()["reason"] == "Closed"


OWNER = """
import sys, time
from backstay_client import Client
client = Client.local(sys.argv[1])
if sys.argv[2] == "trains":
    client.submit("counts.py", workers=1, args=[3]).wait(progress=False)
print("started", flush=True)
if sys.argv[2] == "sleeps":
    time.sleep(600)
"""


def test_two_runs_of_one_process_in_one_second_have_two_folders(tmp_path: Path) -> None:
    folders = [new_folder("client", tmp_path) for _ in range(3)]
    assert len({folder.name for folder in folders}) == 3
    assert all(folder.is_dir() for folder in folders)


def owner_of(folder: Path, does: str) -> subprocess.Popen[str]:
    """Returns a process with a local cluster, which has started."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(folder), does], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def until_nothing_is_left(folder: Path) -> None:
    until(lambda: not [*processes_of(folder, "backstay_cluster"), *processes_of(folder, "backstay_operator")])


def test_nothing_is_left_of_a_local_cluster_whose_process_is_killed(tmp_path: Path) -> None:
    process = owner_of(tmp_path / "run", "sleeps")
    process.kill()
    process.communicate(timeout=LONG)
    until_nothing_is_left(tmp_path / "run")


def test_the_client_of_a_run_that_ended_without_close_reads_and_does_not_submit(
    training: ModuleType, user_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client in the same folder reads the jobs of a local cluster after its end, and no process is left of it."""
    monkeypatch.setenv("BACKSTAY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    put(user_folder / "counts.py", COUNTS)
    process = owner_of(tmp_path / "run", "trains")
    process.communicate(timeout=LONG)
    assert process.returncode == 0
    until_nothing_is_left(tmp_path / "run")
    with Client() as later:
        job = later.job("counts")
        assert (job.status.phase, job.result().step, list(job.metrics().index)) == ("Succeeded", 3, [1, 2, 3])
        with pytest.raises(BadInput, match=r"can only be read: start a cluster with Client\.local\(\)"):
            later.submit(training.train)


def test_the_account_of_a_pod_is_found(tmp_path: Path) -> None:
    for name, text in (("token", "secret\n"), ("namespace", "research\n")):
        put(tmp_path / name, text)
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    account = account_of_pod(variables, tmp_path)
    assert account is not None
    assert (account.url, account.namespace) == ("https://[fd00::1]:443", "research")
    with pytest.raises(BadInput, match="the account of this pod"):
        account.connect()
    assert account_of_pod({}, tmp_path) is None
    assert account_of_pod(variables, tmp_path / "none") is None
