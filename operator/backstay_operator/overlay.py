"""Holds the known objects of the cluster in Kopf's indexes, overlaid with the operator's newer writes (O1).

A watch shows the operator's writes only some time after they were made. A plan from the index alone would then create a
pod again, or use a pod that was deleted. So the answer to a write is kept, by uid, until the watch has shown that
version or a later one. A uid that was deleted stays deleted, although late events may still contain it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

#: Seconds after the deletion of an object was shown. No answer to a request arrives later than this.
_REST: Final = 120.0


def version_of(metadata: Mapping[str, Any]) -> int:
    """Returns the resourceVersion as a number, by which Kubernetes orders since 1.35; -1 if it is not a number."""
    try:
        return int(metadata.get("resourceVersion") or -1)
    except ValueError:
        return -1


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """One object at one resourceVersion; `value` is the part of it that is kept."""

    uid: str
    name: str
    version: int
    value: T

    @classmethod
    def of(cls, obj: Mapping[str, Any], value: T) -> Seen[T]:
        """Create it from an object of the API."""
        metadata = obj["metadata"]
        return cls(metadata["uid"], metadata["name"], version_of(metadata), value)


@dataclass(slots=True)
class _Write(Generic[T]):
    seen: Seen[T]
    at: float


class Overlay(Generic[K, T]):
    """The objects of one kind, grouped by a key (the job that they belong to).

    Args:
        clock: a monotonic clock in seconds.
        index: Kopf's index, or anything that maps a key to its objects; `attach` replaces it.
    """

    def __init__(self, clock: Callable[[], float], index: Mapping[K, Iterable[Seen[T]]] | None = None) -> None:
        self._clock = clock
        self._index: Mapping[K, Iterable[Seen[T]]] = {} if index is None else index
        self._writes: dict[K, dict[str, _Write[T]]] = {}
        self._gone: set[str] = set()  # deleted, and the watch has not shown it yet
        self._deleted: dict[str, float] = {}  # the watch showed the deletion, at this time; an answer may arrive later

    def attach(self, index: Mapping[K, Iterable[Seen[T]]]) -> None:
        """Read from another index from now on; the state of the previous watch is dropped."""
        self._index = index
        self._gone.clear()

    def keys(self) -> set[K]:
        """Returns every key that has an object."""
        return set(self._index) | set(self._writes)

    def view(self, key: K) -> list[Seen[T]]:
        """Returns the newest known state of each object under `key`, by name."""
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
        """The API server answered a write with this object."""
        if seen.uid in self._gone or seen.uid in self._deleted:
            return
        shown = next((other for other in self._indexed(key) if other.uid == seen.uid), None)
        if shown is not None and shown.version >= seen.version:
            return
        writes = self._writes.setdefault(key, {})
        before = writes.get(seen.uid)
        if before is None:
            writes[seen.uid] = _Write(seen, self._clock())
        elif before.seen.version <= seen.version:
            before.seen = seen  # `at` stays: the watch has been late since then

    def removed(self, key: K, uid: str) -> None:
        """The object with this uid no longer exists, although a watch may not have shown that yet."""
        self._gone.add(uid)
        self._drop(key, uid)

    def shown(self, key: K, uid: str, version: int, *, deleted: bool) -> None:
        """The watch showed an object. Earlier writes of that object are no longer needed."""
        if deleted:
            self._gone.discard(uid)
            self._record_deletion(uid)
            self._drop(key, uid)
            return
        write = self._writes.get(key, {}).get(uid)
        if write is not None and write.seen.version <= version:
            self._drop(key, uid)

    def is_gone(self, uid: str) -> bool:
        """Returns whether the object with this uid was deleted."""
        return uid in self._gone

    def owed_since(self) -> float | None:
        """Returns the clock at the oldest write that the watch has not shown, or None if the watch has shown all
        writes."""
        return min((write.at for writes in self._writes.values() for write in writes.values()), default=None)

    def restart_clock(self) -> None:
        """Measure the watch's delay from now, because the API server did not answer, and the watch could not show
        writes."""
        now = self._clock()
        for writes in self._writes.values():
            for write in writes.values():
                write.at = now

    def missing_from(self, listed: Mapping[str, int], version: int) -> Iterator[tuple[K, Seen[T]]]:
        """Yields the objects that are missing in a list, although they are older than the list.

        Args:
            listed: uid -> resourceVersion, the whole list.
            version: the resourceVersion of the list.
        """
        for key in self.keys():
            for seen in self.view(key):
                if seen.uid not in listed and seen.version < version:
                    yield key, seen

    def _record_deletion(self, uid: str) -> None:
        now = self._clock()
        while self._deleted and next(iter(self._deleted.values())) < now - _REST:
            del self._deleted[next(iter(self._deleted))]
        self._deleted[uid] = now

    def _indexed(self, key: K) -> Iterable[Seen[T]]:
        return self._index.get(key, ())

    def _drop(self, key: K, uid: str) -> None:
        writes = self._writes.get(key)
        if writes is not None:
            writes.pop(uid, None)
            if not writes:
                del self._writes[key]
