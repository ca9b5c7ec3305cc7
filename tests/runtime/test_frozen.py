"""Jobs with frozen parameters run as real processes. Servers and checkpoints have only what trains."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from backstay import load

FROZEN = {"FROZEN": "dense"}


def base(place: Path, factor: float = 1.0, **more: np.ndarray) -> str:
    kernel = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
    out = np.random.default_rng(1).normal(size=(16, 3)).astype(np.float32)
    arrays = {"dense.kernel": factor * kernel, "dense.bias": np.ones(16, np.float32), "out.0": out, **more}
    safetensors.numpy.save_file(arrays, place)
    return str(place)


@pytest.mark.parametrize(("start", "state"), [(False, False), (True, True)])
def test_t4_a_worker_and_a_server_die_and_nothing_changes(job, tmp_path: Path, start, state) -> None:
    """The result is that of the loop in one process; the evaluator and each worker have the whole model."""
    folder, last = tmp_path / "folder", 0 if start else 1
    tiny = job(2, last + 1, checkpoint={"uri": str(folder), "every_steps": 2}, evaluator=True)
    tiny.environment = {**FROZEN, "STEPS": "8", "HOLD_AT": "5"}
    mean = np.full(16, 0.25 if start else 0, np.float32)
    if state:
        tiny.environment |= {"STATE": "1", "FROZEN_STATE": "mean"}
    if start:
        extra = {"state/mean": mean, "state/batches": np.array(3, np.int32)} if state else {}
        tiny.environment["START_FROM"] = base(tmp_path / "base.safetensors", **extra)
    servers, workers = [tiny.server(0), tiny.server(1)], [tiny.worker(rank) for rank in range(last + 1)]
    evaluator = tiny.start("evaluator", 0)
    tiny.wait_for(servers[0], "step 5/8")
    for pod in (workers[last], servers[1]):
        pod.process.send_signal(signal.SIGKILL)
    workers[last], servers[1] = tiny.worker(last, 1), tiny.server(1, 1)
    tiny.wait_for(servers[0], "back to step ")
    tiny.let()
    assert {pod.wait() for pod in (*servers, *workers, evaluator)} == {0}
    expected = tiny.reference()
    for worker in workers:
        found = tiny.params(worker)
        for leaf in filter(str.isdigit, expected):
            np.testing.assert_allclose(found[leaf], expected[leaf], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found["squares"], expected["squares"], rtol=1e-5)
    message = servers[0].final_message()
    assert (message["trainedParameters"], message["frozenParameters"]) == (16 * 3, 8 * 16 + 16)
    stored = load(str(folder))
    if state:
        assert stored.state == {"mean": None, "batches": 3 * start + 8}
        assert expected["3"] == 3 * start + 8
        assert np.array_equal(expected["4"], mean)
        if start:
            whole = load(str(folder), base=True)
            assert np.array_equal(whole.state["mean"], mean)
            assert np.array_equal(whole.params["dense"]["kernel"], expected["1"])
    assert stored.params["dense"] == {"kernel": None, "bias": None}
    assert [leaf.path for leaf in stored.frozen.leaves] == ["dense.bias", "dense.kernel", *["state/mean"] * state]
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) < 8 * 3 * 4 * 16 * 3 * 4


def test_a_worker_with_other_frozen_parameters_is_refused(job, tmp_path: Path) -> None:
    """Another file in one pod; then a worker whose file has changed since the job began."""
    tiny = job(1, 2)
    tiny.environment = {**FROZEN, "STEPS": "3", "HOLD_AT": "1"}
    mine, other = base(tmp_path / "a.safetensors"), base(tmp_path / "b.safetensors", 2.0)
    server = tiny.server(0, START_FROM=mine)
    tiny.worker(0, START_FROM=mine)
    tiny.worker(1, START_FROM=mine)
    tiny.wait_for(server, "step 1/3")
    stranger = tiny.worker(1, 1)  # its frozen parameters come from `init`
    assert stranger.may_end_with(1).wait() == 1
    said = stranger.final_message()
    assert said["result"] == "Refused"
    text = "the frozen arrays of worker 1 are not those of this job: dense.bias, dense.kernel (2 of 2 leaves differ"
    assert text in str(said["message"])
    Path(other).replace(mine)
    late = tiny.worker(1, 2, START_FROM=mine)
    assert late.may_end_with(1).wait() == 1
    assert "has changed" in str(late.final_message()["message"])


def test_training_continues_with_its_own_frozen_parameters_only(job, tmp_path: Path) -> None:
    """The names of the arrays that differ are in the message; a worker after training has the whole model."""
    folder, place = tmp_path / "folder", tmp_path / "base.safetensors"
    first = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    first.environment = {**FROZEN, "STEPS": "2", "START_FROM": base(place)}
    first.start_all()
    assert [pod.wait() for pod in first.pods] == [0, 0]
    again = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    again.environment = {**FROZEN, "STEPS": "4", "START_FROM": base(place, 2.0)}
    again.server(0)
    worker = again.worker(0)
    assert worker.may_end_with(1).wait() == 1
    message = str(worker.final_message()["message"])
    assert "dense.kernel (1 of 2 leaves differ" in message
    assert "Training continues with the frozen arrays of its checkpoints only" in message
    same = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    same.environment = {**FROZEN, "STEPS": "4", "START_FROM": base(place)}
    same.start_all()
    assert [pod.wait() for pod in same.pods] == [0, 0]
    assert load(str(folder)).step == 4
