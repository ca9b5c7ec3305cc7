"""A training script that makes three updates, and then waits. With ``--fail`` it raises in its first batch."""

import sys
import threading

import jax.numpy as jnp
import optax

import backstay


def init(key):
    del key
    return {"w": jnp.zeros(2)}


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1.0) ** 2)


def batches(key):
    if "--fail" in sys.argv:
        raise RuntimeError("the data ends here")
    if key.step >= 3:
        threading.Event().wait()
    return key.rng.normal(size=(8, 2)).astype("float32")


if __name__ == "__main__":
    backstay.train(init=init, loss=loss, batches=batches, optimizer=optax.sgd(0.1), steps=9, evaluate=None)
