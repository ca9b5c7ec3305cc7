"""The command refuses bad input whole with exit status 2, and makes a valid job of a script."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import pty
from dataclasses import replace
from pathlib import Path
from typing import IO, Any, cast

import pytest
import yaml
from between import put
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from backstay_cli import report
from backstay_cli.main import app
from backstay_cli.run import LineWriter
from backstay_cli.view import LiveDisplay
from backstay_client.creating import claims_of
from backstay_client.errors import BadInput
from backstay_client.jobfiles.jobfile import folder_of, localise, read_job, variables_of, with_variables
from backstay_client.jobfiles.script_job import ScriptOptions, job_of_script, localise_script
from backstay_client.show.lines import LineDisplay
from backstay_client.view.follow import view_of
from backstay_spec.errors import SpecErrors
from backstay_spec.validation import parse_job

RUNNER = CliRunner()
EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/job.yaml"))
JOB: dict[str, Any] = {
    "apiVersion": "backstay.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "a"},
    "spec": {"image": "x", "command": ["python", "train.py"]},
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_every_example_is_a_right_job(path: Path) -> None:
    assert RUNNER.invoke(app, ["validate", str(path)]).exit_code == 0
    assert (path.parent / "train.py").is_file()


def test_all_mistakes_of_a_file_are_named_with_their_paths(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    wrong = {**JOB, "spec": {**JOB["spec"], "workers": {"replica": 3}, "update": {"mode": "Sink"}}}
    put(path, yaml.safe_dump(wrong))
    result = RUNNER.invoke(app, ["validate", str(path)])
    assert result.exit_code == 2
    assert "spec.workers.replica" in result.stderr
    assert "spec.update.mode" in result.stderr
    for command in (["run", str(path)], ["run", str(path), "--output", "json"]):
        again = RUNNER.invoke(app, command)
        assert again.exit_code == 2
        assert again.stdout == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"a: [", "is not YAML"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"", "holds 0 TrainingJobs"),
        (b"a: 1\na: 2\n", "is duplicated"),
        (b"a: " + b"9" * 6000, "invalid value"),
        (b"[" * 5000, "deeper than"),
        (
            b"l0: &l0 [1]\n"
            + b"".join(b"l%d: &l%d [%s]\n" % (n, n, b",".join([b"*l%d" % (n - 1)] * 9)) for n in range(1, 9)),
            "with its aliases expanded",
        ),
        (b"- 1\n", "must be a mapping"),
        (b"kind: TrainingJob\n---\nkind: TrainingJob\n", "holds 2 TrainingJobs"),
        (b"? {a: 1}\n: 2\n", "is not YAML"),
        (b"[" * 5000, "job.yaml"),
    ],
)
def test_a_file_without_a_job_is_refused_with_the_reason(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "job.yaml"
    put(path, content)
    with pytest.raises(BadInput, match=says):
        read_job(path)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"apiVersion": ["v1"], "kind": "Service"}, r": document \d: apiVersion is \['v1'\]: must be a string"),
        ({"apiVersion": "v1", "kind": {"a": 1}}, r": document \d: kind is \{'a': 1\}: must be a string"),
        ({"apiVersion": "v1", "kind": "Service", "metadata": "s"}, "a Service: metadata is 's': must be a mapping"),
        ({"apiVersion": "v1", "kind": "Secret", "metadata": {}}, "a Secret: metadata is {}: must be a mapping with a"),
        (
            {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "s"}, "stringData": {"token": 10}},
            'stringData.token is 10: must be a string: write "10"',
        ),
        (
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "s"}, "data": ["a"]},
            r"data is \['a'\]: must be a mapping",
        ),
    ],
)
def test_an_object_beside_the_job_of_an_invalid_form_is_named(tmp_path: Path, other: object, says: str) -> None:
    path = tmp_path / "job.yaml"
    put(path, "\n---\n".join([EXAMPLES[0].read_text(), yaml.safe_dump(other)]))
    with pytest.raises(BadInput, match=says):
        read_job(path)


@pytest.mark.parametrize("given", [["--checkpoint", ""], ["--data-dir="], ["--workers", "1", "--trace", ""]])
def test_an_option_with_an_empty_value_is_refused(script: str, given: list[str]) -> None:
    """An unset variable of the shell would otherwise name the current folder."""
    result = RUNNER.invoke(app, ["run", *given, script])
    assert result.exit_code == 2
    assert f"{given[-2] if given[-1] == '' else given[-1][:-1]} is empty" in result.stderr
    assert printed(script, "")["spec"]["command"][-1] == "", "an argument of the script may be empty"


def test_a_checkpoint_folder_that_is_a_file_is_refused_before_the_job(script: str) -> None:
    result = RUNNER.invoke(app, ["run", "--checkpoint", script, script])
    assert result.exit_code == 2
    assert "is a file: must be a folder" in result.stderr
    result = RUNNER.invoke(app, ["run", "--checkpoint", f"/{'n' * 300}", script])
    assert result.exit_code == 2
    assert "cannot be read: File name too long" in result.stderr, "as a folder without permission, which root can read"


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("s3:ck", "a path without '//' after the scheme: must be s3://ck for the scheme s3, or ./s3:ck for a folder"),
        ("http://localhost/x", "must be a place to write"),
    ],
)
def test_a_checkpoint_folder_that_cannot_be_written_is_refused_before_the_job(script: str, uri: str, why: str) -> None:
    result = RUNNER.invoke(app, ["run", "--checkpoint", uri, script])
    assert result.exit_code == 2
    assert why in result.stderr


@pytest.mark.parametrize("uri", ["nosuch://x", "simplecache::nosuch://x"])
def test_a_checkpoint_folder_that_no_package_opens_is_refused_before_the_job(script: str, uri: str) -> None:
    result = RUNNER.invoke(app, ["run", "--checkpoint", uri, script])
    assert result.exit_code == 2
    assert f"the checkpoint folder {uri} cannot be opened on this machine" in result.stderr


@given(st.text(max_size=200))
@settings(deadline=None, max_examples=60)
def test_no_text_makes_the_reader_fail_otherwise(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    path = tmp_path_factory.mktemp("y") / "job.yaml"
    put(path, text.encode(errors="surrogatepass"))
    with pytest.raises(BadInput):
        read_job(path)


def test_a_missing_file_and_a_missing_script(tmp_path: Path) -> None:
    for name in ("no.yaml", "no.py"):
        result = RUNNER.invoke(app, ["run", str(tmp_path / name)])
        assert result.exit_code == 2
        assert str(tmp_path / name) in result.stderr


def test_print_job_gives_a_file_that_runs(tmp_path: Path) -> None:
    script = tmp_path / "my_Net 2.py"
    put(script, "")
    options = ["--servers", "2", "--workers", "3", "--backups", "1", "--mode", "Sync", "--print-job"]
    result = RUNNER.invoke(app, ["run", *options, str(script), "--", "--lr", "0.1"])
    assert result.exit_code == 0, result.stderr
    job = yaml.safe_load(result.stdout)
    assert job["metadata"]["name"] == "my-net-2"
    assert job["spec"]["command"] == ["python", "my_Net 2.py", "--lr", "0.1"]
    spec = parse_job(job).spec
    assert (spec.parameter_servers.replicas, spec.workers.replicas, spec.update.backups) == (2, 3, 1)


@given(st.text(min_size=1, max_size=60).filter(lambda text: "/" not in text and "\0" not in text))
@settings(deadline=None, max_examples=60)
def test_any_script_name_makes_a_name_that_a_job_may_have(tmp_path_factory: pytest.TempPathFactory, stem: str) -> None:
    script = tmp_path_factory.mktemp("s") / (stem[:60].encode()[:60].decode(errors="ignore") + ".py")
    put(script, "")
    job_of_script(script, ScriptOptions(workers=1, mode="Async"))


def printed(*arguments: str, **more: Any) -> dict[str, Any]:
    """Returns the job that `backstay run --print-job` makes of these arguments."""
    result = RUNNER.invoke(app, ["run", "--print-job", *arguments], **more)
    assert result.exit_code == 0, result.stderr
    job: dict[str, Any] = yaml.safe_load(result.stdout)
    parse_job(job)
    return job


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "net.py"
    put(path, "")
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "passed"),
    [
        (["--lr", "0.1", "-v", "data.csv"], ["--lr", "0.1", "-v", "data.csv"]),
        (["--", "--lr", "0.1"], ["--lr", "0.1"]),
        (["--", "--workers", "7", "--output=x"], ["--workers", "7", "--output=x"]),
        (["x", "--", "--name"], ["x", "--", "--name"]),
        ([], []),
    ],
)
def test_what_follows_a_script_are_its_own_arguments(script: str, arguments: list[str], passed: list[str]) -> None:
    """Options after the script belong to the script, as with python. Options before the script belong to backstay."""
    for options in (["--workers", "3"], ["--workers=3"], ["--workers", "3", "--"]):
        job = printed(*options, script, *arguments)
        assert job["spec"]["command"] == ["python", "net.py", *passed]
        assert job["spec"]["workers"]["replicas"] == 3


@pytest.mark.parametrize("option", ["--workers", "--name=x", "--checkpoint", "--output", "--print-job", "--help"])
def test_an_option_of_backstay_after_a_script_is_refused(script: str, option: str) -> None:
    """It could be meant for the script or for backstay, and must not go silently to the wrong one."""
    result = RUNNER.invoke(app, ["run", script, "--lr", "1", option, "4"])
    name = option.partition("=")[0]
    assert result.exit_code == 2
    assert result.stdout == ""
    assert f"{name} follows the script {script}" in result.stderr
    assert f"backstay run {script} -- {name}" in result.stderr


def test_options_may_follow_a_file_which_has_no_arguments(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    put(path, yaml.safe_dump(JOB))
    result = RUNNER.invoke(app, ["run", str(path), "--print-job"])
    assert (result.exit_code, yaml.safe_load(result.stdout)) == (0, JOB)
    for extra in (["--lr", "3"], ["data.csv"]):
        assert RUNNER.invoke(app, ["run", str(path), *extra]).exit_code == 2


def test_the_options_for_scripts_reach_the_job(script: str, tmp_path: Path) -> None:
    checkpoints = ["--checkpoint", str(tmp_path / "ck"), "--every-steps", "5", "--every-seconds", "0", "--evaluator"]
    checkpoints += ["--continue-from", "Any"]
    spec = parse_job(
        printed("--standbys", "1", "--gpus", "2", "--env", "A=1", "--env", "B=x=y", *checkpoints, script)
    ).spec
    assert spec.parameter_servers.standbys == 1
    (container,) = spec.workers.template["spec"]["containers"]
    assert container == {"name": "trainer", "resources": {"limits": {"nvidia.com/gpu": "2"}}}
    assert (spec.checkpoint.uri, spec.checkpoint.every_steps) == (str(tmp_path / "ck"), 5)
    assert spec.checkpoint.continue_from == "Any"
    assert spec.checkpoint.every_seconds == 0
    assert spec.evaluator is not None
    assert spec.env == [{"name": "A", "value": "1"}, {"name": "B", "value": "x=y"}]


def test_the_best_checkpoint_is_kept_by_its_metric(script: str) -> None:
    """A name may have a colon; there is an evaluator, which it needs."""
    for text, kept in (
        ("accuracy:Max", ("accuracy", "Max")),
        ("loss:min", ("loss", "Min")),
        ("a:b:Max", ("a:b", "Max")),
        (" accuracy : Max", ("accuracy", "Max")),
    ):
        spec = parse_job(printed("--checkpoint", "ck", "--keep-best", text, script)).spec
        assert spec.checkpoint.keep_best is not None
        assert (spec.checkpoint.keep_best.metric, spec.checkpoint.keep_best.mode) == kept
        assert spec.evaluator is not None
    refused = {
        "loss:least": '--keep-best is "least": must be Max or Min',
        ":Min": "--keep-best ",
        "held": "--keep-best held lacks the metric or the direction: must be METRIC:Max to keep the largest",
        "Max": "--keep-best Max lacks the metric or the direction",
    }
    for text, message in refused.items():
        result = RUNNER.invoke(app, ["run", "--checkpoint", "ck", "--keep-best", text, script])
        assert result.exit_code == 2
        assert message in result.stderr


@pytest.mark.parametrize(
    "option",
    [
        ["--every-steps", "5"],
        ["--every-seconds", "5"],
        ["--evaluator"],
        ["--keep-best", "accuracy:Max"],
        ["--continue-from", "Any"],
    ],
)
def test_an_option_that_needs_checkpoints_reports_it(script: str, option: list[str]) -> None:
    result = RUNNER.invoke(app, ["run", *option, script])
    assert result.exit_code == 2
    assert f"{option[0]} needs --checkpoint" in result.stderr


def test_variables_come_from_the_command_line_or_from_the_environment() -> None:
    assert variables_of(["A=", "B", "C=1=2"], {"B": "here"}) == {"A": "", "B": "here", "C": "1=2"}
    job = {**JOB, "spec": {**JOB["spec"], "env": [{"name": "A", "value": "old"}, {"name": "Z", "value": "kept"}]}}
    assert with_variables(job, {"A": "new"})["spec"]["env"] == [
        {"name": "Z", "value": "kept"},
        {"name": "A", "value": "new"},
    ]
    assert job["spec"]["env"][0]["value"] == "old"
    for wrong in ("=x", "", "BACKSTAY_ROLE=worker", "NOT_SET", "ä=1", "a\nb=1"):
        with pytest.raises(BadInput, match="--env"):
            variables_of([wrong], {})


def test_a_relative_checkpoint_of_a_file_starts_at_its_folder(tmp_path: Path) -> None:
    """A cluster cannot read it, and `validate` reports that."""
    path = tmp_path / "job.yaml"
    relative = {**JOB, "spec": {**JOB["spec"], "checkpoint": {"uri": "out/ck"}}}
    put(path, yaml.safe_dump(relative))
    assert read_job(path)["spec"]["checkpoint"]["uri"] == str(tmp_path / "out" / "ck")
    assert printed(str(path))["spec"]["checkpoint"]["uri"] == str(tmp_path / "out" / "ck")
    result = RUNNER.invoke(app, ["validate", str(path)])
    assert result.exit_code == 0
    assert "a cluster needs an absolute path or a URI" in result.stdout
    with pytest.raises(SpecErrors, match="only `backstay run` accepts a relative one"):
        parse_job(relative)
    for uri in ("s3://bucket/ck", "/ck", "file:///ck"):
        put(path, yaml.safe_dump({**JOB, "spec": {**JOB["spec"], "checkpoint": {"uri": uri}}}))
        assert read_job(path)["spec"]["checkpoint"]["uri"] == uri
        assert "note" not in RUNNER.invoke(app, ["validate", str(path)]).stdout


def test_a_notebook_a_script_and_a_folder_are_refused_with_their_kind(script: str, tmp_path: Path) -> None:
    notebook = tmp_path / "my notes.ipynb"
    put(notebook, '{"cells": []}')
    for command in ("run", "validate"):
        result = RUNNER.invoke(app, [command, str(notebook)])
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.count("\n") == 1
        assert "is a notebook" in result.stderr
        assert f"jupyter nbconvert --to script '{notebook}'" in result.stderr
    assert "is a Python script" in RUNNER.invoke(app, ["validate", script]).stderr
    for command in ("run", "validate"):
        result = RUNNER.invoke(app, [command, str(tmp_path)])
        assert result.exit_code == 2
        assert f"{tmp_path} is a folder: must be the path of a training script (.py) or a TrainingJob" in result.stderr


def test_options_of_scripts_are_refused_for_files(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    put(path, yaml.safe_dump(JOB))
    result = RUNNER.invoke(app, ["run", str(path), "--workers", "3"])
    assert result.exit_code == 2
    assert "--workers" in result.stderr


def test_a_job_is_localised_to_the_folder_of_its_file(tmp_path: Path) -> None:
    job = {**JOB, "spec": {**JOB["spec"], "code": {"configMap": "c"}}}
    local = localise(job, tmp_path)
    assert local["spec"]["workingDir"] == str(tmp_path)
    assert "code" not in local["spec"]
    assert job["spec"]["code"] == {"configMap": "c"}
    assert localise({**JOB, "spec": {**JOB["spec"], "workingDir": "src"}}, tmp_path)["spec"]["workingDir"] == str(
        tmp_path / "src"
    )
    assert localise({**JOB, "spec": {**JOB["spec"], "workingDir": "/x"}}, tmp_path)["spec"]["workingDir"] == "/x"
    empty = localise({"metadata": {"namespace": None}, "spec": {**JOB["spec"], "workingDir": None}}, tmp_path)
    assert (empty["metadata"], empty["spec"]["workingDir"]) == ({"namespace": "default"}, str(tmp_path))
    claims = {**JOB, "spec": {"checkpoint": {"volume": {"persistentVolumeClaim": {"claimName": "ck"}}}}}
    assert claims_of(claims) == ["ck"]


def test_validate_warns_of_fields_that_a_pod_does_not_have(tmp_path: Path) -> None:
    container = {"name": "trainer", "resource": {}}
    pod = {"nodeselector": {"a": "b"}, "affinity": {"$patch": "replace"}, "containers": [container]}
    workers = {"replicas": 2, "template": {"spec": pod}}
    checkpoint = {"volume": {"persistentVolumeClaim": {"claimName": "ck", "readonly": True}}}
    path = tmp_path / "job.yaml"

    def validate(spec: dict[str, object]) -> list[str]:
        put(path, yaml.safe_dump({**JOB, "spec": {**JOB["spec"], **spec}}))
        result = RUNNER.invoke(app, ["validate", str(path)])
        assert result.exit_code == 0, result.output
        return [line for line in result.stdout.splitlines() if "warning" in line]

    prefix, end = f"{path}: warning: spec.", " is not a field that Kubernetes defines"
    assert sorted(validate({"workers": workers, "checkpoint": checkpoint})) == [
        f"{prefix}checkpoint.volume.persistentVolumeClaim.readonly{end}",
        f"{prefix}workers.template.spec.containers[0].resource{end}",
        f"{prefix}workers.template.spec.nodeselector{end}",
    ]
    del container["resource"]
    del pod["nodeselector"]
    assert validate({"workers": workers}) == []
    pod["hostNetwork"] = "yes"
    (warning,) = validate({"workers": workers})
    assert "spec.workers.template has a value of a wrong type" in warning
    assert "hostNetwork" in warning


def test_an_invalid_option_is_named_and_not_the_field_that_it_sets(tmp_path: Path) -> None:
    script = tmp_path / "tr.py"
    put(script, "")

    def refused(*words: str) -> str:
        result = RUNNER.invoke(app, ["run", *words, str(script)])
        assert result.exit_code == 2
        return result.stderr

    assert refused("--workers", "0", "--servers", "0").splitlines() == [
        "error: --servers is 0: must be between 1 and 256",
        "error: --workers is 0: must be between 1 and 10000",
    ]
    assert "error: --gpus is -1: must be a whole number, 0 or more" in refused("--gpus", "-1")
    assert "error: --backups is 2: must be less than --workers," in refused("--backups", "2")
    assert "must be false unless --gradients is Int8 or Int4" in refused("--error-feedback")
    assert refused("--grace", "5").startswith('error: --grace is "5": must be Auto, or a duration')
    assert "spec." not in refused("--mode", "sink", "--gradients", "int9", "--every-steps", "0", "--checkpoint", "x")


@given(st.sampled_from(["Sync", "Async"]), st.sampled_from(["BFloat16", "Int8"]), st.data())
def test_modes_and_codecs_may_have_any_case(mode: str, codec: str, data: st.DataObject) -> None:
    def any_case(word: str) -> str:
        return "".join(data.draw(st.sampled_from([c.lower(), c.upper()])) for c in word)

    grace = None if mode == "Async" else any_case("Auto")
    job = job_of_script(Path(__file__), ScriptOptions(mode=any_case(mode), gradients=any_case(codec), grace=grace))
    assert job["spec"]["update"] == {"mode": mode} | ({} if grace is None else {"grace": "Auto"})
    assert job["spec"]["wire"] == {"gradients": codec}


def test_a_script_runs_in_the_current_folder_as_with_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on this machine, `--print-job` prints a job for a cluster, where the script is in a flat folder."""
    (tmp_path / "src").mkdir()
    put(tmp_path / "src" / "tr.py", "")
    monkeypatch.chdir(tmp_path)
    job = job_of_script(Path("src/tr.py"), arguments=["--lr", "1"])
    assert job["spec"]["command"] == ["python", "tr.py", "--lr", "1"]
    local = localise_script(job, Path("src/tr.py"))["spec"]
    assert (local["workingDir"], local["command"]) == (str(tmp_path), ["python", "src/tr.py", "--lr", "1"])
    assert job["spec"]["command"][1] == "tr.py"


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_a_job_can_be_piped_in_and_runs_in_the_current_folder(name: str) -> None:
    result = RUNNER.invoke(app, ["run", name, "--print-job"], input=yaml.safe_dump(JOB))
    assert result.exit_code == 0, result.stderr
    assert yaml.safe_load(result.stdout) == JOB
    assert folder_of(Path(name)) == Path.cwd()
    assert RUNNER.invoke(app, ["run", name, "--print-job"], input=b"\xff").exit_code == 2
    for script in ("import backstay\nx = {'a': 1}\n", "#!/usr/bin/env python3\n", "print(1)"):
        result = RUNNER.invoke(app, ["run", name], input=script)
        assert (result.exit_code, "each pod reads its script from a file" in result.stderr) == (2, True)


