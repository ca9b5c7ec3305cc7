"""A byte-level transformer on the text of the Python standard library's own sources.

It goes below 2.8 bits a byte on held-out files. In one process: python train.py    As a job: backstay run job.yaml
With 24 steps of each worker between two updates: add --local-steps 24
"""

import argparse
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 128, 128, 4, 2, 16
NEAR = 4  # each position reads this byte and the three before it; small models learn this slowly


def read_sources():
    """Returns the bytes of all modules of the standard library as (training, held-out), where every 20th file is held
    out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "test", "tests", "idlelib", "__pycache__", "lib2to3", "pydoc_data", "encodings"}
    files = sorted(path for path in root.rglob("*.py") if not skip & set(path.relative_to(root).parts))
    texts = [path.read_bytes() for path in files]
    held_out = b"\n".join(text for number, text in enumerate(texts) if number % 20 == 0)
    training = b"\n".join(text for number, text in enumerate(texts) if number % 20)
    return np.frombuffer(training, np.uint8), np.frombuffer(held_out, np.uint8)


training, held_out = read_sources()


class Windows:
    """A text as samples of CONTEXT + 1 bytes, side by side."""

    def __init__(self, text):
        self.text = text

    def __len__(self):
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index):
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1].astype(np.int32)


def init(key):
    def normal(key, *shape, scale=None):
        return jax.random.normal(key, shape) * (scale or shape[0] ** -0.5)

    embed, place, *layers = jax.random.split(key, 2 + LAYERS)

    def block(key):
        qkv, out, up, down = jax.random.split(key, 4)
        return {
            "norm1": jnp.ones(WIDTH),
            "qkv": normal(qkv, WIDTH, 3 * WIDTH),
            "out": normal(out, WIDTH, WIDTH) / (2 * LAYERS) ** 0.5,
            "norm2": jnp.ones(WIDTH),
            "up": normal(up, WIDTH, 4 * WIDTH),
            "down": normal(down, 4 * WIDTH, WIDTH) / (2 * LAYERS) ** 0.5,
        }

    return {
        "embed": normal(embed, NEAR, 256, WIDTH, scale=0.02),
        "place": normal(place, CONTEXT, WIDTH, scale=0.02),
        "blocks": [block(key) for key in layers],
        "norm": jnp.ones(WIDTH),
    }


def norm(x, scale):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def embed(params, tokens):
    length = tokens.shape[1]
    x = params["place"][:length]
    for back, table in enumerate(params["embed"]):
        x = x + jnp.pad(table[tokens], ((0, 0), (back, 0), (0, 0)))[:, :length]
    return x


def apply(block, x):
    batch, length, _ = x.shape
    heads = (norm(x, block["norm1"]) @ block["qkv"]).reshape(batch, length, HEADS, 3, WIDTH // HEADS)
    q, k, v = (heads[:, :, :, one] for one in range(3))
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + mixed.reshape(batch, length, WIDTH) @ block["out"]
    return x + jax.nn.gelu(norm(x, block["norm2"]) @ block["up"]) @ block["down"]


def bits(params, x, targets):
    """Returns the loss of what the last block has returned, and its metric."""
    out = norm(x, params["norm"]) @ params["embed"][0].T
    nats = optax.softmax_cross_entropy_with_integer_labels(out, targets).mean()
    return nats, {"bits_per_byte": nats / jnp.log(2)}


def loss(params, windows):
    x = embed(params, windows[:, :-1])
    for block in params["blocks"]:
        x = apply(block, x)
    return bits(params, x, windows[:, 1:])


def evaluate(params):
    count = min(256, (len(held_out) - 1) // CONTEXT)
    starts = np.linspace(0, len(held_out) - CONTEXT - 1, count).astype(int)
    windows = np.stack([held_out[start : start + CONTEXT + 1] for start in starts]).astype(np.int32)
    step = jax.jit(lambda params, windows: loss(params, windows)[1]["bits_per_byte"])
    return {"bits_per_byte": float(np.mean([step(params, part) for part in np.split(windows, 8)]))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--local-steps", type=int, default=0, help="local steps of a worker for each update; 0: none")
    count = parser.parse_args().local_steps
    adam = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 50, 700, 1e-4), weight_decay=0.01)
    if count:
        inner = optax.chain(optax.clip_by_global_norm(1.0), adam)
        how = {"local": backstay.LocalSteps(count, inner), "steps": 700 // count}
    else:
        how = {"optimizer": adam, "clip_norm": 1.0, "steps": 700}
    result = backstay.train(
        init=init,
        loss=loss,
        batches=backstay.from_dataset(Windows(training), batch_size=BATCH),
        evaluate=evaluate,
        **how,
    )
    if "bits_per_byte" in result.metrics:  # not where the evaluation failed
        print(f"held-out bits per byte {result.metrics['bits_per_byte']:.3f} after {result.step} updates")
