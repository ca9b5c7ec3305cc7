"""A folder of files, on a POSIX file system or any fsspec URI. A write creates a whole file, or no file.

On POSIX a file is written under a temporary name, synchronised, and then linked to its name. An object store has no
rename and needs none: one PUT is atomic. A file that exists is never replaced.
"""

from __future__ import annotations

import contextlib
import errno
import operator
import os
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from functools import reduce
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, Protocol

from .. import _instrument
from ..errors import CheckpointError, StorageError

_SILENT_SECONDS: Final = 20.0
# As file systems of fsspec name them. First those of the content, since the etag of Google is also of the metadata.
_MARKS: Final = (
    *("generation", "md5Hash", "blob_id", "sha", "ETag", "etag", "Content-MD5", "Digest", "checksum", "VersionId"),
    *("Last-Modified", "LastModified", "last_modified", "modified", "modificationTime", "updated", "mtime", "created"),
)


class Folder(Protocol):
    """A place for checkpoints, as the store needs it. Every method raises `CheckpointError` naming the file."""

    uri: str

    def names(self) -> list[str]:
        """Returns the names of its files; empty when the folder does not exist. Raises `StorageError`."""

    def read(self, name: str) -> bytes:
        """Returns the whole content. Raises `StorageError` when the read fails for another reason than a missing
        file."""

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `start`. Raises as `read`, and `CheckpointError` if the file ends early."""

    def size(self, name: str) -> int | None:
        """Returns the size of a file in bytes; None when there is no such file. Raises `StorageError`."""

    def write(self, name: str, fill: Callable[[str], None] | bytes) -> None:
        """Create the whole file `name`; `fill` writes to the local path that is its argument.

        A file that exists is not replaced: this is an error.
        """

    def rewrite(self, name: str, content: bytes) -> None:
        """Replace the content of a file that exists and has one writer; `content` has the length of the old content.

        A reader may see a mixture of both. Nothing is synchronised with the disk.
        """

    def append(self, name: str, content: bytes, start: int) -> None:
        """Append to a file that has one writer, or create it. Nothing is synchronised with the disk.

        Args:
            content: the whole content, with the part that is stored already.
            start: the number of bytes that are stored already.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Write a file that has one writer. The file has the previous content, or `content`, even after an error."""

    def delete(self, name: str) -> None:
        """Delete the file; a missing file is not an error."""


class PosixFolder:
    """A local (or mounted) folder, which the first write creates. A folder that is deleted later is not made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.uri = str(path)
        self._existed = False

    def _make(self) -> None:
        if self._existed and not self.path.exists():
            raise FileNotFoundError(
                f"the folder {self.path} was deleted while this process used it, and is not made again. To continue to "
                "store there, create it"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._existed = True

    def names(self) -> list[str]:
        try:
            found = sorted(entry.name for entry in os.scandir(self.path) if _is_file(entry))
            self._existed = True
            return found
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"cannot list checkpoints in {self.path}: {error}") from error

    def read(self, name: str) -> bytes:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path / name} is missing") from error
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error}") from error

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        try:
            with (self.path / name).open("rb", buffering=0) as file:
                file.seek(start)
                while buffer:
                    count = file.readinto(buffer)
                    if not count:
                        raise CheckpointError(f"{self.path / name} ends early: it is truncated, or has become shorter")
                    buffer = buffer[count:]
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.path / name} is missing") from error
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error}") from error

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise StorageError(f"cannot read {self.path / name}: {error}") from error

    def write(self, name: str, fill: Callable[[str], None] | bytes) -> None:
        temporary = self.path / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            _instrument.reach("write")
            self._make()
            if isinstance(fill, bytes):
                temporary.write_bytes(fill)
            else:
                temporary.touch()
                mode = stat.S_IMODE(temporary.stat().st_mode)
                fill(str(temporary))
                # safetensors makes its files readable for their owner only. The umask decides here, as for the
                # manifest: an evaluator, or a person who reads the volume, may be another user than the server.
                with contextlib.suppress(OSError):  # a file system without modes
                    temporary.chmod(mode)
            _fsync(temporary)
            _instrument.reach("rename")
            _publish(temporary, self.path / name)
            _fsync(self.path)
        except Exception as error:
            # A half-written file is deleted after any error. On a full disk it would take even more space.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {self.path / name}: {error}") from error

    def rewrite(self, name: str, content: bytes) -> None:
        try:
            # In place, so that a full disk does not make a living process look dead.
            descriptor = os.open(self.path / name, os.O_WRONLY)
            try:
                os.pwrite(descriptor, content, 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path / name}: {error}") from error

    def append(self, name: str, content: bytes, start: int) -> None:
        try:
            self._make()
            path = self.path / name
            with path.open("r+b" if start and path.exists() else "wb") as file:
                # All of it again, if a user deleted or cut the file.
                file.seek(min(start, file.seek(0, os.SEEK_END)))
                file.write(content[file.tell() :])
        except OSError as error:
            raise CheckpointError(f"cannot write {self.path / name}: {error}") from error

    def replace(self, name: str, content: bytes) -> None:
        temporary = self.path / f".{name}.{uuid.uuid4().hex[:8]}.tmp"
        try:
            self._make()
            temporary.write_bytes(content)
            temporary.replace(self.path / name)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {self.path / name}: {error}") from error

    def age(self, name: str) -> float:
        """Returns the seconds since the last write to the file; 0 when it does not exist."""
        try:
            return time.time() - (self.path / name).stat().st_mtime
        except OSError:
            return 0.0

    def delete(self, name: str) -> None:
        try:
            (self.path / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot delete {self.path / name}: {error}") from error


class RemoteFolder:
    """Any fsspec file system, such as s3://, gs:// or memory://."""

    def __init__(self, uri: str, filesystem: Any, path: str) -> None:
        self.uri = uri
        self._fs = filesystem
        self._path = path.rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._path}/{name}"

    def names(self) -> list[str]:
        try:
            self._fs.invalidate_cache()
            found = self._fs.ls(self._path, detail=True)
        except Exception as error:
            if is_missing(error):
                return []
            raise StorageError(f"cannot list checkpoints in {self.uri}: {why(error)}") from error
        return sorted(entry["name"].rsplit("/", 1)[-1] for entry in found if entry["type"] == "file")

    def read(self, name: str) -> bytes:
        try:
            return bytes(self._fs.cat_file(self._at(name)))
        except Exception as error:
            if is_missing(error):
                raise CheckpointError(f"{self.uri}/{name} is missing") from error
            raise StorageError(f"cannot read {self.uri}/{name}: {why(error)}") from error

    def read_into(self, name: str, start: int, buffer: memoryview) -> None:
        if not buffer:
            return
        stop = start + len(buffer)
        try:
            data = self._fs.cat_file(self._at(name), start=start, end=stop)
        except Exception as error:
            if is_missing(error):
                raise CheckpointError(f"{self.uri}/{name} is missing") from error
            raise StorageError(f"cannot read {self.uri}/{name}: {why(error)}") from error
        if len(data) >= stop > len(buffer):  # a server of HTTP may answer with the whole file
            data = memoryview(data)[start:stop]
        if len(data) < len(buffer):
            if stop <= (self.size(name) or 0):
                raise StorageError(f"cannot read {self.uri}/{name}: {len(data)} bytes came instead of {len(buffer)}")
            raise CheckpointError(f"{self.uri}/{name} ends early: it is truncated, or has become shorter")
        buffer[:] = memoryview(data)[: len(buffer)]

    def size(self, name: str) -> int | None:
        try:
            return int(self._fs.info(self._at(name))["size"])
        except Exception as error:
            if is_missing(error):
                return None
            raise StorageError(f"cannot read {self.uri}/{name}: {why(error)}") from error

    def write(self, name: str, fill: Callable[[str], None] | bytes) -> None:
        import tempfile

        if self.size(name) is not None:
            raise CheckpointError(f"cannot write {self.uri}/{name}: it exists, and files are never replaced")
        try:
            _instrument.reach("write")
            if isinstance(fill, bytes):
                self._fs.pipe_file(self._at(name), fill)
                return
            with tempfile.TemporaryDirectory(prefix="backstay-") as scratch:
                local = str(Path(scratch) / name)
                fill(local)
                self._fs.put_file(local, self._at(name))
        except Exception as error:
            raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error

    def rewrite(self, name: str, content: bytes) -> None:
        try:
            self._fs.pipe_file(self._at(name), content)
        except Exception as error:
            raise CheckpointError(f"cannot write {self.uri}/{name}: {error}") from error

    def append(self, name: str, content: bytes, start: int) -> None:
        self.rewrite(name, content)

    def replace(self, name: str, content: bytes) -> None:
        self.rewrite(name, content)

    def delete(self, name: str) -> None:
        try:
            self._fs.rm_file(self._at(name))
        except FileNotFoundError:
            return
        except Exception as error:
            raise CheckpointError(f"cannot delete {self.uri}/{name}: {error}") from error


