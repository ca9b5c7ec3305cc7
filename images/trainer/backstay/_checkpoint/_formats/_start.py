"""Reads initial parameters from elsewhere by name (`start_from`), and reports what did not fit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache as once
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import unquote

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from ..._update import MODEL_STATE, LeafSpec, digest_of, some_of
from ...errors import CheckpointError, ConfigurationError
from .._manifest import FrozenLeaf, FrozenRecord
from .._names import MANIFEST_SUFFIX
from ._arrays import Arrays, MissingArray, Readers, fix, open_arrays

__all__ = ["MadeByInit", "Mapped", "StartFrom", "StartValues", "frozen_beside", "read_start"]

_LOG = logging.getLogger(__name__)

Mapped = str | Any | None
_Array = NDArray[np.generic]
_SHOWN: Final = 20
_INEXACT: Final = (jnp.floating, jnp.complexfloating)
_COLLECTION: Final = "params."
_STATES: Final = (MODEL_STATE, "state.", "batch_stats.")
"""Beginnings of the names of a model state, in the order of preference."""


@dataclass(frozen=True)
class StartFrom:
    """The source of the initial parameters, for ``train(start_from=...)``.

    Attributes:
        uri: a path or any fsspec URI of one of these: a checkpoint of Backstay (a manifest); a folder with checkpoints
            (its newest complete one); a safetensors file; a folder of safetensors files; an Orbax checkpoint; the
            folder of a ``CheckpointManager`` (its newest step).
        mapping: ``mapping(name, arrays)`` returns the value of the parameter `name` of `init`, such as
            ``layers.0.kernel``. The names of a model state begin with ``state/``. `arrays` is a mapping of names to
            NumPy arrays, and reads an array when the function looks it up. The function returns an array of the
            parameter's shape, or the name of an array, or None for a parameter without a value.
            Without `mapping`, arrays have the names of the parameters. A key ``params`` around all of them is ignored.
            A key ``state`` or ``batch_stats`` beside ``params`` is the model state.
        missing: the treatment of a parameter without a value: an ``error``, or the value that `init` returns
            (``init``). A model state without any value begins as `init` returns it, if none of it is frozen.
        unexpected: the treatment of an array that no parameter uses: an ``error``, or ``ignore``.
        shapes: the treatment of an array whose shape differs from that of its parameter, such as a head for another
            number of classes: an ``error``, or the value that `init` returns (``init``). The log lists them.
        base: the source of the arrays that were frozen beside a checkpoint of Backstay. True: the place where its
            job read them. Otherwise a path, a URI or a `StartFrom`. They must have the digests of that job, and may
            have other names.
        cache: a folder on the node, such as one of a ``hostPath`` volume, for what is read from an object store. It
            makes the start of a replacement shorter. Several pods of one user id can use it. Only parts of a read that
            failed are deleted from it. Orbax checkpoints are not cached. Empty: no cache.
    """

    uri: str
    mapping: Callable[[str, Mapping[str, _Array]], Mapped] | None = None
    missing: Literal["error", "init"] = "error"
    unexpected: Literal["error", "ignore"] = "error"
    shapes: Literal["error", "init"] = "error"
    base: Any = True
    cache: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", str(self.uri))
        if not isinstance(self.cache, str | os.PathLike) or "://" in str(self.cache):
            raise ConfigurationError(f"start_from: cache is {self.cache!r}: must be the path of a folder on the node")
        object.__setattr__(self, "cache", str(self.cache))
        if not self.uri:
            raise ConfigurationError("start_from has an empty uri: must name a checkpoint")
        if self.mapping is not None and not callable(self.mapping):
            raise ConfigurationError(
                f"start_from: mapping is {type(self.mapping).__name__}: must be a function of a name and arrays"
            )
        treatments = (("missing", "init"), ("unexpected", "ignore"), ("shapes", "init"))
        for name, valid in ((name, ("error", other)) for name, other in treatments):
            if getattr(self, name) not in valid:
                raise ConfigurationError(f"start_from: {name} is {getattr(self, name)!r}: must be {' or '.join(valid)}")
        if not (self.base is True or isinstance(self.base, str | os.PathLike | StartFrom)):
            raise ConfigurationError(
                f"start_from: base is {type(self.base).__name__}: must be True, a path, a URI or a StartFrom"
            )


class MadeByInit(Exception):  # noqa: N818
    """`init` made this array for the job of a checkpoint, or a place has another one. `init` decides: its result is
    compared with the digest.

    Attributes:
        name: the name of the array.
        digest: the digest that the checkpoint has for it.
        why: the result of looking for it; empty: it was certain that there is no array.
    """

    def __init__(self, name: str, digest: str, why: str = "") -> None:
        super().__init__(name)
        self.name, self.digest, self.why = name, digest, why


@dataclass
class _StartReport:
    """The results for each parameter and each array."""

    taken: int = 0
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    resized: list[str] = field(default_factory=list)
    converted: list[str] = field(default_factory=list)
    stateless: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Returns the lists that are not empty, a line each."""
        lists = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "of another shape or kind": self.misfits,
            "of another shape, which begin as init returns them": self.resized,
            "converted": self.converted,
            "of the model state, which begins as init returns it": self.stateless,
        }
        return "".join(f"\n  {name} ({len(found)}): {some_of(found, _SHOWN)}" for name, found in lists.items() if found)

    def check(self, start: StartFrom, where: str) -> None:
        """Refuse what `start` has no treatment for. Raises `CheckpointError`."""
        missing = self.missing and start.missing == "error"
        unexpected = self.unexpected and start.unexpected == "error"
        if self.misfits or missing or unexpected:
            raise CheckpointError(
                f"start_from: {where} does not fit what init returns:{self.text()}\n"
                "Use StartFrom(uri, mapping=...) to translate names and shapes. missing='init' keeps the initial "
                "values of missing parameters, and shapes='init' those of parameters whose shape differs. "
                "unexpected='ignore' leaves out arrays that have no parameter."
            )