def test_the_shell_completes_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it, typer looks for a shell among the parents of this process, and there may be none.
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = RUNNER.invoke(app, ["--show-completion", "bash"])
    assert "complete" in result.stdout
    words = {"_BACKSTAY_COMPLETE": "complete_bash", "COMP_WORDS": "backstay v", "COMP_CWORD": "1"}
    assert RUNNER.invoke(app, [], env=words, prog_name="backstay").stdout.split() == ["validate"]


STATUS = {
    "phase": "Failed",
    "step": 7,
    "loss": 0.5,
    "examplesPerSecond": 1234.5,
    "conditions": [{"type": "Failed", "status": "True", "reason": "NonFinite", "message": "step 7, rank 1"}],
    "roles": {"Worker": {"desired": 2, "ready": 1, "restarts": 3, "disruptions": 1}, "ParameterServer": {"desired": 1}},
}


def ended_pod(index: int, message: str, code: int = 0) -> dict[str, Any]:
    labels = {"backstay.dev/role": "parameter-server", "backstay.dev/index": str(index)}
    state = {"terminated": {"exitCode": code, "reason": "Error", "message": message}}
    return {
        "metadata": {"name": f"a-ps-{index}", "namespace": "default", "labels": labels},
        "status": {"phase": "Failed", "containerStatuses": [{"name": "trainer", "state": state}]},
    }


