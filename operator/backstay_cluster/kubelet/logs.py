"""Writes the output of a container into one file that people can read, and reads it with the options of `kubectl logs`.

A container writes into a pipe, and the kubelet copies the data into `<container>.log` unchanged, binary or not. It
keeps the arrival time of each piece, so that lines can be shown with a time or from a time on. A file that reaches its
largest size is kept once as `<container>.log.1`, and a new file is started. Files stay when their pod is deleted.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

logger = logging.getLogger(__name__)

CHUNK = 1 << 16
MAX_BYTES = 64 << 20
MAX_MARKS = 1 << 13


@dataclass(frozen=True)
class LogOptions:
    """The options of a read, as PodLogOptions defines them."""

    follow: bool = False
    tail_lines: int | None = None
    since: float | None = None  # seconds since the epoch
    timestamps: bool = False
    limit_bytes: int | None = None


class LogSink:
    """The output of one run of a container.

    Args:
        path: the file. Its folder is created; the file of an earlier run is moved to `previous`.
        max_bytes: the largest size of one file.
        clock: seconds since the epoch.

    Attributes:
        write_fd: the descriptor for the process; the owner closes it (`close_write`) once the process has it.
    """

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._clock = clock
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            path.replace(previous_of(path))
        self._file: BinaryIO = path.open("w+b", buffering=0)
        self._older: BinaryIO | None = None  # the part before it
        self._lost = 0  # bytes that could not be written
        self._start = 0  # the number of bytes that were written before the current file's first byte
        self._end = 0
        self._marks: list[tuple[int, float]] = []
        self._news: set[asyncio.Event] = set()
        self.closed = False
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        asyncio.get_running_loop().add_reader(self._read_fd, self._readable)

    def close_write(self) -> None:
        """Close this process's copy of the write end, so that the end of the output can be detected."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def close(self) -> None:
        """Read the rest of the pipe, end the log, and notify the followers."""
        if self.closed:
            return
        self.close_write()
        while self._read_once():
            pass
        self._end_reading()
        self.closed = True
        self._notify_followers()
        self._release()

    def tail(self, max_bytes: int, max_lines: int) -> bytes:
        """Returns the last whole lines within these limits."""
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            lines = file.read().splitlines(keepends=True)
        return b"".join(lines[-max_lines:])

    def _readable(self) -> None:
        # One piece for each turn of the event loop: a container with much output does not delay the others.
        self._read_once()

    def _read_once(self) -> bool:
        if self._read_fd < 0:
            return False
        try:
            data = os.read(self._read_fd, CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._end_reading()
            return False
        self._write(data)
        return True

    def _end_reading(self) -> None:
        if self._read_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._read_fd = -1

    def _write(self, data: bytes) -> None:
        """Append data. On a full disk it is lost, and the container continues."""
        self._marks.append((self._end, self._clock()))
        if len(self._marks) > MAX_MARKS:
            del self._marks[1::2]  # the times become coarser, but stay in order
        written = 0
        try:
            if self._end - self._start >= self._max_bytes:
                self._rotate()
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError as error:
            if not self._lost:
                logger.warning("output of a container is lost, because %s cannot be written: %s", self.path, error)
            self._lost += len(data) - written
        self._end += written
        self._notify_followers()

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # an earlier attempt could not open the new file
            self.path.replace(rotated_of(self.path))
        fresh = self.path.open("w+b", buffering=0)
        if self._older is not None:
            self._older.close()
        self._file, self._older, self._start = fresh, self._file, self._end

    def _notify_followers(self) -> None:
        for event in self._news:
            event.set()

    def _time_of(self, offset: int) -> float:
        index = bisect.bisect_right(self._marks, (offset, float("inf"))) - 1
        return self._marks[max(index, 0)][1] if self._marks else self._clock()

    def _attach(self) -> None:
        """Open the files again, for a read after the end of the run."""
        if self._file.closed:
            self._file, self._older = self.path.open("rb", buffering=0), None
            if self._start:
                with contextlib.suppress(FileNotFoundError):
                    self._older = rotated_of(self.path).open("rb", buffering=0)

    def _release(self) -> None:
        """Close the files of a run that has ended, after its last reader. Until then their names may be given to a
        later run."""
        if self.closed and not self._news:
            self._file.close()
            if self._older is not None:
                self._older.close()

    def _slice(self, offset: int, size: int) -> bytes:
        """Returns some bytes from an offset, or none if they no longer exist."""
        if offset >= self._start:
            return os.pread(self._file.fileno(), size, offset - self._start)
        if self._older is None:
            return b""
        skip = offset - (self._start - os.fstat(self._older.fileno()).st_size)
        return os.pread(self._older.fileno(), min(size, self._start - offset), max(0, skip))

    def _first(self) -> int:
        """Returns the offset of the oldest byte that still exists."""
        return self._start - (0 if self._older is None else os.fstat(self._older.fileno()).st_size)

    def _tail_offset(self, lines: int, first: int) -> int:
        offset, found = self._end, 0
        while offset > first:
            begin = max(first, offset - CHUNK)
            if begin < self._start < offset:
                begin = self._start
            block = self._slice(begin, offset - begin)
            if offset == self._end and block.endswith(b"\n"):
                found -= 1  # the newline at the end of the last line does not begin another one
            position = len(block)
            while (position := block.rfind(b"\n", 0, position)) >= 0:
                found += 1
                if found == lines:
                    return begin + position + 1
            offset = begin
        return first

    async def read(self, options: LogOptions) -> AsyncIterator[bytes]:
        """Yields the log with these options; with `follow`, until the container ends."""
        news = asyncio.Event()
        self._attach()
        self._news.add(news)
        try:
            offset = self._first()
            if options.since is not None:
                index = bisect.bisect_left([mark[1] for mark in self._marks], options.since)
                offset = max(offset, self._marks[index][0] if index < len(self._marks) else self._end)
            if options.tail_lines is not None:
                offset = max(
                    offset, self._end if options.tail_lines == 0 else self._tail_offset(options.tail_lines, offset)
                )
            left = options.limit_bytes
            at_line_start = True
            while left is None or left > 0:
                news.clear()
                closed = self.closed
                if offset < self._end:
                    offset = max(offset, self._first())
                    data = self._slice(offset, min(CHUNK, self._end - offset))
                    if not data:  # a person has cut or deleted the file
                        offset = self._end
                        continue
                    out = self._stamp(offset, data, at_line_start) if options.timestamps else data
                    at_line_start = data.endswith(b"\n")
                    offset += len(data)
                    if left is not None:
                        out = out[:left]
                        left -= len(out)
                    yield out
                elif closed or not options.follow:
                    return
                else:
                    await news.wait()
        finally:
            self._news.discard(news)
            self._release()

    def _stamp(self, offset: int, data: bytes, at_line_start: bool) -> bytes:
        out = []
        for line in _split_lines(data):
            if at_line_start:
                moment = datetime.fromtimestamp(self._time_of(offset), UTC)
                out.append(moment.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode())
            out.append(line)
            at_line_start = line.endswith(b"\n")
            offset += len(line)
        return b"".join(out)


def _split_lines(data: bytes) -> list[bytes]:
    """Split after newlines only, because a carriage return is part of a line."""
    parts = [part + b"\n" for part in data.split(b"\n")]
    parts[-1] = parts[-1][:-1]
    return [part for part in parts if part]


def rotated_of(path: Path) -> Path:
    """Returns the path of the older part of a log, after the file reached its largest size."""
    return path.with_name(path.name + ".1")


def previous_of(path: Path) -> Path:
    """Returns the path of the log of a container's previous run."""
    return path.with_name(path.stem + ".previous.log")
