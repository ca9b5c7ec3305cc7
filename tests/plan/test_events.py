"""Events are for `kubectl describe`: a table with one line for each."""

from __future__ import annotations

import json
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from backstay_spec import contract
from backstay_spec.events import MAX_EVENT, normal, one_line, warning
from backstay_spec.planner.new_status import PlannedStatus, with_history
from backstay_spec.records import merged
from backstay_spec.types_status import TrainingJobStatus

TAIL = """Traceback (most recent call last):
  File "/work/train.py", line 7, in <module>
    loss(params)
jax.errors.ConcretizationTypeError: Abstract tracer value
--------------------
For simplicity, JAX has removed its internal frames."""


@given(st.text())
def test_an_event_is_one_short_line(text: str) -> None:
    for event in (normal("A", text), warning("A", text)):
        assert len(event.message.splitlines()) <= 1
        assert len(event.message) <= MAX_EVENT


def test_of_a_log_the_line_that_states_the_reason_is_kept() -> None:
    assert one_line(f"exit code 1: {TAIL}") == (
        "exit code 1: … jax.errors.ConcretizationTypeError: Abstract tracer value"
    )
    assert one_line("exit code 1: step 7\nstep 8\nkilled") == "exit code 1: step 7 … killed"
    assert one_line("one line") == "one line"
    assert one_line("") == ""
    assert one_line("exit code 1: " + "x" * 1000 + "\nstep 8\nRuntimeError: why", 60).endswith("x… … RuntimeError: why")
    long = one_line("who " + "x" * 1000 + " why")
    assert len(long) == MAX_EVENT
    assert long.startswith("who x")
    assert long.endswith("x why")


def test_the_death_of_a_pod_states_the_reason_and_what_happens_next(running):
    """The whole text is in the conditions of a job that failed by it, and the log is in the pod."""
    cluster = running({"workers": {"replicas": 2, "maxRestarts": 1}, "checkpoint": {"uri": "file:///c"}})
    pod = cluster.named(contract.ROLE_WORKER, 0)
    cluster.end(pod, 1, TAIL)
    cluster.settle()
    message = next(text for reason, text in cluster.events if reason == "Crashed")
    assert "ConcretizationTypeError: Abstract tracer value" in message
    assert message.endswith(f"`kubectl logs {pod}` shows more")
    assert "restart 1 of 1" in message
    assert len(message.splitlines()) == 1
    cluster.tick(60)
    cluster.settle()
    cluster.run_all()
    cluster.end(cluster.named(contract.ROLE_WORKER, 0), 1, TAIL)
    cluster.settle()
    assert cluster.status["phase"] == "Failed"
    assert "For simplicity" in cluster.condition("Failed")["message"]
    assert len(next(text for reason, text in cluster.events if reason == "Failed").splitlines()) == 1


def test_the_status_keeps_the_newest_events_with_the_slot_that_died(running):
    """O5: the API server deletes events after an hour, and a restarted operator has none of them."""
    cluster = running({"workers": {"replicas": 2, "maxRestarts": 1000}, "checkpoint": {"uri": "file:///c"}})
    before = cluster.status["history"]
    assert [entry["reason"] for entry in before] == ["Running"]
    pod = cluster.named(contract.ROLE_WORKER, 1)
    cluster.end(pod, 137)
    cluster.settle()
    entry = cluster.status["history"][-1]
    assert (entry["reason"], entry["slot"], entry["type"]) == ("Crashed", "worker-1", "Warning")
    assert pod in entry["message"]
    kept = cluster.status["history"]
    cluster.restart_operator()
    cluster.memory.secret_at = cluster.now
    cluster.settle()
    assert cluster.status["history"][: len(kept)] == kept


def test_the_history_in_the_status_is_bounded():
    now = datetime(2026, 11, 22, tzinfo=UTC)
    old = TrainingJobStatus()
    for number in range(120):
        events = (normal("Running", f"{number} " + "x" * 1000), normal("Evaluated", "of step 3"))
        written = with_history(PlannedStatus({"phase": "Running"}), old, events, now)
        old = TrainingJobStatus.model_validate(written.status)
    assert [entry.message.split()[0] for entry in old.history] == [str(n) for n in range(70, 120)]
    assert len(json.dumps(old.to_dict())) < 25_000
    assert with_history(PlannedStatus(), old, (normal("A", "b"),), now).status is None


def test_the_history_names_both_pods_of_a_slot_that_died_at_the_same_time():
    """The active server of a shard and its standby can die between two plans."""
    now = datetime(2026, 11, 22, tzinfo=UTC)
    events = tuple(warning("Crashed", f"pod {n} died", "parameter-server-0", n) for n in (1, 2))
    status = with_history(PlannedStatus({"phase": "Running"}), TrainingJobStatus(), events, now).status
    assert [entry["incarnation"] for entry in status["history"]] == [1, 2]
    assert [entry["incarnation"] for entry in merged(status["history"], status["history"])] == [1, 2]


