"""O10: a job whose last update was made never becomes Failed for it, in any order of the ends of its pods."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay_spec import contract

SERVER, WORKER, EVALUATOR = contract.ROLE_SERVER, contract.ROLE_WORKER, contract.ROLE_EVALUATOR
RETURNED = 1


@st.composite
def ends(draw):
    """Returns a job and the end of its pods, with their order, the messages that arrive, and what the operator observes
    meanwhile."""
    servers, workers = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    stores = draw(st.booleans())
    spec = {
        "parameterServers": {"replicas": servers, "standbys": draw(st.integers(0, 1))},
        "workers": {"replicas": workers},
        "checkpoint": {"uri": "file:///ckpt"} if stores else {},
    }
    slots = [(SERVER, i) for i in range(servers)] + [(WORKER, i) for i in range(workers)]
    if stores and draw(st.booleans()):
        spec["evaluator"] = {}
        slots.append((EVALUATOR, 0))
    order = draw(st.permutations(slots))
    ready = draw(st.booleans())  # a short job ends before the kubelet reports its pods as ready
    whole = draw(st.sampled_from(slots))
    lost = {slot for slot in slots if slot != whole and ready and draw(st.integers(0, 3)) == 0}
    pauses = [draw(st.sampled_from(["none", "seen", "polled", "late", "minute"])) for _ in order]
    return spec, order, ready, lost, pauses


def last_message(slot, stores):
    role, index = slot
    said = {"step": 30, "checkpoint": "file:///ckpt/30" if stores else ""}
    if role == WORKER:
        return {"result": "Trained", **said}
    return {
        "result": "Succeeded",
        "term": 1,
        **said,
        **({"returned": RETURNED} if (role, index) == (SERVER, 0) else {}),
    }


def pause(cluster, kind):
    """The operator observes nothing, or the end, immediately, after a poll, before the next poll, or after a
    pause."""
    if kind == "none":
        return
    cluster.tick({"seen": 0.2, "polled": 0.2, "late": 1.5, "minute": 60}[kind])
    if kind == "polled":
        cluster.answer(step=30, goal_steps=30, term=1, coordinator=1)
    cluster.settle()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(ends())
def test_o10_the_order_of_the_ends_never_fails_a_job(make_cluster, drawn):
    """O10: any order, any subset of the polls and, but for one of them, of the messages."""
    spec, order, ready, lost, pauses = drawn
    cluster = make_cluster(spec)
    cluster.settle()
    cluster.tick(2)
    if ready:
        cluster.run_all()
        cluster.tick(1)
        cluster.run_all()
        cluster.settle()
    for slot, kind in zip(order, pauses, strict=True):
        foreign = "written by the script" if slot[0] == WORKER else ""
        text = foreign if slot in lost else json.dumps(last_message(slot, "uri" in spec["checkpoint"]))
        cluster.end(cluster.named(*slot, incarnation=1), 0, text)
        pause(cluster, kind)
    for _ in range(6):
        cluster.settle()
        cluster.tick(10)
        again = cluster.named(WORKER, 0)  # of a pod that was paused for long, and never was ready
        if again in cluster.living():
            cluster.end(again, 0, json.dumps(last_message((WORKER, 0), "uri" in spec["checkpoint"])))
    assert cluster.status["phase"] == "Succeeded", cluster.status["conditions"]
    assert cluster.condition("AfterTrainingComplete")["status"] == "True"
    assert not {"Failed", "TrainingInterrupted"} & {reason for reason, _ in cluster.events}


@pytest.mark.parametrize("seen_first", [(SERVER, 0), (SERVER, 1), (SERVER, 2), (WORKER, 0), (WORKER, 1)])
def test_o10_the_first_end_that_is_seen_says_that_the_job_is_trained(make_cluster, seen_first):
    """O10: before any answer of a server, and before any pod was seen to be ready."""
    spec = {"parameterServers": {"replicas": 3}, "workers": {"replicas": 2}, "checkpoint": {"uri": "file:///ckpt"}}
    cluster = make_cluster(spec)
    cluster.settle()
    cluster.end(cluster.named(*seen_first), 0, json.dumps(last_message(seen_first, stores=True)))
    cluster.settle()
    assert cluster.condition("Trained")["message"] == "trained to step 30, stored as file:///ckpt/30"
    assert not cluster.deaths


def test_o10_an_older_incarnation_counts_with_the_checkpoint_of_this_run_only(running):
    """O10, T6: a drained pod may end with the result after it was replaced; without a checkpoint, its successor may
    have begun again."""
    for stores in (True, False):
        cluster = running({"parameterServers": {"replicas": 2}, "checkpoint": {"uri": "file:///c"} if stores else {}})
        old = cluster.named(SERVER, 1)
        cluster.disrupt(old, "EvictionByEvictionAPI")
        cluster.settle()
        assert cluster.status["incarnations"]["parameter-server-1"] == 2
        cluster.end(old, 0, json.dumps(last_message((SERVER, 1), stores)))
        cluster.settle()
        found = [c for c in cluster.status["conditions"] if c["type"] == "Trained"]
        assert [c["status"] for c in found] == (["True"] if stores else [])


def test_t8_a_server_that_hangs_at_the_end_does_not_keep_the_job(running):
    """O10, T8: worker 0 could not report its result to a stopped server; its replacement reads the checkpoint."""
    cluster = running({"parameterServers": {"replicas": 2}, "checkpoint": {"uri": "file:///ckpt"}})
    cluster.end(cluster.named(SERVER, 1), 0, json.dumps(last_message((SERVER, 1), stores=True)))
    cluster.settle()
    cluster.tick(20)
    cluster.end(cluster.named(WORKER, 0), 1, json.dumps({"reason": "WaitedTooLong", "message": "shard 0"}))
    cluster.settle()
    assert cluster.status["incarnations"]["worker-0"] == 2
    cluster.tick(25)
    cluster.settle()
    restored = cluster.pods[cluster.named(WORKER, 0)]
    assert "BACKSTAY_TRAINED" in {v["name"] for v in restored["spec"]["containers"][0]["env"]}
    cluster.end(cluster.named(WORKER, 0), 0, json.dumps(last_message((WORKER, 0), stores=True)))
    cluster.tick(20)
    cluster.settle()
    assert cluster.status["phase"] == "Succeeded"


LAST_REPORT = {
    "goalSteps": 30,
    "examplesPerSecond": 812.5,
    "loss": 0.25,
    "trainMetrics": {"error": 0.5},
    "metrics": {"accuracy": 0.75},
    "evaluatedStep": 20,
    "failedEvaluation": 25,
    "evaluationError": "ValueError: no data",
    "traffic": {"carried": 100.0, "exact": 400.0},
    "untrainedLeaves": ["norm.mean"],
    "mistakesOfBatches": ["SameBatches", "ImpureBatches"],
    "nonFiniteLoss": 7,
    "termStart": {"term": 1, "step": 10, "checkpoint": "/c/10", "changes": ["seed 1 -> 2"]},
    "stepsRedone": 4,
}


@pytest.mark.parametrize("result", ["Succeeded", "Failed"])
def test_o10_the_last_report_needs_no_answer_to_a_call(make_cluster, result):
    """O10: the job has ended before the operator calls a server for the first time."""
    cluster = make_cluster({"checkpoint": {"uri": "file:///ckpt"}})
    cluster.settle()
    failed = {"reason": "NotFinite", "message": "3 updates in a row"} if result == "Failed" else {"returned": 1}
    said = {"result": result, "step": 30, "term": 1, **LAST_REPORT, **failed}
    cluster.end(cluster.named(SERVER, 0), 1 if result == "Failed" else 0, json.dumps(said))
    cluster.settle()
    if result == "Succeeded":
        cluster.end(cluster.named(WORKER, 0), 0, json.dumps(last_message((WORKER, 0), stores=True)))
        cluster.settle()
    status = cluster.status
    assert (status["phase"], status["step"], status["goalSteps"]) == (result, 30, 30)
    assert (status["loss"], status["trainMetrics"], status["metrics"]) == (0.25, {"error": 0.5}, {"accuracy": 0.75})
    assert (status["evaluatedStep"], status["traffic"]) == (20, {"carried": 100.0, "exact": 400.0})
    assert (status["untrainedLeaves"], status["mistakesOfBatches"]) == (["norm.mean"], ["SameBatches", "ImpureBatches"])
    assert "examplesPerSecond" not in status, "the job does not train any more"
    assert status["nonFiniteLoss"] == 7
    assert result == "Failed" or "the loss was NaN or infinite, first at step 7" in str(status["conditions"])
    once = (
        "ZeroGradients",
        "SameBatches",
        "ImpureBatches",
        "NonFiniteLoss",
        "Continued",
        "SettingsChanged",
        "EvaluationFailed",
    )
    reasons = [reason for reason, _ in cluster.events]
    assert {reason: reasons.count(reason) for reason in once} == dict.fromkeys(once, 1)
    assert not cluster.deaths


def test_o10_the_events_of_the_history_are_sent_though_another_shard_ends_first(make_cluster):
    """O10: shard 0's server waits for the others, whose messages have the term without its start."""
    cluster = make_cluster({"parameterServers": {"replicas": 2}, "checkpoint": {"uri": "file:///ckpt"}})
    cluster.settle()
    said = {"result": "Succeeded", "step": 30, "term": 1}
    cluster.end(cluster.named(SERVER, 1), 0, json.dumps(said))
    cluster.settle()
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({**said, **LAST_REPORT, "returned": 1}))
    cluster.settle()
    reasons = [reason for reason, _ in cluster.events]
    assert [reasons.count(reason) for reason in ("Continued", "SettingsChanged")] == [1, 1]
    assert cluster.status["term"] == 1


