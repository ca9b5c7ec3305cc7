"""T4: through 3 shards, or 1, every optimizer of optax gives what the plain loop gives, or is refused beforehand.

The plain loop here is written out with optax alone; it shares no code with what it checks.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from backstay._update._array_specs import STATE
from backstay._update._engine import ShardEngine
from backstay._update._engine._kernels import enable_x64
from backstay._update._partition import gather, partition, scatter
from backstay._update._rules import analyse
from backstay._update._rules._advice import factories
from backstay._update._tree import PARAMS, describe, leaf_names
from backstay.errors import OptimizerError
from backstay.testing import train_local

LR = 1e-2

CUT = "leaves may be cut"  # every leaf is updated element by element
WHOLE = "whole leaves"  # at least one leaf must stay whole; exact
REFUSED = "refused on more than one shard"
NEVER = "refused everywhere"  # wants more than gradients, state and parameters
EVEN = lambda step, **_: step % 2 == 0  # noqa: E731  # one of optax's ConditionFn


def matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


def labels(params):
    return jax.tree.map(lambda leaf: "slow" if leaf.ndim > 1 else "fast", params)


def mask_of_names(frozen):
    """Without the leaves that some optimizers cannot take; optax wants the mask's own tree."""
    return {"conv": True, "dense": {"bias": frozen, "kernel": frozen}, "scale": frozen, "empty": frozen}


def skip_large(updates, step, params):
    return optax.skip_large_updates(updates, step, params, max_squared_norm=70.0)


def norm_of(tree):
    return jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(tree)))


def own_norm(updates, params):
    del params
    norm = norm_of(updates)
    return jax.tree.map(lambda leaf: -LR * leaf / norm, updates)


def needs_value(updates, state, params=None, *, value):
    del params, value
    return updates, state


def schedule():
    """Computed in float64 under x64. Several of optax's are not, and their last bit is the compiler's."""
    return optax.cosine_decay_schedule(LR, 100)


