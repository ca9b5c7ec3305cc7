"""The arguments for `train` from models of Flax NNX, Flax Linen and Equinox work, and so do the examples on real
data."""

from __future__ import annotations

import importlib
import importlib.resources
import runpy
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from between import put
from flax import linen as nn
from flax import nnx

import backstay
from backstay._update import Objective, describe
from backstay.errors import ConfigurationError
from backstay.integrations import equinox as ours_equinox
from backstay.integrations import linen as ours_linen
from backstay.integrations import nnx as ours_nnx

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCH = (np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32), np.ones((16, 8), np.float32))


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_the_example_learns_the_digits(library, capsys):
    """T4's single process; batch normalization and dropout; at most 60 lines."""
    script = EXAMPLES / library / "train.py"
    assert len(script.read_text().splitlines()) <= 60
    runpy.run_path(str(script), run_name="__main__")
    said = capsys.readouterr().out
    assert "after 200 updates" in said
    assert float(said.partition("held-out accuracy ")[2].split()[0]) > 0.93


def test_the_adapters_of_the_transformer_leave_its_base(capsys, monkeypatch, tmp_path):
    """`examples/bytes/lora.py` from the checkpoint of another run."""
    monkeypatch.syspath_prepend(str(EXAMPLES / "bytes"))
    monkeypatch.setattr("sys.argv", ["lora.py", "--base", str(tmp_path / "base"), "--steps", "2"])
    # Short texts: it reads the whole standard library, and evaluates on a tenth of the help texts.
    for number in range(2):
        put(tmp_path / f"{number}.py", b"text " * 1000)
    monkeypatch.setattr("sysconfig.get_path", lambda *_, **__: str(tmp_path))
    put(tmp_path / "topics.py", (importlib.resources.files("pydoc_data") / "topics.py").read_bytes()[:20_000])
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    base = importlib.import_module("train")
    none = {"batches": lambda key: np.zeros(1, np.float32), "loss": lambda params, batch: 0 * params["norm"].sum()}
    made = backstay.train(
        init=base.init, **none, optimizer=optax.sgd(1.0), steps=1, seed=5, checkpoint=tmp_path / "base"
    )
    example = runpy.run_path(str(EXAMPLES / "bytes" / "lora.py"), run_name="__main__")
    monkeypatch.delitem(sys.modules, "train")
    assert "after 2 updates" in capsys.readouterr().out
    params = example["result"].params
    assert sum(leaf.size for leaf in jax.tree.leaves(params["lora"])) == 16_384
    for one, other in zip(jax.tree.leaves(params["base"]), jax.tree.leaves(made.params), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_image_classifier_trains_on_whole_images_and_shifts_them(capsys, monkeypatch):
    """It makes few updates, because `bench/classifier.py` measures its accuracy."""
    script = EXAMPLES / "images" / "train.py"
    monkeypatch.setattr("sys.argv", [str(script), "--batch", "8", "--steps", "3"])
    example = runpy.run_path(str(script), run_name="__main__")
    assert "after 3 updates" in capsys.readouterr().out
    state = example["result"].state["norm"]
    assert state["mean"].shape == (16,)
    assert np.abs(state["mean"]).max() > 0
    images, labels = example["images"], example["labels"]
    assert images.shape == (5000, 28, 28, 1)
    assert (images.dtype, images.min(), images.max()) == (np.float32, 0, 1)
    assert np.bincount(labels).tolist() == [500] * 10
    assert set(labels[:1000]) == set(range(10))  # held out
    corner = np.zeros_like(images[0])
    corner[2:, :-2] = images[0][:-2, 2:]
    for draw, moved in (([2, 2], images[0]), ([0, 4], corner)):
        rng = SimpleNamespace(integers=lambda low, high, size, draw=draw: draw)
        assert np.array_equal(example["shift"]((images[0], labels[0]), rng)[0], moved)


def one_step(adapter, at=(0, 0)):
    """(tree, the model of `init`, the outcome of one batch)."""
    model = adapter.init(jax.random.key(0))
    tree = describe(model, has_state=adapter.has_state, frozen=adapter.frozen)
    assert jax.tree.structure(jax.eval_shape(adapter.init, jax.random.key(0))) == jax.tree.structure(model)
    frozen, leaves = tree.frozen_values(model), jax.tree.leaves(tree.rest(model))
    objective = Objective(adapter.loss, tree, has_rng=adapter.has_rng, frozen=frozen)
    made = jax.jit(lambda leaves, at, frozen: vars(objective(leaves, BATCH, at, frozen)))(
        leaves, np.asarray(at, np.uint32), frozen
    )
    return tree, model, made


class Shared(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)])
        self.tied = self.layers[1]
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.width = 8  # static

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        self.hidden = nnx.Intermediate(x)  # of the forward pass: not a part of the state
        return self.tied(self.drop(self.norm(x)))


