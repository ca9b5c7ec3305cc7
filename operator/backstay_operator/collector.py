"""Short pauses of Python's garbage collector, however many objects the operator keeps.

A full collection visits every container object and stops the event loop: at 1,000 jobs of 10 pods it takes half a
second of CPU time, and several seconds on a busy node. In that time the operator sees no dead pod and renews no Lease.
Almost everything that the operator keeps is freed by reference counts alone. So what has survived a collection is
moved out of the collector's sight, and only now and then everything is visited (docs/decisions/0022).
"""

from __future__ import annotations

import asyncio
import gc
from typing import Final

#: Seconds between two collections of what is new, and how many of them there are from one full collection to the next.
PERIOD: Final = 20.0
ROUNDS: Final = 90


class Collector:
    """Collects what is new every few seconds, and everything every half hour.

    Args:
        period: seconds between two collections.
        rounds: every how many collections the survivors of the former ones are visited too.
    """

    def __init__(self, *, period: float = PERIOD, rounds: int = ROUNDS) -> None:
        self._period = period
        self._rounds = rounds

    async def run(self) -> None:
        """Collect forever; cancel it to stop, and the collector works as before."""
        try:
            while True:
                gc.unfreeze()  # cyclic garbage among the survivors is found here and only here
                for _ in range(self._rounds):
                    self.collect()
                    await asyncio.sleep(self._period)
        finally:
            gc.unfreeze()

    @staticmethod
    def collect() -> None:
        """Collect what is new, and hide what survives."""
        gc.collect()
        gc.freeze()
