"""A timeline becomes a trace that Perfetto opens: one clock, arrows that have two ends, slices that nest."""

from __future__ import annotations

import gzip
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from between import LONG, put
from hypothesis import given
from hypothesis import strategies as st
from trace_format import check, spans, step, timeline
from typer.testing import CliRunner

from backstay_cli.main import app
from backstay_cli.run import Following, keep_trace
from backstay_client.errors import BadInput
from backstay_client.finding.stored_run import StateFile
from backstay_client.jobfiles.jobfile import refuse_unwritable
from backstay_client.reading.timeline import BadTimeline, chrome_trace, read
from backstay_client.reading.trace import trace_of_file, write_trace
from backstay_client.show.lines import LineDisplay
from backstay_client.view.follow import ShownEntry
from backstay_rpc.control_pb2 import Spans, Timeline

SERVER, WORKER = "parameter-server", "worker"


def receive(at: float, flow: str, rank: int = 0) -> tuple[Any, ...]:
    return ("receive", at, at + 0.01, 1, {"rank": rank, "flow": flow, "complete": True}, "stream")


def test_a_step_is_on_one_clock_with_an_arrow_for_its_contribution() -> None:
    job = read(
        timeline(
            spans(SERVER, 0, [receive(10.052, "f"), ("apply", 10.07, 10.08, 1)]),
            spans(WORKER, 0, step(10.0, "f"), ahead=500.0, offsets=[(0, 1, -500.001, 0.004)]),
        )
    )
    trace = chrome_trace(job)
    check(trace)
    (arrow,) = [(e["ts"], e["pid"]) for e in trace["traceEvents"] if e["ph"] == "f"]
    assert arrow == (pytest.approx(52_000, abs=4_000), 1000)
    (compute,) = [e for e in trace["traceEvents"] if e["name"] == "compute"]
    assert compute["args"] == {"point": "compute", "step": 1}
    error = trace["otherData"]["clockErrorSeconds"]["worker 0"]
    assert abs(job.pods[1].clock.offset + 500) <= error <= 0.004


def test_another_servers_clock_is_compared_by_a_worker_that_measured_both() -> None:
    measured = [(0, 1, -5.0, 0.001), (1, 1, -7.0, 0.002)]
    job = read(
        timeline(
            spans(SERVER, 0, [receive(10.052, "f")]),
            spans(SERVER, 1, [("apply", 10.0, 10.1, 1)], ahead=-2.0),
            spans(WORKER, 0, step(10.0, "f"), ahead=5.0, offsets=measured),
        )
    )
    server = next(pod for pod in job.pods if (pod.role, pod.index) == (SERVER, 1))
    assert server.clock.offset == pytest.approx(2.0, abs=1e-9)
    assert server.clock.error == pytest.approx(0.003)


def test_only_the_newest_seconds_are_kept() -> None:
    job = read(
        timeline(spans(SERVER, 0, [("apply", 1, 2, 1), ("apply", 50, 51, 2)]), spans(WORKER, 0, [("x", 1, 2, 1)]))
    )
    kept = job.newest(10.0)
    assert [(pod.role, [span.step for span in pod.spans]) for pod in kept.pods] == [(SERVER, [2])]
    assert read(timeline()).newest(1.0).pods == ()


def test_a_pod_that_measured_nothing_is_placed_by_its_wall_clock() -> None:
    job = read(
        timeline(spans(SERVER, 0, [("apply", 1, 2, 1)]), spans("evaluator", 0, [("evaluate", 1, 2, 1)], ahead=9))
    )
    assert (job.pods[1].clock.offset, job.pods[1].clock.error) == (pytest.approx(-9.0), None)
    check(chrome_trace(job))


def test_spans_that_a_new_server_was_sent_again_are_there_once_and_slices_nest() -> None:
    overlapping = [
        ("apply", 1.0, 2.0, 1),
        ("apply", 1.5, 2.5, 2),
        ("checkpoint", 1.2, 3.0, 1, None, "backstay-checkpoint"),
    ]
    trace = chrome_trace(read(timeline(spans(SERVER, 0, overlapping), spans(SERVER, 0, overlapping))))
    check(trace)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["apply updates", "backstay-checkpoint", "apply updates (2)"]
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == 3


