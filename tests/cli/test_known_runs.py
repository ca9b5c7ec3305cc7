"""Runs on this machine: every command finds them from every folder, while they run and after their end."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from between import put
from digits import PODS, job
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from backstay_cli.main import app
from backstay_cli.plugin import app as plugin
from backstay_cli.run import keep_result
from backstay_client.errors import BadInput
from backstay_client.finding import clusters
from backstay_client.finding.known_runs import KnownRun, ProcessMark, known_runs, register, state_folder
from backstay_client.finding.selection import select
from backstay_client.finding.stored_run import StateFile, StoredApi, jobs_in

RUNNER = CliRunner()
DEAD = ProcessMark(1, 0, "another start of this machine")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user without runs and clusters, in an empty folder."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.setenv("BACKSTAY_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("KUBECONFIG", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(here)
    return tmp_path


def end(run: KnownRun) -> None:
    """Make the run's process one that has ended."""
    record = run.as_record()
    record["process"] = vars(DEAD)
    put(run.folder / "run.json", json.dumps(record))


def started_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def ended_run(folder: Path, found: dict[str, Any], pods: Sequence[dict[str, Any]] = (), **result: Any) -> KnownRun:
    """Returns a run that has ended with this job."""
    run = register(folder, found, ["backstay", "run", "digits.py"])
    state = StateFile(folder)
    state.add([found], pods)
    state.write()
    if result:
        keep_result(run, result)
    end(run)
    return run


def test_a_process_is_recognized_by_its_start_and_not_only_by_its_number() -> None:
    mine = ProcessMark.current()
    assert mine.lives()
    assert not replace(mine, started=mine.started + 1).lives(), "the number was given to another process"
    assert not replace(mine, system="another machine").lives()
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        zombie = ProcessMark(child.pid, started_of(child.pid), mine.system)
        assert not zombie.lives(), "a process that has ended, and whose parent has not read it"


def test_the_state_folder_is_the_users_or_the_one_of_tests(tmp_path: Path) -> None:
    assert state_folder({"BACKSTAY_STATE": "/x", "XDG_STATE_HOME": "/y"}) == Path("/x")
    assert state_folder({"XDG_STATE_HOME": "/y"}) == Path("/y/backstay")
    for ignored in ({}, {"XDG_STATE_HOME": "relative"}):
        assert state_folder(ignored) == tmp_path / "home" / ".local" / "state" / "backstay"


def test_records_of_deleted_folders_are_dropped_and_damaged_ones_ignored(home: Path) -> None:
    for name in ("a", "b", "c"):
        register(home / name, job())
    assert stat.S_IMODE((home / "a" / "run.json").stat().st_mode) == 0o600, "a command may contain a secret"
    (home / "a" / "run.json").unlink()
    put(home / "b" / "run.json", '{"job": ')
    assert [run.folder.name for run in known_runs()] == ["c"]
    assert len(list((home / "state" / "runs").iterdir())) == 2, "only the record of the deleted run is removed"


def test_a_run_is_known_in_its_folder_without_a_state_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(home / "file", "")
    monkeypatch.setenv("BACKSTAY_STATE", str(home / "file"))
    run = register(home / "here" / ".backstay" / "runs" / "digits-1", job())
    assert known_runs() == []
    assert known_runs(home / "here") == [run]


def test_two_runs_in_one_folder_at_the_same_time_are_refused(home: Path) -> None:
    run = register(home / "data", job())
    record = run.as_record()
    parent = ProcessMark(os.getppid(), 0, ProcessMark.current().system)
    record["process"] = vars(replace(parent, started=started_of(parent.pid)))
    put(run.folder / "run.json", json.dumps(record))
    with pytest.raises(BadInput, match=rf"is in use by the job digits \(process {parent.pid}\): name another one"):
        register(home / "data", job())
    end(run)
    keep_result(run, {"step": 1})
    register(home / "data", job())
    assert not (home / "data" / "result.json").exists(), "the result of an earlier run is not the one of this run"


def made(name: str, *, lives: bool, here: bool, age: int) -> KnownRun:
    owner = ProcessMark.current() if lives else DEAD
    return KnownRun(Path(f"/runs/{name}-{age}"), name, "default", (), "/here" if here else "/there", float(-age), owner)


RUNS = st.lists(st.builds(made, st.sampled_from("ab"), lives=st.booleans(), here=st.booleans(), age=st.integers(0, 99)))