OPTIMIZERS = {
    "sgd": (lambda: optax.sgd(LR), CUT),
    "sgd-schedule": (lambda: optax.sgd(schedule()), CUT),
    "momentum": (lambda: optax.sgd(LR, momentum=0.9), CUT),
    "nesterov": (lambda: optax.sgd(LR, momentum=0.9, nesterov=True), CUT),
    "adam": (lambda: optax.adam(LR), CUT),
    "adam-nesterov": (lambda: optax.adam(LR, nesterov=True), CUT),
    "adam-join-schedules": (
        lambda: optax.adam(optax.join_schedules([optax.constant_schedule(LR), schedule()], [9])),
        CUT,
    ),
    "adamw-masked": (lambda: optax.adamw(schedule(), weight_decay=0.1, mask=matrices), CUT),
    "nadamw": (lambda: optax.nadamw(LR), CUT),
    "amsgrad": (lambda: optax.amsgrad(LR), CUT),
    "adamax": (lambda: optax.adamax(LR), CUT),
    "adabelief": (lambda: optax.adabelief(LR), CUT),
    "radam": (lambda: optax.radam(LR), CUT),
    "yogi": (lambda: optax.yogi(LR), CUT),
    "adan": (lambda: optax.adan(LR), CUT),
    "adagrad": (lambda: optax.adagrad(LR), CUT),
    "adadelta": (lambda: optax.adadelta(LR), CUT),
    "rmsprop": (lambda: optax.rmsprop(LR, centered=True, momentum=0.9), CUT),
    "rprop": (lambda: optax.rprop(LR), CUT),
    "lion": (lambda: optax.lion(LR), CUT),
    "signum": (lambda: optax.signum(LR), CUT),
    "optimistic": (lambda: optax.optimistic_gradient_descent(LR), CUT),
    "clip-elementwise": (lambda: optax.chain(optax.clip(0.5), optax.adam(LR)), CUT),
    "zero-nans": (lambda: optax.chain(optax.zero_nans(), optax.sgd(LR)), WHOLE),
    "nonnegative": (lambda: optax.chain(optax.sgd(LR), optax.keep_params_nonnegative()), CUT),
    "ema": (lambda: optax.chain(optax.ema(0.9), optax.sgd(LR)), CUT),
    "apply-every": (lambda: optax.chain(optax.apply_every(4), optax.sgd(LR)), CUT),
    "multi-steps": (lambda: optax.MultiSteps(optax.adam(LR), 4).gradient_transformation(), CUT),
    "multi-transform": (lambda: optax.multi_transform({"slow": optax.sgd(LR), "fast": optax.adam(LR)}, labels), CUT),
    "masked-freeze": (lambda: optax.chain(optax.adam(LR), optax.masked(optax.set_to_zero(), matrices)), CUT),
    "inject-hyperparams": (lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=schedule()), CUT),
    "madgrad": (lambda: optax.contrib.madgrad(LR), CUT),
    "ademamix": (lambda: optax.contrib.ademamix(LR), CUT),
    "adopt": (lambda: optax.contrib.adopt(LR), CUT),
    "acprop": (lambda: optax.contrib.acprop(LR), CUT),
    "cocob": (optax.contrib.cocob, CUT),
    "schedule-free": (lambda: optax.contrib.schedule_free_adamw(LR), CUT),
    "adamaxw": (lambda: optax.adamaxw(LR), CUT),
    # optax.optimistic_adam is deprecated, and gives way to:
    "optimistic-adam-v2": (lambda: optax.optimistic_adam_v2(LR), CUT),
    "sign-sgd": (lambda: optax.sign_sgd(LR), CUT),
    "simplified-ademamix": (lambda: optax.contrib.simplified_ademamix(LR), CUT),
    "schedule-free-sgd": (lambda: optax.contrib.schedule_free_sgd(LR), CUT),
    "conditionally-mask": (lambda: optax.chain(optax.conditionally_mask(optax.scale(2.0), EVEN), optax.sgd(LR)), CUT),
    "conditionally-transform": (lambda: optax.conditionally_transform(optax.adam(LR), EVEN), CUT),
    "freeze": (lambda: optax.chain(optax.adam(LR), optax.freeze(mask_of_names(False))), CUT),
    "selective-transform": (lambda: optax.selective_transform(optax.adam(LR), freeze_mask=mask_of_names(False)), CUT),
    # optax.inject_stateful_hyperparams is deprecated: inject_hyperparams is above.
    "named-chain": (lambda: optax.named_chain(("a", optax.scale(2.0)), ("b", optax.adam(LR))), CUT),
    "partition": (lambda: optax.partition({"slow": optax.sgd(LR), "fast": optax.adam(LR)}, labels), CUT),
    "split-complex": (lambda: optax.contrib.split_real_and_imaginary(optax.adam(LR)), CUT),
    "stateless": (lambda: optax.stateless(lambda u, p: jax.tree.map(lambda a, b: -LR * (a + 0.1 * b), u, p)), CUT),
    "stateless-leaf": (lambda: optax.stateless_with_tree_map(lambda gradient, _: -LR * gradient), CUT),
    "multi-steps-itself": (lambda: optax.MultiSteps(optax.adam(LR), 2), CUT),
    "sam": (lambda: optax.contrib.sam(optax.sgd(LR), optax.sgd(0.05)), CUT),
    "lamb": (lambda: optax.lamb(LR), WHOLE),
    "lars": (lambda: optax.lars(LR), WHOLE),
    "fromage": (lambda: optax.fromage(LR), WHOLE),
    "novograd": (lambda: optax.novograd(LR), WHOLE),
    "sm3": (lambda: optax.sm3(LR), WHOLE),
    "adafactor": (lambda: optax.adafactor(LR, min_dim_size_to_factor=4), WHOLE),
    "adaptive-grad-clip": (lambda: optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(LR)), WHOLE),
    "clip-by-block-rms": (lambda: optax.chain(optax.clip_by_block_rms(0.5), optax.sgd(LR)), WHOLE),
    "centralize": (lambda: optax.chain(optax.centralize(), optax.sgd(LR)), WHOLE),
    "noisy-sgd": (lambda: optax.noisy_sgd(LR, key=jax.random.key(3)), WHOLE),
    "muon": (lambda: optax.contrib.muon(LR), WHOLE),
    "multi-steps-lamb": (lambda: optax.MultiSteps(optax.lamb(LR), 3).gradient_transformation(), WHOLE),
    "clip-matrices-together": (
        lambda: optax.chain(optax.masked(optax.clip_by_global_norm(0.5), matrices), optax.adam(LR)),
        WHOLE,
    ),
    "galore": (lambda: optax.contrib.galore(LR, rank=2, update_proj_gap=4), WHOLE),
    "add-noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(LR)), WHOLE),
    "block-norm": (lambda: optax.chain(optax.sgd(LR), optax.scale_by_param_block_norm()), WHOLE),
    "block-rms": (lambda: optax.chain(optax.sgd(LR), optax.scale_by_param_block_rms()), WHOLE),
    "distance-over-gradients": (
        lambda: optax.chain(optax.scale_by_distance_over_gradients(), optax.scale_by_learning_rate(LR)),
        WHOLE,
    ),
    "clip-by-global-norm": (lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(LR)), REFUSED),
    "apply-if-finite": (lambda: optax.apply_if_finite(optax.adam(LR), 3), REFUSED),
    "normalize": (lambda: optax.chain(optax.contrib.normalize(), optax.sgd(LR)), REFUSED),
    "flatten": (lambda: optax.flatten(optax.adam(LR)), REFUSED),
    "prodigy": (optax.contrib.prodigy, REFUSED),
    "dog": (lambda: optax.contrib.dog(LR), REFUSED),
    "dadapt": (optax.contrib.dadapt_adamw, REFUSED),
    "mechanic": (lambda: optax.contrib.mechanize(optax.adam(LR)), REFUSED),
    "lbfgs-without-search": (lambda: optax.lbfgs(LR, linesearch=None), REFUSED),
    "sam-normalized": (
        lambda: optax.contrib.sam(optax.sgd(LR), optax.chain(optax.contrib.normalize(), optax.sgd(0.05))),
        REFUSED,
    ),
    "normalize-by-update-norm": (lambda: optax.chain(optax.normalize_by_update_norm(), optax.sgd(LR)), REFUSED),
    "snapshot": (lambda: optax.chain(optax.snapshot("norm", norm_of), optax.sgd(LR)), REFUSED),
    "skip-not-finite": (
        lambda: optax.MultiSteps(optax.adam(LR), 2, should_skip_update_fn=optax.skip_not_finite),
        REFUSED,
    ),
    "skip-large": (lambda: optax.MultiSteps(optax.adam(LR), 2, should_skip_update_fn=skip_large), REFUSED),
    "dowg": (optax.contrib.dowg, REFUSED),
    "own-norm": (lambda: optax.stateless(own_norm), REFUSED),
    "lbfgs": (optax.lbfgs, NEVER),
    "reduce-on-plateau": (lambda: optax.chain(optax.sgd(LR), optax.contrib.reduce_on_plateau()), NEVER),
    "polyak": (optax.polyak_sgd, NEVER),
    "momo": (optax.contrib.momo, NEVER),
    "momo-adam": (optax.contrib.momo_adam, NEVER),
    "backtracking": (lambda: optax.chain(optax.sgd(LR), optax.scale_by_backtracking_linesearch(5)), NEVER),
    "sophia": (lambda: optax.contrib.sophia(LR), NEVER),
    "hessian": (optax.contrib.hutchinson_estimator_diag_hessian, NEVER),
    "sam-opaque": (lambda: optax.contrib.sam(optax.sgd(LR), optax.sgd(0.05), opaque_mode=True), NEVER),
    "lookahead": (lambda: optax.lookahead(optax.sgd(LR), 5, 0.5), NEVER),
    "dpsgd": (lambda: optax.contrib.dpsgd(LR, 1.0, 0.1, seed=1), NEVER),
    "monitor": (lambda: optax.chain(optax.monitor({"norm": norm_of}), optax.sgd(LR)), NEVER),
    "measure-with-ema": (lambda: optax.chain(optax.measure_with_ema(norm_of, 0.9), optax.sgd(LR)), NEVER),
    "own-value": (lambda: optax.GradientTransformationExtraArgs(lambda _: (), needs_value), NEVER),
}

