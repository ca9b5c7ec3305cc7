"""Which streams a shard accepts: for this server and its partition, from workers that were not replaced (T6).

Not thread-safe; `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from backstay_rpc.control_pb2 import Hello

from .._wire import Refusal

__all__ = ["Admission"]


class Admission:
    """Accepts or refuses the streams of one shard's server."""

    def __init__(self, shard: int, incarnation: int, digest: bytes) -> None:
        """
        Args:
            incarnation: this server's incarnation.
            digest: the partition's digest.
        """
        self._shard, self._incarnation, self._digest = shard, incarnation, digest
        self._newest: dict[str, int] = {}

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """The newest incarnations known, such as ``{"worker-3": 2}``: from now on older ones are refused."""
        for name, incarnation in incarnations.items():
            self._newest[name] = max(incarnation, self._newest.get(name, 0))

    def check_server(self, hello: Hello) -> None:
        """
        Raises:
            Refusal: the stream is for another server, or the partition differs.
        """
        if hello.shard != self._shard:
            raise Refusal("FAILED_PRECONDITION", f"this is shard {self._shard}, not shard {hello.shard}")
        if hello.expected_incarnation not in (0, self._incarnation):
            raise Refusal(
                "FAILED_PRECONDITION",
                f"shard {self._shard} has incarnation {self._incarnation}, not incarnation "
                f"{hello.expected_incarnation}",
            )
        if hello.partition_digest != self._digest:
            raise Refusal(
                "INVALID_ARGUMENT",
                f"the digest of {_name(hello)} is {hello.partition_digest.hex()[:16] or 'missing'}, and that of shard "
                f"{self._shard} is {self._digest.hex()[:16]}: parameters, optimizer, steps, seed, clip_norm and number "
                "of shards must be the same in every pod",
            )

    def check_peer(self, hello: Hello) -> None:
        """
        Raises:
            Refusal: the peer was replaced.
        """
        newest = self._newest.get(_name(hello), 0)
        if hello.peer.incarnation < newest:
            raise Refusal(
                "PERMISSION_DENIED",
                f"{_name(hello)} of incarnation {hello.peer.incarnation} was replaced by incarnation {newest}",
            )

    def admit(self, hello: Hello) -> None:
        """Accept the peer, and refuse its predecessors from now on. Raises as `check_peer`."""
        self.check_peer(hello)
        self.fence({_name(hello): hello.peer.incarnation})


def _name(hello: Hello) -> str:
    return f"{hello.peer.role}-{hello.peer.index}"
