"""Serves the HTTP port of a pod, with health, metrics, and the pages of the `backstay` command.

`/metrics`, `/healthz`, `/readyz`, `/peers`, `/status`, `/curve` and `/trace` are the only things that a pod answers
without the job's token (O7). One thread receives the requests of all callers, and two make the pages, within bounds
(docs/decisions/0068).
"""

from __future__ import annotations

import collections
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, Final

from prometheus_client.exposition import CONTENT_TYPE_LATEST

from backstay_rpc.limits import HTTP_STRANGERS, MAX_HEAD_BYTES

from .._process import Bounds, Caller, Callers, Unwelcome, listening_socket
from ._metrics import PodMetrics

__all__ = ["BOUNDS", "MAX_TRACE_READERS", "TRACE_REST", "HttpPort", "Pages"]

_LOG = logging.getLogger(__name__)

BOUNDS: Final = Bounds(*HTTP_STRANGERS)

SHARE: Final = 0.2
"""The share of a processor that pages may take while callers wait for them."""

TRACE_REST: Final = 2.0
"""Seconds from the end of one reading of the timeline to the beginning of the next one."""

MAX_TRACE_READERS: Final = 4
"""Clients that wait for the timeline. Further ones are refused."""

_LOOK_SECONDS: Final = 0.05
_QUICK: Final = ("/healthz", "/readyz", "/peers")
"""These pages cost nothing, and their readers have short deadlines: they are made first."""

_OTHERS: Final = b"there are /metrics, /healthz, /readyz, /peers, /status, /curve and /trace\n"
_TEXT: Final = "text/plain; charset=utf-8"
_JSON: Final = "application/json"


def _answer(status: int, body: bytes, kind: str = _TEXT) -> bytes:
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body


def _missing(caller: Caller) -> int:
    """Returns how many more bytes to receive, or 0 if the head of the request is whole. Raises `Unwelcome`."""
    if b"\r\n\r\n" in caller.opening or b"\n\n" in caller.opening:
        return 0
    if left := MAX_HEAD_BYTES - len(caller.opening):
        return left
    raise Unwelcome(
        f"a request was refused: its head is longer than {MAX_HEAD_BYTES >> 10} KiB",
        _answer(431, b"the head of the request is too long\n"),
    )


def _path(head: bytes) -> str | None:
    """Returns the path of a request with GET, without its query, or None if it is another request."""
    words = head.partition(b"\n")[0].decode("latin-1").split()
    if len(words) != 3 or words[0] != "GET" or not words[2].startswith("HTTP/1."):
        return None
    return words[1].partition("?")[0]


class Pages:
    """Makes pages, for one caller after the other. Thread-safe.

    Quick pages do not wait for large ones. After a large page, its thread rests. One caller at a time reads the
    timeline, and the next one begins `TRACE_REST` later.
    """

    def __init__(
        self, page: Callable[[str], bytes], answer: Callable[[Caller, bytes], None], holds: Callable[[Caller], bool]
    ) -> None:
        """
        Args:
            page: makes the answer to a path.
            answer: sends an answer to a caller.
            holds: whether a caller is connected.
        """
        self._page, self._answer, self._holds = page, answer, holds
        self._changed = threading.Condition()
        self._quick: collections.deque[tuple[Caller, str]] = collections.deque()
        self._large: collections.deque[tuple[Caller, str]] = collections.deque()
        self._traces: collections.deque[Caller] = collections.deque()
        self._reader: Caller | None = None
        self._read = float("-inf")  # when the last reader of the timeline had it
        self._rested = float("-inf")  # when the next large page may be made
        self._closed = False

    def add(self, caller: Caller, path: str) -> None:
        """`caller` requests a page."""
        with self._changed:
            if path != "/trace":
                (self._quick if path in _QUICK else self._large).append((caller, path))
            elif len(self._traces) < MAX_TRACE_READERS:
                self._traces.append(caller)
            else:
                self._answer(caller, _answer(503, b"other clients read the timeline now: try again\n"))
            self._changed.notify_all()

    def close(self) -> None:
        """Make no further pages."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def run_quick(self) -> None:
        """Make the quick pages until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._quick or self._closed)
                if self._closed:
                    return
                caller, path = self._quick.popleft()
            self.make(caller, path)

    def run_large(self) -> None:
        """Make the other pages until `close`."""
        while True:
            with self._changed:
                while (found := self.choose(time.monotonic())) is None and not self._closed:
                    waits = self._large or self._traces or self._reader is not None
                    self._changed.wait(_LOOK_SECONDS if waits else None)
            if found is None:
                return
            began = time.thread_time()
            self.make(*found)
            self._rested = time.monotonic() + (time.thread_time() - began) * (1 / SHARE - 1)

    def choose(self, now: float) -> tuple[Caller, str] | None:
        """Returns the large page to make now, and its caller, or None if there is none yet."""
        if self._reader is not None and not self._holds(self._reader):
            self._reader, self._read = None, now
        if now < self._rested:
            return None
        if self._large:
            return self._large.popleft()
        if self._traces and self._reader is None and now >= self._read + TRACE_REST:
            self._reader = self._traces.popleft()
            return self._reader, "/trace"
        return None

    def make(self, caller: Caller, path: str) -> None:
        """Make a page and send it, if its caller is still connected."""
        if not self._holds(caller):
            return
        try:
            made = self._page(path)
        except Exception:  # noqa: BLE001  # it fails this page and no other
            _LOG.exception("the page %s could not be made", path)
            made = _answer(500, b"the page could not be made: the log has the reason\n")
        self._answer(caller, made)


