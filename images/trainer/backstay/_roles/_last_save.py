"""How a server that received SIGTERM waits for the checkpoint of its state."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from backstay_rpc.control_pb2 import Peer

from .._control import ControlClient

if TYPE_CHECKING:
    from .._process import Environment

__all__ = ["request_save", "wait_until"]


def request_save(environment: Environment, peer: Peer) -> None:
    """Request a checkpoint from the coordinator, because this server leaves."""
    client = ControlClient(environment.servers[:1], environment.token, peer, environment.timeouts)
    client.leave()
    client.close()


def wait_until(done: Callable[[], bool], may_succeed: Callable[[], bool], seconds: float, *, gone: float) -> None:
    """Wait until `done`, for at most `seconds`, and for at most `gone` seconds while `may_succeed` returns false."""
    now = time.monotonic()
    deadline, gone_by = now + seconds, now + gone
    while not done() and now < min(deadline, gone_by):
        time.sleep(0.05)
        now = time.monotonic()
        if may_succeed():
            gone_by = now + gone
