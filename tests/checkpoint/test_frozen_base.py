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
from backstay._checkpoint import fix
from backstay._checkpoint.__main__ import main
from backstay._checkpoint._formats._arrays import TensorReader
from backstay._update import enable_x64
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


def is_base(name):
    return name.startswith("base.")


def is_a(name):
    return name == "a"


@pytest.mark.parametrize(
    ("frozen", "still", "begin"),
    [(None, True, False), (is_base, is_a, False), (None, is_a, True), (is_base, True, True)],  # each pair of two
)
def test_frozen_model_state_is_not_in_a_checkpoint(tmp_path, frozen, still, begin):
    """With the base, the model is whole again: read, exported, and as the beginning of another job."""

    def pair(key):
        return {"base": {"w": init(key)["base"]["w"]}, "head": (jnp.ones(4),)}, {"a": jnp.ones(3), "b": jnp.zeros(2)}

    def with_state(params, state, batch):
        error = jnp.mean((batch @ params["base"]["w"] @ params["head"][0]) ** 2) * state["a"][0]
        return error, {"a": state["a"] + 1, "b": state["b"] + 1}

    place = tmp_path / "model.safetensors"
    arrays = {"base.w": np.eye(4, dtype=np.float32), "head.0": np.ones(4, np.float32)}
    safetensors.numpy.save_file(
        arrays | {"state/a": np.full(3, 0.5, np.float32), "state/b": np.zeros(2, np.float32)}, place
    )
    of_both = {"init": pair, "loss": with_state, "has_state": True}
    arguments = of_both | {"frozen": frozen, "frozen_state": still}
    if begin:
        arguments["start_from"] = str(place)
    result, stored = trained(tmp_path, **arguments)
    first = result.params, result.state
    assert result.state["a"][0] == (0.5 if begin else 1)
    assert result.state["b"][0] == (0 if still is True else 2)
    alone = backstay.load(stored)
    assert alone.state["a"] is None
    assert (alone.state["b"] is None) == (still is True)
    assert (alone.params["base"]["w"] is None) == (frozen is not None)
    base = True if begin else pair(jax.random.key(0))
    whole = backstay.load(stored, base=base)
    assert_equal((whole.params, whole.state), first)
    assert_equal(whole.average, result.average)
    found = backstay.load(stored, like=first, base=base)
    assert_equal((found.params, found.state), first)
    backstay.export(stored, str(tmp_path / "whole.safetensors"), base=base)
    assert {"state/a", "state/b"} < set(safetensors.numpy.load_file(tmp_path / "whole.safetensors"))
    backstay.export(stored, str(tmp_path / "orbax"), "orbax", base=base)
    for start in (str(tmp_path / "whole.safetensors"), str(tmp_path / "orbax"), stored):
        again = of_both | {"start_from": start, "checkpoint": None, "steps": 0, "frozen": False}
        if not begin and start == stored:
            again["start_from"] = backstay.StartFrom(stored, base=str(tmp_path / "whole.safetensors"))
        made, _ = trained(tmp_path, **again)
        assert_equal((made.params, made.state), first)
    safetensors.numpy.save_file(arrays, tmp_path / "without.safetensors")
    without = arguments | {"start_from": str(tmp_path / "without.safetensors"), "checkpoint": None}
    with pytest.raises(CheckpointError, match=r"missing \(\d\): state/a"):
        trained(tmp_path, **without)
    with pytest.raises(CheckpointError, match=r"state/a was frozen beside it, and is not frozen now"):
        trained(tmp_path, **of_both | {"frozen": frozen, "steps": 3})
    more = arguments | {"init": lambda key: (pair(key)[0], {"a": jnp.full(3, 7.0), "b": jnp.zeros(2)})}
    if begin:
        more["start_from"] = str(tmp_path / "other.safetensors")
        other = {"state/a": np.full(3, 7, np.float32), "state/b": np.zeros(2, np.float32)}
        safetensors.numpy.save_file(arrays | other, more["start_from"])
    with pytest.raises(CheckpointError, match=r"state/a \(1 of \d leaves differ"):
        trained(tmp_path, **more | {"steps": 3})
    continued, _ = trained(tmp_path, **arguments | {"steps": 3})
    assert continued.step == 3
    assert continued.state["a"][0] == first[1]["a"][0]


