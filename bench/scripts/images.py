"""The images example with its updates marked; in one process also its accuracy after every EVERY updates."""

from _timeline import follow, mark  # isort: split

import os
import runpy
import time
from pathlib import Path

import backstay

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "images" / "train.py"
train = backstay.train
follow()


def observed(evaluate, **arguments):
    """`train` as the example calls it. A job stores checkpoints instead, which are evaluated after it."""

    def marked(*model):
        began = time.perf_counter()
        metrics = evaluate(*model)
        mark(f"accuracy {metrics['accuracy']} {time.perf_counter() - began}")
        return metrics

    every = None if "BACKSTAY_JOB" in os.environ else int(os.environ["EVERY"])
    return train(evaluate=marked, evaluate_every=every, log_every=0.0, **arguments)


backstay.train = observed
runpy.run_path(str(EXAMPLE), run_name="__main__")
