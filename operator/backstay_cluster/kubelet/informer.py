"""Lists, then watches, and starts again after an interruption: a local copy of a collection, with notifications."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping

from backstay_cluster.client import ApiClient, ApiRequestError
from backstay_cluster.kubelet.objects import Key, Object, key_of

logger = logging.getLogger(__name__)
OnChange = Callable[[Key, Object | None, Object | None], None]
WATCH_SECONDS = 600
FIRST_DELAY, MAX_DELAY = 0.05, 2.0


class Informer:
    """A copy of a collection.

    Args:
        client: the API server.
        path: the path of the collection, such as `/api/v1/pods`.
        on_change: called with key, old and new object for each object that is new, changed or deleted.
        params: selectors.
        sleep: waits between attempts (seconds).

    Attributes:
        objects: the copy of the objects.
        synced: set once the first list is complete.
    """

    def __init__(
        self,
        client: ApiClient,
        path: str,
        on_change: OnChange,
        *,
        params: Mapping[str, str] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.objects: dict[Key, Object] = {}
        self.synced = asyncio.Event()
        self._client = client
        self._path = path
        self._on_change = on_change
        self._params = dict(params or {})
        self._sleep = sleep

    async def run(self) -> None:
        """Follow the collection until cancelled. If the API server does not answer, keep the copy and try again."""
        version: str | None = None
        delay = FIRST_DELAY
        while True:
            try:
                if version is None:
                    version = await self._list()
                    self.synced.set()
                params = {
                    **self._params,
                    "resourceVersion": version,
                    "allowWatchBookmarks": "true",
                    "timeoutSeconds": str(WATCH_SECONDS),
                }
                # An abandoned generator would keep its connection until it is collected.
                async with contextlib.aclosing(self._client.watch(self._path, params)) as events:
                    async for event in events:
                        version = event["object"]["metadata"]["resourceVersion"]
                        delay = FIRST_DELAY
                        if event["type"] != "BOOKMARK":
                            self._apply(event["type"], event["object"])
            except ApiRequestError as error:
                logger.debug("%s: %s; again in %.2f s", self._path, error, delay)
                if error.code not in (0, 429) and error.code < 500:
                    version = None
                await self._sleep(delay)
                delay = min(MAX_DELAY, delay * 2)

    async def _list(self) -> str:
        found = await self._client.get(self._path, self._params)
        kind = str(found.get("kind", "")).removesuffix("List")
        seen = set()
        for item in found.get("items") or []:
            item.setdefault("kind", kind)
            seen.add(key_of(item))
            self._apply("MODIFIED", item)
        for key in [key for key in self.objects if key not in seen]:
            self._apply("DELETED", self.objects[key])
        return str(found["metadata"]["resourceVersion"])

    def _apply(self, kind: str, obj: Object) -> None:
        key = key_of(obj)
        if kind == "DELETED":
            old = self.objects.pop(key, None)
            if old is not None:
                self._on_change(key, obj, None)
            return
        old = self.objects.get(key)
        if old is not None and old["metadata"].get("resourceVersion") == obj["metadata"].get("resourceVersion"):
            return
        if old is not None and old["metadata"].get("uid") != obj["metadata"].get("uid"):
            # Deleted and created again during the interruption.
            del self.objects[key]
            self._on_change(key, old, None)
            old = None
        self.objects[key] = obj
        self._on_change(key, old, obj)
