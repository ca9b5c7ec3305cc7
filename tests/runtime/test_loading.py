"""A server compiles the updates of a term before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from backstay._process import Stop
from backstay._roles._script import Script
from backstay._roles._server._context import ServerContext
from backstay._roles._server._loading import build
from backstay_rpc.control_pb2 import Rollback
from backstay_spec.runtime import RuntimeConfig

from .servers import server_environment


@contextmanager
def compiling() -> Iterator[list[str]]:
    """JAX's reports of what it compiles, as they come."""
    events: list[str] = []

    def listen(event: str, seconds: float, **notes: str | int) -> None:
        if event.endswith("/backend_compile_duration"):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("by", ["spec", "local steps"])
def test_an_update_that_damps_stale_contributions_is_compiled_before_training(by: str) -> None:
    script = Script(
        init=lambda key: {"w": jnp.zeros(40)},
        loss=lambda params, batch: jnp.sum(params["w"]),
        batches=lambda key: np.zeros(1),
        optimizer=optax.adam(1e-2),
        steps=9,
        damps=by == "local steps",
    )
    config = RuntimeConfig(shards=1, workers=2, mode="Async", staleness_damping=by == "spec")
    plan = script.plan(1)
    context = ServerContext.of(server_environment(config=config), script, plan, Stop())
    with compiling() as before:
        engine = build(Rollback(term=1, world=2), context)
    assert before
    with compiling() as during:
        for weight in (1.0, 0.5):
            engine.apply([[np.ones(40, np.float32)]], weights=[weight])
        engine.block(0)
    assert not during
