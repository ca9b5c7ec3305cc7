"""A checkpoint of a model with frozen parameters is made whole again with the arrays of its base, and no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy

import backstay
from backstay._checkpoint.__main__ import main
from backstay.errors import CheckpointError, ConfigurationError

CODES = np.arange(-4, 4, dtype=ml_dtypes.float8_e4m3fn)


def init(key):
    return {"base": {"w": jax.random.normal(key, (4, 4)), "codes": jnp.asarray(CODES)}, "head": (jnp.ones(4),)}


def loss(params, batch):
    return jnp.mean((batch @ params["base"]["w"] @ params["head"][0]) ** 2) + 0 * params["base"]["codes"][0].astype(
        float
    )


def mapping(name, arrays):
    return f"other.{name.removeprefix('base.')}" if name.startswith("base.") else None


@pytest.fixture
def base(tmp_path):
    place = tmp_path / "base"
    place.mkdir()
    arrays = {"w": np.eye(4, dtype=np.float32), "codes": np.full(8, 2.0, ml_dtypes.float8_e4m3fn)}
    for number, (name, array) in enumerate(arrays.items()):
        tensors = {f"other.{name}": array, f"unused.{number}": np.zeros(1, np.float32)}
        safetensors.numpy.save_file(tensors, place / f"{number}.safetensors")
    return place, arrays


def trained(tmp_path, **changes):
    arguments = {
        "init": init,
        "loss": loss,
        "batches": lambda key: np.ones((2, 4), np.float32),
        "optimizer": optax.sgd(0.1),
        "steps": 2,
        "frozen": lambda name: name.startswith("base."),
        "checkpoint": str(tmp_path / "stored"),
        "average": 0.5,
    }
    return backstay.train(**arguments | changes), str(tmp_path / "stored")


def assert_equal(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert (a.dtype, np.asarray(a).tobytes()) == (b.dtype, np.asarray(b).tobytes())


def test_a_base_in_several_files_under_other_names(base, tmp_path):
    """With the base, parameters and average are those of the run. Exports have the same arrays."""
    place, arrays = base
    start = backstay.StartFrom(str(place), mapping=mapping, missing="init", unexpected="ignore")
    result, stored = trained(tmp_path, start_from=start)
    assert_equal(result.params["base"], {"w": arrays["w"], "codes": arrays["codes"]})
    alone = backstay.load(stored)
    assert alone.params["base"] == {"w": None, "codes": None}
    assert (alone.frozen.start_from, len(alone.frozen.leaves)) == (str(place), 2)
    whole = backstay.load(stored, base=start)
    assert_equal(whole.params, result.params)
    assert_equal(whole.average, result.average)
    assert_equal(backstay.load(stored, base=result.params).params, result.params)
    assert_equal(backstay.load(stored, like=result.params, base=start).params, result.params)
    assert_equal(backstay.load(stored, base=True).params, result.params)
    for out, given in (("adapters", False), ("whole", start)):
        backstay.export(stored, str(tmp_path / f"{out}.safetensors"), base=given)
        backstay.export(stored, str(tmp_path / out), "orbax", base=given)
    assert sorted(safetensors.numpy.load_file(tmp_path / "adapters.safetensors")) == ["head.0"]
    with safetensors.safe_open(tmp_path / "whole.safetensors", framework="numpy") as found:
        assert sorted(found.keys()) == ["base.codes", "base.w", "head.0"]
        assert found.get_tensor("base.w").tobytes() == arrays["w"].tobytes()


def test_arrays_that_a_mapping_changes_need_it(tmp_path):
    """Others are found by their digests, under any names and in another dtype."""
    kernel = np.arange(16, dtype=np.float32).reshape(4, 4)
    place = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"kernel": kernel.T.copy(), "codes": CODES.astype(np.float32)}, place)

    def changes(name, arrays):
        return {"base.w": lambda: arrays["kernel"].T, "base.codes": lambda: "codes"}.get(name, lambda: None)()

    start = backstay.StartFrom(str(place), mapping=changes, missing="init")
    result, stored = trained(tmp_path, start_from=start)
    assert_equal(result.params["base"], {"w": kernel, "codes": CODES})
    assert_equal(backstay.load(stored, base=start).params, result.params)
    text = r"model.safetensors has no array for base.w. .* If the job had a mapping that changes arrays, give it"
    with pytest.raises(CheckpointError, match=text):
        backstay.load(stored, base=True)
    assert_equal(unfrozen(tmp_path, backstay.StartFrom(stored, base=start)), result.params)
    safetensors.numpy.save_file({"any": kernel, "more": CODES, "unused": kernel + 1}, tmp_path / "renamed.safetensors")
    assert_equal(backstay.load(stored, base=tmp_path / "renamed.safetensors").params, result.params)


def test_without_a_mapping_the_place_of_the_job_is_enough(tmp_path, capsys):
    first = {"base.w": np.eye(4, dtype=np.float32), "base.codes": CODES, "head.0": np.ones(4, np.float32)}
    place = tmp_path / "model.safetensors"
    safetensors.numpy.save_file(first, place)
    result, stored = trained(tmp_path, start_from=str(place))
    assert_equal(backstay.load(stored, base=True).params, result.params)
    assert main(stored, str(tmp_path / "out.safetensors"), "safetensors", "") == 0
    assert "exported step 2: 3 arrays" in capsys.readouterr().out
    assert main(stored, str(tmp_path / "part.safetensors"), "safetensors") == 0
    assert capsys.readouterr().out.endswith("; without 2 that were frozen (--whole adds them)\n")
    first["base.w"][0, 0] = 2
    safetensors.numpy.save_file(first, tmp_path / "other.safetensors")
    text = r"was trained beside a frozen base.w, whose array in .*other.safetensors differs"
    with pytest.raises(CheckpointError, match=text):
        backstay.load(stored, base=tmp_path / "other.safetensors")
    safetensors.numpy.save_file(first, place)
    with pytest.raises(CheckpointError, match="has changed"):
        backstay.load(stored, base=True)
    assert main(stored, str(tmp_path / "no.safetensors"), "safetensors", str(tmp_path / "absent")) == 1
    assert "error: " in capsys.readouterr().err


def test_a_base_that_init_made_is_given_as_a_tree(tmp_path):
    result, stored = trained(tmp_path, seed=7)
    assert_equal(backstay.load(stored, base=init(jax.random.key(7))).params, result.params)
    with pytest.raises(CheckpointError, match=r"are the result of init: .* base=init\(jax.random.key\(7\)\)"):
        backstay.load(stored, base=True)
    with pytest.raises(CheckpointError, match=r"base.w .1 of 2 arrays differ"):
        backstay.load(stored, base=init(jax.random.key(8)))
    with pytest.raises(CheckpointError, match=r"`base` has 1 arrays, and all parameters of .* are 3"):
        backstay.load(stored, base={"w": 1})
    wide = init(jax.random.key(7)) | {"base": {"w": np.ones((4, 4)), "codes": CODES}}
    with pytest.raises(CheckpointError, match=r"`base` has float64\[4, 4\] at base.w: must be float32\[4, 4\]"):
        backstay.load(stored, base=wide)


def test_a_checkpoint_without_frozen_parameters_has_no_base(tmp_path):
    _, stored = trained(
        tmp_path, frozen=None, init=lambda key: {"w": jnp.ones((4, 1))}, loss=lambda p, b: (b @ p["w"]).sum()
    )
    with pytest.raises(CheckpointError, match="has no frozen parameters: leave `base` out"):
        backstay.load(stored, base=True)


def unfrozen(tmp_path, start, **changes):
    """The parameters of a run that also trains the base, except its codes."""
    result, _ = trained(
        tmp_path,
        start_from=start,
        steps=0,
        checkpoint=None,
        frozen=lambda name: name == "base.codes",
        **changes,
    )
    return result.params


@pytest.mark.parametrize("mapped", [False, True])
def test_a_run_that_starts_from_it_reads_the_base_too(base, tmp_path, mapped):
    place, arrays = base
    if mapped:
        first = backstay.StartFrom(str(place), mapping=mapping, missing="init", unexpected="ignore")
    else:
        all_of_it = {"base.w": arrays["w"], "base.codes": arrays["codes"], "head.0": np.ones(4, np.float32)}
        safetensors.numpy.save_file(all_of_it, tmp_path / "model.safetensors")
        first = backstay.StartFrom(str(tmp_path / "model.safetensors"))
    result, stored = trained(tmp_path, start_from=first)
    for start in (stored, backstay.StartFrom(stored, base=first)):
        assert_equal(unfrozen(tmp_path, start), result.params)
    # And once more, from a checkpoint whose base is that of another checkpoint.
    _, again = trained(tmp_path, start_from=start, checkpoint=str(tmp_path / "again"))
    assert_equal(unfrozen(tmp_path, again), backstay.load(again, base=True).params)
    safetensors.numpy.save_file({"other.w": arrays["w"] + 1}, place / "0.safetensors")
    safetensors.numpy.save_file({"other.w": arrays["w"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has changed|is not there|differs"):
        unfrozen(tmp_path, start)


def test_a_run_that_starts_from_it_makes_the_base_of_init_again(tmp_path):
    result, stored = trained(tmp_path, seed=7)
    assert_equal(unfrozen(tmp_path, stored, seed=7), result.params)
    again = str(tmp_path / "again")
    middle, _ = trained(tmp_path, seed=7, start_from=stored, checkpoint=again)
    assert_equal(unfrozen(tmp_path, again, seed=7), middle.params)
    assert_equal(unfrozen(tmp_path, backstay.StartFrom(again, base=stored), seed=7), middle.params)
    with pytest.raises(CheckpointError, match=r"the frozen parameters of .* are the result of init: give them as"):
        backstay.load(again, base=True)
    with pytest.raises(
        CheckpointError, match=r"init now makes others: base.w \(1 in all\). Use the same init and seed"
    ):
        unfrozen(tmp_path, stored, seed=8)


def test_a_base_that_is_partly_in_a_file_is_read_and_made_again(tmp_path):
    safetensors.numpy.save_file({"base.w": np.eye(4, dtype=np.float32)}, tmp_path / "part.safetensors")
    start = backstay.StartFrom(str(tmp_path / "part.safetensors"), missing="init")
    result, stored = trained(tmp_path, start_from=start)
    assert_equal(unfrozen(tmp_path, stored), result.params)
    with pytest.raises(CheckpointError, match=r"has no array for base.codes. If init made it, give all parameters as"):
        backstay.load(stored, base=start)
    with pytest.raises(CheckpointError, match=r"init now makes others: base.codes"):
        unfrozen(tmp_path, stored, init=lambda key: jax.tree.map(lambda leaf: leaf * 0, init(key)))


def test_one_array_of_an_orbax_checkpoint_may_begin_two_parameters(tmp_path):
    """A mapping may give it twice: only `init` must not."""
    pytest.importorskip("orbax.checkpoint")
    _, stored = trained(tmp_path, seed=7, frozen=None)
    backstay.export(stored, str(tmp_path / "orbax"), "orbax")
    twice = backstay.StartFrom(str(tmp_path / "orbax"), mapping=lambda name, arrays: "head.0", unexpected="ignore")
    result = backstay.train(
        init=lambda key: {"a": jnp.zeros(4), "b": jnp.zeros(4)},
        loss=lambda params, batch: jnp.sum(params["a"] * batch) - jnp.sum(params["b"] * batch),
        batches=lambda key: np.ones(4, np.float32),
        optimizer=optax.sgd(0.5),
        steps=1,
        start_from=twice,
    )
    head = backstay.load(stored).params["head"][0]
    np.testing.assert_array_equal(result.params["a"], head - np.float32(0.5))
    np.testing.assert_array_equal(result.params["b"], head + np.float32(0.5))


def test_the_place_of_a_base_must_be_one():
    with pytest.raises(ConfigurationError, match="base is dict: must be True, a path, a URI or a StartFrom"):
        backstay.StartFrom("x", base={"w": 1})