ONE_SERVER = "set parameterServers.replicas to 1"
STEP_SIZE = r"computes one step size from all leaves: use a fixed learning rate or a schedule instead.*" + ONE_SERVER
NORM = r"divides all leaves by one norm, and `clip_norm=` does not replace that.*" + ONE_SERVER
FINITE = r"remove it\. Backstay skips every update that has a gradient which is not finite.*maxNonFinite"
SCHEDULE = r"needs the loss at each update\. Use a schedule of the step instead"
EXAMPLES = r"needs a gradient of each example"

# The advice in errors. Only clipping may be replaced by `clip_norm=`.
ADVICE = {
    "clip-by-global-norm": r"optax\.clip_by_global_norm .* Where it is the first .* pass `clip_norm=`.*" + ONE_SERVER,
    "apply-if-finite": r"optax\.apply_if_finite .*" + FINITE,
    "skip-not-finite": r"optax\.skip_not_finite .*" + FINITE,
    "skip-large": r"optax\.MultiSteps with a should_skip_update_fn that reads all leaves .*" + ONE_SERVER,
    "normalize": r"optax\.contrib\.normalize " + NORM,
    "normalize-by-update-norm": r"optax\.normalize_by_update_norm " + NORM,
    "sam-normalized": r"optax\.contrib\.normalize " + NORM,
    "flatten": r"optax\.flatten joins all leaves in one array: remove it",
    "prodigy": r"optax\.contrib\.prodigy " + STEP_SIZE,
    "dog": r"optax\.contrib\.dog " + STEP_SIZE,
    "dowg": r"optax\.contrib\.dowg " + STEP_SIZE,
    "dadapt": r"optax\.contrib\.dadapt_adamw " + STEP_SIZE,
    "mechanic": r"optax\.contrib\.mechanize " + STEP_SIZE,
    "lbfgs-without-search": r"optax\.scale_by_lbfgs computes inner products of all leaves: " + ONE_SERVER,
    "snapshot": r"optax\.snapshot keeps a measurement of all leaves: remove it, or " + ONE_SERVER,
    "own-norm": r"to clip by the global norm, pass `clip_norm=` to train; for anything else " + ONE_SERVER,
    "lbfgs": r"optax\.scale_by_zoom_linesearch evaluates the loss .* optax\.lbfgs\(learning_rate, linesearch=None\)",
    "backtracking": r"optax\.scale_by_backtracking_linesearch evaluates the loss .* Use a fixed learning rate",
    "reduce-on-plateau": r"optax\.contrib\.reduce_on_plateau " + SCHEDULE,
    "polyak": r"optax\.scale_by_polyak " + SCHEDULE,
    "momo": r"optax\.contrib\.momo " + SCHEDULE,
    "momo-adam": r"optax\.contrib\.momo_adam " + SCHEDULE,
    "sophia": r"optax\.contrib\.sophia, evaluates the loss inside an update.*Use optax\.adamw or optax\.lion",
    "hessian": r"hutchinson_estimator_diag_hessian.*evaluates the loss inside an update",
    "sam-opaque": r"optax\.contrib\.sam with opaque_mode=True computes gradients .* Use opaque_mode=False",
    "lookahead": r"optax\.lookahead needs optax\.LookaheadParams, .* Use the fast optimizer alone",
    "dpsgd": r"optax\.differentially_private_aggregate " + EXAMPLES,
    "monitor": r"optax\.monitor changes the structure of its state in the first update\. Remove it",
    "measure-with-ema": r"optax\.measure_with_ema returns a measurement instead of updates\. Remove it",
    "own-value": r"an optimizer that needs 'value' cannot be used",
}


