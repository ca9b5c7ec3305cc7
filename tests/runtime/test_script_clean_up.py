"""T8: a script's own clean-up runs in each pod: its handler of SIGTERM and its functions of `atexit`."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from between import LONG, put

ALL = {f"{pod}-{what}" for pod in ("parameter-server-0", "worker-0") for what in ("handler", "atexit")}


def written(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


@pytest.mark.parametrize("stuck", [False, True])
def test_t8_after_sigterm_the_clean_up_of_the_script_runs(job, tmp_path: Path, stuck: bool) -> None:
    """A worker in the middle of a step runs it too, and a server after it has stored its checkpoint."""
    folder, checkpoints = tmp_path / "written", tmp_path / "checkpoints"
    folder.mkdir()
    tiny = job(1, 1, checkpoint={"uri": str(checkpoints), "every_steps": 1000})
    tiny.environment = {"CLEAN_UP": str(folder), "STEPS": "100000"}
    server, worker = tiny.server(0), tiny.worker(0, **({"HOLD_AT": "3"} if stuck else {}))
    tiny.wait_for(worker, "step 3/" if stuck else "step 1/")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait() == 143
    assert written(folder) == {"worker-0-handler", "worker-0-atexit"}
    server.process.send_signal(signal.SIGTERM)
    assert server.wait() == 143
    assert written(folder) == ALL
    assert list(checkpoints.glob("*.manifest.json"))


def test_t8_the_descriptor_of_an_event_loop_gets_the_signal(job, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    tiny = job(1, 1)
    tiny.environment = {"CLEAN_UP": str(folder), "STEPS": "100000", "WAKES": "1"}
    server, worker = tiny.server(0), tiny.worker(0)
    tiny.wait_for(worker, "step 1/")
    for pod in (worker, server):
        pod.process.send_signal(signal.SIGTERM)
        assert pod.wait() == 143
    assert [file.read_text() for file in folder.glob("*-woken")] == [str(int(signal.SIGTERM))] * 2


def test_t8_at_the_end_of_a_job_only_atexit_runs(job, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    tiny = job(1, 1)
    tiny.environment = {"CLEAN_UP": str(folder)}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0, 0]
    assert written(folder) == {name for name in ALL if name.endswith("atexit")}


REMAINS = """
import logging, multiprocessing, os, sys, threading, time
from backstay._process import Stop, _after
_after._PATIENCE = 0.2

def rest(file):
    while not os.path.exists(file):
        time.sleep(0.01)

if __name__ == "__main__":
    logging.basicConfig()
    _after.hand_over(None, {}, Stop(), print)
    if sys.argv[1] == "thread":
        threading.Thread(target=rest, args=sys.argv[2:], name="reader").start()
    else:
        multiprocessing.get_context("fork").Process(target=rest, args=sys.argv[2:], name="loader").start()
"""


@pytest.mark.parametrize(("what", "name"), [("thread", "thread reader"), ("child", "child process loader")])
def test_what_keeps_a_process_after_its_script_is_named(tmp_path: Path, what: str, name: str) -> None:
    """Nothing else shows that the job waits for it."""
    script, let = tmp_path / "script.py", tmp_path / "let"
    put(script, REMAINS)
    process = subprocess.Popen([sys.executable, script, what, let], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert f"this process waits for: {name}." in process.stderr.readline()
    finally:
        let.touch()
        assert process.wait(LONG) == 0
        process.stderr.close()