class HttpPort:
    """`/metrics`, `/healthz` (200 while the process answers), `/readyz` (200 when it is `ready`), `/peers`, `/status`,
    `/curve`, `/trace`.

    Attributes:
        status: returns what `/status` shows; only shard 0's server has something to show.
        curve: returns what `/curve` shows; only shard 0's server has something to show.
        trace: returns what `/trace` shows, a `Timeline`; only shard 0's server has one.
    """

    def __init__(
        self,
        metrics: PodMetrics,
        ready: Callable[[], bool],
        *,
        bind: str,
        port: int,
        peers: Callable[[], Mapping[int, tuple[float, int]]] = dict,
        bounds: Bounds = BOUNDS,
    ) -> None:
        """
        Args:
            peers: shard -> seconds since its server last answered this pod, and the number of calls that it left
                unanswered since. The operator requests these before it replaces a server that does not answer the
                operator.
            bounds: what callers may cost.

        Raises:
            OSError: the port cannot be bound; the message names it.
        """
        self.status: Callable[[], Mapping[str, Any]] = dict
        self.curve: Callable[[], bytes] = lambda: b"{}"
        self.trace: Callable[[], bytes] = bytes
        self._metrics, self._ready, self._peers = metrics, ready, peers
        try:
            listening = listening_socket(bind, port)
        except OSError as error:
            raise OSError(f"the metrics port cannot listen on {bind} port {port}: {error}") from None
        self.port: int = listening.getsockname()[1]
        self.callers = Callers(listening, "the metrics port", _missing, self._requested, bounds, passes_on=False)
        self._pages = Pages(self._page, self.callers.answer, self.callers.holds)
        self.callers.start()
        for name, run in (("quick", self._pages.run_quick), ("large", self._pages.run_large)):
            threading.Thread(target=run, name=f"backstay-http-{name}", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self._pages.close()
        self.callers.close()

    def _requested(self, caller: Caller) -> None:
        path = _path(bytes(caller.opening))
        if path is None:
            self.callers.answer(caller, _answer(400, b"only requests with GET of HTTP/1 are answered\n"))
        else:
            self._pages.add(caller, path)

    def _page(self, path: str) -> bytes:
        match path:
            case "/metrics":
                return _answer(200, self._metrics.page(), CONTENT_TYPE_LATEST)
            case "/healthz":
                return _answer(200, b"ok\n")
            case "/readyz":
                return _answer(200, b"ready\n") if self._ready() else _answer(503, b"not ready\n")
            case "/peers":
                said = {shard: {"answered": ago, "missed": missed} for shard, (ago, missed) in self._peers().items()}
                return _answer(200, json.dumps(said).encode(), _JSON)
            case "/status":
                return _answer(200, json.dumps(self.status(), allow_nan=False).encode(), _JSON)
            case "/curve":
                return _answer(200, self.curve(), _JSON)
            case "/trace":
                return _answer(200, self.trace(), "application/octet-stream")
            case _:
                return _answer(404, _OTHERS)