USABLE = sorted(name for name, (_, expected) in OPTIMIZERS.items() if expected != NEVER)
NEVER_USABLE = sorted(set(OPTIMIZERS) - {*USABLE, "monitor"})  # one process can compute the last
# One for each kind of state: of other shapes, flags, hyperparameters and counts, moments, nested counts, and keys.
USABLE_FLOAT32 = ["adafactor", "apply-if-finite", "inject-hyperparams", "lamb", "multi-steps", "noisy-sgd"]
SHARDS = {CUT: 3, WHOLE: 3, REFUSED: 1}


def make_params(name, dtype):
    """Ranks 0 to 3, a leaf larger than a block, and an empty one where plain optax can take it.

    384 elements, so that most blocks have one size and little is compiled; `test_partition` has the odd sizes.
    """
    rng = np.random.default_rng(7)
    params = {
        "conv": rng.normal(size=(3, 4, 6)),
        "dense": {"bias": rng.normal(size=(24,)), "kernel": rng.normal(size=(7, 41))},
        "scale": np.asarray(0.7),
        "empty": np.zeros((0, 3)),
    }
    if name in ("sm3", "muon", "distance-over-gradients"):
        del params["empty"], params["scale"]
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params)


def make_gradients(tree, steps):
    rng = np.random.default_rng(11)
    return [
        [np.asarray(rng.normal(size=leaf.shape, scale=0.5), np.float64).astype(leaf.dtype) for leaf in tree.leaves]
        for _ in range(steps)
    ]


