"""The small parts of a pod work without processes, such as batches ahead, the environment, and the final message."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from between import LONG

import backstay
from backstay import BatchKey, errors
from backstay._coordination import EpochEnded
from backstay._data import Prefetcher
from backstay._process._environment import Environment
from backstay._process._exit import Stop, exit_status, termination_message
from backstay._process._logs import Reporter, configure
from backstay._report import EpochLines
from backstay._report._job._evaluations import Evaluations
from backstay._report._metrics import PodMetrics
from backstay._script import Script, evaluation_of
from backstay_rpc.control_pb2 import EvaluatedRequest, Peer
from backstay_spec.runtime import RuntimeConfig


def test_exit_status_is_that_of_python() -> None:
    """`end_process` does not end the interpreter, so it needs the status that the interpreter would have."""
    codes = (
        None,
        0,
        3,
        -1,
        256,
        300,
        True,
        False,
        "",
        "no data",
        0.0,
        2.5,
        [],
        1 << 31,
        (1 << 63) - 1,
        1 << 63,
        -1 << 70,
    )
    program = (
        "import os, sys\nfor code in {}:\n    if not os.fork():\n        sys.exit(code)\n    print(os.wait()[1] >> 8)\n"
    )
    found = subprocess.run([sys.executable, "-c", program.format(codes)], capture_output=True, text=True, check=True)
    assert [exit_status(SystemExit(code)) for code in codes] == [int(line) for line in found.stdout.split()]
    assert exit_status(SystemExit(np.int64(0))) == 1


def test_every_public_name_is_there() -> None:
    for name in backstay.__all__:
        assert getattr(backstay, name) is not None
    assert set(backstay.__all__) <= set(dir(backstay))
    with pytest.raises(AttributeError, match="nothing"):
        _ = backstay.nothing
    for name in errors.__all__:
        assert issubclass(getattr(errors, name), errors.BackstayError)
    parsed = errors.JobFailed.from_text(str(errors.JobFailed("NonFiniteGradients", "rank 3: at step 4")))
    assert (parsed.reason, parsed.message) == ("NonFiniteGradients", "rank 3: at step 4")


def test_a_batch_key_is_all_that_its_randomness_depends_on() -> None:
    """T4: the same key, the same numbers, in every world and process."""
    first = BatchKey(step=3, rank=1, world=4, seed=7)
    assert first.rng.normal() == BatchKey(step=3, rank=1, world=9, seed=7).rng.normal()
    others = [BatchKey(step=3, rank=2, world=4, seed=7), BatchKey(step=4, rank=1, world=4, seed=7), BatchKey(3, 1, 4)]
    values = {first.key.__array__ and float(np.asarray(first.rng.random()))} | {key.rng.random() for key in others}
    assert len(values) == 4


def test_batches_are_prepared_ahead_and_each_only_once() -> None:
    made: list[int] = []
    enough = threading.Event()

    def batches(key: BatchKey) -> int:
        made.append(key.step)
        if key.step == 2:
            enough.set()
        return key.step * 10 + key.rank

    batch = Prefetcher(batches, ahead=2)
    assert batch.get(BatchKey(0, 1, 2), last=4) == 1
    assert enough.wait(LONG)  # 1 and 2, without being asked
    assert batch.get(BatchKey(1, 1, 2), last=4) == 11
    assert batch.get(BatchKey(4, 1, 2), last=4) == 41  # a late worker jumps; nothing beyond the last one is prepared
    assert batch.get(BatchKey(4, 0, 2), last=4) == 40
    assert sorted(made).count(0) == 1
    assert max(made) == 4
    batch.close()


def test_what_batches_raises_is_raised_for_its_own_step() -> None:
    def batches(key: BatchKey) -> int:
        if key.step == 1:
            raise ValueError("no batch 1")
        return key.step

    batch = Prefetcher(batches)
    assert batch.get(BatchKey(0, 0, 1)) == 0
    with pytest.raises(ValueError, match="no batch 1"):
        batch.get(BatchKey(1, 0, 1))
    assert batch.get(BatchKey(2, 0, 1)) == 2
    batch.close()


def variables(**changes: str) -> dict[str, str]:
    base = {
        "BACKSTAY_ROLE": "worker",
        "BACKSTAY_INDEX": "1",
        "BACKSTAY_SERVERS": "a:1,b:2",
        "BACKSTAY_TOKEN": "x",
        "BACKSTAY_CONFIG": RuntimeConfig(shards=2, workers=3).model_dump_json(),
    }
    return {name: value for name, value in {**base, **changes}.items() if value != "-"}


def test_the_environment_is_read_or_the_variable_named() -> None:
    assert Environment.read({"PATH": "x"}) is None
    found = Environment.read(variables())
    assert found is not None
    assert (found.name, found.servers, found.checkpoint_uri) == ("worker-1", ("a:1", "b:2"), None)
    for changes, said in (
        ({"BACKSTAY_INDEX": "-"}, "BACKSTAY_INDEX is not"),
        ({"BACKSTAY_INDEX": "one"}, "BACKSTAY_INDEX is 'one'"),
        ({"BACKSTAY_ROLE": "boss"}, "must be one of parameter-server, worker, evaluator"),
        ({"BACKSTAY_SERVERS": "a:1"}, "names 1 servers, the job has 2 shards"),
        ({"BACKSTAY_TOKEN": ""}, "BACKSTAY_TOKEN is empty"),
        ({"BACKSTAY_CONFIG": '{"shards": 0}'}, "BACKSTAY_CONFIG is not a runtime configuration: shards"),
        ({"BACKSTAY_ROLE": "parameter-server", "BACKSTAY_INDEX": "2"}, "the job has shards 0 to 1"),
    ):
        with pytest.raises(errors.ConfigurationError, match=said):
            Environment.read(variables(**changes))


class Stateful:
    def without_params(self) -> dict[str, float]:
        return {}

    def loss(self, params: Any, batch: Any) -> Any:
        return ((params["w"] - batch) ** 2).sum()


async def asynchronous(params: Any) -> dict[str, float]:
    return {}


def yields(self: object, metrics: Any) -> Iterator[bool]:
    yield True


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"init": 3}, "init is int: must be a function"),
        ({"init": lambda: {}}, r"init is called as init\(key\), and cannot be: too many positional arguments"),
        ({"loss": lambda params: 0.0}, r"loss is called as loss\(params, batch\), and cannot be"),
        ({"loss": lambda params, batch: 0.0, "has_state": True}, r"loss is called as loss\(params, state, batch\)"),
        ({"evaluate": lambda params, state: {}}, r"evaluate is called as evaluate\(params\), .*: missing .* 'state'"),
        ({"evaluate": Stateful().without_params}, r"evaluate is called as evaluate\(params\), and cannot be"),
        (
            {"evaluate": functools.partial(lambda a, b: {}, 1, 2)},
            r"evaluate is called as evaluate\(params\), and cannot",
        ),
        ({"loss": functools.partial(Stateful.loss, scale=1)}, "loss is called as .*incorrect arguments"),
        ({"evaluate": asynchronous}, "evaluate is an async function: must be an ordinary function"),
        (
            {"evaluate": dict, "stop_when": functools.partial(yields, None)},
            "stop_when is a generator: must be",
        ),
        ({"on_update": lambda report: None}, r"on_update is called as on_update\(step, loss, metrics\)"),
        ({"init": lambda key: {"w": jnp.zeros(1), "name": "relu"}}, "init: leaf name is of type str, not an array"),
        ({"init": lambda key: {"w": np.array(["a"])}}, "init: leaf w is of type array of str32, not an array"),
        ({"batches": [1]}, "batches is list: must be a function, such as backstay.from_dataset"),
        ({"optimizer": "adam"}, "optimizer is str: must be an optax.GradientTransformation"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": -1}, "steps is -1"),
        ({"seed": -1}, "seed is -1"),
        ({"clip_norm": 0.0}, "clip_norm is 0.0"),
        ({"evaluate": 1}, "evaluate is int"),
        ({"log_every": -1.0}, "log_every is -1.0"),
    ],
)
def test_invalid_arguments_are_named_with_what_would_be_valid(changes: dict[str, object], said: str) -> None:
    right = {"init": dict, "loss": max, "batches": min, "optimizer": optax.sgd(0.1), "steps": 1}
    with pytest.raises(errors.ConfigurationError, match=said):
        backstay.train(**{**right, **changes})
    assert Script(**right).seed == 0


def test_a_decorated_function_has_its_own_arguments() -> None:
    """`functools.wraps` shows the arguments of the function below, which the decorator may add or leave out."""

    def scaled(params: Any, batch: Any, scale: float) -> Any:
        return scale * ((params["w"] - batch) ** 2).sum()

    @functools.wraps(scaled)
    def loss(params: Any, batch: Any) -> Any:
        return scaled(params, batch, 2.0)

    right = {"init": lambda key: {"w": jnp.zeros(2)}, "batches": min, "optimizer": optax.sgd(0.1), "steps": 1}
    for one in (loss, jax.jit(loss), functools.partial(scaled, scale=2.0), Stateful().loss, Stateful.loss.__get__(1)):
        assert Script(loss=one, **right).loss is one
    with pytest.raises(errors.ConfigurationError, match="loss is called as"):
        Script(loss=scaled, **right)


def test_what_evaluate_returns_is_checked() -> None:
    assert evaluation_of(lambda params: {"a": np.float32(2)}, None) == {"a": 2.0}
    with pytest.raises(errors.ConfigurationError, match="'a': str"):
        evaluation_of(lambda params: {"a": "b"}, None)
    with pytest.raises(errors.ConfigurationError, match="returned list"):
        evaluation_of(lambda params: [], None)


@pytest.mark.parametrize(
    ("evaluate", "said"),
    [
        (lambda params: sys.exit(0), r"evaluate called sys.exit\(0\): must return"),
        (lambda params: sys.exit("e" * 5000), r"evaluate called sys.exit\('e{79}\.\.\.\)"),
        (lambda params: {"x" * 10**6: 1.0}, r"the name 'x{79}\.\.\.: must be 1 to 200"),
        (lambda params: {"": 1.0}, "the name '': must be"),
        (lambda params: {"a\udcff": 1.0}, "must be 1 to 200 printable characters"),
        (lambda params: {"a\n": 1.0}, "must be 1 to 200 printable characters"),
        (lambda params: {"a": np.ones(3)}, "'a': ndarray: must be a number"),
        (lambda params: {"a": 10**400}, "'a': int: must be a number"),
        (lambda params: {"a": None}, "'a': NoneType: must be a number"),
        (lambda params: dict.fromkeys(range(1001), 1.0), "1001 metrics: must be at most 1000"),
    ],
)
def test_o10_an_evaluation_that_no_report_can_hold_is_named(evaluate: Any, said: str) -> None:
    with pytest.raises(errors.ConfigurationError, match=said):
        evaluation_of(evaluate, None)


def test_o10_pods_that_end_while_they_evaluate_cost_the_metrics_of_that_step() -> None:
    """`os._exit(0)` in `evaluate` leaves no message, so the servers count the pods that have begun."""
    evaluations = Evaluations(PodMetrics("job", "ParameterServer", 0))

    def begins(step: int, incarnation: int) -> str:
        peer = Peer(role="worker", incarnation=incarnation)
        return evaluations.begins(EvaluatedRequest(peer=peer, step=step, begins=True))

    assert [begins(4, 1), begins(4, 1), begins(4, 2)] == ["", "", ""]
    assert "2 pods have ended while they evaluated this step" in begins(4, 3)
    assert begins(5, 4) == begins(5, 5) == ""
    evaluations.evaluated(EvaluatedRequest(peer=Peer(role="worker", incarnation=5), step=5, metrics={"a": 1.0}))
    assert begins(5, 6) == "", "the pod that has reported did not end while it evaluated"


def test_t6_an_evaluation_of_a_history_that_was_dropped_is_in_no_checkpoint() -> None:
    evaluations = Evaluations(PodMetrics("job", "ParameterServer", 0))
    assert evaluations.newest() == (None, {})
    evaluations.evaluated(EvaluatedRequest(peer=Peer(role="worker"), step=200, metrics={"a": 1.0}))
    evaluations.restarted(200)
    assert evaluations.newest() == (200, {"a": 1.0})
    evaluations.restarted(100)
    assert evaluations.newest() == (None, {})
    assert evaluations.report().metrics == {"a": 1.0}, "the status keeps it until the next one"
    evaluations.evaluated(EvaluatedRequest(peer=Peer(role="worker"), step=150, metrics={"a": 2.0}))
    assert evaluations.newest() == (150, {"a": 2.0})


def test_termination_messages_fit_into_kubernetes_limit() -> None:
    words = json.loads(termination_message({"result": "Failed", "reason": "X", "message": "m" * 10_000}))
    assert words["reason"] == "X"
    assert 100 <= len(words["message"]) < 4096
    many = termination_message({"result": "Succeeded", "step": 3, "metrics": {f"metric-{i}": 0.5 for i in range(1000)}})
    assert len(many) <= 4096
    assert json.loads(many) == {"result": "Succeeded", "step": 3}


def test_sigterm_is_received_by_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may be inside a call that no handler can interrupt."""
    before = signal.getsignal(signal.SIGTERM)
    stop, called = Stop(), threading.Event()
    stop.then(called.set)
    stop.install()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        assert called.wait(LONG)
        assert stop.requested.is_set()
        late = threading.Event()
        stop.then(late.set)
        assert late.is_set()
    finally:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, before)


