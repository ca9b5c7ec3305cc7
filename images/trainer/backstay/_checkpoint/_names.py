"""The names of the files in a checkpoint folder. A file is read only when its name matches one of these patterns.

A name is unique: it contains the history, and the values that make the file unique within that history. Leases are
rewritten, each by its one writer. No other file is ever replaced.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = [
    "EVALUATION_SUFFIX",
    "HIGHEST",
    "MANIFEST_SUFFIX",
    "ClaimName",
    "LeaseName",
    "ManifestName",
    "ShardName",
    "evaluation_name",
    "is_format_1",
    "is_unknown_manifest",
    "parse_claim",
    "parse_evaluation",
    "parse_lease",
    "parse_manifest",
    "parse_shard",
]

MANIFEST_SUFFIX: Final = ".manifest.json"

EVALUATION_SUFFIX: Final = ".evaluation.json"

HIGHEST: Final = 10**8 - 1
"""The highest number of a lease and of a term, because names have eight digits for each."""

_HISTORY: Final = "[0-9a-f]{16}"
_MANIFEST: Final = re.compile(
    rf"step-([0-9]{{12}})-term-([0-9]{{8}})-lease-([0-9]{{8}})-try-([0-9]{{3}})-({_HISTORY})\.manifest\.json"
)
_SHARD: Final = re.compile(
    r"step-([0-9]{12})-term-([0-9]{8})-shard-([0-9]{5})-of-([0-9]{5})-inc-([0-9]{6})-try-([0-9]{3})-"
    rf"({_HISTORY})\.safetensors"
)
_CLAIM: Final = re.compile(rf"claim-([0-9]{{8}})-term-([0-9]{{8}})-([0-9a-f]{{16}})-({_HISTORY})\.json")
_LEASE: Final = re.compile(r"lease-([0-9]{8})-([0-9a-f]{16})\.json")
# Manifests of versions before 22 November 2026 have no history and no checksum.
_FORMAT_1: Final = re.compile(r"step-[0-9]{12}-term-[0-9]{8}-inc-[0-9]{6}\.manifest\.json")


class ManifestName(NamedTuple):
    """The name of a manifest; `attempt` counts the tries to write this version.

    Manifests compare by (lease, term, version, attempt): a newer one is greater.
    """

    lease: int
    term: int
    version: int
    attempt: int
    history: str

    def __str__(self) -> str:
        return (
            f"step-{self.version:012d}-term-{self.term:08d}-lease-{self.lease:08d}-try-{self.attempt:03d}-"
            f"{self.history}{MANIFEST_SUFFIX}"
        )


class ShardName(NamedTuple):
    """The name of the file with one shard's arrays; `incarnation` is that of the shard's server."""

    term: int
    version: int
    shard: int
    shards: int
    incarnation: int
    attempt: int
    history: str

    def __str__(self) -> str:
        return (
            f"step-{self.version:012d}-term-{self.term:08d}-shard-{self.shard:05d}-of-{self.shards:05d}-"
            f"inc-{self.incarnation:06d}-try-{self.attempt:03d}-{self.history}.safetensors"
        )


class ClaimName(NamedTuple):
    """The name of the record with which the holder of a lease begins a term. Claims compare by (lease, term)."""

    lease: int
    term: int
    token: str
    history: str

    def __str__(self) -> str:
        return f"claim-{self.lease:08d}-term-{self.term:08d}-{self.token}-{self.history}.json"


class LeaseName(NamedTuple):
    """Returns the name of a lease, which has its number and the random token of the process that wrote it."""

    number: int
    token: str

    def __str__(self) -> str:
        return f"lease-{self.number:08d}-{self.token}.json"


def parse_manifest(name: str) -> ManifestName | None:
    """Returns the parts of a manifest's name; None when `name` is not the name of a manifest."""
    match = _MANIFEST.fullmatch(name)
    if match is None:
        return None
    return ManifestName(int(match[3]), int(match[2]), int(match[1]), int(match[4]), match[5])


def evaluation_name(manifest: ManifestName) -> str:
    """Returns the name of the file with the evaluation of a checkpoint."""
    return str(manifest).removesuffix(MANIFEST_SUFFIX) + EVALUATION_SUFFIX


def parse_evaluation(name: str) -> ManifestName | None:
    """Returns the manifest whose evaluation is in the file `name`; None when `name` is not the name of such a file."""
    if not name.endswith(EVALUATION_SUFFIX):
        return None
    return parse_manifest(name.removesuffix(EVALUATION_SUFFIX) + MANIFEST_SUFFIX)


def parse_shard(name: str) -> ShardName | None:
    """Returns the parts of a shard file's name; None when `name` is not the name of a shard's file."""
    match = _SHARD.fullmatch(name)
    if match is None:
        return None
    version, term, shard, shards, incarnation, attempt = (int(match[group]) for group in range(1, 7))
    return ShardName(term, version, shard, shards, incarnation, attempt, match[7])


def parse_claim(name: str) -> ClaimName | None:
    """Returns the parts of a claim's name; None when `name` is not the name of a claim."""
    match = _CLAIM.fullmatch(name)
    return None if match is None else ClaimName(int(match[1]), int(match[2]), match[3], match[4])


def parse_lease(name: str) -> LeaseName | None:
    """Returns the parts of a lease's name; None when `name` is not the name of a lease."""
    match = _LEASE.fullmatch(name)
    return None if match is None else LeaseName(int(match[1]), match[2])


def is_format_1(name: str) -> bool:
    """Returns whether `name` is the name of a manifest of format 1, which this version does not read."""
    return _FORMAT_1.fullmatch(name) is not None


def is_unknown_manifest(name: str) -> bool:
    """Returns whether `name` ends like the name of a manifest and has a format that this version does not support."""
    return name.endswith(MANIFEST_SUFFIX) and parse_manifest(name) is None and not is_format_1(name)
