"""Phase and conditions follow from containers by the real kubelet's rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.kubelet.status import ContainerRecord, conditions_of, covers, phase_of, terminated, waiting

NOW, LATER = "2026-01-01T00:00:00Z", "2026-01-01T00:00:01Z"


def record(state: str, *, init: bool = False, sidecar: bool = False) -> ContainerRecord:
    made = ContainerRecord(name="side" if sidecar else "c", image="x", init=init or sidecar, sidecar=sidecar)
    if state == "running":
        made.state, made.started, made.ready = {"running": {"startedAt": NOW}}, True, True
    elif state == "backoff":
        made.state, made.last_state = waiting("CrashLoopBackOff"), terminated(1, "Error", "", finished=NOW)
    elif state != "waiting":
        made.state = terminated(int(state), "Error", "", finished=NOW)
    return made


@pytest.mark.parametrize(
    ("policy", "init", "containers", "phase"),
    [
        ("Never", [], ["waiting"], "Pending"),
        ("Never", [], ["running"], "Running"),
        ("Never", [], ["running", "waiting"], "Pending"),
        ("Never", [], ["running", "1"], "Running"),
        ("Never", [], ["0", "1"], "Failed"),
        ("Never", [], ["0", "0"], "Succeeded"),
        ("Never", [], ["137"], "Failed"),
        ("Never", ["running"], ["waiting"], "Pending"),
        ("Never", ["1"], ["waiting"], "Failed"),
        ("OnFailure", ["1"], ["waiting"], "Pending"),
        ("Never", ["0"], ["0"], "Succeeded"),
        ("Always", [], ["backoff"], "Running"),
        ("Always", [], ["0"], "Running"),
        ("OnFailure", [], ["1"], "Running"),
        ("OnFailure", [], ["0"], "Succeeded"),
    ],
)
def test_phase(policy, init, containers, phase):
    assert phase_of(policy, [record(s, init=True) for s in init], [record(s) for s in containers]) == phase


@pytest.mark.parametrize(
    ("policy", "sidecar", "init", "container", "phase"),
    [
        ("Never", "waiting", "waiting", "waiting", "Pending"),
        ("Never", "running", "0", "waiting", "Pending"),
        ("Never", "running", "0", "running", "Running"),
        ("Never", "backoff", "0", "running", "Running"),
        ("Never", "running", "0", "0", "Running"),
        ("Never", "backoff", "0", "0", "Running"),
        ("Never", "143", "0", "0", "Succeeded"),
        ("Never", "0", "0", "1", "Failed"),
        ("Never", "running", "1", "waiting", "Pending"),
        ("Never", "143", "1", "waiting", "Failed"),
        ("OnFailure", "4", "0", "0", "Succeeded"),
    ],
)
def test_a_pod_ends_after_its_sidecar_and_ignores_its_exit_code(policy, sidecar, init, container, phase):
    inits = [record(sidecar, sidecar=True), record(init, init=True)]
    assert phase_of(policy, inits, [record(container)]) == phase


@pytest.mark.parametrize(
    ("sidecar", "container", "initialized", "ready"),
    [
        ("running", "running", "True", "True"),
        ("backoff", "running", "True", "False"),
        ("running", "waiting", "True", "False"),
        ("backoff", "waiting", "False", "False"),
    ],
)
def test_a_sidecar_counts_for_conditions(sidecar, container, initialized, ready):
    inits = [record(sidecar, sidecar=True)]
    made = conditions_of([], "Running", inits, [record(container)], has_address=True, now=NOW)
    found = {c["type"]: c["status"] for c in made}
    assert (found["Initialized"], found["Ready"]) == (initialized, ready)


def test_foreign_conditions_stay_and_times_change_only_with_the_status():
    """O4: our next write keeps a `DisruptionTarget` that another client set."""
    foreign = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}
    first = conditions_of([foreign], "Running", [], [record("waiting")], has_address=True, now=NOW)
    assert foreign in first
    assert {c["type"]: c["status"] for c in first}["Ready"] == "False"
    same = conditions_of(first, "Running", [], [record("waiting")], has_address=True, now=LATER)
    assert covers(first, same)
    assert covers(same, first)
    after = {
        c["type"]: c for c in conditions_of(first, "Running", [], [record("running")], has_address=True, now=LATER)
    }
    assert after["Ready"]["status"] == "True"
    assert after["Ready"]["lastTransitionTime"] == LATER
    assert after["Initialized"]["lastTransitionTime"] == NOW
    assert after["DisruptionTarget"] == foreign


@pytest.mark.parametrize("phase", ["Succeeded", "Failed"])
def test_an_ended_pod_is_not_ready(phase):
    found = {c["type"]: c for c in conditions_of([], phase, [], [record("0")], has_address=True, now=NOW)}
    assert found["Ready"]["status"] == "False"
    assert found["Ready"]["reason"] == ("PodCompleted" if phase == "Succeeded" else "PodFailed")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON, st.dictionaries(st.text(min_size=5, max_size=6), JSON, max_size=2))
def test_what_a_server_adds_does_not_make_a_status_differ(value, extra):
    assert covers(value, value)
    assert covers({"a": value, **extra}, {"a": value})


@given(JSON.filter(bool))
def test_what_should_be_gone_or_is_missing_differs(value):
    assert not covers({"a": value}, {"a": None})
    assert not covers({}, {"a": value})
    assert not covers([value], [value, value])