def square(net, batch):
    x, y = batch
    return jnp.mean((net(x) - y) ** 2), {"one": jnp.float32(1)}


def test_nnx_shared_layers_streams_and_intermediates():
    adapter = ours_nnx.adapt(Shared, square, lambda net: {"sum": float(jnp.sum(net(BATCH[0])))})
    assert dict(adapter).keys() == {"init", "loss", "evaluate", "has_state", "has_rng"}
    tree, (params, state), made = one_step(adapter)
    assert [leaf.name for leaf in tree.leaves] == [
        "layers.0.bias",
        "layers.0.kernel",
        "layers.1.bias",
        "layers.1.kernel",
        "norm.bias",
        "norm.scale",
        "state/norm.mean",
        "state/norm.var",
    ]
    assert made["finite"]
    assert made["metrics"].keys() == {"one"}
    new = tree.unflatten(made["leaves"])[1]
    assert not np.array_equal(new["norm"]["mean"], state["norm"]["mean"])
    again, other = one_step(adapter)[2], one_step(adapter, (0, 1))[2]
    assert float(made["loss"]) == float(again["loss"]) != float(other["loss"])
    # The gradient of the shared layer is of both its uses.
    net = adapter.model(params, state)
    assert net.tied is net.layers[1]
    assert adapter.evaluate(params, state) == adapter.evaluate(params, state)
    given = Shared(nnx.Rngs(5))
    first = ours_nnx.adapt(given, square).init(jax.random.key(0))[0]
    assert np.array_equal(first["layers"][0]["kernel"], given.layers[0].kernel[...])


def test_nnx_models_without_state_and_models_that_take_their_streams_when_called():
    class Late(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 8, rngs=rngs)
            self.drop = nnx.Dropout(0.5)

        def __call__(self, x, rngs):
            return self.drop(self.layer(x), rngs=rngs)

    adapter = ours_nnx.adapt(Late, lambda net, batch, rngs: jnp.mean(net(batch[0], rngs) ** 2), has_rngs=True)
    assert (adapter.has_state, adapter.has_rng) == (False, True)
    losses = [float(one_step(adapter, (step, 0))[2]["loss"]) for step in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    plain = ours_nnx.adapt(lambda rngs: nnx.Linear(4, 8, rngs=rngs), lambda net, batch: jnp.mean(net(batch[0]) ** 2))
    assert (plain.has_state, plain.has_rng) == (False, False)
    assert one_step(plain)[2]["finite"]


class Norm(nn.Module):
    @nn.compact
    def __call__(self, x, *, train):
        x = nn.Dense(8, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x)
        x = nn.BatchNorm(use_running_average=not train, dtype=jnp.float32)(x)
        return nn.Dropout(0.5, deterministic=not train)(x)


def test_linen_collections_streams_and_low_precision():
    def loss(net, batch):
        x, y = batch
        return jnp.mean((net(x, train=True) - y) ** 2) + jnp.mean((net(x, train=True) - y) ** 2)

    adapter = ours_linen.adapt(Norm(), loss, example=(BATCH[0],), options={"train": False})
    tree, (_, state), made = one_step(adapter)
    assert {str(leaf.dtype) for leaf in tree.leaves if "Dense" in leaf.path} == {"bfloat16"}
    assert [leaf.name for leaf in tree.leaves if not leaf.trained] == [
        "state/batch_stats.BatchNorm_0.mean",
        "state/batch_stats.BatchNorm_0.var",
    ]
    new = tree.unflatten(made["leaves"])[1]
    first = state["batch_stats"]["BatchNorm_0"]["mean"]
    assert not np.array_equal(new["batch_stats"]["BatchNorm_0"]["mean"], first)
    assert float(made["loss"]) != float(one_step(adapter, (1, 0))[2]["loss"])


class Tied(eqx.Module):
    embed: jax.Array
    out: jax.Array
    places: jax.Array
    layer: eqx.nn.Linear
    kind: str = eqx.field(static=True)
    act: object

    def __init__(self, key):
        self.embed = jax.random.normal(key, (8, 4))
        self.out = self.embed  # the same array: one parameter
        self.places = jnp.arange(4)
        self.layer = eqx.nn.Linear(4, 4, key=key)
        self.kind = "tied"
        self.act = jax.nn.tanh

    def __call__(self, x):
        return self.act(self.layer(x)[self.places]) @ self.out.T + jnp.sum(self.embed) * 0


def test_equinox_static_fields_integer_arrays_shared_arrays_and_mixed_precision():
    dtypes = []

    def loss(model, batch):
        x, y = batch
        dtypes.append((model.embed.dtype, x.dtype))
        assert model.kind == "tied"
        return jnp.mean((jax.vmap(model)(x) - y).astype(jnp.float32) ** 2)

    adapter = ours_equinox.adapt(Tied, loss, lambda model: {"n": 1.0}, compute_dtype=jnp.bfloat16)
    tree, params, made = one_step(adapter)
    assert [leaf.name for leaf in tree.leaves] == ["embed", "layer.bias", "layer.weight"]
    assert [str(leaf) for leaf in tree.frozen.leaves] == ["places int32[4]"]
    assert set(dtypes) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.bfloat16))}
    assert {leaf.dtype.name for leaf in made["leaves"]} == {"float32"}
    model = adapter.model(params)
    assert model.out is model.embed
    assert np.array_equal(model.places, np.arange(4))
    assert adapter.evaluate(params) == {"n": 1.0}
    none = ours_equinox.adapt(Tied, loss, frozen=False)  # integers are frozen in any case
    assert jax.tree.leaves(none.frozen) == jax.tree.leaves(adapter.frozen)


