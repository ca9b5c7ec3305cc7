"""T6, T7: one writer at a time in a folder, regardless of clocks. Time is injected, so no test waits."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from backstay._checkpoint import CheckpointStore, FolderLease, Holder, Interrupted, JobIdentity, LeaseTimes
from backstay.errors import BackstayError, CheckpointError, CheckpointInUse, Superseded

TIMES = LeaseTimes(renew=100.0, silence=500.0, settle=1000.0, closing=9000.0, confirm=1000.0)
"""So long that the lease's thread does nothing while a test runs."""


class Process:
    """One process with its own clock, which starts at any time."""

    def __init__(self, folder: str, name: str, uid: str, incarnation: int = 1, clock: float = 0.0) -> None:
        self.store = CheckpointStore(folder)
        self.now = clock
        self.waits = 0
        self.meanwhile: Callable[[], object] = lambda: None
        self.stopped = False
        self.lost: list[BackstayError] = []
        self.lease = FolderLease(
            self.store,
            Holder(JobIdentity(namespace="default", name=name, uid=uid), incarnation, f"{name}-pod"),
            lost=self.lost.append,
            wait=self.wait,
            times=TIMES,
            clock=lambda: self.now,
        )

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        self.waits += 1
        self.meanwhile()
        return self.stopped

    def renew(self) -> None:
        """Do what the lease's thread does every `renew` seconds."""
        assert self.lease._renew()


Start = Callable[..., Process]


