"""The time of an empty step, and of models with many small arrays.

An empty step has a few parameters, 1 server and 1 worker, so its time is the time of the runtime itself. For a model of
a thousand small arrays, the benchmark measures the time until the first update, and of each later update. It measures
plain JAX in the same run.

Then it measures whole jobs on the embedded cluster. They have two servers with standbys, 1 MB of parameters, and a
computation of 0.2 s that needs no processor. The table has the rest of a step by part, and the processor time by role.
The gradient needs the processor for a millisecond besides the 0.2 s. So a row has the same gradients in as many
processes at the same time, without Backstay.

    python bench/step.py [--steps 2000] [--leaves 1000] [--job-steps 150]
    python bench/step.py --only jobs [--workers 4 16]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from _cluster import SCRIPTS, BenchCluster, BenchJob, cluster
from _common import BenchProcess, BenchServer, BenchWorker, commands, float_tree, median, processes, reply, table

MANY_STEPS = 20
ROLES = ("server", "worker", "plain", "local", "parts", "gradient")


def server() -> None:
    import optax

    one = BenchServer(float_tree(3, 10), optax.sgd(1e-3), 1)
    reply(port=one.server.port)
    for _ in commands():
        pass


def worker() -> None:
    import optax

    for command in commands():
        one = BenchWorker(float_tree(3, 10), optax.sgd(1e-3), command["port"], 0)
        one.seconds(200)
        reply(seconds=one.seconds(command["steps"]))


def chain(params: Any, batch: Any) -> Any:
    """Returns a loss that uses its leaves one after another, like layers that are not stacked."""
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
    """Measures a training step of one jitted function in JAX alone."""
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

    from backstay._single._reference import train_local

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
    from backstay._transport._tensors._buffers import Arrangement, ParamBuffers
    from backstay._update import Objective
    from backstay._update._engine import ShardEngine
    from backstay._update._partition import partition
    from backstay._update._rules import analyse
    from backstay._update._tree import describe

    params, batch = float_tree(leaves, 64), np.ones((4, 8), np.float32)
    began = time.perf_counter()
    tree = describe(params)
    rule = analyse(optax.adam(1e-3), tree)
    layout = partition(tree, rule, 1)
    engine = ShardEngine(layout, 0, rule, params)
    engine.compile([1])
    arrangement = Arrangement(layout)
    buffers = ParamBuffers.of(arrangement)
    gradient_of = GradientFn(Objective(chain, tree), pack=arrangement)

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
            running.append(process := BenchProcess("step.py", role, "--leaves", str(leaves)))
            received = process.receive()
        rows.append((name, f"{received['first']:.1f}", f"{received['step'] * 1e3:.2f}"))
    print("\n" + table(rows))


def empty(steps: int) -> None:
    """The table of the empty step."""
    with processes() as running:
        running.append(server_process := BenchProcess("step.py", "server"))
        running.append(worker_process := BenchProcess("step.py", "worker"))
        seconds = sorted(worker_process.ask(port=server_process.receive()["port"], steps=steps)["seconds"])
    quantiles = [seconds[int(q * (len(seconds) - 1))] * 1e3 for q in (0.5, 0.9, 0.99)]
    rows: list[tuple[str, ...]] = [("empty step", "median ms", "90 %", "99 %", "goal")]
    rows.append(("1 server, 1 worker", *(f"{q:.2f}" for q in quantiles), "0.5 ms"))
    print(table(rows))


COMPUTE = 0.2
"""Seconds that a gradient of a job takes."""

SIZE = 250_000
"""Elements of a parameter of a job."""


def processor_seconds(job: BenchJob) -> dict[str, float]:
    """Returns the processor time of all processes of a job's pods, in seconds by role."""
    found = dict.fromkeys(("worker", "ps", "standby"), 0.0)
    active = {f"ps-{slot.rpartition('-')[2]}-{n}" for slot, n in (job.status.get("active") or {}).items()}
    for pod, pid in job.processes().items():
        try:
            times = psutil.Process(pid).cpu_times()
        except psutil.NoSuchProcess:  # it has ended since the list was made
            continue
        role = "worker" if "-worker-" in pod else "ps" if any(f"-{one}-" in pod for one in active) else "standby"
        found[role] += times.user + times.system
    return found


