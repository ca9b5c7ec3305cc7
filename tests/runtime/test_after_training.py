"""The code after `train` ends a job by its exit code, its failure is reported, and certain pods get the result (T7,
T8). T7, T8."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from between import until

import backstay
from backstay._faults import ENV_FAULTS
from backstay._process._exit import Stop, termination_message
from backstay._process._failure import describe, printed
from backstay._roles._ending import ServerEnd
from backstay._timeouts import Timeouts
from backstay.errors import PeerLost, StorageError
from backstay.testing import KILLED, TERMINATED

CHECKPOINTS = "checkpoints"
TIMES = Timeouts()


def stored(job, tmp_path: Path, workers: int = 1, **environment: str):
    """Returns a job with one server and a folder for checkpoints."""
    tiny = job(1, workers, checkpoint={"uri": str(tmp_path / CHECKPOINTS)})
    tiny.environment = {"STEPS": "4", "X64": "1", **environment}
    return tiny


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, value in right.items():
        if name.isdigit() or name in ("step", "squares"):
            np.testing.assert_allclose(left[name], value, rtol=1e-9, atol=1e-12)


def test_the_last_messages_state_who_has_the_result(job, tmp_path: Path) -> None:
    """T8: the server names the incarnation of rank 0 that returned. Each worker reports the end of training."""
    tiny = stored(job, tmp_path, 2)
    server, leads, follows = tiny.server(0, 1), tiny.worker(0, 3), tiny.worker(1, 1)
    assert [pod.wait() for pod in tiny.pods] == [0, 0, 0]
    assert server.final_message()["result"] == "Succeeded"
    assert server.final_message()["returned"] == 3
    for rank, worker in enumerate((leads, follows)):
        words = worker.final_message()
        assert (words["result"], words["step"]) == ("Trained", 4)
        assert words["checkpoint"] == server.final_message()["checkpoint"]
        result = tiny.params(worker)
        assert (result["rank"], result["leads"]) == (rank, rank == 0)


def test_t8_a_server_that_is_replaced_while_worker_0_evaluates_sends_it_the_end(job, tmp_path: Path) -> None:
    """The next server found the training complete and left. The worker waited for a server until the job failed."""
    evaluate = tmp_path / "evaluate"
    tiny = job(2, 1, checkpoint={"uri": str(tmp_path / CHECKPOINTS)})
    tiny.environment = {"STEPS": "4", "EVALUATE": str(evaluate)}
    servers = [tiny.server(shard, 1) for shard in range(2)]
    worker = tiny.worker(0)
    tiny.wait_for(worker, "evaluate waits")
    tiny.wait_for(servers[0], "checkpoint of step 4")
    servers[0].process.send_signal(signal.SIGKILL)
    servers[0].wait()
    servers[0] = tiny.server(0, 2)
    assert servers[0].wait() == 0, "it has sent the end to the worker, and does not wait for the evaluation"
    evaluate.touch()
    assert [pod.wait() for pod in (worker, *servers)] == [0, 0, 0]
    assert worker.final_message()["result"] == "Trained"
    assert tiny.params(worker)["step"] == 4


@pytest.mark.parametrize("shards", [1, 2])
def test_t8_a_server_that_is_replaced_while_the_evaluator_evaluates_sends_workers_the_end(
    job, tmp_path: Path, shards: int
) -> None:
    """The workers have the last version. They waited for parameters from a server that has none, and has left."""
    evaluate = tmp_path / "evaluate"
    tiny = job(shards, 2, checkpoint={"uri": str(tmp_path / CHECKPOINTS), "every_steps": 4}, evaluator=True)
    tiny.environment = {"STEPS": "4", "EVALUATE": str(evaluate)}
    servers = [tiny.server(shard, 1) for shard in range(shards)]
    workers = [tiny.worker(rank, 1) for rank in range(2)]
    evaluator = tiny.start("evaluator", 0, 1)
    for worker in workers:
        tiny.wait_for(worker, "step 4/4")  # it has the last version
    tiny.wait_for(evaluator, "evaluate waits")
    servers[0].process.send_signal(signal.SIGKILL)
    servers[0].wait()
    servers[0] = tiny.server(0, 2)
    # A busy worker of another rank may join too late. The operator deletes it at the end of the job.
    assert workers[0].wait() == 0, "it does not need the evaluation"
    assert tiny.params(workers[0])["step"] == 4
    evaluate.touch()
    assert [server.wait() for server in servers] == [0] * shards


def test_an_exception_after_training_is_the_last_message(job, tmp_path: Path) -> None:
    """The exit code is the script's; the message has the type, the place and a traceback of the script alone."""
    tiny = stored(job, tmp_path, AFTER="raise")
    tiny.server(0)
    worker = tiny.worker(0)
    assert worker.may_end_with(1).wait() == 1
    words = worker.final_message()
    assert (words["result"], words["reason"]) == ("AfterTrainingFailed", "KeyError")
    assert words["message"] == "'no model of step 4'"
    assert str(words["at"]).startswith("tests/runtime/tiny.py:")
    assert str(words["traceback"]).count("tiny.py") == 3
    assert "KeyError: 'no model of step 4'" in worker.output()
    assert words["step"] == 4
    assert str(words["checkpoint"]).endswith(".manifest.json"), "the job's failure names where the result is"


