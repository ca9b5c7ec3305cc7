"""The training script of these tests trains a tiny model, with faults by environment variables."""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import backstay

if "X64" in os.environ:  # with the variable of JAX the process could not be forked, and would import JAX itself
    jax.config.update("jax_enable_x64", True)
STEPS = int(os.environ.get("STEPS", "8"))
CLIP = float(os.environ["CLIP"]) if "CLIP" in os.environ else None
WIDTH = int(os.environ.get("WIDTH", "16"))
NAN_FROM = int(os.environ.get("NAN_FROM", "-1"))
RAISE_AT = int(os.environ.get("RAISE_AT", "-1"))
HOLD_AT = int(os.environ.get("HOLD_AT", str(10**9)))  # there is no batch of this step and later ones
LET = Path(os.environ.get("LET", "no-file"))  # as soon as this file exists, the step that it says takes its place
EVALUATE = Path(os.environ.get("EVALUATE", "/"))  # `evaluate` waits for this file
OPTIMIZER = optax.adam(float(os.environ.get("LEARNING_RATE", "1e-2")))
if "MASKED" in os.environ:  # Adam keeps moments of the layer that it does not change
    OPTIMIZER = optax.chain(
        OPTIMIZER,
        optax.masked(optax.set_to_zero(), lambda params: {name: name == "dense" for name in params}),
    )
SEED = int(os.environ.get("SEED", "0"))
AFTER = os.environ.get("AFTER", "")  # what the code after training does: raise | exit | says | wait | twice


def init(key):
    if "EXIT_IN_INIT" in os.environ:
        sys.exit(int(os.environ["EXIT_CODE"]))
    # Without random bits, of which the program takes longer to compile than all others of a pod.
    numbers = jnp.sin(jax.random.key_data(key)[-1] + jnp.arange(1, 11 * WIDTH + 1) ** 2)
    running = {"running": {"mean": jnp.zeros(WIDTH)}} if "RUNNING" in os.environ else {}
    return running | {
        "dense": {"kernel": numbers[: 8 * WIDTH].reshape(8, WIDTH), "bias": jnp.zeros(WIDTH)},
        "out": [numbers[8 * WIDTH :].reshape(WIDTH, 3)],
    }


STATE = "STATE" in os.environ  # running means and dropout


def init_with_state(key):
    return init(key), {"mean": jnp.zeros(WIDTH), "batches": jnp.int32(0)}


def loss_with_state(params, state, batch, key):
    x, y, scale = batch
    hidden = x @ params["dense"]["kernel"] + params["dense"]["bias"]
    mean = jnp.mean(hidden, axis=0)
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    out = jnp.where(kept, jnp.tanh(hidden - state["mean"]), 0) @ params["out"][0]
    error = jnp.mean((out - y) ** 2)
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "batches": state["batches"] + 1}
    return error * scale, new, {"error": error}


def loss(params, batch):
    x, y, scale = batch
    hidden = jnp.tanh(x @ params["dense"]["kernel"] + params["dense"]["bias"])
    error = jnp.mean((hidden @ params["out"][0] - y) ** 2)
    return error * scale, {"error": error}


def hold(key):
    while key.step >= HOLD_AT and not (LET.exists() and key.step < int(LET.read_text())):
        time.sleep(0.01)


def batches(key):
    if key.step == RAISE_AT and "EXIT_CODE" in os.environ:
        sys.exit(int(os.environ["EXIT_CODE"]))
    if key.step == RAISE_AT:
        raise RuntimeError("the data is\ngone")
    hold(key)
    if "SAY_BATCHES" in os.environ:
        print(f"batch {key.step}\n", end="", flush=True)
    rng = np.random.default_rng(key.step) if "SAME" in os.environ else key.rng
    x = rng.normal(size=(int(os.environ.get("BATCH", "4")), 8))
    bad = (0 <= NAN_FROM <= key.step and key.rank == 0) or f"{key.step},{key.rank}" == os.environ.get("NAN_AT")
    return x, np.sin(x[:, :3]), np.asarray(np.nan if bad else 1.0)


def evaluate(params, state=None):
    if not EVALUATE.exists():
        print("evaluate waits", flush=True)
        while not EVALUATE.exists():
            time.sleep(0.01)
    if "TOO_LARGE" in os.environ:
        jnp.zeros(1 << 46)
    # Not by JAX, for which each pod would compile.
    return {"squares": sum(float(np.sum(np.square(leaf))) for leaf in jax.tree.leaves(params))}


