"""Frozen parameters reach `loss` and `evaluate`, and nothing else."""

from __future__ import annotations

import threading
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from between import LONG
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from backstay import BatchKey, LocalSteps, train
from backstay._compute import Base, _base
from backstay._compute._gradient import GradientFn
from backstay._compute._placement import Placement
from backstay._script import Script
from backstay._update import Objective, digest_of, enable_x64
from backstay._update._tree import arrays, describe
from backstay.errors import ConfigurationError, TreeError
from backstay.testing import train_local

STEPS, WORLD = 6, 2


def init(key):
    first, second = jax.random.split(key)
    return {
        "base": [jax.random.normal(first, (6, 6)), jnp.arange(6, dtype=jnp.int8), jnp.ones(6, jnp.bfloat16)],
        "adapter": {"a": jax.random.normal(second, (6, 2)), "b": jnp.zeros((2, 6))},
        "head": jnp.ones((6, 3)),
    }


def loss(params, batch):
    x, y = batch
    kernel, codes, scale = params["base"]
    hidden = jnp.tanh(x @ (kernel + params["adapter"]["a"] @ params["adapter"]["b"]) + codes * scale.astype(x.dtype))
    error = jnp.mean((hidden @ params["head"] - y) ** 2)
    return error, {"hidden": jnp.mean(hidden)}


def batches(key):
    return key.rng.normal(size=(8, 6)), key.rng.normal(size=(8, 3))


def plain(world=1, clip_norm=None, optimizer=None, mean=0.0):
    """Returns the result of a loop over what trains only, which an optax user would write."""
    params = jax.tree.map(jnp.asarray, init(jax.random.key(0)))
    base, trained = params.pop("base"), params
    chain = optimizer or optax.adam(1e-2)
    if clip_norm is not None:
        chain = optax.chain(optax.clip_by_global_norm(clip_norm), chain)
    held = chain.init(trained)
    gradient = jax.jit(jax.grad(lambda trained, x, y: loss({"base": base, **trained}, (x - mean, y))[0]))
    for step in range(STEPS):
        parts = [gradient(trained, *batches(BatchKey(step, rank, world, 0))) for rank in range(world)]
        averaged = jax.tree.map(lambda *each: sum(each) / world, *parts)
        updates, held = chain.update(averaged, held, trained)
        trained = optax.apply_updates(trained, updates)
    return {"base": base, **trained}


def is_base(name):
    return name.startswith("base.")


def assert_same(found, expected, rtol=1e-11):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), rtol=rtol, atol=1e-12)


@pytest.mark.parametrize(
    ("frozen", "clip_norm"),
    [(is_base, 0.05), ({"base": True, "adapter": {"a": False, "b": False}, "head": False}, None)],
)
def test_t4_the_rest_trains_as_if_it_were_the_whole_model(frozen, clip_norm):
    """Float64. The clipped norm is that of what trains."""
    arguments = {"init": init, "loss": loss, "batches": batches, "steps": STEPS, "clip_norm": clip_norm}
    with enable_x64():
        expected = plain(clip_norm=clip_norm)
        seen = []
        found = train(
            **arguments,
            optimizer=optax.adam(1e-2),
            frozen=frozen,
            evaluate=lambda params: seen.append(jax.tree.map(np.asarray, params)) or {"codes": params["base"][1].sum()},
        )
        assert_same(found.params, expected)
        assert_same(seen[0], expected)
        assert found.metrics == {"codes": 15.0}
        arguments.pop("steps")
        assert_same(
            train_local(**arguments, optimizer=optax.adam(1e-2), steps=STEPS, frozen=frozen, world=WORLD).params,
            plain(WORLD, clip_norm),
        )


