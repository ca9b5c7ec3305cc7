"""A dry run checks a job with several servers, and never touches the job's checkpoints."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from backstay_cli.dry_run import CheckOutcome, checks_of, dry_job, lines, run_dry
from backstay_cli.main import app
from backstay_client.jobfiles.script_job import ScriptOptions, job_of_script, localise_script
from backstay_client.view.follow import JobView
from backstay_spec.job_report import CheckpointStatus, JobReport
from backstay_spec.validation import parse_job

SCRIPT = Path(__file__)
REFUSED = "ScriptFailed: OptimizerError: leaf a depends on leaf b"
FOLDER = Path("/tmp/dry")


def job(**options: Any) -> dict[str, Any]:
    return localise_script(job_of_script(SCRIPT, ScriptOptions(**options)), SCRIPT)


def end(phase: str = "Succeeded", **more: Any) -> JobView:
    rows = {"step": 2, "goal_steps": 2, "loss": 0.5}
    rows["checkpoint"] = CheckpointStatus(step=2, uri="uri")
    rows |= {name: more.pop(name) for name in JobReport.model_fields if name in more}
    return JobView("a", "default", phase=phase, report=JobReport(**rows), **more)


def readable(uri: str) -> tuple[bool, str]:
    return True, f"{uri} was read"


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_the_job_of_a_dry_run_is_valid_and_small_and_writes_only_into_its_folder(
    servers: int, workers: int, data: st.DataObject
) -> None:
    backups = str(data.draw(st.integers(0, workers - 1)))
    given_job = job(servers=servers, workers=workers, backups=backups, checkpoint="/mine", continue_from="Any")
    before = copy.deepcopy(given_job)
    dry = dry_job(given_job, FOLDER)
    assert given_job == before
    spec = dry["spec"]
    assert 2 <= spec["parameterServers"]["replicas"] <= 4
    assert 1 <= spec["workers"]["replicas"] <= min(workers, 4)
    assert spec["checkpoint"] == {"uri": "/tmp/dry/dry-run-checkpoints"}
    parse_job(dry)


def outcomes(found: list[CheckOutcome]) -> dict[str, str]:
    return {check.name: check.outcome for check in found}


def test_each_check_has_an_outcome() -> None:
    dry = dry_job(job(), FOLDER)
    good = checks_of(end(metrics={"accuracy": 0.5}), dry, readable)
    assert set(outcomes(good).values()) == {"ok"}
    assert "  evaluation         ok: accuracy 0.5" in lines(good)
    assert outcomes(checks_of(end(), dry, readable))["evaluation"] == "not checked", "there is no `evaluate`"
    bad = checks_of(end(evaluation_error="at step 2: KeyError"), dry, readable)
    assert outcomes(bad)["evaluation"] == "failed"
    torn = checks_of(end(), dry, lambda uri: (False, "it is torn"))
    assert [check.text for check in torn if check.outcome == "failed"] == ["it is torn"]
    after = checks_of(end("Failed", message="AfterTrainingFailed: exit code 3"), dry, readable)
    assert outcomes(after)["2 updates"] == "ok"
    assert outcomes(after)["end of the script"] == "failed"


def test_what_was_not_reached_is_not_checked() -> None:
    view = end("Failed", step=0, checkpoint=None, message="ScriptFailed: KeyError: 'x'")
    found = checks_of(view, dry_job(job(), FOLDER), readable)
    assert outcomes(found) == {
        "several servers": "not checked",
        "2 updates": "failed",
        "evaluation": "not checked",
        "checkpoint": "not checked",
    }
    assert found[1].text == "ScriptFailed: KeyError: 'x'"


@pytest.mark.parametrize(("chosen", "outcome"), [(False, "failed"), (True, "warning")])
def test_an_optimizer_that_needs_one_server_is_found_even_if_the_job_has_one(
    tmp_path: Path, chosen: bool, outcome: str
) -> None:
    """A job with one server trains, so it is only a warning if the user chose one server."""
    servers = []

    def run(changed: dict[str, Any]) -> JobView | None:
        servers.append(changed["spec"]["parameterServers"]["replicas"])
        refused = servers[-1] > 1
        return end("Failed", step=0, checkpoint=None, message=REFUSED) if refused else end(checkpoint=None)

    found = run_dry(job(), tmp_path, run, chosen=chosen)
    assert servers == [2, 1]
    assert outcomes(found)["several servers"] == outcome
    assert outcomes(found)["2 updates"] == "ok"
    servers.clear()
    assert outcomes(run_dry(job(servers=2), tmp_path, run, chosen=True))["several servers"] == "failed"
    assert servers == [2]


def test_options_that_keep_files_are_refused() -> None:
    for words in (["--output", "json"], ["--data-dir", "x"], ["--trace", "x"]):
        refused = CliRunner().invoke(app, ["run", "--dry-run", *words, str(SCRIPT)])
        assert (refused.exit_code, "--dry-run cannot be used with" in refused.stderr) == (2, True)


def test_fields_without_a_value_are_as_absent_in_a_dry_run(tmp_path: Path) -> None:
    spec = {"image": "x", "command": ["python"], "parameterServers": None, "workers": {"replicas": None}}
    made = dry_job({"metadata": {"name": "a"}, "spec": spec}, tmp_path)
    assert (made["spec"]["parameterServers"]["replicas"], made["spec"]["workers"]["replicas"]) == (2, 1)
