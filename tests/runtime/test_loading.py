"""A server computes its own part of a large model only, and compiles the updates of a term before it begins."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Primitive

from backstay._process import Stop
from backstay._roles._server._context import ServerContext
from backstay._roles._server._loading import build
from backstay._script import Script
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


def test_t4_a_server_computes_only_the_leaves_of_which_it_holds_a_part() -> None:
    """A model may be larger than the memory of a server. All servers together have the model of one process."""
    computed: list[int] = []
    counted = Primitive("counted")  # it has no compiled form, so its implementation runs
    counted.def_impl(lambda value, number: computed.append(number) or value)
    counted.def_abstract_eval(lambda value, number: value)

    def init(key):
        keys = jax.random.split(key, 6)
        return [counted.bind(jax.random.normal(one, (700, 400)) / 7, number=n) for n, one in enumerate(keys)]

    script = Script(
        init=init,
        loss=lambda params, batch: sum(jnp.sum(leaf) for leaf in params),
        batches=lambda key: np.zeros(1),
        optimizer=optax.adam(1e-2),
        steps=9,
    )
    config = RuntimeConfig(shards=3, workers=1)
    plan = script.plan(3)
    found = [np.zeros((700, 400), np.float32) for _ in range(6)]
    for shard in range(3):
        computed.clear()
        environment = server_environment(index=shard, config=config)
        engine = build(Rollback(term=1, world=1), ServerContext.of(environment, script, plan, Stop()))
        held = {piece.leaf for block in engine.blocks for piece in block.pieces}
        assert set(computed) == held < set(range(6))
        for index, block in enumerate(engine.blocks):
            values = np.asarray(engine.block(index))
            for piece in block.pieces:
                found[piece.leaf].reshape(-1)[piece.start : piece.stop] = values[piece.offset :][: piece.size]
    for leaf, wanted in zip(found, init(jax.random.key(0)), strict=True):
        np.testing.assert_array_equal(leaf, wanted)