def test_deaths_are_instants_and_replacements_are_spans_that_end_with_the_next_death() -> None:
    history = [
        ShownEntry(1_000_020.0, "Normal", "Running", "all pods train"),
        ShownEntry(1_000_030.0, "Warning", "Crashed", "pod x died: exit code 137", "worker-1", 1_000_050.0),
        ShownEntry(1_000_040.0, "Warning", "Crashed", "pod y died: exit code 137", "worker-1", 1_000_050.0),
        ShownEntry(900_000.0, "Normal", "Running", "long ago"),
        ShownEntry(None, "Normal", "NoTime", "nobody knows"),
    ]
    trace = chrome_trace(
        read(timeline(spans(SERVER, 0, [("apply", 25.0, 26.0, 1)]), spans(WORKER, 1, [("compute", 25, 26, 1)]))),
        history,
    )
    check(trace)
    instants = [(e["name"], e["s"], e["ts"]) for e in trace["traceEvents"] if e["ph"] == "i"]
    assert instants == [
        ("Running", "t", 0.0),
        ("worker 1 died: Crashed", "t", 10e6),
        ("worker 1 died: Crashed", "p", 10e6),
        ("worker 1 died: Crashed", "t", 20e6),
        ("worker 1 died: Crashed", "p", 20e6),
    ]
    replaced = [(e["ts"], e["dur"]) for e in trace["traceEvents"] if e["name"] == "worker 1: replacement"]
    assert replaced == [(10e6, 10e6), (20e6, 10e6)]


@given(
    ahead=st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=3),
    errors=st.lists(st.tuples(st.floats(1e-6, 0.02), st.floats(-1, 1)), min_size=4, max_size=4),
    delays=st.lists(st.floats(0.0, 0.02), min_size=1, max_size=6),
)
def test_the_true_offset_is_within_the_stated_error(
    ahead: list[float], errors: list[tuple[float, float]], delays: list[float]
) -> None:
    """Two servers and up to three workers whose clocks differ; each measurement has an error within its bound."""
    other = ahead[0]
    sent: list[Spans] = []
    taken: dict[int, list[tuple[Any, ...]]] = {0: [], 1: []}
    for rank, own in enumerate(ahead[1:]):
        (first, wrong), (second, wrong_too) = errors[2 * rank], errors[2 * rank + 1]
        measured = [(0, 1, -own + wrong * first, first), (1, 1, other - own + wrong_too * second, second)]
        steps: list[tuple[Any, ...]] = []
        for number, delay in enumerate(delays):
            flow = f"{rank}.{number}"
            steps += step(10.0 + number, flow)
            for server in (0, 1):
                taken[server].append(receive(10.05 + number + delay, flow, rank))
        sent.append(spans(WORKER, rank, steps, ahead=own, offsets=measured))
    job = read(timeline(spans(SERVER, 0, taken[0]), spans(SERVER, 1, taken[1], ahead=other), *sent))
    check(chrome_trace(job))
    for pod in job.pods:
        true = {(SERVER, 0): 0.0, (SERVER, 1): -other}.get((pod.role, pod.index))
        true = -ahead[1:][pod.index] if true is None else true
        assert pod.clock.error is not None
        assert abs(pod.clock.offset - true) <= pod.clock.error + 1e-7


@pytest.mark.parametrize(
    "data",
    [b"\xff\xff", Timeline(spans=[b"\xff"]).SerializeToString(), timeline(Spans(point=[3], thread=[0], began=[1]))],
)
def test_bytes_that_are_not_a_timeline_are_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadTimeline, match="it is not a timeline"):
        read(data)
    with pytest.raises(BadInput, match="somewhere: it is not a timeline"):
        write_trace(data, (), tmp_path / "out.json", "somewhere")
    assert list(tmp_path.iterdir()) == []


