"""A data port in a process that may open few files. Tests run it as a separate process."""

from __future__ import annotations

import resource
import sys
from typing import Any

from backstay._timeouts import Timeouts
from backstay._transport import Listener
from backstay_rpc.credentials import Credentials


def serve(hello: Any, stream: Any) -> None:
    while (item := stream.read()) is not None:
        stream.write(item[0])


limit = int(sys.argv[2])
listener = Listener("127.0.0.1", 0, Credentials(sys.argv[1]), serve, Timeouts(unproven=20.0))
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
print(listener.bound, flush=True)
sys.stdin.read()
