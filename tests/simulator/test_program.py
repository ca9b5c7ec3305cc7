"""The command prints text and JSON, writes traces as `backstay trace` does, fits steps, and refuses bad input."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import trace_format
import yaml
from between import put
from typer.testing import CliRunner

from backstay_cli.main import app

from .conftest import job_of

SMALL = ("--set", "steps=20", "--set", "step.seconds=0.2", "--set", "model.bytes=1e6")
ENOUGH = (*SMALL, "--set", "steps=60")
"""A fit needs more updates."""


@pytest.fixture
def job(tmp_path: Path) -> str:
    path = tmp_path / "job.yaml"
    put(path, yaml.safe_dump(job_of(backups=1, standbys=1).to_dict()))
    return str(path)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_the_result_as_json_is_the_same_each_time(job: str) -> None:
    one, same = (run(job, *SMALL, "--seeds", "2", "--output", "json") for _ in range(2))
    assert one.exit_code == 0
    assert one.stdout == same.stdout
    found = json.loads(one.stdout)
    assert [each["seed"] for each in found["runs"]] == [0, 1]
    assert found["assumptions"]["step"]["seconds"] == 0.2
    assert found["summary"]["updates"] == {"p10": 20, "p50": 20, "p90": 20}
    assert found["runs"][0]["workerSeconds"]["applied"] > 0


def test_nulls_and_whole_numbers_are_what_the_api_server_makes_of_them(job: str, tmp_path: Path) -> None:
    plain, odd = yaml.safe_load(Path(job).read_text()), tmp_path / "odd.yaml"
    plain["spec"]["workers"] = {"replicas": 2}
    plain["spec"]["parameterServers"]["replicas"] = 1
    put(odd, yaml.safe_dump(plain).replace("replicas: 2\n", "replicas: 2.0\n    podsPerRank: null\n", 1))
    assert "podsPerRank: null" in odd.read_text()
    put(Path(job), yaml.safe_dump(plain))
    one, other = (run(path, *SMALL, "--output", "json") for path in (job, str(odd)))
    assert other.exit_code == 0, other.stderr
    assert one.stdout == other.stdout


def test_a_trace_has_the_format_of_backstay_trace_and_can_be_fitted(job: str, tmp_path: Path) -> None:
    out = tmp_path / "simulated.trace.json"
    assert run(job, *ENOUGH, "--set", "step.sigma=0.2", "--set", "step.seconds=0.7", "--trace", str(out)).exit_code == 0
    trace_format.check(json.loads(out.read_text()))
    fitted = run(job, *ENOUGH, "--from", str(out), "--output", "json")
    assert fitted.exit_code == 0
    fit = json.loads(fitted.stdout)["fit"]
    assert fit["step"]["seconds"] == pytest.approx(0.7, rel=0.1)
    assert fit["step"]["sigma"] == pytest.approx(0.2, rel=0.2)
    assert abs(fit["meanError"]) < 0.1
    assert 0 < fit["distance"] < 0.2
    text = run(job, *SMALL, "--from", str(out)).stdout
    assert "error of the fit" in text
    assert "The rates of failures" in text


def test_the_text_names_what_was_simulated(job: str) -> None:
    shown = run(job, *SMALL, "--set", "failures=[{what: Worker, everySeconds: 3}]").stdout
    assert "20 updates, the job succeeded" in shown
    assert "goodput" in shown
    assert "of Worker" in shown


def test_all_assumptions_can_be_printed_and_given_again(job: str, tmp_path: Path) -> None:
    printed = run("--print-assumptions", "--set", "step.seconds=3")
    assert yaml.safe_load(printed.stdout)["step"]["seconds"] == 3
    path = tmp_path / "assumptions.yaml"
    put(path, printed.stdout)
    again = run("--print-assumptions", "--assume", str(path))
    assert again.stdout == printed.stdout


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--set", "steep.seconds=1"], "steep"),
        (["--set", "step.seconds=-1"], "step.seconds"),
        (["--set", "step.seconds"], "NAME=VALUE"),
        (["--set", "failures=[{what: Moon}]"], "failures.0.what"),
        (["--assume", "missing.yaml"], "missing.yaml"),
        (["--from", "missing.json"], "missing.json"),
        (["--output", "xml"], "--output"),
    ],
)
def test_bad_input_is_refused_with_its_name(job: str, arguments: list[str], error: str) -> None:
    refused = run(job, *arguments)
    assert refused.exit_code == 2
    assert error in refused.stderr


def test_a_failure_needs_exactly_one_interval(job: str) -> None:
    for failure in ("{what: Worker}", "{what: Worker, meanSeconds: 1, everySeconds: 1}"):
        refused = run(job, "--set", f"failures=[{failure}]")
        assert refused.exit_code == 2
        assert "meanSeconds" in refused.stderr


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"{", "is not a trace that backstay trace wrote"),
        (b'{"traceEvents": 5}', "has no traceEvents"),
        (b"\x1f\x8b\x08", "cannot be read: Compressed file ended"),
        (gzip.compress(b"{}" * 99, mtime=0)[:-9] + b"x", "cannot be read"),
    ],
)
def test_a_trace_that_cannot_be_read_is_named(job: str, tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "trace"
    if content is not None:
        put(file, content)
    result = run(job, *SMALL, "--from", str(file))
    assert result.exit_code == 2
    assert says in result.stderr
    assert "Traceback" not in result.stderr
