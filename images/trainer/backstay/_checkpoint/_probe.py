"""Whether a checkpoint folder can be used: tried with a temporary file before training begins, and judged by errors."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from pathlib import Path
from typing import Final

from ..errors import CheckpointError, CheckpointFolderUnusable, StorageError
from ._files import Folder, PosixFolder

__all__ = ["forbidden", "probe"]

_PERMANENT: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.ENOENT,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
    }
)


def probe(folder: Folder) -> None:
    """Write a file, list it, read it and delete it.

    Raises:
        CheckpointFolderUnusable: this process has no right to do one of these. Another try does not help.
        StorageError: the storage fails in a way that may end, such as a full disk.
    """
    name, content = f".probe-{secrets.token_hex(8)}", secrets.token_hex(32).encode()
    try:
        folder.write(name, content)
        found = folder.read(name)
        listed = name in folder.names()
        folder.delete(name)
    except CheckpointError as error:
        if _is_permanent(error) or _is_file(folder):
            raise CheckpointFolderUnusable(f"{error}; {_who(folder)}{_advice(folder)}") from error
        raise StorageError(f"{error}; {_who(folder)}") from error
    if found != content or not listed:
        what = "is not listed" if not listed else "has another content"
        raise StorageError(f"a file that this process wrote to {folder.uri} {what}; {_who(folder)}")


def forbidden(error: StorageError) -> CheckpointFolderUnusable | None:
    """Returns the error to raise instead of `error` if this user may not read a file; None if another attempt may
    succeed.

    Only errors of a file system count. An object store may also refuse a request while a key is being renewed.
    """
    cause = error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in (errno.EACCES, errno.EPERM) or not cause.filename:
        return None
    return CheckpointFolderUnusable(
        f"{error}; {_whose(Path(cause.filename))}: uid {os.geteuid()} must be able to read all files of the folder"
    )


def _is_permanent(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, NotImplementedError) or (isinstance(cause, OSError) and cause.errno in _PERMANENT):
            return True
        if isinstance(cause, PermissionError | FileNotFoundError | NotADirectoryError):
            return True  # object stores raise them without a number
        cause = cause.__cause__
    return False


def _is_file(folder: Folder) -> bool:
    """Returns whether a file has the name of the folder. EEXIST does not prove that: a network file system may return
    it after another process has created the folder."""
    try:
        return isinstance(folder, PosixFolder) and folder.path.is_file()
    except OSError:
        return False


def _who(folder: Folder) -> str:
    """Returns a description of this process, and of the owner of the folder, for the person who repairs it."""
    return _whose(folder.path if isinstance(folder, PosixFolder) else None)


def _whose(path: Path | None) -> str:
    me = f"this process has uid {os.geteuid()} and gid {os.getegid()}"
    if path is None:
        return me
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    try:
        found = path.stat()
    except OSError:
        return me
    return f"{me}; {path} has the owner {found.st_uid}:{found.st_gid} and the mode {stat.S_IMODE(found.st_mode):04o}"


def _advice(folder: Folder) -> str:
    if isinstance(folder, PosixFolder):
        return f": uid {os.geteuid()} must be able to create, link and delete files in {folder.path}"
    return f": the credentials must allow to write, read, list and delete objects in {folder.uri}"
