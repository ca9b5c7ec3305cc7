"""The objects, their versions and their history, in memory.

One counter gives every change its resourceVersion. Each storage (one kind of object) keeps its newest objects by
namespace, and its last changes for watches that start in the past. It also keeps the open watches by namespace, so that
a change costs time only for the watches that show it. Bytes of an object are computed once for each version.
All code here runs in the event loop's thread and never waits, so each operation is atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from backstay_cluster.apiserver.errors import expired
from backstay_cluster.apiserver.objects import Obj, encode, meta

Key = tuple[str, str]  # namespace (empty for cluster-scoped objects) and name
EventType = Literal["ADDED", "MODIFIED", "DELETED"]


class Stored:
    """One immutable version of one object. `obj` has no apiVersion and kind, which belong to the resource."""

    __slots__ = ("_bytes", "obj", "version")

    def __init__(self, obj: Obj, version: int) -> None:
        self.obj = obj
        self.version = version
        self._bytes: bytes | None = None

    @property
    def key(self) -> Key:
        """Namespace and name."""
        data = self.obj["metadata"]
        return data.get("namespace", ""), data["name"]

    @property
    def body(self) -> bytes:
        """The object as JSON, computed once."""
        if self._bytes is None:
            self._bytes = encode(self.obj)
        return self._bytes


@dataclass(frozen=True, slots=True)
class Change:
    """One event of a storage's history. `before` is the version that the change replaced."""

    type: EventType
    after: Stored
    before: Stored | None

    @property
    def version(self) -> int:
        """The resourceVersion of the change."""
        return self.after.version


Listener = Callable[[Change], None]


@dataclass
class KindStorage:
    """All objects of one kind."""

    spaces: dict[str, dict[str, Stored]] = field(default_factory=dict)
    history: deque[Change] = field(default_factory=deque)
    forgotten: int = 0  # the newest version that is no longer in the history
    listeners: dict[str, set[Listener]] = field(default_factory=dict)  # by namespace; "" means all namespaces
    count: int = 0

    def get(self, key: Key) -> Stored | None:
        """Returns the newest version of an object."""
        space = self.spaces.get(key[0])
        return None if space is None else space.get(key[1])

    def select(self, namespace: str | None) -> Iterator[Stored]:
        """Yields the objects of one namespace, or of all (None), ordered by namespace and name."""
        for name in sorted(self.spaces) if namespace is None else (namespace,):
            space = self.spaces.get(name)
            if space:
                for key in sorted(space):
                    yield space[key]


class Store:
    """Every storage, and the counter they share."""

    def __init__(self, *, history: int = 8192) -> None:
        self.version = 1
        self._history = history
        self._storages: dict[tuple[str, str], KindStorage] = {}
        self.observers: list[Callable[[tuple[str, str], Change], None]] = []

    def storage(self, name: tuple[str, str]) -> KindStorage:
        """Returns the storage of that name, created on first use."""
        found = self._storages.get(name)
        if found is None:
            found = self._storages[name] = KindStorage(forgotten=0)
        return found

    def put(self, name: tuple[str, str], obj: Obj) -> Stored:
        """Store a new object or a new version of one; sets its resourceVersion (in `obj` itself, which is kept)."""
        storage = self.storage(name)
        self.version += 1
        stored = Stored(obj, self.version)
        obj["metadata"]["resourceVersion"] = str(self.version)
        key = stored.key
        space = storage.spaces.setdefault(key[0], {})
        before = space.get(key[1])
        space[key[1]] = stored
        if before is None:
            storage.count += 1
        self._changed(name, storage, Change("ADDED" if before is None else "MODIFIED", stored, before))
        return stored

    def remove(self, name: tuple[str, str], key: Key) -> Stored:
        """Remove an object. The event contains its last state, with a new resourceVersion."""
        storage = self.storage(name)
        before = storage.spaces[key[0]].pop(key[1])
        if not storage.spaces[key[0]]:
            del storage.spaces[key[0]]
        storage.count -= 1
        self.version += 1
        final = {**before.obj, "metadata": {**before.obj["metadata"], "resourceVersion": str(self.version)}}
        self._changed(name, storage, Change("DELETED", Stored(final, self.version), before))
        return before

    def _changed(self, name: tuple[str, str], storage: KindStorage, change: Change) -> None:
        storage.history.append(change)
        if len(storage.history) > self._history:
            storage.forgotten = storage.history.popleft().version
        namespace = meta(change.after.obj).get("namespace", "")
        for space in {"", namespace}:
            for listener in tuple(storage.listeners.get(space, ())):
                listener(change)
        for observer in self.observers:
            observer(name, change)

    def listen(self, name: tuple[str, str], namespace: str | None, listener: Listener) -> Callable[[], None]:
        """Call `listener` at every later change in the namespace, or in all if it is None. Returns a function that
        stops that."""
        listeners = self.storage(name).listeners.setdefault(namespace or "", set())
        listeners.add(listener)
        return lambda: listeners.discard(listener)

    def since(self, name: tuple[str, str], version: int) -> list[Change]:
        """Returns the changes after `version`, oldest first.

        Raises:
            ApiError: 410 when some of them are no longer kept.
        """
        storage = self.storage(name)
        if version < storage.forgotten:
            raise expired(f"too old resource version: {version} ({storage.forgotten})")
        newer: list[Change] = []
        for change in reversed(storage.history):
            if change.version <= version:
                break
            newer.append(change)
        newer.reverse()
        return newer
