"""Writes scalars for TensorBoard beside the checkpoints, which ``tensorboard --logdir FOLDER`` shows.

tensorboardX makes the records. This module puts them into the checkpoint folder. In an object store a file cannot grow.
There the newest file is written again as a whole, and a new one begins before it is large.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from ..errors import CheckpointError

if TYPE_CHECKING:
    from .._checkpoint import Folder

__all__ = ["EventFiles"]

_LOG = logging.getLogger(__name__)

MAX_BYTES: Final = 1 << 20
"""About a day of two scalars every ten seconds. TensorBoard reads the files of a folder in the order of their names."""

_SCHEME: Final = "backstay"


class EventFiles:
    """Event files of one process. Not thread-safe.

    https://www.tensorflow.org/tensorboard: a file is a sequence of records. `SessionLog.START` at a step hides the
    records of older files for this step and later ones.
    """

    def __init__(self, folder: Folder, name: str, clock: Callable[[], float] = time.time) -> None:
        """
        Args:
            folder: the checkpoint folder.
            name: a part of the files' names that no other process uses.
            clock: returns the Unix time.
        """
        self._folder, self._name, self._clock = folder, name, clock
        self._buffer = io.BytesIO()
        self._records: Any = None
        self._file, self._number, self._stored, self._failed = "", 0, 0, False

    def begin(self, step: int) -> None:
        """Records of `step` and later steps belong to updates that were lost."""
        from tensorboardX.proto import event_pb2

        self._add(event_pb2.Event(step=step, session_log=event_pb2.SessionLog(status=event_pb2.SessionLog.START)))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add one value for each name; `flush` stores them."""
        from tensorboardX.proto import event_pb2, summary_pb2

        values = [summary_pb2.Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._add(event_pb2.Event(step=step, summary=summary_pb2.Summary(value=values)))

    def flush(self) -> None:
        """Store the added scalars. A failing storage costs scalars, and never the training."""
        content = self._buffer.getvalue()
        if self._records is None or len(content) == self._stored:
            return
        try:
            self._folder.append(self._file, content, self._stored)
        except CheckpointError as error:
            if not self._failed:
                _LOG.warning("scalars for TensorBoard could not be stored; the server tries again: %s", error)
            self._failed = True
        else:
            self._failed, self._stored = False, len(content)
        if len(content) > MAX_BYTES and (not self._failed or len(content) > 4 * MAX_BYTES):
            self._records = None

    def _add(self, event: Any) -> None:
        if self._records is None:
            self._open()
        event.wall_time = self._clock()
        self._records.write(event.SerializeToString())

    def _open(self) -> None:
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import RecordWriter, register_writer_factory

        register_writer_factory(_SCHEME, self)
        now = self._clock()
        self._file = f"events.out.tfevents.{int(now):010d}.{self._name}.{self._number:06d}"
        self._number, self._stored = self._number + 1, 0
        self._records = RecordWriter(f"{_SCHEME}:{self._file}")
        self._records.write(event_pb2.Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def open(self, path: str) -> io.BytesIO:
        """Returns the file that `RecordWriter` writes to: the method of a writer factory of tensorboardX."""
        del path
        self._buffer = io.BytesIO()
        return self._buffer
