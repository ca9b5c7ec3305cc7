"""Shard 0's server keeps the curve of a job, and stores it, so that it is known after the job (O8)."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

from between import LONG

from backstay._checkpoint import PosixFolder, Records
from backstay._report._job._curve import STORE_SECONDS, CurveRecord, JobCurve
from backstay_client.reading.curve import TrainingCurve, curve_of_page


def read(curve: JobCurve) -> TrainingCurve:
    found = curve_of_page(curve.page())
    assert found is not None
    return found


def test_the_page_has_every_update_and_evaluation_and_null_for_nan() -> None:
    curve = JobCurve()
    curve.updated(1, 0.5, {"norm": 2.0})
    curve.updated(2, math.nan, {"norm": math.inf, "late": 1.0})
    curve.evaluated(2, {"accuracy": 0.25})
    assert json.loads(curve.page()) == {
        "steps": [1, 2],
        "loss": [0.5, None],
        "metrics": {"norm": [2.0, None], "late": [None, 1.0]},
        "evaluations": [{"step": 2, "metrics": {"accuracy": 0.25}}],
    }
    found = read(curve)
    assert found.values("loss") == [(1, 0.5)]
    assert found.values("accuracy") == [(2, 0.25)]
    assert found.values("none") == []


def test_a_rollback_drops_what_is_made_again() -> None:
    """The history after version 2 is lost with a server: updates 3 and 4 are made again."""
    curve = JobCurve()
    for step in range(1, 5):
        curve.updated(step, float(step), {})
        curve.evaluated(step, {"accuracy": step / 10})
    curve.restarted(2)
    assert read(curve).steps == (1, 2)
    curve.updated(3, 30.0, {})
    found = read(curve)
    assert (found.steps, found.loss, sorted(found.evaluations)) == ((1, 2, 3), (1.0, 2.0, 30.0), [1, 2])


def test_a_long_training_has_at_most_a_thousand_points_on_the_same_steps_for_all_jobs() -> None:
    """The steps are multiples of a power of two, so the curves of two jobs can be compared."""
    curve = JobCurve()
    for step in range(1, 5001):
        curve.updated(step, 1.0, {"norm": 1.0})
        curve.evaluated(step, {"accuracy": 1.0})
    found = read(curve)
    assert found.steps == tuple(range(8, 5001, 8))
    assert len(found.evaluations) <= 1000
    assert 5000 in found.evaluations, "the newest evaluation stays"


def test_the_curve_of_a_newer_server_continues_that_of_the_server_before() -> None:
    """The first server died after update 4. Its successor began at version 3, without a checkpoint of update 4."""
    older = TrainingCurve(
        (1, 2, 3, 4), (1.0, 2.0, 3.0, 4.0), {"a": (1.0, 2.0, 3.0, 4.0)}, {2: {"x": 1.0}, 4: {"x": 2.0}}
    )
    newer = TrainingCurve((4, 5), (40.0, 50.0), {"b": (4.0, 5.0)}, {5: {"x": 3.0}})
    joined = older.before(newer)
    assert (joined.steps, joined.loss) == ((1, 2, 3, 4, 5), (1.0, 2.0, 3.0, 40.0, 50.0))
    assert str(dict(joined.metrics)) == "{'a': (1.0, 2.0, 3.0, nan, nan), 'b': (nan, nan, nan, 4.0, 5.0)}"
    assert joined.evaluations == {2: {"x": 1.0}, 5: {"x": 3.0}}
    assert older.before(TrainingCurve()) == older
    assert TrainingCurve().before(newer) == newer
    again = TrainingCurve((4, 5), (40.0, 50.0), {}, {2: {"x": 1.0}})
    joined = older.before(again)
    assert joined.loss == (1.0, 2.0, 3.0, 40.0, 50.0), "an evaluator repeats its newest evaluation for a new server"
    assert joined.evaluations == {2: {"x": 1.0}}
    early = older.before(TrainingCurve(evaluations={2: {"x": 1.0}}))
    assert (early.steps, dict(early.evaluations)) == (older.steps, dict(older.evaluations))


def test_pages_that_are_not_a_curve_are_left_out() -> None:
    good: dict[str, Any] = {"steps": [1], "loss": [1.0], "metrics": {}, "evaluations": []}
    assert curve_of_page(json.dumps(good).encode()) is not None
    for wrong in (
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        json.dumps({**good, "loss": [1.0, 2.0]}).encode(),
        json.dumps({**good, "metrics": []}).encode(),
        json.dumps({**good, "evaluations": [{}]}).encode(),
    ):
        assert curve_of_page(wrong) is None


def test_the_record_is_written_at_most_every_30_s_and_at_the_end(tmp_path: Path) -> None:
    now = 0.0
    records, curve = Records([PosixFolder(tmp_path)]), JobCurve()
    record = CurveRecord(curve, records, "abcd-1", clock=lambda: now, unix_clock=lambda: 1000.0)

    def steps() -> list[int]:
        written = threading.Event()
        records.put("history", f"history-{int(now):012d}-x.json", bytes, lambda uri: written.set())
        assert written.wait(LONG), "the records before it are written now"
        found = list(tmp_path.glob("curve-000000001000-abcd-1.json"))
        return list(json.loads(found[0].read_bytes())["steps"]) if found else []

    curve.updated(1, 1.0, {})
    record.tick()
    assert steps() == []
    now = STORE_SECONDS
    record.tick()
    assert steps() == [1]
    curve.updated(2, 1.0, {})
    now = STORE_SECONDS + 1
    record.tick()
    assert steps() == [1]
    record.store()
    records.close(30)
    assert json.loads((tmp_path / "curve-000000001000-abcd-1.json").read_bytes())["steps"] == [1, 2]
