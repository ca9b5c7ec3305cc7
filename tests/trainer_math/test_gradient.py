"""The gradient over all local devices is the gradient of the whole batch; a wrong `loss` is refused in words."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from backstay._compute._gradient import GradientFn, examples_of
from backstay._update import Objective
from backstay._update._tree import describe
from backstay.errors import ConfigurationError

PARAMS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.zeros(3, np.float32)}
BATCH = {
    "x": np.arange(32, dtype=np.float32).reshape(8, 4) / 32,
    "y": np.ones((8, 3), np.float32),
    "scale": np.float32(2),
}


def loss(params, batch):
    error = (batch["x"] @ params["w"] + params["b"] - batch["y"]) * batch["scale"]
    return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error)), "rows": error.shape[0]}


def test_loss_metrics_gradient_and_finite():
    gradient = GradientFn(Objective(loss, describe(PARAMS)))(PARAMS, BATCH)
    want, grads = jax.value_and_grad(lambda params: loss(params, BATCH)[0])(PARAMS)
    assert gradient.loss == pytest.approx(float(want))
    assert gradient.metrics["rows"] == 8.0
    assert gradient.metrics["worst"] == pytest.approx(float(loss(PARAMS, BATCH)[1]["worst"]))
    assert gradient.finite is True
    assert gradient.examples == 8
    for got, want in zip(gradient.host(), jax.tree.leaves(grads), strict=True):
        assert not got.flags.writeable
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_element_that_is_not_finite_is_seen(dtype):
    params = {"w": jnp.zeros((40, 33), dtype), "empty": jnp.zeros((0,), dtype), "c": jnp.zeros((), dtype)}
    function = GradientFn(Objective(lambda params, batch: jnp.sum(params["w"] * batch) + params["c"], describe(params)))
    batch = np.full((40, 33), jnp.finfo(dtype).max).astype(dtype)
    batch[::2] = -batch[::2]
    assert function(params, batch).finite is True
    for bad in (np.nan, np.inf, -np.inf):
        for place in (0, 7, 640, 1319):
            broken = batch.copy()
            broken.reshape(-1)[place] = bad
            assert function(params, broken).finite is False


def test_low_precision_parameters_have_gradients_of_their_dtype():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), PARAMS)
    function = GradientFn(
        Objective(lambda p, batch: jnp.sum(p["w"].astype(jnp.float32)) + jnp.sum(p["b"]), describe(params))
    )
    gradient = function(params, BATCH)
    assert [leaf.dtype for leaf in gradient.host()] == [jnp.bfloat16, jnp.bfloat16]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda p, b: p["w"], r"loss returned an array float32\[4, 3\]: must be a floating-point scalar"),
        (lambda p, b: None, r"loss returned NoneType"),
        (lambda p, b: {"loss": jnp.sum(p["w"])}, r"loss returned dict"),
        (lambda p, b: 3, r"loss returned int"),
        (lambda p, b: jnp.argmax(p["w"]), r"loss returned an array int32\[\]"),
        (lambda p, b: (jnp.sum(p["w"]), 1, 2), r"loss returned a tuple of an array float32\[\], int, int"),
        (lambda p, b: (jnp.sum(p["w"]), jnp.sum(p["b"])), r"loss returned a tuple of an array float32\[\], an array"),
        (
            lambda p, b: (jnp.sum(p["w"]), {"e": p["b"]}),
            r"the metric 'e': an array float32\[3\]: must be a real scalar",
        ),
        (lambda p, b: (jnp.sum(p["w"]), {"e": "x"}), r"the metric 'e': str"),
        (
            lambda p, b: (jnp.sum(p["w"]), {"e\n": 1.0}),
            r"loss returned a metric with the name 'e\\n': must be 1 to 200",
        ),
        (lambda p, b: (jnp.sum(p["w"]), {"": 1.0}), r"loss returned a metric with the name '': must be 1 to 200"),
    ],
)
def test_a_wrong_loss_is_refused(result, message):
    with pytest.raises(ConfigurationError, match=message):
        GradientFn(Objective(result, describe(PARAMS)))(PARAMS, BATCH)


def test_what_loss_raises_comes_through():
    def broken(params, batch):
        raise KeyError("images")

    with pytest.raises(KeyError, match="images"):
        GradientFn(Objective(broken, describe(PARAMS)))(PARAMS, BATCH)
    with pytest.raises(ConfigurationError, match="loss is int: must be a function"):
        GradientFn(Objective(3, describe(PARAMS)))
    with pytest.raises(ConfigurationError, match="the model has the structure"):
        GradientFn(Objective(loss, describe(PARAMS)))({"w": PARAMS["w"]}, BATCH)


def test_the_number_of_examples():
    assert examples_of({"a": np.float32(1), "b": np.zeros((5, 2))}) == 5
    assert examples_of(np.float32(1)) == 1
    assert examples_of({}) == 1


PROGRAM = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
from backstay._compute import Placement
from backstay._compute._gradient import GradientFn
from backstay._update import Objective
from backstay.testing import train_local
from backstay._update._tree import describe
import optax

assert len(jax.local_devices()) == 4
rng = np.random.default_rng(0)
params = {"w": rng.normal(size=(4, 3)).astype(np.float32), "b": np.zeros(3, np.float32)}
seen = []

def loss(params, batch):
    hidden = batch["x"] @ params["w"] + params["b"]
    hidden = hidden - 0.5 * jnp.mean(hidden, axis=0)  # over the whole batch, not over a device's part
    jax.debug.inspect_array_sharding(batch["x"], callback=lambda s: seen.append(len(s.device_set)))
    return jnp.mean((hidden - batch["y"]) ** 2), {"mean": jnp.mean(hidden)}

result = {}
for rows in (8, 6):
    batch = {"x": rng.normal(size=(rows, 4)).astype(np.float32), "y": np.ones((rows, 3), np.float32)}
    one = GradientFn(Objective(loss, describe(params)), Placement(jax.local_devices()[:1]))(params, batch)
    function = GradientFn(Objective(loss, describe(params)))
    split = not function.placement.batch(batch)["x"].sharding.is_fully_replicated
    four = function(params, batch)
    result[rows] = {
        "split": split,
        "loss": [one.loss, four.loss],
        "examples": four.examples,
        "gradient": [[leaf.tolist() for leaf in g.host()] for g in (one, four)],
        "devices": [len(leaf.devices()) for leaf in four.leaves],
    }
init = lambda key: {"w": jax.random.normal(key, (4, 3)), "b": jnp.zeros(3)}
batches = lambda key: {"x": key.rng.normal(size=(8, 4)).astype(np.float32), "y": np.ones((8, 3), np.float32)}
runs = [
    train_local(init, loss, batches, optax.adam(1e-2), 5, devices=devices)
    for devices in (jax.local_devices()[:1], None)
]
result["runs"] = [[np.asarray(leaf).tolist() for leaf in jax.tree.leaves(run.params)] for run in runs]
print(json.dumps(result))
"""


