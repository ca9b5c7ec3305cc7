"""Prepares batches ahead, in threads, beside the computation."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ._batch_key import BatchKey
from ._draw import draw, nbytes

__all__ = ["Prefetcher"]

_Outcome = tuple[Any, BaseException | None]


class Prefetcher:
    """`batches`, computed before they are needed. `batches` is pure, so an unused batch costs only the work for it.

    A `batches` with the attributes `workers`, `ahead` and `ahead_bytes` sets the limits (see `from_dataset`). Any other
    is called in one thread, one call at a time, up to two batches ahead.
    """

    def __init__(
        self, batches: Callable[[BatchKey], Any], ahead: int | None = None, workers: int | None = None
    ) -> None:
        """
        Args:
            ahead: how many batches are ready or in preparation at most, instead of the attribute of `batches`.
            workers: how many threads call `batches`, instead of the attribute of `batches`.
        """
        self._batches = batches
        workers = int(getattr(batches, "workers", 1)) if workers is None else workers
        self._ahead = int(getattr(batches, "ahead", max(2, workers + 1))) if ahead is None else ahead
        self._limit = int(getattr(batches, "ahead_bytes", 1 << 30))
        self._changed = threading.Condition()
        self._ready: dict[BatchKey, _Outcome] = {}
        self._begun: set[BatchKey] = set()
        self._due: BatchKey | None = None  # the key of the present request, or else of the next one
        self._last: int | None = None
        self._closed = False
        # More threads than batches in preparation would have nothing to do.
        for number in range(max(1, min(workers, self._ahead))):
            threading.Thread(target=self._run, name=f"backstay-batches-{number}", daemon=True).start()

    def get(self, key: BatchKey, last: int | None = None) -> Any:
        """Returns the batch of `key`, even after step `last`. Threads then prepare those of the steps after it, up to
        `last`.

        Raises:
            Exception: any that `batches` raises for this key.
        """
        with self._changed:
            self._due, self._last = key, None if last is None else max(last, key.step)
            # Batches that do not follow belong to an earlier world or an earlier step.
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
        """End the threads after the batches that they are preparing."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()

    def _follows(self, key: BatchKey) -> bool:
        due = self._due
        return due is not None and replace(key, step=due.step) == due and 0 <= key.step - due.step < self._ahead

    def _next(self) -> BatchKey | None:
        """Returns the first batch that is not prepared yet, if there is room for it."""
        if self._due is None:
            return None
        for step in range(self._due.step, self._due.step + self._ahead):
            key = replace(self._due, step=step)
            if key in self._ready or key in self._begun:
                continue
            if self._last is not None and step > self._last:
                return None
            return key
        return None

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._next() is not None)
                key = self._next()
                if self._closed or key is None:
                    return
                self._begun.add(key)
            outcome: _Outcome
            try:
                outcome = draw(self._batches, key), None
            except BaseException as error:  # noqa: BLE001  # `get` raises it to the caller
                outcome = None, error
            size = nbytes(outcome[0])
            with self._changed:
                self._begun.discard(key)
                if size:
                    self._ahead = max(1, min(self._ahead, self._limit // size))
                if self._follows(key) and not self._closed:
                    self._ready[key] = outcome
                self._changed.notify_all()
            del outcome