def test_the_object_at_the_end_has_what_programs_need(tmp_path: Path) -> None:
    seconds = {"applied": 80.0, "wait": 15.0, "data": 4.7, "send": 0.3}
    traffic = {"carried": 120.0, "exact": 240.0}
    counts = {"trainedParameters": 2_048, "frozenParameters": 1_000_000}
    status = {**STATUS, **counts, "goodput": 0.8, "workerSeconds": seconds, "traffic": traffic}
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": status}
    result = json.dumps({"result": "Failed", "step": 9, "checkpoint": "/c", "metrics": {"accuracy": 0.5, "bad": None}})
    view = view_of(job, [ended_pod(0, result, 1), ended_pod(1, "not JSON")], [])
    view = replace(view, report=view.report.model_copy(update={"metrics": {**view.report.metrics, "bad": math.nan}}))
    found = json.loads(report.as_json(report.summary(view, 1.5, tmp_path)))
    assert found == found | {
        "job": "a",
        "phase": "Failed",
        "reason": "NonFinite",
        "message": "step 7, rank 1",
        "step": 9,
        "seconds": 1.5,
        "examplesPerSecond": 1234.5,
        "loss": 0.5,
        "nonFiniteLoss": None,
        "nonFiniteMetrics": [],
        "metrics": {"accuracy": 0.5, "bad": None},
        "evaluatedStep": 9,
        "failedEvaluation": None,
        "trainMetrics": {},
        "goodput": 0.8,
        "workerSeconds": seconds,
        "traffic": traffic,
        "restarts": 3,
        "disruptions": 1,
        "checkpoint": "/c",
        "logs": str(tmp_path),
        "failedPods": [
            {
                "pod": f"a-ps-{index}",
                "end": f"exit code {code} (Error)",
                "log": str(tmp_path / "default" / f"a-ps-{index}" / "trainer.log"),
            }
            for index, code in ((0, 1),)
        ],
    }
    interrupted = report.summary(view, 1.5, tmp_path, reason="Interrupted", message="stopped")
    assert (interrupted["reason"], interrupted["message"]) == ("Interrupted", "stopped")
    log = tmp_path / "default" / "a-ps-0" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_bytes(b"fine\n\x1b[31mred\xff\n")
    prepared = log.with_name("prep.log")
    put(prepared, "no data\n")
    ended = {"name": "prep", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
    view.pods[0]["status"]["initContainerStatuses"] = [ended]
    text = "\n".join(report.lines(view, 1.5, tmp_path))
    assert "NonFinite: step 7, rank 1" in text
    assert "  goodput 80 % of 100 worker seconds: wait 15 %, data 5 %\n" in text
    assert "  traffic 120 B per update and worker (Exact: 240 B), 2,048 of 1,002,048 values train\n" in text
    assert str(log) in text
    assert f"a-ps-0 ended with exit code 3 (Error): {prepared}\n    | no data\n" in text
    assert "\\x1b[31mred\\xff" in text


def test_traffic_without_codecs_is_named_once(tmp_path: Path) -> None:
    status = {**STATUS, "traffic": {"carried": 240.1, "exact": 240.0}}
    view = view_of({"metadata": {"name": "a", "namespace": "default"}, "status": status}, [], [])
    assert "  traffic 240 B per update and worker" in list(report.lines(view, 1.5, tmp_path))


def test_the_event_of_the_end_is_left_to_the_report() -> None:
    """The report after the end has the same reason and message."""
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {**STATUS, "phase": "Failed"}}
    events = [
        {"type": "Warning", "reason": "Crashed", "message": "worker 1 died"},
        {"type": "Warning", "reason": "Failed", "message": "CrashLoop: worker 1 died 6 times"},
    ]
    lines: list[str] = []
    LineDisplay(lines.append, clock=lambda: 0.0).show(view_of(job, [], events))
    assert [line.split("] ")[1] for line in lines] == ["warning: Crashed: worker 1 died", "a is Failed"]


