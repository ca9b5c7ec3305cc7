"""The coordinator reports scalars that TensorBoard reads, calls `on_update`, and ends early."""

from __future__ import annotations

import gzip
import json
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optax
import pytest
from between import LONG, put
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import backstay
from backstay._checkpoint import PosixFolder, open_folder
from backstay._report import _event_files
from backstay._report._event_files import EventFiles
from backstay._report._reports import Reports
from backstay.errors import CheckpointError, ConfigurationError
from backstay_client.reading.timeline import read


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Returns the scalars that TensorBoard reads from a folder."""
    read = EventAccumulator(str(folder), size_guidance={event_accumulator.SCALARS: 0})
    read.Reload()
    return {tag: [(one.step, one.value) for one in read.Scalars(tag)] for tag in read.Tags()["scalars"]}


def events_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if "tfevents" in path.name)


def test_tensorboard_reads_the_files_and_drops_what_was_lost(tmp_path: Path) -> None:
    """Steps 3 and 4 were lost with a server; the next incarnation makes them again."""
    first = EventFiles(PosixFolder(tmp_path), "job.uid.1", clock=lambda: 1000.0)
    first.begin(1)
    for step in range(1, 5):
        first.add(step, {"loss": step * 1.0, "train/error": step * 2.0})
        first.flush()
    first.add(2, {"evaluation/accuracy": 0.5})
    first.flush()
    assert scalars(tmp_path)["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    second = EventFiles(PosixFolder(tmp_path), "job.uid.2", clock=lambda: 1001.0)
    second.begin(3)
    second.add(3, {"loss": 30.0, "train/error": 60.0})
    second.flush()
    shown = scalars(tmp_path)
    assert shown["loss"] == [(1, 1.0), (2, 2.0), (3, 30.0)]
    assert shown["train/error"] == [(1, 2.0), (2, 4.0), (3, 60.0)]
    assert shown["evaluation/accuracy"] == [(2, 0.5)]
    assert len(events_in(tmp_path)) == 2


def test_an_evaluation_that_is_reported_again_is_stored_once(tmp_path: Path) -> None:
    """An evaluator whose connection was lost reports again. After a rollback, a step has another evaluation."""
    reports = Reports(None, EventFiles(PosixFolder(tmp_path), "job.uid.1", clock=lambda: 1000.0))
    reports.begin(0)
    for step in (2, 2, 4):
        reports.evaluated(step, {"accuracy": step / 8})
    reports.begin(2)
    reports.evaluated(2, {"accuracy": 0.25})
    reports.evaluated(4, {"accuracy": 0.5})
    reports.evaluated(4, {"accuracy": 0.75})
    reports.close()
    assert scalars(tmp_path)["evaluation/accuracy"] == [(2, 0.25), (4, 0.5), (4, 0.75)]


def test_values_that_are_not_finite_are_points_too(tmp_path: Path) -> None:
    """A training that diverged would look as if it had ended early."""
    reports = Reports(None, EventFiles(PosixFolder(tmp_path), "job.uid.1", clock=lambda: 1000.0))
    reports.begin(0)
    reports.update(1.0, 1, math.inf, {"error": -math.inf, "large": 1e300}, {}, last=True)
    for _ in range(2):
        reports.evaluated(1, {"accuracy": float("nan")})
    reports.close()
    shown = scalars(tmp_path)
    assert (shown["loss"], shown["train/error"]) == ([(1, math.inf)], [(1, -math.inf)])
    assert shown["train/large"] == [(1, math.inf)], "the format has float32"
    assert [(step, math.isnan(value)) for step, value in shown["evaluation/accuracy"]] == [(1, True)]


@pytest.mark.parametrize("kind", ["posix", "object store"])
def test_files_end_before_they_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(_event_files, "MAX_BYTES", 500)
    remote = open_folder(f"memory://{tmp_path.name}")
    folder = PosixFolder(tmp_path) if kind == "posix" else remote
    files = EventFiles(folder, "job.uid.1", clock=lambda: 1000.0)
    for step in range(50):
        files.add(step, {"loss": float(step)})
        files.flush()
    if kind == "object store":
        for name in remote.names():
            put(tmp_path / name, remote.read(name))
    assert scalars(tmp_path)["loss"] == [(step, float(step)) for step in range(50)]
    sizes = [path.stat().st_size for path in events_in(tmp_path)]
    assert len(sizes) > 3
    assert max(sizes) < 600


def test_a_storage_that_fails_for_some_time_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = EventFiles(PosixFolder(tmp_path), "job.uid.1")
    with monkeypatch.context() as full:

        def fail(*arguments: object) -> None:
            raise CheckpointError("the disk is full")

        full.setattr(PosixFolder, "append", fail)
        for step in range(3):
            files.add(step, {"loss": 1.0})
            files.flush()
    files.flush()
    assert len(scalars(tmp_path)["loss"]) == 3


@pytest.mark.parametrize("raised", [ValueError("and it raises, too"), SystemExit(5)])
def test_t8_reports_are_rare_and_a_slow_function_delays_nothing(raised: BaseException) -> None:
    """At most one a second of the given clock, always the last one; what comes meanwhile is replaced by newer ones."""
    called: list[tuple[int, float, Mapping[str, float]]] = []
    entered, go = threading.Event(), threading.Event()

    def slow(step: int, loss: float, metrics: Mapping[str, float]) -> None:
        called.append((step, loss, metrics))
        entered.set()
        assert go.wait(LONG)
        raise raised

    reports = Reports(slow, None)
    reports.update(100.0, 1, 0.5, {"error": 2.0}, {})
    assert entered.wait(LONG)
    for step in range(2, 40):
        reports.update(100.0 + step / 10, step, float(step), {}, {})
    reports.update(104.0, 40, 40.0, {}, {}, last=True)
    go.set()
    reports.close()
    assert called == [(1, 0.5, {"error": 2.0}), (40, 40.0, {})]


def test_an_update_that_a_rollback_discards_is_not_reported_after_it() -> None:
    called: list[int] = []
    entered, go = threading.Event(), threading.Event()

    def slow(step: int, loss: float, metrics: Mapping[str, float]) -> None:
        called.append(step)
        entered.set()
        assert go.wait(LONG)

    reports = Reports(slow, None)
    reports.update(100.0, 10, 0.5, {}, {})
    assert entered.wait(LONG)
    reports.update(102.0, 100, 0.5, {}, {})
    reports.begin(50)
    go.set()
    reports.close()
    assert called == [10]


def test_an_error_of_the_event_files_does_not_end_the_other_reports(caplog: pytest.LogCaptureFixture) -> None:
    """tensorboardX raises a TypeError if it cannot be used with the protobuf that is installed."""

    class Broken(EventFiles):
        def _add(self, event: Any) -> None:
            raise TypeError("Descriptors cannot be created directly")

    stopped = threading.Event()
    reports = Reports(None, Broken(PosixFolder(Path("unused")), "job.uid.1"), lambda metrics: True)
    reports.stop = stopped.set
    reports.begin(0)
    reports.evaluated(2, {"accuracy": 0.95})
    reports.close()
    assert stopped.is_set()
    assert "no more scalars for TensorBoard are written" in caplog.text


@pytest.mark.parametrize("left", [0, 100])
def test_an_event_file_that_a_user_deleted_or_cut_is_written_again(tmp_path: Path, left: int) -> None:
    files = EventFiles(PosixFolder(tmp_path), "job.uid.1")
    for step in range(6):
        files.add(step, {"loss": 1.0})
        files.flush()
        if step == 3:
            (file,) = events_in(tmp_path)
            content = file.read_bytes()[:left]
            file.unlink()
            if left:
                put(file, content)
    assert [step for step, _ in scalars(tmp_path)["loss"]] == list(range(6))


@pytest.mark.parametrize("raised", [ZeroDivisionError, SystemExit(5)])
def test_stop_when_is_called_for_each_evaluation_and_its_errors_do_not_stop_training(raised: Any) -> None:
    asked: list[Mapping[str, float]] = []
    stopped = threading.Event()

    def judge(metrics: Mapping[str, float]) -> bool:
        asked.append(metrics)
        if metrics["accuracy"] == 0.0:
            raise raised
        return metrics["accuracy"] > 0.9

    reports = Reports(None, None, judge)
    reports.stop = stopped.set
    for accuracy in (0.0, 0.5):
        reports.evaluated(1, {"accuracy": accuracy})
    reports.begin(0)
    reports.evaluated(2, {"accuracy": 0.95})
    reports.close()
    assert stopped.is_set()
    assert [metrics["accuracy"] for metrics in asked] == [0.0, 0.5, 0.95]


@pytest.mark.parametrize(("begins", "times"), [(2, 2), (3, 2), (1, 1)])
def test_an_early_stop_is_requested_again_when_training_continues_after_its_evaluation(begins: int, times: int) -> None:
    """A rollback withdraws the request, and no further report of that evaluation arrives."""
    requests: list[int] = []
    reports = Reports(None, None, lambda metrics: True)
    reports.stop = lambda: requests.append(1)
    reports.evaluated(2, {"accuracy": 0.95})
    reports.begin(begins)
    reports.close()
    assert len(requests) == times


def settings(**more: Any) -> dict[str, Any]:
    def loss(params: Any, batch: Any) -> Any:
        return ((params - batch.mean()) ** 2).sum(), {"distance": abs(params - batch.mean()).sum()}

    data = backstay.from_dataset(np.arange(10.0), batch_size=2)
    return {"init": lambda key: np.zeros(2), "loss": loss, "batches": data, "optimizer": optax.sgd(0.1), **more}


def test_alone_training_reports_evaluates_and_stops(capsys: pytest.CaptureFixture[str]) -> None:
    evaluated: list[float] = []
    reported: list[tuple[int, list[str]]] = []

    def evaluate(params: Any) -> dict[str, float]:
        evaluated.append(float(params[0]))
        return {"first": float(params[0])}

    result = backstay.train(
        **settings(steps=100),
        evaluate=evaluate,
        evaluate_every=3,
        stop_when=lambda metrics: len(evaluated) == 4,
        on_update=lambda step, loss, metrics: reported.append((step, sorted(metrics))),
    )
    assert result.step == 12
    assert reported[0] == (1, ["distance"])
    assert reported[-1] == (12, ["distance"])
    said = capsys.readouterr().err
    assert "epoch 0 has ended: 10 samples: 10 used, 0 dropped, 0 repeated (step 5)" in said
    assert "stop_when ends training: the evaluation of step 12" in said


def test_early_ends_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="train was called without evaluate"):
        backstay.train(**settings(steps=1), stop_when=lambda metrics: True)
    with pytest.raises(ConfigurationError, match="evaluate_every is 0"):
        backstay.train(**settings(steps=1), evaluate=lambda params: {}, evaluate_every=0)
    with pytest.raises(ConfigurationError, match="on_update is int"):
        backstay.train(**settings(steps=1), on_update=3)  # type: ignore[arg-type]


def test_a_job_ends_early_succeeds_and_stays_ended(job: Any, tmp_path: Path) -> None:
    """With an evaluator; two servers; TensorBoard shows the folder; the same job again is complete."""
    folder = tmp_path / "checkpoints"
    tiny = job(2, 1, checkpoint={"uri": str(folder), "every_steps": 2}, evaluator=True)
    tiny.environment = {"STEPS": "100000", "STOPS": "1"}
    tiny.start_all()
    evaluator = tiny.start("evaluator", 0)
    assert [pod.wait() for pod in (*tiny.pods,)] == [0] * 4
    server, worker = tiny.pods[0], tiny.pods[2]
    words = server.final_message()
    assert (words["result"], words["reason"]) == ("Succeeded", "StoppedEarly")
    step = words["step"]
    assert isinstance(step, int)
    assert 2 < step < 100000
    assert backstay.load(str(folder)).step == step
    assert (worker.final_message()["step"], worker.final_message()["reason"]) == (step, "StoppedEarly")
    assert f"on_update {step} ['error']" in server.output()
    assert not any("on_update" in pod.output() for pod in [*tiny.pods[1:3], evaluator])
    shown = scalars(folder)
    assert shown["loss"][-1][0] == step
    assert shown["evaluation/squares"][-1][0] == step
    assert {"train/error", "throughput/examples_per_second", "throughput/updates_per_second"} <= set(shown)
    again = job(1, 1, checkpoint={"uri": str(folder), "every_steps": 2}, evaluator=True)
    again.environment = {"STEPS": "100000", "STOPS": "1", "BACKSTAY_JOB_UID": "2"}
    server = again.server(0)
    assert server.wait() == 0
    assert (server.final_message()["result"], server.final_message()["step"]) == ("AlreadyComplete", step)


@pytest.mark.parametrize("last", [2, 22])
def test_o10_a_job_of_a_second_loses_no_report(job: Any, tmp_path: Path, last: int) -> None:
    """O10: spans, curve, event files and the last report of pods that end before any periodic report is due.

    The longer job has an evaluator.
    """
    folder = tmp_path / "checkpoints"
    tiny = job(3, 2, checkpoint={"uri": str(folder)}, evaluator=last == 22)
    tiny.environment = {"STEPS": str(last), "RUNNING": "1", "SAME": "1"}
    tiny.start_all()
    evaluates = "worker-0"
    if last == 22:
        evaluates = "evaluator-0"
        tiny.start("evaluator", 0, 1)
    assert {pod.name: pod.wait() for pod in tiny.pods} == {pod.name: 0 for pod in tiny.pods}
    points = spans_by_pod(folder)
    for shard in range(3):
        assert {"apply", "checkpoint"} <= points[f"parameter-server-{shard}"], points
    assert "evaluate" in points[evaluates]
    for rank in range(2):
        assert {"compute", "push"} <= points[f"worker-{rank}"]
    shown = scalars(folder)
    steps = {tag: [step for step, _ in values] for tag, values in shown.items()}
    for tag in ("loss", "train/error", "throughput/examples_per_second", "throughput/updates_per_second"):
        assert steps[tag][-1] == last, tag
    assert steps["evaluation/squares"] == [last]
    [curve] = (json.loads(path.read_text()) for path in folder.glob("curve-*"))
    assert (curve["steps"][-1], curve["evaluations"][-1]["step"]) == (last, last), curve
    message = tiny.pods[0].final_message()
    assert message["examplesPerSecond"] > 0
    assert message["trainMetrics"].keys() == {"error"}
    assert message["metrics"].keys() == {"squares"}
    assert (message["goalSteps"], message["evaluatedStep"]) == (last, last)
    # Equal batches are reported after twenty updates, and a leaf after ten without a gradient.
    assert message.get("mistakesOfBatches", []) == (["SameBatches"] if last == 22 else [])
    assert message.get("untrainedLeaves", []) == (["running.mean"] if last == 22 else [])
    assert message["traffic"]["carried"] > 0


def spans_by_pod(folder: Path) -> dict[str, set[str]]:
    """Returns the points of the newest stored timeline by slot."""
    stored = max(folder.glob("trace-*"))
    job = read(gzip.decompress(stored.read_bytes()))
    return {f"{pod.role}-{pod.index}": {span.point for span in pod.spans} for pod in job.pods}