@dataclass(frozen=True)
class StartValues:
    """The values of some leaves.

    Attributes:
        values: in the order of the leaves, as `place` returned them; None for a leaf that begins as `init` returns it.
            A leaf that is not needed is described only.
        of_init: some of these leaves, by number, which were frozen beside a checkpoint and have no array.
    """

    values: list[Any]
    of_init: dict[int, MadeByInit]


def read_start(
    start: StartFrom,
    fixed: str,
    leaves: Sequence[LeafSpec],
    others: Sequence[LeafSpec] | None = (),
    needed: Collection[int] | None = None,
    place: Callable[[int, _Array], Any] = lambda number, value: value,
) -> StartValues:
    """Returns the values of `leaves`.

    Args:
        fixed: the reference that `fix` returned for ``start.uri``.
        others: the leaves of the model whose values another process reads: here they are only looked for. None: there
            are others, and that process compares the names.
        needed: which leaves are needed, by index; None: all. Of the others at most one is in memory at a time.
        place: gets the index and the value of a leaf that is needed. It returns what is kept of the value.

    Raises:
        CheckpointError: the arrays cannot be read, or do not fit. The message lists the names that were missing,
            unexpected or of another shape.
        Exception: any that the mapping raises, except the one for an array that does not exist.
    """
    report = _StartReport()
    everyone = [*leaves, *(others or ())]
    with _opened(start, fixed) as arrays:
        begin = _collection(arrays, everyone) if start.mapping is None else ""
        result = _values(start, arrays, begin, leaves, needed, place, report)
        report.taken = sum(value is not None for value in result.values) + len(result.of_init)
        elsewhere = {leaf.name for leaf in others or () if _exists(start, arrays, begin, leaf)}
        if others is not None:
            of_model = (begin, *_STATES) if any(not leaf.trained for leaf in everyone) else (begin,)
            unread = (name for name in arrays if name not in arrays.read_names)
            report.unexpected = sorted(name for name in unread if name.startswith(of_model))
        where, names = arrays.where, sorted(arrays)
    # State that training changes may begin as `init` returns it. Frozen state is a part of the base.
    if others:
        report.missing, report.stateless = report.missing + report.stateless, []
    # A file may have parameters only. With a part of the model's state in it, the rest is missing.
    stateless = report.stateless + [leaf.name for leaf in others or () if not (leaf.trained or leaf.name in elsewhere)]
    if len(stateless) < sum(not leaf.trained for leaf in everyone):
        report.missing, report.stateless = report.missing + stateless, []
    report.check(start, where)
    if leaves and others is not None and not report.taken and not elsewhere:
        raise CheckpointError(
            f"start_from: no parameter of init has a value in {where}, so nothing would start from it. The parameters "
            f"({len(leaves)}): {some_of([leaf.name for leaf in leaves], _SHOWN)}. The arrays ({len(names)}): "
            f"{some_of(names, _SHOWN)}. Use StartFrom(uri, mapping=...) to translate the names.{report.text()}"
        )
    log = _LOG.warning if report.missing or report.unexpected or report.resized else _LOG.info
    kind = "trained " if others is None else "frozen " if others else ""
    what = f"{kind}parameters" if all(leaf.trained for leaf in leaves) else "arrays of the model"
    log("start_from: %d of %d %s come from %s%s", report.taken, len(leaves), what, where, report.text())
    return result


