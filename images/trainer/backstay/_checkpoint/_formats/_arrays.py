"""Reads named arrays from a checkpoint of Backstay, safetensors files, or an Orbax checkpoint.

A place is a mapping. It reads an array when a caller looks its name up, and records the names that callers looked up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import posixpath
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from json import JSONDecodeError
from pathlib import Path
from typing import Any, Final

import numpy as np
import safetensors
from numpy.typing import NDArray

from ..._update import MODEL_STATE, aligned_empty
from ...errors import CheckpointError, StorageError
from .._dtypes import STORED
from .._files import Folder, PosixFolder, filesystem_of, is_missing, mark_of, open_folder, why
from .._history import patiently
from .._manifest import FrozenRecord, Origin
from .._names import MANIFEST_SUFFIX
from .._reader import OF_MODEL, Reader
from .._store import CheckpointStore, Contents
from ._node_cache import ReadInto, cached
from ._orbax import is_orbax, read_orbax

__all__ = ["Arrays", "MissingArray", "Readers", "fix", "open_arrays"]

_SAFETENSORS: Final = ".safetensors"
_INDEX: Final = ".safetensors.index.json"
_LONGEST_HEADER: Final = 100_000_000  # as in the library
_CHUNK: Final = 256 << 20  # one answer of an object store, which is in memory a second time
_SAMPLE: Final = 64 << 10
"""Bytes at the beginning and at the end of a file. Its fingerprint contains them, and so differs for another file of
the same size."""
_SAMPLES: Final = 32
_SMALL_SAMPLE: Final = 4 << 10
"""Further samples of a file for which the storage has no mark, such as a local one: a copy on another node has another
time. A fine-tuned model differs from its base in the middle."""


_WHILE: Final = "while its arrays were read, which may be of two files"
_STAYS: Final = "It must stay the same while the job runs, and be the same in every pod"

Readers = Mapping[str, Callable[[], NDArray[np.generic]]]
"""Functions that read the arrays, by name. They raise `MadeByInit` for an array that `init` made."""


class MissingArray(KeyError):  # noqa: N818
    """There is no array of this name."""


class Arrays(Mapping[str, NDArray[np.generic]]):
    """Arrays by name.

    Attributes:
        where: the place of the arrays, for messages.
        read_names: the names of the arrays that were read, or looked for.
        was_read: whether an array was read.
    """

    def __init__(self, where: str, readers: Readers) -> None:
        self.where = where
        self.read_names: set[str] = set()
        self.was_read = False
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        if name not in self._readers:
            raise MissingArray(name)
        self.was_read = True
        self.read_names.add(name)
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)

    def __contains__(self, name: object) -> bool:
        return name in self._readers

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of an array; None if it is known only after a read."""
        reader = self._readers[name]
        return tuple(reader.shape) if isinstance(reader, TensorReader) else None


def fix(uri: str, skip: Callable[[Origin], bool] | None = None) -> str:
    """Returns a reference to the present content of `uri`. `open_arrays` refuses the reference when the content has
    changed.

    Args:
        uri: a manifest, a folder with manifests (its newest complete checkpoint), a safetensors file, a folder of them,
            or an Orbax checkpoint.
        skip: a condition on the origin of a manifest: in a folder with manifests, those for which it is true are
            skipped. The manifests of all histories are considered then.

    Raises:
        CheckpointError: `uri` names none of these, or the file system of its scheme refuses it.
        StorageError: `uri` cannot be read now.
    """
    try:
        return _fixed(uri, skip)
    except StorageError as error:
        cause = error.__cause__
        if isinstance(cause, NotADirectoryError):
            raise CheckpointError(
                f"{uri} is a file of another kind: must be a manifest (*{MANIFEST_SUFFIX}), a safetensors file "
                f"(*{_SAFETENSORS}), or a folder"
            ) from error
        # A storage may answer a text that cannot be decoded, and another one later. The URI stays the same.
        if not isinstance(cause, NotImplementedError | ValueError) or isinstance(cause, JSONDecodeError | UnicodeError):
            raise
        raise CheckpointError(
            f"{error} ({type(cause).__name__}). It must be a path, or a URI whose scheme can list and read files"
        ) from error


def _fixed(uri: str, skip: Callable[[Origin], bool] | None) -> str:
    if uri.endswith(MANIFEST_SUFFIX):
        return uri
    if _is_ours(uri):
        store = CheckpointStore(uri)
        if skip is None:
            newest = store.newest()
            if newest.manifest is not None:
                return store.uri_of(newest.manifest)
            damaged = "".join(f"\n  skipped {line}" for line in newest.skipped)
            raise CheckpointError(f"there is no complete checkpoint in {uri}{damaged}")
        for key in store.contents().manifests:
            with contextlib.suppress(CheckpointError):
                manifest = store.open(str(key))
                if not skip(manifest.origin):
                    return store.uri_of(manifest)
        raise CheckpointError(f"there is no complete checkpoint of another job or seed in {uri}")
    return f"{uri}#{_fingerprint(uri)}"


