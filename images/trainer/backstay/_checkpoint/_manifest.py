"""The content of a manifest. A checkpoint exists by its manifest (T7), so all values that readers rely on are checked.

A manifest names its history, and contains its own checksum. `Manifest.parse` accepts only what `Manifest.text` can
have written: names by pattern, ranges that cover each array once, a structure and a state without contradictions.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from backstay_spec import contract

from .._update import MODEL_STATE, PARAMS, merged, some_of
from ..errors import CheckpointError
from ._dtypes import BY_NAME
from ._names import ManifestName, parse_shard
from ._seal import seal, unseal
from ._structure import check_structure

__all__ = [
    "FORMAT",
    "Claim",
    "Evaluation",
    "FileInfo",
    "FileRange",
    "FrozenLeaf",
    "FrozenRecord",
    "JobIdentity",
    "Manifest",
    "ManifestLeaf",
    "Origin",
]

FORMAT: Final = 2
MAX_BYTES: Final = 256 << 20
"""A larger manifest is refused before it is read."""

_MAX: Final = 2**63 - 1
_SHOWN: Final = 5
_HISTORY: Final = "^[0-9a-f]{16}$"
_Item = TypeVar("_Item")
_List = Annotated[tuple[_Item, ...], Field(strict=False)]  # JSON has lists only; their items stay strict


class _StoredModel(BaseModel):
    # Strict: this module writes numbers as numbers and texts as texts, so any other spelling is invalid.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)


class JobIdentity(_StoredModel):
    """The job that a history belongs to."""

    namespace: str = "default"
    name: str = ""
    uid: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"

    def same_job(self, other: JobIdentity) -> bool:
        """Returns whether both are runs of one job: the namespace and the name are equal."""
        return (self.namespace, self.name) == (other.namespace, other.name)


class Origin(_StoredModel):
    """Where a checkpoint comes from.

    Attributes:
        history: random text, chosen when the first term of the history begins.
        job: the job that wrote the checkpoint.
        seed: the script's seed.
        digest: hexadecimal digest of the partition that the pods of the term use.
        structure: digest of the structure of parameters and optimizer state. Training continues only with an equal one.
        settings: settings that may differ between two runs of a job, as text. A difference is reported.
    """

    history: str = Field(pattern=_HISTORY)
    job: JobIdentity
    seed: int = Field(ge=0, le=_MAX)
    digest: str = ""
    structure: str = ""
    settings: dict[str, str] = Field(default_factory=dict)


class FileRange(_StoredModel):
    """Elements ``start:stop`` of the flattened array `key`, stored in a file as the tensor ``key[start:stop]``."""

    key: str
    start: int = Field(ge=0, le=_MAX)
    stop: int = Field(ge=0, le=_MAX)

    @property
    def tensor(self) -> str:
        """The name of the tensor in the safetensors file."""
        return f"{self.key}[{self.start}:{self.stop}]"


class FileInfo(_StoredModel):
    """One file of a checkpoint, with its name in the folder, its size in bytes, its SHA-256 in hex, and its content."""

    name: str
    size: int = Field(ge=0, le=_MAX)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    ranges: _List[FileRange] = ()

    @field_validator("name")
    @classmethod
    def _is_a_shards(cls, name: str) -> str:
        if parse_shard(name) is None:
            raise ValueError(f"{name[:200]!r} is not the name of a shard's file")
        return name


class ManifestLeaf(_StoredModel):
    """One leaf of the parameters, in the order of the tree."""

    path: str
    shape: _List[int]
    dtype: str

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @model_validator(mode="after")
    def _can_be_an_array(self) -> ManifestLeaf:
        if len(self.shape) > 64 or any(length < 0 for length in self.shape) or self.size > _MAX:
            raise ValueError(f"{self.path[:200]!r} has an invalid shape")
        if self.dtype not in BY_NAME:
            raise ValueError(f"{self.path[:200]!r} has the unknown dtype {self.dtype[:50]!r}")
        return self


class FrozenLeaf(_StoredModel):
    """One frozen leaf. `path` is `LeafSpec.name`, and `digest` the result of `digest_of` for its values."""

    path: str
    shape: _List[int]
    dtype: str
    digest: str = Field(pattern="^[0-9a-f]{16}$")

    def __str__(self) -> str:
        return f"{self.path} {self.dtype}{list(self.shape)}"


class FrozenRecord(_StoredModel):
    """The frozen leaves beside which a checkpoint's parameters were trained. It has no values.

    Attributes:
        start_from: the place that the script names for them; empty: `init` returns them.
        uri: a reference to the content of that place (`fix`).
        leaves: the frozen leaves, in the order of the tree, those of the parameters first.
        structure, places: the structure of all parameters, and for each of its leaves whether it is frozen.
        state_structure, state_places: the same, of the model state. None and no places: nothing in it is frozen.
    """

    start_from: str = ""
    uri: str = ""
    leaves: _List[FrozenLeaf]
    structure: dict[str, Any]
    places: _List[bool]
    state_structure: dict[str, Any] | None = None
    state_places: _List[bool] = ()

    def parameters(self, rest: Iterable[_Item], frozen: Iterable[_Item]) -> list[_Item]:
        """Returns one list for all parameters, out of a value for each that trains, and one for each of `leaves`."""
        return merged(self.places, rest, frozen)

    def of_state(self, rest: Iterable[_Item], frozen: Sequence[_Item]) -> list[_Item]:
        """Returns the same list for the model state."""
        return merged(self.state_places, rest, frozen[sum(self.places) :]) if self.state_places else list(rest)

    def check_rest(self, names: Sequence[str], parameters: int) -> None:
        """Raise `ValueError` if the other leaves of a checkpoint do not fit.

        Args:
            names: the names of these leaves, those of the parameters first.
            parameters: the number of the parameters.
        """
        if self.places.count(False) != parameters:
            raise ValueError("the parameters that train are not those of the whole structure")
        if self.state_structure is not None and self.state_places.count(False) != len(names) - parameters:
            raise ValueError("the model state is not that of the whole structure")
        if both := {leaf.path for leaf in self.leaves} & set(names):
            raise ValueError(f"{min(both)[:200]!r} is frozen and is stored")

    @property
    def digest(self) -> str:
        """64 bits, in hex, which differ for other names, shapes, dtypes or values."""
        text = "\n".join(f"{leaf} {leaf.digest}" for leaf in self.leaves)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def difference(self, other: FrozenRecord, here: str, there: str) -> str:
        """Returns the first leaves in which both differ, in words; empty if names, shapes, dtypes and values are
        equal."""
        if self.digest == other.digest:
            return ""
        mine, theirs = ({leaf.path: leaf for leaf in each.leaves} for each in (self, other))
        names = [path for path in {**mine, **theirs} if mine.get(path) != theirs.get(path)]
        found = (
            f"{some_of(names, _SHOWN)} ({len(names)} of {len(mine)} leaves differ; the digest of all is "
            f"{self.digest} in {here} and {other.digest} in {there})"
        )
        if self.uri != other.uri:
            found += f"; they come from {self.uri or 'init'} in {here} and from {other.uri or 'init'} in {there}"
        return found

    @model_validator(mode="after")
    def _agrees(self) -> FrozenRecord:
        check_structure(self.structure, len(self.places))
        if self.state_structure is not None:
            check_structure(self.state_structure, len(self.state_places))
        elif self.state_places:
            raise ValueError("there are places of the model state, and no structure")
        of_state = [leaf.path.startswith(MODEL_STATE) for leaf in self.leaves]
        wanted = [False] * sum(self.places) + [True] * sum(self.state_places)
        if of_state != wanted or len({leaf.path for leaf in self.leaves}) != len(wanted):
            raise ValueError("the frozen leaves are not those of the structure")
        return self


class WorldRecord(_StoredModel):
    """A world of the history, as `CoordinatorState.to_json` writes it."""

    version: int = Field(ge=0, le=_MAX)
    world: int = Field(ge=1, le=2**31)
    offset: int = Field(ge=-_MAX, le=_MAX)


class StateRecord(_StoredModel):
    """The coordinator's state, as `CoordinatorState.to_json` writes it; fields that are not listed are kept."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    term: int = Field(ge=0, le=_MAX)
    version: int = Field(ge=0, le=_MAX)
    world: int = Field(ge=1, le=2**31)
    keySteps: dict[str, int]  # noqa: N815  # the name in the file
    nonFiniteRun: int = Field(ge=0, le=_MAX)  # noqa: N815
    redone: int = Field(ge=0, le=_MAX)
    worlds: _List[WorldRecord]

    @model_validator(mode="after")
    def _agrees(self) -> StateRecord:
        for rank, step in self.keySteps.items():
            if not (rank.isascii() and rank.isdigit() and len(rank) <= 10 and 0 <= step <= _MAX):
                raise ValueError(f"keySteps has the invalid entry {rank[:20]!r}: {step!r:.30}")
        versions = [world.version for world in self.worlds]
        if (
            not versions
            or versions != sorted(set(versions))
            or versions[-1] > self.version
            or self.worlds[-1].world != self.world
        ):
            raise ValueError(
                f"worlds has the versions {str(versions)[:100]}: must have ascending ones up to {self.version}, and "
                f"end with the world {self.world}"
            )
        return self


