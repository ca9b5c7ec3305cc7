"""Whole jobs of real processes, each with the promise it holds. JAX's start is most of the time they take."""

from __future__ import annotations

import json
import signal
import urllib.request
from pathlib import Path

import jax
import numpy as np
import pytest
from between import LONG

import backstay
from backstay._report._metrics import metric_names

from .operator_calls import progress


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual["step"] == expected["step"]
    for name, value in expected.items():
        if name.isdigit():
            np.testing.assert_allclose(actual[name], value, rtol=1e-9, atol=1e-12)


def test_sync_is_the_plain_loop_though_a_worker_dies(job) -> None:
    """T1, T3, T4: SIGKILL in the middle, a replacement of the next incarnation; float64; clipped over two shards."""
    tiny = job(2, 2)
    tiny.environment = {"X64": "1", "CLIP": "0.5", "STEPS": "12"}
    for shard in range(2):
        tiny.server(shard)
    stays = tiny.worker(0)
    dies = tiny.worker(1, HOLD_AT="4")
    tiny.wait_for(dies, "step 4/12")
    dies.process.send_signal(signal.SIGKILL)
    comes = tiny.worker(1, 1)
    assert [pod.wait() for pod in (stays, comes, *tiny.pods[:2])] == [0, 0, 0, 0]
    expected = tiny.reference()
    assert_same(tiny.params(stays), expected)
    assert_same(tiny.params(comes), expected)
    words = tiny.pods[0].final_message()
    assert words["result"] == "Succeeded"
    assert words["step"] == 12
    assert words["metrics"]["squares"] == pytest.approx(float(expected["squares"]), rel=1e-9)


def test_rounded_gradients_are_those_of_the_plain_loop_though_a_worker_dies(job) -> None:
    """T4: what a codec rounds depends on seed, step and rank alone, not on shards or deaths; the result is exact."""
    tiny = job(2, 2, wire={"gradients": "Int4", "parameters": "BFloat16"})
    tiny.environment = {"X64": "1", "STEPS": "8", "WIDTH": "600", "WIRE": "Int4,BFloat16"}
    for shard in range(2):
        tiny.server(shard)
    stays = tiny.worker(0)
    dies = tiny.worker(1, HOLD_AT="4")
    tiny.wait_for(dies, "step 4/8")
    dies.process.send_signal(signal.SIGKILL)
    comes = tiny.worker(1, 1)
    assert [pod.wait() for pod in (stays, comes, *tiny.pods[:2])] == [0, 0, 0, 0]
    expected = tiny.reference()
    assert_same(tiny.params(stays), expected)
    assert_same(tiny.params(comes), expected)
    tiny.environment["WIRE"] = "Exact,Exact"
    assert any((expected[name] != value).any() for name, value in tiny.reference().items() if name.isdigit())


def test_error_feedback_is_that_of_the_plain_loop_though_an_update_is_skipped(job) -> None:
    """T4: a rank whose contribution was finite keeps its residual when another rank's was not."""
    tiny = job(2, 2, wire={"gradients": "Int4", "error_feedback": True})
    tiny.environment = {
        "X64": "1",
        "WIDTH": "600",
        "WIRE": "Int4,Exact,feedback",
        "STEPS": "6",
        "NAN_AT": "3,1",
    }
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0] * 4
    expected = tiny.reference()
    for worker in tiny.pods[2:]:
        assert_same(tiny.params(worker), expected)


def test_t4_model_state_and_random_keys_though_a_worker_and_a_server_die(job, tmp_path: Path) -> None:
    """T3, T4, T7: clipped, over two shards; a rollback; `load` has the same state."""
    uri = str(tmp_path / "checkpoints")
    tiny = job(2, 2, checkpoint={"uri": uri, "every_steps": 4})
    tiny.environment = {"X64": "1", "CLIP": "0.5", "STEPS": "12", "STATE": "1"}
    for shard in range(2):
        tiny.server(shard)
    stays = tiny.worker(0, HOLD_AT="10")
    dies = tiny.worker(1, HOLD_AT="5")
    tiny.wait_for(tiny.pods[0], "checkpoint of step 4")
    tiny.wait_for(dies, "step 5/12")
    dies.process.send_signal(signal.SIGKILL)
    comes = tiny.worker(1, 1)
    tiny.wait_for(stays, "step 10/12")
    lost = tiny.pods[1]
    lost.process.send_signal(signal.SIGKILL)
    lost.wait()
    tiny.let()
    again = tiny.server(1, 1)
    assert [pod.wait() for pod in (stays, comes, tiny.pods[0], again)] == [0] * 4
    expected = tiny.reference()
    assert_same(tiny.params(stays), expected)
    assert_same(tiny.params(comes), expected)
    stored = backstay.load(uri)
    assert stored.step == 12
    for index, leaf in enumerate(jax.tree.leaves((stored.params, stored.state))):
        np.testing.assert_allclose(leaf, expected[str(index)], rtol=1e-9, atol=1e-12)
    assert int(stored.state["batches"]) == 12