def open_folder(uri: str) -> Folder:
    """Returns the folder at `uri`, which is a path, a file: URI, or any URI that fsspec supports.

    Raises:
        CheckpointError: `uri` names a file system that is not installed, does not exist, or needs more than a URI.
    """
    if "://" not in uri:
        return PosixFolder(Path(uri).expanduser())
    if uri.startswith("file://"):
        return PosixFolder(Path(uri.removeprefix("file://")))
    try:
        filesystem, path = filesystem_of(uri)
    except (ImportError, ValueError, TypeError) as error:
        raise CheckpointError(
            f"the checkpoint folder {uri} cannot be opened: {error}. It must be a path, or a URI with a scheme that "
            "fsspec supports, such as s3 or gs. The scheme's package must be installed (in a pod: in its image)"
        ) from error
    return RemoteFolder(uri.rstrip("/"), filesystem, path)


def filesystem_of(uri: str) -> tuple[Any, str]:
    """Returns the file system of fsspec for a URI, and the path in it. Raises as `fsspec.core.url_to_fs`."""
    import fsspec

    options: dict[str, Any] = {}
    if uri.startswith(("http://", "https://")):
        import aiohttp

        # Five minutes for a whole request is the default: too short for a large part, too long for a silent server.
        waits = aiohttp.ClientTimeout(total=None, sock_connect=_SILENT_SECONDS, sock_read=_SILENT_SECONDS)
        # An argument replaces what the user has configured for all of fsspec, such as a header with a token.
        configured = (fsspec.config.conf.get(scheme, {}).get("client_kwargs", {}) for scheme in ("http", "https"))
        options["client_kwargs"] = reduce(operator.or_, configured, {"timeout": waits})
    filesystem, path = fsspec.core.url_to_fs(uri, **options)
    return filesystem, path