def test_equinox_frozen_arrays_keep_their_bits_and_models_may_be_given():
    model = eqx.nn.MLP(4, 8, 8, 1, key=jax.random.key(1))
    mask = jax.tree.map(lambda _: False, model)
    mask = eqx.tree_at(lambda m: m.layers[-1].weight, mask, True)
    adapter = ours_equinox.adapt(model, lambda m, b: jnp.mean((jax.vmap(m)(b[0]) - b[1]) ** 2), trained=mask)
    settings = {name: value for name, value in adapter.items() if name != "evaluate"}
    result = backstay.train(**settings, batches=lambda key: BATCH, optimizer=optax.sgd(0.1), steps=4)
    after = adapter.model(result.params, result.state)
    assert np.array_equal(after.layers[0].weight, model.layers[0].weight)
    assert not np.array_equal(after.layers[-1].weight, model.layers[-1].weight)


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.body = nnx.LoRALinear(4, 8, lora_rank=2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.head(self.norm(self.body(x)))


def test_nnx_parameters_that_are_not_selected_are_frozen_and_statistics_are_not():
    trained = nnx.Any(nnx.LoRAParam, nnx.PathContains("head"))
    adapter = ours_nnx.adapt(Adapted, square, trained=trained, frozen=lambda name: name == "head.bias")
    tree = describe(adapter.init(jax.random.key(0)), has_state=True, frozen=adapter.frozen)
    assert [leaf.name for leaf in tree.leaves] == [
        "body.lora.lora_a",
        "body.lora.lora_b",
        "head.kernel",
        "state/norm.mean",
        "state/norm.var",
    ]
    frozen = ["body.bias", "body.kernel", "head.bias", "norm.bias", "norm.scale"]
    assert [leaf.name for leaf in tree.frozen.leaves] == frozen
    settings = {name: value for name, value in adapter.items() if name != "evaluate"}
    result = backstay.train(**settings, batches=lambda key: BATCH, optimizer=optax.sgd(0.1), steps=3)
    before = adapter.init(jax.random.key(0))[0]
    assert np.array_equal(result.params["body"]["kernel"], before["body"]["kernel"])
    assert not np.array_equal(result.params["body"]["lora"]["lora_b"], before["body"]["lora"]["lora_b"])
    assert np.array_equal(adapter.model(result.params, result.state).body.kernel[...], before["body"]["kernel"])


def test_nnx_statistics_and_streams_in_the_place_of_a_filter_are_not_trained():
    """A filter by path selected them, too. Statistics stopped, and the count of a stream had no gradient."""

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.body = nnx.Linear(4, 8, rngs=rngs)
            self.head = nnx.Sequential(nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs))

        def __call__(self, x):
            return self.head(self.body(x))

    adapter = ours_nnx.adapt(Net, square, trained=nnx.PathContains("head"))
    tree = describe(adapter.init(jax.random.key(0)), has_state=adapter.has_state, frozen=adapter.frozen)
    names = [leaf.name.replace(".layers", "") for leaf in tree.leaves]
    assert names == ["head.0.bias", "head.0.scale", "state/head.0.mean", "state/head.0.var"]
    assert adapter.has_rng