def _values(
    start: StartFrom,
    arrays: Arrays,
    begin: str,
    leaves: Sequence[LeafSpec],
    needed: Collection[int] | None,
    place: Callable[[int, _Array], Any],
    report: _StartReport,
) -> StartValues:
    """Returns the values of `leaves`, as in `read_start`. `report` gets the names of those that have none."""
    values: list[Any] = []
    of_init: dict[int, MadeByInit] = {}
    for number, leaf in enumerate(leaves):
        kept = found = value = None
        try:
            found = _find(arrays, begin, leaf) if start.mapping is None else _mapped(start.mapping, arrays, leaf)
        except MadeByInit as made:
            of_init[number] = made
        if isinstance(found, str):
            (report.missing if leaf.trained else report.stateless).append(found)
        elif found is not None and (value := _fitted(found, leaf, report, start.shapes)) is not None:
            if needed is None or number in needed:
                kept = place(number, value)
            else:
                kept = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]
        values.append(kept)
    return StartValues(values, of_init)


@contextlib.contextmanager
def _opened(start: StartFrom, fixed: str) -> Iterator[Arrays]:
    """The arrays of a place, with those that were frozen beside a checkpoint."""
    with contextlib.ExitStack() as stack:
        frozen = partial(_frozen_arrays, stack, start.base, cache=start.cache)
        yield stack.enter_context(open_arrays(fixed, frozen, cache=start.cache))


@contextlib.contextmanager
def frozen_beside(record: FrozenRecord, base: Any) -> Iterator[Arrays]:
    """The arrays that were frozen beside a checkpoint, by their paths, in the order of the tree.

    Args:
        base: True: the place where the job read them. A path, a URI or a `StartFrom`: another place.

    Raises:
        CheckpointError: the place cannot be opened, when an array is looked up.
        MadeByInit: an array that is looked up is not there or differs.
    """
    with contextlib.ExitStack() as stack:
        readers = _frozen_arrays(stack, base, record)
        yield Arrays(record.start_from if base is True else str(getattr(base, "uri", base)), readers)


def _frozen_arrays(stack: contextlib.ExitStack, base: Any, record: FrozenRecord, cache: str = "") -> Readers:
    """See `open_arrays`. The place is opened for the first array."""
    place = once(lambda: _Beside(stack, base, record, cache))

    def read(leaf: FrozenLeaf) -> _Array:
        if base is True and not record.uri:
            raise MadeByInit(leaf.path, leaf.digest)
        return place().read(leaf.path)

    return {leaf.path: partial(read, leaf) for leaf in record.leaves}


