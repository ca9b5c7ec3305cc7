"""The digits example with marked updates, BATCH examples a worker and STEPS updates, in one process or as a pod."""

from _timeline import follow, mark  # isort: split

import os
import runpy
from pathlib import Path

import backstay

REPO = Path(__file__).resolve().parents[2]
example = runpy.run_path(str(REPO / "examples" / "digits" / "train.py"))
mark("imports")
follow()

if __name__ == "__main__":
    held_out = example["HELD_OUT"]
    backstay.train(
        init=example["init"],
        loss=example["loss"],
        batches=backstay.from_dataset(
            (example["images"][held_out:], example["labels"][held_out:]), batch_size=int(os.environ["BATCH"])
        ),
        optimizer=example["optax"].adam(2e-3),
        steps=int(os.environ["STEPS"]),
        log_every=0.0,
    )
