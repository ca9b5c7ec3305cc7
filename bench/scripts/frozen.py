"""A model with a frozen part and a trained part, almost without computation (bench/frozen.py).

Environment variables: FROZEN and TRAINED are bytes of float32 in arrays of 64 MB at most. STEPS is the number of
updates. HOLD is how many seconds a batch takes. BASE is a safetensors file with the frozen part. Without BASE, `init`
makes it.
"""

import os
import time

import jax.numpy as jnp
import numpy as np
import optax

import backstay

FROZEN, TRAINED, STEPS = (int(os.environ[name]) for name in ("FROZEN", "TRAINED", "STEPS"))
HOLD = float(os.environ.get("HOLD", "0"))
PIECE = 64 << 20


def arrays(nbytes):
    """Zeros of that many bytes."""
    sizes = [PIECE] * (nbytes // PIECE) + ([nbytes % PIECE] if nbytes % PIECE else [])
    return {f"{number:03}": jnp.zeros(size // 4) for number, size in enumerate(sizes)}


def init(key):
    del key
    return {"base": arrays(FROZEN), "trained": arrays(TRAINED)}


def loss(params, batch):
    first = sum(leaf[0] for leaf in params["base"].values())
    return sum(jnp.mean((leaf - batch - first) ** 2) for leaf in params["trained"].values())


def batches(key):
    time.sleep(HOLD)
    return np.float32(key.step % 7)


base = os.environ.get("BASE")
backstay.train(
    init=init,
    loss=loss,
    batches=batches,
    optimizer=optax.sgd(1e-3),
    steps=STEPS,
    start_from=backstay.StartFrom(base, missing="init") if base else None,
    log_every=0 if HOLD else 5,
    frozen=(lambda name: name.startswith("base.")) if FROZEN else False,
)
