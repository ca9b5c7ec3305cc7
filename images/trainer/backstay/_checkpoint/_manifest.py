"""What a manifest says: it makes the checkpoint (T7), so everything a reader needs is in it and is checked here.

File names carry version, term and incarnation (T6): two histories never write the same name, and readers order by
(term, version) without opening anything.
"""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import CheckpointError

FORMAT: Final = 1
SUFFIX: Final = ".manifest.json"

_MANIFEST_NAME: Final = re.compile(r"step-(\d{12})-term-(\d{8})-inc-(\d{6})\.manifest\.json")
_SHARD_NAME: Final = re.compile(r"step-(\d{12})-term-(\d{8})-shard-(\d{5})-of-(\d{5})-inc-(\d{6})\.safetensors")


class FileRange(BaseModel):
    """Elements ``start:stop`` of the flattened array `key` stand in a file, as the tensor ``key[start:stop]``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: str
    start: int = Field(ge=0)
    stop: int = Field(ge=0)

    @property
    def tensor(self) -> str:
        """The name of the tensor in the safetensors file."""
        return f"{self.key}[{self.start}:{self.stop}]"


class FileInfo(BaseModel):
    """One file of a checkpoint: its name in the folder, its size in bytes, its SHA-256 in hex, and what is in it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    name: str
    size: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    ranges: tuple[FileRange, ...] = ()


class ManifestLeaf(BaseModel):
    """One leaf of the parameters, in the order of the tree."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    path: str
    shape: tuple[int, ...]
    dtype: str


class Manifest(BaseModel):
    """A whole checkpoint. `state` is the coordinator's own (JSON), `structure` the tree of parameters."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: Literal[1] = 1
    job: str = ""
    version: int = Field(ge=0)
    term: int = Field(ge=0)
    incarnation: int = Field(ge=0)
    shards: int = Field(ge=1)
    steps: int | None = None
    optimizer: str = ""  # a fingerprint of the optimizer's state: another optimizer's checkpoint is refused
    leaves: tuple[ManifestLeaf, ...]
    structure: dict[str, Any]
    files: tuple[FileInfo, ...]
    state: dict[str, Any] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    unix_seconds: float = 0.0

    @property
    def name(self) -> str:
        """The manifest's own file name."""
        return manifest_name(self.version, self.term, self.incarnation)

    @property
    def order(self) -> tuple[int, int, int]:
        """Newer checkpoints compare greater: (term, version, incarnation)."""
        return self.term, self.version, self.incarnation

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: `text` is not a manifest, or one of a format that this version does not know.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            at = ".".join(str(part) for part in first["loc"]) or "the whole file"
            raise CheckpointError(
                f"{where} is not a checkpoint manifest of format {FORMAT}: {at}: {first['msg']}"
            ) from None


def manifest_name(version: int, term: int, incarnation: int) -> str:
    """``step-...-term-...-inc-....manifest.json``."""
    return f"step-{version:012d}-term-{term:08d}-inc-{incarnation:06d}{SUFFIX}"


def shard_name(version: int, term: int, shard: int, shards: int, incarnation: int) -> str:
    """``step-...-term-...-shard-...-of-...-inc-....safetensors``."""
    return f"step-{version:012d}-term-{term:08d}-shard-{shard:05d}-of-{shards:05d}-inc-{incarnation:06d}.safetensors"


def order_of_manifest(name: str) -> tuple[int, int, int] | None:
    """(term, version, incarnation) of a manifest's file name, None for any other name."""
    match = _MANIFEST_NAME.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[1]), int(match[3]))


def order_of_shard(name: str) -> tuple[int, int] | None:
    """(term, version) of a shard's file name, None for any other name."""
    match = _SHARD_NAME.fullmatch(name)
    return None if match is None else (int(match[2]), int(match[1]))
