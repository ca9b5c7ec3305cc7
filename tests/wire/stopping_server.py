"""A server that is paused (SIGSTOP) in the middle of a push: run as a separate process."""

from __future__ import annotations

import os
import signal
import sys
import threading
from typing import Any

from certificates import credentials_of

from backstay._transport._streams._tcp import Listener


def serve(hello: Any, stream: Any) -> None:
    stream.read()
    os.kill(os.getpid(), signal.SIGSTOP)
    threading.Event().wait()  # this thread may run for a moment; the stream must not end


listener = Listener("127.0.0.1", 0, credentials_of(sys.argv[1], sys.argv[2]), serve)
print(listener.bound, flush=True)
sys.stdin.read()
