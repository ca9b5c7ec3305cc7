"""A training script whose parameters count the applied gradients, independent of the counters of the runtime.

The parameters `a_count` and `z_count` have an element for each (row, rank), where the row is the step of the batch's
key. A gradient adds exactly 1 to its own element of both. In the last checkpoint, a 2 is a gradient that was applied
twice. A row with fewer elements than the quorum is a lost update. They are the first and the last leaf. So the first
of two servers has all of `a_count`, and the second one all of `z_count`. Adam trains the other parameters, a small
regression. Its state must survive too, or the bits differ from those of a run without faults.

Environment variables: STEPS, WORLD, BACKUPS, MODE, PAUSE (seconds for each batch), COMPUTE, SIZE, HOLD, LOG_EVERY,
LOCAL, and TIMELINE (a folder for marks). COMPUTE is the time in seconds that each gradient takes without a processor.
SIZE is the number of elements of a further parameter. HOLD is a step: its batch and the later ones wait for a file `go`
in TIMELINE. LOG_EVERY is the time in seconds between lines of progress, which are marks. LOCAL is the number of local
steps between two updates, or 0 if workers send gradients.
"""

from _timeline import follow, mark  # isort: split

import functools
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

mark("imports")

STEPS = int(os.environ["STEPS"])
WORLD = int(os.environ["WORLD"])
QUORUM = max(1, WORLD - int(os.environ.get("BACKUPS", "0"))) if os.environ.get("MODE", "Sync") == "Sync" else 1
PAUSE = float(os.environ.get("PAUSE", "0"))
COMPUTE = float(os.environ.get("COMPUTE", "0"))
SIZE = int(os.environ.get("SIZE", "0"))
HOLD = int(os.environ.get("HOLD", str(STEPS)))
LOCAL = int(os.environ.get("LOCAL", "0"))
WIDTH = 64
COUNTS = "a_count", "z_count"
ROWS = max(STEPS * max(1, LOCAL), -(-4096 // WORLD))  # codecs leave smaller arrays exact

follow()


def init(key):
    return {
        "w": jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5,
        "b": jnp.zeros(WIDTH),
        "further": jnp.zeros(SIZE),
        **{name: jnp.zeros((ROWS, WORLD)) for name in COUNTS},
    }


def compute(x):
    """Sleep for the time of a computation on an accelerator."""
    time.sleep(COMPUTE)
    return x


def loss(params, batch):
    x, y, place = batch
    if COMPUTE:
        x = jax.pure_callback(compute, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    value = jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - y) ** 2)
    # The mean over the quorum is 1, and SGD with a learning rate of 1 adds it.
    value += jnp.mean(params["further"] ** 2) if SIZE else 0.0
    return value - QUORUM * sum(params[name][place[0, 0], place[0, 1]] for name in COUNTS)


@functools.cache
def joined():
    """Mark the first call of `batches`, when the parameters have arrived."""
    mark("joined")


def batches(key):
    joined()
    if PAUSE:
        time.sleep(PAUSE)
    while key.step >= HOLD * max(1, LOCAL) and not Path(os.environ["TIMELINE"], "go").exists():
        time.sleep(0.02)
    x = key.rng.normal(size=(8, WIDTH)).astype(np.float32)
    return x, np.roll(x, 1, axis=1) * 0.5, np.full((8, 2), (key.step, key.rank), np.int32)


def optimizer(model):
    """`model` for the regression, and plain sums for the other parameters."""
    labels = {"w": "model", "b": "model", "further": "count", **dict.fromkeys(COUNTS, "count")}
    return optax.multi_transform({"model": model, "count": optax.sgd(1.0)}, labels)


if __name__ == "__main__":
    # A fresh inner state after each update: the result does not depend on which workers died.
    inner = optimizer(optax.adam(1e-3))
    local = backstay.LocalSteps(LOCAL, inner, inner_state="reset") if LOCAL else None
    backstay.train(
        init=init,
        loss=loss,
        batches=batches,
        optimizer=optimizer(optax.sgd(0.7, momentum=0.9, nesterov=True)) if LOCAL else inner,
        local=local,
        steps=STEPS,
        log_every=float(os.environ.get("LOG_EVERY", "0")),
    )
