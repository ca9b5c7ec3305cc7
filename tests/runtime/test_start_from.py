"""T4, T6: a job that starts from the parameters of another one, by real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from backstay import load


@pytest.mark.parametrize("stores", [True, False], ids=["in the folder of the other job", "without checkpoints"])
def test_t4_started_from_another_job_it_is_the_plain_loop_though_a_server_dies(
    job, tmp_path: Path, stores: bool
) -> None:
    """Two servers. One dies before the first checkpoint: all begin again with the same parameters."""
    folder = tmp_path / "folder"
    first = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    first.environment = {"BACKSTAY_JOB": "a", "STEPS": "2"}
    first.start_all()
    assert [pod.wait() for pod in first.pods] == [0, 0]
    begin = load(str(folder)).uri
    checkpoint = {"checkpoint": {"uri": str(folder), "every_steps": 100}} if stores else {}
    second = job(2, 1, **checkpoint)
    second.environment = {"BACKSTAY_JOB": "b", "BACKSTAY_JOB_UID": "2", "STEPS": "6", "HOLD_AT": "3", "SEED": "7"}
    second.environment["START_FROM"] = str(folder)
    servers, worker = [second.server(0), second.server(1)], second.worker(0)
    second.wait_for(servers[0], "step 3/6")
    servers[1].process.send_signal(signal.SIGKILL)
    servers[1] = second.server(1, 1)
    second.wait_for(servers[0], "back to step 0")
    second.let()
    assert [pod.wait() for pod in (*servers, worker)] == [0, 0, 0]
    for server in servers:
        assert f"3 of 3 parameters come from {begin}" in server.output()
    plain = job(1, 1)
    plain.environment = {"STEPS": "6", "SEED": "7", "START_FROM": begin}
    expected, found = plain.reference(), second.params(worker)
    for leaf in ("0", "1", "2"):
        np.testing.assert_allclose(found[leaf], expected[leaf], rtol=1e-5, atol=1e-6)
    assert load(begin).step == 2, "nothing of the other job was deleted"
    if stores:
        assert load(str(folder)).step == 6


def test_t8_a_start_that_does_not_fit_fails_the_job_with_the_list(job, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    first = job(1, 1, checkpoint={"uri": str(folder)})
    first.environment = {"BACKSTAY_JOB": "a", "STEPS": "1"}
    first.start_all()
    assert [pod.wait() for pod in first.pods] == [0, 0]
    second = job(1, 1)
    second.environment = {"START_FROM": str(folder), "WIDTH": "5"}
    server = second.server(0)
    assert server.wait() == 1
    said = server.words()
    assert (said["result"], said["reason"]) == ("Failed", "CheckpointError")
    assert "of another shape or kind (3): dense.bias is [16] there and [5] in init" in str(said["message"])
