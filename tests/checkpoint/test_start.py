"""No array is lost or reshaped silently when initial parameters are read by name from another place, and exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from between import LONG
from typer.testing import CliRunner

import backstay
from backstay import StartFrom
from backstay._checkpoint import CheckpointStore, Manifest, fix, read_start
from backstay._checkpoint._formats import _export as exporting
from backstay._update import describe
from backstay.errors import CheckpointError, ConfigurationError, StorageError
from backstay_cli.export import export_checkpoint
from backstay_cli.main import app

Write = Callable[..., Manifest]
TREE = {
    "dense": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3), "bias": np.ones(3, np.float32)},
    "out": [np.full(2, 7, np.float32), (np.asarray(3, np.float32),)],
}
NAMED = {"dense.bias": TREE["dense"]["bias"], "dense.kernel": TREE["dense"]["kernel"], "out.0": TREE["out"][0]}
NAMED |= {"out.1.0": TREE["out"][1][0]}


class Refuses(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A file system whose listing fails."""

    error: Exception = ValueError("Repository id must be 'namespace/name'")

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        raise self.error


fsspec.register_implementation("refuses", Refuses, clobber=True)


def init(key: Any) -> Any:
    return jax.tree.map(lambda leaf: jnp.full(leaf.shape, -1.0, leaf.dtype), TREE)


def started(start: StartFrom | str, **more: Any) -> Any:
    """Returns the parameters that training begins with."""
    arguments: dict[str, Any] = {"init": init, "loss": lambda params, batch: 0.0, "batches": lambda key: np.zeros(1)}
    return backstay.train(**{**arguments, "optimizer": optax.sgd(1.0), "steps": 0, "start_from": start, **more}).params


def equal(one: Any, other: Any) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for mine, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(mine, theirs)
        assert mine.dtype == theirs.dtype


def store_orbax(path: Path, tree: Any) -> None:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)


@pytest.mark.parametrize("kind", ["folder", "manifest", "file", "files", "orbax", "orbax manager", "memory"])
def test_each_kind_of_place_gives_the_same_parameters(tmp_path: Path, write: Write, kind: str) -> None:
    place = f"{tmp_path}/place"
    match kind:
        case "folder" | "manifest":
            write(CheckpointStore(place), jax.tree.map(np.zeros_like, TREE), version=4)
            manifest = write(CheckpointStore(place), TREE, version=5, shards=2)
            place += f"/{manifest.name}" if kind == "manifest" else ""
        case "file":
            place += ".safetensors"
            safetensors.numpy.save_file(NAMED, place)
        case "files":
            Path(place).mkdir()
            for number, (name, array) in enumerate(NAMED.items()):
                safetensors.numpy.save_file({name: array}, f"{place}/model-{number}.safetensors")
        case "memory":
            place = f"memory://{tmp_path.name}/model.safetensors"
            fsspec.filesystem("memory").pipe_file(f"/{tmp_path.name}/model.safetensors", safetensors.numpy.save(NAMED))
        case "orbax":
            store_orbax(Path(place), TREE)
        case "orbax manager":
            with ocp.CheckpointManager(place) as manager:
                for step, tree in ((3, jax.tree.map(np.zeros_like, TREE)), (20, TREE)):
                    state = {"params": tree, "step": np.asarray(step)}
                    manager.save(step, args=ocp.args.StandardSave(state))
    equal(started(StartFrom(place)), TREE)