@pytest.mark.parametrize("still", [0.9, np.zeros(3), np.float64(1), np.arange(3), 7])
def test_numbers_of_python_and_numpy_are_frozen_as_jax_holds_them(tmp_path, still):
    """The digest was that of float64 or int64, which no file and no result of training has."""

    def pair(key):
        return {"w": jnp.ones(3)}, {"still": still, "count": jnp.int32(0)}

    def with_state(params, state, batch):
        return jnp.mean((params["w"] - state["still"]) ** 2), state | {"count": state["count"] + 1}

    arguments = {"init": pair, "loss": with_state, "has_state": True, "frozen": None}
    arguments |= {"frozen_state": lambda name: name == "still"}
    result, stored = trained(tmp_path, **arguments)
    for base in (pair(jax.random.key(0)), (result.params, result.state)):
        whole = backstay.load(stored, base=base)
        assert_equal((whole.params, whole.state), (result.params, result.state))
    backstay.export(stored, str(tmp_path / "whole.safetensors"), base=pair(None))
    assert_equal(backstay.load(stored, base=tmp_path / "whole.safetensors").state, result.state)
    start = str(tmp_path / "whole.safetensors")
    assert trained(tmp_path, **arguments, start_from=start, steps=3)[0].state["count"] == 3


def test_a_base_of_init_that_another_model_lacks_is_unexpected(tmp_path):
    """The same applies to a base in a file."""
    _, stored = trained(tmp_path)
    head = {"init": lambda key: {"head": (jnp.ones(4),)}, "loss": lambda params, batch: params["head"][0].sum()}
    with pytest.raises(CheckpointError, match=r"unexpected \(2\): base.codes, base.w"):
        trained(tmp_path, **head, frozen=None, start_from=stored, checkpoint=None)
    start = backstay.StartFrom(stored, unexpected="ignore")
    assert trained(tmp_path, **head, frozen=None, start_from=start, checkpoint=None)[0].step == 2


def test_a_base_of_float64_is_given_as_it_is(tmp_path):
    """The process that reads it may hold float32 only."""
    wide = np.full((4, 4), 1 / 3)
    with enable_x64():
        changed = {"init": lambda key: init(key) | {"base": {"w": jnp.asarray(wide), "codes": jnp.asarray(CODES)}}}
        _, stored = trained(tmp_path, **changed)
    found = backstay.load(stored, base=init(jax.random.key(0)) | {"base": {"w": wide, "codes": CODES}})
    assert_equal(found.params["base"], {"w": wide, "codes": CODES})


@pytest.mark.parametrize("frozen", [None, lambda name: name == "base"])
def test_a_part_of_the_state_in_a_file_is_not_enough(tmp_path, frozen):
    def pair(key):
        return {"w": jnp.ones(3), "base": jnp.ones(3)}, {"a": jnp.zeros(3), "b": jnp.zeros(3)}

    def with_state(params, state, batch):
        return jnp.mean((params["w"] * params["base"] - state["a"]) ** 2), state

    params = {"w": np.ones(3, np.float32), "base": np.ones(3, np.float32)}
    arguments = {"init": pair, "loss": with_state, "has_state": True, "frozen": frozen, "steps": 1}
    for number, (here, missing) in enumerate([("a", "b"), ("b", "a")]):
        place = str(tmp_path / f"{here}.safetensors")
        safetensors.numpy.save_file(params | {f"state/{here}": np.ones(3, np.float32)}, place)
        for still in (None, lambda name: name == "a"):
            with pytest.raises(CheckpointError, match=rf"missing \(1\): state/{missing}"):
                trained(tmp_path, **arguments, start_from=place, frozen_state=still, checkpoint=None)
        start = backstay.StartFrom(place, missing="init")
        found, _ = trained(tmp_path / str(number), **arguments, start_from=start, frozen_state=lambda name: name == "a")
        assert float(found.state[here][0]) == 1


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
    text = r"base.w, whose array in .*model.safetensors is not there. .* a mapping that changes arrays, give it"
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
    with pytest.raises(CheckpointError, match=r"base.w, whose array in .*model.safetensors differs"):
        backstay.load(stored, base=True)
    assert main(stored, str(tmp_path / "no.safetensors"), "safetensors", str(tmp_path / "absent")) == 1
    assert "error: " in capsys.readouterr().err