def mark_of(info: Mapping[str, Any]) -> str:
    """Returns a text that changes when a file is replaced, from the information of fsspec about it. It is empty if
    there is none."""
    return next((f"{key} {info[key]}" for key in _MARKS if info.get(key)), "")


def is_missing(error: BaseException) -> bool:
    """Returns whether a file does not exist. The file system of HTTP raises `FileNotFoundError` for any failure of
    `info`."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or cause is None:
        return isinstance(error, FileNotFoundError)
    if (status := getattr(cause, "status", None)) is not None:
        return status in {HTTPStatus.NOT_FOUND, HTTPStatus.GONE}
    return not (isinstance(cause, TimeoutError | ConnectionError) or type(cause).__module__.startswith("aiohttp"))


def why(error: BaseException) -> str:
    """Returns the text of an error, or of its cause, or else its name."""
    return str(error) or str(error.__cause__ or "") or type(error).__name__


def same_place(one: str, other: str) -> bool:
    """Returns whether two paths or URIs name the same folder."""
    first, second = open_folder(one), open_folder(other)
    if isinstance(first, PosixFolder) and isinstance(second, PosixFolder):
        return first.path.absolute().resolve() == second.path.absolute().resolve()
    return first.uri.rstrip("/") == second.uri.rstrip("/")


_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK})


def _publish(temporary: Path, target: Path) -> None:
    """Link `temporary` to the name `target`. Raises `FileExistsError` when there is such a file."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        # An NFS client repeats a request whose answer was lost: then the existing link is the one of this call.
        if not temporary.samefile(target):
            raise
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _rename(temporary, target)
        return
    temporary.unlink(missing_ok=True)  # the answer to this request may be lost too


def _rename(temporary: Path, target: Path) -> None:
    # For a file system without hard links. Only this process uses the name, so no other creates it between the calls.
    if target.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    temporary.rename(target)


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:  # a link to itself
            raise
        return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