@pytest.mark.parametrize("missing", ["init", "error"])
def test_an_incomplete_download_is_refused(tmp_path: Path, missing: Any) -> None:
    """With the missing file's parameters as `init` returned them, half of the model would be random."""
    files = {name: f"model-{number}.safetensors" for number, name in enumerate(NAMED)}
    for name, file in files.items():
        safetensors.numpy.save_file({name: NAMED[name]}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    other = {name: f"model.fp16-{file}" for name, file in files.items()}
    (tmp_path / "model.fp16.safetensors.index.json").write_text(json.dumps({"weight_map": other}))
    equal(started(StartFrom(str(tmp_path), missing=missing)), TREE)
    safetensors.numpy.save_file({"of another save": NAMED["dense.bias"]}, tmp_path / files["dense.bias"])
    with pytest.raises(CheckpointError, match=r"index.json names 1 of \d tensors that are not in their files: dense"):
        started(StartFrom(str(tmp_path), missing=missing))
    (tmp_path / files["dense.kernel"]).unlink()
    with pytest.raises(CheckpointError, match=r"index.json names 1 of \d files that are not there: model-.*complete"):
        started(StartFrom(str(tmp_path), missing=missing))
    index.write_text(json.dumps({"weight_map": {"a": "./unet/model.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"names files in other folders, such as unet/model.safetensors"):
        started(StartFrom(str(tmp_path), missing=missing))
    index.write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index of safetensors files"):
        started(StartFrom(str(tmp_path), missing=missing))


def test_what_does_not_fit_is_listed_in_full(tmp_path: Path) -> None:
    place = f"{tmp_path}/model.safetensors"
    kernel = NAMED["dense.kernel"]
    found = {
        "dense.kernel": kernel.T,
        "out.0": np.zeros(2, np.int32),
        "head.weight": np.zeros(1),
        "out.1.0": np.ones(()),
    }
    safetensors.numpy.save_file({name: np.array(array, order="C") for name, array in found.items()}, place)
    with pytest.raises(CheckpointError) as caught:
        started(place)
    assert str(caught.value).splitlines()[1:5] == [
        "  missing (1): dense.bias",
        "  unexpected (1): head.weight",
        "  of another shape or kind (2): dense.kernel is [3, 2] in the file and [2, 3] in init, "
        "out.0 is int32 in the file and float32 in init",
        "  converted (1): out.1.0 from float64 to float32",
    ]
    assert "StartFrom(uri, mapping=...)" in str(caught.value)


STATE = {"norm": {"mean": np.arange(3, dtype=np.float32), "count": np.asarray(5, np.int32)}}


def with_state(start: StartFrom | str) -> Any:
    """Returns the parameters and the model state that training begins with."""
    result = backstay.train(
        init=lambda key: (init(key), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), STATE)),
        loss=lambda params, state, batch: (0.0, state),
        batches=lambda key: np.zeros(1),
        optimizer=optax.sgd(1.0),
        steps=0,
        has_state=True,
        start_from=start,
    )
    return result.params, result.state


def test_a_head_of_another_size_begins_as_init_returns_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{tmp_path}/model.safetensors"
    safetensors.numpy.save_file({**NAMED, "out.0": np.full(10, 7, np.float32)}, place)
    with pytest.raises(CheckpointError, match=r"out.0 is \[10\] in the file and \[2\] in init(.|\n)*shapes='init'"):
        started(StartFrom(place, missing="init", unexpected="ignore"))
    found = started(StartFrom(place, shapes="init"))
    equal(found, {**TREE, "out": [np.full(2, -1, np.float32), TREE["out"][1]]})
    said = capsys.readouterr().err
    assert "start_from: 3 of 4 parameters come from " in said
    assert "of another shape, which begin as init returns them (1): out.0 is [10] in the file and [2] in init" in said
    # Another kind of numbers is never replaced silently.
    safetensors.numpy.save_file({**NAMED, "out.0": np.zeros(2, np.int32)}, place)
    with pytest.raises(CheckpointError, match=r"out\.0 is int32 in the file"):
        started(StartFrom(place, shapes="init"))
    with pytest.raises(ConfigurationError, match="shapes is 'ignore': must be error or init"):
        StartFrom(place, shapes="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("out", "kind"), [("x.npz", "safetensors"), ("s3://b/x.PT", "safetensors"), ("x.safetensors", "orbax")]
)
def test_an_export_into_a_file_of_another_format_is_refused(
    tmp_path: Path, out: str, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """It made a folder of that name, and reported success."""
    place = out if "://" in out else f"{tmp_path}/{out}"
    with pytest.raises(ConfigurationError, match="must be a folder"):
        backstay.export("no-such-checkpoint", place, kind)  # type: ignore[arg-type]
    assert export_checkpoint("no-such-checkpoint", place, kind) == 2
    assert "must be a folder" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["ours", "safetensors", "orbax", "batch_stats"])
def test_a_model_state_comes_along(tmp_path: Path, write: Write, kind: str) -> None:
    store = CheckpointStore(f"{tmp_path}/ours")
    write(store, TREE, state=STATE, version=5, shards=2)
    place = f"{tmp_path}/place"
    match kind:
        case "ours":
            place = store.uri
        case "batch_stats":
            store_orbax(Path(place), {"params": TREE, "batch_stats": STATE, "opt_state": np.zeros(3)})
        case _:
            backstay.export(store.uri, place, kind)  # type: ignore[arg-type]
    params, state = with_state(place)
    equal(params, TREE)
    equal(state, STATE)


def test_a_model_state_that_is_not_there_begins_as_init_returns_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = f"{tmp_path}/model.safetensors"
    safetensors.numpy.save_file(NAMED, place)
    params, state = with_state(place)
    equal(params, TREE)
    assert not np.any(state["norm"]["mean"])
    said = "of the model state, which begins as init returns it (2): state/norm.count, state/norm.mean"
    assert said in capsys.readouterr().err
    safetensors.numpy.save_file(NAMED | {"state/norm.mean": STATE["norm"]["mean"]}, place)
    with pytest.raises(CheckpointError, match=r"missing \(1\): state/norm.count"):
        with_state(place)


def test_a_part_of_the_arrays_is_used_only_on_request(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = f"{tmp_path}/model.safetensors"
    safetensors.numpy.save_file({"dense.kernel": NAMED["dense.kernel"], "head": np.zeros(1)}, place)
    for refused in (
        StartFrom(place),
        StartFrom(place, missing="init"),
        StartFrom(place, unexpected="ignore"),
    ):
        with pytest.raises(CheckpointError, match="does not fit"):
            started(refused)
    params = started(StartFrom(place, missing="init", unexpected="ignore"))
    np.testing.assert_array_equal(params["dense"]["kernel"], NAMED["dense.kernel"])
    np.testing.assert_array_equal(params["dense"]["bias"], -np.ones(3))
    said = capsys.readouterr().err
    assert "1 of 4 parameters come from" in said
    assert "missing (3): dense.bias, out.0, out.1.0" in said
    assert "unexpected (1): head" in said


@pytest.mark.parametrize("mapping", [None, lambda name, arrays: None, lambda name, arrays: f"fixed.{name}"])
def test_a_start_from_nothing_is_an_error(tmp_path: Path, mapping: Any) -> None:
    """A random network was trained to the end, and one line of the log had "0 of 4 parameters"."""
    place = f"{tmp_path}/model.safetensors"
    safetensors.numpy.save_file({"gpt.kernel": np.zeros(3), "gpt.bias": np.zeros(1)}, place)
    start = StartFrom(place, mapping, missing="init", unexpected="ignore", shapes="init")
    with pytest.raises(CheckpointError) as refused:
        started(start)
    assert "no parameter of init has a value in" in str(refused.value)
    assert "The parameters (4): dense.bias, dense.kernel, out.0, out.1.0" in str(refused.value)
    assert "The arrays (2): gpt.bias, gpt.kernel" in str(refused.value)


def test_a_mapping_renames_transposes_and_stacks(tmp_path: Path) -> None:
    """Weights as another library stores them: other names, (out, in) kernels, one tensor for each layer."""
    place = f"{tmp_path}/model.safetensors"
    stored = {
        "model.dense.weight": np.ascontiguousarray(NAMED["dense.kernel"].T).astype(ml_dtypes.bfloat16),
        "model.dense.bias": NAMED["dense.bias"],
        "model.out.0": np.asarray(7, np.float32),
        "model.out.1": np.asarray(7, np.float32),
        "scale": NAMED["out.1.0"],
    }
    safetensors.numpy.save_file(stored, place)
    asked: list[str] = []

    def mapping(name: str, arrays: Mapping[str, Any]) -> Any:
        asked.append(name)
        match name:
            case "dense.kernel":
                return arrays["model.dense.weight"].T
            case "out.0":
                return np.stack([arrays[f"model.out.{index}"] for index in range(2)])
            case "out.1.0":
                return "scale"
            case _:
                return f"model.{name}"

    equal(started(StartFrom(place, mapping=mapping)), TREE)
    assert asked == list(NAMED)
    with pytest.raises(
        CheckpointError, match=r"missing \(4\): dense.bias \(the mapping looked up nothing.dense.bias\)"
    ):
        started(StartFrom(place, mapping=lambda name, arrays: f"nothing.{name}"))


def test_errors_about_places_and_options_name_what_would_be_valid(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="is not a checkpoint of Backstay, a safetensors file, a folder of them or"
    ):
        started(str(tmp_path))
    (tmp_path / "x.safetensors").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"x\.safetensors is not a safetensors file"):
        started(str(tmp_path))
    (tmp_path / "x.npz").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"x\.npz is a file of another kind: must be a manifest"):
        started(str(tmp_path / "x.npz"))
    with pytest.raises(ConfigurationError, match="missing is 'keep': must be error or init"):
        StartFrom("x", missing="keep")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="mapping is dict: must be a function"):
        StartFrom("x", mapping={})  # type: ignore[arg-type]
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in "ab":
        safetensors.numpy.save_file({"t": np.zeros(1)}, twice / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"the tensor 't' is in .*a.safetensors and in .*b.safetensors"):
        started(str(twice))


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("refuses://x", "Repository id must be 'namespace/name'"),
        ("data://x", "NotImplementedError"),
        ("reference://x", "missing 1 required"),
        ("nope://a", "Protocol not known"),
    ],
)
def test_t8_a_uri_that_can_never_be_read_is_refused_immediately(uri: str, why: str) -> None:
    """`StorageError` is tried again for a minute."""
    with pytest.raises(CheckpointError, match=why) as refused:
        fix(uri)
    assert not isinstance(refused.value, StorageError)


