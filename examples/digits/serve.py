"""Answers requests with the digits that a job of train.py learnt, and follows its checkpoints.

backstay serve --checkpoint CHECKPOINTS examples/digits/serve.py    On Kubernetes: serve.yaml
"""

import jax
import numpy as np
from train import logits

import backstay


def predict(params, state, batch):
    scores = jax.nn.softmax(logits(params, batch["image"][..., None] / 16))
    return {"digit": scores.argmax(-1), "probability": scores.max(-1)}


if __name__ == "__main__":
    backstay.serve(predict, example={"image": np.zeros((8, 8), np.float32)}, batch=64, name="digits")