def test_lines_of_progress(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("backstay")
    before = (logger.handlers[:], logger.level, logger.propagate)
    try:
        configure("json", "worker-3", "tiny")
        reporter = Reporter(10.0, 100)
        for now, step in ((0.0, 1), (9.0, 2), (10.0, 3)):
            reporter.report(now, step, 0.25, 12.5)
        lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
        assert [line["step"] for line in lines] == [1, 3]
        assert lines[0]["message"] == "step 1/100  loss 0.25  12.5 examples/s"
        assert (lines[0]["job"], lines[0]["pod"], lines[0]["loss"]) == ("tiny", "worker-3", 0.25)
        configure("text", "", "")
        reporter.report(11.0, 4, None, 1.0, force=True)
        assert capsys.readouterr().err.endswith("step 4/100  1.0 examples/s\n")
        reporter.report(12.0, 5, 0.5, None, {"rmse": 0.25, "accuracy": 1.0}, force=True)
        assert capsys.readouterr().err.endswith("step 5/100  loss 0.5  accuracy 1  rmse 0.25\n")
    finally:
        logger.handlers[:], logger.level, logger.propagate = before[0], before[1], before[2]


def test_short_epochs_share_a_line_that_adds_them_up(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is lost: the last line counts the epochs that had none."""
    caplog.set_level(logging.INFO)
    lines = EpochLines(seconds=5.0)
    for number in range(9):
        lines.ended(float(number), EpochEnded(number, size=10, used=9, dropped=1, repeated=0), step=number + 1)
    lines.close()
    lines.close()
    assert [record.message for record in caplog.records] == [
        "epoch 0 has ended: 10 samples: 9 used, 1 dropped, 0 repeated (step 1)",
        "epoch 5 has ended: 10 samples: 9 used, 1 dropped, 0 repeated (step 6)"
        "; since the last line, 4 other epochs have ended: 36 samples used, 4 dropped, 0 repeated",
        "since the last line, 3 other epochs have ended: 27 samples used, 3 dropped, 0 repeated",
    ]