def test_after_training_sigterm_and_exit_codes_are_the_script_s(job, tmp_path: Path) -> None:
    """T8: a script that exports is ended by SIGTERM as any program is, and by its own exit code."""
    tiny = stored(job, tmp_path, 3)
    tiny.server(0)
    waits, exits = tiny.worker(0, AFTER="wait"), tiny.worker(1, AFTER="exit").may_end_with(3)
    says = tiny.worker(2, AFTER="says").may_end_with(1)
    assert exits.may_end_with(3).wait() == 3
    assert says.may_end_with(1).wait() == 1
    assert str(says.final_message()["stderr"]).endswith("no place to export to"), "no hook is called for SystemExit"
    tiny.wait_for(waits, "exporting")
    waits.process.send_signal(signal.SIGTERM)
    assert waits.may_end_with(TERMINATED).wait() == TERMINATED
    assert {pod.final_message()["result"] for pod in (waits, exits, says)} == {"Trained"}


def test_a_second_training_in_one_pod_fails_with_its_reason(job, tmp_path: Path) -> None:
    tiny = stored(job, tmp_path, AFTER="twice")
    tiny.server(0)
    worker = tiny.worker(0)
    assert worker.may_end_with(1).wait() == 1
    assert worker.final_message()["result"] == "AfterTrainingFailed"
    assert "train was called a second time in one pod" in str(worker.final_message()["message"])


def test_t7_t8_a_worker_that_is_killed_at_the_end_is_replaced_from_the_last_checkpoint(job, tmp_path: Path) -> None:
    """T7, T8: a worker is killed when it has the result. The server reports it. A later pod returns the same result,
    and evaluates it where no evaluation is known, as after `AlreadyComplete`."""
    tiny = stored(job, tmp_path, 1, **{ENV_FAULTS: "kill worker/0 @0 done"})
    server, dies = tiny.server(0, 1), tiny.worker(0, 1)
    assert [dies.wait(), server.wait()] == [KILLED, 0]
    words = server.final_message()
    assert (words["result"], words["returned"]) == ("Succeeded", 0)
    assert not dies.termination.exists()
    said = {name: words[name] for name in ("step", "checkpoint")}
    comes = tiny.worker(0, 2, BACKSTAY_TRAINED=json.dumps(said))
    assert comes.wait() == 0
    assert comes.final_message()["result"] == "Trained"
    assert comes.final_message()["metrics"] == words["metrics"] != {}
    same(tiny.params(comes), tiny.reference())
    assert tiny.params(comes)["leads"]


def test_t8_without_a_checkpoint_the_servers_wait_for_the_worker_that_comes_again(job, tmp_path: Path) -> None:
    """The replacement gets the result from the servers, which alone hold it (T8)."""
    tiny = job(2, 1)
    tiny.environment = {"STEPS": "4", "X64": "1", ENV_FAULTS: "kill worker/0 @0 done"}
    servers = [tiny.server(shard, 1) for shard in range(2)]
    assert tiny.worker(0, 1).wait() == KILLED
    comes = tiny.worker(0, 2)
    assert [comes.wait(), *(server.wait() for server in servers)] == [0, 0, 0]
    assert servers[0].final_message()["returned"] == 2
    same(tiny.params(comes), tiny.reference())


def test_t8_how_long_a_server_stays() -> None:
    """T8: for peers 15 s, for a result that no checkpoint holds 2 minutes, and never longer."""
    shutdown = ServerEnd(TIMES, incarnation=1)
    assert not shutdown.stays(0.0, stored=True, awaited=False)
    assert shutdown.stays(TIMES.shutdown - 1, stored=True, awaited=True)
    assert not shutdown.stays(TIMES.shutdown, stored=True, awaited=True)
    assert shutdown.stays(TIMES.result - 1, stored=False, awaited=False)
    assert not shutdown.stays(TIMES.result, stored=False, awaited=True)
    assert shutdown.report(7)
    assert not shutdown.stays(0.0, stored=False, awaited=False)
    assert shutdown.end(already_complete=False) == {"returned": 7}
    assert not shutdown.report(8), "what the message does not say must not be promised to the worker"


@pytest.mark.parametrize(
    ("incarnation", "took_over", "already", "said"),
    [
        (1, False, False, {"returned": 0}),
        (2, False, False, {"returned": 0}),
        (1, False, True, {"returned": 0}),
        (2, False, True, {}),
        (2, True, False, {}),
        (2, True, True, {}),
    ],
)
def test_a_server_that_cannot_know_who_returned_does_not_say(incarnation, took_over, already, said) -> None:
    """A server before this one may have reached the end, and rank 0 may have reported to that one."""
    end = ServerEnd(TIMES, incarnation=incarnation, took_over=0.0 if took_over else None)
    assert end.end(already_complete=already) == said


