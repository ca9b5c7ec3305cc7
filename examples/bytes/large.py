"""The transformer of train.py, whose arrays, heads or layers are divided over the devices of a rank.

In one process: python large.py --layout pipeline    As a job: backstay run large.yaml

A CPU needs XLA_FLAGS=--xla_force_host_platform_device_count=4 to have several devices.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec
from train import BATCH, CONTEXT, WIDTH, Windows, apply, bits, embed, training
from train import init as init_listed

import backstay

MICROBATCHES = 4
STAGES = 2  # each has a part of the blocks


def init(key):
    """Returns the parameters of train.py, with an array for each kind of parameter of all blocks."""
    params = init_listed(key)
    return params | {"blocks": jax.tree.map(lambda *blocks: jnp.stack(blocks), *params["blocks"])}


def in_turn(blocks, x):
    """Returns the output of all blocks, one after another."""
    return jax.lax.scan(lambda x, block: (apply(block, x), None), x, blocks)[0]


def in_stages(blocks, x):
    """Returns the same, where each stage has its own devices.

    A stage works on a part of the batch while the next one works on the part before. The first axis of the mesh divides
    the batch further.
    """

    def run(own, parts):
        stage, handed, done = jax.lax.axis_index("stage"), jnp.zeros_like(parts[0]), []
        for turn in range(MICROBATCHES + STAGES - 1):
            given = jnp.where(stage == 0, parts[min(turn, MICROBATCHES - 1)], handed)
            out = in_turn(own, given)
            handed = jax.lax.ppermute(out, "stage", [(one, one + 1) for one in range(STAGES - 1)])
            if turn >= STAGES - 1:
                done.append(jnp.where(stage == STAGES - 1, out, 0))
        return jax.lax.psum(jnp.stack(done), "stage")

    parts = x.reshape(MICROBATCHES, -1, CONTEXT, WIDTH)
    blocks_of_stage, rows = PartitionSpec("stage"), PartitionSpec(None, "batch")
    mapped = jax.shard_map(run, in_specs=(blocks_of_stage, rows), out_specs=rows, check_vma=False)
    return mapped(blocks, parts).reshape(x.shape)


def loss_of(layers):
    def loss(params, windows):
        return bits(params, layers(params["blocks"], embed(params, windows[:, :-1])), windows[:, 1:])

    return loss


def of_heads(mesh, shapes):
    """Each device has some heads, and some of the units between `up` and `down`. This is tensor parallelism."""
    columns, rows = PartitionSpec(None, None, "model"), PartitionSpec(None, "model")
    blocks = {"qkv": columns, "out": rows, "up": columns, "down": rows, "norm1": None, "norm2": None}
    return {"embed": None, "place": None, "blocks": blocks, "norm": None}


def of_layers(mesh, shapes):
    """Each stage has its blocks. This is pipeline parallelism."""
    return {"embed": None, "place": None, "blocks": PartitionSpec("stage"), "norm": None}


def stages(devices):
    """Returns a mesh whose last axis has neighbours in the list, and so in different pods if each pod has one
    device."""
    return Mesh(np.reshape(devices, (-1, STAGES)), ("batch", "stage"))


LAYOUTS = {
    "replicate": {"sharding": "replicate"},
    "fsdp": {"sharding": "fsdp"},
    "tensor": {"mesh": {"batch": 1, "model": -1}, "sharding": of_heads},
    "pipeline": {"mesh": stages, "sharding": of_layers},
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layout", choices=LAYOUTS, default="fsdp")
    parser.add_argument("--local-steps", type=int, default=0, help="local steps of a rank for each update; 0: none")
    parser.add_argument("--steps", type=int, default=200, help="steps of a rank")
    options = parser.parse_args()
    adam = optax.adamw(optax.warmup_cosine_decay_schedule(0, 3e-3, 50, 700, 1e-4), weight_decay=0.01)
    how = {"optimizer": adam, "steps": options.steps}
    if options.local_steps:
        how = {"local": backstay.LocalSteps(options.local_steps, adam), "steps": options.steps // options.local_steps}
    result = backstay.train(
        init=init,
        loss=loss_of(in_stages if options.layout == "pipeline" else in_turn),
        batches=backstay.from_dataset(Windows(training), batch_size=BATCH),
        **LAYOUTS[options.layout],
        **how,
    )
    if result.is_leader:
        print(f"bits per byte {result.train_metrics['bits_per_byte']:.4f} after {result.step} updates")
