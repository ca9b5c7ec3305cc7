"""The environment of a server and the end of its records, for tests that make parts of one in this process."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

from between import LONG

from backstay._checkpoint import Records
from backstay._process import Stop
from backstay._process._environment import Environment
from backstay._report import PodMetrics, ServerReports
from backstay._roles import Server, ServerContext
from backstay._roles._standby import Inherited
from backstay._script import Script
from backstay_rpc.credentials import Credentials
from backstay_spec.runtime import RuntimeConfig

__all__ = ["flush", "server_environment", "server_of"]


def server_environment(**changes: Any) -> Environment:
    """Returns the environment of shard 0's server in a job without checkpoints; `changes` are other values of its
    fields."""
    usual = Environment(
        job="j",
        role="parameter-server",
        index=0,
        incarnation=1,
        servers=("127.0.0.1:1",),
        port=1,
        data_port=2,
        metrics_port=3,
        bind="127.0.0.1",
        pod_name="s",
        pod_ip="127.0.0.1",
        credentials=Credentials("00"),
        config=RuntimeConfig(shards=1, workers=1),
        checkpoint_uri=None,
        termination_log=None,
        uid="12345678-abcd",
    )
    return replace(usual, **changes)


def server_of(
    environment: Environment, script: Script, stop: Stop, metrics: PodMetrics, inherited: Inherited | None = None
) -> Server:
    """Returns a server as in a pod, without an HTTP port."""
    context = ServerContext.of(environment, script, script.plan(environment.config.shards), stop, inherited)
    return Server(context, ServerReports(context, metrics), inherited)


def flush(records: Records) -> None:
    """Wait until everything that was put so far is written."""
    done = threading.Event()
    records._queue.put(("", lambda folder: done.set()), timeout=LONG)
    assert done.wait(LONG)