def test_the_views_show_phase_numbers_deaths_and_events() -> None:
    numbers = {"trainMetrics": {"accuracy": 0.25}, "metrics": {"mse": 0.125}, "evaluatedStep": 5}
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {**STATUS, **numbers, "phase": "Running"}}
    events = [
        {"type": "Warning", "reason": "PodReplaced", "message": "worker 1 died"},
        {"type": "Normal", "reason": "Running", "message": "all there"},
        {"type": "Normal", "reason": "Evaluated", "message": "shown as numbers"},
    ]
    view = view_of(job, [], events)
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(LiveDisplay(console, "hint", clock=lambda: 0.0).render(view))
    console.file.close()
    picture = console.export_text()
    for part in (
        "Running",
        "1,234",
        "0.5",
        "1/2",
        "worker 1 died",
        "hint",
        "accuracy 0.25",
        "evaluation of step 5: mse 0.125",
    ):
        assert part in picture
    assert "shown as numbers" not in picture
    lines: list[str] = []
    now = [0.0]
    display = LineDisplay(lines.append, clock=lambda: now[0])
    display.show(view)
    now[0] = 6.0
    display.show(view)
    display.show(view)
    assert [line.split("] ")[1] for line in lines] == [
        "warning: PodReplaced: worker 1 died",
        "Running: all there",
        "a is Running",
        "evaluation of step 5: mse 0.125",
        "step 7  loss 0.5  1,234 examples/s  accuracy 0.25  pods replaced after 3 crashes and 1 disruption",
    ]


