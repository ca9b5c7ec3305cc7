"""The ports of shard 0's server that other shards use, which are the control service and the data port of their
links."""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from backstay._threaded import ThreadedCoordinator
from backstay._transport import Agreement, ControlServer, Links, Listener, Peers
from backstay_rpc.control_pb2 import CoordinatorMessage, Frame, HeartbeatReply, Leaf, ShardMessage
from backstay_rpc.credentials import Credentials

TOKEN = "0123456789abcdef"
AGREEMENT = Agreement((Leaf(path="w", dtype="float32"),), {"steps": "10"})


class Coordinating:
    """Both ports, open until `close`. `host` gets the attribute `data_address`."""

    def __init__(self, host: Any, token: str, port: int = 0, bind: str = "127.0.0.1", **options: Any) -> None:
        """`options` are those of `ControlServer`, which listens at `bind` and `port`."""
        peers = Peers()
        self.links = Links(host, peers)
        self._data = Listener("127.0.0.1", 0, Credentials(token), self.links.serve)
        host.data_address = f"127.0.0.1:{self._data.bound}"
        self.control = ControlServer(host, peers, bind=bind, port=port, credentials=Credentials(token), **options)
        self.port = self.control.port

    def close(self) -> None:
        self.control.close()
        assert self._data.close()


class FakeHost:
    """Shard 0, without a shard."""

    shard, incarnation, agreement = 0, 1, AGREEMENT

    def __init__(self, threaded: ThreadedCoordinator) -> None:
        self.threaded = threaded

    def beat(self, _: object) -> HeartbeatReply:
        return HeartbeatReply()

    def fence(self, _: object) -> None: ...


class Quiet:
    """A `CheckpointStorage` and an `Observer` that the test does not use."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class MemoryStream:
    """A `ServerStream` in memory as the coordinator's end of a link."""

    def __init__(self) -> None:
        self.incoming: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self.received: list[CoordinatorMessage] = []

    def read(self, place: object = None) -> tuple[Frame, None] | None:
        frame = self.incoming.get()
        return None if frame is None else (frame, None)

    def write(self, frame: Frame, *body: object) -> None:
        self.received.append(frame.to_shard)

    post = write

    def keep_alive(self) -> None: ...

    def alive(self) -> bool:
        return True

    def received(self) -> None: ...

    def cut(self) -> None:
        self.incoming.put(None)

    def say(self, **kind: Any) -> None:
        self.incoming.put(Frame(to_coordinator=ShardMessage(**kind)))

    def commits(self) -> list[int]:
        return [message.commit.version for message in self.received if message.HasField("commit")]
