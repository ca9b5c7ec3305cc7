"""A job of STEPS updates almost without computation; EVALUATE is how many seconds `evaluate` takes (bench/ends.py)."""

import os
import time

import jax.numpy as jnp
import optax

import backstay

SECONDS = float(os.environ.get("EVALUATE", "-1"))


def init(key):
    del key
    return {"w": jnp.zeros((64, 8)), "b": jnp.zeros(8)}


def loss(params, batch):
    return ((batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2).mean()


def batches(key):
    draw = key.rng.normal
    return {"x": draw(size=(16, 64)).astype("f4"), "y": draw(size=(16, 8)).astype("f4")}


def evaluate(params):
    time.sleep(SECONDS)
    return {"size": float(abs(params["w"]).mean())}


backstay.train(
    init=init,
    loss=loss,
    batches=batches,
    optimizer=optax.adam(1e-3),
    steps=int(os.environ["STEPS"]),
    evaluate=evaluate if SECONDS >= 0 else None,
    seed=0,
)
