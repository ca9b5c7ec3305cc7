"""Loads the chosen checkpoint, checks it, and lets it answer requests; then follows newer ones.

A version answers requests after `predict` computed a batch of each size with it. Until then, and after any error, the
previous version answers.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .._checkpoint import JobIdentity, ManifestName
from .._compute import is_out_of_memory
from ..errors import CheckpointError, ConfigurationError, StorageError
from ._batcher import Batcher
from ._choice import CheckpointChoice, Listing, LoadedCheckpoint
from ._metrics import ServingMetrics
from ._program import ServedVersion, ServingProgram, ServingStopped

__all__ = ["CheckpointFollower"]

_LOG = logging.getLogger(__name__)
_UNREADABLE = "Unreadable"
_LONGEST = {_UNREADABLE: 60.0}  # all can be read again when an outage ends, and nothing may be served until then
_LONGEST_OF_OTHERS = 600.0


@dataclass
class _Skipped:
    """A checkpoint that was not served.

    Attributes:
        kind, reason: why.
        again: when it is read again; None: never.
        pause: the time until then, in seconds. 0: at the next look, and older ones are not tried before.
    """

    kind: str
    reason: str
    again: float | None
    pause: float


class CheckpointFollower:
    """Serves the newest usable checkpoint of a choice.

    Attributes:
        status: what the process does about checkpoints now, for people.
    """

    def __init__(
        self,
        choice: CheckpointChoice,
        program: Callable[[LoadedCheckpoint], ServingProgram],
        batcher: Batcher,
        metrics: ServingMetrics,
        *,
        retry: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            program: compiles `predict` for the first checkpoint.
            retry: the first pause before a damaged or unreadable checkpoint is read again, in seconds.
            clock: returns seconds.
        """
        self.status = choice.nothing()
        self._choice, self._make, self._batcher, self._metrics = choice, program, batcher, metrics
        self._retry, self._clock = retry, clock
        self._program: ServingProgram | None = None
        self._served: ManifestName | None = None
        self._job: JobIdentity | None = None
        self._shapes: Any = None
        self._names: tuple[str, ...] | None = None
        self._skipped: dict[ManifestName, _Skipped] = {}
        self._seen: dict[ManifestName, float] = {}
        self._patient_until: float | None = None
        self._takes_new = True
        self._available = True
        metrics.gauge("storage_available").set(1)

    def run(self, stop: threading.Event, every: float, follow: bool) -> None:
        """Look for checkpoints until `stop` or `ServingStopped`, or without `follow` until one is served. Newer ones
        of that time that could not be read are then still read again.

        Raises:
            ConfigurationError: `predict` cannot be served with the first checkpoint.
        """
        while not stop.is_set():
            try:
                self.look()
            except ServingStopped:
                return
            if self._served is not None and (not follow or self._choice.fixed):
                self._takes_new = False
                newer = (skipped for name, skipped in self._skipped.items() if self._replaces(name, left=False))
                if all(skipped.again is None for skipped in newer):
                    return
            stop.wait(every)

    def look(self) -> bool:
        """Serve the newest usable checkpoint, if it is not served already. Returns whether the version changed.

        Raises:
            ConfigurationError: `predict` cannot be served with the first checkpoint.
        """
        now = self._clock()
        try:
            listing = self._choice.look(self._served)
            gone = self._served is not None and not listing.found
            self._storage(f"{self._choice.uri} has no checkpoints any more" if gone else None)
        except StorageError as error:
            self._storage(str(error))
            self._names = None
            return False
        due = any(skipped.again is not None and now >= skipped.again for skipped in self._skipped.values())
        if listing.names == self._names and not due:
            return False
        self._forget(listing.found)
        changed = self._serve_newest(listing, now)
        self._names = listing.names
        return changed

    def _serve_newest(self, listing: Listing, now: float) -> bool:
        for name in listing.found:
            self._seen.setdefault(name, now)
            if not self._replaces(name, listing.left):
                return False
            if not self._is_due(name, now):
                continue
            if self._try(name, now):
                return True
            if self._skipped[name].pause == 0:
                break
        if self._served is None:
            self.status = self._choice.nothing() + "".join(
                f"\n  skipped {name}: {skipped.reason}" for name, skipped in self._skipped.items()
            )
        return False

    def _is_due(self, name: ManifestName, now: float) -> bool:
        skipped = self._skipped.get(name)
        if skipped is None:
            return self._takes_new
        if self._served is None and skipped.kind == _UNREADABLE:
            return True  # before an older one that is due, whose job or model would then be the only one to be served
        return skipped.again is not None and now >= skipped.again

    def _replaces(self, name: ManifestName, left: bool) -> bool:
        """Returns whether a checkpoint is newer than the served one. A file that was deleted does not make others
        newer."""
        served = self._served
        return served is None or (name != served and (name > served or left or name.history != served.history))

    def _try(self, name: ManifestName, now: float) -> bool:
        try:
            loaded = self._choice.load(name)
            foreign = self._foreign(loaded)
            if foreign is not None:
                self._skip(name, "Foreign", foreign, None)
                return False
            version = self._prepared(loaded)
        except CheckpointError as error:
            self._skip(name, _UNREADABLE if isinstance(error, StorageError) else "Damaged", str(error), now)
            return False
        except ConfigurationError as error:
            if self._served is None:
                raise
            self._skip(name, "Unusable", str(error), None)
            return False
        except Exception as error:  # such as memory for a second version
            if self._served is None and not is_out_of_memory(error):
                raise
            self._skip(name, "Failed", f"{type(error).__name__}: {error}", now)
            return False
        self._swap(loaded, version)
        return True

    def _foreign(self, loaded: LoadedCheckpoint) -> str | None:
        if self._job is None:
            return None
        if not loaded.job.same_job(self._job):
            return f"the job {loaded.job} wrote it, and a checkpoint of {self._job} is served. To serve it, restart"
        difference = loaded.difference(self._shapes)
        return None if difference is None else f"it belongs to another model: {difference}"

    def _prepared(self, loaded: LoadedCheckpoint) -> ServedVersion:
        params, state = jax.device_put((loaded.params, loaded.state))
        version = ServedVersion(loaded.name.version, str(loaded.name), params, state)
        if self._program is None:
            program = self._make(loaded)
            program.check(version)
            program.check_rows(version)
            self._program = program
        else:
            self._program.check(version)
        return version

    def _swap(self, loaded: LoadedCheckpoint, version: ServedVersion) -> None:
        assert self._program is not None  # `_prepared` made it
        self._metrics.served(version.step, version.version, version.checkpoint)
        self._batcher.use(self._program, version)
        self._served, self._job, self._shapes = loaded.name, loaded.job, loaded.shapes
        seconds = self._clock() - self._seen[loaded.name]
        self._metrics.histogram("load_seconds").observe(seconds)
        self.status = f"step {version.step} is served"
        _LOG.info("step %d is served, %.2f s after its checkpoint was found: %s", version.step, seconds, loaded.name)

    def _skip(self, name: ManifestName, kind: str, reason: str, now: float | None) -> None:
        """
        Args:
            now: the present time; None if the checkpoint is not read again.
        """
        before = self._skipped.get(name)
        pause = max(self._retry, 0.0 if before is None else 2 * before.pause)
        pause = min(pause, _LONGEST.get(kind, _LONGEST_OF_OTHERS))
        if self._served is None and kind == _UNREADABLE and now is not None:
            if self._patient_until is None:
                self._patient_until = now + self._retry
            if now < self._patient_until:
                pause = 0.0
        self._skipped[name] = _Skipped(kind, reason, None if now is None else now + pause, pause)
        if before is None or before.reason != reason:
            self._metrics.counter("skipped_checkpoints").labels(kind).inc()
            _LOG.warning("the checkpoint %s is not served, %s: %s", name, self._serves, reason)

    @property
    def _serves(self) -> str:
        """The effect of a problem with checkpoints, for people."""
        return "no checkpoint is served" if self._served is None else f"step {self._served.version} stays served"

    def _forget(self, found: list[ManifestName]) -> None:
        there = set(found)
        self._skipped = {name: skipped for name, skipped in self._skipped.items() if name in there}
        self._seen = {name: at for name, at in self._seen.items() if name in there}

    def _storage(self, problem: str | None) -> None:
        if problem is None:
            if not self._available:
                _LOG.info("the checkpoint folder %s can be read again", self._choice.uri)
            self._available = True
        else:
            if self._available:
                _LOG.warning("no new checkpoints can be read, %s: %s", self._serves, problem)
            self._available = False
            if self._served is None:
                self.status = problem
        self._metrics.gauge("storage_available").set(float(self._available))
