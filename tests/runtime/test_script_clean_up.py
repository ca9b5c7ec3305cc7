"""T8: a script's own clean-up runs in each pod: its handler of SIGTERM and its functions of `atexit`."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from between import until

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
    until(lambda: len(list(folder.glob("*-woken"))) == 2)
    assert {file.read_text() for file in folder.glob("*-woken")} == {str(int(signal.SIGTERM))}


def test_t8_at_the_end_of_a_job_only_atexit_runs(job, tmp_path: Path) -> None:
    folder = tmp_path / "written"
    folder.mkdir()
    tiny = job(1, 1)
    tiny.environment = {"CLEAN_UP": str(folder)}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0, 0]
    assert written(folder) == {name for name in ALL if name.endswith("atexit")}