@pytest.fixture(params=["posix", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "posix" else f"memory://{tmp_path.name}-{time.monotonic_ns()}/c"


@pytest.fixture
def start(folder: str) -> Iterator[Start]:
    made: list[Process] = []

    def make(name: str = "a", uid: str = "1", incarnation: int = 1, clock: float = 0.0) -> Process:
        made.append(Process(folder, name, uid, incarnation, clock))
        return made[-1]

    yield make
    for each in made:
        each.lease.release()


def test_t7_a_second_living_writer_is_refused_and_the_first_is_named(start: Start) -> None:
    first, second = start("a", "1"), start("b", "2", clock=1e9)
    first.lease.acquire()
    second.meanwhile = first.renew
    with pytest.raises(CheckpointInUse, match=r"job default/a \(uid 1, pod a-pod\) writes checkpoints into"):
        second.lease.acquire()
    assert second.now - 1e9 < TIMES.renew
    first.lease.check()
    assert first.lost == []


def test_t7_two_runs_of_one_job_are_two_writers(start: Start) -> None:
    """For example `backstay run` in two terminals."""
    first, second = start("a", "1"), start("a", "2")
    first.lease.acquire()
    second.meanwhile = first.renew
    with pytest.raises(CheckpointInUse, match="uid 1"):
        second.lease.acquire()
    assert second.now <= TIMES.settle + TIMES.renew


def test_t7_a_silent_writer_is_succeeded_after_its_silence_and_finds_out(start: Start) -> None:
    """The same job continues after SIGKILL, and after SIGSTOP the first writer resumes, and stores nothing more
    (T6)."""
    first, second = start("a", "1", clock=50.0), start("a", "2", clock=-70.0)
    first.lease.acquire()
    second.lease.acquire()
    assert TIMES.silence <= second.now + 70.0 <= TIMES.silence + 2 * TIMES.renew
    assert second.lease.number > first.lease.number
    for _ in range(2):
        with pytest.raises(CheckpointInUse, match=r"uid 2.*took over"):
            first.lease.check()
    assert [type(error) for error in first.lost] == [CheckpointInUse]
    second.lease.check()


def test_t8_a_writer_that_ended_well_leaves_nothing_to_wait_for(start: Start) -> None:
    first, second = start("a", "1"), start("b", "2")
    first.lease.acquire()
    first.lease.release()
    second.lease.acquire()
    assert second.waits == 0


def test_t8_a_writer_that_stores_its_last_checkpoint_is_waited_for(start: Start) -> None:
    first, second = start("a", "1"), start("a", "2")
    first.lease.acquire()

    def meanwhile() -> None:
        if second.waits == 2:
            first.lease.closing()
        elif second.now > 2 * TIMES.settle:
            first.lease.release()
        else:
            first.renew()

    second.meanwhile = meanwhile
    second.lease.acquire()
    assert 2 * TIMES.settle < second.now < TIMES.closing


def test_t6_the_next_incarnation_of_a_server_does_not_wait(start: Start) -> None:
    first, second = start("a", "1", 1), start("a", "1", 2)
    first.lease.acquire()
    second.lease.acquire()
    assert second.waits == 0
    with pytest.raises(Superseded, match="incarnation 2"):
        first.lease.check()
    with pytest.raises(Superseded, match="incarnation 2"):
        start("a", "1", 1).lease.acquire()
    second.lease.check()


def test_t8_a_signal_to_stop_ends_a_writer_that_waits(start: Start) -> None:
    first, second = start("a", "1"), start("a", "2")
    first.lease.acquire()
    second.stopped = True
    with pytest.raises(Interrupted):
        second.lease.acquire()


def test_t7_of_two_challengers_at_the_same_time_at_most_one_gets_the_lease(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second challenger writes its lease after the first has listed the folder, and before it writes its lease."""
    first, second = start("a", "1"), start("b", "2")
    held: list[str] = []
    write = first.store.folder.write
    paused = [True]

    def pause(name: str, fill: bytes) -> None:
        if paused:
            paused.clear()
            second.lease.acquire()
            held.append("second")
        write(name, fill)

    monkeypatch.setattr(first.store.folder, "write", pause)
    first.meanwhile = second.renew
    with pytest.raises(CheckpointInUse, match="default/b"):
        first.lease.acquire()
    assert held == ["second"]
    second.lease.check()
    assert second.lost == []


def test_t7_a_deleted_lease_is_written_again(start: Start) -> None:
    first = start()
    first.lease.acquire()
    for name in first.store.folder.names():
        first.store.folder.delete(name)
    first.lease.check()
    second = start("b", "2")
    second.meanwhile = first.renew
    with pytest.raises(CheckpointInUse):
        second.lease.acquire()


def test_t7_a_folder_that_was_deleted_is_not_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log has it once. The folder is used again as soon as the user has created it."""
    folder = tmp_path / "deleted"
    run = Process(str(folder), "a", "1")
    run.lease.acquire()
    shutil.rmtree(folder)
    with pytest.raises(CheckpointError, match="was deleted while this process used it, and is not made again"):
        run.lease.check()
    for write in (run.store.folder.write, run.store.folder.replace):
        with pytest.raises(CheckpointError, match="was deleted while"):
            write("file", b"content")
    with pytest.raises(CheckpointError, match="was deleted while"):
        run.store.folder.append("file", b"content", 0)
    assert not folder.exists()
    assert run.lost == []
    for why in ("gone", "gone", "another"):
        run.lease._report(why)
    assert [record.message for record in caplog.records if "lease of the checkpoint" in record.message] == [
        "the lease of the checkpoint folder cannot be written: gone; this process tries again",
        "the lease of the checkpoint folder cannot be written: another; this process tries again",
    ]
    folder.mkdir()
    run.lease.check()
    run.lease.release()
    assert [name for name in run.store.folder.names() if name.startswith("lease-")]


def test_t7_a_damaged_lease_does_not_block_a_writer_forever(start: Start) -> None:
    first, second = start("a", "1"), start("b", "2")
    first.lease.acquire()
    name = first.store.folder.names()[0]
    first.store.folder.rewrite(name, b"\x00" * 2048)
    second.lease.acquire()
    assert second.now <= TIMES.silence + 2 * TIMES.renew


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\x00" * 2048, b" " * (1 << 20)], ids=["empty", "torn", "zeros", "huge"]
)
def test_t8_an_unreadable_lease_is_taken_over_after_its_time_and_named(start: Start, content: bytes) -> None:
    """For example a file of 0 bytes after a full disk. No process renews it."""
    run = start("a", "1")
    name = "lease-00000007-0123456789abcdef.json"
    run.store.folder.write(name, content)
    run.lease.acquire()
    assert TIMES.silence <= run.now <= TIMES.silence + 2 * TIMES.renew
    assert run.lease.taken_over == [
        f"the lease {name} cannot be read ({len(content) if len(content) < 1 << 15 else 23} bytes), and did not change "
        f"for {TIMES.silence:.0f} s"
    ]
    assert name not in run.store.folder.names()
    run.lease.check()


def test_t6_an_unreadable_lease_that_is_renewed_has_a_running_writer(start: Start) -> None:
    """A later version of Backstay may write another format. The content changes, so the folder is in use."""
    run = start("a", "1")
    name = "lease-00000007-0123456789abcdef.json"
    run.store.folder.write(name, b"00000")
    run.meanwhile = lambda: run.store.folder.rewrite(name, b"%05d" % run.waits)
    with pytest.raises(CheckpointInUse, match=f"an unknown process, whose lease {name} cannot be read"):
        run.lease.acquire()
    assert run.store.folder.names() == [name]


def test_t8_unreadable_leases_that_appear_again_and_again_are_named(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("a", "1")
    write = run.store.folder.write
    written: list[str] = []

    def beside(name: str, fill: bytes) -> None:
        written.append(f"lease-{len(written) + 10:08d}-0123456789abcdef.json")
        write(written[-1], b"")
        write(name, fill)

    monkeypatch.setattr(run.store.folder, "write", beside)
    with pytest.raises(CheckpointInUse, match="The lease files of the other runs are lease-000000") as caught:
        run.lease.acquire()
    assert written[-1] in str(caught.value)


def test_t7_a_full_disk_does_not_make_a_living_writer_look_dead(tmp_path: Path) -> None:
    """A lease is rewritten in place: its file keeps its size and its blocks on the disk."""
    first = Process(str(tmp_path), "a", "1")
    first.lease.acquire()
    file = next(tmp_path.iterdir())
    before = file.stat()
    first.renew()
    after = file.stat()
    assert (before.st_ino, before.st_size, before.st_blocks) == (after.st_ino, after.st_size, after.st_blocks)
    first.lease.release()


def test_t7_a_challenger_does_not_count_its_own_pause_as_silence(start: Start) -> None:
    """A suspended node pauses both, and the holder gets time to renew before the challenger decides."""
    holder, challenger = start(uid="1"), start("b", uid="2")
    holder.lease.acquire()

    def meanwhile() -> None:
        if challenger.waits == 1:
            challenger.now += 2 * TIMES.silence
        else:
            holder.renew()

    challenger.meanwhile = meanwhile
    with pytest.raises(CheckpointInUse):
        challenger.lease.acquire()


def test_t6_a_holder_checks_for_a_newer_lease_first_after_a_pause(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next regular check of the paused holder is due only after `confirm`, which is longer than the pause."""
    holder, successor = start(incarnation=1), start(incarnation=2)
    holder.lease.acquire()
    successor.lease.acquire()

    class Paused:
        """The first wait takes longer than the silence after which a lease is lost."""

        rounds = 0

        def wait(self, seconds: float) -> bool:
            self.rounds += 1
            holder.now += TIMES.silence
            return self.rounds > 1

        def is_set(self) -> bool:
            return False

        def set(self) -> None: ...

    assert TIMES.silence < TIMES.confirm
    with monkeypatch.context() as patched:
        patched.setattr(holder.lease, "_stopped", Paused())
        holder.lease._renew_forever()
    assert [type(error) for error in holder.lost] == [Superseded]
