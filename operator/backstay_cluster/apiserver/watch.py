"""Sends the events of a storage to one client (watches).

A watch is a queue between the store, which must never wait, and a connection, which may. Events are translated for the
watch's selector: an object that stops matching becomes DELETED, and one that starts matching becomes ADDED. The JSON of
an object is computed once for each version and shared by all watches; a watch only puts a line around it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

from backstay_cluster.apiserver.objects import Obj, encode
from backstay_cluster.apiserver.selectors import Matcher
from backstay_cluster.apiserver.store import Change, Stored

# Writes one event's object: takes the version to write, returns JSON.
Render = Callable[[Stored], bytes]
_LIMIT = 50_000  # the most events that a client may be late before it has to list again


def event(kind: str, body: bytes) -> bytes:
    """Returns one line of a watch."""
    return b'{"type":"%s","object":%s}\n' % (kind.encode(), body)


class Watch:
    """The events of one watch, as lines of JSON, in order.

    Args:
        matches: the watch's selector; None selects all objects.
        render: writes the object of an event.
        after: the version after which the watch begins. It may be in the future.
    """

    def __init__(self, matches: Matcher | None, render: Render, after: int = 0) -> None:
        self._matches = matches
        self._render = render
        self._after = after
        self._lines: deque[bytes] = deque()
        self._wake = asyncio.Event()
        self.overrun = False

    def initial(self, items: list[Stored]) -> None:
        """Send the existing objects as ADDED."""
        self._lines.extend(self._line("ADDED", stored) for stored in items)
        self._wake.set()

    def push(self, line: bytes) -> None:
        """Add a line that is not a change: a bookmark or an error."""
        self._lines.append(line)
        self._wake.set()

    def change(self, change: Change) -> None:
        """Add one change of the storage."""
        if change.version <= self._after or self.overrun:
            return  # a client that does not read costs no more memory: it begins again after what it has
        if self._matches is None:
            self._lines.append(self._line(change.type, change.after))
        else:
            line = self._selected(self._matches, change)
            if line is None:
                return
            self._lines.append(line)
        if len(self._lines) > _LIMIT:
            self.overrun = True
        self._wake.set()

    def _selected(self, matches: Matcher, change: Change) -> bytes | None:
        before = change.before is not None and matches(change.before.obj)
        if change.type == "DELETED":
            return self._line("DELETED", change.after) if before else None
        after = matches(change.after.obj)
        if after:
            return self._line("MODIFIED" if before else "ADDED", change.after)
        if before and change.before is not None:
            return self._line("DELETED", _reversioned(change.before, change.version))
        return None

    def _line(self, kind: str, stored: Stored) -> bytes:
        return event(kind, self._render(stored))

    async def take(self, timeout: float) -> bytes:  # a deadline is the normal way out here
        """Returns all waiting lines, at least one; empty if no line arrived within `timeout` seconds."""
        if not self._lines and not self.overrun:
            self._wake.clear()
            try:
                async with asyncio.timeout(max(0.0, timeout)):
                    await self._wake.wait()
            except TimeoutError:
                return b""
        return self.lines()

    def lines(self) -> bytes:
        """Remove and return all waiting lines."""
        found = b"".join(self._lines)
        self._lines.clear()
        self._wake.clear()
        return found

    def stop(self) -> None:
        """Wake the reader; no more lines will follow."""
        self.overrun = True
        self._wake.set()


def _reversioned(stored: Stored, version: int) -> Stored:
    data = {**stored.obj["metadata"], "resourceVersion": str(version)}
    return Stored({**stored.obj, "metadata": data}, version)


def bookmark(head: Obj, version: int, *, initial_end: bool = False, extra: Any = None) -> bytes:
    """Returns a bookmark, which states that nothing changed up to this version."""
    data: Obj = {"resourceVersion": str(version)}
    if initial_end:
        data["annotations"] = {"k8s.io/initial-events-end": "true"}
    return event("BOOKMARK", encode({**head, "metadata": data, **(extra or {})}))
