"""Prints the digests of a table of optimizers as JSON; `test_digest` starts it in fresh processes."""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from backstay._update._partition import partition
from backstay._update._rules import analyse
from backstay._update._tree import describe


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def vectors(params):
    return jax.tree.map(lambda leaf: leaf.ndim < 2, params)


def labels(params):
    return jax.tree.map(lambda leaf: "slow" if leaf.ndim > 1 else "fast", params)


def scaled(factor):
    """Returns an optimizer that multiplies by an array that it closes over, a mask of each element for example."""
    array = np.linspace(0, factor, 24, dtype=np.float32)

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda leaf: leaf * array if leaf.shape == (24,) else leaf, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def looped(count):
    """Returns an optimizer with a loop, whose body is a program inside the program."""

    def update(updates, state, params=None):
        del params
        return jax.tree.map(lambda leaf: jax.lax.fori_loop(0, 3, lambda _, x: x * count, leaf), updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def ramp(step):
    return jnp.where(step < 10, 0.1 * step, 1.0)


def other_ramp(step):
    return jnp.where(step < 11, 0.1 * step, 1.0)


OPTIMIZERS = {
    "sgd .1": lambda: optax.sgd(0.1),
    "sgd .01": lambda: optax.sgd(0.01),
    "sgd, the next float": lambda: optax.sgd(float(np.nextafter(np.float32(0.1), np.float32(1)))),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "momentum .8": lambda: optax.sgd(0.1, momentum=0.8),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam 1e-3": lambda: optax.adam(1e-3),
    "adam 1e-4": lambda: optax.adam(1e-4),
    "adam b2": lambda: optax.adam(1e-3, b2=0.99),
    "adam eps": lambda: optax.adam(1e-3, eps=1e-7),
    "adam, bfloat16 state": lambda: optax.adam(1e-3, mu_dtype=jnp.bfloat16),
    "adamw": lambda: optax.adamw(1e-3),
    "adamw .5": lambda: optax.adamw(1e-3, weight_decay=0.5),
    "adamw, masked": lambda: optax.adamw(1e-3, weight_decay=0.5, mask=matrices),
    "adamw, masked otherwise": lambda: optax.adamw(1e-3, weight_decay=0.5, mask=vectors),
    "lion": lambda: optax.lion(1e-3),
    "adagrad": lambda: optax.adagrad(0.1),
    "adagrad, another start": lambda: optax.adagrad(0.1, initial_accumulator_value=0.2),
    "cosine 100": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 100)),
    "cosine 200": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 200)),
    "own schedule": lambda: optax.sgd(ramp),
    "another own schedule": lambda: optax.sgd(other_ramp),
    "joined schedules": lambda: optax.sgd(
        optax.join_schedules([optax.linear_schedule(0.0, 0.1, 5), optax.constant_schedule(0.1)], [5])
    ),
    "joined schedules, later": lambda: optax.sgd(
        optax.join_schedules([optax.linear_schedule(0.0, 0.1, 5), optax.constant_schedule(0.1)], [6])
    ),
    "chain": lambda: optax.chain(optax.clip(0.5), optax.adam(1e-3)),
    "chain, the other way round": lambda: optax.chain(optax.adam(1e-3), optax.clip(0.5)),
    "injected 1e-3": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "injected 1e-4": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-4),
    "multi": lambda: optax.multi_transform({"slow": optax.sgd(0.1), "fast": optax.adam(1e-3)}, labels),
    "multi, exchanged": lambda: optax.multi_transform({"fast": optax.sgd(0.1), "slow": optax.adam(1e-3)}, labels),
    "masked": lambda: optax.masked(optax.sgd(0.1), matrices),
    "masked otherwise": lambda: optax.masked(optax.sgd(0.1), vectors),
    "frozen": lambda: optax.chain(optax.adam(1e-3), optax.masked(optax.set_to_zero(), matrices)),
    "every 3": lambda: optax.MultiSteps(optax.adam(1e-3), 3).gradient_transformation(),
    "every 4": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "noisy, key 3": lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    "noisy, key 4": lambda: optax.noisy_sgd(0.1, key=jax.random.key(4)),
    "lamb": lambda: optax.lamb(1e-3),
    "lamb 1e-4": lambda: optax.lamb(1e-4),
    "muon": lambda: optax.contrib.muon(1e-3),
    "muon, 4 iterations": lambda: optax.contrib.muon(1e-3, ns_steps=4),
    "closed over an array": lambda: scaled(1.0),
    "closed over another array": lambda: scaled(2.0),
    "loop": lambda: looped(0.5),
    "loop with another constant": lambda: looped(0.25),
}


def params():
    return {
        "dense": {"kernel": np.zeros((7, 41), np.float32), "bias": np.zeros(24, np.float32)},
        "embedding": np.zeros((9, 8), np.float32),
    }


def digests(names):
    tree = describe(params())
    found = {}
    for name in names:
        parts = partition(tree, analyse(OPTIMIZERS[name](), tree), 2)
        found[name] = [parts.structure_digest.hex(), parts.program_digest.hex(), parts.digest.hex()]
    return found


if __name__ == "__main__":
    names = list(OPTIMIZERS)
    if sys.argv[1] == "backwards":  # so that nothing depends on what the process has traced before
        names.reverse()
    print(json.dumps(digests(names)))