@pytest.mark.parametrize("shard", [0, 1])
def test_a_server_restarts_from_the_newest_checkpoint(job, tmp_path: Path, shard: int) -> None:
    """T3, T4, T7: the others go back with it, in a higher term; the result is that of the plain loop."""
    tiny = job(2, 1, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 4})
    tiny.environment = {"X64": "1", "STEPS": "12"}
    for index in range(2):
        tiny.server(index)
    worker = tiny.worker(0, HOLD_AT="7")
    tiny.wait_for(tiny.pods[0], "checkpoint of step 4")
    tiny.wait_for(worker, "step 6/12")
    tiny.pods[shard].process.send_signal(signal.SIGKILL)
    tiny.pods[shard].wait()
    tiny.let()
    tiny.server(shard, 1)
    living = [pod for index, pod in enumerate(tiny.pods) if index != shard]
    assert [pod.wait() for pod in living] == [0, 0, 0]
    assert_same(tiny.params(worker), tiny.reference())
    leader = tiny.pods[3] if shard == 0 else tiny.pods[0]
    assert leader.final_message()["result"] == "Succeeded"
    assert "step-000000000012-term-00000002" in str(leader.final_message()["checkpoint"])


def test_backups_do_not_wait_for_a_rank_that_is_not_there(job) -> None:
    """T2: world 3, one backup, and rank 2 never starts. T4: parameters and state are those of the other two ranks."""
    tiny = job(1, 3, backups=1, log_format="json")
    tiny.environment = {"X64": "1", "STATE": "1"}
    tiny.server(0)
    for rank in range(2):
        tiny.worker(rank)
    assert [pod.wait() for pod in tiny.pods] == [0, 0, 0]
    tiny.workers = 2
    assert_same(tiny.params(tiny.pods[1]), tiny.reference())
    lines = [json.loads(line) for line in tiny.pods[0].output().splitlines() if line.startswith("{")]
    assert lines[0]["pod"] == "parameter-server-0"
    assert [line["step"] for line in lines if "step" in line][-1] == 8


def test_a_job_of_no_steps_returns_the_initial_parameters(job) -> None:
    tiny = job(2, 1)
    tiny.environment = {"X64": "1", "STEPS": "0"}
    pods = [tiny.server(0), tiny.server(1), tiny.worker(0)]
    assert [pod.wait() for pod in pods] == [0, 0, 0]
    assert_same(tiny.params(pods[2]), tiny.reference())
    assert (pods[0].final_message()["result"], pods[0].final_message()["step"]) == ("Succeeded", 0)


def test_async_ends_with_a_checkpoint_and_a_second_start_finds_it(job, tmp_path: Path) -> None:
    """T3, T5, T7: `AlreadyComplete`; an evaluator gets the last version. The state is that of the newest gradient."""
    tiny = job(
        2,
        2,
        mode="Async",
        max_staleness=1,
        staleness_damping=True,
        evaluator=True,
        checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 5, "keep": 2},
    )
    tiny.environment = {"STEPS": "20", "STATE": "1"}
    tiny.start_all()
    tiny.start("evaluator", 0)
    assert [pod.wait() for pod in tiny.pods] == [0] * 5
    words = tiny.pods[0].final_message()
    assert words["result"] == "Succeeded"
    assert words["metrics"]["squares"] > 0
    assert len(list((tmp_path / "checkpoints").glob("*.manifest.json"))) == 2
    state = backstay.load(str(tmp_path / "checkpoints")).state
    assert 10 <= int(state["batches"]) <= 20  # each gradient continues a state that is at most one update older
    assert np.abs(state["mean"]).min() > 0
    again = tiny.server(0, 1)
    assert again.wait() == 0
    assert again.final_message()["result"] == "AlreadyComplete"
    assert again.final_message()["checkpoint"] == words["checkpoint"]


def test_a_pod_of_another_job_is_refused_and_states_the_reason(job) -> None:
    """O7, T6: another tree of parameters names its leaf; a wrong token; an incarnation that was replaced."""
    tiny = job(1, 3)
    server = tiny.server(0)
    tiny.worker(2, 1)
    other = tiny.worker(0, WIDTH="17")
    forged = tiny.worker(1, BACKSTAY_TOKEN="fedcba9876543210").may_end_with(1)
    assert other.may_end_with(1).wait() == 1
    said = str(other.final_message()["message"])
    assert "dense.bias is float32[16] on the server and float32[17] in the caller" in said
    assert other.final_message()["result"] == "Refused"  # a replacement would be, too
    assert forged.may_end_with(1).wait() == 1
    assert "UNAUTHENTICATED" in str(forged.final_message()["message"])
    old = tiny.worker(2, 0)
    assert old.may_end_with(1).wait() == 1
    assert "incarnation 1" in old.output()
    reply = progress(tiny, world=4, stall_seconds=300)
    assert (reply.term, reply.step, reply.world, dict(reply.beating)) == (1, 0, 3, {2: 1})
    assert not reply.stalled
    # The metrics of a pod need no token.
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=LONG) as answer:
        text = answer.read().decode()
    later = {"backstay_loss", "backstay_evaluation", "backstay_train_metric", "backstay_straggler_delay_seconds"}
    later |= {"backstay_checkpoint_timestamp_seconds", "backstay_waited_for_seconds_total"}
    later |= {"backstay_gradient_norm", "backstay_learning_rate", "backstay_update_bytes"}
    wanted = metric_names("ParameterServer", 0)
    assert {name for name in wanted if f"\n{name}{{" not in text} == later
    others = metric_names() - wanted
    assert len(others) > 10
    assert not [name for name in others if name in text]  # a worker's series are a worker's
    assert "_created" not in text
    assert "\nprocess_resident_memory_bytes " in text
    labels = 'index="0",outcome="applied",role="ParameterServer",training_job="tiny"'
    assert f"backstay_contributions_total{{{labels}}} 0.0" in text
    # After SIGTERM, a server without checkpoints ends immediately, and its worker leaves too.
    for pod in (server, tiny.pods[1]):
        pod.process.send_signal(signal.SIGTERM)
    assert server.may_end_with(143).wait() == 143
    assert tiny.pods[1].may_end_with(143).wait() == 143


