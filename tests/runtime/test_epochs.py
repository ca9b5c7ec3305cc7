"""Each sample is used once an epoch while a worker dies, a server dies, and the world changes, by real processes
(T9)."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np

from backstay import BatchKey, from_dataset

from .operator_calls import progress


def test_t9_each_sample_once_an_epoch_though_pods_die_and_the_world_changes(job, tmp_path: Path) -> None:
    """3 ranks, 2, and 3 again. SGD adds 1 / (ranks of the update) to a sample's parameter each time that it is used."""
    size, steps = 66, 12
    tiny = job(1, 3, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4})
    tiny.environment = {"SAMPLES": str(size), "STEPS": str(steps), "HOLD_AT": "3"}
    server = tiny.server(0)
    workers = [tiny.worker(rank) for rank in range(3)]
    tiny.wait_for(server, "step 3/12")
    workers[1].process.send_signal(signal.SIGKILL)  # while it holds a batch that no other has
    workers[1] = tiny.worker(1, 1)
    tiny.let(5)
    tiny.wait_for(server, "checkpoint of step 4")
    tiny.wait_for(server, "step 5/12")
    server.process.send_signal(signal.SIGKILL)  # the update after the checkpoint is lost
    server = tiny.server(0, 1)
    tiny.let(7)  # a worker that waits for a batch does not notice that the server is gone
    tiny.wait_for(server, "step 7/12")
    progress(tiny, world=2)
    tiny.let(9)
    tiny.wait_for(server, "step 9/12")
    progress(tiny, world=3)
    tiny.let()
    assert [server.wait(), workers[0].wait()] == [0, 0]
    used = tiny.params(workers[0])["0"]
    batches = from_dataset(np.arange(size), batch_size=2)
    drawn = [batches.indices(BatchKey(number, 0, 1)) for number in range(size // 2)]
    # Seven updates of three ranks, three of two (the third one brings the third rank back), two of three.
    shares = np.concatenate([np.full(42, 1 / 3), np.full(12, 1 / 2), np.full(12, 1 / 3)])
    np.testing.assert_allclose(used[np.concatenate(drawn)], shares, rtol=1e-6)
    assert "epoch 0 has ended: 66 samples: 66 used, 0 dropped" in server.output()
