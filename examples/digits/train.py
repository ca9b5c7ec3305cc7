"""A small convolutional net that classifies 97 % of scikit-learn's held-out handwritten digits after about 300 updates.

In one process: python train.py    As a job: backstay run job.yaml
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import backstay

digits = load_digits()
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order, :, :, None] / 16).astype(np.float32)  # (1797, 8, 8, 1)
labels = digits.target[order].astype(np.int32)
HELD_OUT = 360


def init(key):
    def layer(key, *shape):
        fan_in = np.prod(shape[:-1])
        return {"w": jax.random.normal(key, shape) * np.sqrt(2 / fan_in), "b": jnp.zeros(shape[-1])}

    first, second, hidden, out = jax.random.split(key, 4)
    return {
        "conv1": layer(first, 3, 3, 1, 16),
        "conv2": layer(second, 3, 3, 16, 32),
        "dense": layer(hidden, 4 * 4 * 32, 64),
        "out": layer(out, 64, 10),
    }


def logits(params, x):
    def conv(layer, x):
        x = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(x + layer["b"])

    x = conv(params["conv2"], conv(params["conv1"], x))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["dense"]["w"] + params["dense"]["b"])
    return x @ params["out"]["w"] + params["out"]["b"]


def loss(params, batch):
    x, y = batch
    out = logits(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(out, y).mean(), {"accuracy": (out.argmax(-1) == y).mean()}


@jax.jit
def accuracy(params):
    return (logits(params, images[:HELD_OUT]).argmax(-1) == labels[:HELD_OUT]).mean()


if __name__ == "__main__":
    result = backstay.train(
        init=init,
        loss=loss,
        batches=backstay.from_dataset((images[HELD_OUT:], labels[HELD_OUT:]), batch_size=32),
        optimizer=optax.adam(2e-3),
        steps=400,
        evaluate=lambda params: {"accuracy": float(accuracy(params))},
    )
    if result.is_leader and "accuracy" in result.metrics:  # worker 0, if the evaluation did not fail
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
