"""The ports of shard 0's server that other shards use: the control service, and the data port of their links."""

from __future__ import annotations

from typing import Any

from backstay._control import ControlServer, Links, Peers
from backstay._wire import Listener


class Coordinating:
    """Both ports, open until `close`. `host` gets the attribute `data_address`."""

    def __init__(self, host: Any, token: str, port: int = 0, **options: Any) -> None:
        """`options`: of `ControlServer`."""
        peers = Peers()
        self.links = Links(host, peers)
        self._data = Listener("127.0.0.1", 0, token, self.links.serve)
        host.data_address = f"127.0.0.1:{self._data.bound}"
        self.control = ControlServer(host, peers, bind="127.0.0.1", port=port, token=token, **options)
        self.port = self.control.port

    def close(self) -> None:
        self.control.close()
        assert self._data.close()