def test_o10_rows_of_a_message_that_a_script_wrote_are_ignored_one_by_one(make_cluster):
    """O10: the planner ignores a row of another type, and reads the others."""
    cluster = make_cluster({"checkpoint": {"uri": "file:///ckpt"}})
    cluster.settle()
    wrong = {"loss": [], "trainMetrics": 3, "goalSteps": -1, "termStart": {"term": "x"}, "traffic": {"carried": 8.0}}
    wrong |= {"examplesPerSecond": "0.5", "metrics": {"a": True, "b": "1", "c": 2}, "world": True}
    cluster.end(cluster.named(SERVER, 0), 0, json.dumps({"result": "Succeeded", "step": 30, **wrong}))
    cluster.settle()
    assert cluster.status["traffic"] == {"carried": 8.0}
    assert cluster.status["metrics"] == {"c": 2.0}
    assert "world" not in cluster.status
    assert not {"loss", "trainMetrics", "goalSteps"} & cluster.status.keys()


@pytest.mark.parametrize("code", [0, 1, 2])
def test_o7_a_message_of_deep_json_is_text(make_cluster, code):
    """O7: it ended the reading of a job with a RecursionError, in the operator and in the command."""
    cluster = make_cluster({"checkpoint": {"uri": "file:///ckpt"}})
    cluster.settle()
    for slot in ((WORKER, 0), (SERVER, 0)):
        cluster.end(cluster.named(*slot), code, "[" * 4096)
        cluster.settle()
        cluster.tick(60)
        cluster.settle()
    assert cluster.deaths
