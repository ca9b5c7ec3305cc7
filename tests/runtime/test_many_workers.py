"""T3, T4: more workers than a server holds contributions; real processes, see decision 0029."""

from __future__ import annotations

import signal

import numpy as np

from backstay._coordination import Rules

HELD = Rules(mode="Sync", shards=1, steps=1).held


def test_a_worker_dies_after_its_contribution_was_added_up(job) -> None:
    """The contribution of the worker's replacement is a duplicate. The result is that of one process."""
    world = HELD + 1
    tiny = job(1, world)
    tiny.environment = {"WIDTH": "30000", "STEPS": "4", "LEARNING_RATE": "1e-5"}  # more than one frame
    tiny.server(0)
    for rank in range(world):
        tiny.worker(rank, **({"HOLD_AT": "2"} if rank == HELD else {}))
    tiny.wait_for(tiny.pods[1], "step 2/4")
    tiny.pods[1].process.send_signal(signal.SIGKILL)
    tiny.pods[1].wait()
    again = tiny.worker(0, 1)
    tiny.let()
    assert [pod.wait() for pod in tiny.pods if pod is not tiny.pods[1]] == [0] * (world + 1)
    wanted = tiny.reference()
    for name, leaf in tiny.params(again).items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-4, atol=1e-6)  # float32
