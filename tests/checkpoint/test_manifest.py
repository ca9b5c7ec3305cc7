"""T7: after any damage on the disk, a manifest is either read as it was written, or refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._checkpoint import CheckpointStore, Manifest, load
from backstay._checkpoint._manifest import StateRecord
from backstay._checkpoint._names import parse_manifest, parse_shard
from backstay._checkpoint._seal import seal, unseal
from backstay._coordination import Coordinator, CoordinatorState, Rules
from backstay.errors import CheckpointError
from backstay_rpc.control_pb2 import GradientId, GradientInfo, Staged

Write = Callable[..., Manifest]
PARAMS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": [np.ones(2, np.float32)], "none": None}


@pytest.fixture(scope="module")
def text(write: Write, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("one")
    store = CheckpointStore(str(folder))
    manifest = write(store, PARAMS, version=5, shards=2, metrics={"accuracy": 0.5, "lost": float("nan")})
    return (folder / manifest.name).read_bytes()


def read(text: bytes) -> Manifest | None:
    """Returns the manifest in `text`; None when it is refused."""
    try:
        return Manifest.parse(text, "it")
    except CheckpointError:
        return None


def test_t7_it_is_read_as_it_was_written(text: bytes) -> None:
    manifest = Manifest.parse(text, "it")
    assert manifest.text() == text
    assert manifest.metrics == {"accuracy": 0.5}  # JSON has no NaN


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
def test_t7_a_flipped_bit_is_refused(text: bytes, bit: int) -> None:
    whole = Manifest.parse(text, "it")
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= bit
        assert read(bytes(damaged)) in (None, whole), position


def test_t7_a_truncated_manifest_is_refused(text: bytes) -> None:
    assert [length for length in range(len(text)) if read(text[:length]) is not None] == []


def test_t7_the_order_of_keys_and_white_space_do_not_matter(text: bytes) -> None:
    document = json.loads(text)
    reordered = dict(reversed(document.items()))
    assert read(json.dumps(reordered, indent=3).encode()) == read(text)


@pytest.mark.parametrize(
    "damaged",
    [
        b"",
        b"null",
        b"[]",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"format": 2}',
        b'{"format": NaN}',
        b'{"format": ' + b"9" * 10_000 + b"}",
        b'{"format": 1e999}',
        b'{"format": 2, "format": 2}',
        b"\xff\xfe\x00",
        b'{"checksum": 5}',
    ],
)
def test_t7_what_is_not_a_manifest_is_refused(damaged: bytes) -> None:
    with pytest.raises(CheckpointError, match="it "):
        Manifest.parse(damaged, "it")


def test_t7_a_key_that_appears_twice_is_refused(text: bytes) -> None:
    twice = text.replace(b'"version": 5', b'"version": 5,\n "version": 5')
    with pytest.raises(CheckpointError, match="'version' appears twice"):
        Manifest.parse(twice, "it")


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version than its state's": lambda m: m.update(version=6),
    "a negative version": lambda m: m.update(version=-1),
    "a huge version": lambda m: m.update(version=10**400),
    "a version that is a text": lambda m: m.update(version="5"),
    "a version that is true": lambda m: m.update(version=True),
    "no origin": lambda m: m.pop("origin"),
    "a history with a path": lambda m: m["origin"].update(history="../../etc/passwd"),
    "a file with a path": lambda m: m["files"][0].update(name="../" + m["files"][0]["name"]),
    "an absolute file": lambda m: m["files"][0].update(name="/etc/passwd"),
    "a file of another version": lambda m: m["files"][0].update(
        name=m["files"][0]["name"].replace("step-000000000005", "step-000000000004")
    ),
    "a file of another history": lambda m: m["files"][0].update(
        name=m["files"][0]["name"].replace("00000000000000aa", "00000000000000bb")
    ),
    "a file twice": lambda m: m["files"].append(m["files"][0]),
    "a file less": lambda m: m["files"].pop(),
    "a shard more": lambda m: m.update(shards=3),
    "a range that ends before it starts": lambda m: m["files"][0]["ranges"][0].update(start=9),
    "a range that is too long": lambda m: m["files"][1]["ranges"][0].update(stop=10**15),
    "a range that leaves a gap": lambda m: m["files"][1]["ranges"][-1].update(start=4),
    "a range that overlaps": lambda m: m["files"][1]["ranges"][-1].update(start=2),
    "another array": lambda m: m["files"][0]["ranges"][0].update(key="params/['x']"),
    "another shape": lambda m: m["leaves"][1].update(shape=[3, 3]),
    "a negative shape": lambda m: m["leaves"][1].update(shape=[-2, -3]),
    "a huge shape": lambda m: m["leaves"][1].update(shape=[2**62, 2**62]),
    "an unknown dtype": lambda m: m["leaves"][1].update(dtype="object"),
    "another path": lambda m: m["leaves"][1].update(path="['x']"),
    "a leaf twice": lambda m: m["leaves"].append(m["leaves"][0]),
    "a leaf less in the structure": lambda m: m["structure"]["dict"].pop(),
    "leaves that changed places": lambda m: m["structure"].update(dict=m["structure"]["dict"][::-1]),
    "an unknown node": lambda m: m["structure"].update(set=[]),
    "a structure that is a text": lambda m: m.update(structure="leaf"),
    "a structure without end": lambda m: m.update(structure=nested(400)),
    "a state without keySteps": lambda m: m["state"].pop("keySteps"),
    "a rank that is a text": lambda m: m["state"].update(keySteps={"a": 1}),
    "a negative keyStep": lambda m: m["state"].update(keySteps={"0": -1}),
    "a state of another term": lambda m: m["state"].update(term=7),
    "no world": lambda m: m["state"].update(world=0),
    "another world than its history's": lambda m: m["state"].update(world=2),
    "no worlds": lambda m: m["state"].update(worlds=[]),
    "worlds of the future": lambda m: m["state"]["worlds"].append({"version": 99, "world": 1, "offset": 0}),
}


def nested(depth: int) -> dict[str, Any]:
    node: dict[str, Any] = {"leaf": 0}
    for _ in range(depth):
        node = {"list": [node]}
    return node


@pytest.mark.parametrize("change", CHANGES)
def test_t7_a_contradictory_manifest_with_a_valid_checksum_is_refused(text: bytes, change: str) -> None:
    document = unseal(text, "it")
    CHANGES[change](document)
    with pytest.raises(CheckpointError, match="it "):
        Manifest.parse(seal(document), "it")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda child: st.lists(child, max_size=3) | st.dictionaries(st.text(max_size=5), child, max_size=3),
    max_leaves=5,
)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_t7_any_value_in_any_place_is_refused_or_harmless(text: bytes, data: st.DataObject) -> None:
    """No error other than `CheckpointError` is raised. An accepted manifest is one that would be written so."""
    document = unseal(text, "it")
    node: Any = document
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(node[key], dict | list) and node[key] and data.draw(st.booleans()):
            node = node[key]
            continue
        node[key] = data.draw(JSON)
        break
    manifest = read(seal(document))
    if manifest is not None:
        assert read(manifest.text()) == manifest
        assert parse_manifest(manifest.name) == manifest.key
        assert all(parse_shard(info.name) is not None for info in manifest.files)


def test_t7_load_passes_over_a_changed_manifest_by_name(write: Write, tmp_path: Path) -> None:
    """With one flipped bit beside an older whole checkpoint, `load` reads the older one, and the message names the
    other."""
    store = CheckpointStore(str(tmp_path))
    write(store, PARAMS, version=5)
    newer = write(store, PARAMS, version=6)
    path = tmp_path / newer.name
    path.write_bytes(path.read_bytes().replace(b'"world": 1', b'"world": 3'))
    found = load(str(tmp_path))
    assert found.step == 5
    assert newer.name in found.skipped[0]
    assert "checksum" in found.skipped[0]
    with pytest.raises(CheckpointError, match="checksum"):
        load(str(path))


@pytest.mark.parametrize("name", ["../x.manifest.json", "x.manifest.json", "..manifest.json", ".manifest.json"])
def test_t7_only_names_of_manifests_are_opened(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint manifest"):
        CheckpointStore(str(tmp_path)).open(name)


def test_a_manifest_of_format_1_is_refused_with_its_format(tmp_path: Path) -> None:
    """Earlier versions wrote it; it has neither a history nor a checksum."""
    name = "step-000000000004-term-00000001-inc-000001.manifest.json"
    (tmp_path / name).write_text('{"format": 1}')
    with pytest.raises(CheckpointError, match=f"{name}: has format 1, this version reads format 2"):
        load(str(tmp_path))
    with pytest.raises(CheckpointError, match="has format 1"):
        load(f"{tmp_path}/{name}")


@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_a_manifest_holds_the_state_of_a_job_with_local_steps(mode: Any) -> None:
    """T7: also before the first update, and where a run with another number of local steps continues."""
    state = CoordinatorState(1, 0, 2)
    for batches in (4, 3):
        job = Coordinator(Rules(mode=mode, shards=1, steps=10, batches=batches), state)
        for version in range(job.state.version, job.state.version + 2):
            for rank in range(2 if mode == "Sync" else 1):
                gradient = GradientId(term=1, version=version, rank=rank, key_step=version, attempt=1)
                job.report(0.0, 0, Staged(id=gradient, info=GradientInfo(finite=True, examples=1)))
        StateRecord.model_validate(job.state.to_json())
        state = CoordinatorState.from_json(job.state.to_json())
        assert state.batches == batches
    assert state.version == 4