@pytest.mark.parametrize("error", [OSError("away"), json.JSONDecodeError("not JSON", "<html>", 0)])
def test_t8_a_storage_that_fails_is_tried_again(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refuses, "error", error)
    with pytest.raises(StorageError):
        fix("refuses://x")


def test_t8_only_files_are_read(tmp_path: Path) -> None:
    """Reading a pipe never ends; links to folders may be loops. A link to a file is a file."""
    (tmp_path / "elsewhere").mkdir()
    safetensors.numpy.save_file(NAMED, tmp_path / "elsewhere" / "blob")
    place = tmp_path / "place"
    place.mkdir()
    (place / "model.safetensors").symlink_to(tmp_path / "elsewhere" / "blob")
    (place / "loop").symlink_to(place)
    (place / "itself").symlink_to(place / "itself")
    os.mkfifo(place / "pipe.safetensors")
    equal(started(str(place)), TREE)


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_values_that_a_narrower_dtype_cannot_hold_are_refused(tmp_path: Path, value: float) -> None:
    place = f"{tmp_path}/model.safetensors"
    wide = {name: np.asarray(array, np.float64).copy() for name, array in NAMED.items()}
    wide["dense.bias"][1] = value
    safetensors.numpy.save_file(wide, place)
    with pytest.raises(CheckpointError, match=r"dense\.bias has values in float64 that float32 cannot hold"):
        started(place)


