"""One writer at a time for a checkpoint folder, without comparing the clocks of different machines.

The holder rewrites its lease file with a counter. A challenger reads the file for longer than the holder's longest
silence, measured on the challenger's monotonic clock. A counter that changes shows that the holder is alive.
Incarnations of one run do not wait for each other, because the operator has decided already which of them serves. A
holder that resumes after a long silence finds the newer lease before it stores anything. docs/decisions/0075 has the
whole argument.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backstay_rpc.refusals import RefusalCode

from ...errors import BackstayError, CheckpointError, CheckpointInUse, StorageError, Superseded
from .._files import Folder, PosixFolder
from .._manifest import JobIdentity
from .._names import LeaseName
from .._seal import seal, unseal
from .._store import CheckpointStore, Contents

__all__ = ["FolderLease", "Holder", "Interrupted", "LeaseTimes"]

_LOG = logging.getLogger(__name__)

_WIDTH: Final = 2048
"""Bytes of a lease file. All contents have one length, so a rewrite in place needs no further space on the disk."""

_ATTEMPTS: Final = 20

_LARGEST: Final = 16 * _WIDTH
"""Bytes of a lease file that are read. A larger file is not a lease that this code wrote."""


class Interrupted(CheckpointError):  # noqa: N818
    """A signal to stop the process arrived while it waited."""


@dataclass(frozen=True)
class LeaseTimes:
    """Durations of the protocol, in seconds.

    Attributes:
        renew: seconds between two renewals.
        silence: a holder that has not renewed its lease for this time has lost it.
        settle: how long a challenger watches a holder of the same job, which may be about to end, before it gives up.
        closing: how long a challenger watches a holder that stores its last checkpoint, before it gives up.
        confirm: seconds between two checks for a newer lease.
    """

    renew: float = 1.0
    silence: float = 5.0
    settle: float = 10.0
    closing: float = 90.0
    confirm: float = 10.0

    @classmethod
    def of(cls, folder: Folder) -> LeaseTimes:
        """Returns the durations for `folder`. In an object store each renewal is a request, so renewals are rarer
        there."""
        return cls() if isinstance(folder, PosixFolder) else cls(renew=3.0, silence=12.0, settle=15.0, confirm=30.0)


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease, or tries to acquire it."""

    job: JobIdentity
    incarnation: int
    pod: str = ""

    def __str__(self) -> str:
        return f"job {self.job} (uid {self.job.uid or 'unknown'}, pod {self.pod or 'unknown'})"


