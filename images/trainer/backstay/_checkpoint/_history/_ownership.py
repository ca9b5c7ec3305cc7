"""Which history in a folder belongs to this run, and which one it must not continue (T7, decision 0075)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import CheckpointError, CheckpointOfAnotherJob
from .._files import same_place
from .._manifest import Best, Claim, JobIdentity, Manifest, Origin
from .._store import Contents, Newest

__all__ = ["Identity", "Ownership"]

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


class Ownership:
    """Compares what a folder holds with the run that wants to write into it."""

    def __init__(self, identity: Identity, uri: str) -> None:
        """
        Args:
            uri: the folder, for errors.
        """
        self._identity, self._uri = identity, uri

    def check(self, newest: Newest, claim: Claim | None, contents: Contents) -> None:
        """Refuse a history of another job, or an unreadable one, before anything is written into its folder.

        Args:
            claim: the newest claim in the folder.

        Raises:
            CheckpointError: the folder has checkpoints, and none can be used.
            CheckpointOfAnotherJob: the history is another job's, or another seed's.
        """
        if newest.manifest is not None:
            self.check_manifest(newest.manifest)
        else:
            self.refuse_unusable(newest)
            self._check_claim(newest, claim, contents)

    def refuse_unusable(self, newest: Newest) -> None:
        """
        Raises:
            CheckpointError: the folder has checkpoints, and none can be used. To begin with the initial parameters
                would drop them silently.
        """
        if newest.unusable:
            shown = "".join(f"\n  {line}" for line in newest.unusable[:_SHOWN])
            more = f"\n  and {len(newest.unusable) - _SHOWN} more" if len(newest.unusable) > _SHOWN else ""
            raise CheckpointError(
                f"{self._uri} holds checkpoints, and this version of Backstay can use none of them. Restore the "
                "files, use another checkpoint.uri, or delete these files to begin again at the initial parameters:"
                f"{shown}{more}"
            )

    def check_manifest(self, manifest: Manifest) -> None:
        """
        Raises:
            CheckpointOfAnotherJob: `manifest` belongs to another job, or to another seed, and that was not allowed.
        """
        identity, origin = self._identity, manifest.origin
        if self.is_own(origin) or self.starts_beside(origin):
            return
        theirs = f"job {origin.job} with seed {origin.seed}"
        mine = f"job {identity.job} with seed {identity.seed}"
        if not identity.any_history:
            raise CheckpointOfAnotherJob(
                f"the checkpoints in {self._uri} belong to {theirs} (step {manifest.version}), this is {mine}. "
                "Use another checkpoint.uri, or set checkpoint.continueFrom: Any (--continue-from Any of backstay run) "
                "to continue them in a new history. In one process, use StoreTo(continue_from='Any')"
            )
        if manifest.version >= identity.steps:
            raise CheckpointOfAnotherJob(
                f"the checkpoint of {theirs} is of step {manifest.version}, {mine} has only {identity.steps} steps: "
                f"set steps to more than {manifest.version}, or use another checkpoint.uri"
            )

    def _check_claim(self, newest: Newest, claim: Claim | None, contents: Contents) -> None:
        """
        Raises:
            CheckpointOfAnotherJob: another job has begun a history in the folder, so the checkpoints of this job no
                longer count. To begin with the initial parameters would drop them silently.
        """
        if claim is None or self.is_own(claim.origin) or self._identity.start_from or self._identity.any_history:
            return
        mine = [name for name in contents.manifests if name.history != claim.origin.history]
        if newest.skipped and mine:
            raise CheckpointOfAnotherJob(
                f"job {claim.origin.job} with seed {claim.origin.seed} has begun a history in {self._uri}, and "
                f"has stored no checkpoint yet. The older checkpoints there, such as {mine[0]}, no longer count. Use "
                f"another checkpoint.uri, or copy the files with {mine[0].history} in their names into another folder"
            )

    def is_own(self, origin: Origin) -> bool:
        """Whether this job, with this seed, has made that history."""
        return origin.job.same_job(self._identity.job) and origin.seed == self._identity.seed

    def starts_beside(self, origin: Origin) -> bool:
        """Whether `start_from` names this folder, and this checkpoint of another job or seed must not be continued.
        Then a new history begins beside it."""
        beside = self._identity.start_from and same_place(self._identity.start_from, self._uri)
        return bool(beside) and not self._identity.any_history and not self.is_own(origin)
