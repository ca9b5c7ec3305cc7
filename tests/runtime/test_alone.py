"""`train` in one process is the plain loop of T4, in one compiled function a step."""

from __future__ import annotations

import logging
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._compute import AHEAD
from backstay._script import Script
from backstay._single._loop import train_alone
from backstay._update import UPDATES, Wire, enable_x64
from backstay.errors import ConfigurationError, JobFailed
from backstay.testing import train_local


def init(key):
    return {"w": jax.random.normal(key, (5, 3)), "dead": jnp.zeros(2)}, {"mean": jnp.zeros(5), "count": 0}


def loss(params, state, batch, key):
    x, y = batch
    keep = jax.random.bernoulli(key, 0.7, x.shape)
    out = jnp.where(keep, x - state["mean"], 0) @ params["w"] + 0 * jnp.sum(params["dead"])
    new = {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(x, axis=0), "count": state["count"] + 1}
    return jnp.mean((out - y) ** 2), new, {"kept": jnp.mean(keep.astype(x.dtype))}


def batches(key):
    return key.rng.normal(size=(8, 5)), key.rng.normal(size=(8, 3))


def script(**changes):
    settings = {
        "init": init,
        "loss": loss,
        "batches": batches,
        "optimizer": optax.adam(1e-2),
        "steps": 30,
        "has_state": True,
        "has_rng": True,
        "seed": 3,
    }
    return Script(**settings | changes)


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_t4_one_compiled_step_is_the_plain_loop(clip_norm, caplog):
    """Float64; the loss, the metrics and the warning of leaves without a gradient too."""
    seen, known = [], []
    with enable_x64():
        one = script(clip_norm=clip_norm, evaluate=lambda params, state: {"count": state["count"]})
        with caplog.at_level(logging.WARNING, "backstay._single._loop"):
            got = train_alone(one, on_update=lambda r: seen.append((r.step, r.loss, r.metrics, r.examples)))
        settings = {name: getattr(one, name) for name in ("evaluate", "has_state", "has_rng", "seed", "clip_norm")}
        want = train_local(
            init,
            loss,
            batches,
            one.optimizer,
            30,
            **settings,
            on_update=lambda u: known.append((u.step, u.loss, u.metrics, u.examples)),
        )
    for a, b in zip(jax.tree.leaves((got.params, got.state)), jax.tree.leaves((want.params, want.state)), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-11)
    assert (got.step, got.metrics) == (want.step, want.metrics)
    assert got.loss == pytest.approx(want.loss, rel=1e-11)
    assert [step for step, *_ in seen] == list(range(1, 31))
    np.testing.assert_allclose([each[1] for each in seen], [each[1] for each in known], rtol=1e-11)
    assert [each[2:] for each in seen] == [each[2:] for each in known]
    warned = [record.getMessage() for record in caplog.records if record.name == "backstay._single._loop"]
    assert sum("the gradient of dead (1 of 2 leaves) was exactly zero" in text for text in warned) == 1
    assert f"first {UPDATES} updates" in warned[0]
    assert "has_state=True" in warned[0]


def test_the_step_is_compiled_once_and_the_host_is_ahead_of_it():
    traced, order = [], []

    def counted(params, state, batch, key):
        traced.append(1)
        return loss(params, state, batch, key)

    def asked(key):
        order.append(("batch", key.step + 1))
        return batches(key)

    train_alone(script(loss=counted, batches=asked), on_update=lambda r: order.append(("read", r.step)))
    assert len(traced) == 1
    for step in range(1, 31 - AHEAD):
        assert order.index(("read", step)) > order.index(("batch", step + AHEAD))


def bad_at(steps):
    def make(key):
        x, y = batches(key)
        return np.where(key.step in steps, np.nan, x), y

    return make


def test_updates_that_are_not_finite_are_skipped_and_too_many_fail():
    seen = []
    result = train_alone(script(batches=bad_at({1, 2, 4}), steps=6), on_update=lambda r: seen.append(r.applied))
    assert seen == [True, False, False, True, False, True]
    assert int(result.state["count"]) == 3
    assert np.isfinite(result.params["w"]).all()
    with pytest.raises(JobFailed, match=r"NonFiniteGradients: .* 3 updates in a row .* at step 4 of rank 0 \(loss nan"):
        train_alone(script(batches=bad_at({0, 2, 3, 4}), steps=9))