def test_gradients_that_are_not_finite_fail_the_job(job) -> None:
    """The step and the rank are named; every pod ends."""
    tiny = job(1, 1, max_non_finite=2)
    tiny.environment = {"NAN_FROM": "3"}
    tiny.start_all()
    tiny.may_end_with(1)
    assert [pod.wait() for pod in tiny.pods] == [1, 1]
    words = tiny.pods[0].final_message()
    assert (words["result"], words["reason"]) == ("Failed", "NonFiniteGradients")
    assert "rank 0 at step 4" in str(words["message"])
    assert (words["term"], words["step"]) == (1, 5), "the operator's last call may be two seconds older (O8)"
    assert tiny.pods[1].final_message()["reason"] == "NonFiniteGradients"


def test_a_script_that_raises_leaves_a_termination_message(job) -> None:
    """A worker's exception gives its traceback in the log, its last line in the message, and exit code 1."""
    tiny = job(1, 1)
    tiny.environment = {"RAISE_AT": "2"}
    tiny.start_all()
    assert tiny.pods[1].may_end_with(1).wait() == 1
    assert "Traceback" in tiny.pods[1].output()
    words = tiny.pods[1].final_message()
    assert (words["reason"], words["message"]) == ("RuntimeError", "the data is\ngone")
    assert (words["term"], words["step"]) == (1, 2)
    assert str(words["at"]).startswith("tests/runtime/tiny.py:")
    assert "result" not in words


@pytest.mark.parametrize("where", [{"RAISE_AT": "2"}, {"EXIT_IN_INIT": "1"}])
def test_a_script_that_exits_in_a_function_of_train_leaves_where(job, where: dict[str, str]) -> None:
    """The reason of the crash was the last line of the log, which had nothing to do with it."""
    tiny = job(1, 1)
    tiny.environment = {**where, "EXIT_CODE": "5"}
    tiny.start_all()
    tiny.pods[0].may_end_with(5)
    assert tiny.pods[1].may_end_with(5).wait() == 5
    words = tiny.pods[1].final_message()
    assert (words["reason"], words["message"]) == ("SystemExit", "the script called sys.exit(5) in a function of train")
    assert str(words["at"]).startswith("tests/runtime/tiny.py:")
    assert "result" not in words


@pytest.mark.parametrize("role", ["parameter-server", "worker", "evaluator"])
def test_an_evaluator_without_evaluate_is_refused_by_each_pod(job, tmp_path: Path, role: str) -> None:
    tiny = job(1, 1, checkpoint={"uri": str(tmp_path / "checkpoints")}, evaluator=True)
    tiny.environment = {"NO_EVALUATE": "1"}
    pod = tiny.start(role, 0)
    assert pod.may_end_with(1).wait() == 1
    said = "this job has an evaluator, but train was called without evaluate: pass evaluate, or remove spec.evaluator"
    assert said in pod.output()


def test_suspended_and_resumed_it_is_the_same_run(job, tmp_path: Path) -> None:
    """T3, T4, T7: SIGTERM to a worker, then to its server, which stores its state. The next incarnations continue."""
    tiny = job(1, 1, checkpoint={"uri": str(tmp_path / "checkpoints"), "every_steps": 1000})
    tiny.environment = {"X64": "1", "STEPS": "12"}
    server = tiny.server(0)
    worker = tiny.worker(0, HOLD_AT="7")
    tiny.wait_for(worker, "step 6/12")
    worker.process.send_signal(signal.SIGTERM)
    assert worker.may_end_with(143).wait() == 143
    server.process.send_signal(signal.SIGTERM)
    assert server.may_end_with(143).wait() == 143
    assert len(list((tmp_path / "checkpoints").glob("*.manifest.json"))) == 1
    server, worker = tiny.server(0, 1), tiny.worker(0, 1)
    assert [server.wait(), worker.wait()] == [0, 0]
    assert "continuing from the checkpoint" in server.output()
    assert_same(tiny.params(worker), tiny.reference())
