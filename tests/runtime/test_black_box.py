"""Reports about pods that died, and the job's history, survive nonsense, torn files and another server."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from between import LONG, put, until
from hypothesis import given
from hypothesis import strategies as st

from backstay import _instrument
from backstay._checkpoint import PosixFolder, Records
from backstay._process import HANGS, _hang, hang_report, script_stacks
from backstay._report._black_box import BlackBox, updated
from backstay._report._timeline import SpanCollector
from backstay._transport._control._spans import columns
from backstay.errors import CheckpointError
from backstay_client.reading.history import history_of_place, lines
from backstay_rpc.control_pb2 import HangReport, Peer, ProgressReply
from backstay_spec.goodput import PARTS

from .servers import flush, server_environment

WORKER = Peer(role="worker", index=3, incarnation=1)
DEATH = {
    "time": "2026-11-22T10:00:00.500Z",
    "type": "Warning",
    "reason": "Stalled",
    "message": "worker 3 (pod w) died: no gradient for 7 s; replaced by w2",
    "slot": "worker-3",
    "incarnation": 1,
}
BEGAN = {
    "time": "2026-11-22T09:00:00Z",
    "type": "Normal",
    "reason": "Running",
    "message": "all servers and at least one worker are ready",
}


_records: list[Records] = []


@pytest.fixture(autouse=True)
def _closed():
    yield
    while _records:
        _records.pop().close(10)


class Box:
    """A black box with its folder and its clock."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now = folder, 100.0
        self.records = Records([PosixFolder(folder)])
        _records.append(self.records)
        collector = SpanCollector(Peer(), 1 << 20, job="j", namespace="n", uid="u")
        for incarnation in (1, 2):
            spans = columns([_instrument.Span(0, f"compute{incarnation}", 1.0, 2.0, 7, "t", {"raised": "OSError"})])
            spans.peer.CopyFrom(Peer(role="worker", index=3, incarnation=incarnation))
            spans.clock, spans.unix_seconds = 3.0, 1003.0
            collector.add(spans.peer, spans.SerializeToString())
        collector.add(WORKER, b"\xff no spans")
        self.box = BlackBox(
            server_environment(), self.records, collector.spans, clock=lambda: self.now, unix_clock=lambda: 1e9
        )

    def record(self, number: str, *history: dict[str, Any]) -> None:
        self.box.record(json.dumps({"startTime": "2026-11-22T08:59:00Z", "history": list(history)}), number)

    def files(self, kind: str) -> list[Path]:
        """Returns the files of a kind, once everything is written."""
        flush(self.records)
        return sorted(self.folder.glob(f"{kind}-*"))

    def reply(self) -> ProgressReply:
        reply = ProgressReply()
        self.box.fill(reply)
        return reply


