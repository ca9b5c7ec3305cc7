"""Words, values and objects that a user writes reach the script, the job and the errors unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from between import put
from hypothesis import given
from hypothesis import strategies as st

from backstay_client.creating import HELD
from backstay_client.embedded.run_folder import new_folder
from backstay_client.embedded.session import for_scripts
from backstay_client.errors import BadInput
from backstay_client.finding.clusters import Where, default_kubeconfig
from backstay_client.finding.known_runs import state_folder
from backstay_client.jobfiles.jobfile import (
    check,
    is_script,
    load_job,
    read_job,
    refuse_unwritable,
    refuse_what_cannot_run,
    validated,
)
from backstay_client.jobfiles.script_job import ScriptOptions, escaped, job_of_script
from backstay_cluster.kubelet.expand import expand

JOB = "apiVersion: backstay.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\nspec: {image: x%s}\n"


@pytest.fixture
def write(tmp_path: Path):
    def made(text: str, name: str = "job.yaml") -> Path:
        file = tmp_path / name
        put(file, text)
        return file

    return made


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_a_word_reaches_the_script_as_it_was_written(word: str) -> None:
    assert expand(escaped(word), {"HOME": "/root", "A": "b"}) == word


def test_the_words_of_a_script_are_escaped_and_may_be_thousands(write) -> None:
    script = write("", "train.py")
    assert job_of_script(script, arguments=["$(HOME)"])["spec"]["command"][-1] == "$$(HOME)"
    assert len(job_of_script(script, arguments=["1"] * 3000)["spec"]["command"]) == 3002
    with pytest.raises(BadInput, match=r"the script with its arguments: has 5002 items: must have at most 4096"):
        job_of_script(script, arguments=["1"] * 5000)
    with pytest.raises(BadInput, match=r'^word 3 of the script with its arguments is "a\\udcff", which is not UTF-8'):
        job_of_script(script, arguments=["1", "a\udcff"])


def test_a_job_with_generate_name_gets_a_name_as_from_an_api_server(write) -> None:
    file = write(JOB.replace("name: a", "generateName: run-") % "")
    names = {read_job(file)["metadata"]["name"] for _ in range(20)}
    assert len(names) > 1
    for name in names:
        assert name.startswith("run-")
        assert len(name) == 9
        check({**read_job(file), "metadata": {"name": name}}, "it")


@pytest.mark.parametrize(
    ("value", "quoted"), [("yes", "yes"), ("010", "010"), ("1.50", "1.50"), ("No", "No"), ("0x1F", "0x1F")]
)
def test_the_advice_to_quote_quotes_what_the_user_wrote(write, value: str, quoted: str) -> None:
    for spec in (f", args: [a, {value}]", f", env: [{{name: A, value: {value}}}]"):
        file = write("# first\n---\n" + JOB % spec)
        with pytest.raises(BadInput, match=f'write "{quoted}" in quotes'):
            read_job(file)


def test_the_other_objects_of_a_file_are_kept_in_their_order(write) -> None:
    others = "apiVersion: v1\nkind: Secret\nmetadata: {name: s}\n---\n"
    file = write(others + JOB % "" + "---\n\n---\napiVersion: v1\nkind: PersistentVolume\nmetadata: {name: v}\n")
    loaded = load_job(file)
    assert loaded.job["metadata"]["name"] == "a"
    assert [one["kind"] for one in loaded.others] == ["Secret", "PersistentVolume"]
    assert ("v1", "Secret") in HELD
    assert ("v1", "PersistentVolume") not in HELD
    assert validated(loaded, file)["spec"] == {"image": "x"}
    with pytest.raises(BadInput, match="holds 2 TrainingJobs"):
        load_job(write(JOB % "" + "---\n" + JOB % ""))


@pytest.mark.parametrize(
    ("name", "text", "script"),
    [
        ("train.py", "kind: TrainingJob", True),
        ("train", "import backstay\n", True),
        ("train", "#!/usr/bin/env python3\nx = 1\n", True),
        ("train", "#!/bin/sh\necho\n", False),
        ("job", JOB % "", False),
        ("job", "kind: TrainingJob\n", False),
        ("job.yml", "x = 1\n", False),
        ("job", "a: [", False),
    ],
)
def test_a_script_is_known_by_its_name_or_its_content(write, name: str, text: str, script: bool) -> None:
    assert is_script(write(text, name)) is script


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbfimport backstay\n", b"# -*- coding: latin-1 -*-\nname = '\xe9'\n", b"x = 1\r\ny = 2\r\n"]
)
def test_a_script_is_read_in_the_encoding_in_which_python_reads_it(tmp_path: Path, content: bytes) -> None:
    script = tmp_path / "train"
    put(script, content)
    assert is_script(script)
    put(script, b"x = '\xe9'\n")
    assert not is_script(script)


def test_the_items_of_a_list_are_objects_of_the_file(write) -> None:
    """`kubectl get -o yaml` writes such a list."""
    job = json.dumps(yaml.safe_load(JOB % ""))
    config = '{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {}}'
    loaded = load_job(write(f"kind: List\napiVersion: v1\nitems: [{config}, {job}]\n"))
    assert loaded.job["kind"] == "TrainingJob"
    assert [other["kind"] for other in loaded.others] == ["ConfigMap"]
    file = write(f"kind: List\nitems:\n- {config}\n- {job[:-1]}, 'extra': 010}}\n")
    assert load_job(file).written == {"extra": "010"}
    with pytest.raises(BadInput, match="holds 0 TrainingJobs"):
        load_job(write(f"kind: List\nitems: [{config}, {config}]\n"))


def test_a_job_that_would_wait_indefinitely_is_refused(write) -> None:
    file = write(JOB % ", runPolicy: {suspend: true}")
    with pytest.raises(BadInput, match=r"suspend is true, so the job would create no pods and never end\. Set it to"):
        refuse_what_cannot_run(read_job(file), file)
    file = write(JOB % ", args: [train.py]")
    with pytest.raises(BadInput, match=r'write spec.command, such as \["python", "train.py"\]'):
        refuse_what_cannot_run(read_job(file), file)
    refuse_what_cannot_run(read_job(write(JOB % ", command: [a], args: [b]")), file)


def test_files_that_will_be_written_are_tried_and_left_as_they_were(tmp_path: Path) -> None:
    old = tmp_path / "old"
    put(old, "kept")
    refuse_unwritable(old, "--trace")
    refuse_unwritable(tmp_path / "new", "--trace")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old", "kept")]
    for place in (tmp_path, old / "below", tmp_path / "no" / "file"):
        with pytest.raises(BadInput, match=f"--trace {place} cannot be written: "):
            refuse_unwritable(place, "--trace")


def test_a_folder_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    put(tmp_path / "file", "")
    """Not each caller has one."""
    with pytest.raises(BadInput, match=f"in {tmp_path}/file/runs.*: .*Name another one with --data-dir"):
        new_folder("a", tmp_path / "file", option="--data-dir")
    with pytest.raises(BadInput, match=r"Not a directory\. Change to a folder of yours"):
        new_folder("a", tmp_path / "file")


def test_a_user_without_a_home_has_a_state_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert state_folder({}).name.startswith("backstay-")
    assert default_kubeconfig(Where()) is None


def test_processes_of_backstay_do_not_get_what_is_meant_for_the_script() -> None:
    environ = {"PYTHONWARNINGS": "error", "PYTHONPATH": "/a", "PYTHONHOME": "/b", "PYTHONINSPECT": "1", "A": "PYTHON"}
    assert for_scripts(environ) == {"PYTHONWARNINGS": "error", "PYTHONINSPECT": "1"}
    assert ScriptOptions().given() == []
