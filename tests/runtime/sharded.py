"""Trains a model that is divided over four devices, as KIND and MORE say, and writes its parameters to OUT."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import pkgutil
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import backstay
from backstay import _timeouts

if "STOP" in os.environ:
    _timeouts.use(replace(_timeouts.current(), stop=float(os.environ["STOP"])))
jax.config.update("jax_enable_x64", True)
OF_ROLE = f"DEVICES_OF_{os.environ.get('BACKSTAY_ROLE', '').upper()}"
jax.config.update("jax_num_cpu_devices", int(os.environ.get(OF_ROLE, os.environ.get("DEVICES", "1"))))
KIND = os.environ.get("KIND", "")
WIDTH = int(os.environ.get("WIDTH", "256"))  # large enough that fsdp divides a matrix
ROWS = int(os.environ.get("ROWS", "8"))


def init(key):
    if "INIT_EXITS" in os.environ:
        sys.exit(os.environ["INIT_EXITS"])
    # Without random bits, of which the program takes longer to compile than all others of a server.
    seed, first = jax.random.key_data(key)[-1], itertools.count(1, 10**6)

    def numbers(*shape):
        place = jnp.arange(math.prod(shape), dtype=float).reshape(shape) + next(first)
        return jnp.sin(seed + place**2)

    params = {
        "in": numbers(32, WIDTH) / 4,
        "stages": numbers(2, WIDTH, WIDTH) / 12,
        "out": numbers(WIDTH, 3) / 12,
        "odd": numbers(67, 71),  # no mesh divides it
        "bias": jnp.zeros(3),
    }
    return params, {"mean": jnp.zeros(WIDTH)}


def stage(kernel, hidden):
    return hidden + jnp.tanh(hidden @ kernel)


def plain(kernels, hidden):
    return stage(kernels[1], stage(kernels[0], hidden))


def piped(kernels, hidden):
    """Returns two stages on two devices; the second one works on a part of the batch while the first one works on the
    next."""

    def run(kernel, parts):
        index = jax.lax.axis_index("stage")
        held, done = jnp.zeros_like(parts[0]), []
        for turn in range(len(parts) + 1):
            given = jnp.where(index == 0, parts[min(turn, len(parts) - 1)], held)
            made = stage(kernel[0], given)
            held = jax.lax.ppermute(made, "stage", [(0, 1)])
            if turn:
                done.append(jnp.where(index == 1, made, 0))
        return jax.lax.psum(jnp.stack(done), "stage")

    whole, spec = PartitionSpec(), PartitionSpec("stage")
    mapped = jax.shard_map(run, in_specs=(spec, whole), out_specs=whole, check_vma=False)
    return mapped(kernels, hidden.reshape(4, -1, WIDTH)).reshape(hidden.shape)


def loss(params, state, batch):
    x, y = batch
    hidden = jnp.tanh(x @ params["in"])
    hidden = (piped if KIND == "pipeline" else plain)(params["stages"], hidden)
    error = jnp.mean((hidden @ params["out"] + params["bias"] - y) ** 2)
    mean = 0.9 * state["mean"] + 0.1 * hidden.mean(axis=0)
    return error + 1e-4 * jnp.sum(params["odd"] ** 2), {"mean": mean}


def noisy(params, state, batch, key):
    x, y = batch
    return loss(params, state, (x + jax.random.normal(key, x.shape) / 8, y))


def batches(key):
    if key.step == int(os.environ.get("EXIT_AT", "-1")):
        sys.exit(3)
    if key.step == int(os.environ.get("RAISE_AT", "-1")):
        raise ZeroDivisionError("no batch")
    if key.step == int(os.environ.get("HOLD", "-1")) and not Path(os.environ["LET"]).exists():
        print(f"held at step {key.step}", flush=True)
        wait()
    x = key.rng.normal(size=(ROWS, 32))
    return x, np.sin(x[:, :3])


class Samples:
    """A data set that knows which of its samples were read."""

    def __init__(self):
        self.read = set()

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.read.add(index)
        x = np.random.default_rng(index).normal(size=32)
        return x, np.sin(x[:3])


SAMPLES = Samples()
FIRST = 2 * 8  # samples of the first batch of each rank, which each of its pods reads whole


def evaluate(params, state):
    if "EVALUATE" in os.environ:
        raise ZeroDivisionError("no metrics")
    x = np.linspace(-1, 1, 8 * 32).reshape(8, 32)
    error, _ = jax.jit(loss)(params, state, (x, np.sin(x[:, :3])))  # the pipeline needs its mesh
    return {"error": float(error)}


def tensor(mesh, shapes):
    assert mesh.axis_names == ("batch", "model")
    assert shapes["in"].shape == (32, WIDTH)
    columns, rows = PartitionSpec(None, "model"), PartitionSpec("model")
    return {"in": columns, "stages": None, "out": rows, "odd": rows, "bias": None}


LAYOUTS = {
    "": {},
    "whole": {"mesh": {"batch": 4}, "sharding": "replicate"},
    "fsdp": {"sharding": "fsdp"},
    "tensor": {"mesh": {"batch": 2, "model": -1}, "sharding": tensor},
    "made": {"mesh": lambda devices: jax.sharding.Mesh(np.reshape(devices, (2, 2)), ("batch", "model"))},
    "pipeline": {
        "mesh": lambda devices: jax.sharding.Mesh(np.asarray(devices).reshape(1, 2, 2), ("batch", "stage", "rest")),
        "sharding": lambda _, shapes: {name: PartitionSpec("stage") if name == "stages" else None for name in shapes},
    },
}
MORE = {
    "": {"optimizer": optax.adamw(1e-2), "clip_norm": 0.5},
    "local": {"local": backstay.LocalSteps(4, optax.adam(1e-2), inner_state="keep", fragments=2, overlap=1)},
    "frozen": {
        "optimizer": optax.sgd(1e-1, momentum=0.9),
        "frozen": lambda name: name == "stages",
        "frozen_state": lambda name: name == "mean",
    },
    "rows": {
        "batches": backstay.from_dataset(SAMPLES, batch_size=8, shuffle=False),
        "loss": noisy,
        "has_rng": True,
        "optimizer": optax.adamw(1e-2),
        "clip_norm": 0.5,
    },
    "factored": {"optimizer": optax.adafactor(1e-2, min_dim_size_to_factor=32)},
}


def settings(kind, more):
    fixed = {"init": init, "loss": loss, "batches": batches, "evaluate": evaluate, "has_state": True, "steps": 4}
    return fixed | LAYOUTS[kind] | MORE[more]


def wait():
    is_leaving = False
    while not Path(os.environ["LET"]).exists():
        time.sleep(0.01)
        if not is_leaving and any(thread.name == "backstay-leaving" for thread in threading.enumerate()):
            is_leaving = True
            print("has received SIGTERM", flush=True)


def wait_at_exit():
    print("held after training", flush=True)
    wait()


def store(result, place):
    after = os.environ.get("AFTER", "")
    if after == "raise":
        raise ZeroDivisionError("no result")
    if after == "hold gather":
        print("held after training", flush=True)
        wait()
    params, state = backstay.gather((result.params, result.state))
    part = Path(place).with_suffix(".part.npz")
    np.savez(part, **params, **state, **result.metrics)
    part.replace(place)
    print(f"rows {sorted({index % 8 for index in SAMPLES.read if index >= FIRST})} stored", flush=True)
    if after == "hold end":
        print("held after training", flush=True)
        wait()


def hold_once(where):
    """Hold this pod at one place of Backstay: `join` is between joining the servers and connecting to them."""
    place = {
        "meet": "backstay._pod._formation._follow",
        "initialize": "backstay._pod._formation._initialize",
        "join": "backstay._roles._worker.connect",
        "compile": "backstay._roles._contributions.Contributions.compile",
    }[where]
    function = pkgutil.resolve_name(place)

    def held(*arguments, **more):
        patched.stop()
        print(f"held in {where}", flush=True)
        wait()
        return function(*arguments, **more)

    patched = patch(place, held)
    patched.start()


def count_as_accelerators():
    """Let the devices of this pod count as accelerators, which encode what they have."""
    encoder = "backstay._compute._device_encoding.DeviceEncoder"
    encode = pkgutil.resolve_name(encoder).encode

    def encoded(*arguments, **more):
        print("encoded on an accelerator", flush=True)
        return encode(*arguments, **more)

    patch(f"{encoder}.encode", encoded).start()
    for room in ("_transport._tensors._divided", "_compute._placement"):
        patch(f"backstay.{room}.shares_host_memory", lambda device: False).start()


if __name__ == "__main__":
    if os.environ.get("BACKSTAY_ROLE") == "worker" and os.environ["BACKSTAY_INDEX"] == os.environ.get("ACCELERATED"):
        count_as_accelerators()
    if "HOLD_IN" in os.environ:
        hold_once(os.environ["HOLD_IN"])
    if os.environ.get("AFTER") == "late atexit":  # it runs after those of Backstay
        atexit.register(wait_at_exit)
    more = os.environ.get("MORE", "")
    if "INITIALIZE" in os.environ:
        backstay.initialize()
        assert jax.device_count() == len(jax.local_devices()) * (2 if os.environ["BACKSTAY_ROLE"] == "worker" else 1)
    if "USES_JAX" in os.environ and os.environ["BACKSTAY_ROLE"] == "worker":
        jnp.zeros(3).block_until_ready()
    found = backstay.train(**settings(os.environ.get("OTHER_KIND", KIND), more))
    if KIND in ("fsdp", "tensor"):
        assert {leaf.sharding.is_fully_replicated for leaf in found.params.values()} == {True, False}
        for name, leaf in found.params.items():
            count = jax.device_count()
            divided = {"fsdp": {"in": count, "stages": count}, "tensor": {"in": count // 2, "out": count // 2}}
            parts = divided[KIND].get(name, 1)
            assert leaf.addressable_data(0).size * parts == leaf.size, name
    store(found, os.environ["OUT"])
