"""Log files have any bytes, are capped, and are read from the end, since a time, with times, and while they grow."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backstay_cluster.kubelet.logs import LogOptions, LogSink, previous_of, rotated_of
from backstay_cluster.kubelet.server import log_options
from backstay_cluster.tests.limits import LONG


class Writer:
    """A sink, and a clock that ticks a second for each piece that arrives."""

    def __init__(self, path, **options) -> None:
        ticks = itertools.count(1000)
        self.sink = LogSink(path, clock=lambda: float(next(ticks)), **options)

    async def write(self, data: bytes) -> None:
        """Write one piece and let it arrive."""
        before = self.sink._end
        os.write(self.sink.write_fd, data)
        async with asyncio.timeout(LONG):
            while self.sink._end < before + len(data):  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def read(self, **options) -> bytes:
        return b"".join([piece async for piece in self.sink.read(LogOptions(**options))])


@pytest.fixture
async def writer(tmp_path):
    made = Writer(tmp_path / "ns" / "pod" / "c.log")
    yield made
    made.sink.close()


async def test_tail_since_limit_and_timestamps(writer):
    for piece in (b"one\n", b"two\nthr", b"ee\n\xff\0\r\n"):
        await writer.write(piece)
    assert await writer.read() == b"one\ntwo\nthree\n\xff\0\r\n"
    assert await writer.read(tail_lines=2) == b"three\n\xff\0\r\n"
    assert await writer.read(tail_lines=0) == b""
    assert await writer.read(tail_lines=99) == await writer.read()
    assert await writer.read(since=1001) == b"two\nthree\n\xff\0\r\n"
    assert await writer.read(since=2000) == b""
    assert await writer.read(limit_bytes=5) == b"one\nt"
    stamps = [line.split(b" ")[0] for line in (await writer.read(timestamps=True)).splitlines(keepends=True)[:3]]
    assert stamps == [b"1970-01-01T00:16:4%d.000000000Z" % second for second in (0, 1, 1)]


async def test_following_ends_with_the_container(writer):
    await writer.write(b"one\n")
    task = asyncio.create_task(writer.read(follow=True, tail_lines=0))
    await asyncio.sleep(0)
    await writer.write(b"two\n")
    os.write(writer.sink.write_fd, b"last")
    writer.sink.close()
    assert await task == b"two\nlast"
    assert writer.sink.path.read_bytes() == b"one\ntwo\nlast"


async def test_a_log_over_its_cap_is_kept_once_and_read_over_the_seam(tmp_path):
    writer = Writer(tmp_path / "c.log", max_bytes=10)
    try:
        for number in range(9):
            await writer.write(b"line %d\n" % number)
        assert writer.sink.path.read_bytes() == b"line 8\n"
        assert rotated_of(writer.sink.path).read_bytes() == b"line 6\nline 7\n"
        assert await writer.read() == b"line 6\nline 7\nline 8\n"
        assert await writer.read(tail_lines=2) == b"line 7\nline 8\n"
    finally:
        writer.sink.close()


async def test_the_log_of_the_run_before_is_kept(tmp_path):
    for text in (b"first", b"second"):
        writer = Writer(tmp_path / "c.log")
        await writer.write(text)
        writer.sink.close()
    assert (tmp_path / "c.log").read_bytes() == b"second"
    assert previous_of(tmp_path / "c.log").read_bytes() == b"first"


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(0, 6))
def test_tail_is_the_last_lines_of_any_bytes(tmp_path_factory, pieces, count):
    async def whole() -> bytes:
        writer = Writer(tmp_path_factory.mktemp("log") / "c.log")
        for piece in pieces:
            await writer.write(piece)
        data = await writer.read(tail_lines=count)
        writer.sink.close()
        return data

    with asyncio.Runner() as runner:
        data = runner.run(whole())
    lines = b"".join(pieces).split(b"\n")
    lines = [line + b"\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    assert data == b"".join(lines[len(lines) - count :] if count < len(lines) else lines)


async def test_a_file_that_a_person_cuts_costs_what_it_had(writer):
    """A read of the lost part never came back, and with it the whole node stopped."""
    await writer.write(b"one\ntwo\n")
    os.truncate(writer.sink.path, 4)
    assert await writer.read() == b"one\n"
    follower = asyncio.create_task(writer.read(follow=True, tail_lines=0))
    await asyncio.sleep(0)
    await writer.write(b"three\n")
    assert await writer.read(limit_bytes=4) == b"one\n"
    writer.sink.close()
    await follower


async def test_a_file_that_a_person_deletes_is_read_until_the_run_ends(writer):
    await writer.write(b"one\n")
    writer.sink.path.unlink()
    await writer.write(b"two\n")
    assert await writer.read() == b"one\ntwo\n"


class FullFile:
    """A file on a disk that has room for some bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, data):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written


async def test_a_full_disk_costs_output_and_nothing_else(writer, caplog):
    full = writer.sink._file = FullFile(writer.sink._file, 6)
    os.write(writer.sink.write_fd, b"one\ntwo\n")
    writer.sink._read_once()
    assert await writer.read() == b"one\ntw"
    os.write(writer.sink.write_fd, b"lost\n")
    writer.sink._read_once()
    full.room = 100
    await writer.write(b"three\n")
    assert await writer.read() == b"one\ntwthree\n"
    assert sum("No space left" in record.message for record in caplog.records) == 1


async def test_a_log_whose_new_file_could_not_be_opened_continues(tmp_path, monkeypatch):
    writer = Writer(tmp_path / "c.log", max_bytes=4)
    await writer.write(b"one\n")
    opened, times = Path.open, 2

    def refused(path, *words, **options):
        nonlocal times
        if path == writer.sink.path and "w" in str(words) and times:
            times -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *words, **options)

    monkeypatch.setattr(Path, "open", refused)
    for _ in range(2):
        os.write(writer.sink.write_fd, b"lost\n")
        writer.sink._read_once()
    await writer.write(b"two\n")
    assert await writer.read() == b"one\ntwo\n"
    writer.sink.close()


@pytest.mark.parametrize("later", [b"x\n", b"of another run, and longer than the first one\n"])
async def test_a_slow_follower_gets_nothing_of_a_later_run(tmp_path, later):
    first = Writer(tmp_path / "c.log")
    await first.write(b"one\n")
    pieces = first.sink.read(LogOptions(follow=True))
    assert await anext(pieces) == b"one\n"
    await first.write(b"two\n")
    first.sink.close()
    for _ in range(2):  # the name of the first file is given to others
        second = Writer(tmp_path / "c.log")
        await second.write(later)
        second.sink.close()
    assert [piece async for piece in pieces] == [b"two\n"]
    assert first.sink._file.closed


def test_options_of_a_query():
    options = log_options({"follow": "true", "tailLines": "3", "sinceSeconds": "10", "timestamps": "1"}, 100.0)
    assert options == LogOptions(follow=True, tail_lines=3, since=90.0, timestamps=True)
    assert log_options({"sinceTime": "1970-01-01T00:01:00Z"}, 0.0).since == 60.0
    with pytest.raises(ValueError, match="tailLines is -1: must be 0 or more"):
        log_options({"tailLines": "-1"}, 0.0)
