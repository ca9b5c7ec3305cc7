"""The best checkpoint of a history is kept (T7), and its evaluation is stored beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backstay._checkpoint import (
    Best,
    CheckpointStore,
    Evaluation,
    FolderLease,
    Holder,
    JobIdentity,
    Manifest,
    ManifestStorage,
    load,
)
from backstay._checkpoint._names import evaluation_name
from backstay._coordination import CoordinatorState, WriteManifest
from backstay._update import Entry
from backstay.errors import CheckpointError

Write = Callable[..., Manifest]
ACCURACY = Best(metric="accuracy", mode="Max")
LOSS = Best(metric="loss", mode="Min")


def evaluated(store: CheckpointStore, manifest: Manifest, best: Best | None = ACCURACY, **metrics: float) -> bool:
    return store.write_evaluation(Evaluation(manifest=manifest.name, metrics=metrics, best=best))


def versions(store: CheckpointStore) -> list[int]:
    return [name.version for name in store.contents().manifests]


@given(
    values=st.lists(st.none() | st.sampled_from([0.1, 0.2, 0.3, -1.0]), min_size=1, max_size=8),
    keep=st.integers(1, 3),
    rule=st.sampled_from([ACCURACY, LOSS]),
)
@settings(max_examples=40, deadline=None)
def test_t7_the_best_and_the_newest_are_kept(
    tmp_path_factory: pytest.TempPathFactory, write: Write, values: list[float | None], keep: int, rule: Best
) -> None:
    """Evaluations come before the next checkpoint, or not at all; of equal ones, the newest is the best."""
    store = CheckpointStore(str(tmp_path_factory.mktemp("c")))
    sign = 1 if rule.mode == "Max" else -1
    for version, value in enumerate(values):
        made = write(store, {"a": np.full(3, version, np.float32)}, version=version, shards=2)
        store.prune(keep=keep, newest=made, best=rule)
        if value is not None:
            assert evaluated(store, made, rule, **{rule.metric: value})
    newest = list(range(len(values)))[-keep:]
    known = {version: sign * value for version, value in enumerate(values) if value is not None}
    left = versions(store)
    assert left[: len(newest)] == newest[::-1]
    assert len(left) <= keep + 1
    # The best of all except those whose evaluation came after the last pruning is there.
    earlier = {version: value for version, value in known.items() if version < len(values) - 1}
    if earlier:
        assert max(earlier, key=lambda version: (earlier[version], version)) in left
    if known:
        best = max(known, key=lambda version: (known[version], version))
        assert load(store.uri, best=True).step == best
    assert len(store.folder.names()) == 3 * len(left) + len(store.contents().evaluations)
    assert set(store.contents().evaluations) <= set(store.contents().manifests)


def test_t7_a_checkpoint_that_is_evaluated_now_is_not_deleted(write: Write, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    first, *_, last = (write(store, {"a": np.zeros(2)}, version=version) for version in range(4))
    store.prune(keep=1, newest=last, best=ACCURACY, pinned=first.key)
    assert versions(store) == [3, 0]
    store.prune(keep=1, newest=last, best=ACCURACY)
    assert versions(store) == [3]
    assert not evaluated(store, first, accuracy=1.0), "it is gone"


@pytest.fixture
def storage(tmp_path: Path, storage_of: Callable[..., ManifestStorage]) -> Iterator[ManifestStorage]:
    """The storage of a job's server of shard 0, before its term begins."""
    job, store = JobIdentity(namespace="default", name="a", uid="1"), CheckpointStore(str(tmp_path))
    lease = FolderLease(store, Holder(job, 1), lost=lambda error: None, wait=lambda seconds: False)
    storage = storage_of(store, lease, job)
    yield storage
    storage.close()


def store_version(storage: ManifestStorage, store: CheckpointStore, state: CoordinatorState, version: int) -> None:
    entries, place = [Entry("params/a", 0, 4, np.zeros(4, np.float32))], {"term": state.term, "version": version}
    file: Any = store.write_shard(entries, history=state.history, shard=0, shards=1, incarnation=1, **place)
    storage.write_manifest(WriteManifest(state.term, version, state.to_json() | place, ((file,),)))


def stored_evaluations(store: CheckpointStore) -> dict[int, dict[str, float]]:
    contents = store.contents()
    found = store.evaluations(contents, list(contents.manifests))
    return {name.version: dict(evaluation.metrics) for name, evaluation in found.items()}


def test_the_evaluation_of_worker_0_is_stored_before_and_after_the_manifest(
    tmp_path: Path, storage: ManifestStorage
) -> None:
    """An evaluation that was reported before the manifest of its version existed was lost."""
    store = CheckpointStore(str(tmp_path))
    state, _ = storage.newest(0)
    storage.evaluated(5, {"accuracy": 0.5})
    assert stored_evaluations(store) == {}
    store_version(storage, store, state, 4)
    assert stored_evaluations(store) == {}, "of another version"
    store_version(storage, store, state, 5)
    assert stored_evaluations(store) == {5: {"accuracy": 0.5}}
    store_version(storage, store, state, 6)
    storage.evaluated(6, {"accuracy": 0.75})
    assert stored_evaluations(store)[6] == {"accuracy": 0.75}


def test_an_evaluation_of_a_term_that_ended_is_not_stored_later(tmp_path: Path, storage: ManifestStorage) -> None:
    """T6: version 5 of the next term has other parameters."""
    store = CheckpointStore(str(tmp_path))
    storage.newest(0)
    storage.evaluated(5, {"accuracy": 0.5})
    state, _ = storage.newest(1)
    store_version(storage, store, state, 5)
    assert stored_evaluations(store) == {}


