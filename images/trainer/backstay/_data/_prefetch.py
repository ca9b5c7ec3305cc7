"""Prepares batches ahead, in a thread, beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ._batch_key import BatchKey

__all__ = ["Prefetcher"]


class Prefetcher:
    """`batches`, computed ahead of need. Because `batches` is pure, a batch that nobody asks for is only lost work."""

    def __init__(self, batches: Callable[[BatchKey], Any], ahead: int = 2) -> None:
        """
        Args:
            batches: called in one thread, one call at a time.
            ahead: how many batches to hold ready.
        """
        self._batches = batches
        self._ahead = ahead
        self._changed = threading.Condition()
        self._ready: dict[BatchKey, tuple[Any, BaseException | None]] = {}
        self._due: BatchKey | None = None  # what is asked for now, or will be asked for next
        self._last: int | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="backstay-batches", daemon=True)
        self._thread.start()

    def get(self, key: BatchKey, last: int | None = None) -> Any:
        """The batch of `key`; then those of the steps after it are prepared, up to step `last`.

        Raises:
            Whatever `batches` raises for this key.
        """
        with self._changed:
            self._due, self._last = key, last
            # What does not follow is of a world or a time that is gone.
            self._ready = {k: outcome for k, outcome in self._ready.items() if self._follows(k)}
            self._changed.notify_all()
            self._changed.wait_for(lambda: key in self._ready or self._closed)
            if key not in self._ready:
                raise RuntimeError("the batches were closed while one was waited for")
            batch, error = self._ready.pop(key)
            self._due = replace(key, step=key.step + 1)
            self._changed.notify_all()
        if error is not None:
            raise error
        return batch

    def close(self) -> None:
        """End the thread after the batch it is preparing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _follows(self, key: BatchKey) -> bool:
        due = self._due
        return due is not None and replace(key, step=due.step) == due and 0 <= key.step - due.step < self._ahead

    def _next(self) -> BatchKey | None:
        if self._due is None:
            return None
        for step in range(self._due.step, self._due.step + self._ahead):
            key = replace(self._due, step=step)
            if key not in self._ready:
                return key if self._last is None or step <= self._last else None
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                key = self._next()
                if self._closed or key is None:
                    return
            outcome: tuple[Any, BaseException | None]
            try:
                outcome = self._batches(key), None
            except BaseException as error:  # noqa: BLE001  # raised to whoever asks for this batch
                outcome = None, error
            with self._changed:
                if self._follows(key) and not self._closed:
                    self._ready[key] = outcome
                    self._changed.notify_all()
            del outcome