def plain_step(optimizer):
    @jax.jit
    def step(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def collect(tree, engines):
    """Returns the parameters that all shards hold together; every element is written."""
    leaves = [np.full(leaf.shape, np.nan, leaf.dtype) for leaf in tree.leaves]
    for engine in engines:
        for index, block in enumerate(engine.blocks):
            scatter(block, engine.block(index), leaves)
    return leaves


def blocks_of(engine, leaves):
    return [gather(block, leaves) for block in engine.blocks]


@pytest.fixture
def quick_compiler():
    """Most of the time here is XLA's. The float32 tests have its optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("name", USABLE)
def test_t4_float64_over_50_steps(name):
    make, expected = OPTIMIZERS[name]
    with enable_x64():
        params = make_params(name, jnp.float64)
        tree = describe(params)
        gradients = make_gradients(tree, 50)
        rule = analyse(make(), tree)
        assert_exact_or_refused(name, tree, rule)
        parts = partition(tree, rule, SHARDS[expected], block_bytes=512)
        engines = [ShardEngine(parts, shard, rule, params) for shard in range(SHARDS[expected])]
        step = plain_step(make())
        state = make().init(params)
        for leaves in gradients:
            params, state = step(params, state, tree.unflatten(leaves))
            for engine in engines:
                engine.apply([blocks_of(engine, leaves)])
        want = [np.asarray(leaf) for leaf in jax.tree.leaves(params)]
        assert all(np.isfinite(leaf).all() for leaf in want)
        for leaf, got, wanted in zip(tree.leaves, collect(tree, engines), want, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-12, err_msg=str(leaf))


@pytest.mark.parametrize("name", USABLE_FLOAT32)
def test_t4_float32_update_by_update_from_equal_state(name):
    make, expected = OPTIMIZERS[name]
    params = make_params(name, jnp.float32)
    tree = describe(params)
    rule = analyse(make(), tree)
    shards = SHARDS[expected]
    parts = partition(tree, rule, shards, block_bytes=1024)
    step = plain_step(make())
    state = make().init(params)
    for leaves in make_gradients(tree, 3):
        read = reader(tree, params, state)
        engines = [ShardEngine.restore(parts, shard, rule, read, version=0) for shard in range(shards)]
        for engine in engines:
            engine.apply([blocks_of(engine, leaves)])
        params, state = step(params, state, tree.unflatten(leaves))
        for leaf, got, want in zip(tree.leaves, collect(tree, engines), jax.tree.leaves(params), strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6, err_msg=str(leaf))
        arrays = reader(tree, params, state).arrays
        for engine in engines:
            for entry in engine.snapshot().entries:
                want = arrays[entry.key][entry.start : entry.stop]
                np.testing.assert_allclose(entry.value, want, rtol=2e-5, atol=2e-6, err_msg=entry.key)


def reader(tree, params, state):
    """`read` over whole trees in memory, named as checkpoints name them."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state)
    names = leaf_names(path for path, _ in paths)
    arrays = {PARAMS + leaf.path: value for leaf, value in zip(tree.leaves, jax.tree.leaves(params), strict=True)}
    arrays |= {STATE + name: value for name, (_, value) in zip(names, paths, strict=True)}
    for key, value in arrays.items():
        typed = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        arrays[key] = np.array(jax.random.key_data(value) if typed else value).reshape(-1)

    def read(key, start, stop):
        return arrays[key][start:stop]

    read.arrays = arrays
    return read


def test_every_refusal_has_its_advice():
    assert set(ADVICE) == {name for name, (_, expected) in OPTIMIZERS.items() if expected in (REFUSED, NEVER)}


@pytest.mark.filterwarnings("ignore")  # optax's own, of lookahead
@pytest.mark.parametrize("name", [*NEVER_USABLE, "monitor"])
def test_what_no_server_computes_is_refused_with_true_advice(name):
    with pytest.raises(OptimizerError, match=ADVICE[name]) as refused:
        analyse(OPTIMIZERS[name][0](), describe(make_params(name, jnp.float32)))
    assert "clip_norm" not in str(refused.value)


def assert_exact_or_refused(name, tree, rule):
    """On several shards. A refusal has true advice."""
    expected = OPTIMIZERS[name][1]
    rule.check(1)
    if expected == REFUSED:
        with pytest.raises(OptimizerError, match=r"leaf \w+ depends on leaf [\w.]+ .*" + ADVICE[name]) as refused:
            partition(tree, rule, 2)
        assert ("pass `clip_norm=`" in str(refused.value)) == (name in ("clip-by-global-norm", "own-norm"))
        return
    rule.check(3)
    filled = [group for group in rule.groups if any(tree.leaves[leaf].size for leaf in group.leaves)]
    assert all(group.elementwise for group in filled) == (expected == CUT), [group.why for group in filled]
    assert sorted(leaf for group in rule.groups for leaf in group.leaves) == list(range(len(tree.leaves)))


@pytest.mark.parametrize("name", ["adamw-masked", "lamb"])
def test_t4_bfloat16_update_by_update(name):
    """The optimizer's own arithmetic in bfloat16 is rounded by the compiler where it likes: so to its
    precision."""
    make, _ = OPTIMIZERS[name]
    params = make_params(name, jnp.bfloat16)
    tree = describe(params)
    rule = analyse(make(), tree)
    parts = partition(tree, rule, 2, block_bytes=256)
    step, state = plain_step(make()), make().init(params)
    for leaves in make_gradients(tree, 3):
        read = reader(tree, params, state)
        engines = [ShardEngine.restore(parts, shard, rule, read, version=0) for shard in range(2)]
        for engine in engines:
            engine.apply([blocks_of(engine, leaves)])
        params, state = step(params, state, tree.unflatten(leaves))
        for leaf, got, want in zip(tree.leaves, collect(tree, engines), jax.tree.leaves(params), strict=True):
            assert got.dtype == jnp.bfloat16
            wide = got.astype(np.float32), np.asarray(want, np.float32)
            np.testing.assert_allclose(*wide, rtol=2**-7, atol=1e-3, err_msg=str(leaf))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["clip-by-global-norm", "skip-large", *NEVER_USABLE])
