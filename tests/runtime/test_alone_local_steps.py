"""Local steps in one process, against a plain DiLoCo loop in float64 (T4), and as a `Computation`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import backstay
from backstay import BatchKey, LocalSteps
from backstay._compute import Start
from backstay._script import Script
from backstay._single._loop import train_alone
from backstay._transport import Arrangement
from backstay._update import ALL, Selection, Wire, analyse, describe, enable_x64, partition
from backstay.errors import ConfigurationError, JobFailed
from backstay.testing import train_local

OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
INNER = optax.adamw(3e-2)


def init(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {"w": jax.random.normal(first, (5, 6)), "out": jax.random.normal(second, (6, 3))}, {"mean": jnp.zeros(6)}


def loss(params: Any, state: Any, batch: Any, key: Any) -> Any:
    x, y = batch
    hidden = jnp.tanh(x @ params["w"] - state["mean"])
    kept = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden, 0)
    error = jnp.mean((kept @ params["out"] - y) ** 2)
    return error, {"mean": 0.9 * state["mean"] + 0.1 * jnp.mean(hidden, 0)}, {"twice": 2 * error}


def batches(key: BatchKey) -> Any:
    x = key.rng.normal(size=(8, 5))
    return x, np.sin(x[:, :3])


def script(**changes: Any) -> Script:
    settings: dict[str, Any] = {
        "init": init,
        "loss": loss,
        "batches": batches,
        "optimizer": OUTER,
        "steps": 5,
        "has_state": True,
        "has_rng": True,
        "seed": 3,
        "local": LocalSteps(4, INNER),
    }
    return Script(**settings | changes)


def diloco(
    steps: int,
    world: int,
    count: int,
    inner_state: str,
    seed: int = 3,
    *,
    overlap: int = 0,
    mixing: float = 0.0,
    turns: tuple[tuple[str, ...], ...] = (("w", "out"),),
) -> tuple[Any, list[float]]:
    """Streaming DiLoCo, written out with nothing of Backstay but the batches and the definition of a key.

    Args:
        count: steps between two updates.
        turns: the names of the parameters of each fragment.
    """
    params, state = init(jax.random.key(seed))
    held = [OUTER.init({name: params[name] for name in names}) for names in turns]
    inner = [INNER.init(params) for _ in range(world)]

    def split(*arguments: Any) -> Any:
        value, *rest = loss(*arguments)
        return value, rest

    gradient = jax.jit(jax.value_and_grad(split, has_aux=True))
    update = jax.jit(INNER.update)
    seen: dict[int, list[float]] = {version: [] for version in range(steps)}
    own: list[Any] = [None] * world

    def train(rank: int, version: int, numbers: range) -> None:
        if inner_state == "reset" and numbers.start == 0:
            inner[rank] = INNER.init(own[rank][0])
        for step in [version * count + number for number in numbers]:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), step), rank)
            mine, mine_state = own[rank]
            batch = batches(BatchKey(step, rank, world, seed))
            (value, (mine_state, _)), gradients = gradient(mine, mine_state, batch, key)
            updates, inner[rank] = update(gradients, inner[rank], mine)
            own[rank] = optax.apply_updates(mine, updates), mine_state
            seen[version].append(float(value))

    for version in range(steps):
        differences, states = [], []
        for rank in range(world):
            late = overlap if version else 0
            share = mixing if late else 0.0
            mine, mine_state = own[rank] or (params, state)
            arrived = turns[(version - 1) % len(turns)] if version else ()
            for name in arrived:
                mine = mine | {name: share * mine[name] + (1 - share) * params[name]}
            mine_state = jax.tree.map(lambda a, b: share * a + (1 - share) * b, mine_state, state)  # noqa: B023
            own[rank] = mine, mine_state
            train(rank, version, range(late, count))
            names = turns[version % len(turns)]
            differences.append({name: params[name] - own[rank][0][name] for name in names})
            states.append(own[rank][1])
            if version + 1 < steps:
                train(rank, version + 1, range(overlap))
        mean = jax.tree.map(lambda *each: sum(each) / world, *differences)
        state = jax.tree.map(lambda *each: sum(each) / world, *states)
        turn = version % len(turns)
        old = {name: params[name] for name in turns[turn]}
        updates, held[turn] = OUTER.update(mean, held[turn], old)
        params = params | optax.apply_updates(old, updates)
    return (params, state), [float(np.mean(each)) for each in seen.values()]


def same(got: Any, want: Any, rtol: float = 1e-9) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol)


@pytest.mark.parametrize(("inner_state", "overlap"), [("reset", 0), ("keep", 2)])
def test_t4_one_process_is_a_plain_diloco_loop(inner_state: str, overlap: int) -> None:
    seen = []
    with enable_x64():
        one = script(local=LocalSteps(4, INNER, inner_state=inner_state, overlap=overlap))  # type: ignore[arg-type]
        got = train_alone(one, on_update=lambda r: bool(seen.append((r.loss, r.metrics["twice"], r.examples))))
        want, losses = diloco(5, 1, 4, inner_state, overlap=overlap, mixing=0.5)
    same((got.params, got.state), want)
    np.testing.assert_allclose([each[0] for each in seen], losses, rtol=1e-9)
    np.testing.assert_allclose([each[1] for each in seen], np.multiply(losses, 2), rtol=1e-9)
    assert [each[2] for each in seen] == [32] * 5


@pytest.mark.parametrize(
    ("world", "inner_state", "overlap", "mixing"),
    [(4, "keep", 0, 0.5), (2, "reset", 3, 0.25)],
)
def test_t4_the_reference_of_jobs_is_a_plain_diloco_loop(
    world: int, inner_state: str, overlap: int, mixing: float
) -> None:
    options: dict[str, Any] = {"inner_state": inner_state, "overlap": overlap, "mixing": mixing}
    local = LocalSteps(3, INNER, **options)
    with enable_x64():
        got = train_local(init, loss, batches, OUTER, 5, has_state=True, has_rng=True, seed=3, world=world, local=local)
        want, _ = diloco(5, world, 3, inner_state, overlap=overlap, mixing=mixing)
    same((got.params, got.state), want)


@pytest.mark.parametrize(("world", "overlap"), [(1, 0), (3, 2)])
def test_t4_fragments_in_turn_are_a_plain_streaming_diloco_loop(world: int, overlap: int) -> None:
    """An update changes one fragment; the larger layer is the first one."""
    local = LocalSteps(6, INNER, fragments=2, overlap=overlap)
    with enable_x64():
        want, losses = diloco(5, world, 3, "keep", overlap=overlap, mixing=0.5, turns=(("w",), ("out",)))
        got = train_local(init, loss, batches, OUTER, 5, has_state=True, has_rng=True, seed=3, world=world, local=local)
        same((got.params, got.state), want)
        if world == 1:
            seen: list[float] = []
            alone = train_alone(script(local=local), on_update=lambda r: bool(seen.append(r.loss)))
            same((alone.params, alone.state), want)
            np.testing.assert_allclose(seen, losses, rtol=1e-9)


def test_one_local_step_with_sgd_and_an_outer_rate_of_one_is_sgd() -> None:
    with enable_x64():
        got = train_alone(script(optimizer=optax.sgd(1.0), local=LocalSteps(1, optax.sgd(0.1))))
        want = train_alone(script(optimizer=optax.sgd(0.1), local=None))
    same((got.params, got.state), (want.params, want.state))


def test_train_takes_local_steps_and_has_an_outer_optimizer(capsys: pytest.CaptureFixture[str]) -> None:
    arguments: dict[str, Any] = {
        "init": init,
        "loss": loss,
        "batches": batches,
        "steps": 3,
        "has_state": True,
        "has_rng": True,
        "local": LocalSteps(4, INNER),
        "log_every": 0,
    }
    got = backstay.train(**arguments)
    first, few, *shown = [line.split(" ", 1)[1].split("  loss")[0] for line in capsys.readouterr().err.splitlines()]
    assert first.startswith("outer optimizer: backstay.outer_optimizer(fragments=1): SGD with learning rate 0.7")
    assert few.startswith("fewer than 24 local steps can cost quality, and these are 4")
    assert shown == ["step 1/3  local step 4", "step 2/3  local step 8", "step 3/3  local step 12"]
    same(got.params, train_alone(script(steps=3, seed=0, optimizer=backstay.outer_optimizer())).params, rtol=1e-6)
    with pytest.raises(ConfigurationError, match="optimizer is NoneType"):
        backstay.train(**arguments | {"local": None})


@pytest.mark.parametrize("fragments", [1, 3])
def test_the_momentum_of_the_default_grows_in_the_updates_of_the_whole_model(fragments: int) -> None:
    """Against Nesterov momentum that is written out: `mu` is 0.9 * min(1, n / warmup) in update n of a fragment."""
    warmup, ones = 4, jnp.ones(2)
    optimizer = backstay.outer_optimizer(warmup=warmup, fragments=fragments)
    state, velocity = optimizer.init(ones), 0.0
    for update in range(10 * fragments):
        momentum = 0.9 * min(1.0, update / (warmup * fragments))
        velocity = 1.0 + momentum * velocity
        step, state = optimizer.update(ones, state)
        np.testing.assert_allclose(step, -0.7 * (1.0 + momentum * velocity) * ones, rtol=1e-6)
    with pytest.raises(ConfigurationError, match="warmup is -1"):
        backstay.outer_optimizer(warmup=-1)


def bad_at(steps: set[int]) -> Any:
    def make(key: BatchKey) -> Any:
        x, y = batches(key)
        return np.where(key.step in steps, np.nan, x), y

    return make


def test_a_contribution_with_a_step_that_is_not_finite_leaves_no_trace() -> None:
    """Neither in the parameters nor in the state of the inner optimizer."""
    seen = []
    with enable_x64():
        got = train_alone(script(batches=bad_at({5}), steps=3), on_update=lambda r: bool(seen.append(r.applied)))

        def moved(key: BatchKey) -> Any:  # as if the second update were not there
            x, y = batches(BatchKey(key.step + 4 * (key.step >= 4), key.rank, key.world, key.seed))
            return x, y

        assert seen == [True, False, True]
        want = train_alone(script(batches=moved, steps=2, has_rng=False, loss=lambda p, s, b: loss(p, s, b, KEY)))
        got = train_alone(script(batches=bad_at({5}), steps=3, has_rng=False, loss=lambda p, s, b: loss(p, s, b, KEY)))
    same((got.params, got.state), (want.params, want.state))
    with pytest.raises(JobFailed, match="3 updates in a row"):
        train_alone(script(batches=bad_at({5, 8, 15}), steps=4))


KEY = jax.random.key(0)


def test_error_feedback_is_on_for_codecs_of_local_steps() -> None:
    def wide(key: Any) -> Any:
        return {"w": jax.random.normal(key, (8, 700))}

    def error(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ params["w"]) - 1) ** 2)

    settings = {"init": wide, "loss": error, "batches": lambda key: key.rng.normal(size=(4, 8)), "has_state": False}
    with enable_x64():
        found = {}
        for feedback in (None, True, False):
            one = script(**settings, has_rng=False, wire=Wire("Int4", error_feedback=feedback))
            found[feedback] = np.asarray(train_alone(one).params["w"])
        want = train_local(wide, error, one.batches, OUTER, 5, seed=3, wire=Wire("Int4"), local=LocalSteps(4, INNER))
    assert (found[None] == found[True]).all()
    assert (found[None] != found[False]).any()
    same(want.params["w"], found[None], rtol=1e-11)


@pytest.mark.parametrize("inner_state", ["keep", "reset"])
def test_contributions_of_a_worker(inner_state: str) -> None:
    """With `reset`, earlier contributions of a worker do not count. Every step has its own batch."""
    model = init(jax.random.key(0))
    tree = describe(model, has_state=True)
    arrangement = Arrangement(partition(tree, analyse(OUTER, tree), 2))
    one = script(local=LocalSteps(4, INNER, inner_state=inner_state))  # type: ignore[arg-type]
    keys: list[BatchKey] = []

    def batch_of(key: BatchKey) -> Any:
        keys.append(key)
        return batches(key)

    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    key = BatchKey(step=2, rank=1, world=2, seed=7, offset=5)
    old, fresh = (one.computation(one.objective(), arrangement, batch_of) for _ in range(2))
    assert (old.batches, one.batches_of_update) == (4, 4)
    old.compile(batches(key))
    old.start(Start(leaves, BatchKey(step=1, rank=1, world=2, seed=7, offset=5))).wait()
    made = []
    for computation in (old, fresh):
        keys.clear()
        contribution = computation.start(Start(leaves, key))
        contribution.wait()
        assert [each.step for each in keys] == [8, 9, 10, 11]
        assert [each.number for each in keys] == [5 + (2 * 2 + 1) * 4 + i for i in range(4)]
        assert {(each.rank, each.world, each.seed, each.offset) for each in keys} == {(1, 2, 7, 5)}
        assert contribution.key == key
        summary = contribution.summary
        assert (summary.finite, summary.examples, set(summary.metrics)) == (True, 32, {"twice"})
        made.append(np.concatenate([block for blocks in contribution.blocks for block in blocks]))
    assert np.array_equal(*made) == (inner_state == "reset")


def test_steps_for_a_contribution_that_is_not_due_are_dropped() -> None:
    """T9: after a change of the world, their batches belong to others. The worker begins with the servers' values."""
    model = init(jax.random.key(0))
    tree = describe(model, has_state=True)
    arrangement = Arrangement(partition(tree, analyse(OUTER, tree), 1))
    first, second = ([np.asarray(leaf) + shift for leaf in jax.tree.leaves(model)] for shift in (0.0, 0.5))

    def made(overlap: int, key: BatchKey, received: Selection | None) -> Any:
        one = script(local=LocalSteps(4, INNER, inner_state="reset", overlap=overlap))
        computation = one.computation(one.objective(), arrangement, batches)
        computation.start(Start(first, BatchKey(0, 0, 2, 3))).wait()
        contribution = computation.start(Start(second, key, received))
        return np.concatenate([block for blocks in contribution.blocks for block in blocks])

    all_of_it = ALL
    for key in (BatchKey(1, 0, 1, 3, offset=4), BatchKey(2, 0, 2, 3)):
        assert np.array_equal(made(2, key, all_of_it), made(0, key, None))
    due = BatchKey(1, 0, 2, 3)
    assert not np.array_equal(made(2, due, all_of_it), made(0, due, None))
    assert np.array_equal(made(2, due, None), made(0, due, None)), "the parameters were requested anew"