def test_local_steps_the_average_and_own_gradients_leave_it_alone():
    arguments = {"init": init, "batches": batches, "optimizer": optax.sgd(1.0), "steps": 2, "frozen": is_base}
    with enable_x64():
        expected = plain(optimizer=optax.adam(1e-2))
        local = LocalSteps(STEPS // 2, optax.adam(1e-2), inner_state="keep")
        assert_same(train(**arguments, loss=loss, local=local).params, expected, 1e-9)
        arguments |= {"optimizer": optax.adam(1e-2), "steps": STEPS}

        def whole(params, batch):  # with gradients for all, as a user has them already
            return jax.value_and_grad(loss, has_aux=True, allow_int=True)(params, batch)

        def part(params, batch):
            def of(trained):
                return loss({**trained, "base": params["base"]}, batch)

            value, gradients = jax.value_and_grad(of, has_aux=True)({k: v for k, v in params.items() if k != "base"})
            return value, {**gradients, "base": [None, None, None]}

        for gradients in (whole, part):
            assert_same(train(**arguments, gradients=gradients).params, expected)
        averaged = train(**arguments, loss=loss, average=0.9)
        assert_same(averaged.params, expected)
        assert_same(averaged.average["base"], expected["base"])
        assert jax.tree.structure(averaged.average) == jax.tree.structure(expected)


def test_a_model_with_state_keeps_its_pair():
    def stateful(params, state, batch):
        error, _ = loss(params, batch)
        return error, {"count": state["count"] + 1}

    def pair(key):
        return init(key), {"count": jnp.int32(0)}

    with enable_x64():
        found = train(
            init=pair,
            loss=stateful,
            batches=batches,
            optimizer=optax.adam(1e-2),
            steps=STEPS,
            has_state=True,
            frozen=is_base,
            evaluate=lambda params, state: {"count": state["count"] + params["base"][1][0]},
        )
        assert_same(found.params, plain())
    assert found.state == {"count": STEPS}
    assert found.metrics == {"count": STEPS}


def means(params, state, batch):
    """Reads the means of the state, and returns others."""
    error, _ = loss(params, (batch[0] - state["norm"]["mean"], batch[1]))
    return error, {"norm": {"mean": state["norm"]["mean"] + 1}, "count": state["count"] + 1}


STATE = {"norm": {"mean": np.full(6, 0.5)}, "count": np.int32(0)}


def pair(key):
    return init(key), STATE


@pytest.mark.parametrize(
    ("frozen", "still", "count"),
    [
        (None, lambda name: name == "norm.mean", STEPS),
        (is_base, {"norm": True, "count": False}, STEPS),
        (is_base, True, 0),
    ],
)
def test_frozen_model_state_keeps_its_values(frozen, still, count):
    """Float64. The new values that `loss` returns are not used."""
    arguments = {"init": pair, "loss": means, "has_state": True, "frozen_state": still, "frozen": frozen}
    arguments |= {"batches": batches, "steps": STEPS, "optimizer": optax.adam(1e-2)}
    if frozen is None:
        arguments["init"] = lambda key: ({name: leaf for name, leaf in init(key).items() if name != "base"}, STATE)
        arguments["loss"] = lambda params, *rest: means(params | {"base": init(jax.random.key(0))["base"]}, *rest)
    seen = []
    with enable_x64():
        found = train(**arguments, evaluate=lambda params, state: seen.append(state) or {})
        local = LocalSteps(STEPS // 2, optax.adam(1e-2))
        kept = train(**arguments | {"local": local, "optimizer": optax.sgd(1.0), "steps": 2})
        also = train_local(**arguments, world=WORLD)
        alone, both = (plain(world, mean=STATE["norm"]["mean"]) for world in (1, WORLD))
        for result, expected, rtol in ((found, alone, 1e-11), (also, both, 1e-11), (kept, alone, 1e-9)):
            assert_same(result.params if frozen else result.params | {"base": expected["base"]}, expected, rtol)
    for state in (found.state, seen[0], also.state, kept.state):
        assert_same(state, {"norm": {"mean": np.full(6, 0.5)}, "count": np.int32(count)})


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_frozen_number_has_the_dtype_that_it_would_have_on_the_wire(dtype):
    """A weak type of JAX made the loss compute in another precision than with state that travels."""

    def model(key):
        return {"w": jnp.asarray([0.5, 0.25], dtype)}, {"factor": 0.9, "other": jnp.full((), 0.7)}

    def weighted(params, state, batch):
        return jnp.sum(jnp.exp(params["w"] * state["factor"]) * state["other"]).astype(jnp.float32), state

    arguments = {"init": model, "loss": weighted, "has_state": True, "batches": lambda key: 0, "steps": 9}
    arguments |= {"optimizer": optax.sgd(0.1), "deterministic": True}
    with enable_x64():
        travels = [call(**arguments).params["w"] for call in (train, train_local)]
        still = [call(**arguments, frozen_state=True).params["w"] for call in (train, train_local)]
    assert [value.tobytes() for value in map(np.asarray, still)] == [
        value.tobytes() for value in map(np.asarray, travels)
    ]


def test_pods_that_freeze_other_arrays_receive_their_names():
    def plan(**changes):
        arguments = {"init": pair, "loss": means, "has_state": True, "batches": batches, "steps": 1, "frozen": is_base}
        return Script(**arguments | {"optimizer": optax.sgd(0.1)} | changes).plan(1).agreement

    def said(**changes):
        there = plan(**changes)
        return here.difference(there.leaves, there.settings, "worker 1", "shard 0")

    here = plan(frozen_state=lambda name: name == "count")
    assert "frozen_state is norm.mean in worker 1 and count in shard 0. The" in said(
        frozen_state={"norm": True, "count": False}
    )
    assert "frozen_state is nothing in worker 1 and count in shard 0. The" in said()
    text = said(frozen=lambda name: name in ("base.1", "head"), frozen_state=lambda name: name == "count")
    assert "frozen is base.1, head (" in text
    assert "in worker 1 and base.0, base.1, base.2 (" in text


@pytest.mark.parametrize(
    ("still", "text"),
    [
        (
            lambda name: False,
            "frozen_state selects none of the 2 arrays of the model state, which are count, norm.mean",
        ),
        (lambda name: "yes", r"frozen_state\('count'\) returned str: must return True for a frozen array, or False"),
        ({"mean": True}, "frozen_state has another structure than the arrays of the model state .* It has mean; the"),
        (3, "frozen_state has int where a boolean must be: must be a function of an array's name, or a pytree"),
    ],
)
def test_an_invalid_selection_of_state_is_refused(still, text):
    arguments = {"batches": batches, "optimizer": optax.sgd(0.1), "steps": 1, "has_state": True, "frozen": is_base}
    with pytest.raises(TreeError, match=text):
        train(init=pair, loss=means, frozen_state=still, **arguments)
    with pytest.raises(TreeError, match="frozen_state is given, and init returns no arrays of the model state"):
        train(init=lambda key: (init(key), {}), loss=means, frozen_state=still, **arguments)
    with pytest.raises(ConfigurationError, match="frozen_state is given, and the model has no state"):
        train(init=init, loss=loss, frozen_state=still, **arguments | {"has_state": False})


def test_loss_must_still_return_a_state_of_the_same_kind():
    def short(params, state, batch):
        return means(params, state, batch)[0], {"count": state["count"]}

    arguments = {"batches": batches, "optimizer": optax.sgd(0.1), "steps": 1, "has_state": True}
    with pytest.raises(ConfigurationError, match=r"another structure than init's: the leaf norm.mean is only in one"):
        train(init=pair, loss=short, frozen=is_base, frozen_state=True, **arguments)


def test_no_gradient_is_computed_for_it():
    """XLA reports the memory of the results and between them, which is less than one array of the frozen size."""
    params = {"base": jnp.ones((1024, 1024)), "bias": jnp.zeros(1024)}
    tree = describe(params, frozen=lambda name: name == "base")

    def squares(params, x):
        return jnp.sum((x @ params["base"] + params["bias"]) ** 2)

    function = GradientFn(Objective(squares, tree, frozen=[params["base"]]))
    x = np.ones((4, 1024), np.float32)
    leaves = function.placement.shapes(tree)
    lowered = function._function.lower(leaves, x, np.zeros(2, np.uint32), [params["base"]])
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < params["base"].nbytes / 4


# ---- The tree ----

TREES = st.recursive(
    st.builds(lambda: np.zeros(2, np.float32)),
    lambda inner: (
        st.dictionaries(st.sampled_from(["a", "b", "0", "é"]), inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, st.none())
    ),
)


@given(TREES, TREES, st.data())
def test_a_divided_pair_is_put_together_again(params, state, data):
    """All of a state may be frozen, and not all parameters."""

    def flags(tree):
        count = len(jax.tree.leaves(tree))
        return data.draw(st.none() | st.lists(st.booleans(), min_size=count, max_size=count).filter(any))

    chosen = [flags(params), flags(state)]
    if chosen[0] is not None and all(chosen[0]):
        chosen[0] = None
    trees = [
        None if each is None else jax.tree.unflatten(jax.tree.structure(tree), each)
        for tree, each in zip((params, state), chosen, strict=True)
    ]
    spec = describe((params, state), has_state=True, frozen=trees[0], frozen_state=trees[1])
    every = describe((params, state), has_state=True)
    model = jax.tree.unflatten(every.treedef, [leaf.name for leaf in every.leaves])
    rest = spec.rest(model)
    assert jax.tree.structure(rest) == spec.treedef
    assert jax.tree.leaves(rest) == [leaf.name for leaf in spec.leaves]
    values = spec.frozen_values(model)
    assert values == [leaf.name for leaf in spec.frozen_leaves]
    assert len(values) == sum(sum(each or []) for each in chosen)
    assert spec.whole_model(*rest, values) == model
    assert spec.everything == every


@given(TREES, st.data())
def test_a_divided_tree_is_put_together_again(tree, data):
    names = [leaf.path for leaf in describe(tree).leaves]
    flags = data.draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names)))
    chosen = dict(zip(names, flags, strict=True))
    if all(flags) or not any(flags):
        with pytest.raises(TreeError, match=r"selects (all|none of the)"):
            describe(tree, frozen=chosen.__getitem__)
        return
    spec = describe(tree, frozen=chosen.__getitem__)
    apart = spec.frozen
    assert [leaf.path for leaf in spec.leaves] == [name for name in names if not chosen[name]]
    assert [leaf.path for leaf in apart.leaves] == [name for name in names if chosen[name]]
    numbered = jax.tree.unflatten(jax.tree.structure(tree), list(range(len(names))))
    trained = apart.rest(numbered)
    assert jax.tree.structure(trained) == spec.treedef
    assert spec.whole(trained, apart.values(numbered)) == numbered
    assert len(arrays(apart.rest(tree), spec)) == len(spec.leaves)
    same = describe(tree, frozen=jax.tree.unflatten(jax.tree.structure(tree), flags))
    assert (same.leaves, same.frozen) == (spec.leaves, spec.frozen)


