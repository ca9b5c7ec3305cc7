"""Reads of the checkpoint folder, which are repeated while the storage fails (T8)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ...errors import StorageError
from .._probe import forbidden

__all__ = ["READ_SECONDS", "patiently"]

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

READ_SECONDS = 60.0
"""How long failing reads of the storage are repeated. After that the process ends, and its replacement reads again."""


def patiently(
    read: Callable[[], _T],
    *,
    seconds: float = READ_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """Returns the result of `read`; a read that fails with `StorageError` is repeated for `seconds` (T8).

    Raises:
        CheckpointFolderUnusable: this user may not read a file; another read does not help.
        StorageError: the last read failed too.
        Exception: any other that `read` raises, immediately.
    """
    began, wait = clock(), 0.5
    while True:
        try:
            return read()
        except StorageError as error:
            if (refused := forbidden(error)) is not None:
                raise refused from error
            left = seconds - (clock() - began)
            if left <= 0:
                raise
            wait = min(2 * wait, 15.0, left)
            _LOG.warning("the storage failed, and the next attempt is in %.0f s: %s", wait, error)
            sleep(wait)
