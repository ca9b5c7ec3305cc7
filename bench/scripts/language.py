"""A decoder-only language model for accelerators, which computes random tokens in bfloat16 with float32 parameters.

bench/gpu.py runs it as a job, and bench/scripts/device.py has its model for the step without servers. At its end, each
process writes its spans into the folder that the variable SPANS names.
"""

import argparse
import atexit
import hashlib
import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

# width, layers, heads, vocabulary, context
SIZES = {"tiny": (64, 2, 4, 512, 64), "100M": (768, 12, 12, 32768, 1024), "1B": (2048, 18, 16, 32768, 1024)}
RECOMPUTED = {"1B"}
"""Sizes whose layers are computed again for the gradient: with 65,536 tokens, all values between them take 200 GB."""


def attention():
    """Returns the fastest attention of the device. cuDNN's needs an NVIDIA GPU of the year 2020 or newer."""
    device = jax.devices()[0]
    return "cudnn" if device.platform == "gpu" and float(device.compute_capability) >= 8 else "xla"


class Model:
    """The model of one of `SIZES`."""

    def __init__(self, size):
        self.width, self.layers, self.heads, self.vocabulary, self.context = SIZES[size]
        self._again = size in RECOMPUTED

    def init(self, key):
        width, layers = self.width, self.layers
        shapes = {
            "embedding": (self.vocabulary, width),
            "qkv": (layers, width, 3 * width),
            "out": (layers, width, width),
            "up": (layers, width, 4 * width),
            "down": (layers, 4 * width, width),
        }
        keys = jax.random.split(key, len(shapes))
        made = {
            name: 0.02 * jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)
        }
        return made | {name: jnp.ones((layers, width)) for name in ("norm1", "norm2")} | {"norm": jnp.ones(width)}

    def loss(self, params, tokens):
        """Returns the mean cross entropy of the next token."""
        half = jax.tree_util.tree_map(lambda leaf: leaf.astype(jnp.bfloat16), params)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        batch, length = inputs.shape
        implementation = attention()

        def norm(x, scale):
            wide = x.astype(jnp.float32)
            return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

        def layer(x, weights):
            q, k, v = jnp.split(norm(x, weights["norm1"]) @ weights["qkv"], 3, axis=-1)
            q, k, v = (each.reshape(batch, length, self.heads, -1) for each in (q, k, v))
            attended = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            x = x + attended.reshape(batch, length, self.width) @ weights["out"]
            return x + jax.nn.gelu(norm(x, weights["norm2"]) @ weights["up"]) @ weights["down"], None

        stacked = {name: half[name] for name in ("qkv", "out", "up", "down", "norm1", "norm2")}
        # A scan cannot share values of the two computations, so they need not be kept apart.
        kept = jax.checkpoint(layer, prevent_cse=False) if self._again else layer
        x, _ = jax.lax.scan(kept, half["embedding"][inputs], stacked)
        x = norm(x, half["norm"])

        @jax.checkpoint
        def part(total, given):
            """Returns the logits of a part of the batch, which are computed again for the gradient: all take 26 GB."""
            hidden, wanted = given
            logits = (hidden @ half["embedding"].T).astype(jnp.float32)
            return total + jnp.sum(optax.softmax_cross_entropy_with_integer_labels(logits, wanted)), None

        parts = max(1, batch // 8)
        split = (each.reshape(parts, batch // parts, length, *each.shape[2:]) for each in (x, targets))
        total, _ = jax.lax.scan(part, jnp.float32(0), tuple(split))
        return total / targets.size

    def tokens(self, step, rank, count):
        """int32[sequences, context + 1], about `count` tokens."""
        draw = np.random.default_rng((step, rank))
        return draw.integers(0, self.vocabulary, (self.sequences(count), self.context + 1), np.int32)

    def sequences(self, count):
        """Returns the number of sequences in a batch of about `count` tokens: one or more, and full parts of 8."""
        found = max(1, count // self.context)
        return found if found < 8 else found // 8 * 8

    @property
    def parameters(self):
        """The number of parameters."""
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        return sum(leaf.size for leaf in jax.tree_util.tree_leaves(shapes))

    def operations(self, count):
        """Floating-point operations of a step with `count` tokens, with those of attention.

        They are the work of the model: what is computed again for the gradient is not counted.
        """
        return count * (6 * self.parameters + 6 * self.layers * self.width * self.context)


def digest(params):
    """Returns a text that is equal for equal bits."""
    found = hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(params):
        found.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return found.hexdigest()[:16]


def dump():
    """Write the spans of this process."""
    from backstay import _instrument

    spans = [(one.point, one.began, one.ended, one.step) for one in _instrument.spans()]
    target = Path(os.environ["SPANS"]) / f"{os.environ.get('BACKSTAY_ROLE', 'alone')}-{os.getpid()}.json"
    part = target.with_suffix(".part")
    part.write_text(json.dumps(spans))
    part.replace(target)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--tokens", type=int, required=True, help="of each batch")
    parser.add_argument("--steps", type=int, required=True, help="updates")
    parser.add_argument("--local", type=json.loads, help="arguments of LocalSteps")
    parser.add_argument("--deterministic", action="store_true")
    arguments = parser.parse_args()
    atexit.register(dump)
    model = Model(arguments.size)
    if arguments.local is None:
        how = {"optimizer": optax.adam(1e-4)}
    else:
        how = {"local": backstay.LocalSteps(optimizer=optax.adam(1e-4), **arguments.local)}
    result = backstay.train(
        init=model.init,
        loss=model.loss,
        batches=lambda key: model.tokens(key.step, key.rank, arguments.tokens),
        steps=arguments.steps,
        deterministic=arguments.deterministic,
        log_every=0.0,
        **how,
    )
    print("digest", digest(result.params), flush=True)


if __name__ == "__main__":
    main()
