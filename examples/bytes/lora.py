"""Adapters (LoRA) for the transformer of train.py, on the text of Python's documentation, which it was not trained on.

The base, first: BACKSTAY_CHECKPOINT=base python train.py    The adapters: python lora.py --base base
As a job: backstay run lora.py --base base. To train all parameters, add --all.
"""

import argparse
import importlib.resources

import jax
import jax.numpy as jnp
import numpy as np
import optax
from train import BATCH, Windows
from train import init as init_base
from train import loss as loss_of_base

import backstay

RANK = 4
ADAPTED = ("qkv", "out", "up", "down")

# Help texts of the language, as `help("for")` prints them. The last tenth is held out.
text = np.frombuffer((importlib.resources.files("pydoc_data") / "topics.py").read_bytes(), np.uint8)
training, held_out = np.split(text, [len(text) * 9 // 10])


def init(key):
    base = init_base(key)

    def adapter(key, kernel):
        inputs, outputs = kernel.shape
        return {"a": jax.random.normal(key, (inputs, RANK)) * inputs**-0.5, "b": jnp.zeros((RANK, outputs))}

    keys = jax.random.split(key, (len(base["blocks"]), len(ADAPTED)))
    adapters = [
        {name: adapter(keys[layer, number], block[name]) for number, name in enumerate(ADAPTED)}
        for layer, block in enumerate(base["blocks"])
    ]
    return {"base": base, "lora": adapters}


def merged(params):
    """Returns the parameters of the base with the products of the adapters added."""
    blocks = [
        block | {name: block[name] + adapter["a"] @ adapter["b"] for name, adapter in adapters.items()}
        for block, adapters in zip(params["base"]["blocks"], params["lora"], strict=True)
    ]
    return params["base"] | {"blocks": blocks}


def loss(params, windows):
    return loss_of_base(merged(params), windows)


def evaluate(params):
    samples = Windows(held_out)
    windows = np.stack([samples[index] for index in range(len(samples) // 8 * 8)])
    step = jax.jit(lambda params, windows: loss(params, windows)[1]["bits_per_byte"])
    return {"bits_per_byte": float(np.mean([step(params, part) for part in np.split(windows, 8)]))}


def of_base(name, arrays):
    """Returns the name of a parameter in the checkpoint of train.py; None for adapters, which begin as `init` returns
    them."""
    return name.removeprefix("base.") if name.startswith("base.") else None


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True, help="the checkpoints of train.py")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--all", action="store_true", help="train the base too")
    options = parser.parse_args()
    result = backstay.train(
        init=init,
        loss=loss,
        batches=backstay.from_dataset(Windows(training), batch_size=BATCH),
        optimizer=optax.adam(3e-3),
        clip_norm=1.0,
        steps=options.steps,
        evaluate=evaluate,
        start_from=backstay.StartFrom(options.base, mapping=of_base, missing="init"),
        frozen=False if options.all else lambda name: name.startswith("base."),
    )
    if "bits_per_byte" in result.metrics:
        print(f"held-out bits per byte {result.metrics['bits_per_byte']:.3f} after {result.step} updates")
