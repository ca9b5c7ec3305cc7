"""Which streams a shard accepts: for this server and its partition, from workers that were not replaced (T6).

Not thread-safe; `ShardRuntime` calls it under its own lock.
"""

from __future__ import annotations

from collections.abc import Mapping

from backstay_rpc.control_pb2 import Hello
from backstay_rpc.refusals import RefusalCode

from .._transport import Refusal

__all__ = ["Admission"]


class Admission:
    """Accepts or refuses the streams of one shard's server.

    Attributes:
        shard: the number of the shard.
    """

    def __init__(self, shard: int, incarnation: int, digest: bytes) -> None:
        """
        Args:
            incarnation: this server's incarnation.
            digest: the partition's digest.
        """
        self.shard, self._incarnation, self._digest = shard, incarnation, digest
        self._newest: dict[str, int] = {}

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Take the newest known incarnations, such as ``{"worker-3": 2}``, and refuse older ones from now on."""
        for name, incarnation in incarnations.items():
            self._newest[name] = max(incarnation, self._newest.get(name, 0))

    def check_server(self, hello: Hello) -> None:
        """
        Raises:
            Refusal: the stream is for another server, or the partition differs.
        """
        if hello.shard != self.shard:
            raise Refusal(RefusalCode.MOVED, f"this is shard {self.shard}, not shard {hello.shard}")
        if hello.expected_incarnation not in (0, self._incarnation):
            raise Refusal(
                RefusalCode.MOVED,
                f"shard {self.shard} has incarnation {self._incarnation}, not incarnation {hello.expected_incarnation}",
            )
        if hello.partition_digest != self._digest:
            raise Refusal(
                RefusalCode.INVALID,
                f"the digest of {_name(hello)} is {hello.partition_digest.hex()[:16] or 'missing'}, and that of shard "
                f"{self.shard} is {self._digest.hex()[:16]}: parameters, optimizer, steps, seed, clip_norm and number "
                "of shards must be the same in every pod",
            )

    def check_peer(self, hello: Hello, members: int = 1) -> None:
        """
        Args:
            members: the number of pods of a rank.

        Raises:
            Refusal: the peer was replaced, or has not joined this server, which alone replaces older incarnations; or
                its rank has no such member.
        """
        if hello.peer.member >= members:
            raise Refusal(
                RefusalCode.INVALID,
                f"{_name(hello)} has no member {hello.peer.member}: the members of a rank are 0 to {members - 1}",
            )
        newest = self._newest.get(_name(hello), -1)
        if hello.peer.incarnation < newest:
            raise Refusal(
                RefusalCode.REPLACED,
                f"{_name(hello)} of incarnation {hello.peer.incarnation} was replaced by incarnation {newest}",
            )
        if hello.peer.incarnation > newest:
            raise Refusal(
                RefusalCode.MOVED,
                f"{_name(hello)} of incarnation {hello.peer.incarnation} has not joined shard {self.shard}: join again",
            )


def _name(hello: Hello) -> str:
    return f"{hello.peer.role}-{hello.peer.index}"