def test_evaluations_see_their_own_step_and_end_training():
    seen = []

    def on_update(report):
        if report.model is not None:
            params, state = report.model
            seen.append((report.step, int(state["count"]), float(jnp.sum(params["w"]))))
        return report.step >= 8

    result = train_alone(script(), model_every=4, on_update=on_update)
    assert [(step, count) for step, count, _ in seen] == [(4, 4), (8, 8)]
    assert result.step == 8
    assert float(jnp.sum(result.params["w"])) == seen[1][2]


def test_what_init_returned_is_not_consumed_and_no_steps_is_the_start():
    fixed = init(jax.random.key(0))
    for optimizer in (optax.sgd(0.1), optax.contrib.schedule_free_adamw(0.1)):
        train_alone(script(init=lambda key: fixed, optimizer=optimizer, steps=3))
    assert float(jnp.sum(fixed[0]["dead"])) == 0.0
    start = train_alone(script(init=lambda key: fixed, steps=0))
    assert start.step == 0
    assert np.isnan(start.loss), "no gradient was computed"
    assert np.array_equal(start.params["w"], fixed[0]["w"])


def test_large_gradients_are_clipped_to_the_norm():
    """The squares of these are infinite in float32."""
    result = train_alone(
        Script(
            init=lambda key: jnp.zeros(4),
            loss=lambda params, batch: jnp.sum(params * batch),
            batches=lambda key: np.full(4, 1e25, np.float32),
            optimizer=optax.sgd(1.0),
            steps=1,
            clip_norm=2.0,
        )
    )
    np.testing.assert_allclose(result.params, -1.0, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("clip", [1e-3, 0.3])
def test_narrow_gradients_are_clipped_as_servers_do(dtype, clip):
    """The factor was rounded to the dtype, in which 1.7e-8 is 0, and others differ by some thousandths."""
    size = 6e4
    result = train_alone(
        Script(
            init=lambda key: jnp.zeros(3, dtype),
            loss=lambda params, batch: jnp.sum(params.astype(jnp.float32) * batch),
            batches=lambda key: np.asarray([size, 0, 0], np.float32),
            optimizer=optax.sgd(1.0),
            steps=1,
            clip_norm=clip,
        )
    )
    gradient = float(jnp.asarray(size, dtype))
    want = jnp.asarray(np.float32(gradient) * np.float32(clip / gradient), dtype)
    assert float(-result.params[0]) == float(want)


def test_batches_are_prepared_by_several_threads_where_they_state_so():
    def made(key):
        return batches(key)

    made.workers = 3
    want = train_alone(script())
    got = train_alone(script(batches=made))
    assert np.array_equal(got.params["w"], want.params["w"])


@pytest.mark.parametrize("wire", [Wire("Int8", "BFloat16"), Wire("Int4", error_feedback=True)], ids=str)
def test_t4_one_process_rounds_as_the_plain_loop_does(wire):
    """Float64; the plain loop rounds as a job of any number of shards does."""

    def wide(key):
        return {"w": jax.random.normal(key, (8, 700))}

    def error(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2)

    with enable_x64():
        settings = {"init": wide, "loss": error, "batches": lambda key: key.rng.normal(size=(4, 8))}
        one = Script(**settings, optimizer=optax.adam(1e-2), steps=10, wire=wire)
        got, exact = train_alone(one), train_alone(replace(one, wire=None))
        want = train_local(wide, error, one.batches, one.optimizer, 10, wire=wire)
    np.testing.assert_allclose(got.params["w"], want.params["w"], rtol=1e-11)
    assert (got.params["w"] != exact.params["w"]).any()


def test_evaluate_every_needs_evaluate():
    with pytest.raises(ConfigurationError, match="evaluate_every is given without evaluate"):
        script(evaluate=None, evaluate_every=2)
