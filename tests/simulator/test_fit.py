"""Any timeline is fitted, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._simulator import Assumptions
from backstay._simulator._fit import fitted

SPAN = {"ph": "X", "cat": "worker", "pid": 1, "ts": 5e6, "dur": 2e6, "args": {"point": "compute", "step": 3}}
SPANS = [SPAN] * 9


def with_(**fields: Any) -> dict[str, Any]:
    return {**SPAN, **fields}


@pytest.mark.parametrize(
    "odd",
    [
        with_(dur=None),
        with_(dur="1"),
        with_(dur=[1]),
        with_(dur=float("nan")),
        with_(dur=-1e6),
        with_(dur=10**400),
        with_(ts={}),
        with_(args=[1]),
        with_(args="compute"),
        with_(args={"point": ["a"]}),
        with_(args={"point": "apply", "step": 10**400}),
        with_(pid=[1]),
        with_(pid={}),
        {"ph": "M", "name": "process_name", "pid": [1], "args": {"name": "worker-0"}},
        {"ph": "M", "name": "process_name", "pid": 2, "args": ["worker-0"]},
        {"ph": ["X"]},
        [],
        None,
    ],
)
def test_an_event_with_a_field_of_another_type_is_left_out(odd: Any) -> None:
    clean = fitted({"traceEvents": SPANS}, Assumptions())
    assert (clean.steps, clean.assumed.step.seconds) == (8, 2.0)
    assert fitted({"traceEvents": [odd, *SPANS, odd]}, Assumptions()) == clean


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["X", "M", "worker", "compute", "apply"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["point", "step"]), inner, max_size=2),
    max_leaves=4,
)


@given(st.lists(st.dictionaries(st.sampled_from([*SPAN, "name"]), VALUES, max_size=3), max_size=20), VALUES)
def test_any_trace_is_fitted_or_refused_with_a_reason(changes: list[dict[str, Any]], whole: Any) -> None:
    for trace in (whole, {"traceEvents": whole}, {"traceEvents": [with_(**change) for change in changes]}):
        try:
            fit = fitted(trace, Assumptions())
        except ValueError as error:
            assert "backstay trace" in str(error)  # noqa: PT017
        else:
            assert fit.assumed.step.seconds > 0


def test_what_a_timeline_does_not_show_stays_assumed() -> None:
    step = {"factors": {0: 3.0}, "examples": 7, "localSteps": 4, "fragments": 2, "processorSeconds": 0.5}
    found = fitted({"traceEvents": SPANS}, Assumptions.model_validate({"step": step})).assumed.step
    kept = found.model_dump(by_alias=True)
    assert {name: kept[name] for name in step} == step
    assert found.seconds == 0.5