def test_other_files_beside_a_base_do_not_change_it(tmp_path):
    """A README in the folder of a base, or checkpoints below it, ended the job with the next death of a
    worker."""
    base = {"base.w": np.eye(4, dtype=np.float32), "base.codes": CODES, "head.0": np.ones(4, np.float32)}
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors.numpy.save_file(base, folder / "a.safetensors")
    fixed = fix(str(folder))
    stored = str(folder / "tuned")
    result, _ = trained(tmp_path, start_from=str(folder), checkpoint=stored)
    (folder / "README.md").write_text("about the model")
    assert fix(str(folder)) == fixed
    assert_equal(backstay.load(stored, base=True).params, result.params)
    safetensors.numpy.save_file({"other": CODES}, folder / "b.safetensors")
    assert fix(str(folder)) != fixed, "its tensors are read"
    assert_equal(backstay.load(stored, base=True).params, result.params)


def test_a_base_that_init_made_is_given_as_a_tree(tmp_path):
    result, stored = trained(tmp_path, seed=7)
    assert_equal(backstay.load(stored, base=init(jax.random.key(7))).params, result.params)
    with pytest.raises(CheckpointError, match=r"are the result of init: .* base=init\(jax.random.key\(7\)\)"):
        backstay.load(stored, base=True)
    with pytest.raises(CheckpointError, match=r"base.w .1 of 2 arrays differ"):
        backstay.load(stored, base=init(jax.random.key(8)))
    with pytest.raises(CheckpointError, match=r"`base` has 1 arrays, and the whole model of .* has 3: must be"):
        backstay.load(stored, base={"w": 1})
    wide = init(jax.random.key(7)) | {"base": {"w": np.ones((4, 4), np.float16), "codes": CODES}}
    with pytest.raises(CheckpointError, match=r"`base` has float16\[4, 4\] at base.w: must be float32\[4, 4\]"):
        backstay.load(stored, base=wide)


def test_a_base_that_init_made_beside_a_model_state_is_what_init_returns(tmp_path):
    def with_state(key):
        return init(key), {"mean": jnp.zeros(3)}

    def loss_of(params, state, batch):
        return loss(params, batch), {"mean": state["mean"] + 1}

    result, stored = trained(tmp_path, init=with_state, loss=loss_of, has_state=True)
    for base in (with_state(jax.random.key(0)), with_state(jax.random.key(0))[0]):
        assert_equal(backstay.load(stored, base=base).params, result.params)


def test_a_checkpoint_without_frozen_parameters_has_no_base(tmp_path):
    _, stored = trained(
        tmp_path, frozen=None, init=lambda key: {"w": jnp.ones((4, 1))}, loss=lambda p, b: (b @ p["w"]).sum()
    )
    with pytest.raises(CheckpointError, match="has no frozen arrays: leave `base` out"):
        backstay.load(stored, base=True)


def unfrozen(tmp_path, start, **changes):
    """Returns the parameters of a run that also trains the base, except its codes."""
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
    with pytest.raises(CheckpointError, match=r"the frozen arrays of .* are the result of init: give it as"):
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
    with pytest.raises(
        CheckpointError,
        match=r"frozen base.codes, whose array in .* is not there. If init made it, give the result of init as",
    ):
        backstay.load(stored, base=start)
    with pytest.raises(CheckpointError, match=r"init now makes others: base.codes"):
        unfrozen(tmp_path, stored, init=lambda key: jax.tree.map(lambda leaf: leaf * 0, init(key)))


def reads(monkeypatch):
    """Returns the names of the tensors that are read, in order."""
    found, read = [], TensorReader.__call__
    monkeypatch.setattr(
        TensorReader, "__call__", lambda tensor: (found.append(tensor.what.split("'")[1]), read(tensor))[1]
    )
    return found


