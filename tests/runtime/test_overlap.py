"""T3, T5: an Async worker computes its next contribution while the previous one is in flight."""

from __future__ import annotations

import re
import signal
import urllib.request
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from between import LONG

import backstay
from backstay._roles._next_contribution import NextContribution
from backstay._script import Script
from backstay._transport import Pulled
from backstay.errors import ConfigurationError
from backstay_spec.runtime import RuntimeConfig

KEY = backstay.BatchKey(step=3, rank=0, world=2, seed=0, offset=0)


def contribution(key: backstay.BatchKey) -> Any:
    return SimpleNamespace(key=key)


def test_t3_only_the_contribution_that_is_due_is_used() -> None:
    """The batch of another step, world or term may belong to another rank, or was used."""
    at = Pulled(term=1, version=7, world=2)
    others = [
        (1, backstay.BatchKey(step=2, rank=0, world=2, seed=0, offset=0)),
        (1, backstay.BatchKey(step=3, rank=0, world=3, seed=0, offset=0)),
        (1, backstay.BatchKey(step=3, rank=0, world=2, seed=0, offset=5)),
        (2, KEY),
    ]
    for term, due in others:
        ahead = NextContribution()
        ahead.keep(1, contribution(KEY), at)
        assert ahead.take(term, due) is None
        assert ahead.take(1, KEY) is None, "it was dropped"
    ahead = NextContribution()
    ahead.keep(1, found := contribution(KEY), at)
    assert ahead.take(1, KEY) == (found, at), "T5: the staleness counts from the version of `at`"
    assert ahead.take(1, KEY) is None, "each once"


def test_local_steps_have_their_own_overlap() -> None:
    import optax

    script = Script(
        init=lambda key: {},
        loss=lambda params, batch: 0.0,
        batches=lambda key: None,
        optimizer=optax.sgd(1.0),
        steps=1,
        local=backstay.LocalSteps(count=2, optimizer=optax.sgd(1.0)),
    )
    with pytest.raises(ConfigurationError, match=r"spec\.update\.overlap is true"):
        script.overlaps(RuntimeConfig(shards=1, workers=1, mode="Async", overlap=True))
    assert not script.overlaps(RuntimeConfig(shards=1, workers=1, mode="Async"))


def test_t3_each_batch_counts_once_although_a_worker_dies(job) -> None:
    """Each parameter is the number of times that its sample was used."""
    tiny = job(1, 2, mode="Async", overlap=True)
    tiny.environment = {"STEPS": "20", "SAMPLES": "200", "HOLD_AT": "6"}
    tiny.start_all()
    tiny.wait_for(tiny.pods[0], "step 10/20")  # both wait for their next batch but one
    tiny.pods[1].process.send_signal(signal.SIGKILL)
    tiny.pods[1].wait()
    tiny.let(13)  # neither rank alone can make the other updates
    tiny.worker(0, 1)
    tiny.wait_for(tiny.pods[0], "step 20/20")
    tiny.let()
    assert [pod.wait() for pod in (tiny.pods[0], *tiny.pods[2:])] == [0, 0, 0]
    used = tiny.params(tiny.pods[2])["0"]
    assert used.sum() == 2 * 20
    assert used.max() == 1


def test_no_batch_is_drawn_after_the_last_contribution(job) -> None:
    """Data may end there."""
    tiny = job(1, 1, mode="Async", overlap=True)
    tiny.environment = {"RAISE_AT": "8", "STEPS": "8"}
    tiny.start_all()
    assert [pod.wait() for pod in tiny.pods] == [0, 0]


def test_t5_a_contribution_that_was_computed_early_is_one_version_older(job) -> None:
    """Without any staleness allowed, each of them is refused and computed again, as in one process."""
    tiny = job(1, 1, mode="Async", overlap=True, max_staleness=0)
    # The thread that prepares batches must not wait for a held one before step 4.
    tiny.environment = {"X64": "1", "HOLD_AT": "8"}
    tiny.start_all()
    tiny.wait_for(tiny.pods[0], "step 4/8")
    with urllib.request.urlopen(f"http://{tiny.pods[0].metrics}/metrics", timeout=LONG) as reply:
        counts = re.findall(r'contributions_total\{.*outcome="stale".*\} (\S+)', reply.read().decode())
    assert [float(count) >= 3 for count in counts] == [True]
    tiny.let()
    assert [pod.wait() for pod in tiny.pods] == [0, 0]
    wanted = tiny.reference()
    for name, leaf in tiny.params(tiny.pods[1]).items():
        np.testing.assert_allclose(leaf, wanted[name], rtol=1e-9)
