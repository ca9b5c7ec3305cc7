"""Faults by script in whole jobs of real processes, at moments that cannot be met from outside."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from backstay._faults import ENV_FAULTS


def test_t3_t4_connections_cut_and_frames_damaged_change_nothing_but_the_time(job, tmp_path: Path) -> None:
    """The result is still that of the plain loop after cut connections, a damaged frame and a slow step.

    With error feedback, the worker must know which of its contributions were applied.
    """
    script = "cut worker/0 @2; cut server/1 @4; corrupt server/0 @6; delay worker/0 @7 push 0.05s"
    tiny = job(
        2,
        1,
        checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4},
        wire={"gradients": "Int4", "error_feedback": True},
    )
    tiny.environment = {
        "X64": "1",
        "WIDTH": "600",
        "WIRE": "Int4,Exact,feedback",
        "STEPS": "12",
        ENV_FAULTS: script,
    }
    for shard in range(2):
        tiny.server(shard, 1)
    worker = tiny.worker(0, 1)
    assert worker.wait() == 0
    for name, value in tiny.reference().items():
        if name.isdigit():
            np.testing.assert_allclose(tiny.params(worker)[name], value, rtol=1e-9, atol=1e-12)
    logs = tiny.logs()
    assert logs.count("fault injected at step") == 4
    assert "connecting again" in worker.output()


def test_t7_a_server_that_dies_before_a_file_is_renamed_leaves_the_checkpoint_before(job, tmp_path: Path) -> None:
    """T3, T6, T7: killed with the file written and not named; its successor takes the last whole one, in a new term."""
    tiny = job(2, 1, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4})
    tiny.environment = {"X64": "1", "STEPS": "16", ENV_FAULTS: "kill server/1 @8 rename"}
    coordinator, dies = tiny.server(0, 1), tiny.server(1, 1)
    worker = tiny.worker(0, 1, HOLD_AT="6")
    # No checkpoint of a version is written while the previous checkpoint is still being written.
    tiny.wait_for(coordinator, "checkpoint of step 4")
    tiny.let()
    dies.wait()
    injected = re.search(r"fault injected at step (\d+): kill server/1 @8 rename", dies.output())
    tiny.server(1, 2)
    assert worker.wait() == 0
    for name, value in tiny.reference().items():
        if name.isdigit():
            np.testing.assert_allclose(tiny.params(worker)[name], value, rtol=1e-9, atol=1e-12)
    again = re.search(r"back to step (\d+) in term 2", tiny.pods[0].output())
    assert injected
    assert again
    assert 4 <= int(again[1]) < int(injected[1])