def test_four_devices_give_the_gradient_of_one():
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": "", "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for rows, split in ((8, True), (6, False)):
        case = result[str(rows)]
        assert case["split"] is split
        assert case["loss"][0] == pytest.approx(case["loss"][1], rel=1e-6)
        assert case["examples"] == rows
        assert case["devices"] == [1, 1]
        for one, four in zip(*case["gradient"], strict=True):
            np.testing.assert_allclose(one, four, rtol=1e-5, atol=1e-7)
    for one, four in zip(*result["runs"], strict=True):
        np.testing.assert_allclose(one, four, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_call_after_compile_compiles_nothing(sharded):
    """A worker compiles while servers prepare the parameters; the first step must find that executable."""
    function = GradientFn(Objective(loss, describe(PARAMS)))
    parameters = jax.device_put(PARAMS) if sharded else PARAMS
    function.compile(BATCH)
    compiled: list[str] = []

    def count(event: str, duration: float, **_: object) -> None:
        if "compile" in event or "trace" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        before = function(PARAMS, BATCH)
        assert before.finite
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert function(parameters, BATCH).loss == before.loss


def test_compile_refuses_what_a_call_refuses():
    with pytest.raises(ConfigurationError, match="loss returned"):
        GradientFn(Objective(lambda params, batch: params["w"], describe(PARAMS))).compile(BATCH)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax, backstay
from jax.sharding import Mesh, NamedSharding, PartitionSpec
mesh = Mesh(np.asarray(jax.local_devices()), ("batch",))
columns = NamedSharding(mesh, PartitionSpec(None, "batch"))
arguments = dict(
    loss=lambda p, b: jnp.mean(jax.lax.with_sharding_constraint(b @ p["a"]["w"], columns) ** 2),
    batches=lambda key: np.ones((6, 4), np.float32), optimizer=optax.sgd(0.1), steps=3,
)
for place in (lambda w: jax.device_put(w, columns), lambda w: jax.lax.with_sharding_constraint(w, columns)):
    try:
        backstay.train(init=lambda key: {"a": {"w": place(jnp.ones((4, 8)))}}, **arguments)
    except backstay.errors.ConfigurationError as error:
        print(error)
print(backstay.train(init=lambda key: {"a": {"w": jnp.ones((4, 8))}}, **arguments).step)
"""


def test_a_divided_model_is_refused_and_a_batch_that_devices_do_not_divide_is_reported_once():
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": "", "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SHARDED], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *refused, step = done.stdout.splitlines()
    assert step == "3"
    assert len(refused) == 2
    for text in refused:
        assert "init returned ['a']['w'] divided over 4 devices: must return whole arrays" in text
        assert 'Mesh(np.asarray(jax.local_devices()), ("batch",))' in text
    assert done.stderr.count("has 6 rows, which the 4 devices of this process do not divide") == 1