def test_t8_a_promoted_server_stays_for_workers_that_the_previous_one_cut_off() -> None:
    """No worker has joined it, and the job has ended. A worker may have been pulling from the previous server."""
    promoted = ServerEnd(TIMES, incarnation=2, took_over=100.0)
    assert promoted.expects_newcomers(100.0 + TIMES.newcomer - 0.1)
    assert not promoted.expects_newcomers(100.0 + TIMES.newcomer)
    assert not ServerEnd(TIMES, incarnation=2).expects_newcomers(100.0)


def test_t8_a_server_that_finds_the_training_complete_waits_for_rank_0() -> None:
    """T8: rank 0 may still evaluate, and joins the replacement of the server that it has trained with."""
    replacement = ServerEnd(TIMES, incarnation=2)
    assert replacement.expects_rank_0(TIMES.latecomer - 0.1, already_complete=True)
    assert not replacement.expects_rank_0(TIMES.latecomer, already_complete=True)
    assert not replacement.expects_rank_0(0.0, already_complete=False)
    assert not ServerEnd(TIMES, incarnation=1).expects_rank_0(0.0, already_complete=True)
    assert replacement.report(1)
    assert replacement.expects_rank_0(TIMES.newcomer - 0.1, already_complete=True), "other ranks join again"
    assert not replacement.expects_rank_0(TIMES.newcomer, already_complete=True)


def raised(error: BaseException, cause: BaseException | None = None):
    try:
        try:
            if cause is not None:
                raise cause
        except BaseException as first:
            raise error from first
        raise error
    except BaseException as caught:  # noqa: BLE001  # MemoryError among them
        return describe(caught)


def test_o4_what_may_succeed_later_is_marked() -> None:
    """O4: errors of I/O, network and memory, also as the cause of another one; a missing file is not such."""
    for error in (ConnectionResetError(), TimeoutError(), OSError(28, "full"), MemoryError(), PeerLost("x")):
        assert raised(error).transient
        assert raised(RuntimeError("no data"), error).transient
    assert raised(StorageError("x")).transient
    for error in (KeyError("x"), FileNotFoundError("x"), ModuleNotFoundError("x"), PermissionError("x")):
        assert not raised(error).transient
        assert "transient" not in raised(error).fields()


def test_a_traceback_names_the_script_and_not_the_libraries() -> None:
    def script():
        import jax

        jax.tree.map(lambda leaf: leaf["kernel"], {"a": 1.0})

    try:
        script()
    except TypeError as error:
        found = describe(error)
    assert found.at.startswith("tests/runtime/test_after_training.py:")
    assert "tree_util" not in found.traceback
    assert found.traceback.startswith("Traceback (most recent call last):\n")
    assert found.traceback.endswith("TypeError: 'float' object is not subscriptable")
    long = raised(RuntimeError("x" * 10**6)).traceback
    assert len(long) <= 1800
    assert long.startswith("Traceback (most recent call last):\n"), "the frames stay, and the text is cut"
    assert "RuntimeError: xxx" in long


def test_the_log_has_the_frames_of_the_script_and_not_those_between_them() -> None:
    calls: dict[str, Any] = {}
    inside = str(Path(backstay.__file__).with_name("_roles") / "_worker.py")
    exec(compile("def through(function):\n    return function()\n", inside, "exec"), calls)

    def loss():
        return {}["weight"]

    with pytest.raises(KeyError) as raised:
        calls["through"](loss)
    text = printed(raised.value)
    assert text.startswith("(the traceback is shown without the frames of Backstay and JAX: 1)\nTraceback (most recent")
    assert text.endswith("KeyError: 'weight'\n")
    assert "_worker.py" not in text
    with pytest.raises(TypeError) as fault:
        calls["through"](lambda: calls["through"](None))
    fault.value.__traceback__ = fault.tb.tb_next.tb_next.tb_next  # type: ignore[union-attr]
    assert "_worker.py" in printed(fault.value), "without a line of the script all frames stay"


def test_the_last_message_fits_and_stays_json_for_any_output_of_the_script() -> None:
    """The limit is 4096 bytes, by
    https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/."""
    for text in ("é\n" * 5000, "\ud800" * 3000, '"' * 9000, "错误" * 9000):
        fields = {"result": "AfterTrainingFailed", "reason": "E", "message": text, "traceback": text + "the end"}
        written = termination_message(fields)
        assert len(written) <= 4096
        assert json.loads(written)["traceback"].endswith("the end")


def test_t8_a_sigterm_that_comes_while_train_returns_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that reads signals may not have read it yet when the process is handed over to the script."""
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        stop = Stop()
        monkeypatch.setattr(stop, "request", lambda: None)  # the thread is late
        stop.install()
        signal.raise_signal(signal.SIGTERM)
        assert not came
        stop.release()
        until(lambda: came)  # the kernel may choose another thread, then Python passes it on
        assert came == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_one_process_the_script_leads() -> None:
    import jax.numpy as jnp
    import optax

    result = backstay.train(
        init=lambda key: {"w": jnp.zeros(2)},
        loss=lambda params, batch: jnp.sum(params["w"] ** 2),
        batches=lambda key: jnp.ones(1),
        optimizer=optax.sgd(0.1),
        steps=1,
    )
    assert (result.rank, result.is_leader) == (0, True)
