"""Counts the samples of each epoch that were used, dropped, and used again after a rollback (T9).

The account is a part of the coordinator's state, so that checkpoints and standbys contain it. It counts each commit. A
batch has a number (`BatchKey.number`). It holds the samples ``number * batch`` to ``(number + 1) * batch - 1`` of an
endless sequence of epochs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from backstay_rpc.control_pb2 import Commit

__all__ = ["EpochEnded", "Samples"]

_NUMBERS = ("size", "batch", "epoch", "used", "dropped", "redone")


@dataclass(frozen=True, slots=True)
class EpochEnded:
    """The account of an epoch.

    Attributes:
        epoch: its number, from 0.
        size: how many samples it has; `used` and `dropped` add up to it, except in Async mode, where ranks reach the
            end of an epoch at different times.
        used: samples in applied gradients.
        dropped: samples in gradients that were late, or not finite, or of a rank that left.
        repeated: samples of updates that were lost with a server and made again; they count once in `used`.
    """

    epoch: int
    size: int
    used: int
    dropped: int
    repeated: int

    def __str__(self) -> str:
        return (
            f"epoch {self.epoch} has ended: {self.size} samples: {self.used} used, {self.dropped} dropped, "
            f"{self.repeated} repeated"
        )


@dataclass(frozen=True, slots=True)
class Samples:
    """The account of the current epoch.

    Attributes:
        size: samples in an epoch.
        batch: samples in one rank's batch.
        sync: whether batches are counted by their numbers. In Async mode, where ranks draw them at different times,
            they are counted in the order of their updates.
        epoch: the number of the current one.
        used, dropped: samples of it so far.
        redone: `CoordinatorState.redone` when it began.
        shift: Async; the number of an update's first batch is ``version * batches + shift``, because earlier updates
            may have taken another number of batches.
    """

    size: int
    batch: int
    sync: bool = True
    epoch: int = 0
    used: int = 0
    dropped: int = 0
    redone: int = 0
    shift: int = 0

    def count(
        self, commit: Commit, *, world: int, offset: int, left_out: int, redone: int, batches: int = 1
    ) -> tuple[Samples, tuple[EpochEnded, ...]]:
        """Count an update.

        Args:
            world, offset: the world and the offset with which the gradients of the update were computed.
            left_out: batches that no rank will draw, because `commit` changes the world.
            redone: the present value of `CoordinatorState.redone`.
            batches: how many each contribution is computed from. Their numbers follow one another, in order of rank.

        Returns:
            See `add`.
        """
        ranks = set() if commit.skip else {contribution.id.rank for contribution in commit.contributions}
        if self.sync:
            # Numbers continue after those of the last rank that stays.
            uses = [rank in ranks for rank in range(min(world, commit.world)) for _ in range(batches)]
            number = offset + commit.version * batches * world
        else:
            uses = [not commit.skip for _ in commit.contributions] * batches
            number = commit.version * batches + self.shift
        dropped = replace(self, dropped=self.dropped + left_out * self.batch) if left_out else self
        return dropped.add(number, uses, redone)

    def with_batches(self, version: int, before: int, batches: int) -> Samples:
        """Returns the account where updates take `batches` from `version` on, and took `before` until then."""
        return self if self.sync else replace(self, shift=self.shift + version * (before - batches))

    def continues(self, first: Samples) -> bool:
        """Returns whether a run that begins with the account `first` continues this one: their epochs are the same."""
        return (self.size, self.batch, self.sync) == (first.size, first.batch, first.sync)

    def at(self, number: int, redone: int) -> Samples:
        """Returns a new account that begins with the batch of this number; earlier samples of its epoch count as
        used."""
        epoch, place = divmod(number * self.batch, self.size)
        return replace(self, epoch=epoch, used=place, dropped=0, redone=redone)

    def add(self, number: int, uses: Sequence[bool], redone: int) -> tuple[Samples, tuple[EpochEnded, ...]]:
        """Count the batches of one update.

        Args:
            number: the number of the first batch; the others follow it.
            uses: for each batch, whether the batch was used; otherwise it was dropped.
            redone: the present value of `CoordinatorState.redone`.

        Returns:
            The account of the current epoch, and those of the epochs that ended.
        """
        epoch, counts = max(self.epoch, number * self.batch // self.size), [self.dropped, self.used]
        since, ended = self.redone, list[EpochEnded]()
        for index, used in enumerate(uses):
            start, left = (number + index) * self.batch, self.batch
            while left:
                take = min(left, (epoch + 1) * self.size - start)
                counts[used] += take
                start, left = start + take, left - take
                if start == (epoch + 1) * self.size:
                    repeated = (redone - since) * len(uses) * self.batch
                    ended.append(EpochEnded(epoch, self.size, counts[True], counts[False], repeated))
                    epoch, counts, since = epoch + 1, [0, 0], redone
        return replace(self, epoch=epoch, used=counts[True], dropped=counts[False], redone=since), tuple(ended)

    def to_json(self) -> dict[str, Any]:
        """Returns the content for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Any) -> Samples | None:
        """Returns the inverse of `to_json`; None where an earlier version wrote none, or `data` is invalid."""
        if not isinstance(data, Mapping):
            return None
        try:
            size, batch, epoch, used, dropped, redone = (int(data[name]) for name in _NUMBERS)
            shift = int(data.get("shift", 0))  # an earlier version writes none
            found = cls(size, batch, bool(data["sync"]), epoch, used, dropped, redone, shift)
        except (KeyError, TypeError, ValueError):
            return None
        return found if size > 0 and batch > 0 else None
