"""T4, T6: a job that starts from the parameters of another one, by real processes."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import safetensors.numpy

from backstay import load


def test_t4_started_beside_another_job_it_is_the_plain_loop_though_a_server_dies(job, tmp_path: Path) -> None:
    """Two servers use the folder of the other job, and one dies before the first checkpoint.

    All pods begin again with the same parameters, although this job's claim excludes the newest checkpoint.
    """
    folder = tmp_path / "folder"
    first = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    first.environment = {"BACKSTAY_JOB": "a", "STEPS": "2"}
    first.start_all()
    assert [pod.wait() for pod in first.pods] == [0, 0]
    begin = load(str(folder)).uri
    second = job(2, 1, checkpoint={"uri": str(folder), "every_steps": 100})
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
    assert load(str(folder)).step == 6


def test_t8_a_start_that_does_not_fit_fails_the_job_with_the_list(job, tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"dense.bias": np.zeros(5, np.float32), "head": np.zeros(1)}, place)
    tiny = job(1, 1)
    tiny.environment = {"START_FROM": str(place)}
    server = tiny.server(0)
    assert server.may_end_with(1).wait() == 1
    said = server.final_message()
    assert (said["result"], said["reason"]) == ("Failed", "CheckpointError")
    assert "missing (2): dense.kernel, out.0" in str(said["message"])
    assert "unexpected (1): head" in str(said["message"])
    assert "of another shape or kind (1): dense.bias is [5] in the file and [16] in init" in str(said["message"])
