"""A Flax NNX network with batch normalization, dropout and a shared layer, on scikit-learn's handwritten digits.

In one process: python train.py    As a job: backstay run train.py --workers 3
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import backstay
from backstay.integrations.nnx import adapt

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)  # (1797, 64)
labels = digits.target[order].astype(np.int32)
HELD_OUT = 360


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(64, 96, rngs=rngs)
        self.shared = nnx.Linear(96, 96, rngs=rngs)  # one set of parameters, used twice
        self.norms = nnx.List([nnx.BatchNorm(96, rngs=rngs) for _ in range(3)])
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(96, 10, rngs=rngs)

    def __call__(self, x):
        for layer, norm in zip((self.first, self.shared, self.shared), self.norms, strict=True):
            x = self.dropout(nnx.relu(norm(layer(x))))
        return self.out(x)


def loss(net, batch):
    x, y = batch
    logits = net(x)  # changes the batch statistics of `net`
    accuracy = jnp.mean(logits.argmax(-1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"accuracy": accuracy}


def evaluate(net):
    return {"accuracy": float(jnp.mean(net(images[:HELD_OUT]).argmax(-1) == labels[:HELD_OUT]))}


if __name__ == "__main__":
    result = backstay.train(
        **adapt(Net, loss, evaluate),
        batches=backstay.from_dataset((images[HELD_OUT:], labels[HELD_OUT:]), batch_size=64),
        optimizer=optax.adam(2e-3),
        steps=200,
    )
    if result.is_leader:
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
