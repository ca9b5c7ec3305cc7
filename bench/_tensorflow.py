"""A parameter server of TensorFlow and its workers, which bench/wire.py measures beside ours.

The programs run in a separate environment that has TensorFlow (`bench/wire.py --tensorflow PYTHON`), and import
nothing of this project. They use between-graph replication: the variables and their updates are on the server, and
each worker has a session. With two workers, `SyncReplicasOptimizer` applies the mean of both gradients.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

RATE = 1e-3


def step_of(tf: Any, rank: int, workers: int, arrays: int, elements: int) -> tuple[Any, Any]:
    """Returns one push, update and pull of `arrays` float32 arrays, as an operation, and the hook of its session."""
    here, there = f"/job:worker/task:{rank}", "/job:ps/task:0"
    with tf.device(there):
        shape = (elements,)
        params = [
            tf.compat.v1.get_variable(f"w{i}", shape, initializer=tf.compat.v1.zeros_initializer())
            for i in range(arrays)
        ]
        tf.compat.v1.train.get_or_create_global_step()
    with tf.device(here):
        gradients = [
            tf.compat.v1.get_local_variable(f"g{i}", shape, initializer=tf.compat.v1.constant_initializer(RATE))
            for i in range(arrays)
        ]
    optimizer = tf.compat.v1.train.GradientDescentOptimizer(RATE)
    hooks = []
    if workers > 1:
        optimizer = tf.compat.v1.train.SyncReplicasOptimizer(optimizer, workers, total_num_replicas=workers)
        hooks.append(optimizer.make_session_run_hook(rank == 0))
    with tf.device(there):
        pairs = [(gradient.read_value(), param) for gradient, param in zip(gradients, params, strict=True)]
        applied = optimizer.apply_gradients(pairs, global_step=tf.compat.v1.train.get_global_step())
    with tf.control_dependencies([applied]):
        with tf.device(there):
            new = [param.read_value() for param in params]
        with tf.device(here):
            received = tf.group(*map(tf.identity, new))
    return received, hooks


def main() -> None:
    """Run the server, or a worker that makes the steps that its standard input requests."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--role", choices=("ps", "worker"))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--cluster", type=json.loads, help="the addresses of each job")
    parser.add_argument("--arrays", type=int)
    parser.add_argument("--elements", type=int)
    arguments = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.compat.v1.disable_eager_execution()
    server = tf.compat.v1.train.Server(arguments.cluster, arguments.role, arguments.rank)
    if arguments.role == "ps":
        server.join()
    workers = len(arguments.cluster["worker"])
    step, hooks = step_of(tf, arguments.rank, workers, arguments.arrays, arguments.elements)
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True  # it removes a pull whose result is not used
    monitored = tf.compat.v1.train.MonitoredTrainingSession
    with monitored(server.target, arguments.rank == 0, hooks=hooks, config=config) as session:
        session.run(step)
        print(json.dumps({"ready": tf.__version__}), flush=True)
        for line in sys.stdin:
            seconds = []
            for _ in range(json.loads(line)["steps"]):
                begin = time.perf_counter()
                session.run(step)
                seconds.append(time.perf_counter() - begin)
            print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
