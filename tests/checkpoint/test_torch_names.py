"""Names and layouts of PyTorch: the same model from a file of it, and a file of it from a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy

import backstay
from backstay import StartFrom, TorchNames
from backstay._checkpoint import CheckpointStore, Manifest
from backstay.errors import CheckpointError, ConfigurationError

RNG = np.random.default_rng(3)
NAMES = TorchNames(rename=[(r"^base\.", "model."), (r"layers_(\d+)", r"layers.\1")])


def array(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


TORCH = {
    "model.layers.0.weight": array(5, 3),  # (outputs, inputs)
    "model.layers.0.bias": array(5),
    "model.conv.weight": array(4, 2, 3, 3),  # (outputs, inputs, height, width)
    "model.words.weight": array(7, 3),
    "model.norm.weight": array(5),
}
SHAPES = {
    "base": {
        "layers_0": {"kernel": (3, 5), "bias": (5,)},
        "conv": {"kernel": (3, 3, 2, 4)},
        "words": {"embedding": (7, 3)},
        "norm": {"scale": (5,)},
    }
}


def start(place: str, **more: Any) -> Any:
    arguments: dict[str, Any] = {
        "init": lambda key: jax.tree.map(jnp.zeros, SHAPES, is_leaf=lambda node: isinstance(node, tuple)),
        "loss": lambda params, batch: 0.0,
        "batches": lambda key: np.zeros(1),
    }
    from_there = StartFrom(place, mapping=NAMES, **more)
    return backstay.train(**arguments, optimizer=optax.sgd(1.0), steps=0, start_from=from_there).params


def test_a_layer_of_a_file_of_pytorch_computes_the_same(tmp_path: Path) -> None:
    safetensors.numpy.save_file(TORCH, file := str(tmp_path / "m.safetensors"))
    params = start(file)["base"]
    x = array(2, 3)
    linear = x @ TORCH["model.layers.0.weight"].T + TORCH["model.layers.0.bias"]
    np.testing.assert_allclose(x @ params["layers_0"]["kernel"] + params["layers_0"]["bias"], linear, rtol=1e-5)
    image = array(1, 2, 6, 6)
    filters = TORCH["model.conv.weight"]
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 3), (2, 3))
    of_torch = np.einsum("nchwij,ocij->nohw", windows, filters)
    found = jax.lax.conv_general_dilated(
        image.transpose(0, 2, 3, 1),
        params["conv"]["kernel"],
        (1, 1),
        "VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    np.testing.assert_allclose(np.transpose(found, (0, 3, 1, 2)), of_torch, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(params["words"]["embedding"], TORCH["model.words.weight"])
    np.testing.assert_array_equal(params["norm"]["scale"], TORCH["model.norm.weight"])


def test_what_the_file_lacks_is_named_and_may_begin_as_init_returns_it(tmp_path: Path) -> None:
    less = {name: value for name, value in TORCH.items() if "conv" not in name}
    safetensors.numpy.save_file(less, file := str(tmp_path / "m.safetensors"))
    with pytest.raises(CheckpointError, match=r"missing \(1\): base\.conv\.kernel"):
        start(file)
    assert not np.any(start(file, missing="init")["base"]["conv"]["kernel"])


def test_an_exported_checkpoint_is_the_file_again(tmp_path: Path, write: Callable[..., Manifest]) -> None:
    safetensors.numpy.save_file(TORCH, file := str(tmp_path / "m.safetensors"))
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, jax.tree.map(np.asarray, start(file)), version=5, shards=2)
    out = tmp_path / "again.safetensors"
    backstay.export(store.uri, str(out), translate=NAMES.exported)
    again = safetensors.numpy.load_file(out)
    assert again.keys() == TORCH.keys()
    for name, value in TORCH.items():
        np.testing.assert_array_equal(again[name], value)
    with safetensors.safe_open(out, "np") as opened:
        assert opened.metadata()["format"] == "pt"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("kernel", "weight"),
        ("a.scale", "a.weight"),
        ("a.kernel.b", "a.kernel.b"),
        ("mean", "mean"),
        ("state/norm.mean", "norm.running_mean"),
        ("state/norm.var", "norm.running_var"),
        ("state/count", "count"),
    ],
)
def test_names(name: str, found: str) -> None:
    assert TorchNames().name(name) == found


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_a_layout_there_and_back_is_the_same(shape: tuple[int, ...]) -> None:
    value = np.asarray(array(*shape))
    name, there = TorchNames().exported("a.kernel", value)
    back = TorchNames()("a.kernel", {name: there})
    np.testing.assert_array_equal(back, value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "rename", ["x", [("a",)], [("a", 3)], [1], ["ab"], {"a": "b"}, None, [("(", "")], [("a", r"\1")]]
)
def test_invalid_pairs_are_refused(rename: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^TorchNames: "):
        TorchNames(rename)


@pytest.mark.parametrize(
    ("translate", "says"),
    [
        (lambda name, value: name, "translate returned str for dense.bias: must be (name, array), or None"),
        (lambda name, value: None, "translate returned None for each array"),
        (
            lambda name, value: ("same", value),
            "translate gives the name same to dense.bias and to dense.kernel: return None",
        ),
    ],
)
def test_an_invalid_translation_writes_nothing(
    tmp_path: Path, write: Callable[..., Manifest], translate: Any, says: str
) -> None:
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, {"dense": {"kernel": array(2, 3), "bias": array(3)}}, version=5)
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        backstay.export(store.uri, str(tmp_path / "out"), translate=translate)
    with pytest.raises(ConfigurationError, match="translate is for format='safetensors'"):
        backstay.export(store.uri, str(tmp_path / "out"), "orbax", translate=translate)
    assert not (tmp_path / "out").exists()


def test_pairs_of_a_generator_are_used_each_time() -> None:
    names = TorchNames(rename=((old, new) for old, new in [("base", "model")]))
    assert [names.name("base.kernel"), names.name("base.bias")] == ["model.weight", "model.bias"]


@pytest.mark.parametrize("key", ["a.b", "ü/x", "p%41"])
def test_a_key_with_characters_that_are_escaped_is_found_in_both_ways(tmp_path: Path, key: str) -> None:
    kernel = array(5, 3)
    arguments: dict[str, Any] = {
        "loss": lambda params, batch: 0.0 * params[key]["kernel"].sum(),
        "batches": lambda _: np.zeros(1),
        "optimizer": optax.sgd(1.0),
    }
    store = f"{tmp_path}/store"
    backstay.train(init=lambda _: {key: {"kernel": jnp.asarray(kernel)}}, steps=1, checkpoint=store, **arguments)
    backstay.export(store, out := f"{tmp_path}/m.safetensors", translate=TorchNames().exported)
    found = safetensors.numpy.load_file(out)
    assert list(found) == [f"{key}.weight"]
    np.testing.assert_array_equal(found[f"{key}.weight"], kernel.T)
    started = backstay.train(
        init=lambda _: {key: {"kernel": jnp.zeros((5, 3))}},
        steps=0,
        start_from=StartFrom(out, mapping=TorchNames()),
        **arguments,
    )
    np.testing.assert_array_equal(started.params[key]["kernel"], kernel)


def test_one_of_two_tied_weights_is_left_out(tmp_path: Path, write: Callable[..., Manifest]) -> None:
    words = array(7, 3)
    store = CheckpointStore(f"{tmp_path}/store")
    write(store, {"words": {"embedding": words}, "head": {"kernel": words.T}}, version=1)

    def translate(name: str, value: Any) -> Any:
        return None if name == "head.kernel" else TorchNames().exported(name, value)

    backstay.export(store.uri, out := f"{tmp_path}/m.safetensors", translate=translate)
    assert list(safetensors.numpy.load_file(out)) == ["words.weight"]
