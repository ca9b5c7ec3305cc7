"""Which checkpoint of a folder to serve, and its values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import jax

from .._checkpoint import BaseNeeded, CheckpointStore, JobIdentity, ManifestName, load, parse_manifest
from ..errors import ConfigurationError

__all__ = ["CheckpointChoice", "Listing", "LoadedCheckpoint"]

_SUFFIX: Final = ".manifest.json"


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint in memory, whose checksums were correct.

    Attributes:
        name: the parts of the manifest's name.
        job: the job that wrote it.
        params, state: what `predict` receives, as NumPy arrays.
    """

    name: ManifestName
    job: JobIdentity
    params: Any = field(repr=False)
    state: Any = field(repr=False)

    @property
    def shapes(self) -> Any:
        """The structure, shapes and dtypes of the pair ``(params, state)``."""
        leaves, treedef = jax.tree.flatten((self.params, self.state))
        return treedef, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

    def difference(self, shapes: Any) -> str | None:
        """Returns the first difference between `shapes` of another checkpoint and of this one; None without a
        difference."""
        own, leaves = self.shapes
        treedef, others = shapes
        if own != treedef:
            return "its tree has another structure"
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path((self.params, self.state))[0]]
        for path, (shape, dtype), (other_shape, other_dtype) in zip(paths, leaves, others, strict=True):
            if (shape, dtype) != (other_shape, other_dtype):
                name = jax.tree_util.keystr(path[1:], simple=True, separator="/")
                return f"{name or 'its array'} is {dtype}{list(shape)}, must be {other_dtype}{list(other_shape)}"
        return None


@dataclass(frozen=True)
class Listing:
    """The content of a checkpoint folder at one time.

    Attributes:
        names: all its files.
        found: the checkpoints that may be served, newest first.
        left: whether the served checkpoint is not in the history any more: training continued from an older one.
    """

    names: tuple[str, ...]
    found: list[ManifestName]
    left: bool


class CheckpointChoice:
    """The checkpoints of a folder that may be served."""

    def __init__(
        self, uri: str, *, step: int | None = None, like: Any = None, average: bool = False, base: Any = True
    ) -> None:
        """
        Args:
            uri: a checkpoint folder, or one manifest in it, which is then the only one that may be served.
            step: the step to serve; None: any.
            like: see `backstay.load`.
            average: whether `predict` receives the moving average instead of the parameters.
            base: see `backstay.load`, for checkpoints with frozen arrays.

        Raises:
            ConfigurationError: `uri` ends like a manifest and is not the name of one.
            CheckpointError: the folder cannot be opened; see `backstay.load`.
        """
        self._only: ManifestName | None = None
        folder = uri
        if uri.endswith(_SUFFIX):
            folder, _, name = uri.rpartition("/")
            self._only = parse_manifest(name)
            if self._only is None:
                raise ConfigurationError(f"checkpoint is {uri}, which is not the name of a checkpoint's manifest")
        self.uri = folder or "."
        self._step, self._like, self._average, self._base = step, like, average, base
        self._store = CheckpointStore(self.uri)

    @property
    def fixed(self) -> bool:
        """Whether only one step may be served."""
        return self._only is not None or self._step is not None

    def look(self, served: ManifestName | None) -> Listing:
        """List the folder.

        Args:
            served: the checkpoint that is served.

        Raises:
            StorageError: the folder cannot be listed, or a claim in it cannot be read.
        """
        contents = self._store.contents()
        found = [
            name
            for name in self._store.in_history(contents)
            if self._only in (None, name) and self._step in (None, name.version)
        ]
        left = served is not None and not self._store.in_history(contents, [served])
        return Listing(contents.names, found, left)

    def load(self, name: ManifestName) -> LoadedCheckpoint:
        """Read a checkpoint, and compare its checksums.

        Raises:
            StorageError: the storage fails now.
            CheckpointError: the checkpoint is damaged or incomplete, or cannot be loaded with `like`.
            ConfigurationError: the job that wrote the checkpoint has no moving average, or `base` is needed.
        """
        manifest = self._store.read_manifest(str(name))
        base = False if manifest.frozen is None else self._base
        try:
            found = load(self._store.uri_of(manifest), self._like, base=base)
        except BaseNeeded as error:
            raise ConfigurationError(str(error)) from error
        if self._average and found.average is None:
            raise ConfigurationError(
                f"serve has average=True, but {name} has no moving average: train with train(average=...), or serve "
                "the parameters"
            )
        params = found.average if self._average else found.params
        return LoadedCheckpoint(name, manifest.origin.job, params, found.state)

    def nothing(self) -> str:
        """Returns why there is nothing to serve, for people."""
        if self._only is not None:
            return f"{self.uri} has no checkpoint {self._only}"
        step = "" if self._step is None else f" of step {self._step}"
        return f"{self.uri} has no complete checkpoint{step} yet"
