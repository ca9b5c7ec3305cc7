"""The model of bench/serve.py. Its servers have the arguments folder, port, largest batch and width."""

import sys

import jax.numpy as jnp


def predict(params, state, x):
    for w in params["layers"]:
        x = jnp.tanh(x @ w)
    return {"y": x[:, :8], "value": jnp.broadcast_to(params["value"], (len(x), 1))}


def arguments():
    folder, port, batch, width = sys.argv[1:]
    return folder, int(port), int(batch), int(width)
