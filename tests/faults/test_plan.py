"""The language of fault scripts accepts what is written correctly, and refuses what is misspelt."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay._faults import Fault, faults_of, parse
from backstay._faults._plan import DURATIONS, POINTS, ROLES
from backstay_spec import contract
from backstay_spec.runtime import CheckpointConfig, RuntimeConfig


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    action = draw(st.sampled_from(sorted(DURATIONS)))
    roles = {"fill": ["server"], "corrupt": ["server", "worker"], "nan": ["worker"]}.get(action, sorted(ROLES))
    role = ROLES[draw(st.sampled_from(roles))]
    seconds = draw(st.integers(1, 86_400_000)) / 1000 if DURATIONS[action] != "no" else None
    if DURATIONS[action] == "may" and draw(st.booleans()):
        seconds = None
    return Fault(
        action=action,
        role=role,
        index=draw(st.none() | st.integers(0, 999)),
        incarnation=draw(st.none() | st.integers(1, 99)),
        step=draw(st.integers(0, 10**9 - 1)),
        point=POINTS[role][0] if action == "nan" else draw(st.sampled_from(POINTS[role])),
        seconds=seconds,
        code=draw(st.integers(0, 255)) if action == "exit" else None,
        member=draw(st.none() | st.integers(0, 99)) if role == contract.ROLE_WORKER else None,
    )


@given(st.lists(faults()), st.sampled_from(["; ", ";", "\n", " ;\n; "]))
def test_what_is_written_is_read_back(script: list[Fault], between: str) -> None:
    assert parse(between.join(map(str, script))) == tuple(script)


@given(st.text(alphabet="abcdefkilstopwrverny/@#;.*0123456789 \n", max_size=60))
def test_any_text_is_a_script_or_refused_by_name(text: str) -> None:
    """An accepted script is equal after printing and parsing it again; only ValueError is raised."""
    try:
        found = parse(text)
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
        assert parse("; ".join(map(str, found))) == found
    assert not refusal or refusal.startswith("FAULT_INJECTION: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kil worker/1 @12", "'kil' is not an action: must be one of kill, stop"),
        ("kill worker @12", "'worker' is not a pod: must be such as worker/1"),
        ("kill ps/1 @12", "'ps/1' is not a pod"),
        ("kill worker/-1 @12", "'-1' is not an index"),
        ("kill worker/1.x @12", "'1.x' is not a pod of a rank: must be such as worker/1.0"),
        ("kill server/1.0 @12", "'1.0' is not a pod of a rank: must be such as worker/1.0, for a worker"),
        ("kill worker/1#0 @12", "'0' is not an incarnation: must be 1 or more"),
        ("kill worker/1 12", "'12' is not a step: must be such as @12"),
        ("kill worker/1", "'' is not a step"),
        ("kill worker/1 @12 applied", "'applied' is not valid here: kill takes one of compute, push"),
        ("kill worker/1 @12 3s", "'3s' is not valid here"),
        ("delay worker/1 @12", "the duration is missing"),
        ("delay worker/1 @12 0s", "'0s' is not a duration"),
        ("stop server/0 @30 5", "'5' is not valid here: stop takes"),
        ("exit worker/1 @12", "the exit status is missing"),
        ("exit worker/1 @12 256", "'256' is not valid here"),
        ("fill worker/1 @12 3s", "only servers write checkpoints"),
        ("nan server/0 @12", "only workers compute"),
        ("nan worker/1 @12 push", "only workers compute"),
        ("corrupt evaluator/0 @12", "an evaluator sends no tensors"),
        ("stop server/0 @1 5s; stop server/1 @1 5s 6s", "'stop server/1 @1 5s 6s': '6s' is not valid here"),
    ],
)
def test_a_mistake_is_refused_with_what_would_be_valid(text: str, says: str) -> None:
    with pytest.raises(ValueError, match="FAULT_INJECTION") as caught:
        parse(text)
    assert says in str(caught.value)


def test_a_fault_is_for_the_first_incarnation_unless_it_names_another() -> None:
    """O4: a replacement that dies of the same fault again would only spend the budget."""
    (one,) = parse("kill worker/1 @12")
    assert one.matches(contract.ROLE_WORKER, 1, 1)
    assert not one.matches(contract.ROLE_WORKER, 1, 2)
    assert not one.matches(contract.ROLE_WORKER, 0, 1)
    assert not one.matches(contract.ROLE_SERVER, 1, 1)
    (every,) = parse("kill worker/*#* @12")
    assert every.matches(contract.ROLE_WORKER, 7, 9)
    (second,) = parse("kill worker/*.1 @12")
    assert [second.matches(contract.ROLE_WORKER, 7, 1, member) for member in range(3)] == [False, True, False]
    assert [one.matches(contract.ROLE_WORKER, 1, 1, member) for member in range(3)] == [True] * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kill server/2 @1", "'kill server/2 @1': the job has no server 2: must be less than 2"),
        ("kill worker/0 @1; hang worker/*.3 @1", "'hang worker/*.3 @1': a rank of the job has no pod 3"),
        ("stop evaluator/0 @1", "the job has no evaluator: must be a worker or a server"),
        ("kill server/0#2 @0 state", "the job has no standby, so no server reaches the point state"),
        ("kill server/0 @4 rename", "the job stores no checkpoints, so rename never happens: set checkpoint"),
        ("fill server/0 @4 3s", "the job stores no checkpoints, so fill never happens: set checkpoint"),
        ("kill server/1 @3 manifest", "only server 0 stores manifests: must be server/0"),
    ],
)
def test_a_pod_or_a_point_that_the_job_never_has_is_refused(text: str, says: str) -> None:
    """A fault that nothing carries out would look like one that the job survived."""
    config = RuntimeConfig(shards=2, workers=2, pods_per_rank=3)
    with pytest.raises(ValueError, match=re.escape(says)):
        faults_of(text, config)
    assert len(faults_of("kill server/1 @1; kill server/* @2; kill worker/9.2 @1", config)) == 3
    with pytest.raises(ValueError, match=re.escape("the job has no evaluator 1: must be evaluator/0")):
        faults_of("stop evaluator/1 @1", RuntimeConfig(shards=1, workers=1, evaluator=True))
    complete = RuntimeConfig(shards=2, workers=1, standbys=1, checkpoint=CheckpointConfig(uri="/c", every_steps=1))
    for point in ("state", "follow"):
        with pytest.raises(ValueError, match=re.escape("must be such as server/1#2, or server/1#*")):
            faults_of(f"kill server/1 @30 {point}", complete)
        assert len(faults_of(f"kill server/1#2 @30 {point}; kill server/*#* @3 {point}", complete)) == 2
    assert len(faults_of("kill server/* @3 manifest; kill server/1 @3 rename; fill server/1 @3 2s", complete)) == 3