class _Beside:
    """The place of the arrays that were frozen beside a checkpoint. Their digests identify them: a job may have
    translated their names, and its mapping is not stored."""

    def __init__(self, stack: contextlib.ExitStack, base: Any, record: FrozenRecord, cache: str) -> None:
        if base is True:
            self._start = StartFrom(record.start_from, cache=cache)
        else:
            self._start = base if isinstance(base, StartFrom) else StartFrom(os.fspath(base))
        # Of files, the digests show whether they have the arrays. A folder may have a newer checkpoint.
        is_manifest = base is True and record.uri.endswith(MANIFEST_SUFFIX)
        try:
            fixed = record.uri if is_manifest else fix(self._start.uri)
            self._arrays = stack.enter_context(_opened(self._start, fixed))
        except CheckpointError as error:
            place = Path(self._start.uri)
            if base is not True or "://" in self._start.uri or place.is_absolute() or place.exists():
                raise
            raise CheckpointError(
                f"{error}. The job named this place relative to its folder: give it as `base`"
            ) from error
        self._digests = {leaf.path: leaf.digest for leaf in record.leaves}
        self._specs = {
            leaf.path: LeafSpec(
                leaf.path.removeprefix(MODEL_STATE),
                tuple(leaf.shape),
                np.dtype(jnp.dtype(leaf.dtype)),
                not leaf.path.startswith(MODEL_STATE),
            )
            for leaf in record.leaves
        }
        self._kinds: dict[tuple[int, ...], dict[Any, LeafSpec]] = {}  # by shape and dtype
        for spec in self._specs.values():
            self._kinds.setdefault(spec.shape, {})[spec.dtype] = spec
        self._begin = _collection(self._arrays, list(self._specs.values()))
        self._rest = iter(self._arrays)
        self._names: dict[str, str] = {}  # the digests of arrays that were read in the search for others -> their names
        self._unreadable = ""

    def read(self, path: str) -> _Array:
        """Returns an array with the digest of the checkpoint.

        Raises:
            CheckpointError: the array cannot be read.
            MadeByInit: no array has the digest.
        """
        spec, digest, report = self._specs[path], self._digests[path], _StartReport()
        mapping, where = self._start.mapping, self._arrays.where
        try:
            named = _find(self._arrays, self._begin, spec) if mapping is None else _mapped(mapping, self._arrays, spec)
        except MadeByInit as made:
            if made.digest == digest and not made.why:
                raise
            named = made.name
        value = None if isinstance(named, str) else _fitted(named, spec, report, "error")
        if value is not None and digest_of(value) == digest:
            return value
        if (found := self._search(spec, digest)) is not None:
            return found
        if isinstance(named, str):
            why = f"is not there{self._unreadable}"
        else:
            why = "differs" if value is not None else f"does not fit:{report.text()}"
        why = f"the checkpoint was trained beside a frozen {path}, whose array in {where} {why}"
        raise MadeByInit(path, digest, why)

    def _search(self, spec: LeafSpec, digest: str) -> _Array | None:
        """Returns an array with this digest under any name. The place is read once, and not further than needed.

        Raises:
            CheckpointError: an array was changed after its digest was computed.
        """
        if digest in self._names:
            value = _fitted(self._arrays[self._names[digest]], spec, _StartReport(), "error")
            if value is None or digest_of(value) != digest:
                raise CheckpointError(f"{self._names[digest]} in {self._arrays.where} was changed while it was read")
            return value
        for name in self._rest:
            shape = self._arrays.shape_of(name)
            if shape is not None and shape not in self._kinds:
                continue
            try:
                array = self._arrays[name]
            except MadeByInit:
                continue
            except CheckpointError as error:
                self._unreadable = self._unreadable or f", and {error}"
                continue
            for found, value in self._as_leaves(array):
                self._names.setdefault(found, name)
                if found == digest:
                    return value
        return None

    def _as_leaves(self, array: _Array) -> Iterator[tuple[str, _Array]]:
        """Yields the array as each kind of leaf that it fits, with its digest."""
        for spec in self._kinds.get(array.shape, {}).values():
            if (value := _fitted(array, spec, _StartReport(), "error")) is not None:
                yield digest_of(value), value