# Two threads may wait for a held batch. The third one prepares the batch that is requested after a rollback.
ROWS = np.arange(int(os.environ.get("SAMPLES", "2")))
SAMPLES = backstay.from_dataset(ROWS, batch_size=2, workers=3, ahead=3)


class Held(type(SAMPLES)):
    """A data set whose batches `HOLD_AT` holds."""

    def __init__(self) -> None:
        self.__dict__.update(SAMPLES.__dict__)

    def __call__(self, key):
        hold(key)
        return super().__call__(key)


def clean_up() -> None:
    """Installs a handler of SIGTERM and a function of `atexit`, which write files."""
    folder, pod = Path(os.environ["CLEAN_UP"]), f"{os.environ.get('BACKSTAY_ROLE')}-{os.environ.get('BACKSTAY_INDEX')}"

    def handle(number, frame):
        put(folder / f"{pod}-handler", str(number))

    signal.signal(signal.SIGTERM, handle)
    if "WAKES" in os.environ:
        wake_up(folder / f"{pod}-woken")
    atexit.register(lambda: put(folder / f"{pod}-atexit", "done"))


def wake_up(file):
    """Writes the number of a signal that arrives at the descriptor of `signal.set_wakeup_fd`."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    thread = threading.Thread(target=lambda: put(file, str(os.read(read, 1)[0])), daemon=True)
    thread.start()
    atexit.register(thread.join)  # the file is whole when the pod has ended


def put(file, text):
    file.with_suffix(".part").write_text(text)
    file.with_suffix(".part").replace(file)


def main() -> None:
    if "CLEAN_UP" in os.environ:
        clean_up()
    arguments = {
        "init": init,
        "loss": loss,
        "batches": batches,
        "optimizer": OPTIMIZER,
        "steps": STEPS,
        "evaluate": evaluate,
        "clip_norm": CLIP,
        "seed": SEED,
    }
    if "NO_EVALUATE" in os.environ:
        arguments.pop("evaluate")
    if STATE:
        arguments |= {"init": init_with_state, "loss": loss_with_state, "has_state": True, "has_rng": True}
    if "STOPS" in os.environ:
        arguments["stop_when"] = lambda metrics: metrics["squares"] > 0
        # In one piece, because a log line of another thread may come between two.
        arguments["on_update"] = lambda step, loss, metrics: print(f"on_update {step} {sorted(metrics)}", flush=True)
    if "SAMPLES" in os.environ:
        arguments["init"] = lambda key: jnp.zeros(SAMPLES.size)
        arguments["loss"] = lambda params, rows: -jnp.sum(params[rows])
        arguments["batches"] = Held()
        arguments["optimizer"] = optax.sgd(1.0)
    if "START_FROM" in os.environ:
        arguments["start_from"] = os.environ["START_FROM"]
    if "FROZEN" in os.environ:
        arguments["frozen"] = lambda name: name.startswith(os.environ["FROZEN"])
    if "FROZEN_STATE" in os.environ:
        arguments["frozen_state"] = lambda name: name == os.environ["FROZEN_STATE"]
    if "WIRE" in os.environ:
        gradients, parameters, *feedback = os.environ["WIRE"].split(",")
        arguments["wire"] = backstay.Wire(gradients, parameters, error_feedback=bool(feedback) or None)
    if "LOCAL" in os.environ:
        arguments["local"] = backstay.LocalSteps(optimizer=OPTIMIZER, **json.loads(os.environ["LOCAL"]))
        arguments["optimizer"] = optax.sgd(0.7, momentum=0.9, nesterov=True)
    world = os.environ.get("WORLD")
    if world is None:
        result = backstay.train(**arguments, log_every=0)
    else:
        from backstay.testing import train_local

        if arguments.pop("start_from", None):
            result = backstay.train(**arguments, start_from=os.environ["START_FROM"])
        else:
            result = train_local(**arguments, world=int(world))
    trained = jax.tree.leaves((result.params, result.state))
    leaves = {str(index): np.asarray(leaf) for index, leaf in enumerate(trained)}
    part = Path(os.environ["OUT"]).with_suffix(".part.npz")
    np.savez(
        part,
        step=result.step,
        squares=result.metrics.get("squares", 0.0),
        rank=result.rank,
        leads=result.is_leader,
        **leaves,
    )
    part.replace(os.environ["OUT"])
    if AFTER == "raise":
        export(result.step)
    if AFTER == "exit":
        sys.exit(3)
    if AFTER == "says":
        raise SystemExit("no place to export to")
    if AFTER == "wait":
        print("exporting", flush=True)
        time.sleep(10**6)
    if AFTER == "twice":
        backstay.train(**arguments)


def export(step):
    return {}[f"no model of step {step}"]


main()