@contextlib.contextmanager
def open_arrays(
    fixed: str,
    frozen: Callable[[FrozenRecord], Readers] | None = None,
    *,
    cache: str = "",
) -> Iterator[Arrays]:
    """The arrays that a reference from `fix` names; they can be read until the context ends.

    Args:
        frozen: returns the readers of the frozen arrays beside a checkpoint of Backstay. None: without these.
        cache: see `StartFrom`.

    Names are the keys on the way to an array, joined by dots; those of a model state in a checkpoint of Backstay begin
    with ``state/``. In safetensors files they are the names of the tensors.

    Raises:
        CheckpointError: the content does not exist any more, is damaged, or has changed.
        StorageError: `uri` cannot be read now.
    """
    if fixed.endswith(MANIFEST_SUFFIX):
        folder, _, name = fixed.rpartition("/")
        store = CheckpointStore(folder or ".")
        manifest = store.open(name, verify=False)  # the reader compares the checksums of what it reads
        # The second read of a local file is fast, and arrays need not be in memory together.
        again = isinstance(store.folder, PosixFolder)
        count = len(manifest.files)
        with cached(store.folder, cache, "".join(info.sha256 for info in manifest.files)) as read_into:
            parts = _patient(read_into)
            reader = Reader(store, manifest, cache=count, keep=OF_MODEL, again=again, read_into=parts)
            readers: dict[str, Callable[[], NDArray[np.generic]]] = {}
            readers |= {leaf.path: partial(reader.parameter, index) for index, leaf in enumerate(manifest.leaves)}
            of_state = enumerate(manifest.state_leaves)
            readers |= {MODEL_STATE + leaf.path: partial(reader.state_leaf, i) for i, leaf in of_state}
            others = {} if frozen is None or manifest.frozen is None else frozen(manifest.frozen)
            yield Arrays(fixed, readers | dict(others))
        return
    uri, _, expected = fixed.rpartition("#")
    _compare(uri, expected, f"since the job began with it ({expected})")
    if is_orbax(uri):
        whole = read_orbax(uri)
        _compare(uri, expected, _WHILE)
        yield Arrays(uri, {name: _constant(array) for name, array in whole.items()})
        return
    files, names, indexes = _listed(uri)
    times = _times(files, names)
    with cached(files, cache, expected) as read_into:
        arrays = Arrays(uri, _tensors(uri, files, names, indexes, _patient(read_into)))
        yield arrays
        if arrays.was_read:
            patiently(lambda: _compare(uri, expected, _WHILE))
            if _times(files, names) != times:
                raise CheckpointError(f"{uri} has changed {_WHILE}. {_STAYS}")


def _compare(uri: str, expected: str, when: str) -> None:
    """Raise an error if the content is not that of a fingerprint."""
    if (found := _fingerprint(uri)) != expected:
        raise CheckpointError(
            f"the content of {uri}, or its mark in the store, has changed (fingerprint {found}) {when}. {_STAYS}"
        )


def _times(files: Folder, names: Iterable[str]) -> list[int]:
    """Returns the times of local files, which their fingerprint does not contain: a copy on another node has other
    ones."""
    if not isinstance(files, PosixFolder):
        return []
    try:
        return [(files.path / name).stat().st_mtime_ns for name in names]
    except OSError as error:
        raise StorageError(f"cannot read {files.path}: {error}") from error


def _patient(read_into: ReadInto) -> ReadInto:
    """Repeats the read of one part, so that a storage that fails from time to time delivers a large base too."""
    return lambda name, start, buffer: patiently(lambda: read_into(name, start, buffer))


def _constant(array: NDArray[np.generic]) -> Callable[[], NDArray[np.generic]]:
    return lambda: array


def _is_ours(uri: str) -> bool:
    if uri.endswith(_SAFETENSORS):
        return False
    contents = Contents.of(open_folder(uri).names())
    return bool(contents.manifests or contents.format_1 or contents.unknown)