def test_one_process_explains_what_it_cannot_compute(name):
    """`python train.py` gives the same advice, not a TypeError of optax. Alone, what mixes all leaves is computed.

    Of the latter, one is a transformation and one is an object with such methods.
    """
    make, expected = OPTIMIZERS[name]
    arguments = {
        "init": lambda _: make_params(name, jnp.float32),
        "loss": lambda params, batch: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params)) * batch,
        "batches": lambda _: np.ones(1, np.float32)[0],
        "steps": 1,
    }
    if expected == REFUSED:
        assert train_local(**arguments, optimizer=make()).step == 1
        return
    with pytest.raises(OptimizerError, match=ADVICE[name]):
        train_local(**arguments, optimizer=make())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of dpsgd, which optax gives up
def test_every_transformation_of_optax_is_in_the_table():
    """A release of optax that adds one fails here until a developer has checked it."""
    public = {
        name
        for module in (optax, optax.contrib)
        for name, function in vars(module).items()
        if inspect.isfunction(function)
        and not name.startswith("_")
        and "GradientTransformation" in str(function.__annotations__.get("return"))
    }
    public |= {"MultiSteps", "monitor", "dog", "dowg", "scale_by_factored_rms", "hutchinson_estimator_diag_hessian"}
    named = set(re.findall(r"optax(?:\.contrib)?\.(\w+)", Path(__file__).read_text()))
    made = set().union(*(factories(make()) for make, _ in OPTIMIZERS.values()))
    assert sorted(public - named - made) == []
