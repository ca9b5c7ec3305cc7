"""The bytes example in three sizes, with an update for each batch or with local steps.

bench/localsteps.py runs it in jobs.
"""

import argparse
import importlib.util
import json
from pathlib import Path

import optax

import backstay

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "bytes" / "train.py"
SIZES = {"tiny": (32, 2, 32, 8), "small": (64, 2, 64, 8), "large": (128, 4, 128, 8)}  # width, layers, context, batch


def example(size):
    """Returns the example's module, with the sizes of its model replaced."""
    spec = importlib.util.spec_from_file_location("bytes_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.WIDTH, module.LAYERS, module.CONTEXT, module.BATCH = SIZES[size]
    return module


def batches_of(module):
    """Returns the argument `batches` of `train` for the example's text."""
    return backstay.from_dataset(module.Windows(module.training), batch_size=module.BATCH)


def adamw(steps):
    """AdamW with a schedule for this number of steps of a worker."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, min(50, steps // 10), steps, 1e-4)
    return optax.adamw(schedule, weight_decay=0.01)


def inner(steps):
    """Returns the inner optimizer, which is `adamw` with a bound for each gradient."""
    return optax.chain(optax.clip_by_global_norm(1.0), adamw(steps))


def main():
    from _timeline import follow

    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--worker-steps", type=int, required=True, help="steps of each worker")
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--local", type=json.loads, help="arguments of LocalSteps")
    outer = parser.add_mutually_exclusive_group()
    outer.add_argument("--outer-rate", type=float, help="learning rate of plain SGD; default: the mode's optimizer")
    outer.add_argument("--warm-up", type=int, help="updates in which the momentum of the default grows; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    follow()
    if arguments.local is None:
        how = {"optimizer": adamw(arguments.worker_steps), "clip_norm": 1.0}
    else:
        how = {"local": backstay.LocalSteps(optimizer=inner(arguments.worker_steps), **arguments.local)}
        if arguments.outer_rate is not None:
            how["optimizer"] = optax.sgd(arguments.outer_rate)
        if arguments.warm_up is not None:
            how["optimizer"] = backstay.outer_optimizer(warmup=arguments.warm_up)
    module = example(arguments.size)
    backstay.train(
        init=module.init,
        loss=module.loss,
        batches=batches_of(module),
        steps=arguments.updates,
        seed=arguments.seed,
        log_every=0.0,
        **how,
    )


if __name__ == "__main__":
    main()
