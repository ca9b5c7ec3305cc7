"""What is known of the cluster: Kopf's indexes, overlaid with what we ourselves have written since (O1).

A watch tells of our own writes only some time after they were made. Planning from the index alone would, in between,
create a pod again or believe in one that was just deleted. So a write's answer is kept, by uid, until the watch has
shown that version or a later one; and a uid that is known to be gone stays gone, whatever late event still speaks of
it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: No answer to a request comes later than this many seconds after the object's deletion was shown.
_REST: Final = 120.0


def version_of(metadata: Mapping[str, Any]) -> int:
    """The resourceVersion as a number, which Kubernetes orders by since 1.35; -1 when it is not one."""
    try:
        return int(metadata.get("resourceVersion") or -1)
    except ValueError:
        return -1


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """One object at one resourceVersion; `value` is what of it was worth keeping."""

    uid: str
    name: str
    version: int
    value: T

    @classmethod
    def of(cls, obj: Mapping[str, Any], value: T) -> Seen[T]:
        """From an object of the API."""
        metadata = obj["metadata"]
        return cls(metadata["uid"], metadata["name"], version_of(metadata), value)


@dataclass(slots=True)
class _Write(Generic[T]):
    seen: Seen[T]
    at: float


class Overlay(Generic[K, T]):
    """The objects of one kind, grouped by a key (the job that they belong to).

    Args:
        clock: seconds, monotonic.
        index: Kopf's index, or anything that maps a key to its objects; `attach` replaces it.
    """

    def __init__(self, clock: Callable[[], float], index: Mapping[K, Iterable[Seen[T]]] | None = None) -> None:
        self._clock = clock
        self._index: Mapping[K, Iterable[Seen[T]]] = {} if index is None else index
        self._writes: dict[K, dict[str, _Write[T]]] = {}
        self._gone: set[str] = set()  # known to be no more before the watch said so
        self._buried: dict[str, float] = {}  # the watch said so, and when: an answer may come later still

    def attach(self, index: Mapping[K, Iterable[Seen[T]]]) -> None:
        """Read from another index from now on; nothing of a former watch is believed any more."""
        self._index = index
        self._gone.clear()

    def keys(self) -> set[K]:
        """Every key that has an object."""
        return set(self._index) | set(self._writes)

    def view(self, key: K) -> list[Seen[T]]:
        """The newest known state of each object under `key`, by name."""
        writes = self._writes.get(key, {})
        found: dict[str, Seen[T]] = {}
        for seen in self._indexed(key):
            write = writes.get(seen.uid)
            if write is not None and write.seen.version > seen.version:
                found[seen.uid] = write.seen
            else:
                found[seen.uid] = seen
        for uid, write in writes.items():
            found.setdefault(uid, write.seen)
        return sorted((seen for uid, seen in found.items() if uid not in self._gone), key=lambda seen: seen.name)

    def wrote(self, key: K, seen: Seen[T]) -> None:
        """The API server answered a write with this."""
        if seen.uid in self._gone or seen.uid in self._buried:
            return
        shown = next((other for other in self._indexed(key) if other.uid == seen.uid), None)
        if shown is not None and shown.version >= seen.version:
            return
        writes = self._writes.setdefault(key, {})
        before = writes.get(seen.uid)
        if before is None:
            writes[seen.uid] = _Write(seen, self._clock())
        elif before.seen.version <= seen.version:
            before.seen = seen  # `at` stays: the watch owes us since then

    def removed(self, key: K, uid: str) -> None:
        """This very object is no more, although a watch may not have said so yet."""
        self._gone.add(uid)
        self._drop(key, uid)

    def shown(self, key: K, uid: str, version: int, *, deleted: bool) -> None:
        """The watch told of an object; what we wrote before that is of no more use."""
        if deleted:
            self._gone.discard(uid)
            self._bury(uid)
            self._drop(key, uid)
            return
        write = self._writes.get(key, {}).get(uid)
        if write is not None and write.seen.version <= version:
            self._drop(key, uid)

    def is_gone(self, uid: str) -> bool:
        """Is this uid known to be no more?"""
        return uid in self._gone

    def owed_since(self) -> float | None:
        """The clock at the oldest write that the watch has not shown; None when it owes nothing."""
        return min((write.at for writes in self._writes.values() for write in writes.values()), default=None)

    def pardon(self) -> None:
        """Count from now what the watch owes: the API server was away meanwhile, which is not the watch's fault."""
        now = self._clock()
        for writes in self._writes.values():
            for write in writes.values():
                write.at = now

    def missing_from(self, listed: Mapping[str, int], version: int) -> Iterator[tuple[K, Seen[T]]]:
        """What is believed in and a list did not have, although it is older than the list.

        Args:
            listed: uid -> resourceVersion, the whole list.
            version: the resourceVersion of the list.
        """
        for key in self.keys():
            for seen in self.view(key):
                if seen.uid not in listed and seen.version < version:
                    yield key, seen

    def _bury(self, uid: str) -> None:
        now = self._clock()
        while self._buried and next(iter(self._buried.values())) < now - _REST:
            del self._buried[next(iter(self._buried))]
        self._buried[uid] = now

    def _indexed(self, key: K) -> Iterable[Seen[T]]:
        return self._index.get(key, ())

    def _drop(self, key: K, uid: str) -> None:
        writes = self._writes.get(key)
        if writes is not None:
            writes.pop(uid, None)
            if not writes:
                del self._writes[key]