@pytest.mark.parametrize("overlap", [0, 2, 4])
def test_a_worker_requests_each_batch_once_and_in_order(overlap: int) -> None:
    """This includes the key that it requests before a contribution, because a stream of data cannot go back."""
    model = init(jax.random.key(0))
    tree = describe(model, has_state=True)
    arrangement = Arrangement(partition(tree, analyse(OUTER, tree), 1))
    one = script(local=LocalSteps(4, INNER, overlap=overlap))
    requested: list[int] = []

    def batch_of(key: BatchKey) -> Any:
        if requested[-1:] != [key.step]:  # as the worker, which keeps the batch that it requested before
            requested.append(key.step)
        return batches(key)

    computation = one.computation(one.objective(), arrangement, batch_of)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(model)]
    for step in range(one.steps):
        start = Start(leaves, BatchKey(step, 0, 2, 3), ALL if step else None)
        first = computation.first_batch(start)
        assert (first is None) == (overlap == 4 and step > 0)
        if first is not None:
            batch_of(first)
        computation.start(start).wait()
    assert requested == list(range(one.steps * 4))
    other = Start(leaves, BatchKey(2, 0, 1, 3), ALL)
    assert computation.first_batch(other) == BatchKey(8, 0, 1, 3, batches=4), "steps that are dropped do not count"