def gradient() -> None:
    """Computes the gradient of a job's worker without Backstay, once for each command."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(STEPS="100", WORLD="1", COMPUTE=str(COMPUTE), SIZE=str(SIZE), TIMELINE=folder)
        sys.path.insert(0, str(SCRIPTS))
        import jax
        import numpy as np
        import witness

        function = jax.jit(jax.value_and_grad(witness.loss))
        params = jax.tree_util.tree_map(np.asarray, witness.init(jax.random.key(0)))
        batch = (np.ones((8, witness.WIDTH), np.float32),) * 2 + (np.zeros((8, 2), np.int32),)
        jax.block_until_ready(function(params, batch))
        reply()
        for _ in commands():
            jax.block_until_ready(function(params, batch))
            used = time.process_time()
            reply(processor=used)


def alone(workers: int, steps: int) -> tuple[str, ...]:
    """Returns the row of the gradients without Backstay."""
    with processes() as running:
        running += [BenchProcess("step.py", "gradient") for _ in range(workers)]
        for each in running:
            each.receive()
        seconds, used = [], []
        for _ in range(steps):
            began = time.perf_counter()
            for each in running:
                each.send()
            used.append(sum(each.receive()["processor"] for each in running))
            seconds.append(time.perf_counter() - began)
    step, processor = sum(seconds) / steps, (used[-1] - used[0]) / (steps - 1)
    numbers = [f"{1e3 * value:.1f}" for value in (step, step - COMPUTE)]
    return (f"{workers} gradients, no Backstay", *numbers, *"----", f"{1e3 * processor:.1f}", *"--")


async def one_job(on: BenchCluster, workers: int, steps: int) -> tuple[str, ...]:
    """Returns the row of one job."""
    name = f"step-{workers}"
    shape: dict[str, Any] = {"workers": workers, "servers": 2, "standbys": 1, "pause": 0.0, "every_steps": 100_000}
    job = BenchJob(
        on, name, steps=steps + 20, env={"COMPUTE": str(COMPUTE), "SIZE": str(SIZE), "LOG_EVERY": "1"}, **shape
    )
    await job.submit()
    await job.wait("20 steps", lambda: any(update.step >= 20 for update in job.updates()), 300)
    before, began = processor_seconds(job), job.updates()[-1]
    await job.wait("the last steps", lambda: job.updates()[-1].step >= steps + 18, 300)
    after, ended = processor_seconds(job), job.updates()[-1]
    await job.wait_for_end(60)
    await asyncio.sleep(1.0)
    seconds = (await job.look())["workerSeconds"]
    await job.delete()
    count = ended.step - began.step
    step = (ended.at - began.at) / count
    parts = [seconds.get(part, 0.0) / workers / (steps + 20) for part in ("data", "send", "wait", "receive")]
    cost = [(after[role] - before[role]) / count for role in before]
    return (f"{workers} workers", *(f"{1e3 * value:.1f}" for value in (step, step - COMPUTE, *parts, *cost)))


async def jobs(sizes: Sequence[int], steps: int) -> None:
    """The table of whole jobs."""
    rows: list[tuple[str, ...]] = [
        ("2 servers, standbys, 1 MB", "step ms", "beside computation", "data", "send", "wait", "receive")
    ]
    rows[0] += ("processor: workers", "servers", "standbys")
    async with cluster() as on:
        for workers in sizes:
            rows += [await one_job(on, workers, steps), await asyncio.to_thread(alone, workers, steps)]
    print("\n" + table(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--leaves", type=int, default=1000)
    parser.add_argument("--job-steps", type=int, default=150)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--only", choices=("empty", "leaves", "jobs"))
    parser.add_argument("--role", choices=ROLES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "server":
        return server()
    if arguments.role == "worker":
        return worker()
    if arguments.role == "gradient":
        return gradient()
    for role in (plain, local, parts):
        if arguments.role == role.__name__:
            return role(arguments.leaves)
    if arguments.only in (None, "empty"):
        empty(arguments.steps)
    if arguments.only in (None, "leaves"):
        many_leaves(arguments.leaves)
    if arguments.only in (None, "jobs"):
        asyncio.run(jobs(arguments.workers, arguments.job_steps))
    return None


if __name__ == "__main__":
    sys.exit(main())
