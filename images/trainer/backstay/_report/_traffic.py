"""The bytes of tensors that a worker sends and receives for an update, and what they would be without codecs."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from backstay_rpc.control_pb2 import Commit, GradientInfo

from .._update import ShardWire

__all__ = ["CARRIED", "EXACT", "Carried", "Traffic"]

CARRIED, EXACT = "carried", "exact"


class Carried:
    """A worker's bytes since its process began. Thread-safe.

    Args:
        wires: how the blocks of each shard travel.
    """

    def __init__(self, wires: Sequence[ShardWire]) -> None:
        exact = sum(block.nbytes for wire in wires for block in wire.exact)
        self._gradients = exact / max(1, sum(block.nbytes for wire in wires for block in wire.gradients))
        self._parameters = exact / max(1, sum(block.nbytes for wire in wires for block in wire.parameters))
        self._lock = threading.Lock()
        self._sent = self._received = 0

    def add(self, sent: int, received: int) -> None:
        """Count bytes of encoded tensors on a data stream."""
        with self._lock:
            self._sent += sent
            self._received += received

    def totals(self) -> tuple[int, int]:
        """Returns all bytes, and about how many there would be without codecs."""
        with self._lock:
            sent, received = self._sent, self._received
        return sent + received, round(sent * self._gradients + received * self._parameters)


@dataclass
class _Known:
    """The first and the newest report of a worker's process."""

    incarnation: int
    first: tuple[int, int, int]  # the number of the contribution, and the totals
    newest: tuple[int, int, int]


class Traffic:
    """The mean traffic of an update and worker, from the totals in the contributions. Shard 0's server has it.

    The totals of a contribution are those before it was sent. The difference of two of them is the traffic of all
    updates between them, with the contributions that were dropped or sent again.
    """

    def __init__(self) -> None:
        self._of_rank: dict[int, _Known] = {}
        self._ended = [0, 0, 0]  # updates, bytes and exact bytes of processes before the current ones

    def add(self, commit: Commit, infos: Sequence[GradientInfo]) -> None:
        """An update was decided."""
        for contribution, info in zip(commit.contributions, infos, strict=True):
            if not info.carried:
                continue  # it is from a run before
            identity = contribution.id
            now = identity.key_step, info.carried, info.exact
            known = self._of_rank.get(identity.rank)
            # After a rollback, the numbers begin again below the newest one.
            if known is not None and known.incarnation == identity.incarnation and known.newest[0] <= now[0]:
                known.newest = now
                continue
            if known is not None:
                self._ended = [a + b for a, b in zip(self._ended, _passed(known), strict=True)]
            self._of_rank[identity.rank] = _Known(identity.incarnation, now, now)

    def mean(self) -> Mapping[str, float]:
        """Returns the bytes of an update and worker by `CARRIED`, and by `EXACT` without codecs, which is empty before
        the second update."""
        updates, carried, exact = self._ended
        for known in self._of_rank.values():
            more = _passed(known)
            updates, carried, exact = updates + more[0], carried + more[1], exact + more[2]
        return {CARRIED: round(carried / updates), EXACT: round(exact / updates)} if updates else {}


def _passed(known: _Known) -> tuple[int, int, int]:
    first, newest = known.first, known.newest
    return newest[0] - first[0], newest[1] - first[1], newest[2] - first[2]
