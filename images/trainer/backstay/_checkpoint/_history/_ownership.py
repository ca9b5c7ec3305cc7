"""Which history in a folder belongs to this run, and which one it must not continue (T7, decision 0075)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ...errors import CheckpointError, CheckpointOfAnotherJob
from .._files import same_place
from .._manifest import Best, Claim, JobIdentity, Manifest, Origin
from .._names import ManifestName
from .._store import Newest

__all__ = ["Denied", "Foreign", "Identity", "NewHistory", "Own", "Ownership", "ownership"]

_SHOWN = 3


@dataclass(frozen=True)
class Identity:
    """The run that writes checkpoints.

    Attributes:
        seed: the script's seed.
        settings: settings that may change between two runs, as text.
        any_history: whether a history of another job or seed may be continued.
        start_from: the place of the initial parameters, as the script names it; empty: `init` returns them.
        best: how the best checkpoint is chosen, which is kept; None: only the newest ones are.
        stops: whether the script may end training early: then a history that it has ended stays ended.
    """

    job: JobIdentity
    incarnation: int
    seed: int
    steps: int
    settings: Mapping[str, str]
    any_history: bool = False
    start_from: str = ""
    stops: bool = False
    best: Best | None = None

    def made(self, origin: Origin) -> bool:
        """Returns whether this job, with this seed, has made a history."""
        return origin.job.same_job(self.job) and origin.seed == self.seed


@dataclass(frozen=True, slots=True)
class Own:
    """The run continues a checkpoint of its history."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Foreign:
    """The run continues a checkpoint of another job or seed, in a new history."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class NewHistory:
    """The run begins a history, beside the one that the folder may hold."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The run must not write into the folder."""

    error: CheckpointError


Ownership: TypeAlias = Own | Foreign | NewHistory | Denied


def ownership(
    identity: Identity, uri: str, newest: Newest, claim: Claim | None = None, names: Sequence[ManifestName] = ()
) -> Ownership:
    """Compare the contents of a folder with the run that wants to write into it.

    Args:
        uri: the folder, for errors.
        claim: the newest claim in the folder; None: it is not compared.
        names: the manifests in the folder, newest first, for the comparison with `claim`.
    """
    manifest = newest.manifest
    if manifest is not None:
        return _of_manifest(identity, uri, manifest)
    if newest.unusable:
        # To begin with the initial parameters would drop them silently.
        shown = "".join(f"\n  {line}" for line in newest.unusable[:_SHOWN])
        more = f"\n  and {len(newest.unusable) - _SHOWN} more" if len(newest.unusable) > _SHOWN else ""
        text = (
            f"{uri} holds checkpoints, and this version of Backstay can use none of them. Restore the files, use "
            f"another checkpoint.uri, or delete these files to begin again at the initial parameters:{shown}{more}"
        )
        return Denied(CheckpointError(text))
    if claim is None or identity.made(claim.origin) or identity.start_from or identity.any_history:
        return NewHistory()
    mine = [name for name in names if name.history != claim.origin.history]
    if not (newest.skipped and mine):
        return NewHistory()
    # These no longer count. To begin with the initial parameters would drop them silently.
    text = (
        f"job {claim.origin.job} with seed {claim.origin.seed} has begun a history in {uri}, and has stored no "
        f"checkpoint yet. The older checkpoints there, such as {mine[0]}, no longer count. Use another "
        f"checkpoint.uri, or copy the files with {mine[0].history} in their names into another folder"
    )
    return Denied(CheckpointOfAnotherJob(text))


def _of_manifest(identity: Identity, uri: str, manifest: Manifest) -> Ownership:
    origin = manifest.origin
    if identity.made(origin):
        return Own(manifest)
    theirs = f"job {origin.job} with seed {origin.seed}"
    mine = f"job {identity.job} with seed {identity.seed}"
    if not identity.any_history:
        if identity.start_from and same_place(identity.start_from, uri):
            return NewHistory()
        text = (
            f"the checkpoints in {uri} belong to {theirs} (step {manifest.version}), this is {mine}. "
            "Use another checkpoint.uri, or set checkpoint.continueFrom: Any (--continue-from Any of backstay run) "
            "to continue them in a new history. In one process, use StoreTo(continue_from='Any')"
        )
        return Denied(CheckpointOfAnotherJob(text))
    if manifest.version >= identity.steps:
        text = (
            f"the checkpoint of {theirs} is of step {manifest.version}, {mine} has only {identity.steps} steps: "
            f"set steps to more than {manifest.version}, or use another checkpoint.uri"
        )
        return Denied(CheckpointOfAnotherJob(text))
    return Foreign(manifest)