def test_a_manifest_of_a_term_that_has_ended_is_not_stored(tmp_path: Path, storage: ManifestStorage) -> None:
    """T6: it was excluded and deleted immediately, but the status and the evaluator had its name."""
    store = CheckpointStore(str(tmp_path))
    before, _ = storage.newest(0)
    state, _ = storage.newest(before.term)
    with pytest.raises(CheckpointError, match=r"step 5 of term 1 is not stored: the term has ended"):
        store_version(storage, store, before, 5)
    store_version(storage, store, state, 4)
    newest = store.newest().manifest
    assert newest is not None
    assert (newest.term, newest.version) == (2, 4)


def test_a_late_report_of_an_evaluation_leaves_the_next_checkpoint_that_is_evaluated(
    tmp_path: Path, storage: ManifestStorage
) -> None:
    """The folder was slow, and the evaluator has begun with the next one."""
    store = CheckpointStore(str(tmp_path))
    state, _ = storage.newest(0)
    names = []
    for version in (1, 2):
        store_version(storage, store, state, version)
        found = store.newest().manifest
        assert found is not None
        names.append(found.name)
    storage.pin(names[1])
    storage.evaluated(1, {"accuracy": 0.5}, names[0])
    for version in (3, 4, 5, 6, 7):
        store_version(storage, store, state, version)
    left = [name.version for name in store.contents().manifests]
    assert 2 in left
    storage.evaluated(2, {"accuracy": 0.25}, names[1])
    store_version(storage, store, state, 8)
    assert 2 not in [name.version for name in store.contents().manifests]


def test_an_evaluation_is_stored_once_and_belongs_to_one_checkpoint(write: Write, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    first = write(store, {"a": np.zeros(2)}, version=1, metrics={"accuracy": 0.1})
    second = write(store, {"a": np.ones(2)}, version=2, metrics={"accuracy": 0.1})
    assert evaluated(store, first, accuracy=0.7)
    assert not evaluated(store, first, accuracy=0.9)
    assert load(f"{store.uri}/{first.name}").metrics == {"accuracy": 0.7}
    assert load(f"{store.uri}/{second.name}").metrics == {"accuracy": 0.1}
    assert load(f"{store.uri}/{first.name}").metrics_step == first.version
    assert load(f"{store.uri}/{second.name}").metrics_step is None  # the manifest does not say it
    # Under the name of another checkpoint it does not count.
    text = store.folder.read(evaluation_name(first.key))
    store.folder.write(evaluation_name(second.key), text)
    assert load(f"{store.uri}/{second.name}").metrics == {"accuracy": 0.1}


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "huge", "nested"])
def test_t7_a_damaged_evaluation_costs_the_evaluation_only(write: Write, tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(str(tmp_path))
    made = [write(store, {"a": np.zeros(2)}, version=version) for version in (1, 2)]
    for manifest, value in zip(made, (0.5, 0.9), strict=True):
        evaluated(store, manifest, accuracy=value)
    file = tmp_path / evaluation_name(made[1].key)
    text = file.read_bytes()
    file.write_bytes(
        {
            "empty": b"",
            "truncated": text[:-20],
            "flipped": text.replace(b"0.9", b"0.8"),
            "huge": b" " * (2 << 20),
            "nested": b"[" * 100_000,
        }[damage]
    )
    assert load(str(tmp_path)).step == 2
    assert load(str(tmp_path), best=True).step == 1
    store = CheckpointStore(str(tmp_path))
    store.prune(keep=1, newest=made[1], best=ACCURACY)
    assert versions(store) == [2, 1]


def test_t7_a_damaged_checkpoint_is_not_the_best(write: Write, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    made = [write(store, {"a": np.zeros(2)}, version=version) for version in (1, 2)]
    for manifest, value in zip(made, (0.9, 0.5), strict=True):
        evaluated(store, manifest, accuracy=value)
    (tmp_path / made[0].files[0].name).unlink()
    assert load(str(tmp_path), best=True).step == 2


@pytest.mark.parametrize(
    ("metrics", "best", "message"),
    [
        ({"accuracy": 1.0}, None, "none has a finite evaluation by a job that has spec.checkpoint.keepBest"),
        ({"error": 1.0}, ACCURACY, "no evaluation of a complete checkpoint has the metric 'accuracy'"),
        ({"accuracy": math.nan}, ACCURACY, "none has a finite evaluation by a job that has spec.checkpoint.keepBest"),
    ],
)
def test_without_a_best_checkpoint_the_error_states_why(
    write: Write, tmp_path: Path, metrics: dict[str, Any], best: Best | None, message: str
) -> None:
    store = CheckpointStore(str(tmp_path))
    made = write(store, {"a": np.zeros(2)}, version=1)
    if all(map(math.isfinite, metrics.values())):
        evaluated(store, made, best, **metrics)
    with pytest.raises(CheckpointError, match=message):
        load(str(tmp_path), best=True)


def test_t6_an_excluded_checkpoint_is_not_the_best(write: Write, tmp_path: Path) -> None:
    """A process that lost the folder stored it, so a claim of the next lease excludes it."""
    from backstay._checkpoint import Claim

    store = CheckpointStore(str(tmp_path))
    base = write(store, {"a": np.zeros(2)}, version=1)
    lost = write(store, {"a": np.zeros(2)}, version=5)
    for manifest, value in ((base, 0.1), (lost, 0.9)):
        evaluated(store, manifest, accuracy=value)
    store.write_claim(Claim(origin=base.origin, lease=2, term=2, incarnation=2, base=base.name))
    assert load(str(tmp_path), best=True).step == 1