def of_eight(place, names):
    """Returns a model with eight frozen arrays, from a file with these names and two others."""
    rng = np.random.default_rng(0)
    arrays = {f"w{number}": rng.normal(size=(3, 3)).astype(np.float32) for number in range(8)}
    others = {"large": np.zeros((50, 50), np.float32), "x": np.zeros((3, 3), np.int32)}
    stored = {names[number]: array for number, array in enumerate(arrays.values())} | others
    safetensors.numpy.save_file(stored, place)
    return arrays


@pytest.mark.parametrize(("names", "most"), [("w{}", 8), ("other.{}", 9)])
def test_a_base_is_read_once(tmp_path, monkeypatch, names, most):
    """Also under other names, and without arrays of other shapes."""
    names = [names.format(number) for number in range(8)]
    arrays = of_eight(tmp_path / "base.safetensors", names)
    start = backstay.StartFrom(
        str(tmp_path / "base.safetensors"),
        mapping=lambda name, found: names[int(name[1:])] if name in arrays else None,
        missing="init",
        unexpected="ignore",
    )
    _, stored = trained(
        tmp_path,
        init=lambda key: {name: jnp.zeros((3, 3)) for name in arrays} | {"head": jnp.ones(3)},
        loss=lambda params, batch: jnp.sum((sum(params[name] for name in arrays) @ params["head"]) ** 2),
        frozen=lambda name: name != "head",
        start_from=start,
    )
    found = reads(monkeypatch)
    whole = backstay.load(stored, base=True).params
    assert len(found) <= most
    assert "large" not in found
    for name, array in arrays.items():
        np.testing.assert_array_equal(whole[name], array)


def test_an_array_that_changes_while_a_base_is_read_is_refused(base, tmp_path, monkeypatch):
    """The digest of an array that is found under another name is compared with what is returned."""
    place, arrays = base
    (place / "1.safetensors").unlink()  # the names have the other order: the first search reads both
    safetensors.numpy.save_file({"b": arrays["w"], "c": arrays["w"] * 2}, place / "0.safetensors")
    init_two = {"x": jnp.zeros((4, 4)), "y": jnp.zeros((4, 4)), "head": jnp.ones(4)}
    start = backstay.StartFrom(
        str(place), mapping=lambda name, found: {"x": "c", "y": "b"}.get(name), missing="init", unexpected="ignore"
    )
    _, stored = trained(
        tmp_path,
        init=lambda key: init_two,
        loss=lambda params, batch: jnp.sum((batch @ (params["x"] + params["y"]) @ params["head"]) ** 2),
        frozen=lambda name: name != "head",
        start_from=start,
    )
    read, count = TensorReader.__call__, iter(range(100))

    def torn(tensor):
        array = read(tensor)
        return array + 1 if next(count) >= 2 else array

    monkeypatch.setattr(TensorReader, "__call__", torn)
    with pytest.raises(CheckpointError, match=r"b in .* was changed while it was read"):
        backstay.load(stored, base=True)


@pytest.mark.parametrize("by_init", [True, False])
def test_a_mapping_that_computes_with_an_array_of_init_is_refused(base, tmp_path, by_init):
    """For example, the merge of adapters into a base would silently return the base alone."""
    _, arrays = base
    whole = {"base.w": arrays["w"], "base.codes": arrays["codes"], "head.0": np.ones(4, np.float32)}
    safetensors.numpy.save_file(whole, tmp_path / "model.safetensors")
    _, stored = trained(tmp_path, **({} if by_init else {"start_from": str(tmp_path / "model.safetensors")}))

    def merge(name, found):
        return found["base.w"] + found["head.0"] if name == "base.w" else name

    start = backstay.StartFrom(stored, mapping=merge, unexpected="ignore")
    if by_init:
        with pytest.raises(CheckpointError, match=r"the mapping computes base.w from base.w, which has no array: init"):
            unfrozen(tmp_path, start)
    else:
        head = backstay.load(stored).params["head"][0]
        np.testing.assert_array_equal(unfrozen(tmp_path, start)["base"]["w"], arrays["w"] + head)
    kept = backstay.StartFrom(stored, mapping=lambda name, found: name)
    assert_equal(
        unfrozen(tmp_path, kept), trained(tmp_path / "same", start_from=stored, steps=0, checkpoint=None)[0].params
    )


