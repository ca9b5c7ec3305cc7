"""T6: a manifest is stored only in a term whose claim is stored, and a claim names where its term began."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from backstay._checkpoint import CheckpointStore, FolderLease, Holder, JobIdentity, Origin, file_of
from backstay._checkpoint._history._tenure import Claimed, TakenOver
from backstay._coordination import CoordinatorState, WriteManifest
from backstay._update import Entry
from backstay.errors import StorageError

HISTORY = "0123456789abcdef"
JOB = JobIdentity(namespace="default", name="job", uid="1")
Storage = Callable[..., Any]


def lease_of(store: CheckpointStore, incarnation: int) -> FolderLease:
    return FolderLease(store, Holder(JOB, incarnation), lost=lambda error: None, wait=lambda seconds: False)


def order_of(store: CheckpointStore, state: CoordinatorState) -> WriteManifest:
    """Returns the order to store a version whose one shard is written."""
    entries = [Entry("params/a", 0, 4, np.zeros(4, np.float32))]
    info = store.write_shard(
        entries, history=state.history, version=state.version, term=state.term, shard=0, shards=1, incarnation=1
    )
    return WriteManifest(state.term, state.version, state.to_json(), ((file_of(info),),))


@given(term=st.integers(1, 9), version=st.integers(0, 9), lease=st.integers(1, 9))
def test_t6_each_state_keeps_the_term_and_history_and_the_claim_names_the_base(
    term: int, version: int, lease: int
) -> None:
    taken = TakenOver(term, HISTORY, (term, version))
    begun = taken.found("base")
    claim = begun.claim(Origin(history=HISTORY, job=JOB, seed=0), lease, 2)
    claimed = Claimed(begun, lease)
    assert {(one.term, one.history) for one in (taken, begun, claimed)} == {(term, HISTORY)}
    assert (claim.term, claim.origin.history) == (term, HISTORY)
    assert (claim.base, claim.lease, claim.incarnation, claim.start_from) == ("base", lease, 2, "")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=40)
@given(steps=st.lists(st.sampled_from(["store", "roll back", "take over"]), max_size=10))
def test_t6_the_newest_manifest_is_the_one_that_was_stored_last(
    steps: list[str], storage_of: Storage, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Servers store, roll back and take over in any order."""
    store, job = CheckpointStore(str(tmp_path_factory.mktemp("folder"))), JOB
    writers = [storage_of(store, lease_of(store, 1), job, keep=100)]
    state, _ = writers[-1].newest(0)
    stored: tuple[int, int] | None = None  # (term, version)
    try:
        for step in steps:
            match step:
                case "store":
                    state.version += 1
                    writers[-1].write_manifest(order_of(store, state))
                    stored = state.term, state.version
                case "roll back":
                    before = state.term
                    state, _ = writers[-1].newest(state.term)
                    assert (state.version, state.term > before) == (0 if stored is None else stored[1], True)
                case "take over":
                    writers.append(storage_of(store, lease_of(store, len(writers) + 1), job, keep=100))
                    assert writers[-1].known(state, seconds=30.0)[1] == (stored or (0, -1))
            newest = store.newest().manifest
            assert (None if newest is None else (newest.term, newest.version)) == stored
    finally:
        for writer in writers:
            writer.close()


def test_t6_a_takeover_that_did_not_see_the_folder_claims_what_it_held(storage_of: Storage, tmp_path: Path) -> None:
    store = CheckpointStore(str(tmp_path))
    first = storage_of(store, lease_of(store, 1), JOB, keep=9)
    state, _ = first.newest(0)
    for version in (2, 4):
        state.version = version
        first.write_manifest(order_of(store, state))
    second = storage_of(store, lease_of(store, 2), JOB, keep=9)
    held = CoordinatorState(state.term, 3, 1, history=state.history)
    try:
        second.known(held, seconds=0.0)
        second.hold()
        newest = store.newest().manifest
        assert newest is not None
        assert newest.version in (2, 4)  # 4 only if the look at the folder was faster than this thread
        claim = store.newest_claim(store.contents())
        assert claim is not None
        assert claim.base == newest.name
    finally:
        first.close()
        second.close()


def test_t6_a_claim_that_could_not_be_written_keeps_the_limit_of_a_takeover(
    storage_of: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder fails during the takeover, and again for the claim. Then a rollback reads the folder."""
    store = CheckpointStore(str(tmp_path))
    first = storage_of(store, lease_of(store, 1), JOB, keep=9)
    state, _ = first.newest(0)
    state.version = 2
    first.write_manifest(order_of(store, state))
    own = CheckpointStore(str(tmp_path))
    second = storage_of(own, lease_of(own, 2), JOB, keep=9)

    def fail(*arguments: object, **more: object) -> None:
        raise StorageError("the storage fails")

    try:
        with monkeypatch.context() as broken:
            broken.setattr(own, "contents", fail)
            assert second.known(CoordinatorState(state.term, 3, 1, history=state.history)) == ("", (0, -1))
        state.version = 4  # the older incarnation stores it after the takeover
        first.write_manifest(order_of(store, state))
        with monkeypatch.context() as broken:
            broken.setattr(own, "write_claim", fail)
            with pytest.raises(StorageError):
                second.hold()
        assert second.newest(state.term)[0].version == 2
    finally:
        first.close()
        second.close()
