"""A trace of jax.profiler is joined with the timeline of its worker, on the same clock."""

from __future__ import annotations

import contextlib
import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
from between import put
from hypothesis import given
from hypothesis import strategies as st
from trace_format import check, spans, timeline

from backstay_client.errors import BadInput
from backstay_client.reading.jax_profile import joined, read_profile
from backstay_client.reading.records import unpacked
from backstay_client.reading.timeline import chrome_trace, read
from backstay_client.reading.trace import WantedTrace, write_trace
from backstay_rpc.control_pb2 import Spans

WORKER = "worker"


def test_a_profile_of_a_few_steps_is_on_the_clock_of_its_worker(tmp_path: Path) -> None:
    """`jax.profiler` itself writes the trace. As in a worker, a span begins before the annotation and ends after it."""
    import jax
    from jax.profiler import StepTraceAnnotation

    @jax.jit
    def gradient(x: Any) -> Any:
        return (x @ x).sum()

    x = jax.numpy.ones((200, 200))
    gradient(x).block_until_ready()
    items: list[tuple[Any, ...]] = []
    with jax.profiler.trace(str(tmp_path / "profile")):
        for step in range(4):
            began = time.monotonic()
            with StepTraceAnnotation("train", step_num=step):
                gradient(x).block_until_ready()
            items.append(("compute", began, time.monotonic(), step))
    data = timeline(spans("parameter-server", 0, [("apply", 1.0, 2.0, 1)]), spans(WORKER, 1, items))

    written = write_trace(data, (), tmp_path / "out.json", "here", WantedTrace(None, tmp_path / "profile", 1))
    trace = json.loads((tmp_path / "out.json").read_text())
    check(trace)
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    (profile,) = [pid for pid, name in names.items() if name.startswith("worker 1: JAX /host:CPU")]
    (worker,) = [pid for pid, name in names.items() if name.startswith("worker 1 (")]
    assert profile == worker + 1000, "its tracks are below those of the worker"
    own = {e["args"]["step"]: e for e in trace["traceEvents"] if e["name"] == "compute"}
    steps = {int(e["args"]["step_num"]): e for e in trace["traceEvents"] if e["name"] == "train"}
    assert own.keys() == steps.keys() == {0, 1, 2, 3}
    assert written.profile_error is not None
    error = written.profile_error * 1e6 + 0.002
    for step, span in steps.items():
        assert own[step]["ts"] - error <= span["ts"]
        assert span["ts"] + span["dur"] <= own[step]["ts"] + own[step]["dur"] + error
    assert "the clock of the JAX profile" in written.summary()


def computed(steps: dict[int, tuple[float, float]], incarnation: int = 1) -> Spans:
    items = [("compute", began, ended, step) for step, (began, ended) in steps.items()]
    return spans(WORKER, 0, items, incarnation=incarnation, offsets=[(0, 1, 0.0, 0.001)])


def annotated(steps: dict[int, tuple[float, float]]) -> list[dict[str, Any]]:
    return [
        {"ph": "X", "pid": 7, "tid": 1, "name": "train", "ts": 1e6 * began, "dur": 1e6 * (ended - began)}
        | {"args": {"step_num": str(step)}}
        for step, (began, ended) in steps.items()
    ]


@given(
    ahead=st.floats(-1e4, 1e4),
    slacks=st.lists(st.tuples(st.floats(0, 0.01), st.floats(0, 0.01)), min_size=1, max_size=6),
)
def test_the_true_offset_of_a_profile_is_within_the_stated_error(
    ahead: float, slacks: list[tuple[float, float]]
) -> None:
    """A worker's span of a step begins before the annotation and ends after it."""
    own = {step: (10.0 + step, 10.5 + step) for step in range(len(slacks))}
    inside = {
        step: (own[step][0] + before - ahead, own[step][1] - after - ahead)
        for step, (before, after) in enumerate(slacks)
    }
    job, error = joined(read(timeline(computed(own))), annotated(inside), 0)
    (profile,) = [pod for pod in job.pods if pod.role == "jax"]
    assert abs(profile.clock.offset - ahead) <= error + 1e-6
    assert profile.clock.error == pytest.approx(error + 0.001)
    check(chrome_trace(job))


def test_of_two_pods_of_a_rank_the_one_whose_steps_fit_is_joined() -> None:
    first = {1: (10.0, 10.1), 2: (10.2, 10.3)}
    second = {1: (20.0, 20.1), 2: (20.9, 21.0)}  # it computed both again, after a rollback
    job, _ = joined(read(timeline(computed(first), computed(second, 2))), annotated({1: (0.0, 0.1), 2: (0.2, 0.3)}), 0)
    assert [pod.shown for pod in job.pods] == ["worker 0", "worker 0: JAX process 7", "worker 0 #2"]


@pytest.mark.parametrize(
    ("profile", "rank", "why"),
    [
        (annotated({50: (0.0, 0.1)}), 0, "the steps 50 to 50, and the timeline has none of them for worker 0"),
        ([], 0, "the profile has no step"),
        (annotated({1: (0.0, 0.1)}), 3, "--rank is one of 0"),
    ],
)
def test_a_profile_that_does_not_fit_is_refused(profile: list[dict[str, Any]], rank: int, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        joined(read(timeline(computed({1: (10.0, 10.2)}))), profile, rank)


VALUES = st.none() | st.integers(-(10**400), 10**400) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
TREES = st.recursive(VALUES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=4)
STRANGE = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.sampled_from(["X", "M", "B"]) | TREES,
        "name": st.sampled_from(["train", "process_name", "thread_name"]) | TREES,
        "args": st.dictionaries(st.sampled_from(["step_num", "name"]), TREES | st.just("1") | st.just("²")) | TREES,
        "pid": st.just(7) | TREES,
        "tid": st.just(1) | TREES,
        "ts": st.floats(0, 1e6) | TREES,
        "dur": st.floats(0, 1e6) | TREES,
    },
)


@given(st.lists(STRANGE | TREES, max_size=4))
def test_no_event_of_another_format_breaks_the_trace(tmp_path_factory: pytest.TempPathFactory, strange: Any) -> None:
    file = tmp_path_factory.mktemp("profile") / "host.trace.json"
    put(file, json.dumps({"traceEvents": [*strange, *annotated({1: (0.0, 0.1)})]}))
    job = read(timeline(computed({1: (10.0, 10.2)})))
    with contextlib.suppress(BadInput):  # its steps do not fit
        job, _ = joined(job, read_profile(file), 0)
    json.dumps(chrome_trace(job), allow_nan=False)


def test_a_file_that_is_too_large_when_it_is_decompressed_is_refused() -> None:
    assert unpacked(gzip.compress(bytes(1000)), 1000) == bytes(1000)
    with pytest.raises(BadInput, match="too large: must have at most 999 bytes"):
        unpacked(gzip.compress(bytes(1000)), 999)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b"\x1f\x8b torn",
        gzip.compress(b'{"traceEvents": 3}', mtime=0),
        b'{"traceEvents": [{"args": NaN}]}',
        b'{"traceEvents": [{"args": 1e999}]}',
        b'{"traceEvents": ' + b"[" * 100_000,
    ],
)
def test_a_file_that_is_not_a_profile_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"has no \*.trace.json.gz"):
        read_profile(tmp_path)
    put(tmp_path / "host.trace.json.gz", content)
    with pytest.raises(BadInput, match=r"host.trace.json.gz is not a trace"):
        read_profile(tmp_path)