PARTS = {
    "another shape": ({"base.w": np.ones((2, 2), np.float32), "base.codes": CODES}, {"shapes": "init"}),
    "another array of this name": (
        {"base.w": np.ones((4, 4), np.float32), "base.codes": CODES},
        {"mapping": lambda name, found: None if name == "base.w" else name, "unexpected": "ignore"},
    ),
    "only what trains": ({"head.0": np.ones(4, np.float32)}, {}),
    "changed by the mapping": (
        {"codes": CODES},
        {"mapping": lambda name, found: found["codes"][::-1] if name == "base.codes" else None, "unexpected": "ignore"},
    ),
}


@pytest.mark.parametrize("part", PARTS)
def test_what_init_made_of_a_base_is_made_again(tmp_path, part):
    """The file has no array for it, or another one."""
    tensors, settings = PARTS[part]
    safetensors.numpy.save_file(tensors, tmp_path / "part.safetensors")
    start = backstay.StartFrom(str(tmp_path / "part.safetensors"), missing="init", **settings)
    result, stored = trained(tmp_path, start_from=start)
    again = backstay.StartFrom(stored, base=start) if part == "changed by the mapping" else stored
    assert_equal(unfrozen(tmp_path, again), result.params)
    with pytest.raises(CheckpointError, match="If init made it, give the result of init as `base`"):
        backstay.load(stored, base=True)
    with pytest.raises(CheckpointError, match=r"init now makes others: base.*Use the same init and seed"):
        unfrozen(tmp_path, again, init=lambda key: jax.tree.map(lambda leaf: leaf * 0, init(key)))


def test_a_damaged_base_is_reported_as_damaged(tmp_path):
    """The job has translated its names, so the search reads all arrays."""

    def product(params, batch):
        return jnp.sum(batch @ next(value for name, value in params.items() if name != "head") @ params["head"])

    model = {"w": jnp.eye(4), "head": jnp.ones(4)}
    _, first = trained(tmp_path, init=lambda key: model, loss=product, frozen=None, average=None)
    renamed = backstay.StartFrom(first, mapping=lambda name, found: {"other": "w"}.get(name, name))
    settings = {"frozen": lambda name: name == "other", "checkpoint": str(tmp_path / "second")}
    model = {"other": jnp.eye(4), "head": jnp.ones(4)}
    trained(tmp_path, init=lambda key: model, loss=product, start_from=renamed, **settings)
    for shard in (tmp_path / "stored").glob("*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged: its SHA-256 is not the manifest"):
        backstay.load(str(tmp_path / "second"), base=True)


def test_a_place_that_was_relative_is_named(tmp_path, monkeypatch):
    model = {"base.w": np.eye(4, dtype=np.float32), "base.codes": CODES, "head.0": np.ones(4, np.float32)}
    safetensors.numpy.save_file(model, tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    result, stored = trained(tmp_path, start_from="model.safetensors")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="The job named this place relative to its folder: give it as `base`"):
        backstay.load(stored, base=True)
    assert_equal(backstay.load(stored, base=tmp_path / "model.safetensors").params, result.params)


def test_a_dtype_that_safetensors_lacks_is_named(tmp_path):
    small = {"base": {"w": jnp.eye(4), "codes": jnp.arange(8, dtype=jnp.int4)}, "head": (jnp.ones(4),)}
    _, stored = trained(tmp_path, init=lambda key: small, loss=lambda p, b: jnp.sum(b @ p["base"]["w"] @ p["head"][0]))
    with pytest.raises(CheckpointError, match=r"safetensors has no dtype int4, that of base\.codes"):
        backstay.export(stored, str(tmp_path / "all.safetensors"), base=small)
    assert not (tmp_path / "all.safetensors").exists()
    backstay.export(stored, str(tmp_path / "orbax"), "orbax", base=small)
    assert backstay.load(stored, base=small).params["base"]["codes"].dtype.name == "int4"


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