class _LeaseRecord(BaseModel):
    """The content of a lease file."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    job: JobIdentity
    incarnation: int = Field(ge=0)
    pod: str
    number: int = Field(ge=1)
    silence: float = Field(gt=0, le=600)
    beat: int = Field(ge=0)
    state: Literal["held", "closing", "released"]

    @property
    def holder(self) -> Holder:
        return Holder(self.job, self.incarnation, self.pod)


@dataclass
class _Watched:
    """A lease of another run, or an unreadable one, while a challenger watches it."""

    content: bytes
    record: _LeaseRecord | None
    since: float
    looks: int = 0
    silent: bool = False
    logged: set[str] = field(default_factory=set)


class FolderLease:
    """The right to write into a folder. Thread-safe; `acquire` is called before the other methods."""

    def __init__(
        self,
        store: CheckpointStore,
        holder: Holder,
        *,
        lost: Callable[[BackstayError], None],
        wait: Callable[[float], bool],
        times: LeaseTimes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            lost: called once, from any thread, when another process has the lease. Its argument is `Superseded` when
                that process is a newer incarnation of this one, `CheckpointInUse` otherwise.
            wait: waits for a number of seconds; returns whether a signal to stop the process arrived.
        """
        self._store, self._folder, self._holder = store, store.folder, holder
        self._lost, self._wait, self._clock = lost, wait, clock
        self.times = times or LeaseTimes.of(store.folder)
        self._lock = threading.RLock()
        self._name: LeaseName | None = None
        self._beat = 0
        self._state: Literal["held", "closing", "released"] = "held"
        self._records: dict[LeaseName, _LeaseRecord | None] = {}  # as first read: their owners never change
        self._error: BackstayError | None = None
        self.taken_over: list[str] = []  # for people: leases that were not renewed, so this process took over
        self._reported = ""  # why the lease could not be written again
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def number(self) -> int:
        """The number of the lease; 0 while it is not acquired."""
        return 0 if self._name is None else self._name.number

    # ---- Acquiring ----

    def acquire(self) -> None:
        """Take the lease. A second call returns immediately.

        Raises:
            CheckpointInUse: another run holds it and renews it.
            Superseded: a newer incarnation of this process holds it.
            StorageError: the folder cannot be read.
            CheckpointError: the lease cannot be written.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._name is not None:
                return
            dead: set[LeaseName] = set()
            rivals: list[LeaseName] = []
            for _ in range(_ATTEMPTS):
                contents = self._store.contents()
                self._not_superseded(contents)
                dead |= self._watch([name for name in contents.leases if name not in dead])
                # The number follows from the files read above. A concurrent challenger has the same number, and a
                # lease is lost only to a higher number.
                name = LeaseName(contents.next_lease(self._store.uri), secrets.token_hex(8))
                self._folder.write(str(name), self._text(name.number))
                if not (rivals := self._rivals(name, dead)):
                    break
                # Two processes wrote at the same time: both withdraw, and try again at different times.
                self._folder.delete(str(name))
                if self._wait(self.times.renew * random.random()):  # noqa: S311
                    raise Interrupted("a signal to stop arrived while the process waited for the checkpoint folder")
            else:
                raise CheckpointInUse(
                    f"several runs try to write checkpoints into {self._store.uri} at the same time: a folder has one "
                    f"writer at a time; use another checkpoint.uri. The lease files of the other runs are "
                    f"{', '.join(map(str, rivals))}"
                )
            self._name = name
            for old in self._store.contents().leases:
                if old.number < name.number:
                    self._discard(old)
            self._thread = threading.Thread(target=self._renew_forever, name="backstay-lease", daemon=True)
            self._thread.start()

    def observe(self) -> None:
        """Find out whether another run writes into the folder, without taking the lease.

        Raises:
            CheckpointInUse: another run writes into the folder.
            StorageError: the folder cannot be read.
        """
        with self._lock:
            self._watch(list(self._store.contents().leases))

    def _rivals(self, own: LeaseName, dead: set[LeaseName]) -> list[LeaseName]:
        """Leases of other runs that were written while this process requested the folder."""
        contents = self._store.contents()
        try:
            self._not_superseded(contents)
        except Superseded:
            self._folder.delete(str(own))
            raise
        others = {name: self._read(name) for name in contents.leases if name != own and name not in dead}
        return [
            name
            for name, record in others.items()
            if record is None or (record.job != self._holder.job and record.state != "released")
        ]

    def _not_superseded(self, contents: Contents) -> None:
        for name in contents.leases:
            record = self._read(name)
            if record is not None and record.job == self._holder.job and record.incarnation > self._holder.incarnation:
                raise Superseded(
                    RefusalCode.REPLACED,
                    f"incarnation {record.incarnation} of this server writes the checkpoints in {self._store.uri} now",
                )

    def _watch(self, names: list[LeaseName]) -> set[LeaseName]:
        """Wait until every lease in `names` of another run is released or silent; returns these leases.

        A lease that cannot be read, such as an empty file, may be another run's. It is watched as well.

        Raises:
            CheckpointInUse: a lease of another run is renewed, or the content of an unreadable one changes.
        """
        began = self._clock()
        watched: dict[LeaseName, _Watched] = {}
        for name in names:
            content = self._content(name)
            if content is None:
                continue
            record = _parse(content)
            if record is None or record.job != self._holder.job:
                watched[name] = _Watched(content, record, self._clock())
        while waiting := [name for name, one in watched.items() if not one.silent]:
            for name in waiting:
                self._look(name, watched[name], began)
            if all(one.silent for one in watched.values()):
                break
            if self._wait(self.times.renew / 4):
                raise Interrupted("a signal to stop arrived while the process waited for the checkpoint folder")
        return set(watched)

    def _look(self, name: LeaseName, one: _Watched, began: float) -> None:
        content, now = self._content(name), self._clock()
        if content is None:
            one.silent = True
            return
        record = _parse(content) or one.record
        if record is not None and record.state == "released":
            one.silent = True
            return
        one.looks += 1
        silence = record.silence if record is not None else self.times.silence
        who = str(record.holder) if record is not None else f"an unknown process, whose lease {name} cannot be read"
        if content == one.content:
            # Several reads: a process that was paused between the first and the second has no evidence of silence.
            if now - one.since >= silence and one.looks >= 5:
                if record is None:
                    text = (
                        f"the lease {name} cannot be read ({len(content)} bytes), and did not change for "
                        f"{silence:.0f} s"
                    )
                else:
                    text = f"{who} was silent for {silence:.0f} s"
                _LOG.warning("%s: taking over the checkpoint folder", text)
                self.taken_over.append(text)
                one.silent = True
            elif "wait" not in one.logged:
                one.logged.add("wait")
                _LOG.info(
                    "the checkpoint folder %s is held by %s: waiting up to %.0f s for its next renewal",
                    self._store.uri,
                    who,
                    silence,
                )
            return
        one.content, one.since, one.looks, one.record = content, now, 0, record
        same = record is not None and record.job.same_job(self._holder.job)
        closing = record is not None and record.state == "closing"
        patience = self.times.closing if closing else self.times.settle if same else 0.0
        if now - began >= patience:
            raise CheckpointInUse(
                f"{who} writes checkpoints into {self._store.uri} now: a folder has one writer at a time; wait until "
                "it ends, or use another checkpoint.uri"
            )
        if closing and "closing" not in one.logged:
            one.logged.add("closing")
            _LOG.info("%s is storing its last checkpoint: waiting for it", who)

    # ---- Holding ----

    def check(self) -> None:
        """Make sure that no other process has taken the lease.

        Raises:
            CheckpointInUse, Superseded: another process has taken the lease; `lost` was called.
            StorageError: the folder cannot be read.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._name is None:
                raise CheckpointError("the lease of the checkpoint folder is not acquired")
            contents = self._store.contents()
            try:
                self._not_superseded(contents)
                for name in contents.leases:
                    if name.number <= self._name.number:
                        continue
                    record = self._read(name)
                    if record is not None and record.job != self._holder.job:
                        raise CheckpointInUse(
                            f"{record.holder} took over {self._store.uri} while this process did not renew its lease: "
                            "this process stores nothing more"
                        )
                if self._name not in contents.leases:
                    self._folder.write(str(self._name), self._text(self._name.number))  # the folder was emptied
            except (CheckpointInUse, Superseded) as error:
                self._give_up(error)
                raise

    def closing(self) -> None:
        """Announce that this process stores its last checkpoint and ends: a challenger waits for that."""
        with self._lock:
            if self._state == "held":
                self._state = "closing"
                self._renew()

    def release(self) -> None:
        """Release the lease, so that the next run does not wait. Nothing may be written after this."""
        self._stopped.set()
        with self._lock:
            if self._name is not None and self._state != "released" and self._error is None:
                self._state = "released"
                self._renew()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5)

    def _give_up(self, error: BackstayError) -> None:
        self._error = error
        self._stopped.set()
        self._lost(error)

    def _renew_forever(self) -> None:
        renewed = confirmed = self._clock()
        while not self._stopped.wait(self.times.renew):
            with self._lock:
                if self._stopped.is_set():
                    return
                now = self._clock()
                # After a pause this process may have lost the lease, so it checks that before anything else.
                late = now - renewed > self.times.silence / 2
                ok = self._renew()
                if ok:
                    renewed = now
                if late or not ok or now - confirmed >= self.times.confirm:
                    try:
                        self.check()
                    except StorageError as error:
                        _LOG.debug("the lease could not be confirmed: %s", error)
                    except BackstayError as error:
                        if self._error is None:  # else `lost` was called
                            self._report(str(error))
                    else:
                        self._reported = ""
                        confirmed = now

    def _report(self, why: str) -> None:
        """Log once why the lease cannot be written again, such as that the folder was deleted."""
        if why != self._reported:
            _LOG.error("the lease of the checkpoint folder cannot be written: %s; this process tries again", why)
        self._reported = why

    def _renew(self) -> bool:
        if self._name is None:
            return True
        self._beat += 1
        try:
            self._folder.rewrite(str(self._name), self._text(self._name.number))
        except CheckpointError as error:
            _LOG.debug("the lease could not be renewed: %s", error)
            return False
        return True

    # ---- Files ----

    def _text(self, number: int) -> bytes:
        record = _LeaseRecord(
            job=self._holder.job,
            incarnation=self._holder.incarnation,
            pod=self._holder.pod,
            number=number,
            silence=self.times.silence,
            beat=self._beat,
            state=self._state,
        )
        return seal(record.model_dump(mode="json")).ljust(_WIDTH)

    def _read(self, name: LeaseName) -> _LeaseRecord | None:
        known = self._records.get(name)
        if known is None:
            known = self._records[name] = _parse(self._content(name) or b"")
        return known

    def _content(self, name: LeaseName) -> bytes | None:
        """Returns the content of the file; None when it does not exist."""
        size = self._folder.size(str(name))
        if size is None:
            return None
        if size > _LARGEST:
            return f"a file of {size} bytes".encode()
        try:
            return self._folder.read(str(name))
        except StorageError:
            raise
        except CheckpointError:
            return None

    def _discard(self, name: LeaseName) -> None:
        try:
            self._folder.delete(str(name))
        except CheckpointError as error:
            _LOG.debug("an old lease could not be deleted: %s", error)


def _parse(content: bytes) -> _LeaseRecord | None:
    """Returns the record in `content`; None when it is damaged, or was read while its holder rewrote it."""
    try:
        return _LeaseRecord.model_validate(unseal(content, "the lease"))
    except (CheckpointError, ValidationError):
        return None
