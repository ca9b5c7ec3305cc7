"""T6, T7: two jobs, one checkpoint folder, by real processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from between import put

from backstay import load
from backstay._checkpoint import CheckpointStore
from backstay.testing import KILLED

from .operator_calls import report


def test_t7_two_jobs_side_by_side_do_not_share_a_folder(job, tmp_path: Path) -> None:
    """The second one fails and names the first, which ends with its own parameters; then the folder is still its."""
    tiny = job(1, 1, checkpoint={"uri": str(tmp_path / "folder"), "every_steps": 2})
    tiny.environment = {"BACKSTAY_JOB": "a", "BACKSTAY_JOB_UID": "1", "STEPS": "12"}
    server, worker = tiny.server(0), tiny.worker(0, HOLD_AT="3")
    tiny.wait_for(server, "checkpoint of step 2")
    other = job(1, 1, checkpoint={"uri": str(tmp_path / "folder"), "every_steps": 2})
    other.environment = {"BACKSTAY_JOB": "b", "BACKSTAY_JOB_UID": "2", "SEED": "7", "STEPS": "3"}
    second = other.server(0)
    assert second.may_end_with(1).wait() == 1
    assert (second.final_message()["result"], second.final_message()["reason"]) == ("Failed", "CheckpointInUse")
    assert "job default/a (uid 1, pod parameter-server-0)" in str(second.final_message()["message"])
    server.process.send_signal(signal.SIGKILL)
    assert server.may_end_with(KILLED).wait() == KILLED
    # Its next incarnation continues its history immediately, although another job requests the folder.
    third = other.server(0, 1)
    server = tiny.server(0, 1)
    tiny.wait_for(server, "continuing from the checkpoint of step 2: ")
    assert "waiting up to" not in server.output()
    tiny.let()
    assert [server.wait(), worker.wait()] == [0, 0]
    assert server.final_message()["result"] == "Succeeded"
    assert third.may_end_with(1).wait() == 1
    assert third.final_message()["reason"] in ("CheckpointInUse", "CheckpointOfAnotherJob")
    fourth = other.server(0, 2)
    assert fourth.may_end_with(1).wait() == 1
    assert fourth.final_message()["reason"] == "CheckpointOfAnotherJob"
    said = str(fourth.final_message()["message"])
    assert "belong to job default/a with seed 0 (step 12), this is job default/b with seed 7" in said
    assert load(str(tmp_path / "folder")).step == 12


def test_t8_a_lease_file_of_0_bytes_delays_a_run_and_is_reported(job, tmp_path: Path) -> None:
    """A full disk left it. No other process exists. The page about checkpoints has a row for each file of this job."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "lease-00000007-0123456789abcdef.json").touch()
    rule = {"metric": "squares", "mode": "Min"}
    tiny = job(1, 1, evaluator=True, checkpoint={"uri": str(folder), "every_steps": 2, "keep_best": rule})
    tiny.environment = {"STEPS": "6", "FAULT_INJECTION": "kill server/0#1 @4 rename"}
    server, worker, evaluator = tiny.server(0, 1), tiny.worker(0, HOLD_AT="3"), tiny.start("evaluator", 0)
    tiny.wait_for(server, "evaluation of step 2 ")
    start = report(tiny, world=1, stall_seconds=60).term_start
    text = "the lease lease-00000007-0123456789abcdef.json cannot be read (0 bytes), and did not change for 5 s"
    assert start is not None
    assert start.taken_over == (text,)
    assert f"{text}: taking over the checkpoint folder" in server.output()
    tiny.let()
    assert server.may_end_with(KILLED).wait() == KILLED
    names = {path.name for path in folder.iterdir()}
    server = tiny.server(0, 2)
    assert [server.wait(), worker.wait(), evaluator.wait()] == [0, 0, 0]
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    table = page.partition("\n## Damaged files\n")[2].partition("\n## ")[0]
    first = "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE))
    rows = [re.escape(row).replace("…", r"[\w.-]+") for row in re.findall(r"`([^`]+)`", first)]
    names |= {path.name for path in folder.iterdir()}
    found = {name: [row for row in rows if re.fullmatch(row, name)] for name in names}
    assert {name: rows for name, rows in found.items() if len(rows) != 1} == {}
    assert {"claim", "lease", "step", "events"} <= {re.split(r"[-.]", name)[0] for name in found}
    assert any(name.startswith(".") and name.endswith(".tmp") for name in found)
    assert any(name.endswith(".evaluation.json") for name in found)


