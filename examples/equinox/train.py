"""An Equinox network with batch normalization, dropout and static fields, on scikit-learn's digits.

In one process: python train.py    As a job: backstay run train.py --workers 3
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import backstay
from backstay.integrations.equinox import adapt

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)  # (1797, 64)
labels = digits.target[order].astype(np.int32)
HELD_OUT = 360


class Net(eqx.Module):
    layers: list
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    name: str = eqx.field(static=True)

    def __init__(self, name, *, key):
        first, second = jax.random.split(key)
        self.layers = [eqx.nn.Linear(64, 96, key=first), eqx.nn.Linear(96, 10, key=second)]
        self.norm = eqx.nn.BatchNorm(96, axis_name="batch", mode="ema")
        self.dropout = eqx.nn.Dropout(0.2)
        self.name = name

    def __call__(self, x, state, key=None):
        x, state = self.norm(self.layers[0](x), state)
        return self.layers[1](self.dropout(jax.nn.relu(x), key=key)), state


apply = jax.vmap(lambda net, *inputs: net(*inputs), (None, 0, None, 0), (0, None), axis_name="batch")


def loss(net, state, batch, key):
    x, y = batch
    logits, state = apply(net, x, state, jax.random.split(key, len(x)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), state


def evaluate(net, state):
    logits, _ = apply(net, images[:HELD_OUT], state, None)
    return {"accuracy": float(jnp.mean(logits.argmax(-1) == labels[:HELD_OUT]))}


if __name__ == "__main__":
    model = adapt(lambda key: eqx.nn.make_with_state(Net)("digits", key=key), loss, evaluate, has_rng=True)
    batches = backstay.from_dataset((images[HELD_OUT:], labels[HELD_OUT:]), batch_size=64)
    result = backstay.train(**model, batches=batches, optimizer=optax.adam(2e-3), steps=200)
    if result.is_leader:
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
