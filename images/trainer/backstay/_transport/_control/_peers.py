"""The newest incarnation of each slot of which a pod has joined a server, and the numbers of the links that may begin.

A pod replaces older incarnations of its slot by the handshake of a join, which compares all settings, or by a report of
the operator. A heartbeat with a larger number replaces no pod (docs/decisions/0068).
"""

from __future__ import annotations

import threading

from backstay_rpc.control_pb2 import Peer
from backstay_rpc.refusals import RefusalCode
from backstay_spec import contract

from .._streams import Refusal

__all__ = ["Peers", "cannot_link", "replaced"]


class Peers:
    """The newest incarnations of the pods that joined this server, and the links it allowed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, int] = {}
        self._links = 0
        self._met: dict[str, tuple[int, str]] = {}  # of member 0 of a rank: incarnation and address

    def allow_link(self) -> int:
        """Returns a number for a link that may begin now: one more than any before."""
        with self._lock:
            self._links += 1
            return self._links

    @property
    def newest_link(self) -> int:
        """The newest number of `allow_link`, or 0 if there is none."""
        return self._links

    def claim(self, role: str, index: int, incarnation: int) -> tuple[int, bool]:
        """Record an incarnation of a pod that joined, or that the operator has reported.

        Returns:
            The newest incarnation of its slot, and whether `incarnation` is new and the newest.
        """
        name = f"{role}-{index}"
        with self._lock:
            before = self._newest.get(name, -1)
            if incarnation > before:
                self._newest[name] = incarnation
            return max(before, incarnation), incarnation > before

    def check(self, peer: Peer) -> None:
        """Check the caller of a call without a handshake. Such a call replaces no other pod.

        Raises:
            Refusal: the caller was replaced, or it has a newer incarnation than each that joined.
        """
        name = f"{peer.role}-{peer.index}"
        with self._lock:
            newest = self._newest.get(name)
        if newest is None:  # no pod of the slot has joined, and this call changes nothing about that
            return
        if why := replaced(peer, newest):
            raise Refusal(RefusalCode.REPLACED, why)
        if peer.incarnation > newest:
            raise Refusal(
                RefusalCode.MOVED,
                f"{name} of incarnation {peer.incarnation} has not joined this server, and incarnation {newest} has: "
                "join again",
            )

    def meet(self, peer: Peer, address: str) -> str:
        """Returns the address of member 0 of the caller's rank and incarnation, or an empty text if it has not reported
        one.

        Args:
            address: the address of the caller, if it is member 0.

        Raises:
            Refusal: the caller was replaced.
        """
        name = f"{peer.role}-{peer.index}"
        with self._lock:
            newest = max(self._newest.get(name, -1), self._met.get(name, (-1, ""))[0])
            if why := replaced(peer, newest):
                raise Refusal(RefusalCode.REPLACED, why)
            if peer.member == 0 and address:
                self._met[name] = peer.incarnation, address
            incarnation, found = self._met.get(name, (-1, ""))
            return found if incarnation == peer.incarnation else ""

    def known(self) -> dict[str, int]:
        """Returns the newest incarnation of each pod, by name, such as ``worker-3``."""
        with self._lock:
            return dict(self._newest)


def replaced(peer: Peer, newest: int) -> str:
    """Returns the reason why a pod must stop when `newest` is its slot's newest incarnation. It is empty for the
    newest."""
    if newest <= peer.incarnation:
        return ""
    name = f"{peer.role}-{peer.index}"
    return f"{name} of incarnation {peer.incarnation} was replaced by incarnation {newest}: it must stop"


def cannot_link(peer: Peer, shards: int) -> str:
    """Returns the reason why a pod cannot have a link to the coordinator. It is empty for the server of a shard other
    than 0.

    Args:
        shards: the number of shards of the job.
    """
    if peer.role == contract.ROLE_SERVER and 0 < peer.index < shards:
        return ""
    return (
        f"{peer.role} {peer.index} is not another shard: the job has {shards} shards, and the coordinator is on shard 0"
    )
