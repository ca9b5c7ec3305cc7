"""Trains linear regression in a moment for the end-to-end tests. It misbehaves as BEHAVE says."""

import os
import signal
import sys
import time
from pathlib import Path

BEHAVE = os.environ.get("BEHAVE", "")
ROLE = os.environ.get("BACKSTAY_ROLE", "")
INDEX = os.environ.get("BACKSTAY_INDEX", "")
FIRST = os.environ.get("BACKSTAY_INCARNATION") == "1"

if BEHAVE == "raise":
    raise RuntimeError("boom at import")
if BEHAVE == "exit0":
    sys.exit(0)
if BEHAVE == "binary":
    sys.stdout.buffer.write(bytes(range(256)) * 20)
    sys.stdout.flush()
    sys.exit(3)

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

STEPS = int(os.environ.get("STEPS", "40"))
PAUSE = float(os.environ.get("PAUSE", "0"))
GATE = os.environ.get("GATE", "")  # a file; once it exists, no more pauses
HOLD_AT = int(os.environ.get("HOLD_AT", str(10**9)))  # and no batch of this step and later ones before
WIDTH = 6 if BEHAVE == "shapes" and ROLE == "worker" and INDEX == "1" else 5


def init(key):
    return {"w": jax.random.normal(key, (WIDTH, 3)), "b": [jnp.zeros(3), jnp.ones(())]}


def loss(params, batch):
    x, y = batch
    out = x[:, :WIDTH] @ params["w"] + params["b"][0] * params["b"][1]
    value = jnp.mean((out - y) ** 2)
    return value, {"rmse": jnp.sqrt(value)}


def batches(key):
    if PAUSE and not (GATE and Path(GATE).exists()):
        time.sleep(PAUSE)
    while key.step >= HOLD_AT and not Path(GATE).exists():
        time.sleep(0.01)
    own = os.environ.get("BACKSTAY_MEMBER", "") == os.environ.get("OF_MEMBER", "")
    if BEHAVE == "suicide" and own and FIRST and INDEX == "1" and key.step == 12:
        os.kill(os.getpid(), signal.SIGKILL)
    x = key.rng.normal(size=(8, 6)).astype(np.float32)
    y = x[:, :3] * 2 + 1
    if BEHAVE == "numbers":
        y += key.number % 11 + key.world
    if BEHAVE == "nan" and key.rank == 1 and key.step >= 5:
        y[:] = np.nan
    return x, y.astype(np.float32)


SETTINGS = dict(
    init=init,
    loss=loss,
    batches=batches,
    optimizer=optax.adam(0.05),
    steps=STEPS,
    evaluate=lambda params: {"norm": float(jnp.linalg.norm(params["w"]))},
    seed=3,
)

if __name__ == "__main__":
    result = backstay.train(**SETTINGS)
    print(f"finished at step {result.step}")
    if BEHAVE == "export" and result.is_leader:
        exported = Path(os.environ["EXPORT"], os.environ["BACKSTAY_INCARNATION"])
        exported.with_suffix(".part").write_text(str(result.step))
        exported.with_suffix(".part").replace(exported)  # the test reads it as soon as it exists
        while not Path(GATE).exists():
            time.sleep(0.01)
    if BEHAVE == "export-fails" and result.is_leader:
        raise KeyError("no such bucket")
