"""Short pauses of Python's garbage collector, independent of the number of objects that the operator keeps.

A full collection visits every container object and stops the event loop. At 1,000 jobs of 10 pods it takes half a
second of CPU time, and several seconds on a busy node. In that time no dead pod is replaced and no Lease is renewed.
Almost all of the operator's objects are freed by reference counts alone. So objects that survived a collection are
excluded from the next ones, and only a rare full collection visits them (docs/decisions/0022).
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

#: Seconds between two collections of new objects, and how many of them there are between two full collections.
PERIOD: Final = 20.0
ROUNDS: Final = 90


class ObjectCollector:
    """Collects new objects every few seconds, and all objects every half hour.

    Args:
        period: seconds between two collections.
        rounds: every how many collections all earlier survivors are visited too.
    """

    def __init__(self, *, period: float = PERIOD, rounds: int = ROUNDS) -> None:
        self._period = period
        self._rounds = rounds

    async def run(self) -> None:
        """Collect forever; cancel it to stop, and the collector works as before."""
        try:
            while True:
                gc.unfreeze()  # only this finds cyclic garbage among the survivors
                for _ in range(self._rounds):
                    self.collect()
                    await asyncio.sleep(self._period)
        finally:
            gc.unfreeze()

    @staticmethod
    def collect() -> None:
        """Collect new objects, and exclude the survivors from later collections."""
        gc.collect()
        gc.freeze()
