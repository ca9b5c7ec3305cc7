"""The command as a user runs it: what it prints, how it ends, and that nothing outlives it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from between import LONG, put, read_until, until
from small_examples import small_bytes
from trace_format import check
from typer.testing import CliRunner

import backstay
from backstay_cli.main import app

pytestmark = pytest.mark.e2e

SCRIPT = Path(__file__).parent / "scripts" / "tiny.py"
_STARTED: list[subprocess.Popen[str]] = []
SAYS_NAN = """
import sys, jax.numpy as jnp
import backstay, tiny
def evaluate(params):
    raise ValueError("no \\x1b[2J evaluation")
settings = {**tiny.SETTINGS, "evaluate": evaluate}
if "nan" in sys.argv:
    settings["loss"] = lambda params, batch: jnp.sum(params["w"]) * jnp.nan
backstay.train(**settings)
"""


def processes(folder: Path) -> list[str]:
    """Returns the command lines of all that was started with this folder in its arguments or its environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes()
                if os.fsencode(folder) in command + (entry / "environ").read_bytes():
                    found.append(f"{entry.name} {command.replace(bytes(1), b' ').decode(errors='replace')}")
    return found


def wait_until_gone(folder: Path) -> None:
    with contextlib.suppress(AssertionError):
        until(lambda: not processes(folder))
    assert not processes(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The folder of the command's files; processes that still use it are killed after the test."""
    yield tmp_path / "run"
    for line in processes(tmp_path):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(line.split()[0]), signal.SIGKILL)
    # After a failed test too: an open pipe would be a warning, and so a failure, of a later test.
    while _STARTED:
        with _STARTED.pop() as process:
            process.kill()


