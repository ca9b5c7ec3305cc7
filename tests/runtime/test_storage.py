"""A job whose checkpoints cannot be stored continues and reports it. It stores again when the storage works (T7)."""

from __future__ import annotations

import urllib.request
from datetime import UTC, datetime
from pathlib import Path

from between import LONG, put

from backstay_spec.job_report import JobReport

from .operator_calls import progress


def test_t7_training_continues_without_storage_and_the_last_version_is_stored_when_it_is_back(
    job, tmp_path: Path
) -> None:
    """T7, T8: a folder disappears and returns. Log, metric and `Progress` report it, and no update waits for it."""
    folder = tmp_path / "checkpoints"
    real, broken = tmp_path / "real", tmp_path / "broken"
    real.mkdir()
    put(broken, "no folder")
    folder.symlink_to(real)

    def point_to(what: Path) -> None:
        link = tmp_path / "link"
        link.symlink_to(what)
        link.replace(folder)

    tiny = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2})
    tiny.environment = {"STEPS": "10"}
    server, worker = tiny.server(0), tiny.worker(0, HOLD_AT="3")
    tiny.wait_for(server, "checkpoint of step 2")
    point_to(broken)
    for step in (4, 6, 8):
        tiny.let(step + 1)
        tiny.wait_for(server, f"of step {step} could not be stored")
    tiny.let()
    tiny.wait_for(server, "the job fails unless it is stored within 600 s")
    reply = progress(tiny, world=1, stall_seconds=60)
    found = JobReport.decoded(reply.report)
    assert "cannot write" in found.checkpoint_error
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.step, reply.step) == (2, 10, 10)
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=LONG) as page:
        lines = page.read().decode().splitlines()
    failures = next(line for line in lines if line.startswith("backstay_checkpoint_failures_total"))
    assert float(failures.split()[-1]) >= 2
    stored = next(line for line in lines if line.startswith("backstay_checkpoint_timestamp_seconds"))
    assert found.checkpoint.time == datetime.fromtimestamp(int(float(stored.split()[-1])), UTC)
    point_to(real)
    assert [server.wait(), worker.wait()] == [0, 0]
    assert server.final_message()["result"] == "Succeeded"
    assert "step-000000000010" in str(server.final_message()["checkpoint"])
    output = server.output()
    manifest = next(folder.glob("step-000000000010-*.manifest.json"))
    # The test damages the manifest. The next start names it and continues from the previous checkpoint.
    put(manifest, manifest.read_bytes()[:200])
    again = tiny.server(0, 1)
    tiny.wait_for(again, "continuing from the checkpoint")
    said = again.output()
    assert f"skipped a checkpoint: {manifest.name}" in said
    assert "continuing from the checkpoint of step 2: " in said, output


def test_t8_a_scheme_that_no_file_system_has_fails_the_job_before_anything_is_compiled(job):
    """Found when the pod starts: `result: Failed` is final, so the operator does not try another pod."""
    tiny = job(1, 1, checkpoint={"uri": "s4://bucket/folder", "every_steps": 2})
    server = tiny.server(0)
    assert server.may_end_with(1).wait() == 1
    words = server.final_message()
    assert (words["result"], words["reason"]) == ("Failed", "CheckpointError")
    assert "s4://bucket/folder cannot be opened: Protocol not known: s4" in str(words["message"])
    assert "a scheme that fsspec supports" in str(words["message"])
    assert "planned after" not in server.output()
