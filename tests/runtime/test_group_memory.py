"""No pod of a rank of several pods holds the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from backstay.testing import Pod
from backstay_spec import contract

from .groups import GroupJob

SCRIPT = Path(__file__).with_name("memory_of_a_pod.py")
MODEL = 256  # MB


def grown(pod: Pod) -> int:
    """Returns by how many MB the memory of a pod has grown at most."""
    return int(pod.output().partition("grew by ")[2].split()[0])


def test_no_pod_of_a_rank_has_the_whole_model(group: Any, tmp_path: Path) -> None:
    """Neither while it trains, nor when it reads the last checkpoint after training."""

    def ran(pods: int, **config: Any) -> tuple[GroupJob, Pod, list[int]]:
        job: GroupJob = group("", devices=4 // pods, command=(str(SCRIPT),), pods_per_rank=pods, **config)
        server, workers = job.server(0, 1), job.rank(0)
        assert [pod.wait() for pod in (*workers, server)] == [0] * (pods + 1)
        return job, server, [grown(pod) for pod in workers]

    _, _, [alone] = ran(1)  # its server need not store what no pod reads
    job, server, four = ran(4, checkpoint={"uri": str(tmp_path / "checkpoints")})
    words = server.final_message()
    job.environment[contract.ENV_TRAINED] = json.dumps({name: words[name] for name in ("step", "checkpoint")})
    again = job.rank(0, 2)  # after training
    assert [pod.wait() for pod in again] == [0] * 4
    print(alone, four, [grown(pod) for pod in again])
    # Arrays of up to eight times a pod's part are in use at the same time, and programs take 90 MB. In 6 runs, each of
    # the four pods took 0.20 to 0.32 of what one pod takes. If each holds the whole model twice, it is 0.57.
    assert max(four) < alone / 2
    assert max(map(grown, again)) < MODEL * 3 / 4  # its part, one array and 40 MB