def test_the_traceback_that_all_pods_raised_is_printed_once_and_whole(tmp_path: Path) -> None:
    """The condition has it too, and each pod's log has lines with its own name before it."""
    frames = "".join(f'  File "/x/train.py", line {n}, in f{n}\n    call()\n' for n in range(12))
    traceback = f"Traceback (most recent call last):\n{frames}KeyError: 'nope'\n"
    failed = {"type": "Failed", "status": "True", "reason": "KeyError", "message": f"all 2 pods raised it: {traceback}"}
    job = {
        "metadata": {"name": "a", "namespace": "default"},
        "status": {"phase": "Failed", "conditions": [failed]},
    }
    for index in range(2):
        log = tmp_path / "default" / f"a-ps-{index}" / "trainer.log"
        log.parent.mkdir(parents=True)
        log.write_text(f"12:00:0{index} worker-{index}: connecting\n{traceback}")
    view = view_of(job, [ended_pod(0, "", 1), ended_pod(1, "", 1)], [])
    text = "\n".join(report.lines(view, 1.5, tmp_path))
    assert text.count("Traceback") == 1
    assert all(text.count(f"in f{n}\n") == 1 for n in range(12))
    assert "the same in a-ps-1" in text
    assert "connecting" not in text
    assert "KeyError: all 2 pods raised it: KeyError: 'nope'" in text
    assert "\n  KeyError: 'nope'\n" not in text