def test_an_orbax_checkpoint_with_a_torn_file_is_refused(tmp_path: Path) -> None:
    store_orbax(tmp_path / "place", TREE)
    torn = tmp_path / "place" / "_METADATA"
    torn.write_bytes(torn.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="as an Orbax checkpoint: files are missing or damaged"):
        started(str(tmp_path / "place"))


def test_t6_a_place_that_changes_while_a_job_begins_is_refused(tmp_path: Path, write: Write) -> None:
    """All servers read what the first server found; a newer checkpoint of another job does not count."""
    leaves = describe(TREE).leaves
    file = f"{tmp_path}/model.safetensors"
    safetensors.numpy.save_file(NAMED, file)
    fixed = fix(file)
    safetensors.numpy.save_file(NAMED | {"out.0": np.zeros(2, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"has changed .* since the job began"):
        read_start(StartFrom(file), fixed, leaves)
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, TREE, version=5)
    fixed = fix(store.uri)
    write(store, jax.tree.map(np.zeros_like, TREE), version=6)
    values = read_start(StartFrom(store.uri), fixed, leaves).values
    equal(values, list(NAMED.values()))


@pytest.mark.parametrize("mapping", [None, lambda name, arrays: arrays[name]], ids=["by name", "mapping"])
def test_a_server_keeps_the_arrays_that_it_needs(tmp_path: Path, mapping: Any) -> None:
    """The others are looked for and compared too, so each server refuses the same files, and reports the same."""
    leaves, file = describe(TREE).leaves, str(tmp_path / "m.safetensors")
    safetensors.numpy.save_file(NAMED, file)
    kept = read_start(StartFrom(file, mapping=mapping), fix(file), leaves, needed={1}).values
    assert [isinstance(value, jax.ShapeDtypeStruct) for value in kept] == [True, False, True, True]
    np.testing.assert_array_equal(kept[1], NAMED["dense.kernel"])
    assert [(value.shape, value.dtype) for value in kept] == [(leaf.shape, leaf.dtype) for leaf in leaves]
    safetensors.numpy.save_file({**NAMED, "out.0": np.zeros(3, np.float32)}, file)
    with pytest.raises(CheckpointError, match=r"of another shape or kind \(1\): out.0"):
        read_start(StartFrom(file, mapping=mapping), fix(file), leaves, needed={1})


def test_exported_as_safetensors_and_started_from_again(
    tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, TREE, version=5, shards=2)
    done = backstay.export(store.uri, f"{tmp_path}/one.safetensors")
    assert (done.step, done.arrays, done.nbytes) == (5, 4, 48)
    equal(safetensors.numpy.load_file(tmp_path / "one.safetensors"), NAMED)
    monkeypatch.setattr(exporting, "MAX_FILE_BYTES", 24)
    backstay.export(store.uri, f"{tmp_path}/several")
    assert sorted(path.name for path in (tmp_path / "several").iterdir()) == [
        "model-00001-of-00003.safetensors",
        "model-00002-of-00003.safetensors",
        "model-00003-of-00003.safetensors",
        "model.safetensors.index.json",
    ]
    equal(started(f"{tmp_path}/several"), TREE)
    with pytest.raises(CheckpointError, match="is not empty, and is not replaced"):
        backstay.export(store.uri, f"{tmp_path}/several")
    with pytest.raises(CheckpointError, match=r"one\.safetensors exists, and is not replaced"):
        backstay.export(store.uri, f"{tmp_path}/one.safetensors")
    with pytest.raises(ConfigurationError, match="out is empty"):
        backstay.export(store.uri, "")
    with pytest.raises(ConfigurationError, match="format is 'onnx': must be safetensors or orbax"):
        backstay.export(store.uri, "x", "onnx")  # type: ignore[arg-type]


def test_t8_an_export_for_which_there_is_no_room_leaves_nothing_behind(tmp_path: Path, write: Write) -> None:
    """In a process whose files have a limit, and in a folder where none can be made."""
    wide = np.random.default_rng(0).random((200, 200), np.float32)
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, {"w": wide}, version=5)
    script = (
        "import resource, signal, sys, backstay\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "for place in sys.argv[2:]:\n"
        "    try:\n"
        "        backstay.export(sys.argv[1], place, 'orbax')\n"
        "    except backstay.errors.CheckpointError as error:\n"
        "        print(error)\n"
    )
    places = [f"{tmp_path}/out/orbax", f"{store.uri}/{next(iter(store.contents().manifests))}/orbax"]
    done = subprocess.run(
        [sys.executable, "-c", script, store.uri, *places], capture_output=True, text=True, timeout=LONG, check=True
    )
    assert [f"{place} cannot be written" in done.stdout for place in places] == [True, True], done.stdout
    assert list((tmp_path / "out").iterdir()) == []


def test_orbax_reads_what_the_command_exports(tmp_path: Path, write: Write) -> None:
    store = CheckpointStore(str(tmp_path / "ours"))
    write(store, TREE, version=5)
    out = tmp_path / "orbax"
    result = CliRunner().invoke(app, ["export", store.uri, str(out), "--format", "orbax"])
    assert result.exit_code == 0, result.output
    with ocp.StandardCheckpointer() as checkpointer:
        equal(checkpointer.restore(out, jax.tree.map(np.zeros_like, TREE)), TREE)
    equal(started(str(out)), TREE)
    with pytest.raises(CheckpointError, match="exists, and is not replaced"):
        backstay.export(store.uri, str(out), "orbax")
    with pytest.raises(CheckpointError, match="is not a checkpoint of Backstay, nor a folder with checkpoints"):
        backstay.export(str(out), str(tmp_path / "x"))
    refused = CliRunner().invoke(app, ["export", store.uri, str(out), "--format", "onnx"])
    assert refused.exit_code == 2
    assert "must be safetensors or orbax" in refused.output