@pytest.mark.parametrize(
    ("frozen", "text"),
    [
        (lambda name: False, "frozen selects none of the 6 parameters, which are adapter.a, adapter.b, base.0"),
        (lambda name: True, "frozen selects all 6 parameters, so nothing would train"),
        (lambda name: 1, r"frozen\('adapter.a'\) returned int: must return True for a frozen parameter, or False"),
        (
            {"bas": True, "head": False},
            "another structure .* It has bas, head; the parameters are adapter.a, adapter.b",
        ),
        ({"base": True, "adapter": 3, "head": False}, "frozen has int where a boolean must be"),
        ("base", "frozen has str where a boolean must be"),
        ({}, "frozen has nothing where a boolean must be"),
    ],
)
def test_an_invalid_selection_is_refused(frozen, text):
    with pytest.raises(TreeError, match=text):
        train(init=init, loss=loss, batches=batches, optimizer=optax.sgd(0.1), steps=1, frozen=frozen)


def test_the_same_array_may_be_frozen_twice_and_not_trained_beside():
    shared = jnp.ones(3)
    assert len(describe({"a": shared, "b": shared, "c": jnp.ones(1)}, frozen=lambda name: name != "c").leaves) == 1
    with pytest.raises(TreeError, match="leaves a and b are the same array"):
        describe({"a": shared, "b": shared}, frozen=lambda name: name == "a")