class Manifest(_StoredModel):
    """A complete checkpoint.

    Attributes:
        leaves, structure: the parameters' leaves and structure.
        state_leaves, state_structure: the model state's leaves and structure; the structure is None for a model without
            state.
        state: the coordinator's state (JSON).
        frozen: the frozen leaves; `leaves` and `state_leaves` are the others. None: there are none.
    """

    format: Literal[2] = 2
    origin: Origin
    lease: int = Field(ge=1, le=10**8 - 1)
    attempt: int = Field(default=0, ge=0, le=999)
    version: int = Field(ge=0, le=10**12 - 1)
    term: int = Field(ge=0, le=10**8 - 1)
    incarnation: int = Field(ge=0, le=contract.MAX_INCARNATION)
    shards: int = Field(ge=1, le=10**5 - 1)
    steps: int | None = None
    leaves: _List[ManifestLeaf]
    structure: dict[str, Any]
    state_leaves: _List[ManifestLeaf] = ()
    state_structure: dict[str, Any] | None = None
    files: _List[FileInfo]
    state: dict[str, Any]
    metrics: dict[str, float] = Field(default_factory=dict)
    metrics_step: int | None = None
    unix_seconds: float = 0.0
    frozen: FrozenRecord | None = None

    @property
    def key(self) -> ManifestName:
        """The values that are in the name; a newer checkpoint compares greater."""
        return ManifestName(self.lease, self.term, self.version, self.attempt, self.origin.history)

    @property
    def name(self) -> str:
        """The manifest's own file name."""
        return str(self.key)

    @model_validator(mode="after")
    def _is_whole(self) -> Manifest:
        check_structure(self.structure, len(self.leaves))
        if self.state_structure is not None:
            check_structure(self.state_structure, len(self.state_leaves))
        elif self.state_leaves:
            raise ValueError("the model state has leaves and no structure")
        if self.frozen is not None:
            rest = [leaf.path for leaf in self.leaves] + [MODEL_STATE + leaf.path for leaf in self.state_leaves]
            self.frozen.check_rest(rest, len(self.leaves))
        _check_state(self)
        _check_files(self)
        return self

    def text(self) -> bytes:
        """Returns the content of its file."""
        document = self.model_dump(mode="json")
        # JSON has no infinity and no NaN, which an evaluation may return.
        document["metrics"] = {name: value for name, value in self.metrics.items() if math.isfinite(value)}
        return seal(document)

    @classmethod
    def parse(cls, text: bytes, where: str) -> Manifest:
        """Read a manifest.

        Raises:
            CheckpointError: `text` is not a manifest, was changed, contradicts itself, or has another format.
        """
        return _parse(cls, text, where, "a checkpoint manifest")