def _collection(arrays: Arrays, leaves: Sequence[LeafSpec]) -> str:
    """``params.`` where the names of the parameters begin with it, beside an optimizer's state for example."""
    wanted = [leaf.path for leaf in leaves if leaf.trained]
    if any(name in arrays for name in wanted) or not any(f"{_COLLECTION}{name}" in arrays for name in wanted):
        return ""
    return _COLLECTION


def _exists(start: StartFrom, arrays: Arrays, begin: str, leaf: LeafSpec) -> bool:
    """Returns whether a leaf has a value, whose name counts as read then."""
    if start.mapping is not None:
        try:
            return not isinstance(_mapped(start.mapping, arrays, leaf), str)
        except MadeByInit:
            return True
    name = _name_of(arrays, begin, leaf)
    if name is not None:
        arrays.read_names.add(name)
    return name is not None


def _find(arrays: Arrays, begin: str, leaf: LeafSpec) -> _Array | str:
    """Returns the array with a parameter's name; the name itself when there is no such array."""
    name = _name_of(arrays, begin, leaf)
    return leaf.name if name is None else arrays[name]


def _name_of(arrays: Arrays, begin: str, leaf: LeafSpec) -> str | None:
    """Returns the name under which an array of a parameter is stored, or None if there is none.

    Other libraries write some characters of a name differently: those that are ``%XX`` here, and slashes for dots.
    """
    for before in (begin,) if leaf.trained else _STATES:
        for name in (leaf.path, unquote(leaf.path), leaf.path.replace(".", "/")):
            if before + name in arrays:
                return before + name
    return None


def _mapped(mapping: Callable[[str, Mapping[str, _Array]], Mapped], arrays: Arrays, leaf: LeafSpec) -> _Array | str:
    try:
        found = mapping(leaf.name, arrays)
    except MissingArray as error:
        return f"{leaf.name} (the mapping looked up {error.args[0]})"
    except MadeByInit as made:
        raise CheckpointError(
            f"start_from: the mapping computes {leaf.name} from {made.name}, which has no array: init made it beside "
            f"{arrays.where}. Write all arrays to a file, and start from it: backstay.export({arrays.where!r}, ..., "
            "base=init(key))"
        ) from made
    if isinstance(found, str):
        if found not in arrays:
            return f"{leaf.name} (the mapping looked up {found})"
        found = arrays[found]
    return leaf.name if found is None else np.asarray(found)


def _fitted(array: _Array, leaf: LeafSpec, report: _StartReport, shapes: str) -> _Array | None:
    if tuple(array.shape) != tuple(leaf.shape):
        found = report.resized if shapes == "init" else report.misfits
        found.append(f"{leaf.name} is {list(array.shape)} in the file and {list(leaf.shape)} in init")
        return None
    if array.dtype == leaf.dtype:
        return array
    kinds = (*_INEXACT, jnp.integer, jnp.bool_)
    kind = next((kind for kind in kinds if jnp.issubdtype(leaf.dtype, kind)), None)
    if kind is None or not jnp.issubdtype(array.dtype, kind):
        report.misfits.append(f"{leaf.name} is {array.dtype.name} in the file and {leaf.dtype.name} in init")
        return None
    with np.errstate(over="ignore"):
        converted = array.astype(leaf.dtype)
    lost = np.isfinite(array) & ~np.isfinite(converted) if kind in _INEXACT else converted != array
    if lost.any():
        report.misfits.append(f"{leaf.name} has values in {array.dtype.name} that {leaf.dtype.name} cannot hold")
        return None
    report.converted.append(f"{leaf.name} from {array.dtype.name} to {leaf.dtype.name}")
    return converted
