"""The training script of these tests."""

import ctypes
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
    if "--hold" in sys.argv and (key.step, key.rank) == (3, 1):
        ctypes.PyDLL(None).usleep(9_000_000)  # with the interpreter's lock: no thread of this process runs
    if "--fail" in sys.argv and key.step == 3:
        raise RuntimeError("the data ends here")
    rows = 0 if "--empty" in sys.argv and (key.step, key.rank) == (3, 1) else 8
    return key.rng.normal(size=(rows, 4)).astype("float32")


def main():
    backstay.train(init=init, loss=loss, batches=batches, optimizer=optax.sgd(0.1), steps=STEPS, evaluate=None)


if __name__ == "__main__":
    main()