class Claim(_StoredModel):
    """The holder of a lease begins a term: later manifests of older leases and terms are not in the history (T6).

    Attributes:
        base: the manifest that the term begins at; empty for the initial parameters.
        start_from: the source of the initial parameters; empty: `init` returns them.
    """

    format: Literal[2] = 2
    origin: Origin
    lease: int = Field(ge=1, le=10**8 - 1)
    term: int = Field(ge=0, le=10**8 - 1)
    incarnation: int = Field(ge=0)
    base: str = ""
    start_from: str = ""

    def text(self) -> bytes:
        """Returns the content of its file."""
        return seal(self.model_dump(mode="json"))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Claim:
        """Read a claim. Raises `CheckpointError` as `Manifest.parse` does."""
        return _parse(cls, text, where, "a claim of a checkpoint folder")


class Best(_StoredModel):
    """How the best checkpoint of a history is chosen; see `KeepBest` of the TrainingJob."""

    metric: str
    mode: Literal["Max", "Min"]


class Evaluation(_StoredModel):
    """The evaluation of one checkpoint. The first one that is reported is stored, and never replaced.

    Attributes:
        manifest: the name of the checkpoint's manifest.
        metrics: the numbers that `evaluate` returned. NaN and infinities are left out.
        best: how the job chose the best checkpoint; None: it did not.
    """

    format: Literal[2] = 2
    manifest: str
    metrics: dict[str, float]
    best: Best | None = None
    unix_seconds: float = 0.0

    def text(self) -> bytes:
        """Returns the content of its file."""
        return seal(self.model_dump(mode="json"))

    @classmethod
    def parse(cls, text: bytes, where: str) -> Evaluation:
        """Read an evaluation. Raises `CheckpointError` as `Manifest.parse` does."""
        return _parse(cls, text, where, "the evaluation of a checkpoint")