@pytest.mark.parametrize("size", [3, 600_000])  # `init` of the second one does not run as one program
def test_an_array_that_trains_at_two_places_is_refused(size):
    def twice(key):
        shared = jnp.ones(size)
        return {"a": shared, "b": shared, "base": jnp.ones(1)}

    arguments = {"init": twice, "loss": lambda p, b: p["a"].sum(), "batches": batches, "optimizer": optax.sgd(0.1)}
    # A compiled program returns two arrays. With a frozen part, `init` is always one.
    script = Script(**arguments, steps=1, frozen=lambda name: name == "base")
    assert len(jax.tree.leaves(script.beginning.trained())) == 2
    script = Script(**arguments, steps=1)
    if size == 3:
        assert len(jax.tree.leaves(script.beginning.trained())) == 3
        return
    with pytest.raises(TreeError, match="leaves a and b are the same array"):
        script.beginning.trained()
    with pytest.raises(TreeError, match="leaves a and b are the same array"):
        train(**arguments, steps=1)


# ---- Digests ----

KINDS = st.sampled_from([np.float32, np.float64, np.int8, np.bool_, np.complex64, ml_dtypes.bfloat16, ml_dtypes.int4])


@given(arrays_of.arrays(np.uint8, st.integers(1, 300)), st.data())
def test_a_changed_bit_changes_the_digest(data, draw):
    before = digest_of(data)
    at, bit = draw.draw(st.integers(0, data.size - 1)), draw.draw(st.integers(0, 7))
    data[at] ^= 1 << bit
    assert digest_of(data) != before


