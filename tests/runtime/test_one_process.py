"""T4, T6, T7: checkpoints of training in one process, and of a job that has the same files."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from between import LONG, put, until

import backstay
from backstay import StoreTo, testing
from backstay._checkpoint import Best, CheckpointStore, Evaluation
from backstay.errors import (
    CheckpointError,
    CheckpointInUse,
    CheckpointOfAnotherJob,
    ConfigurationError,
    JobFailed,
    OptimizerError,
    TreeError,
)

JOB = "tested"  # the name that `backstay.testing` gives to every job


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def init(key):
    params = {"dense": {"kernel": jax.random.normal(key, (40, 30)), "bias": jnp.zeros(30)}, "out": jnp.ones((30, 2))}
    return params, {"mean": jnp.zeros(40), "batches": jnp.int32(0)}


def loss(params, state, batch, key):
    kept = jnp.where(jax.random.bernoulli(key, 0.8, batch.shape), batch - state["mean"], 0)
    hidden = jnp.tanh(kept @ params["dense"]["kernel"] + params["dense"]["bias"])
    new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(batch, axis=0), "batches": state["batches"] + 1}
    return jnp.mean((hidden @ params["out"] - 1.0) ** 2), new, {"kept": jnp.mean(kept)}


def schedule():
    return optax.adamw(optax.cosine_decay_schedule(1e-2, 100))


CASES = {
    "gradients": lambda: {"optimizer": schedule(), "average": 0.9},
    # The optimizer has a random key and weakly typed numbers in its state.
    "noise": lambda: {"optimizer": optax.chain(optax.add_noise(0.1, 0.55, 3), optax.sgd(1e-2, momentum=0.9))},
    "local steps": lambda: {"local": backstay.LocalSteps(3, optax.adamw(1e-2), inner_state="reset")},
}


def arguments(case: str = "gradients", **more):
    jax.config.update("jax_enable_x64", True)
    return {
        "init": init,
        "loss": loss,
        "batches": lambda key: key.rng.normal(size=(4, 40)),
        "steps": 9,
        "has_state": True,
        "has_rng": True,
        **CASES[case](),
        **more,
    }


def script():
    """Runs one pod of a job. `STEPS` and `CASE` come from the test."""
    backstay.train(**arguments(os.environ["CASE"], steps=int(os.environ["STEPS"]), checkpoint="not-used"))


def run_job(folder: Path, case: str, steps: int, **options) -> testing.JobResult:
    variables = {"CASE": case, "STEPS": str(steps)}
    return testing.run(script, env=variables, folder=folder, checkpoint_every=2, **options)


def stored_in(folder: Path, **more) -> StoreTo:
    return StoreTo(str(folder / "checkpoints"), **{"every_steps": 2, "job": JOB, **more})


def assert_same(one: backstay.Result, other: backstay.Result, rtol: float = 0) -> None:
    trees = [(result.params, result.state, result.average) for result in (one, other)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    for left, right in zip(*map(jax.tree.leaves, trees), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_allclose(left, right, rtol=rtol, atol=rtol * 1e-3)


# ---- One process after another one ----


@pytest.mark.parametrize("case", CASES)
def test_t4_a_process_that_continues_computes_the_bits_of_one_that_was_not_interrupted(case: str, tmp_path) -> None:
    folder = tmp_path / "folder"
    backstay.train(**arguments(case, steps=4, checkpoint=folder))
    continued = backstay.train(**arguments(case, checkpoint=folder))
    assert_same(continued, backstay.train(**arguments(case)))
    stored = backstay.load(str(folder))
    assert (stored.step, stored.uri) == (9, continued.checkpoint)
    again = backstay.train(**arguments(case, checkpoint=folder, evaluate=lambda params, state: {"value": 1.0}))
    assert_same(again, continued)
    assert (again.step, again.metrics, math.isnan(again.loss)) == (9, {"value": 1.0}, True)


def test_t7_it_keeps_some_checkpoints_and_the_environment_names_the_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BACKSTAY_CHECKPOINT", str(tmp_path / "named"))
    result = backstay.train(**arguments())
    assert result.checkpoint.startswith(str(tmp_path / "named"))
    backstay.train(**arguments(checkpoint=StoreTo(str(tmp_path / "folder"), every_steps=1, keep=2)))
    versions = [name.version for name in CheckpointStore(str(tmp_path / "folder")).contents().manifests]
    assert versions[0] == 9
    assert len(versions) == 2


def test_t7_the_best_checkpoint_of_a_job_is_not_deleted(tmp_path) -> None:
    to = StoreTo(str(tmp_path), every_steps=1, keep=1)
    first = backstay.train(**arguments(steps=2, checkpoint=to))
    name = str(first.checkpoint).rpartition("/")[2]
    rule = Best(metric="accuracy", mode="Max")
    record = Evaluation(manifest=name, metrics={"accuracy": 0.5}, best=rule, unix_seconds=1.0)
    assert CheckpointStore(str(tmp_path)).write_evaluation(record)
    backstay.train(**arguments(checkpoint=to))
    assert backstay.load(str(tmp_path)).step == 9
    assert backstay.load(str(tmp_path), best=True).step == 2


def test_t7_a_checkpoint_that_does_not_belong_to_the_script_is_refused(tmp_path) -> None:
    backstay.train(**arguments(steps=2, checkpoint=tmp_path))
    with pytest.raises(
        CheckpointOfAnotherJob, match=r"with seed 0 .step 2., this is job local/one-process with seed 7"
    ):
        backstay.train(**arguments(checkpoint=tmp_path, seed=7))
    with pytest.raises(CheckpointOfAnotherJob, match=r"continue_from='Any'"):
        backstay.train(**arguments(checkpoint=StoreTo(str(tmp_path), job="team/other")))
    with pytest.raises(CheckpointError, match="optimizer"):
        backstay.train(**arguments(checkpoint=tmp_path, optimizer=optax.sgd(0.1)))
    put(tmp_path / "file", "")
    with pytest.raises(CheckpointError, match="cannot write"):
        backstay.train(**arguments(checkpoint=tmp_path / "file" / "folder"))
    other = backstay.train(**arguments(checkpoint=StoreTo(str(tmp_path), job="team/other", continue_from="Any")))
    assert_same(other, backstay.train(**arguments()))


def test_t8_training_ends_with_its_result_though_the_folder_fails(tmp_path, capsys) -> None:
    folder = tmp_path / "folder"

    def full(step, loss, metrics):
        # One call moves the folder with all files, while another thread may write one. That thread may make it again.
        while not folder.is_file():
            if folder.is_dir():
                folder.rename(Path(tempfile.mkdtemp(dir=tmp_path), "folder"))
            with contextlib.suppress(IsADirectoryError):
                put(folder, "no folder")

    result = backstay.train(**arguments(checkpoint=StoreTo(str(folder), every_seconds=0), on_update=full))
    assert "the checkpoint of step 9 could not be stored: " in capsys.readouterr().err
    assert (result.step, result.checkpoint) == (9, None)
    assert_same(result, backstay.train(**arguments()))


@pytest.mark.parametrize(
    "fields",
    [
        {"uri": ""},
        {"every_steps": 0},
        {"every_steps": True},
        {"every_seconds": -1},
        {"every_seconds": math.nan},
        {"keep": 0},
        {"continue_from": "any"},
        {"job": "a/b/c"},
        {"job": "/a"},
    ],
)
def test_settings_are_checked(fields) -> None:
    with pytest.raises(ConfigurationError, match=f"checkpoint.* {next(iter(fields))}"):
        StoreTo(**{"uri": "folder", **fields})


# ---- A job and one process ----


def test_t4_a_job_of_three_servers_continues_one_process_and_the_other_way_round(tmp_path) -> None:
    """Parameters, model state, the optimizer's state and the average; the last part is trained in one process again."""
    backstay.train(**arguments(steps=3, checkpoint=stored_in(tmp_path)))
    job = run_job(tmp_path, "gradients", 6, servers=3)
    leader = next(log for name, log in job.logs.items() if name.startswith("parameter-server-0"))
    assert "continuing from the checkpoint of step 3: " in leader
    assert "the argument checkpoint of train is for a single process: this job stores checkpoints in " in leader
    assert_same(job.result, backstay.train(**arguments(steps=6)), 1e-9)
    continued = backstay.train(**arguments(checkpoint=stored_in(tmp_path)))
    assert_same(continued, backstay.train(**arguments()), 1e-9)
    assert backstay.load(str(tmp_path / "checkpoints")).step == 9
    assert len({name.history for name in CheckpointStore(str(tmp_path / "checkpoints")).contents().manifests}) == 1