def _tensors(
    uri: str, folder: Folder, names: Iterable[str], indexes: Mapping[str, Mapping[str, str]], read_into: ReadInto
) -> dict[str, Callable[[], NDArray[np.generic]]]:
    """Returns the tensors of the safetensors files `names`, which are at `uri`.

    Raises:
        CheckpointError: a tensor is in two files, or an index names one that is not there.
    """
    readers: dict[str, Callable[[], NDArray[np.generic]]] = {}
    homes: dict[str, str] = {}
    found: set[tuple[str, str]] = set()
    for name in names:
        place = f"{folder.uri}/{name}"
        for tensor, reader in _tensors_of_file(folder, name, read_into).items():
            if tensor in homes:
                raise CheckpointError(f"{uri}: the tensor {tensor!r} is in {homes[tensor]} and in {place}")
            homes[tensor] = place
            readers[tensor] = reader
            found.add((tensor, name))
    for index, of_tensors in indexes.items():
        if missing := sorted(tensor for tensor, name in of_tensors.items() if (tensor, name) not in found):
            what = "tensors that are not in their files"
            raise _incomplete(f"{folder.uri}/{index}", what, missing, len(of_tensors))
    return readers


def _tensors_of_file(folder: Folder, name: str, read_into: ReadInto) -> dict[str, Callable[[], NDArray[np.generic]]]:
    """Returns the tensors of one safetensors file. https://huggingface.co/docs/safetensors has the format.

    The library checks the file. It does not read: it knows fewer dtypes than JAX, and copies each tensor once more.
    """
    place = f"{folder.uri}/{name}"
    size = folder.size(name)
    if size is None:
        raise CheckpointError(f"{place} is missing")
    try:
        length, header = _header(name, size, read_into)
        if isinstance(folder, PosixFolder):
            _check(str(folder.path / name))
        else:
            with tempfile.NamedTemporaryFile(prefix="backstay-", suffix=_SAFETENSORS) as file:
                file.write(header)
                file.truncate(size)  # a hole, which takes no space
                file.flush()
                _check(file.name)
        entries = json.loads(header[8:])
    except (safetensors.SafetensorError, OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{place} is not a safetensors file: {error}") from error
    entries.pop("__metadata__", None)
    return {
        tensor: TensorReader(f"{place}: the tensor {tensor!r}", partial(read_into, name), 8 + length, entry)
        for tensor, entry in entries.items()
    }


def _header(name: str, size: int, read_into: ReadInto) -> tuple[int, bytes]:
    """Returns the length of a file's header, and the file up to the header's end. Raises `ValueError` for another
    file."""
    first = bytearray(8)
    if size < len(first):
        raise ValueError(f"it has {size} bytes")
    read_into(name, 0, memoryview(first))
    length = int.from_bytes(first, "little")
    if length > min(size - len(first), _LONGEST_HEADER):
        raise ValueError(f"its header has {length} bytes")
    header = bytearray(len(first) + length)
    read_into(name, 0, memoryview(header))
    return length, bytes(header)


def _check(path: str) -> None:
    """Compare the header of a file with its size."""
    with safetensors.safe_open(path, framework="numpy"):
        pass


@dataclass(frozen=True)
class TensorReader:
    """Reads one tensor of a safetensors file.

    Attributes:
        what: the file and the tensor, for errors.
        read_into: reads a part of the file.
        first: the position of the first data in the file.
        entry: the entry of the file's header.
    """

    what: str
    read_into: Callable[[int, memoryview], None]
    first: int
    entry: Mapping[str, Any]

    @property
    def shape(self) -> Sequence[int]:
        """The shape of the array."""
        found: Sequence[int] = self.entry["shape"]
        return found

    def __call__(self) -> NDArray[np.generic]:
        """Returns the tensor, in memory that XLA can use without a copy.

        Raises:
            CheckpointError: the tensor has a dtype that is not supported, or the file has become shorter.
            StorageError: the file cannot be read now.
        """
        dtype = STORED.get(self.entry["dtype"])
        if dtype is None:
            raise CheckpointError(
                f"{self.what} of dtype {self.entry['dtype']} cannot be read: must be one of {', '.join(STORED)}"
            )
        start, stop = self.entry["data_offsets"]
        data = aligned_empty(stop - start).data
        for at in range(0, len(data), _CHUNK):
            self.read_into(self.first + start + at, data[at : at + _CHUNK])
        return np.frombuffer(data, dtype).reshape(self.entry["shape"])


def _listed(uri: str) -> tuple[Folder, list[str], dict[str, Mapping[str, str]]]:
    """Returns the folder of the safetensors files at `uri`, their names, and the indexes beside them, of tensor to
    file."""
    parent, _, last = uri.rstrip("/").rpartition("/")
    if uri.endswith(_SAFETENSORS):
        return open_folder(parent or "."), [last], {}
    folder = open_folder(uri)
    present = folder.names()
    names = [name for name in present if name.endswith(_SAFETENSORS)]
    indexes: dict[str, Mapping[str, str]] = {}
    for index in (name for name in present if name.endswith(_INDEX)):
        try:
            listed: Mapping[str, str] = json.loads(folder.read(index))["weight_map"]
            of_tensors = {tensor: posixpath.normpath(name) for tensor, name in listed.items()}
            files = set(of_tensors.values())
            missing = sorted(files.difference(names))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder.uri}/{index} is not an index of safetensors files: {error!r}") from error
        if below := sorted(name for name in files if "/" in name):
            raise CheckpointError(
                f"{folder.uri}/{index} names files in other folders, such as {below[0]}: only the files of one folder "
                "are read. Name the folder that has them"
            )
        if not missing:
            indexes[index] = of_tensors
        elif len(missing) < len(files):  # one without any file is of another variant of the model
            raise _incomplete(f"{folder.uri}/{index}", "files that are not there", missing, len(files))
    return folder, names, indexes


