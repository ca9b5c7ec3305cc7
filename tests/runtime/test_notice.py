"""A worker drops its current gradient and leaves after a notice of preemption, also in the middle of a step."""

from __future__ import annotations

import signal

import numpy as np

from .operator_calls import progress


def test_a_worker_that_receives_sigterm_leaves_in_the_middle_of_a_step(job) -> None:
    """O4, T4, T8: it exits with 143 long before its batch exists. The server drops it, and its successor continues."""
    tiny = job(1, 1)
    tiny.environment = {"X64": "1"}
    server, first = tiny.server(0), tiny.worker(0, HOLD_AT="3")
    tiny.wait_for(first, "step 3/8")
    first.process.send_signal(signal.SIGTERM)
    assert first.may_end_with(143).wait() == 143
    reply = progress(tiny, world=1, stall_seconds=60)
    assert (dict(reply.beating), list(reply.stalled)) == ({}, [])
    second = tiny.worker(0, 1)
    assert [server.wait(), second.wait()] == [0, 0]
    expected = tiny.reference()
    for name, value in tiny.params(second).items():
        if name.isdigit():
            np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12)
