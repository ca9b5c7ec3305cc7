"""The plain loop, against optax written out; it is the reference of T4."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay import BatchKey
from backstay._compute._gradient import GradientFn
from backstay._update import Objective
from backstay._update._clip import clip_factor
from backstay._update._engine import ShardEngine
from backstay._update._engine._kernels import enable_x64
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._tree import describe
from backstay.errors import ConfigurationError, JobFailed
from backstay.testing import train_local


def init(key):
    return {"w": jax.random.normal(key, (5, 3)), "b": jnp.zeros(3)}


def loss(params, batch):
    error = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return jnp.mean(error**2), {"worst": jnp.max(jnp.abs(error))}


def batches(key):
    return {"x": key.rng.normal(size=(8, 5)), "y": key.rng.normal(size=(8, 3))}


@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_t4_the_plain_loop_is_optax(clip_norm):
    with enable_x64():
        chain = [optax.adam(1e-2)] if clip_norm is None else [optax.clip_by_global_norm(clip_norm), optax.adam(1e-2)]
        reference = optax.chain(*chain)
        params = init(jax.random.key(3))
        state = reference.init(params)
        gradient = jax.jit(jax.grad(lambda params, batch: loss(params, batch)[0]))
        update = jax.jit(reference.update)
        for step in range(20):
            parts = [gradient(params, batches(BatchKey(step, rank, 3, 3))) for rank in range(3)]
            mean = jax.tree.map(lambda a, b, c: ((a + b) + c) / 3, *parts)
            updates, state = update(mean, state, params)
            params = optax.apply_updates(params, updates)
        result = train_local(init, loss, batches, optax.adam(1e-2), 20, seed=3, clip_norm=clip_norm, world=3)
        assert result.step == 20
        for got, want in zip(jax.tree.leaves(result.params), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9)


@pytest.mark.parametrize(("shards", "clip_norm"), [(1, 0.3), (2, None), (3, 0.3)])
def test_t4_shards_follow_the_plain_loop(shards, clip_norm):
    """A whole job without its wire averages gradients of three ranks on every shard, in 50 steps in float64."""
    with enable_x64():
        result = train_local(init, loss, batches, optax.adamw(1e-2), 50, seed=5, clip_norm=clip_norm, world=3)
        params = init(jax.random.key(5))
        tree = describe(params)
        rule = analyse(optax.adamw(1e-2), tree)
        parts = partition(tree, rule, shards, 64)
        engines = [ShardEngine(parts, shard, rule, params) for shard in range(shards)]
        gradient_of = GradientFn(Objective(loss, tree))
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(params)]
        for step in range(50):
            hosts = [
                gradient_of(tree.unflatten(leaves), batches(BatchKey(step, rank, 3, 5))).host() for rank in range(3)
            ]
            blocks = [[[gather(block, host) for block in engine.blocks] for host in hosts] for engine in engines]
            factor = 1.0
            if clip_norm is not None:
                pairs = zip(engines, blocks, strict=True)
                factor = clip_factor(clip_norm, sum(engine.sum_of_squares(own, None, 3) for engine, own in pairs))
            for engine, own in zip(engines, blocks, strict=True):
                engine.apply(own, divisor=3, clip_factor=factor)
                for index, block in enumerate(engine.blocks):
                    scatter(block, engine.block(index), leaves)
        for got, want in zip(leaves, jax.tree.leaves(result.params), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9)


def test_what_is_reported():
    seen = []
    result = train_local(
        init,
        loss,
        batches,
        optax.sgd(0.1),
        4,
        world=2,
        evaluate=lambda params: {"norm": optax.tree.norm(params)},
        on_update=lambda update: seen.append((update.step, update.loss, update.examples, update.applied)),
    )
    assert [(step, examples, applied) for step, _, examples, applied in seen] == [(i, 16, True) for i in (1, 2, 3, 4)]
    assert result.loss == seen[-1][1]
    assert set(result.train_metrics) == {"worst"}
    assert result.metrics == {"norm": pytest.approx(float(optax.tree.norm(result.params)))}
    assert result.checkpoint is None


def test_no_steps_is_the_start():
    result = train_local(init, loss, batches, optax.sgd(0.1), 0, seed=2)
    assert result.step == 0
    assert math.isnan(result.loss)
    assert str(result).startswith("Result(step=0, loss=nan"), "the arrays are not a part of what a notebook prints"
    np.testing.assert_allclose(result.params["w"], init(jax.random.key(2))["w"], rtol=1e-6, atol=1e-7)


def test_the_parameters_of_init_are_not_consumed():
    """Buffers are donated; those that belong to the caller are not."""
    fixed = init(jax.random.key(0))
    for optimizer in (optax.sgd(0.1), optax.contrib.schedule_free_adamw(0.1)):
        train_local(lambda key: fixed, loss, batches, optimizer, 2)
    assert float(jnp.sum(fixed["b"])) == 0.0


def nan_at(steps):
    def make(key):
        batch = batches(key)
        if key.step in steps and key.rank == 1:
            batch["x"][0, 0] = np.nan
        return batch

    return make


def test_an_update_with_a_gradient_that_is_not_finite_is_skipped():
    kept = {}

    def keep(update):
        kept[update.step] = (update.applied, jax.tree.map(np.array, update.params))

    train_local(init, loss, nan_at({1, 2, 4}), optax.adam(0.1), 6, world=2, on_update=keep)
    assert [applied for applied, _ in kept.values()] == [True, False, False, True, False, True]
    assert np.array_equal(kept[1][1]["w"], kept[3][1]["w"])
    assert not np.array_equal(kept[3][1]["w"], kept[4][1]["w"])


def test_too_many_in_a_row_fail_the_job_naming_step_and_rank():
    with pytest.raises(JobFailed, match=r"NonFiniteGradients: .* 3 updates in a row .* at step 4 of rank 1"):
        train_local(init, loss, nan_at({0, 2, 3, 4}), optax.adam(0.1), 9, world=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": -1}, "steps is -1: must be a whole number"),
        ({"steps": 2.0}, r"steps is 2\.0"),
        ({"clip_norm": 0.0}, r"clip_norm is 0\.0: must be a positive number"),
        ({"clip_norm": float("inf")}, "clip_norm is inf"),
        ({"world": 0}, "world is 0: must be at least 1"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        train_local(init, loss, batches, optax.sgd(0.1), **{"steps": 1, **arguments})


def test_the_clip_factor():
    assert clip_factor(2.0, 4.0) == 1.0
    assert clip_factor(2.0, 16.0) == 0.5
    assert clip_factor(2.0, 0.0) == 1.0
