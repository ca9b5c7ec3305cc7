"""The ports of a server's pod, as its environment says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .._control import ControlServer, Host, Peers
from .._report import HttpPort, Metrics

if TYPE_CHECKING:
    from .._process import Environment

__all__ = ["control_port", "http_port"]


def control_port(host: Host, peers: Peers, environment: Environment) -> ControlServer:
    """The control service, which listens immediately. Raises as `ControlServer`."""
    return ControlServer(
        host,
        peers,
        bind=environment.bind,
        port=environment.port,
        token=environment.token,
        timeouts=environment.timeouts,
    )


def http_port(metrics: Metrics, is_ready: Callable[[], bool], environment: Environment) -> HttpPort:
    """Health and metrics. Raises as `HttpPort`."""
    return HttpPort(metrics, is_ready, bind=environment.bind, port=environment.metrics_port)
