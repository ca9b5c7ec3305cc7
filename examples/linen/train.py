"""A Flax Linen network with batch normalization and dropout, computed in bfloat16, on scikit-learn's digits.

In one process: python train.py    As a job: backstay run train.py --workers 3
"""

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

import backstay
from backstay.integrations.linen import adapt

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.data[order] / 16).astype(np.float32)  # (1797, 64)
labels = digits.target[order].astype(np.int32)
HELD_OUT = 360


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        for width in (96, 96):
            # Parameters and statistics are float32, the computation is bfloat16.
            x = nn.Dense(width, dtype=jnp.bfloat16)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=jnp.bfloat16)(x)
            x = nn.Dropout(0.2, deterministic=not train)(nn.relu(x))
        return nn.Dense(10)(x)


def loss(net, batch):
    x, y = batch
    logits = net(x, train=True)
    accuracy = jnp.mean(logits.argmax(-1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"accuracy": accuracy}


def evaluate(net):
    logits = net(images[:HELD_OUT], train=False)
    return {"accuracy": float(jnp.mean(logits.argmax(-1) == labels[:HELD_OUT]))}


if __name__ == "__main__":
    result = backstay.train(
        **adapt(Net(), loss, evaluate, example=(images[:1],), options={"train": False}),
        batches=backstay.from_dataset((images[HELD_OUT:], labels[HELD_OUT:]), batch_size=64),
        optimizer=optax.adam(2e-3),
        steps=200,
    )
    if result.is_leader:
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