@given(st.integers(0, 63), st.integers(1, 300), st.integers(0, 2**32 - 1))
def test_the_same_bit_of_several_words_changes_the_digest(bit, count, seed):
    """For example, the signs of several numbers change. Their sums must not cancel."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**64, size=400, dtype=np.uint64)
    other = words.copy()
    other[rng.choice(400, count, replace=False)] ^= np.uint64(1 << bit)
    assert digest_of(other) != digest_of(words)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_a_base_and_its_negative_have_other_digests(dtype):
    values = np.random.default_rng(0).normal(size=(64, 64)).astype(dtype)
    others = [-values, values * np.where(np.arange(64) % 2, 1, -1).astype(dtype), values.conj()]
    digests = {digest_of(each) for each in (values, *others[: 3 if dtype == np.complex64 else 2])}
    assert len(digests) == (4 if dtype == np.complex64 else 3)


def test_masks_with_two_other_flags_have_other_digests():
    rng = np.random.default_rng(0)
    mask = rng.random(4096) < 0.5
    digests = {digest_of(mask)}
    for _ in range(2000):
        other = mask.copy()
        other[rng.choice(512, 2, replace=False) * 8 + 7] ^= True
        digests.add(digest_of(other))
    assert len(digests) > 1980  # some pairs are drawn twice


@given(KINDS, st.integers(2, 40))
def test_dtype_and_shape_belong_to_the_digest(dtype, size):
    array = np.zeros(size, dtype)
    found = {digest_of(array), digest_of(array[None]), digest_of(array[:, None]), digest_of(np.zeros(size + 1, dtype))}
    assert len(found) == 4
    assert digest_of(array.view(np.uint8)) not in found
    assert digest_of(np.zeros(size, dtype)[::1]) == digest_of(array)


def test_a_large_array_is_read_to_its_end():
    """More than one chunk, and a part of one; two words that change places are noticed."""
    array = np.arange(3 * 65536 + 40, dtype=np.uint32)
    before = digest_of(array)
    for at in (0, 65536, array.size - 1):
        other = array.copy()
        other[at] += 1
        assert digest_of(other) != before
    other = array.copy()
    other[[0, 2]] = other[[2, 0]]
    assert digest_of(other) != before


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_transposed_array_of_a_file_is_in_memory_one_time(dtype, monkeypatch) -> None:
    """JAX and each digest would copy it, and a digest that waits for its turn would keep the original."""
    original = np.array([[0, 1, 2], [3, 4, 5]], dtype)
    expected, gone = np.ascontiguousarray(original.T), weakref.ref(original)
    turn = threading.Event()
    monkeypatch.setattr(_base, "digest_of", lambda value: digest_of(value) if turn.wait(LONG) else "")
    with Base(Placement(), digests=True) as base:
        placed = base.place(0, original.T)
        del original
        kept = gone() is not None
        turn.set()
        assert not kept
        assert np.array_equal(placed, expected)
        assert base.digests == (digest_of(expected),)