def epochs():
    jax.config.update("jax_enable_x64", True)
    data = {"x": np.arange(24.0)}
    backstay.train(**of_epochs(data, steps=int(os.environ["STEPS"])))


def of_epochs(data, **more):
    return {
        "init": lambda key: {"w": jnp.zeros(24)},
        # The parameters are the sum of the samples, as one-hot vectors.
        "loss": lambda params, batch: -jnp.sum(jax.nn.one_hot(batch["x"].astype(int), 24) @ params["w"]),
        "batches": backstay.from_dataset(data, batch_size=2),
        "optimizer": optax.sgd(1.0),
        **more,
    }


@pytest.mark.parametrize("workers", [2, 3])
def test_t9_every_sample_counts_when_one_process_continues_several_workers(workers: int, tmp_path, capsys) -> None:
    """The first update of the process takes the batch of rank 0 in the job's world, and all ranks after it leave."""
    testing.run(epochs, env={"STEPS": "2"}, folder=tmp_path, checkpoint_every=1, workers=workers)
    before = backstay.load(str(tmp_path / "checkpoints")).params["w"] * workers
    left = (24 - 2 * 2 * workers) // 2
    result = backstay.train(**of_epochs({"x": np.arange(24.0)}, steps=2 + left, checkpoint=stored_in(tmp_path)))
    after = result.params["w"] - before / workers
    np.testing.assert_allclose(before + after, np.ones(24), atol=1e-6)
    assert "epoch 0 has ended: 24 samples: 24 used, 0 dropped, 0 repeated" in capsys.readouterr().err


