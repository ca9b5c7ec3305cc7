"""Decides by the operator's messages whether the standby, or another incarnation, was promoted (T6)."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstay_rpc.refusals import RefusalCode

from ...errors import Superseded

if TYPE_CHECKING:
    from ..._timeouts import Timeouts
    from .._ending import Ending

__all__ = ["Arbiter"]

_LOG = logging.getLogger(__name__)


class Arbiter:
    """The operator's reports about the active server of a shard. Thread-safe.

    Attributes:
        asking: whether the apply thread waits for the operator's answer.
    """

    def __init__(self, shard: int, timeouts: Timeouts, ending: Ending) -> None:
        self._shard, self._times, self._ending = shard, timeouts, ending
        self._changed = threading.Event()
        self._confirmed_at = 0.0
        self._closed = False
        self.asking = False

    def confirm(self) -> None:
        """The operator reported this incarnation as the active one."""
        self._confirmed_at = time.monotonic()
        self._changed.set()

    def supersede(self, by: int) -> None:
        """Another incarnation is the active one: this process ends."""
        self._ending.fail(Superseded(RefusalCode.REPLACED, f"incarnation {by} serves shard {self._shard} now"))
        self._changed.set()

    def close(self) -> None:
        """Stop waiting for answers in all threads, because this server is shutting down."""
        self._closed = True
        self._changed.set()

    def standby_lost(self, when: float, closed: bool, connects_again: Callable[[], bool]) -> None:
        """The standby was lost: return once it is certain that it was not promoted. Called by the apply thread.

        Only the operator promotes, and reports it. A process that died closes its connections. A promoted one does not,
        and does not connect again. Without an operator, training continues (O5). If the operator has promoted the
        standby already, updates made since then are dropped for a new term (T6).

        Args:
            when: the time of the loss, on the clock of `time.monotonic`.
            closed: whether the standby's connection was closed.
            connects_again: whether a standby waits to be filled.

        Raises:
            Superseded: the standby was promoted, or this server is shutting down.
        """
        _LOG.warning("the standby is lost: updates wait until it is certain that the operator did not promote it")
        patience = self._times.standby_closed if closed else self._times.standby_silent
        self.asking = True
        try:
            while not self._closed and self._ending.error is None:
                if self._confirmed_at > when or connects_again():
                    return
                if patience <= 0:
                    _LOG.warning("the operator does not answer: this server continues without a standby")
                    return
                began = time.monotonic()
                self._changed.wait(0.2)
                self._changed.clear()
                # A pause of this process must not use up its patience.
                patience -= min(time.monotonic() - began, 1.0)
        finally:
            self.asking = False
        raise Superseded(RefusalCode.REPLACED, f"another incarnation serves shard {self._shard} now")
