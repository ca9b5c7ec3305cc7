"""Makes a stream that can only be read on a function of `BatchKey` (`from_iterator`)."""

from __future__ import annotations

import inspect
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from ..errors import ConfigurationError
from ._batch_key import BatchKey
from ._draw import nbytes

__all__ = ["Streamed", "from_iterator"]

_LOG = logging.getLogger(__name__)
_KEPT_BYTES: Final = 1 << 30  # of the batches that were read last, as of those that are prepared
_AHEAD: Final = 2  # batches that a prefetcher has read beyond the one that is drawn


class Streamed:
    """`batches` of a stream. Made by `from_iterator`.

    It keeps the batches that it read last. A refused contribution is computed again from the same batches. A change of
    the number of ranks draws some of the last numbers again. Without these batches, the whole stream would be read
    again.
    """

    workers = 1  # one iterator can only be read by one thread

    def __init__(self, make: Callable[..., Iterator[Any]], shared: bool) -> None:
        self._make, self._shared = make, shared
        self._lock = threading.Lock()
        self._of: tuple[int, ...] | None = None  # the arguments that the iterator was made with
        self._world: int | None = None
        self._iterator: Iterator[Any] = iter(())
        self._next = 0
        self._kept: deque[tuple[int, Any, int]] = deque()  # place, batch and its bytes, in the order of the stream
        self._kept_bytes = 0

    def __call__(self, key: BatchKey) -> Any:
        with self._lock:
            # Of one rank: as if the number of ranks had been the same from the beginning.
            own = (key.rank, key.world), key.step + (key.offset + key.rank) // key.world
            of, place = ((), key.number) if self._shared else own
            if self._of == of:
                for kept, batch, _ in reversed(self._kept):
                    if kept == place:
                        return batch
            if not self._shared and self._world not in (None, key.world):
                _LOG.warning(
                    "from_iterator: the number of ranks changed from %s to %d at step %d. make(rank, world) returns "
                    "other streams now. This rank continues at batch %d of its new stream. Samples may be used twice "
                    "or not at all. from_iterator(make, shared=True) and from_dataset keep their place.",
                    self._world,
                    key.world,
                    key.step,
                    place,
                )
            self._world = key.world
            if self._of != of or place < self._next:
                self._iterator, self._of, self._next = iter(self._make(*of)), of, 0
                self._kept.clear()
                self._kept_bytes = 0
            # Two contributions, because with overlap the next one begins before the answer to the first.
            room = (2 * key.batches + _AHEAD) * (key.world if self._shared else 1)
            while True:
                try:
                    batch = self._following(of)
                except BaseException:
                    self._of = None  # the iterator may have ended; another call makes it again
                    raise
                self._keep(batch, room)
                if self._next > place:
                    return batch

    def _keep(self, batch: Any, room: int) -> None:
        size = nbytes(batch)
        self._kept.append((self._next, batch, size))
        self._next += 1
        self._kept_bytes += size
        while len(self._kept) > room or (self._kept_bytes > _KEPT_BYTES and len(self._kept) > 1):
            self._kept_bytes -= self._kept.popleft()[2]

    def _following(self, of: tuple[int, ...]) -> Any:
        try:
            return next(self._iterator)
        except StopIteration:
            self._iterator = iter(self._make(*of))
        try:
            return next(self._iterator)
        except StopIteration:
            arguments = f"rank={of[0]}, world={of[1]}" if of else ""
            raise ConfigurationError(f"from_iterator: make({arguments}) gave an empty iterator") from None


def from_iterator(make: Callable[..., Iterator[Any]], *, shared: bool = False) -> Callable[[BatchKey], Any]:
    """Make `batches` of a stream that can only be read on, such as a ``grain.IterDataset``.

    An iterator that ends is made again, for another epoch. There are two limits. `make` must give the same batches in
    the same order every time, or a replaced worker computes another batch than its predecessor. A replacement reads
    from the start and discards the used batches, which takes as long as reading them. Where samples can be reached by
    number, `from_dataset` has neither limit.

    The batches of the last two contributions are kept, up to 1 GiB. Those of a refused contribution are drawn again.
    With `shared`, so are some after a change of the number of ranks. So an iterator must not change a batch that it has
    returned.

    Args:
        make: ``make(rank, world)`` returns an iterator of that rank's batches; with `shared`, ``make()`` returns an
            iterator of the batches of all ranks together.
        shared: each rank reads the whole stream and takes its own batches of it. The stream is then read ``world``
            times, and keeps its place when the number of ranks changes: no batch is used twice or left out. Without
            it, a change of the number of ranks begins other streams. Some batches are used again then and others
            never, and the log states when this happens.

    Raises:
        ConfigurationError: `make` does not accept these arguments; or, in a call of `batches`, the iterator is empty.
    """
    if not callable(make):
        raise ConfigurationError(
            f"from_iterator: make is {type(make).__name__}: must be a function that returns an iterator"
        )
    _check_arguments(make, shared=shared)
    return Streamed(make, shared)


def _check_arguments(make: Callable[..., Any], *, shared: bool) -> None:
    """
    Raises:
        ConfigurationError: `make` does not accept the arguments that it will get.
    """
    try:
        signature = inspect.signature(make)
    except ValueError:  # a function in C may have none
        return

    def accepts(count: int) -> bool:
        try:
            signature.bind(*range(count))
        except TypeError:
            return False
        return True

    if accepts(0 if shared else 2):
        return
    called, other = ("make()", "make(rank, world)") if shared else ("make(rank, world)", "make()")
    advice = ""
    if accepts(2 if shared else 0):
        remedy = "leave out shared=True" if shared else "pass shared=True"
        advice = f". For a function that is called as {other}, {remedy}"
    raise ConfigurationError(f"from_iterator: make is called as {called}, but it is defined as make{signature}{advice}")
