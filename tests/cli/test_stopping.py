"""Ctrl-C stores a checkpoint, and prints the command that continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import between
import pytest

from backstay_cli.main import command_again
from backstay_cli.stopping import closing_lines, stored_step, stores, with_former, with_stored
from backstay_client.view.follow import JobView
from backstay_spec import contract
from backstay_spec.job_report import CheckpointStatus, JobReport

AGAIN = "backstay run --checkpoint ck train.py"


def server(incarnation: int, index: int = 0) -> dict[str, Any]:
    labels = {contract.LABEL_ROLE: contract.ROLE_SERVER, contract.LABEL_INDEX: str(index)}
    return {"metadata": {"name": f"a-ps-{index}-{incarnation}", "namespace": "default", "labels": labels}}


def log(logs: Path, pod: dict[str, Any], *lines: str) -> None:
    folder = logs / "default" / pod["metadata"]["name"]
    folder.mkdir(parents=True)
    (folder / "trainer.log").write_text("".join(f"{line}\n" for line in lines))


def stored(step: int) -> str:
    return f"01:02:03 parameter-server-0: checkpoint of step {step}: /ck/x"


def test_the_newest_checkpoint_of_shard_0s_servers_counts(tmp_path: Path) -> None:
    pods = (server(1), server(2), server(1, index=1))
    log(tmp_path, pods[0], stored(50), stored(100))
    log(tmp_path, pods[1], stored(100), stored(105), "checkpoint of step 999: printed by the script")
    log(tmp_path, pods[2], stored(200))
    view = JobView("a", "default", pods=pods)
    assert stored_step(view, tmp_path) == 105
    newest = with_stored(view, tmp_path)
    assert newest.report.step == 105
    assert stored(105).endswith(f": {newest.checkpoint}"), "the JSON of an interrupted run names it"
    assert stored_step(JobView("a", "default", pods=(server(9),)), tmp_path) is None


@pytest.mark.parametrize(
    ("step", "checkpoint", "lines", "says"),
    [
        (None, {"uri": "/ck"}, (), "before the first update"),
        (0, {"uri": "/ck"}, (), "before the first update"),
        (107, {}, (), "nothing is stored: the job has no checkpoint"),
        (107, {"uri": "/ck"}, (), "this run stored no checkpoint"),
        (107, {"uri": "/ck"}, (stored(107),), f"to continue: {AGAIN}"),
    ],
)
def test_the_last_lines_state_which_checkpoint_was_stored(
    tmp_path: Path, step: int | None, checkpoint: Any, lines: Any, says: str
) -> None:
    log(tmp_path, server(1), *lines)
    view = JobView("a", "default", report=JobReport(step=step), pods=(server(1),))
    job = {"spec": {"checkpoint": checkpoint}}
    text = "\n".join(closing_lines(view, job, tmp_path, AGAIN, "stopped"))
    assert says in text
    assert "nothing is left running" in text
    assert str(tmp_path) in text
    assert (AGAIN in text) == bool(lines)
    assert stores(job) == bool(checkpoint)


def test_the_log_of_a_pod_that_is_deleted_meanwhile_counts(tmp_path: Path) -> None:
    log(tmp_path, server(1), stored(132))
    left = JobView("a", "default", pods=(server(2),))
    assert stored_step(left, tmp_path) is None
    view = with_former(left, (server(1), server(2)))
    assert stored_step(view, tmp_path) == 132
    assert view.pods == (server(2), server(1))


def test_a_checkpoint_of_a_pod_that_is_gone_counts_if_it_has_the_newest_step(tmp_path: Path) -> None:
    pods = (server(2),)
    for step, stored in ((90, 90), (97, None)):
        report = JobReport(step=step, checkpoint=CheckpointStatus(step=90))
        assert stored_step(JobView("a", "default", report=report, pods=pods), tmp_path) == stored


def stored_in(folder: Path, step: int) -> str:
    return f"01:02:03 parameter-server-0: checkpoint of step {step}: {folder / f'{step}.json'}"


def test_a_checkpoint_that_is_not_there_or_not_the_last_step_is_shown_as_such(tmp_path: Path) -> None:
    """The folder was deleted in the middle of training, or its disk was full."""
    folder = tmp_path / "ck"
    job = {"spec": {"checkpoint": {"uri": str(folder)}}}
    log(tmp_path, server(1), stored_in(folder, 50))
    view = JobView(
        "a",
        "default",
        report=JobReport(step=107, checkpoint=CheckpointStatus(step=50, uri=str(folder / "50.json"))),
        pods=(server(1),),
        job=job,
    )
    lines = list(closing_lines(view, job, tmp_path, AGAIN, "stopped"))
    assert lines[0] == "stopped at step 107; nothing is left running"
    assert lines[1] == f"  the checkpoint of step 50 was stored, and is missing now: {folder / '50.json'}"
    assert AGAIN not in "\n".join(lines)
    assert with_stored(view, tmp_path).checkpoint is None
    folder.mkdir()
    between.put(folder / "50.json", "{}")
    lines = list(closing_lines(view, job, tmp_path, AGAIN, "stopped"))
    assert lines[0] == "stopped at step 107; nothing is left running"
    assert lines[1].startswith("  only the checkpoint of step 50 is stored; ")
    assert lines[2] == f"  to continue from it: {AGAIN}"
    assert with_stored(view, tmp_path).checkpoint == str(folder / "50.json")


def test_a_run_with_volumes_continues_in_its_own_folder() -> None:
    """The volumes of a run are in its folder, and another run would begin with empty ones."""
    argv = ["/usr/bin/backstay", "run", "my job.yaml"]
    assert command_again(argv, None) == "backstay run 'my job.yaml'"
    assert command_again(argv, Path("/x y")) == "backstay run --data-dir '/x y' 'my job.yaml'"