def start(
    folder: Path, script: Path, *options: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    # The folder in the environment marks what descends from it.
    command = [sys.executable, "-m", "backstay_cli.main", "run", "--data-dir", str(folder), *options]
    process = subprocess.Popen(
        [*command, str(script), *arguments],
        env={**os.environ, "BACKSTAY_TEST_FOLDER": str(folder), **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    _STARTED.append(process)
    return process


def ended(process: subprocess.Popen[str], *, fails: bool = False) -> tuple[str, str]:
    """Returns what a command that ends writes to its two outputs. Only if it `fails` may a pod end with an error: the
    operator would replace such a pod again and again."""
    said: tuple[list[str], list[str]] = ([], [])

    def read(stream: IO[str], lines: list[str]) -> None:
        with contextlib.suppress(ValueError):  # the test has failed, and closed it
            lines += stream

    streams = [one for one in (process.stdout, process.stderr) if one is not None]
    readers = [threading.Thread(target=read, args=args, daemon=True) for args in zip(streams, said, strict=True)]
    for reader in readers:
        reader.start()

    def over() -> bool:
        died = [line for lines in said for line in lines if re.search(r"\bdied: exit code (?!\d+ \(SIG)", line)]
        assert fails or not died, "".join([*died, *said[0], *said[1]])
        return not any(reader.is_alive() for reader in readers)

    until(over, "the command has ended", limit=LONG)
    process.wait(LONG)
    return "".join(said[0]), "".join(said[1])


def script_of(text: str, script: Path) -> Path:
    """Writes a script that imports tiny.py, and puts that beside it: pods of one that changes `sys.path` are slow."""
    put(script, text)
    put(script.parent / SCRIPT.name, SCRIPT.read_bytes())
    return script


def status_of(folder: Path, command: str) -> dict[str, Any]:
    """Returns the object that a command, called in another folder, prints about a run."""
    # In this process, which has imported all of it. A path is that of a run: the cluster of the user's kubeconfig has
    # no job of such a name.
    with contextlib.chdir("/"):
        done = CliRunner().invoke(
            app, [command, str(folder), "--output", "json"], env={"KUBECONFIG": str(folder / "none")}
        )
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_json_output_is_one_object_and_text_output_reports_the_failed_evaluation(folder: Path, tmp_path: Path) -> None:
    """Exit status 0; what a pod printed reaches the terminal without the characters that it would obey."""
    script = script_of(SAYS_NAN, tmp_path / "tïny trainer.py")
    written = tmp_path / "trace.json"
    options = ["--workers", "1", "--output", "json", "--trace", str(written)]
    out, err = ended(start(folder, script, *options))
    seen = json.loads(out)
    assert (seen["phase"], seen["reason"], seen["step"]) == ("Succeeded", "Completed", 40), err
    assert (seen["metrics"], sorted(seen["trainMetrics"])) == ({}, ["rmse"])
    assert seen["restarts"] == sum(
        entry.get("reason") == "Stalled" for entry in status_of(folder, "history")["history"]
    )
    assert seen["loss"] > 0
    assert "the evaluation failed: at step 40: ValueError: no \\x1b[2J evaluation" in err
    trace = json.loads(written.read_bytes())
    check(trace)
    sent = [event["args"].get("step") for event in trace["traceEvents"] if event["name"] == "send"]
    assert set(sent) == set(range(40))
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == len(sent), "an arrow for each contribution"
    assert trace["otherData"]["arrowsLeftOut"] == 0
    wait_until_gone(folder)
    stored = json.loads((folder / "result.json").read_text())
    assert {name: stored[name] for name in seen} == seen
    assert stored["endTime"] - stored["startTime"] >= seen["seconds"]
    shown = status_of(folder, "status")
    assert (shown["phase"], shown["step"], {pod["state"] for pod in shown["pods"]}) == ("Succeeded", 40, {"Succeeded"})
    assert shown["live"] is False


def test_a_loss_that_is_nan_is_a_failed_job_and_no_traceback(folder: Path, tmp_path: Path) -> None:
    """Exit status 1, the reason with step and rank, and nothing left."""
    script = script_of(SAYS_NAN, tmp_path / "nan.py")
    process = start(folder, script, "--servers", "1", "--workers", "1", arguments=["nan"])
    out, err = ended(process, fails=True)
    assert process.returncode == 1, err
    assert "NonFiniteGradients" in out
    assert "rank 0" in out
    assert "Traceback" not in err
    wait_until_gone(folder)


def test_the_example_with_ranks_of_two_pods_runs(folder: Path, tmp_path: Path) -> None:
    """Two servers and one rank of two pods, with a smaller model and two steps; test_ranks_of_several_pods.py has two
    ranks."""
    job = small_bytes(tmp_path / "bytes") / "large.yaml"
    # Most of the time is that of compiling: the initialization of each layer, in each rank.
    layers, steps = "= 32, 32, 4, {}, 8", "[--layout, fsdp{}]"
    for file, large, small in (
        (job.with_name("train.py"), layers.format(2), layers.format(1)),
        (job, steps.format(""), steps.format(', --steps, "2"')),
        (job, "workers:\n    replicas: 2", "workers:\n    replicas: 1"),
    ):
        text = file.read_text()
        assert text.count(large) == 1, large
        put(file, text.replace(large, small))
    out, err = ended(start(folder, job, "--output", "json"))
    seen = json.loads(out)
    assert (seen["phase"], seen["step"]) == ("Succeeded", 2), err
    slots = ["server 0", "server 1", "worker 0.0", "worker 0.1"]
    assert [pod["slot"] for pod in status_of(folder, "status")["pods"]] == slots
    assert re.search(r"bits per byte [0-9.]+ after 2 updates", err), err
    wait_until_gone(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux counts the bytes of a socket")
def test_the_reported_traffic_is_what_the_kernel_counted_on_the_sockets(folder: Path, tmp_path: Path) -> None:
    """In both directions, and encoded; tests/wire/test_streams.py counts without codecs. The first and the last
    parameters, and headers of frames, add less than 2 %."""
    steps, written = 200, tmp_path / "bytes"
    options = [
        "--gradients",
        "Int8",
        "--parameters",
        "BFloat16",
        "--servers",
        "2",
        "--workers",
        "2",
        "--output",
        "json",
    ]
    script = SCRIPT.parents[2] / "wire" / "counted.py"
    out, err = ended(start(folder, script, *options, arguments=[str(steps), str(written)]))
    traffic = json.loads(out)["traffic"]
    assert 1.0 <= int(written.read_text()) / (steps * traffic["carried"]) <= 1.02, (traffic, written.read_text())
    assert traffic["exact"] == pytest.approx(2 * 4 * 300_100, rel=1e-3)
    used = traffic["carried"] / traffic["exact"]
    assert used == pytest.approx(0.375, rel=0.02)
    assert re.search(r"^  traffic [0-9.]+ [kM]B per update and worker \(Exact: 2\.4 MB\)", err, re.MULTILINE), err
    wait_until_gone(folder)


def test_a_dry_run_makes_two_updates_and_leaves_the_jobs_checkpoints_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    words = [sys.executable, "-m", "backstay_cli.main", "run", "--dry-run", "--checkpoint", "mine", str(SCRIPT)]
    environment = {**os.environ, "BACKSTAY_TEST_FOLDER": str(folder)}
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("several servers", "2 updates", "checkpoint", "end of the script"):
        assert re.search(f"^  {name} +ok: ", done.stdout, re.MULTILINE), done.stdout
    assert "2 updates with 2 servers, 2 workers" in done.stdout
    assert not list((tmp_path / "mine").iterdir())
    assert not list((tmp_path / ".backstay" / "runs").iterdir())
    wait_until_gone(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_command(folder: Path, number: signal.Signals) -> None:
    """Ctrl-C prints a message and exits with 130; after SIGKILL the children end by themselves."""
    # Held, so that the job cannot end before the signal. On a busy machine, a state may be too short to be shown.
    process = start(folder, SCRIPT, "--workers", "1", env={"HOLD_AT": "20", "GATE": str(folder / "never")})
    read_until(
        process.stdout, "starting Python and JAX|preparing the parameters|compiling the first step|step [0-9]+ of"
    )
    assert len(processes(folder)) > 4
    assert status_of(folder, "status")["phase"] in {"Pending", "Starting", "Running"}
    process.send_signal(number)
    out, err = ended(process)
    if number == signal.SIGINT:
        assert process.returncode == 130, err
        assert "nothing is left running" in out
    wait_until_gone(folder)
    assert status_of(folder, "history")["phase"] == "Stopped"
    reason = "Interrupted" if number == signal.SIGINT else "CommandEnded"
    assert status_of(folder, "status")["reason"] == reason


SHOWS_ITSELF = """
import os, sys
import backstay, tiny
if __name__ == "__main__":
    print("MYENV", os.environ.get("MYENV"), "ADDED", os.environ.get("ADDED"), sys.argv[1:])
    backstay.train(**tiny.SETTINGS)
"""


def test_a_script_has_its_environment_and_after_ctrl_c_the_same_command_continues(folder: Path, tmp_path: Path) -> None:
    """The output has the script's output, the stored step, and that the next run continues there. That one ends when
    its job is suspended elsewhere: its output has the step of the checkpoint, too."""
    script = script_of(SHOWS_ITSELF, tmp_path / "shows.py")
    options = ["--checkpoint", str(tmp_path / "ck"), "--every-seconds", "0", "--env", "ADDED=1", "--workers", "1"]
    # A proxy that is not there: the pods' own connections must not go through it.
    proxies = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    env = {"MYENV": "hello", **proxies}
    slow = {**env, "STEPS": "100000", "PAUSE": "0.05"}
    process = start(folder, script, *options, env=slow, arguments=["--lr", "0.1"])
    said = read_until(process.stdout, r"step [\d,]+ of [\d,]+  (time left [\d:]+  )?loss")
    process.send_signal(signal.SIGINT)
    out, err = ended(process)
    said += out
    assert process.returncode == 130, err
    assert "worker 0 | MYENV hello ADDED 1 ['--lr', '0.1']" in said
    stored = re.search(r"stopped; the checkpoint of step (\d+) is stored", said)
    assert stored is not None, said
    assert "nothing is left running" in said
    assert "to continue: backstay run " in said
    wait_until_gone(folder)
    assert status_of(folder, "history")["phase"] == "Stopped"
    assert status_of(folder, "status")["reason"] == "Interrupted"

    step = int(stored[1])
    held = {**env, "STEPS": str(step + 100), "HOLD_AT": str(step + 2), "GATE": str(folder / "never")}
    again = start(folder, script, *options, "--output", "json", env=held)
    said = read_until(again.stderr, "Continued")  # the operator reports it while the job trains
    with backstay.Client(folder / "backstay.kubeconfig") as client:
        job = client.job("shows")
        until(lambda: (job.status.step or 0) > step)  # there is something to store
        job.suspend(wait=False)
    out, err = ended(again)
    err = said + err
    assert again.returncode == 130, err
    assert f"Continued: training continues from the checkpoint of step {step}" in err
    stored = re.search(r"suspended; the checkpoint of step (\d+) is stored; nothing is left running", err)
    assert stored is not None, err
    assert step < int(stored[1]) <= step + 2
    assert "to continue: backstay run " in err
    seen = json.loads(out)
    assert (seen["phase"], seen["reason"], seen["step"]) == ("Suspended", "Suspended", int(stored[1]))
    wait_until_gone(folder)
