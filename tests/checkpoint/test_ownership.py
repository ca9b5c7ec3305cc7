"""`ownership` decides whose checkpoints a folder holds: T7, without a folder."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from backstay._checkpoint import Identity, JobIdentity, Manifest
from backstay._checkpoint._history._ownership import Denied, Foreign, NewHistory, Own, ownership
from backstay._checkpoint._manifest import Claim, Origin
from backstay._checkpoint._names import ManifestName
from backstay._checkpoint._store import Newest
from backstay.errors import CheckpointOfAnotherJob

URI = "/folder"
MINE, OTHER = JobIdentity(name="mine"), JobIdentity(name="other")
origins = st.builds(
    lambda job, seed: Origin(history="0123456789abcdef", job=job, seed=seed),
    st.sampled_from([MINE, OTHER]),
    st.sampled_from([0, 7]),
)
identities = st.builds(
    lambda any_history, start_from, steps: Identity(MINE, 0, 0, steps, {}, any_history, start_from),
    st.booleans(),
    st.sampled_from(["", URI, "/elsewhere"]),
    st.sampled_from([5, 10, 11]),
)


def newest(origin: Origin) -> Newest:
    return Newest(Manifest.model_construct(origin=origin, version=10))


@given(identities, origins)
def test_t7_only_this_job_s_history_is_continued_as_its_own(identity: Identity, origin: Origin) -> None:
    """Another job's is refused, or continued because the user allows it, or left alone because it is the start."""
    found = ownership(identity, URI, newest(origin))
    mine = origin.job == MINE and origin.seed == 0
    assert isinstance(found, Own) == mine
    if mine:
        return
    if identity.any_history:
        assert isinstance(found, Foreign if identity.steps > 10 else Denied)
    else:
        assert isinstance(found, NewHistory if identity.start_from == URI else Denied)
    if isinstance(found, Denied):
        assert isinstance(found.error, CheckpointOfAnotherJob)
        assert all(
            name in str(found.error) for name in ("default/mine", "default/other" if origin.job == OTHER else "7")
        )


@given(identities, st.none() | origins, st.booleans(), st.booleans(), st.booleans())
def test_t7_checkpoints_are_never_dropped_without_a_word(
    identity: Identity, claimed: Origin | None, unusable: bool, skipped: bool, older: bool
) -> None:
    """Without a checkpoint to continue from, a run begins, unless it would leave its older ones behind."""
    claim = None if claimed is None else Claim(origin=claimed, lease=2, term=2, incarnation=0)
    names = (ManifestName(1, 1, 10, 0, "f" * 16),) if older else ()
    lines = ("step-10",)
    found = ownership(identity, URI, Newest(None, lines if skipped else (), lines if unusable else ()), claim, names)
    other = claimed is not None and not identity.made(claimed)
    behind = other and skipped and older and not (identity.start_from or identity.any_history)
    assert isinstance(found, Denied if unusable or behind else NewHistory)
    if isinstance(found, Denied):
        assert isinstance(found.error, CheckpointOfAnotherJob) == (not unusable)