_Document = TypeVar("_Document", bound=_StoredModel)


def _parse(cls: type[_Document], text: bytes, where: str, what: str) -> _Document:
    document = unseal(text, where)
    stated = document.get("format")
    if stated != FORMAT:
        raise CheckpointError(f"{where} has format {stated!r:.20}: this version reads format {FORMAT}")
    try:
        return cls.model_validate(document)
    except RecursionError:
        raise CheckpointError(f"{where} is not {what}: it is nested too deeply") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        at = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise CheckpointError(f"{where} is not {what}: {at}: {first['msg'][:300]}") from None


def _check_state(manifest: Manifest) -> None:
    state = StateRecord.model_validate(manifest.state)
    if (state.term, state.version) != (manifest.term, manifest.version):
        raise ValueError(
            f"the state is of version {state.version} in term {state.term}, the manifest of version "
            f"{manifest.version} in term {manifest.term}"
        )


def _check_files(manifest: Manifest) -> None:
    """
    Raises:
        ValueError: a file is of another checkpoint, or the ranges of an array overlap or leave a gap.
    """
    seen: set[str] = set()
    shards: set[int] = set()
    parts: dict[str, list[tuple[int, int]]] = {}
    for info in manifest.files:
        name = parse_shard(info.name)
        assert name is not None  # `FileInfo` has checked it
        own = (name.history, name.term, name.version, name.shards)
        if own != (manifest.origin.history, manifest.term, manifest.version, manifest.shards):
            raise ValueError(f"{info.name} is a file of another checkpoint")
        if info.name in seen or name.shard >= manifest.shards:
            raise ValueError(f"{info.name} is named twice, or is of a shard that does not exist")
        seen.add(info.name)
        shards.add(name.shard)
        for part in info.ranges:
            parts.setdefault(part.key, []).append((part.start, part.stop))
    if shards != set(range(manifest.shards)):
        raise ValueError(f"a file of one of the {manifest.shards} shards is missing")
    for key, ranges in parts.items():
        if any(start > stop for start, stop in ranges) or list(_gaps(ranges)):
            raise ValueError(f"the ranges of {key[:200]!r} overlap or leave a gap")
    _check_leaves(manifest.leaves, PARAMS, "the parameters", parts)
    _check_leaves(manifest.state_leaves, MODEL_STATE, "the model state", parts)


def _check_leaves(
    leaves: tuple[ManifestLeaf, ...], prefix: str, what: str, parts: dict[str, list[tuple[int, int]]]
) -> None:
    paths = [leaf.path for leaf in leaves]
    if len(set(paths)) != len(paths):
        raise ValueError(f"a leaf of {what} is named twice")
    for leaf in leaves:
        held = max((stop for _, stop in parts.pop(prefix + leaf.path, ())), default=0)
        if held != leaf.size:
            raise ValueError(f"the files hold {held} elements of {leaf.path[:200]!r}, it has {leaf.size}")
    foreign = next((key for key in parts if key.startswith(prefix)), None)
    if foreign is not None:
        raise ValueError(f"the files hold {foreign[:200]!r}, which is not a leaf of {what}")


def _gaps(ranges: list[tuple[int, int]]) -> Iterator[int]:
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            yield start
        at = stop
