"""The text shows why a job waits, and the output of a pod is safe for a terminal and readable."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from between import put
from hypothesis import given
from hypothesis import strategies as st

from backstay_cli import report
from backstay_client.kube import ApiRequestError
from backstay_client.show.lines import LineDisplay
from backstay_client.view.follow import JobView, RoleView, view_of
from backstay_client.view.starting import newest_line
from backstay_client.view.waiting import no_update, waiting_for
from backstay_client.words import number, on_one_line, plain, printable, shortened, without_folder
from backstay_spec import contract
from backstay_spec.job_report import CheckpointStatus, JobReport, UpdateWait

TRACEBACK = """Traceback (most recent call last):
  File "/x/train.py", line 3, in <module>
    raise RuntimeError("boom")
RuntimeError: boom
on two lines"""
DESIRED = {"ParameterServer": RoleView(desired=1), "Worker": RoleView(desired=2)}


def pod(role: str, index: int, phase: str = "Running", ready: bool = False, **status: Any) -> dict[str, Any]:
    labels = {contract.LABEL_ROLE: role, contract.LABEL_INDEX: str(index)}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": f"a-{role}-{index}", "namespace": "default", "labels": labels},
        "status": {"phase": phase, "conditions": conditions, **status},
    }


def pods(server: bool, *workers: bool) -> tuple[dict[str, Any], ...]:
    return (
        pod(contract.ROLE_SERVER, 0, ready=server),
        *(pod(contract.ROLE_WORKER, i, ready=ready) for i, ready in enumerate(workers)),
    )


PULLING = pod(
    contract.ROLE_WORKER,
    1,
    "Pending",
    containerStatuses=[{"state": {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}}],
)
UNSCHEDULABLE = pod(contract.ROLE_WORKER, 0, "Pending")
UNSCHEDULABLE["status"]["conditions"] = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
]


@pytest.mark.parametrize(
    ("view", "says"),
    [
        ({"stage": "starting the operator"}, "starting the operator"),
        ({}, "creating pods"),
        ({"pods": pods(False)}, "starting pods: 1 of 3 run"),
        ({"pods": pods(False, False, False)}, "starting Python and JAX in 3 pods"),
        ({"pods": pods(False, True, False)}, "preparing the parameters: 0 of 1 server ready"),
        ({"pods": pods(True, True, False)}, "compiling the first step: 2 of 3 pods ready"),
        ({"pods": pods(True, True, True), "report": JobReport(step=3)}, ""),
        (
            {"pods": (*pods(True), PULLING), "report": JobReport(step=3)},
            "waiting: worker 1: ImagePullBackOff no such image",
        ),
        ({"pods": (UNSCHEDULABLE,)}, "waiting: worker 0: Unschedulable 0/1 nodes"),
        ({"pods": pods(True), "report": JobReport(step=3), "trouble": "the disk is full"}, "the disk is full"),
        ({"phase": "Failed"}, ""),
    ],
)
def test_what_a_job_waits_for_is_stated(view: dict[str, Any], says: str) -> None:
    assert waiting_for(JobView("a", "default", **{"roles": DESIRED, **view})) == says


class LogsOnly:
    """An API server of which only logs of pods are read.

    Attributes:
        logs: the log of each pod, by its name.
        error: raised in place of an answer; None: none.
    """

    def __init__(self, logs: Mapping[str, bytes], error: Exception | None = None) -> None:
        self.logs, self.error = logs, error

    async def log(self, namespace: str, pod: str, **options: str) -> AsyncIterator[bytes]:
        if self.error is not None:
            raise self.error
        assert (namespace, options) == ("default", {"tailLines": "10"})
        log = self.logs[pod]
        for start in range(0, len(log), 7):
            yield log[start : start + 7]


def since(role: str, seconds: float, ready: bool = False) -> dict[str, Any]:
    """Returns a pod whose container began some seconds before now."""
    began = datetime.fromtimestamp(time.time() - seconds, UTC).isoformat()
    container = {"name": contract.CONTAINER, "state": {"running": {"startedAt": began}}}
    return pod(role, 0, ready=ready, containerStatuses=[{"name": "sidecar"}, container])


SERVER, WORKER = f"a-{contract.ROLE_SERVER}-0", f"a-{contract.ROLE_WORKER}-0"
LOGS = {
    SERVER: b"one\nthe \x1b[31mfolder\x1b[0m\x07 does not answer\n\n\x1b[0m\n",
    WORKER: b'{"time": "now", "message": "loads data"}\n',
}


@pytest.mark.parametrize(
    ("ages", "found"),
    [
        ([(contract.ROLE_WORKER, 1000), (contract.ROLE_SERVER, 100)], (SERVER, "the folder\\x07 does not answer")),
        ([(contract.ROLE_WORKER, 100), (contract.ROLE_SERVER, 100, True)], (WORKER, "loads data")),
        ([(contract.ROLE_WORKER, 100), (contract.ROLE_SERVER, -900)], (WORKER, "loads data")),
        ([(contract.ROLE_SERVER, -900)], ("", "")),
    ],
)
async def test_the_newest_line_of_a_pod_that_starts_for_long_is_read(ages: Any, found: tuple[str, str]) -> None:
    api: Any = LogsOnly(LOGS)
    pods = [since(*age) for age in ages]
    pods += [pod(contract.ROLE_SERVER, 1, "Pending"), pod(contract.ROLE_SERVER, 2)]
    assert await newest_line(api, "default", pods) == found
    for error in (ApiRequestError(403, "Forbidden", "no"), TimeoutError(), aiohttp.ClientConnectionError()):
        failing: Any = LogsOnly(LOGS, error)
        assert await newest_line(failing, "default", pods) == ("", "")


async def test_a_line_of_deep_json_is_text() -> None:
    api: Any = LogsOnly({SERVER: b"[" * 60_000})
    assert await newest_line(api, "default", [since(contract.ROLE_SERVER, 100)]) == (SERVER, "[" * 239 + "…")


async def test_a_long_line_is_cut() -> None:
    api: Any = LogsOnly({SERVER: b"x" * 10_000})
    assert await newest_line(api, "default", [since(contract.ROLE_SERVER, 100)]) == (SERVER, "x" * 239 + "…")


async def test_the_newest_state_of_a_progress_bar_is_shown() -> None:
    """It writes all of its states into one line, whose beginning is old."""
    states = b"\r".join(b"%d MB of 9,000 MB" % number for number in range(9000))
    api: Any = LogsOnly({SERVER: b"loads\n" + states + b"\r"})
    assert await newest_line(api, "default", [since(contract.ROLE_SERVER, 100)]) == (SERVER, "8999 MB of 9,000 MB")


def test_the_newest_line_is_shown_rarely() -> None:
    """A script that draws the progress of its download would fill the terminal."""
    lines: list[str] = []
    now = [0.0]
    display = LineDisplay(lines.append, clock=lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        newest = (SERVER, f"{second} MB") if second > 2 else ("", "")
        display.show(JobView("a", "default", roles=DESIRED, pods=pods(False, False, False), newest_line=newest))
    said = [line.split("] ")[1] for line in lines]
    start = "starting Python and JAX in 3 pods"
    assert said == ["a is Pending", start, *(f"{start}. server 0 wrote: {number} MB" for number in (3, 13, 23))]


def test_a_traceback_is_cut_down_to_what_it_ends_with() -> None:
    assert plain(TRACEBACK) == ["RuntimeError: boom", "on two lines"]
    between = "\nThe above exception was the direct cause of the following exception:\n\n"
    chain = TRACEBACK.replace("RuntimeError: boom", "KeyError: 'a'") + between + TRACEBACK
    assert plain(chain) == ["KeyError: 'a'", "on two lines", "RuntimeError: boom", "on two lines"]
    assert plain(chain.replace("\n", " \r\n")) == plain(chain)
    assert plain(between) == [between.strip()], "nothing else is left to show"
    assert on_one_line(f"worker 0 died: exit code 1: {TRACEBACK}; again") == (
        "worker 0 died: exit code 1: RuntimeError: boom on two lines; again"
    )


@given(st.text())
def test_nothing_that_a_terminal_obeys_gets_through(text: str) -> None:
    assert all(c.isprintable() or c == "\t" for c in printable(text))
    assert all(c.isprintable() or c == "\t" for line in plain(text) for c in line)
    assert plain(text)


@given(st.none() | st.floats() | st.integers(min_value=-(10**20), max_value=10**20))
def test_every_number_can_be_shown(value: float | None) -> None:
    """A loss that is NaN or infinite is what a person wants to see."""
    assert number(value)
    if value is not None and math.isnan(value):
        assert number(value) == "nan"


def test_paths_in_a_message_are_relative_to_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = f"stored as {tmp_path}/ck/a.json; {tmp_path}-2/b, /c{tmp_path}/d and file://{tmp_path}/e stay"
    assert without_folder(message) == message.replace(f"as {tmp_path}/", "as ")
    assert without_folder(f"{tmp_path}/ does not exist") == f"{tmp_path}/ does not exist"
    monkeypatch.chdir("/")
    assert without_folder(message) == message


def test_paths_stay_as_they_are_where_the_folder_was_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    path = f"{tmp_path}/gone/a.json"
    assert without_folder(f"stored as {path}") == f"stored as {path}"
    assert shortened(path) == path


def test_the_same_output_of_several_pods_is_shown_once(tmp_path: Path) -> None:
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Failed"}}
    ended = {"state": {"terminated": {"exitCode": 1, "reason": "Error"}}, "name": "trainer"}
    dead = [pod(contract.ROLE_WORKER, index, "Failed", containerStatuses=[ended]) for index in range(4)]
    for index in range(4):
        log = tmp_path / "default" / f"a-worker-{index}" / "trainer.log"
        log.parent.mkdir(parents=True)
        put(log, {0: "", 3: "x" * 10_000_000 + "the end"}.get(index, TRACEBACK))
    lines = list(report.lines(view_of(job, dead, []), 1.0, tmp_path))
    assert "before its first update" in lines[0]
    assert sum("raise RuntimeError" in line for line in lines) == 1
    assert "    the same in a-worker-2" in lines
    assert "    | (it printed nothing)" in lines
    assert lines[-1].endswith("the end")
    assert all(len(line) < 1000 for line in lines)


def test_the_final_message_of_shard_0_is_newer_than_the_last_observation() -> None:
    before = JobView("a", "default", report=JobReport(loss=0.5, examples_per_second=10.0, step=8))
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Succeeded", "loss": 0.7}}
    said = '{"result": "Succeeded", "step": 9, "loss": 0.25, "examplesPerSecond": 12.0, "evaluationError": "E: no"}'
    server = pod(contract.ROLE_SERVER, 0, "Succeeded")
    server["status"]["containerStatuses"] = [{"state": {"terminated": {"exitCode": 0, "message": said}}}]
    view = view_of(job, [server], [], before)
    found = view.report
    assert (found.step, found.loss, found.examples_per_second, found.evaluation_error) == (9, 0.25, 12.0, "E: no")
    assert "  the evaluation failed: E: no" in list(report.lines(view, 1.0, Path("/logs")))
    assert view_of(job, [], [], before).report.loss == 0.5


@pytest.mark.parametrize(
    ("phase", "step", "loss"),
    [("Suspended", 100, 0.1), ("Succeeded", 100, 0.1), ("Running", 110, 0.5), ("Succeeded", 110, 0.5)],
)
def test_each_number_is_the_newest_of_the_page_and_the_status(phase: str, step: int, loss: float) -> None:
    """The page was read before the last checkpoint and evaluation."""
    stored = {"metrics": {"accuracy": 0.25}, "evaluated_step": 90, "checkpoint": CheckpointStatus(step=90, uri="/c/90")}
    before = JobView("a", "default", report=JobReport(term=1, step=100, loss=0.1, **stored))
    found = {"metrics": {"accuracy": 0.5}, "evaluatedStep": 100, "checkpoint": {"step": 100, "uri": "/c/100"}}
    status = {"phase": phase, "term": 1, "step": step, "loss": 0.5, **found}
    view = view_of({"metadata": {"name": "a", "namespace": "default"}, "status": status}, [], [], before)
    assert (view.report.step, view.report.loss) == (step, loss)
    assert (view.report.metrics, view.report.evaluated_step, view.checkpoint) == ({"accuracy": 0.5}, 100, "/c/100")
    older = {**status, "metrics": {"accuracy": 0.0}, "evaluatedStep": 80, "checkpoint": {"step": 80, "uri": "/c/80"}}
    view = view_of({"metadata": {"name": "a", "namespace": "default"}, "status": older}, [], [], before)
    assert (view.report.metrics, view.report.evaluated_step, view.checkpoint) == ({"accuracy": 0.25}, 90, "/c/90")


def test_a_status_after_a_rollback_is_newer_than_the_page_before_it() -> None:
    job = {"metadata": {"name": "a", "namespace": "default"}}
    before = JobView(
        "a", "b", report=JobReport(term=1, step=20, loss=0.1, checkpoint=CheckpointStatus(step=20, uri="a"))
    )
    status = {"phase": "Running", "term": 2, "step": 10, "loss": 0.5, "checkpoint": {"step": 4, "uri": "b"}}
    view = view_of(job | {"status": status}, [], [], before)
    assert (view.report.step, view.report.loss, view.checkpoint) == (10, 0.5, "b")
    ended = {"phase": "Succeeded", "term": 1, "step": 30, "nonFiniteLoss": 22}
    assert math.isnan(view_of(job | {"status": ended}, [], [], before).report.newest_loss or 0.0)


def test_metrics_of_before_a_failed_evaluation_have_their_step() -> None:
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Succeeded"}}
    rows = {"step": 9, "evaluated_step": 8, "metrics": {"accuracy": 0.5}}
    failed = replace(view_of(job, [], []), report=JobReport(**rows, failed_evaluation=9, evaluation_error="E: no"))
    lines = list(report.lines(failed, 1.0, Path("/logs")))
    assert "  the evaluation failed: at step 9: E: no" in lines
    assert "  evaluation of step 8: accuracy 0.5" in lines


def test_a_missing_package_names_the_python_of_the_pods() -> None:
    """Another environment may be active: `backstay run` starts pods with its own Python."""
    view = JobView(
        "a", "default", phase="Failed", message="ScriptFailed: ModuleNotFoundError: No module named 'x' (a.py:1)"
    )
    assert any(sys.executable in line for line in report.lines(view, 1.0, Path("/logs")))
    other = JobView("a", "default", phase="Failed", message="ScriptFailed: KeyError: 'x' (a.py:1)")
    assert not any(sys.executable in line for line in report.lines(other, 1.0, Path("/logs")))


def test_a_long_wait_is_a_line_once_a_minute() -> None:
    now = 0.0
    lines: list[str] = []
    display = LineDisplay(lambda line: lines.append(line.partition("] ")[2]), clock=lambda: now)
    for at, waited in ((10.0, 5), (30.0, 25), (31.0, 26), (91.0, 86), (92.0, 0), (120.0, 21)):
        now = at
        waits = UpdateWait(seconds=waited, text="worker 1 waits for its input batch" if waited else "")
        display.show(JobView("a", "default", phase="Running", report=JobReport(step=3), waits=waits))
    said = "worker 1 waits for its input batch"
    assert [line for line in lines if said in line] == [
        f"no update for 25 s: {said}",
        f"no update for 1 min 26 s: {said}",
        f"no update for 21 s: {said}",
    ]


def test_o10_after_the_last_update_the_line_describes_the_end() -> None:
    waits = UpdateWait(seconds=18.0, text="trained to step 20; worker 0 evaluates, for 18 s", over=True)
    view = JobView("a", "default", phase="Running", report=JobReport(step=20), waits=waits)
    assert no_update(view) == waits.text
    assert no_update(replace(view, waits=waits.model_copy(update={"seconds": 1.0}))) == ""
    assert no_update(replace(view, phase="Succeeded")) == ""


def test_a_script_that_does_not_end_after_training_is_what_the_job_waits_for() -> None:
    """The page with the waits ends with the servers. A thread of the script may never end."""
    trained = {"type": "Trained", "status": "True", "lastTransitionTime": "2026-01-01T00:00:00Z"}
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Running", "step": 20}}
    job["status"] |= {"conditions": [trained]}
    worker = pod(contract.ROLE_WORKER, 0, "Running")
    view = view_of(job, [worker], [])
    assert waiting_for(view).startswith("training is complete: the script of worker 0 still runs")
    assert waiting_for(replace(view, waits=UpdateWait(over=True, text="trained to step 20"))) == "", (
        "the page says more"
    )
    assert waiting_for(replace(view, pods=(pod(contract.ROLE_WORKER, 1, "Running"),))) == ""
    assert waiting_for(replace(view, pods=(pod(contract.ROLE_WORKER, 0, "Succeeded"),))) == ""
    trained["status"] = "False"
    assert waiting_for(view_of(job, [worker], [])) == ""


def test_a_message_of_several_lines_stays_one_entry() -> None:
    job = {"metadata": {"name": "a", "namespace": "default"}, "status": {"phase": "Starting"}}
    lines: list[str] = []
    LineDisplay(lines.append, clock=lambda: 0.0).show(
        view_of(job, [], [{"type": "Warning", "reason": "Crashed", "message": f"worker 0: {TRACEBACK}"}])
    )
    assert lines[0] == "[   0.0s] warning: Crashed: worker 0: RuntimeError: boom"
    assert lines[1].strip() == "on two lines"


def test_the_report_has_the_call_that_loads_the_best_checkpoint() -> None:
    """Without a value of its metric, no checkpoint is the best."""
    job = {"spec": {"checkpoint": {"uri": "/ck", "keepBest": {"metric": "loss", "mode": "Min"}}}}
    stored = CheckpointStatus(step=9, uri="/ck/step-9")
    with_loss = JobReport(step=9, checkpoint=stored, metrics={"loss": 0.5})
    view = JobView("a", "b", job=job, report=with_loss)
    load = "    backstay.load('/ck', best=True)  # the best, by loss"
    assert load in list(report.lines(view, 1.0, Path("/logs")))
    without = replace(view, report=JobReport(step=9, checkpoint=stored))
    for other in (without, replace(view, job={"spec": {"checkpoint": {"uri": "/ck"}}})):
        assert not any("best=True" in line for line in report.lines(other, 1.0, Path("/logs")))


@given(st.floats(1e15, 1e307) | st.integers(10**15, 10**300))
def test_a_large_number_is_short(value: float) -> None:
    assert len(number(value)) <= 10, number(value)
    assert float(number(value)) == pytest.approx(value, rel=1e-3)
