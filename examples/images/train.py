"""A residual network with batch normalization on distorted handwritten digits of 32 x 32 pixels.

Each epoch turns, scales and shifts every digit in another way. The network classifies about 98 % of the held-out
digits, which are distorted too. In one process: python train.py    As a job: backstay run job.yaml
"""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits

import backstay
from backstay.integrations.nnx import adapt

SIZE, HELD_OUT, COPIES = 32, 360, 4
digits = load_digits()  # 1,797 images of 8 x 8 pixels
order = np.random.default_rng(0).permutation(len(digits.target))
images = (digits.images[order] / 16).astype(np.float32)
labels = digits.target[order].astype(np.int32)


def distort(sample, rng):
    """An image of 8 x 8 pixels as one of 32 x 32 x 1: turned, sheared, scaled, shifted, with noise."""
    image, label = sample
    angle, shear = rng.uniform(-0.4, 0.4), rng.uniform(-0.2, 0.2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]) @ [[1, shear], [0, 1]]
    matrix = turn / rng.uniform(2, 3.6, (2, 1))  # from places in the result to places in the image
    center = (SIZE - 1) / 2 + rng.uniform(-4, 4, 2)
    large = affine_transform(image, matrix, 3.5 - matrix @ center, (SIZE, SIZE), order=1)
    return (large + 0.15 * rng.standard_normal((SIZE, SIZE)))[..., None].astype(np.float32), label


def held_out():
    """Each held-out digit, distorted in COPIES ways that are the same in every run."""
    rng = np.random.default_rng(1)
    samples = [distort((images[i], labels[i]), rng) for _ in range(COPIES) for i in range(HELD_OUT)]
    return tuple(np.stack(column) for column in zip(*samples, strict=True))


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
    x, y = held_out()
    return {"accuracy": float(jnp.mean(net(x).argmax(-1) == y))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=128, help="examples in a batch; of each worker in a job")
    parser.add_argument("--steps", type=int, default=750, help="updates")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of the first update")
    args = parser.parse_args()
    training = (images[HELD_OUT:], labels[HELD_OUT:])
    result = backstay.train(
        **adapt(ResNet, loss, evaluate),
        batches=backstay.from_dataset(training, batch_size=args.batch, transform=distort, has_rng=True),
        optimizer=optax.adam(optax.cosine_decay_schedule(args.rate, args.steps)),
        steps=args.steps,
    )
    if result.is_leader and "accuracy" in result.metrics:  # worker 0, if the evaluation did not fail
        print(f"held-out accuracy {result.metrics['accuracy']:.4f} after {result.step} updates")
