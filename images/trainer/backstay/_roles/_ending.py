"""Whether and why a server's pod ends."""

from __future__ import annotations

import threading

from backstay_rpc.control_pb2 import Done

__all__ = ["Ending"]


class Ending:
    """Any thread of a server reports here why the server ends; the main thread waits for it.

    Attributes:
        error: the exception that ends the process; None: there is none.
        done: how the job ended; None while it has not.
    """

    def __init__(self) -> None:
        self._changed = threading.Event()
        self.error: BaseException | None = None
        self.done: Done | None = None

    def fail(self, error: BaseException) -> None:
        """End the process with this exception, unless an earlier one ends it."""
        if self.error is None:
            self.error = error
        self._changed.set()

    def end(self, done: Done) -> None:
        """The job has ended."""
        self.done = done
        self._changed.set()

    def notice(self) -> None:
        """Wake the main thread: something that it waits for has changed."""
        self._changed.set()

    def wait(self, seconds: float) -> None:
        """Return when something has changed, and after `seconds` at the latest."""
        self._changed.wait(seconds)
        self._changed.clear()

    @property
    def complete(self) -> bool:
        """Whether the job has ended, and has not failed."""
        return self.done is not None and not self.done.failed

    @property
    def failed(self) -> str:
        """Reason and text of the job's failure; empty: it has not failed."""
        return "" if self.done is None or not self.done.failed else f"{self.done.reason}: {self.done.failed}"