@given(RUNS, st.sampled_from([None, "a", "b"]), st.booleans())
def test_the_selected_run_is_the_newest_of_the_first_group(
    runs: list[KnownRun], name: str | None, has_default: bool
) -> None:
    runs = sorted({run.folder: run for run in runs}.values(), key=lambda run: -run.started)
    names = {run.folder: [run.job] for run in runs}
    meant = [run for run in runs if name in (None, run.job)]
    here = Path("/here")
    try:
        selection = select(runs, names, name, here, has_default=has_default)
    except BadInput:
        live = [run for run in meant if run.lives]
        assert not meant or (name is None and len(live) > 1)
        return
    if selection is None:
        assert has_default
        assert not any(run.lives and run.is_of(here) for run in meant)
        return
    run = selection.run
    assert run in meant
    better = [one for one in meant if (one.lives, one.is_of(here)) > (run.lives, run.is_of(here))]
    assert not better
    same = [one for one in meant if (one.lives, one.is_of(here)) == (run.lives, run.is_of(here))]
    assert run.started == max(one.started for one in same)
    assert selection.others == (len(meant) - 1 if name else 0)


def test_a_run_is_named_by_its_folder_or_by_the_last_part_of_it() -> None:
    runs = [made("a", lives=True, here=True, age=1), made("a", lives=False, here=True, age=2)]
    names = {run.folder: ["a"] for run in runs}
    for word in ("/runs/a-2", "../runs/a-2", "a-2"):
        selection = select(runs, names, word, Path("/here"), has_default=True)
        assert selection is not None
        assert (selection.run, selection.by_folder) == (runs[1], True)
    with pytest.raises(BadInput, match="is not the folder of a run"):
        select(runs, names, "./a-2", Path("/here"), has_default=True)
    with pytest.raises(BadInput, match="no run on this machine has a job c; there is a in /runs/a-1; a in /runs/a-2"):
        select(runs, names, "c", Path("/here"), has_default=False)
    with pytest.raises(BadInput, match="no cluster is known"):
        select([], {}, "c", Path("/here"), has_default=False)


def test_a_run_that_has_ended_is_shown_from_every_folder(home: Path) -> None:
    found = job(phase="Succeeded", completionTime="2026-11-23T10:00:00Z")
    run = ended_run(home / "data", found, PODS, step=400, phase="Succeeded")
    log = run.folder / "pods" / "default" / "digits-worker-0-1" / "trainer.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\nthree\n")
    listed = RUNNER.invoke(app, ["list"])
    assert listed.exit_code == 0, listed.stderr
    assert "Succeeded" in listed.stdout
    assert str(home / "data") in listed.stdout
    rows = json.loads(RUNNER.invoke(app, ["list", "-o", "json"]).stdout)
    assert [(row["name"], row["phase"], row["folder"]) for row in rows] == [("digits", "Succeeded", str(home / "data"))]
    for words in (["status"], ["status", "digits"], ["status", "data"], ["status", "../data"]):
        shown = RUNNER.invoke(app, words)
        assert shown.exit_code == 0, shown.stderr
        assert "the ended run in" in shown.stdout
    logs = RUNNER.invoke(app, ["logs", "--rank", "0", "--tail", "2"])
    assert logs.stdout == "two\nthree\n"
    history = RUNNER.invoke(app, ["history"])
    assert "digits in namespace default: Succeeded" in history.stdout
    gone = RUNNER.invoke(app, ["delete", "digits"])
    assert (gone.exit_code, "delete its folder" in gone.stderr) == (2, True)
    result = json.loads((run.folder / "result.json").read_text())
    assert result["command"] == ["backstay", "run", "digits.py"]
    assert result["endTime"] >= result["startTime"]
    assert RUNNER.invoke(plugin, ["list", "--local"]).exit_code == 2, "kubectl does not know runs"


def test_a_job_whose_command_was_killed_is_stopped_and_so_are_its_pods(home: Path) -> None:
    run = ended_run(home / "data", job(), PODS)
    shown = RUNNER.invoke(app, ["status"])
    assert f"CommandEnded: process {DEAD.pid} was killed" in shown.stdout
    assert "Stopped" in shown.stdout
    assert "Ready" not in shown.stdout
    keep_result(run, {"reason": "Interrupted", "message": "stopped at step 250", "step": 250})
    found = asyncio.run(StoredApi(run).get_job("default", "digits"))
    assert (found["status"]["phase"], found["status"]["step"]) == ("Stopped", 250)
    assert "Interrupted: stopped at step 250" in RUNNER.invoke(app, ["status"]).stdout