def test_t8_a_reader_that_has_ended_does_not_stop_a_job_from_being_followed() -> None:
    """After `| head`, each line failed like a call to the API server, so the command never found the job's end."""
    reads, writes = os.pipe()
    stream = os.fdopen(writes, "w")
    os.close(reads)
    ended = {"kind": "TrainingJob", "metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Succeeded"}}
    writer = LineWriter(stream)
    display = LineDisplay(writer)
    display.show(view_of(ended, [], []))
    display.print(["a line of the script"])
    assert writer.error is None, "the reader of a pipe may end"
    with pytest.raises(BrokenPipeError):
        stream.close()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_t8_a_full_disk_does_not_stop_a_job_and_is_remembered() -> None:
    stream = Path("/dev/full").open("w")  # noqa: SIM115  # what could not be written fails again when it is closed
    writer = LineWriter(stream)
    writer("a line")
    writer("another")
    assert writer.error == "the output cannot be written: No space left on device"
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_t8_a_terminal_that_is_closed_does_not_stop_a_job_and_the_rest_goes_nowhere() -> None:
    main, other = pty.openpty()
    with os.fdopen(other, "w") as stream:
        writer = LineWriter(stream)
        display = LiveDisplay(Console(file=cast(IO[str], writer)), "hint")
        ended = {"kind": "TrainingJob", "metadata": {"name": "a", "namespace": "default"}, "status": {}}
        with display:
            display.show(view_of(ended, [], []))
            os.close(main)
            display.show(view_of(ended, [], []))
            display.print(["a line of the script"])
        writer("a line")
        assert writer.error is None, "as for the reader of a pipe"
        assert os.fstat(stream.fileno()).st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116  # a device


def test_an_error_that_is_not_of_the_output_is_not_hidden() -> None:
    class Failing(io.StringIO):
        def write(self, text: str) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", "a-file")

    with pytest.raises(PermissionError):
        LineWriter(Failing())("a line")
