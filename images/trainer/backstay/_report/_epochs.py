"""Writes the accounts of epochs to the log (`EpochLines`)."""

from __future__ import annotations

import logging
from dataclasses import asdict

from .._coordination import EpochEnded

__all__ = ["EpochLines"]

_LOG = logging.getLogger(__name__)


class EpochLines:
    """Writes a line about an epoch at most every `seconds`: a small dataset has many epochs in a second.

    The next line adds up the epochs that have no line, so that each dropped sample is counted in one.
    """

    def __init__(self, seconds: float) -> None:
        """
        Args:
            seconds: the shortest time between two lines, in seconds.
        """
        self._seconds = seconds
        self._last: float | None = None
        self._omitted: list[EpochEnded] = []

    def ended(self, now: float, epoch: EpochEnded, step: int) -> None:
        """Write a line about an epoch that ended with update `step`, or keep it for the next line.

        Args:
            now: any monotonic time in seconds.
            epoch: the account of the epoch.
            step: the number of updates.
        """
        if self._last is not None and now - self._last < self._seconds:
            self._omitted.append(epoch)
            return
        self._last = now
        before = f"; since the last line, {_sum(self._omitted)}" if self._omitted else ""
        self._omitted = []
        _LOG.info("%s (step %d)%s", epoch, step, before, extra={"fields": {"epoch": asdict(epoch)}})

    def close(self) -> None:
        """Write a line about the epochs that have none yet."""
        if self._omitted:
            _LOG.info("since the last line, %s", _sum(self._omitted))
            self._omitted = []


def _sum(omitted: list[EpochEnded]) -> str:
    used, dropped, repeated = (sum(getattr(one, name) for one in omitted) for name in ("used", "dropped", "repeated"))
    more = "1 other epoch has" if len(omitted) == 1 else f"{len(omitted)} other epochs have"
    return f"{more} ended: {used} samples used, {dropped} dropped, {repeated} repeated"