def _incomplete(index: str, what: str, missing: Sequence[str], total: int) -> CheckpointError:
    return CheckpointError(
        f"{index} names {len(missing)} of {total} {what}: {', '.join(missing[:5])}. Is the download complete?"
    )


def _sample(files: Any, name: str, start: int, end: int) -> bytes:
    try:
        return bytes(files.cat_file(name, start=start, end=end))
    except (NotImplementedError, ValueError):
        raise  # another read does not help
    except Exception as error:
        raise StorageError(f"cannot read {name}: {why(error)}") from error


def _samples(size: int, *, marked: bool) -> Iterator[tuple[int, int]]:
    """Yields the ranges of a file that its fingerprint contains."""
    if size <= 4 * _SAMPLE:
        yield 0, size
        return
    yield 0, _SAMPLE
    yield size - _SAMPLE, size
    for number in range(0 if marked else _SAMPLES):
        start = _SAMPLE + (size - 2 * _SAMPLE - _SMALL_SAMPLE) * number // (_SAMPLES - 1)
        yield start, start + _SMALL_SAMPLE


def _is_orbax(uri: str) -> bool:
    try:
        return is_orbax(uri)
    except PermissionError as error:  # it names a file that need not exist
        raise PermissionError(error.errno, error.strerror, uri) from None


def _fingerprint(uri: str) -> str:
    """Returns the fingerprint of the names, sizes, marks and samples of the files at `uri` that are read, in hex.

    A part of a local file that was changed in place may be in no sample.

    Other files may appear beside them or below them, such as the checkpoints of the training that begins there.

    Raises:
        CheckpointError: `uri` has nothing that can be read as named arrays.
        StorageError: `uri` cannot be read now.
    """
    from fsspec.implementations.local import LocalFileSystem

    try:
        files, path = filesystem_of(uri if "://" in uri else str(Path(uri).expanduser().absolute()))
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(f"{uri} cannot be opened: {error}") from error
    digest = hashlib.sha256()
    try:
        files.invalidate_cache()
        try:
            # A listing by HTTP would read the whole file, and look for links in it.
            own: dict[str, Any] = files.info(path) if uri.endswith(_SAFETENSORS) else {"type": "directory"}
            found = files.find(path, detail=True) if own["type"] == "directory" else {path: own}
        except FileNotFoundError as error:
            if not is_missing(error):
                raise
            found = {}
        if isinstance(files, LocalFileSystem):
            # Reading a pipe would never end. A link to a folder cannot be read, and may be a loop.
            found = {name: info for name, info in found.items() if Path(name).is_file()}
        inside = {name: name.removeprefix(path).strip("/") for name in found}
        kinds = (_SAFETENSORS, _INDEX)
        tensors = [name for name, rest in inside.items() if not rest or ("/" not in rest and rest.endswith(kinds))]
        known = any(name.endswith(_SAFETENSORS) for name in tensors)
        if not known and not _is_orbax(uri):
            what = "there are no files" if not found else f"found {len(found)} files, such as {min(found)}"
            raise CheckpointError(
                f"{uri} is not a checkpoint of Backstay, a safetensors file, a folder of them or an Orbax checkpoint: "
                f"{what}"
            )
        for name in sorted(tensors if known else found):
            size = found[name].get("size")
            if size is None:
                raise CheckpointError(f"{uri}: the server does not answer with the size of {name}")
            mark = "" if isinstance(files, LocalFileSystem) else mark_of(found[name])
            digest.update(f"{name.removeprefix(path)}\0{size}\0{mark}\0".encode())
            for start, end in _samples(size, marked=bool(mark)):
                digest.update(patiently(partial(_sample, files, name, start, end)))
    except CheckpointError:
        raise
    except Exception as error:
        raise StorageError(f"cannot read {uri}: {why(error)}") from error
    return digest.hexdigest()[:16]