def test_linen_and_equinox_freeze_by_names():
    settings = {"example": (BATCH[0],), "options": {"train": True}}
    linen = ours_linen.adapt(Norm(), square, **settings, frozen=lambda name: name.startswith("Dense_0"))
    tree = describe(linen.init(jax.random.key(0)), has_state=linen.has_state, frozen=linen["frozen"])
    assert [leaf.name for leaf in tree.frozen.leaves] == ["Dense_0.bias", "Dense_0.kernel"]
    whole = ours_equinox.adapt(lambda key: eqx.nn.MLP(4, 8, 8, 1, key=key), square)
    assert "frozen" not in whole
    part = ours_equinox.adapt(lambda key: eqx.nn.MLP(4, 8, 8, 1, key=key), square, frozen=lambda name: "bias" in name)
    tree = describe(part.init(jax.random.key(0)), frozen=part["frozen"])
    assert [leaf.name for leaf in tree.frozen.leaves] == ["layers.0.bias", "layers.1.bias"]


class Running(eqx.Module):
    layer: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key):
        self.layer = eqx.nn.Linear(4, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="ema")

    def __call__(self, x, state):
        return self.norm(self.layer(x), state)


def running(net, state, batch):
    x, y = batch
    out, new = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(x, state)
    return jnp.mean((out - y) ** 2), new


def in_training(net, batch):
    x, y = batch
    return jnp.mean((net(x, train=True) - y) ** 2)


@pytest.mark.parametrize("library", ["nnx", "linen", "equinox"])
def test_statistics_that_are_frozen_stay(library):
    """All of them; the first, and all others."""
    if library == "nnx":
        make = partial(ours_nnx.adapt, Adapted, square)
    elif library == "linen":
        make = partial(ours_linen.adapt, Norm(), in_training, example=(BATCH[0],), options={"train": False})
    else:
        make = partial(ours_equinox.adapt, eqx.nn.make_with_state(Running), running)
    settings = {"batches": lambda key: BATCH, "optimizer": optax.sgd(0.1), "steps": 2}
    pair = make(frozen_state=True).init(jax.random.key(0))
    tree = describe(pair, has_state=True, frozen_state=make(frozen_state=True).frozen_state)
    names = [leaf.path for leaf in tree.frozen_state.leaves]
    assert names == [leaf.path for leaf in describe(pair, has_state=True).state.leaves]
    for still in (names[:1], names[1:]):
        after = backstay.train(**make(frozen_state=still.__contains__), **settings).state
        assert jax.tree.structure(after) == jax.tree.structure(pair[1])
        same = map(np.array_equal, *map(jax.tree.leaves, (after, pair[1])))
        assert list(same) == [name in still for name in names]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours_nnx.adapt(3, square), "make is int: must be a function"),
        (lambda: ours_nnx.adapt(Shared, None), "loss is NoneType: must be a function"),
        (lambda: ours_nnx.adapt(lambda rngs: 3, square), "make returned"),
        (lambda: ours_nnx.adapt(Shared, square, trained=nnx.LoRAParam), "no variables that"),
        (lambda: ours_linen.adapt(3, square, example=()), "must be a flax.linen.Module"),
        (lambda: ours_linen.adapt(Norm(), square, example=(), rngs="dropout"), "must be a sequence of names"),
        (lambda: ours_equinox.adapt(lambda key: jax.nn.relu, square), "nothing can be trained"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_loss_that_returns_something_else_is_named():
    adapter = ours_nnx.adapt(Shared, lambda net, batch: (jnp.float32(1), 3))
    with pytest.raises(ConfigurationError, match=r"loss returned a tuple of .*int: must be a scalar"):
        one_step(adapter)


def test_a_checkpoint_of_an_adapted_model_needs_no_example_tree():
    """Parameters and state are plain dicts, so `backstay.load` makes them again by itself."""
    from backstay._checkpoint import describe_structure

    for adapter in (ours_nnx.adapt(Shared, square), ours_equinox.adapt(Tied, square)):
        assert '"other"' not in str(describe_structure(adapter.init(jax.random.key(0)))).replace("'", '"')
    assert backstay.Checkpoint.__dataclass_fields__["state"].default is None
