"""A server that fails without closing its streams, run as a separate process."""

from __future__ import annotations

import sys
from typing import Any

from certificates import credentials_of

from backstay._transport import frames
from backstay._transport._streams._tcp import Listener


def serve(hello: Any, stream: Any) -> None:
    stream.write(frames.ABANDON)
    while stream.read() is not None:
        pass


listener = Listener("127.0.0.1", 0, credentials_of(sys.argv[1], sys.argv[2]), serve)
print(listener.bound, flush=True)
sys.stdin.read()
raise RuntimeError("forgotten")
