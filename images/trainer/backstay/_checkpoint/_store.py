"""Writes checkpoints and finds the newest complete one (T6, T7).

A shard's server writes its file with `write_shard`. The coordinator collects the results and makes the checkpoint with
`write_manifest`. `prune` deletes only files of the coordinator's history.

A term begins with a claim, which names the manifest that it continues from. A manifest that
a holder of an older lease, or a server of an older term, stored after that manifest is not in the history. A process
that lost the folder may still write, but no process reads its files.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import safetensors
from numpy.typing import NDArray

from .._update import Entry
from ..errors import CheckpointError, StorageError
from ._best import best_of
from ._files import Folder, PosixFolder, open_folder
from ._manifest import MAX_BYTES, Best, Claim, Evaluation, FileInfo, FileRange, Manifest
from ._names import (
    HIGHEST,
    ClaimName,
    LeaseName,
    ManifestName,
    ShardName,
    evaluation_name,
    is_format_1,
    is_unknown_manifest,
    parse_claim,
    parse_evaluation,
    parse_lease,
    parse_manifest,
    parse_shard,
)

_CHUNK = 32 << 20
_ABANDONED_SECONDS = 3600.0
_MAX_ATTEMPTS = 1000


@dataclass(frozen=True)
class Newest:
    """The newest complete checkpoint, and the newer ones that were skipped.

    Attributes:
        skipped: names of manifests, each with the reason.
        unusable: manifests in `skipped` that may belong to this history, and that cannot be read.
    """

    manifest: Manifest | None
    skipped: tuple[str, ...] = ()
    unusable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Contents:
    """The names in a folder; files with any other name are not a part of a checkpoint.

    Attributes:
        manifests, claims: newest first.
        evaluations: the manifests that have a file with their evaluation.
        format_1: manifests that only older versions can read.
        unknown: files with a manifest's name, in a format that this version does not support.
    """

    names: tuple[str, ...]
    manifests: tuple[ManifestName, ...]
    claims: tuple[ClaimName, ...]
    leases: tuple[LeaseName, ...]
    shards: tuple[ShardName, ...]
    evaluations: tuple[ManifestName, ...]
    format_1: tuple[str, ...]
    unknown: tuple[str, ...]

    @classmethod
    def of(cls, names: Iterable[str]) -> Contents:
        """Sort `names` by kind."""
        kept = tuple(names)
        return cls(
            kept,
            tuple(sorted((m for name in kept if (m := parse_manifest(name)) is not None), reverse=True)),
            tuple(sorted((c for name in kept if (c := parse_claim(name)) is not None), reverse=True)),
            tuple(lease for name in kept if (lease := parse_lease(name)) is not None),
            tuple(shard for name in kept if (shard := parse_shard(name)) is not None),
            tuple(found for name in kept if (found := parse_evaluation(name)) is not None),
            tuple(name for name in kept if is_format_1(name)),
            tuple(name for name in kept if is_unknown_manifest(name)),
        )

    @property
    def newest_term(self) -> int:
        """The highest term in any name; 0 if there is none."""
        terms = [name.term for name in self.manifests] + [name.term for name in self.claims]
        return max([*terms, *(name.term for name in self.shards)], default=0)

    @property
    def newest_lease(self) -> int:
        """The highest number of a lease in any name; 0 if there is none."""
        numbers = [name.lease for name in self.manifests] + [name.lease for name in self.claims]
        return max([*numbers, *(name.number for name in self.leases)], default=0)

    def next_term(self, above: int, uri: str) -> int:
        """Returns the number of the next term, which is higher than `above` and than any term in the folder `uri`.

        Raises:
            CheckpointError: there is no such number.
        """
        return _next("term", max(above, self.newest_term), uri)

    def next_lease(self, uri: str) -> int:
        """Returns the number of the next lease. Raises `CheckpointError` when there is none."""
        return _next("lease", self.newest_lease, uri)


class CheckpointStore:
    """Checkpoints in one folder, whose `uri` is a path or any fsspec URI."""

    def __init__(self, uri: str, folder: Folder | None = None) -> None:
        self.uri = uri
        self.folder = folder if folder is not None else open_folder(uri)
        self._claims: dict[ClaimName, Claim | None] = {}  # they never change; None: damaged
        self._evaluations: dict[ManifestName, Evaluation | None] = {}  # likewise

    def uri_of(self, manifest: Manifest) -> str:
        """Returns the path or URI of `manifest`."""
        return f"{self.uri.rstrip('/')}/{manifest.name}"

    # ---- writing

    def write_shard(
        self,
        entries: Iterable[Entry],
        *,
        history: str,
        version: int,
        term: int,
        shard: int,
        shards: int,
        incarnation: int,
    ) -> FileInfo:
        """Write one shard's arrays as a safetensors file: the whole file, or no file.

        Args:
            entries: the arrays of the shard. This call reads them until it returns, and they must not change meanwhile.

        Returns:
            The file and the ranges in it, for the manifest.

        Raises:
            CheckpointError: the file could not be written (a full disk, no rights, a failing object store).
        """
        for attempt in range(_MAX_ATTEMPTS):
            name = str(ShardName(term, version, shard, shards, incarnation, attempt, history))
            if self.folder.size(name) is None:
                break
        kept: list[NDArray[np.generic]] = []
        tensors: dict[str, safetensors.TensorSpec] = {}
        ranges: list[FileRange] = []
        for key, start, stop, array in entries:
            flat = np.ascontiguousarray(array).reshape(-1)
            if flat.size != stop - start:
                raise CheckpointError(f"{key}[{start}:{stop}] was given with {flat.size} elements")
            kept.append(flat)
            here = FileRange(key=key, start=start, stop=stop)
            tensors[here.tensor] = safetensors.TensorSpec(
                dtype=flat.dtype.name, shape=list(flat.shape), data_ptr=flat.ctypes.data, data_len=flat.nbytes
            )
            ranges.append(here)
        digest: list[tuple[int, str]] = []

        def fill(path: str) -> None:
            safetensors.serialize_file(tensors, path, {"format": "backstay"})
            digest.append(_sha256_of(path))

        self.folder.write(name, fill)
        del kept
        size, sha256 = digest[-1]
        return FileInfo(name=name, size=size, sha256=sha256, ranges=tuple(ranges))

    def write_manifest(self, manifest: Manifest) -> Manifest:
        """Store the manifest: from then on, this checkpoint is the newest complete one.

        Returns:
            The manifest as it is stored, with the first `attempt` that no file has.

        Raises:
            CheckpointError: a file that the manifest names is not there with its size, or the write failed.
        """
        for info in manifest.files:
            size = self.folder.size(info.name)
            if size != info.size:
                found = "is missing" if size is None else f"has {size} bytes"
                raise CheckpointError(
                    f"{self.uri}/{info.name} {found}, {info.size} bytes were written: the checkpoint is not stored"
                )
        while self.folder.size(manifest.name) is not None and manifest.attempt < _MAX_ATTEMPTS - 1:
            manifest = manifest.model_copy(update={"attempt": manifest.attempt + 1})
        self.folder.write(manifest.name, manifest.text())
        return manifest

    def write_claim(self, claim: Claim) -> ClaimName:
        """Begin a term: from now on `claim` decides which manifests are in the history.

        Raises:
            CheckpointError: the write failed.
        """
        name = ClaimName(claim.lease, claim.term, secrets.token_hex(8), claim.origin.history)
        self.folder.write(str(name), claim.text())
        return name

    def write_evaluation(self, evaluation: Evaluation) -> bool:
        """Store the evaluation of a checkpoint; False if the checkpoint is gone or has an evaluation already.

        Raises:
            CheckpointError: the write failed, or `Evaluation.manifest` is not the name of a manifest.
        """
        name = parse_manifest(evaluation.manifest)
        if name is None:
            raise CheckpointError(f"{evaluation.manifest[:200]!r} is not the name of a checkpoint manifest")
        own = evaluation_name(name)
        if self.folder.size(evaluation.manifest) is None or self.folder.size(own) is not None:
            return False
        self.folder.write(own, evaluation.text())
        return True

    def prune(
        self, *, keep: int, newest: Manifest, best: Best | None = None, pinned: ManifestName | None = None
    ) -> list[str]:
        """Delete all but the newest `keep` checkpoints of a history, and its shard files that no manifest names.

        This never deletes files of another history. It also keeps files of the version of `newest`
        and later ones, which may be parts of an unfinished checkpoint. When a newer lease is in use, it deletes
        no files (T6).

        Args:
            newest: the last manifest that this process stored.
            best: also keep the best checkpoint by this rule; None: the best one is not kept.
            pinned: also keep this checkpoint, which is being evaluated.

        Returns:
            The names of the deleted files.

        Raises:
            CheckpointError: the folder cannot be read, or a file cannot be deleted.
        """
        own, contents = newest.key, self.contents()
        if contents.newest_lease > own.lease or (contents.manifests and contents.manifests[0] > own):
            return []
        claims = self._readable_claims(contents)
        mine = [name for name in contents.manifests if name.history == own.history]
        outside = [name for name in mine if excluded(name, claims) is not None]
        inside = [name for name in mine if name not in outside]
        kept = inside[: max(1, keep)]
        old = inside[max(1, keep) :]
        found = None if best is None else best_of(self.evaluations(contents, inside), best)
        kept += [name for name in old if name in (found, pinned)]
        old = [name for name in old if name not in kept]
        needed = {info.name for name in kept for info in self._files_of(str(name))}
        loose = [
            str(name)
            for name in contents.shards
            if name.history == own.history
            and (name.term, name.version) < (own.term, own.version)
            and str(name) not in needed
        ]
        # A claim stays while an older checkpoint is kept. A claim whose term began in another history stays too.
        oldest = min(kept)
        past = [
            str(name)
            for name, claim in claims
            if name.history == own.history
            and (name.lease, name.term) < (oldest.lease, oldest.term)
            and (base := parse_manifest(claim.base)) is not None
            and base.history == own.history
        ]
        # Manifests first: a checkpoint without its manifest does not exist. One without its files is damaged.
        doomed = [*map(str, outside), *map(str, old), *loose, *past]
        doomed += [evaluation_name(name) for name in contents.evaluations if str(name) in set(doomed)]
        for name in doomed:
            self.folder.delete(name)
        if isinstance(self.folder, PosixFolder):
            self._sweep_temporaries(self.folder, own)
        return doomed

    def _sweep_temporaries(self, folder: PosixFolder, own: ManifestName) -> None:
        for name in folder.names():
            match = re.fullmatch(r"\.(.+)\.[0-9a-f]{8}\.tmp", name)
            target = None if match is None else parse_shard(match[1]) or parse_manifest(match[1])
            if target is not None:
                stale = target.history == own.history and (target.term, target.version) < (own.term, own.version)
            else:
                # Files of safetensors or of a probe whose process was killed; only their age shows that.
                left = match is not None or re.fullmatch(r"\.tmp\w{6}|\.probe-[0-9a-f]{16}", name) is not None
                stale = left and folder.age(name) > _ABANDONED_SECONDS
            if stale:
                folder.delete(name)

    def _files_of(self, name: str) -> tuple[FileInfo, ...]:
        try:
            return self.read_manifest(name).files
        except StorageError:
            raise  # it may be whole: its files must stay
        except CheckpointError:
            return ()

    # ---- reading

    def contents(self) -> Contents:
        """Returns the names in the folder, by kind. Raises `StorageError`."""
        return Contents.of(self.folder.names())

    def newest(
        self, *, verify: bool = True, contents: Contents | None = None, up_to: tuple[int, int] | None = None
    ) -> Newest:
        """Returns the newest complete checkpoint.

        Args:
            verify: read every file and compare its SHA-256; otherwise only sizes are compared.
            contents: the result of `contents`, if the caller has it already.
            up_to: the highest (term, version) to consider; None: no limit.

        Returns:
            The manifest, or None when there is no complete checkpoint; and what was skipped, with the reason.

        Raises:
            StorageError: the folder cannot be listed, or a file in it cannot be read.
        """
        contents = contents or self.contents()
        claims = self._readable_claims(contents)
        skipped: list[str] = []
        unusable: list[str] = []
        for key in contents.manifests:
            name = str(key)
            if up_to is not None and (key.term, key.version) > up_to:
                continue
            claim = excluded(key, claims)
            if claim is not None:
                skipped.append(f"{name}: its process had lost the folder to another one, with lease {claim.lease}")
                continue
            try:
                return Newest(self.open(name, verify=verify), tuple(skipped), tuple(unusable))
            except StorageError:
                raise  # it may be whole: skipping it could lose training progress
            except CheckpointError as error:
                unusable.append(f"{name}: {error}")
                skipped.append(unusable[-1])
        other = [f"{name}: has format 1, this version reads format 2" for name in contents.format_1]
        other += [f"{name}: has a format that this version does not read" for name in contents.unknown]
        return Newest(None, tuple(skipped + other), tuple(unusable + other))

    def in_history(self, contents: Contents, names: Iterable[ManifestName] | None = None) -> list[ManifestName]:
        """Returns the manifests that no claim excludes from the history, newest first. They may be damaged.

        Args:
            names: the manifests to look at; by default those in the folder.

        Raises:
            StorageError: a claim cannot be read.
        """
        claims = self._readable_claims(contents)
        looked_at = contents.manifests if names is None else names
        return [name for name in looked_at if excluded(name, claims) is None]

    def evaluations(self, contents: Contents, names: Iterable[ManifestName]) -> dict[ManifestName, Evaluation]:
        """Returns the evaluations of these checkpoints, as far as they exist and can be read. Raises `StorageError`."""
        stored = set(contents.evaluations)
        return {name: found for name in names if name in stored and (found := self.evaluation(name)) is not None}

    def evaluation(self, name: ManifestName) -> Evaluation | None:
        """Returns the evaluation of a checkpoint; None if it has none, or a damaged one. Raises `StorageError`."""
        if name not in self._evaluations and self.folder.size(evaluation_name(name)) is not None:
            self._evaluations[name] = self._read_evaluation(name)
        return self._evaluations.get(name)

    def best(self) -> Manifest:
        """Returns the best complete checkpoint of the newest history, by the rule of its newest evaluation.

        Raises:
            CheckpointError: the folder has no complete checkpoint, or none has an evaluation that counts.
            StorageError: the folder cannot be listed, or a file in it cannot be read.
        """
        contents = self.contents()
        newest = self.newest(verify=False, contents=contents).manifest
        if newest is None:
            raise CheckpointError(f"there is no complete checkpoint in {self.uri}")
        evaluations, rule = self._evaluated(contents, newest.origin.history)
        while rule is not None and (name := best_of(evaluations, rule)) is not None:
            try:
                return self.open(str(name), verify=False)
            except StorageError:
                raise
            except CheckpointError:
                del evaluations[name]  # a damaged one is not the best
        if rule is None:
            why = "none has a finite evaluation by a job that has spec.checkpoint.keepBest"
        else:
            why = f"no evaluation of a complete checkpoint has the metric {rule.metric!r}"
        raise CheckpointError(f"there is no best checkpoint in {self.uri}: {why}")

    def rule_of_best(self) -> Best | None:
        """Returns the rule by which the newest history keeps its best checkpoint; None without one.

        Raises:
            StorageError: the folder cannot be listed, or a file in it cannot be read.
        """
        contents = self.contents()
        newest = self.newest(verify=False, contents=contents).manifest
        return None if newest is None else self._evaluated(contents, newest.origin.history)[1]

    def _evaluated(self, contents: Contents, history: str) -> tuple[dict[ManifestName, Evaluation], Best | None]:
        inside = [name for name in self.in_history(contents) if name.history == history]
        evaluations = self.evaluations(contents, inside)
        rules = [evaluations[name].best for name in inside if name in evaluations]
        return evaluations, next((rule for rule in rules if rule is not None), None)

    def newest_claim(self, contents: Contents) -> Claim | None:
        """Returns the newest claim that is not damaged. Raises `StorageError`."""
        claims = self._readable_claims(contents)
        return claims[0][1] if claims else None

    def open(self, name: str, *, verify: bool = True) -> Manifest:
        """Returns the manifest called `name`, if all its files are complete.

        Raises:
            CheckpointError: the manifest or one of its files is missing, truncated or damaged; the message says which.
        """
        manifest = self.read_manifest(name)
        for info in manifest.files:
            size = self.folder.size(info.name)
            if size is None:
                raise CheckpointError(f"{info.name} is missing")
            if size != info.size:
                raise CheckpointError(f"{info.name} has {size} bytes instead of {info.size}")
            if verify:
                self.verify_file(info)
        return manifest

    def read_manifest(self, name: str) -> Manifest:
        """Returns the manifest called `name`; its files are not checked.

        Raises:
            CheckpointError: the manifest is missing or damaged, or `name` is not the name of a manifest.
        """
        if is_format_1(name):
            raise CheckpointError(f"{self.uri}/{name} has format 1: this version reads format 2")
        if parse_manifest(name) is None:
            raise CheckpointError(f"{name[:200]!r} is not the name of a checkpoint manifest")
        manifest = Manifest.parse(self._read_small(name, MAX_BYTES), f"{self.uri}/{name}")
        if manifest.name != name:
            raise CheckpointError(f"{self.uri}/{name} contains the manifest of {manifest.name}")
        return manifest

    def verify_file(self, info: FileInfo) -> None:
        """Read a file, and compare its SHA-256 with the manifest's. Raises `CheckpointError` if they differ."""
        file = HashedFile(info, self.folder.read_into)
        file.skip(info.size)
        file.compare()

    def _readable_claims(self, contents: Contents) -> list[tuple[ClaimName, Claim]]:
        found = []
        for name in contents.claims:
            if name not in self._claims:
                self._claims[name] = self._read_claim(name)
            claim = self._claims[name]
            if claim is not None:
                found.append((name, claim))
        return found

    def _read_claim(self, name: ClaimName) -> Claim | None:
        try:
            claim = Claim.parse(self._read_small(str(name), 1 << 20), f"{self.uri}/{name}")
        except StorageError:
            raise
        except CheckpointError:
            return None  # then nothing is excluded because of it
        own = (claim.lease, claim.term, claim.origin.history)
        return claim if own == (name.lease, name.term, name.history) else None

    def _read_evaluation(self, name: ManifestName) -> Evaluation | None:
        own = evaluation_name(name)
        try:
            evaluation = Evaluation.parse(self._read_small(own, 1 << 20), f"{self.uri}/{own}")
        except StorageError:
            raise
        except CheckpointError:
            return None  # the checkpoint itself does not depend on it
        return evaluation if evaluation.manifest == str(name) else None

    def _read_small(self, name: str, limit: int) -> bytes:
        size = self.folder.size(name)
        if size is not None and size > limit:
            raise CheckpointError(f"{self.uri}/{name} has {size} bytes: at most {limit} are valid")
        return self.folder.read(name)


