"""The time of an empty step, and of models with many small arrays.

An empty step has a few parameters, 1 server and 1 worker, so its time is the time of the runtime itself. For a model of
a thousand small arrays, the benchmark measures the time until the first update, and of each later update. It measures
plain JAX in the same run.

    python bench/step.py [--steps 2000] [--leaves 1000]
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

from _common import Process, Server, Worker, commands, float_tree, median, processes, reply, table

MANY_STEPS = 20
ROLES = ("server", "worker", "plain", "local", "parts")


def server() -> None:
    import optax

    one = Server(float_tree(3, 10), optax.sgd(1e-3), 1)
    reply(port=one.server.port)
    for _ in commands():
        pass


def worker() -> None:
    import optax

    for command in commands():
        one = Worker(float_tree(3, 10), optax.sgd(1e-3), command["port"], 0)
        one.seconds(200)
        reply(seconds=one.seconds(command["steps"]))


def chain(params: Any, batch: Any) -> Any:
    """A loss that uses its leaves one after another, like layers that are not stacked."""
    import jax.numpy as jnp

    for name in sorted(params):
        batch = jnp.tanh(batch @ params[name].reshape(8, 8))
    return jnp.mean((batch - 1.0) ** 2)


def timed(step: Callable[[], None], began: float) -> None:
    """Print the time from `began` to the end of the first step, and the median of the later steps."""
    step()
    first = time.perf_counter() - began
    times = []
    for _ in range(MANY_STEPS):
        at = time.perf_counter()
        step()
        times.append(time.perf_counter() - at)
    reply(first=first, step=median(times))


def plain(leaves: int) -> None:
    """A training step in JAX alone: one jitted function."""
    import jax
    import numpy as np
    import optax

    params = {name: jax.numpy.asarray(value) for name, value in float_tree(leaves, 64).items()}
    batch = np.ones((4, 8), np.float32)
    began = time.perf_counter()
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Any, state: Any) -> Any:
        gradient = jax.grad(chain)(params, batch)
        changes, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, changes), state

    def step() -> None:
        nonlocal params, state
        params, state = jax.block_until_ready(update(params, state))

    timed(step, began)


def local(leaves: int) -> None:
    """The same model with `train` in one process."""
    import numpy as np
    import optax

    from backstay._roles._local import train_local

    tree, batch = float_tree(leaves, 64), np.ones((4, 8), np.float32)
    times = [time.perf_counter()]
    train_local(
        lambda _: tree,
        chain,
        lambda _: batch,
        optax.adam(1e-3),
        MANY_STEPS + 1,
        on_update=lambda update: times.append(time.perf_counter()),
    )
    gaps = [after - before for before, after in itertools.pairwise(times)]
    reply(first=gaps[0], step=median(gaps[1:]))


def parts(leaves: int) -> None:
    """The work of a worker and of a server in a job, one after the other, without a network."""
    import numpy as np
    import optax

    from backstay._compute._gradient import GradientFn
    from backstay._update._engine import ShardEngine
    from backstay._update._partition import partition
    from backstay._update._rules import analyse
    from backstay._update._tree import describe
    from backstay._wire.buffers import Arrangement, ParamBuffers

    params, batch = float_tree(leaves, 64), np.ones((4, 8), np.float32)
    began = time.perf_counter()
    tree = describe(params)
    rule = analyse(optax.adam(1e-3), tree)
    layout = partition(tree, rule, 1)
    engine = ShardEngine(layout, 0, rule, params)
    engine.compile([1])
    arrangement = Arrangement(layout)
    buffers = ParamBuffers(arrangement)
    gradient_of = GradientFn(chain, tree, pack=arrangement.pack)

    def step() -> None:
        slot = buffers.take()
        for index, target in enumerate(slot.blocks[0]):
            target[:] = engine.block(index).view(np.uint8)
        gradient = gradient_of(tree.unflatten(slot.host()), batch)
        if not gradient.finite:
            raise RuntimeError("the gradient is not finite")
        engine.apply(arrangement.gradient_blocks(gradient.leaves))
        for index in range(len(engine.blocks)):
            engine.ready(index)

    timed(step, began)


def many_leaves(leaves: int) -> None:
    rows = [(f"{leaves} arrays of 64 elements, adam", "first update, s", "step, ms")]
    named = {"plain": "plain JAX", "local": "train, one process", "parts": "worker + server, no wire"}
    for role, name in named.items():  # one at a time, each in a process that has compiled nothing
        with processes() as running:
            running.append(process := Process("step.py", role, "--leaves", str(leaves)))
            told = process.receive()
        rows.append((name, f"{told['first']:.1f}", f"{told['step'] * 1e3:.2f}"))
    print("\n" + table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server()
    if arguments.role == "worker":
        return worker()
    for role in (plain, local, parts):
        if arguments.role == role.__name__:
            return role(arguments.leaves)
    with processes() as running:
        running.append(server_process := Process("step.py", "server"))
        running.append(worker_process := Process("step.py", "worker"))
        seconds = sorted(worker_process.ask(port=server_process.receive()["port"], steps=arguments.steps)["seconds"])
    quantiles = [seconds[int(q * (len(seconds) - 1))] * 1e3 for q in (0.5, 0.9, 0.99)]
    rows = [("empty step", "median ms", "90 %", "99 %", "goal")]
    rows.append(("1 server, 1 worker", *(f"{q:.2f}" for q in quantiles), "1 ms"))
    print(table(rows))
    many_leaves(arguments.leaves)
    return None


if __name__ == "__main__":
    sys.exit(main())
