"""The training script of these tests."""

import sys

import jax
import jax.numpy as jnp
import optax

import backstay

STEPS = 12


def init(key):
    return {"w": jax.random.normal(key, (4, 2))}


def loss(params, batch):
    return jnp.mean((batch @ params["w"] - 1.0) ** 2)


def batches(key):
    if "--fail" in sys.argv and key.step == 3:
        raise RuntimeError("the data ends here")
    return key.rng.normal(size=(8, 4)).astype("float32")


def main():
    backstay.train(init=init, loss=loss, batches=batches, optimizer=optax.sgd(0.1), steps=STEPS, evaluate=None)


if __name__ == "__main__":
    main()