def excluded(manifest: ManifestName, claims: Iterable[tuple[ClaimName, Claim]]) -> ClaimName | None:
    """Returns the claim that excludes `manifest` from the history; None when `manifest` is in the history.

    A claim excludes the manifests of older leases and terms that are newer than the manifest it continues from.
    """
    for name, claim in claims:
        base = parse_manifest(claim.base)
        newer = (name.lease, name.term) > (manifest.lease, manifest.term)
        if newer and (base is None or manifest > base):
            return name
    return None


def _next(what: str, newest: int, uri: str) -> int:
    if newest >= HIGHEST:
        raise CheckpointError(
            f"a file in {uri} has the highest {what} number {HIGHEST}. Use another "
            f"checkpoint.uri, or delete the files with that {what} number if they are not of this job"
        )
    return newest + 1


class HashedFile:
    """Reads a file from its beginning to its end, and computes its SHA-256.

    Attributes:
        at: the number of bytes so far.
    """

    def __init__(self, info: FileInfo, read_into: Callable[[str, int, memoryview], None]) -> None:
        self._info, self._read_into, self.at = info, read_into, 0
        self._digest = hashlib.sha256()

    def __call__(self, buffer: memoryview) -> None:
        """Fill `buffer` with the next bytes."""
        for start in range(0, len(buffer), _CHUNK):
            part = buffer[start : start + _CHUNK]
            self._read_into(self._info.name, self.at, part)
            self._digest.update(part)
            self.at += len(part)

    def skip(self, nbytes: int) -> None:
        """Read the next bytes, and keep none of them."""
        buffer = memoryview(bytearray(min(nbytes, _CHUNK)))
        for start in range(0, nbytes, _CHUNK):
            self(buffer[: nbytes - start])

    def compare(self) -> None:
        """Raises `CheckpointError` if the file, which was read, has another SHA-256 than its manifest says."""
        if self._digest.hexdigest() != self._info.sha256:
            raise CheckpointError(f"{self._info.name} is damaged: its SHA-256 is not the manifest's")


def _sha256_of(path: str) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:  # noqa: PTH123
        while block := file.read(_CHUNK):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()