def test_a_report_has_the_stacks_and_the_last_spans_of_the_pod_that_died(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.record("a", BEGAN, DEATH)
    box.box.tick()
    assert box.files("report") == [], "a pod that hangs sends its state after the entry"
    box.box.hangs(WORKER, HangReport(stacks="File x", output="bye", doing="compute of step 7"))
    box.now += 4
    box.box.tick()
    box.box.tick()
    (file,) = box.files("report")
    assert file.name == "report-001795341600-worker-3-1-12345678.json"
    report = json.loads(file.read_text())
    assert (report["slot"], report["reason"], report["stacks"], report["output"]) == (
        "worker-3",
        "Stalled",
        "File x",
        "bye",
    )
    reply = box.reply()
    assert reply.recorded == "a"
    assert [(each.slot, each.incarnation, each.uri) for each in reply.death_reports] == [("worker-3", 1, str(file))]


def test_a_report_survives_spans_that_cannot_be_read_and_has_those_of_its_incarnation(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.record("a", {**DEATH, "incarnation": 2})
    box.box.tick(every=True)
    report = json.loads(box.files("report")[0].read_text())
    (span,) = report["spans"]
    assert span == {
        "point": "compute2",
        "step": 7,
        "began": 1001.0,
        "seconds": 1.0,
        "thread": "t",
        "notes": {"raised": "OSError"},
    }
    assert report["stacks"] is None


def test_a_server_that_took_over_makes_no_report_twice_and_has_its_position(tmp_path: Path) -> None:
    for number in range(2):
        box = Box(tmp_path)
        box.record(str(number), DEATH)
        box.box.tick(every=True)
        assert len(box.files("report")) == 1
        assert len(box.reply().death_reports) == 1


def test_the_history_survives_what_the_status_drops_and_states_how_the_job_ended(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.record("a", BEGAN)
    box.record("b", DEATH)
    box.record("c", {**DEATH, "recovered": "2026-11-22T10:00:02.500Z", "report": "/ck/report-1"})
    box.box.record(json.dumps({"startTime": "2026-11-22T08:59:00Z", "goodput": 0.0}), "d")
    for account in ([1.0], [math.nan] * len(PARTS), [-1.0] * len(PARTS)):
        box.box.spent(account, 39)
    box.box.ended({"result": "Succeeded", "step": 40})
    (file,) = box.files("history")
    assert "goodput" not in json.loads(file.read_text())["status"], "it is that of the last event"
    box.box.spent([30.0 if part == "applied" else 10.0 if part == "wait" else 0.0 for part in PARTS], 39)
    box.box.leaves()
    (file,) = box.files("history")
    assert [entry["reason"] for entry in json.loads(file.read_text())["status"]["history"]] == ["Running", "Stalled"]
    shown = "\n".join(lines(history_of_place(str(tmp_path), "j"), 0.0))
    assert "j in namespace default: Succeeded" in shown
    assert "step 40" in shown
    assert "goodput 75 % of 40 worker seconds: wait 25 %" in shown
    assert "1 worker pod died: Stalled" in shown
    assert "trains again after 2 s" in shown
    assert "report about worker 3: /ck/report-1" in shown


def test_a_job_that_is_deleted_leaves_its_newest_step_and_account(tmp_path: Path) -> None:
    box = Box(tmp_path)
    box.box.record(json.dumps({"phase": "Running", "step": 3, "goalSteps": 90, "goodput": 0.1, "history": []}), "a")
    box.box.spent([1.0] * len(PARTS), 40)
    box.box.leaves()
    (file,) = box.files("history")
    status = json.loads(file.read_text())["status"]
    assert (status["step"], status["phase"], sum(status["workerSeconds"].values())) == (40, "Running", len(PARTS))
    assert status["goodput"] == pytest.approx(1 / len(PARTS), abs=1e-4)


def test_invalid_messages_and_a_truncated_file_lose_nothing(tmp_path: Path) -> None:
    box = Box(tmp_path)
    for number, text in enumerate(("{", "[]", '{"history": 1}', '{"history": [{"slot": 1, "incarnation": "x"}]}', "")):
        box.box.record(text, str(number))
    assert box.reply().recorded == "3"
    box.record("a", DEATH)
    (file,) = box.files("history")
    put(file, file.read_text()[:40])
    box.record("b", DEATH, BEGAN)
    (file,) = box.files("history")
    assert len(json.loads(file.read_text())["status"]["history"]) == 2


@given(st.lists(st.lists(st.tuples(st.integers(0, 9), st.sampled_from("ab")), max_size=5), max_size=6))
def test_merging_keeps_every_entry_once_in_order(statuses: list[list[tuple[int, str]]]) -> None:
    content: bytes | None = None
    for entries in statuses:
        history = [{"time": f"2026-01-0{day + 1}T00:00:00Z", "reason": reason} for day, reason in entries]
        content = updated(content, {"format": 1}, {"phase": "Running", "history": history})
    found = [] if content is None else json.loads(content)["status"]["history"]
    keys = [(entry["time"], entry["reason"]) for entry in found]
    assert len(set(keys)) == len(keys) == len({entry for entries in statuses for entry in entries})
    assert [time for time, _ in keys] == sorted(time for time, _ in keys)


# ---- Pods that hang


def test_only_a_pod_that_does_the_same_for_long_hangs() -> None:
    doing = _instrument.Doing("batch_wait", 7, 100.0)
    assert hang_report(None, 1e9) is None
    assert hang_report(doing, 100.0 + HANGS - 0.1) is None
    found = hang_report(doing, 112.3)
    assert found is not None
    assert found.doing == "batch_wait of step 7, for 12.3 s"
    other = hang_report(_instrument.Doing("batch_wait", 7, 100.0, member=2), 112.3, "Pod 2:\nFile x")
    assert other is not None
    assert (other.doing, other.stacks[:14]) == ("pod 2: batch_wait of step 7, for 12.3 s", "Pod 2:\nFile x\n")


def test_the_threads_that_run_the_script_are_shown_alone() -> None:
    ended = threading.Event()

    def in_script() -> None:
        ended.wait(LONG)

    threads = [threading.Thread(target=in_script, name="batches"), threading.Thread(target=ended.wait, name="idle")]
    for thread in threads:
        thread.start()
    try:
        shown = script_stacks()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert "Thread batches:" in shown
    assert "in in_script" in shown.partition("Thread batches:\n")[2].splitlines()[0], "not how the thread was started"
    assert "idle" not in shown


def test_a_server_that_takes_over_makes_the_reports_that_are_missing(tmp_path: Path) -> None:
    """More deaths than the queue has room for, and a folder that is slow: none is left out, none is made twice."""
    box = Box(tmp_path)
    proceed = threading.Event()
    box.records._add("", lambda folder: proceed.wait(LONG) and None)
    deaths = [{**DEATH, "incarnation": number} for number in range(1, 41)]
    box.record("a", *({**death, "report": "file"} if death["incarnation"] <= 10 else death for death in deaths))
    box.now += 4
    box.box.tick()
    proceed.set()

    def made() -> bool:
        box.box.tick()
        return len(box.files("report")) >= 30

    until(made)
    box.box.tick()
    assert len(box.files("report")) == 30
    assert len(box.reply().death_reports) == 30


def test_a_history_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    """A disk that becomes full in the middle of a write."""
    resource = pytest.importorskip("resource")
    folder = PosixFolder(tmp_path)
    folder.replace("history", b"before" * 10)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="history"):
            folder.replace("history", b"after" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert folder.read("history") == b"before" * 10
    assert folder.names() == ["history"]


def test_stacks_name_the_threads_and_the_line_where_each_waits() -> None:
    leave, here = threading.Event(), threading.Event()

    def wait_for_a_slow_disk() -> None:
        here.set()
        leave.wait(LONG)

    thread = threading.Thread(target=wait_for_a_slow_disk, name="reader")
    thread.start()
    assert here.wait(LONG)
    found: list[str] = []
    asker = threading.Thread(target=lambda: found.append(_hang.stacks()))
    asker.start()
    asker.join(LONG)
    leave.set()
    thread.join(LONG)
    assert found[0].startswith("Thread MainThread:")
    assert "Thread reader:" in found[0]
    assert "in wait_for_a_slow_disk" in found[0]


OUTPUT = """
import sys
from backstay._process import _hang
_hang.keep_output()
print("one"); print("two", file=sys.stderr)
assert _hang.output_end().split() == ["one", "two"], _hang.output_end()
"""


def test_the_end_of_the_output_is_kept_and_still_printed() -> None:
    done = subprocess.run([sys.executable, "-c", OUTPUT], capture_output=True, text=True, timeout=LONG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "one\n", "two\n")