def test_the_history_states_when_a_slot_took_part_in_training_again(running):
    """A worker's first contribution, or a server's next update, shows what the death cost."""
    cluster = running({"workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}})
    cluster.answer(term=1, step=5, contributed={0: 1, 1: 1})
    cluster.settle()
    cluster.end(cluster.named(contract.ROLE_WORKER, 1), 137)
    cluster.settle()
    cluster.tick(3)
    cluster.answer(term=1, step=6, contributed={0: 1, 1: 1})
    cluster.settle()
    assert "recovered" not in cluster.status["history"][-1]
    cluster.tick(12)
    cluster.answer(term=1, step=7, contributed={0: 1, 1: 2})
    cluster.settle()
    entry = cluster.status["history"][-1]
    assert (entry["slot"], entry["incarnation"]) == ("worker-1", 1)
    before = datetime.fromisoformat(entry["time"])
    assert (datetime.fromisoformat(entry["recovered"]) - before).total_seconds() == 15
    cluster.tick(60)
    cluster.answer(term=1, step=8, contributed={0: 1, 1: 2})
    cluster.settle()
    assert entry in cluster.status["history"], "the first time counts"


def test_a_server_takes_part_again_with_its_first_update_and_not_with_its_first_report(running):
    """The standby holds updates that no report to the operator contained before the server died."""
    cluster = running({"parameterServers": {"replicas": 1, "standbys": 1}, "checkpoint": {"uri": "file:///c"}})
    cluster.answer(term=1, step=5, coordinator=1, in_sync={0: 2})
    cluster.settle()
    cluster.end(cluster.named(contract.ROLE_SERVER, 0, 1), 137)
    cluster.settle()
    cluster.tick(0.05)
    cluster.answer(term=1, step=9, coordinator=2)
    cluster.settle()
    (death,) = (entry for entry in cluster.status["history"] if entry.get("slot") == "parameter-server-0")
    assert "recovered" not in death
    cluster.tick(1)
    cluster.answer(term=1, step=10, coordinator=2)
    cluster.tick(12)  # the status is written every 10 s
    cluster.answer(term=1, step=11, coordinator=2)
    cluster.settle()
    (death,) = (entry for entry in cluster.status["history"] if entry.get("slot") == "parameter-server-0")
    before = datetime.fromisoformat(death["time"])
    assert (datetime.fromisoformat(death["recovered"]) - before).total_seconds() == 1.05


def test_running_states_that_no_worker_is_ready_until_one_is(running):
    """After an interruption, the steps of a new worker are reported before Kubernetes shows that it is ready."""
    cluster = running({"workers": {"replicas": 1}, "checkpoint": {"uri": "file:///c"}})
    cluster.answer(term=1, step=5)
    cluster.settle()
    cluster.end(cluster.named(contract.ROLE_WORKER, 0), 1)
    cluster.settle()
    cluster.tick(31)
    cluster.settle()
    assert cluster.condition("Running")["reason"] == "WorkersNotReady"
    for step in (6, 7, 8):
        cluster.answer(term=1, step=step)
        cluster.settle()
        cluster.tick(11)
        assert cluster.condition("Running")["reason"] == "WorkersNotReady"
    cluster.run_all()
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
    (began, again) = [event for event in cluster.events if event[0] == "Running"]
    assert str(began).endswith("at least one worker are ready')")
    assert "ready again" in str(again)


def test_an_interruption_is_one_event_for_any_order_of_causes(running):
    cluster = running({"workers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"}})
    cluster.answer(term=1, step=5)
    cluster.settle()
    cluster.run(cluster.named(contract.ROLE_SERVER, 0), ready=False)
    cluster.tick(11)
    cluster.settle()
    cluster.run(cluster.named(contract.ROLE_SERVER, 0))
    for rank in range(2):
        cluster.run(cluster.named(contract.ROLE_WORKER, rank), ready=False)
    cluster.tick(11)
    cluster.settle()
    assert cluster.condition("Training")["reason"] == "WorkersNotReady"
    assert [reason for reason, _ in cluster.events].count("TrainingInterrupted") == 1


def test_a_job_without_a_worker_does_not_run_although_no_update_was_made(running):
    """Running stayed True until the first update, also without pods."""
    cluster = running({"workers": {"replicas": 1}, "checkpoint": {"uri": "file:///c"}})
    assert cluster.condition("Running")["status"] == "True"
    cluster.delete(cluster.named(contract.ROLE_WORKER, 0))
    cluster.settle()
    running_now = cluster.condition("Running")
    assert (running_now["status"], running_now["reason"]) == ("False", "WorkersNotReady")
    assert cluster.status["phase"] == "Starting"
    cluster.run_all()
    cluster.settle()
    assert cluster.condition("Running")["status"] == "True"
