"""Whether all ranks train on the same batch. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

__all__ = ["SAME", "SAME_UPDATES", "SameLosses"]

SAME_UPDATES: Final = 20
"""The number of updates in a row with equal losses that cannot be a coincidence."""

SAME: Final = (
    f"the losses of all workers were equal bit for bit in {SAME_UPDATES} updates in a row. All workers compute the "
    "same batch, so the job does the work of one worker. Make the batch from the key: backstay.from_dataset(data, "
    "batch_size=...), or key.number and key.seed in place of a global generator"
)


class SameLosses:
    """Counts successive updates in which several contributions have one loss, and another one than the last update.

    A loss that does not change, such as 0 or that of a model that does not train, can be equal by right.
    """

    def __init__(self) -> None:
        self._updates = 0
        self._last: set[bytes] = set()
        self.found = False

    def update(self, losses: Sequence[float]) -> bool:
        """Count an update; True once, when there were `SAME_UPDATES` of them.

        Args:
            losses: the losses of the contributions, which are of different ranks.
        """
        different = {struct.pack("<d", loss) for loss in losses}
        if len(losses) > 1:
            self._updates = self._updates + 1 if len(different) == 1 and different != self._last else 0
            self._last = different
        if self.found or self._updates < SAME_UPDATES:
            return False
        self.found = True
        return True