def test_t6_a_writer_that_was_stopped_stores_nothing_more(job, tmp_path: Path) -> None:
    """SIGSTOP; another run of the job takes over and ends; SIGCONT: the first one stores nothing and says why."""
    folder = tmp_path / "folder"
    first = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    first.environment = {"BACKSTAY_JOB": "a", "BACKSTAY_JOB_UID": "1", "STEPS": "12"}
    stopped, worker = first.server(0), first.worker(0, HOLD_AT="3")
    first.wait_for(stopped, "checkpoint of step 2")
    stopped.process.send_signal(signal.SIGSTOP)
    second = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 5, "keep": 10})
    second.environment = {
        "BACKSTAY_JOB": "a",
        "BACKSTAY_JOB_UID": "2",
        "STEPS": "12",
        "LEARNING_RATE": "0.02",
        "BATCH": "8",
    }
    second.start_all()
    assert [pod.wait() for pod in second.pods] == [0, 0]
    said = second.pods[0].output()
    assert "the checkpoint folder" in said
    assert "is held by job default/a (uid 1, pod parameter-server-0): waiting up to 5 s" in said
    assert "was silent for 5 s: taking over" in said
    assert "continuing from the checkpoint of step 2: " in said
    assert "this run of job default/a continues the run with uid 1 at step 2" in said
    assert "changed since the checkpoint of step 2: the optimizer computes another update" in said
    assert "a contribution had 4 examples and has 8 now" in said
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    stopped.process.send_signal(signal.SIGCONT)
    first.let()
    worker.may_end_with(1)
    assert stopped.may_end_with(1).wait() == 1
    assert stopped.final_message()["reason"] == "CheckpointInUse"
    assert "job default/a (uid 2" in str(stopped.final_message()["message"])
    assert {name: (folder / name).read_bytes() for name in before} == before
    newest = CheckpointStore(str(folder)).newest().manifest
    assert newest is not None
    assert (newest.version, newest.origin.job.uid) == (12, "2")
    assert worker.may_end_with(1).wait() == 1


def test_t7_another_seed_is_refused_and_any_history_may_be_requested(job, tmp_path: Path) -> None:
    """`AlreadyComplete` is for the same job and seed; `continueFrom: Any` begins a new history and deletes nothing."""
    folder = tmp_path / "folder"
    checkpoint: dict[str, Any] = {"uri": str(folder), "every_steps": 2, "keep": 1}
    first = job(1, 1, checkpoint=checkpoint)
    first.environment = {"BACKSTAY_JOB": "a", "BACKSTAY_JOB_UID": "1", "STEPS": "4"}
    first.start_all()
    assert [pod.wait() for pod in first.pods] == [0, 0]
    theirs = {path.name for path in folder.iterdir() if path.name.startswith("step-")}
    seed = first.server(0, 1, SEED="7")
    assert seed.may_end_with(1).wait() == 1
    assert seed.final_message()["reason"] == "CheckpointOfAnotherJob"
    assert "with seed 0 (step 4), this is job default/a with seed 7" in str(seed.final_message()["message"])
    again = first.server(0, 1, BACKSTAY_JOB_UID="9")
    assert again.wait() == 0
    assert again.final_message()["result"] == "AlreadyComplete"
    other = job(1, 1, checkpoint={**checkpoint, "continue_from": "Any"})
    other.environment = {"BACKSTAY_JOB": "b", "BACKSTAY_JOB_UID": "2"}
    short = other.server(0, STEPS="4")
    assert short.may_end_with(1).wait() == 1
    assert short.final_message()["reason"] == "CheckpointOfAnotherJob"
    assert "set steps to more than 4" in str(short.final_message()["message"])
    server, worker = other.server(0, 1), other.worker(0)
    assert [server.wait(), worker.wait()] == [0, 0]
    assert "continuing from the checkpoint of step 4: " in server.output()
    assert "belongs to job default/a with seed 0: a new history begins" in server.output()
    assert server.final_message()["result"] == "Succeeded"
    left = {path.name for path in folder.iterdir() if path.name.startswith("step-")}
    assert theirs < left
    # Worker 0 may report its evaluation before the manifest exists: then there is no file with the evaluation.
    assert len([name for name in left - theirs if not name.endswith(".evaluation.json")]) == 2
    assert load(str(folder)).step == 8


def test_t8_a_folder_that_cannot_be_written_is_found_before_the_first_update(job, tmp_path: Path) -> None:
    """Every server checks the folder before it opens a port. The message names the path and the uid."""
    put(tmp_path / "file", "not a folder")
    tiny = job(2, 1, checkpoint={"uri": str(tmp_path / "file" / "folder")})
    servers = [tiny.server(shard).may_end_with(1) for shard in range(2)]
    assert [server.wait() for server in servers] == [1, 1]
    for server in servers:
        assert (server.final_message()["result"], server.final_message()["reason"]) == (
            "Failed",
            "CheckpointFolderUnusable",
        )
        assert f"cannot write {tmp_path}/file/folder/" in str(server.final_message()["message"])
        assert "this process has uid " in str(server.final_message()["message"])