# ---- Signals, by real processes ----

PROGRAM = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as below nohup
import jax.numpy as jnp, optax, backstay

place = pathlib.Path(sys.argv[1])

def say(where):
    (place / "at.part").write_text(where)
    (place / "at.part").replace(place / "at")

def batches(key):
    say(str(key.step))
    while key.step >= int((place / "hold").read_text() or 0):
        time.sleep(0.01)
    return key.rng.normal(size=(4, 8)).astype("float32")

def evaluate(params):
    say("evaluate")
    while (place / "evaluate").exists():
        time.sleep(0.01)
    return {"value": 1.0}

result = backstay.train(
    init=lambda key: {"w": jnp.zeros(8)},
    loss=lambda params, batch: jnp.mean((batch @ params["w"] - batch.sum(axis=1)) ** 2),
    batches=batches,
    optimizer=optax.adam(1e-2),
    steps=20,
    evaluate=evaluate,
    checkpoint=backstay.StoreTo(str(place / "folder"), every_seconds=0),
)
print("RESULT", result.step, result.params["w"].tolist())
"""


class Run:
    """The program in a process, which stops where a batch waits.

    Attributes:
        log: the file with its output.
    """

    def __init__(self, place: Path, start: Callable[..., Any], hold: int) -> None:
        self.place, self.log = place, place / f"log-{len(list(place.glob('log-*')))}"
        put(place / "program.py", PROGRAM)
        self.hold(hold)
        put(place / "at", "")
        self.process = start([sys.executable, str(place / "program.py"), str(place)], self.log)

    def hold(self, step: int) -> None:
        put(self.place / "hold", str(step))

    def until(self, at: str) -> None:
        def reached() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            return (self.place / "at").read_text() == at

        until(reached, f"it is at {at}")

    def says(self, text: str) -> None:
        """Wait until the output has this text."""

        def said() -> bool:
            ended, output = self.process.poll() is not None, self.log.read_text()
            assert text in output or not ended, output
            return text in output

        until(said, f"it says {text!r}")

    def end(self) -> tuple[int, str]:
        """Returns the exit code and the output."""
        code = self.process.wait(LONG)
        return code, self.log.read_text()


@pytest.fixture
def run(tmp_path, forked):
    """Starts the program in a forked process, or as a shell does if `new`.

    The exit code of a forked process is 128+n after signal n, and that of a new one is -n.
    """
    runs = []

    def started(argv, log):
        with log.open("w") as out:
            return subprocess.Popen(argv, stdout=out, stderr=out)

    def start(hold: int = 100, *, place: Path = tmp_path, new: bool = False) -> Run:
        runs.append(Run(place, started if new else forked, hold))
        return runs[-1]

    yield start
    for one in runs:
        one.process.kill()
        one.process.wait(LONG)


def test_t7_ctrl_c_stores_and_says_where_and_the_same_command_continues(run, tmp_path) -> None:
    first = run(hold=7, new=True)
    first.until("7")
    first.process.send_signal(signal.SIGINT)
    first.says("Press Ctrl-C again to end now")
    first.hold(8)
    code, output = first.end()
    assert code == -signal.SIGINT, output
    assert "KeyboardInterrupt: training ended after step 8, which is stored in " in output
    assert output.rstrip().endswith(": the same command continues")
    assert output.count('  File "') == 2, "the script's line and `train`: the sentence is what matters"
    assert backstay.load(str(tmp_path / "folder")).step == 8
    second = run()
    code, output = second.end()
    assert code == 0, output
    assert "continuing from the checkpoint of step 8: " in output
    assert "waiting" not in output, "the first process released the folder"
    (tmp_path / "plain").mkdir()
    plain = run(place=tmp_path / "plain").end()[1]
    assert output.partition("RESULT")[2] == plain.partition("RESULT")[2]


def test_t8_a_second_ctrl_c_ends_immediately(run) -> None:
    first = run(hold=7, new=True)
    first.until("7")
    first.process.send_signal(signal.SIGINT)
    first.says("Press Ctrl-C again to end now")
    first.process.send_signal(signal.SIGINT)
    code, output = first.end()
    assert code == -signal.SIGINT, output
    assert "is stored in" not in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_t8_other_signals_have_their_exit_code(run, number: int) -> None:
    second = run(hold=5, new=number == signal.SIGTERM)
    second.until("5")
    second.process.send_signal(number)
    second.says("training stores a checkpoint after this update")
    second.hold(6)
    code, output = second.end()
    assert code == 128 + number, output
    assert "training ended after step 6, which is stored in" in output
    assert "Traceback" not in output


def test_t7_ctrl_c_in_the_last_evaluation_finds_the_last_update_stored(run, tmp_path) -> None:
    put(tmp_path / "evaluate", "")
    first = run()
    first.until("evaluate")
    assert backstay.load(str(tmp_path / "folder")).step == 20
    first.process.send_signal(signal.SIGINT)
    code, output = first.end()
    assert code == 128 + signal.SIGINT, output


def test_t7_two_processes_do_not_share_a_folder(run, tmp_path) -> None:
    first = run(hold=3)
    first.until("3")
    options = arguments(steps=2, checkpoint=StoreTo(str(tmp_path / "folder"), job="team/other"))
    with pytest.raises(CheckpointInUse, match=r"process \d+ on .* writes checkpoints into"):
        backstay.train(**options)
    first.hold(100)
    assert first.end()[0] == 0


# ---- What one process checks ----


def test_a_checkpoint_has_the_step_of_its_metrics(tmp_path) -> None:
    """A user took the metrics of step 3 for those of step 5."""
    evaluate = {"evaluate": lambda params, state: {"batches": float(state["batches"])}, "evaluate_every": 3}
    backstay.train(**arguments(steps=5, checkpoint=tmp_path, **evaluate))
    stored = backstay.load(str(tmp_path))
    assert (stored.step, stored.metrics, stored.metrics_step) == (5, {"batches": 3.0}, 3)
    backstay.train(**arguments(steps=2, checkpoint=tmp_path / "other", **evaluate))
    stored = backstay.load(str(tmp_path / "other"))
    assert (stored.step, stored.metrics, stored.metrics_step) == (2, {}, None)


def test_an_evaluation_that_fails_costs_only_its_metrics(capsys) -> None:
    def evaluate(params, state):
        raise KeyError("accuracy")

    result = backstay.train(**arguments(evaluate=evaluate, evaluate_every=4))
    assert_same(result, backstay.train(**arguments()))
    assert result.metrics == {}
    assert capsys.readouterr().err.count("evaluate raised: this evaluation has no metrics") == 3


def clipped():
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))


def one_server():
    backstay.train(**arguments(optimizer=clipped(), average=None))


def test_one_process_and_one_server_warn_of_what_several_servers_refuse(tmp_path, capsys) -> None:
    backstay.train(**arguments(optimizer=clipped(), average=None))
    assert capsys.readouterr().err.count("this works with one parameter server only: optimizer: leaf") == 1
    job = testing.run(one_server, folder=tmp_path)
    logs = [log for name, log in job.logs.items() if name.startswith("parameter-server-0")]
    assert logs[0].count("this works with one parameter server only: optimizer: leaf") == 1
    with pytest.raises(JobFailed, match="depends on leaf"):
        testing.run(one_server, servers=2)


def small_with_codec():
    backstay.train(**arguments(average=None), wire=backstay.Wire(gradients="Int8"))


def test_a_codec_that_encodes_nothing_is_named_once(tmp_path, capsys) -> None:
    """All arrays are smaller than what is encoded, so the codec saves nothing."""
    small_with_codec()
    says = "the codecs (gradients Int8, parameters Exact) encode nothing: no array"
    assert capsys.readouterr().err.count(says) == 1
    job = testing.run(small_with_codec, folder=tmp_path, servers=2, wire={"gradients": "Int8"})
    assert sum(log.count(says) for log in job.logs.values()) == 1


@pytest.mark.parametrize(("count", "times"), [(8, 1), (24, 0)])
def test_few_local_steps_are_named_once(capsys, count, times) -> None:
    local = backstay.LocalSteps(count=count, optimizer=optax.sgd(1e-2))
    backstay.train(**arguments(optimizer=optax.sgd(1.0), local=local, average=None))
    assert capsys.readouterr().err.count("local steps can cost quality") == times


def test_one_process_warns_of_an_optimizer_that_no_server_computes_and_refuses_to_store_it(tmp_path, capsys) -> None:
    def update(gradients, state, params=None):
        return jax.tree.map(lambda leaf: -1e-2 * leaf, gradients), state.astype(jnp.float64) + 1.0

    strange = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.float32), update)
    backstay.train(**arguments(optimizer=strange, average=None))
    assert "a job cannot compute this optimizer: " in capsys.readouterr().err
    with pytest.raises(OptimizerError):
        backstay.train(**arguments(optimizer=strange, average=None, checkpoint=tmp_path / "folder"))
    assert not (tmp_path / "folder").exists()


def complex_model():
    return arguments(
        init=lambda key: {"w": jnp.ones(2, jnp.complex128), "empty": jnp.zeros((0, 3))},
        loss=lambda params, batch: jnp.sum(jnp.abs(params["w"]) ** 2) + params["empty"].sum(),
        has_state=False,
        has_rng=False,
        evaluate=None,
        average=None,
    )


def trains_complex_model():
    jax.config.update("jax_enable_x64", True)
    backstay.train(**complex_model())


def test_an_array_that_no_checkpoint_can_hold_is_refused_before_training(tmp_path, capsys) -> None:
    """A job stored nothing, and waited at its end until it failed."""
    message = "leaf w is complex128, which a checkpoint cannot hold: must be complex64, or two arrays of float64"
    assert backstay.train(**complex_model()).params["w"].dtype == jnp.complex128
    assert f"a job cannot train this model: {message}" in capsys.readouterr().err
    with pytest.raises(TreeError, match=message):
        backstay.train(**complex_model(), checkpoint=tmp_path / "folder")
    with pytest.raises(JobFailed, match=message):
        testing.run(trains_complex_model)


def test_t7_an_array_without_elements_continues(tmp_path) -> None:
    changed = {"init": lambda key: {"w": jnp.ones(2), "empty": jnp.zeros((0, 3))}}
    first = backstay.train(**complex_model() | changed, checkpoint=tmp_path)
    again = backstay.train(**complex_model() | changed, checkpoint=tmp_path)
    assert again.params["empty"].shape == (0, 3)
    np.testing.assert_array_equal(again.params["w"], first.params["w"])