def test_the_newest_stored_timeline_of_a_folder_is_written(tmp_path: Path) -> None:
    for number, point in ((1, "old"), (2, "new")):
        content = timeline(spans(SERVER, 0, [(point, 1.0, 2.0, 1)]))
        put(tmp_path / f"trace-{number:012d}-abc-1.pb.gz", gzip.compress(content))
    put(tmp_path / "trace-of-somebody.json", "{}")
    out = tmp_path / "out.json"
    result = CliRunner().invoke(app, ["trace", "--from", str(tmp_path), "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert "1 span of 1 pod over 1 s" in result.output
    trace = json.loads(out.read_bytes())
    check(trace)
    assert [e["name"] for e in trace["traceEvents"] if e["ph"] == "X"] == ["new"]
    packed = tmp_path / "out.json.gz"
    trace_of_file(str(tmp_path / "trace-000000000001-abc-1.pb.gz"), packed)
    assert b'"old"' in gzip.decompress(packed.read_bytes())


def test_a_job_of_an_embedded_cluster_keeps_its_own_timeline(tmp_path: Path) -> None:
    """The name of another job, whose timeline is newer, begins with this one's."""
    for number, (job, point) in enumerate((("digits", "own"), ("digits-2", "other")), 1):
        folder = tmp_path / "default" / f"{job}-ps-0-1-abcde"
        folder.mkdir(parents=True)
        content = timeline(spans(SERVER, 0, [(point, 1.0, 2.0, 1)]))
        put(folder / f"trace-{number:012d}-abc-1.pb.gz", gzip.compress(content))
    lines: list[str] = []
    out = tmp_path / "out.json"
    job_of_run = {"metadata": {"namespace": "default", "name": "digits"}}
    keep_trace(
        out, Following(job_of_run, LineDisplay(lines.append), tmp_path, StateFile(tmp_path)), tmp_path, lines.append
    )
    assert [e["name"] for e in json.loads(out.read_bytes())["traceEvents"] if e["ph"] == "X"] == ["own"]
    assert lines[0].startswith("wrote ")


@pytest.mark.parametrize(("place", "why"), [("nowhere", "cannot be read"), ("empty", "cannot be read")])
def test_a_place_without_a_timeline_is_named(place: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    result = CliRunner().invoke(app, ["trace", "--from", str(tmp_path / place), "-o", str(tmp_path / "x")])
    assert result.exit_code == 2
    assert place in result.output
    assert why in result.output


def test_a_file_that_cannot_be_written_is_named_and_none_is_left(tmp_path: Path) -> None:
    content = timeline(spans(SERVER, 0, [("apply", 1.0, 2.0, 1)]))
    with pytest.raises(BadInput, match=r"--out: .*no/out\.json cannot be written"):
        write_trace(content, (), tmp_path / "no" / "out.json", "here")


def test_a_pipe_is_written_and_a_link_stays(tmp_path: Path) -> None:
    """`--trace` of a file that is not a regular one, such as a device, does not replace it."""
    content = timeline(spans(SERVER, 0, [("apply", 1.0, 2.0, 1)]))
    pipe, link, file = tmp_path / "pipe", tmp_path / "link", tmp_path / "trace.json"
    os.mkfifo(pipe)
    put(file, "old")
    link.symlink_to(file)
    refuse_unwritable(pipe, "--trace")
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_trace(content, (), pipe, "here")
    reader.join(LONG)
    assert pipe.is_fifo()
    write_trace(content, (), link, "here")
    assert link.is_symlink()
    assert got == [file.read_bytes()]
    assert b"traceEvents" in got[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "trace.json"]


def test_what_a_server_has_stored_before_it_was_killed_is_in_the_trace_of_its_successor(tmp_path: Path) -> None:
    """The clock of the successor is 300 s ahead; a worker that lives on has compared its clock with both."""
    lost = [("apply", 10.07, 10.08, 1), receive(10.052, "f")]
    before = timeline(
        spans(SERVER, 0, lost),
        spans(WORKER, 0, step(10.0, "f"), ahead=5.0, offsets=[(0, 1, -5.0, 0.001)]),
        spans(WORKER, 1, [("compute", 9.0, 9.5, 1)], ahead=-2.0, offsets=[(0, 1, 2.0, 0.002)]),
        dropped=5,
    )
    after = timeline(
        spans(SERVER, 0, [("apply", 20.0, 20.1, 2)], incarnation=2, ahead=300.0),
        spans(WORKER, 0, [*step(10.0, "f"), ("compute", 19.0, 19.1, 2)], ahead=5.0, offsets=[(0, 2, 295.001, 0.003)]),
        incarnation=2,
        ahead=300.0,
        dropped=10,
    )
    for number, (incarnation, data) in enumerate([(1, before), (2, after)]):
        put(tmp_path / f"trace-00000000000{number}-u-{incarnation}.pb.gz", gzip.compress(data))
    put(tmp_path / "trace-000000000000-u-3.pb.gz", b"torn")
    written = trace_of_file(str(tmp_path), tmp_path / "out.json")
    shown = {pod.shown: pod for pod in written.job.pods}
    assert list(shown) == ["server 0", "server 0 #2", "worker 0", "worker 1"]
    assert [len(pod.spans) for pod in shown.values()] == [2, 1, 6, 1], "spans that both have are there once"
    assert shown["server 0"].clock.offset == pytest.approx(300.0, abs=0.004)
    assert shown["server 0"].clock.error == pytest.approx(0.004, abs=1e-9)
    true = {"server 0": 300.0, "server 0 #2": 0.0, "worker 0": 295.0, "worker 1": 302.0}
    for name, pod in shown.items():
        assert pod.clock.error is not None
        assert abs(pod.clock.offset - true[name]) <= pod.clock.error + 1e-9
    trace = json.loads((tmp_path / "out.json").read_text())
    check(trace)
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == 1
    assert trace["otherData"]["droppedBytes"] == 15, "of each server once"


def test_the_death_of_a_server_is_marked_in_its_process_and_not_in_that_of_its_standby() -> None:
    job = read(
        timeline(
            spans(SERVER, 0, [("apply", 10.0, 11.0, 1)], incarnation=2),
            spans(SERVER, 0, [("apply", 5.0, 6.0, 1)]),
        )
    )
    died = ShownEntry(1_000_012.0, "Warning", "Crashed", "exit code 137", "parameter-server-0", None, 1)
    events = chrome_trace(job, [died])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    marked = [names[e["pid"]] for e in events if e["ph"] == "i" and e["s"] == "p"]
    assert marked == ["server 0 (clock ± 0 ms)"]
