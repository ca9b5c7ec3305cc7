"""The bytes example in two sizes, with an update for each batch or with local steps, for bench/localsteps.py.

Importing it gives the parts; as a program it trains in a job.
"""

import argparse
import json
import runpy
from pathlib import Path

import optax

import backstay

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bytes" / "train.py"
SIZES = {"small": (64, 2, 64, 8), "large": (128, 4, 128, 16)}  # width, layers, context, batch


class Example:
    """The example with the sizes of its model replaced; `init`, `loss` and `evaluate` are those of the example."""

    def __init__(self, size):
        names = runpy.run_path(str(EXAMPLE), run_name="bytes_example")
        self.init, self.loss, self.evaluate = (names[name] for name in ("init", "loss", "evaluate"))
        width, layers, context, self.batch = SIZES[size]
        # The functions read the sizes from the module that they were defined in.
        self.init.__globals__.update(WIDTH=width, LAYERS=layers, CONTEXT=context, BATCH=self.batch)
        self.tokens = self.batch * context
        self.batches = backstay.from_dataset(names["Windows"](), batch_size=self.batch)


def inner(steps):
    """AdamW for so many steps of a worker."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 10), steps, 1e-4)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def plain(steps):
    """The same for an update for each batch, as arguments of `train`."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 10), steps, 1e-4)
    return {"optimizer": optax.adamw(schedule, weight_decay=0.01), "clip_norm": 1.0}


def main():
    from _timeline import follow

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--worker-steps", type=int, required=True, help="of each worker")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--local", type=json.loads, help="arguments of LocalSteps")
    parser.add_argument("--outer-rate", type=float, help="of plain SGD; default: the default of the mode")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    follow()
    example = Example(arguments.size)
    if arguments.local is None:
        how = plain(arguments.worker_steps)
    else:
        how = {"local": backstay.LocalSteps(optimizer=inner(arguments.worker_steps), **arguments.local)}
        if arguments.outer_rate is not None:
            how["optimizer"] = optax.sgd(arguments.outer_rate)
    backstay.train(
        init=example.init,
        loss=example.loss,
        batches=example.batches,
        steps=arguments.updates,
        seed=arguments.seed,
        log_every=0.0,
        **how,
    )


if __name__ == "__main__":
    main()