def test_pods_must_agree_about_local_steps() -> None:
    def digest(local: LocalSteps | None) -> bytes:
        return script(local=local).plan(1).agreement.digest

    fresh = [optax.adamw(3e-2), optax.adamw(4e-2), optax.sgd(3e-2)]
    found = {digest(LocalSteps(4, optimizer)) for optimizer in fresh}
    found |= {digest(None), digest(LocalSteps(5, INNER)), digest(LocalSteps(4, INNER, inner_state="reset"))}
    found |= {digest(LocalSteps(4, INNER, overlap=2, mixing=share)) for share in (0.5, 0.25)}
    assert len(found) == 8
    assert digest(LocalSteps(4, INNER)) in found
    mine, theirs = (script(local=LocalSteps(count, INNER)).plan(1).agreement for count in (4, 8))
    why = mine.difference(theirs.leaves, theirs.settings, "worker 1", "server 0")
    assert "local.count is 8 in worker 1 and 4 in server 0" in why


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"count": 0}, "count is 0: must be a whole number of steps"),
        ({"count": True}, "count is True"),
        ({"count": 2.0}, r"count is 2\.0"),
        ({"optimizer": 0.1}, "optimizer is float: must be an optax"),
        ({"overlap": 3}, "overlap is 3: must be a whole number of steps from 0 to 2"),
        ({"overlap": True}, "overlap is True"),
        ({"fragments": 0}, "fragments is 0: must be a whole number of parts"),
        ({"fragments": 3}, "fragments is 3: must divide count, which is 2"),
        ({"mixing": 1.0}, r"mixing is 1\.0: must be a number of at least 0 and below 1"),
        ({"mixing": "0.5"}, r"mixing is '0\.5': must be a number"),
        ({"mixing": None}, "mixing is None: must be a number"),
        ({"inner_state": "drop"}, "inner_state is 'drop': must be 'keep' or 'reset'"),
    ],
)
def test_bad_arguments(arguments: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        LocalSteps(**{"count": 2, "optimizer": INNER, **arguments})
    with pytest.raises(ConfigurationError, match=r"local is int: must be backstay\.LocalSteps"):
        script(local=4)