def test_a_run_that_never_had_a_cluster_is_listed(home: Path) -> None:
    run = register(home / "data", job())
    keep_result(run, {"reason": "EmbeddedClusterFailed", "message": "no addresses"})
    end(run)
    assert "EmbeddedClusterFailed: no addresses" in RUNNER.invoke(app, ["status", "digits"]).stdout


def test_two_runs_of_one_job_are_distinguished(home: Path) -> None:
    ended_run(home / "old", job(), step=1)
    ended_run(home / "new", job(), step=2)
    shown = RUNNER.invoke(app, ["status", "digits", "-o", "json"])
    assert json.loads(shown.stdout)["step"] == 2
    assert "note: 2 runs on this machine have this job; this one is in" in shown.stderr
    assert json.loads(RUNNER.invoke(app, ["status", "old", "-o", "json"]).stdout)["step"] == 1


def test_a_cluster_that_is_being_started_fails_no_command_about_another_run(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T8: `backstay up` in another folder has no kubeconfig yet while its cluster starts, and none while it stops."""
    ended_run(home / "data", job(), step=3)
    register(home / "up", None, ["backstay", "up"])
    for words in (["status", "digits"], ["status", str(home / "data")], ["history", "digits"]):
        shown = RUNNER.invoke(app, words)
        assert shown.exit_code == 0, shown.stderr
    monkeypatch.setattr(clusters, "CHANGES_SECONDS", 0.3)
    asked = RUNNER.invoke(app, ["status", str(home / "up")])
    assert (asked.exit_code, "is being started or stopped: try again" in asked.stderr) == (2, True)


def test_a_command_waits_for_its_run_that_starts_or_stops(home: Path) -> None:
    """T8: the run ends without a cluster while `status` waits for it."""
    run = register(home / "up", job())
    later = threading.Timer(0.5, keep_result, (run, {"reason": "Interrupted", "message": "Ctrl-C"}))
    later.start()
    shown = RUNNER.invoke(app, ["status", str(home / "up"), "-o", "json"])
    later.join()
    assert (shown.exit_code, json.loads(shown.stdout)["phase"]) == (0, "Stopped"), shown.stderr


def test_a_run_that_was_killed_is_stopped_though_a_server_stored_a_history(home: Path, tmp_path: Path) -> None:
    """The history of the checkpoint folder is older, and said `Starting`. The status of the run had no entries yet."""
    uri = str(tmp_path / "ck")
    found = job(checkpoint={"uri": f"{uri}/step-1", "step": 1}, history=[])
    found["spec"]["checkpoint"] = {"uri": uri}
    run = ended_run(home / "data", found, PODS)
    meta = found["metadata"]
    record = {"job": meta["name"], "namespace": "default", "uid": meta["uid"], "unixSeconds": 1.0}
    Path(uri).mkdir()
    history = {**record, "status": {"phase": "Starting", "history": []}}
    put(Path(uri) / f"history-000000000001-{meta['uid']}.json", json.dumps(history))
    (run.folder / "result.json").unlink(missing_ok=True)
    shown = json.loads(RUNNER.invoke(app, ["history", str(run.folder), "-o", "json"]).stdout)
    assert shown["phase"] == "Stopped"


def test_the_file_of_a_run_has_all_its_jobs_and_pods_and_is_written_at_most_every_10_s(home: Path) -> None:
    now = [0.0]
    run = register(home, None)
    state = StateFile(home, clock=lambda: now[0])
    state.add([job()], PODS[:1])
    written = (home / "state.json").read_bytes()
    state.add([], PODS)
    now[0] = 9.0
    state.add([], PODS)
    assert (home / "state.json").read_bytes() == written
    now[0] = 10.0
    state.add([], PODS)
    end(run)
    api = StoredApi(run)
    assert jobs_in(run) == ["digits"]
    assert len(asyncio.run(api.pods_of("default", "digits"))) == len(PODS)


def test_a_users_cluster_is_listed_with_a_note_about_runs_on_this_machine(home: Path) -> None:
    ended_run(home / "data", job())
    config = home / "home" / ".kube" / "config"
    config.parent.mkdir(parents=True)
    put(config, "{}")
    refused = RUNNER.invoke(app, ["list"])
    assert refused.exit_code == 2
    assert "has no context" in refused.stderr, "the cluster of ~/.kube/config is asked"
    assert "digits" in RUNNER.invoke(app, ["list", "--local"]).stdout


def test_without_anything_the_error_says_what_to_start() -> None:
    for words in (["list"], ["status"], ["logs"], ["history"], ["trace"], ["status", "digits"]):
        refused = RUNNER.invoke(app, words)
        assert refused.exit_code == 2, words
        assert "no cluster is known: start one with `backstay run`" in refused.stderr
