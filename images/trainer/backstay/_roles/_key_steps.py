"""The number of a worker's next contribution (`key_step`), by update mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol

from backstay_rpc.control_pb2 import RejectReason

from .._coordination import Mode
from .._transport import Pulled

__all__ = ["KEY_STEPS", "KeySteps"]


class KeySteps(Protocol):
    """One rank's count of its contributions. It selects their batches, and decides what is sent again."""

    def next(self, version: int) -> int:
        """Returns the key step of a contribution that is computed from the parameters of `version`."""

    def last(self, steps: int) -> int | None:
        """Returns the key step of the last contribution of a training with this many updates, or None if it is not
        known."""

    def joined(self, key_step: int) -> None:
        """The coordinator's count, when this worker joins."""

    def answered(self, key_step: int, pulled: Pulled) -> None:
        """The coordinator answered the contribution of this key step."""

    def undecided(self, key_step: int, at: Pulled, pulled: Pulled) -> bool:
        """Returns whether a contribution may still be applied after its answer was lost, so that it is sent again.

        Args:
            key_step: the contribution's `key_step`.
            at: what it was computed from.
            pulled: what the servers answered in the same term, after this worker had joined again.
        """


class _SyncKeySteps:
    """Each version has one contribution of each rank."""

    def next(self, version: int) -> int:
        return version

    def last(self, steps: int) -> int | None:
        return steps - 1

    def joined(self, key_step: int) -> None:
        del key_step

    def answered(self, key_step: int, pulled: Pulled) -> None:
        del key_step, pulled

    def undecided(self, key_step: int, at: Pulled, pulled: Pulled) -> bool:
        del key_step
        return pulled.version == at.version


class _AsyncKeySteps:
    """Each rank counts for itself. The coordinator has the same count for the worker that replaces this one."""

    def __init__(self) -> None:
        self._next = 0

    def next(self, version: int) -> int:
        del version
        return self._next

    def last(self, steps: int) -> int | None:
        del steps
        return None

    def joined(self, key_step: int) -> None:
        self._next = key_step

    def answered(self, key_step: int, pulled: Pulled) -> None:
        if pulled.outcome in {RejectReason.REJECT_UNSPECIFIED, RejectReason.SKIPPED}:
            self._next = key_step + 1
        elif pulled.outcome in {RejectReason.DUPLICATE, RejectReason.OUT_OF_ORDER}:
            self._next = pulled.next_key_step

    def undecided(self, key_step: int, at: Pulled, pulled: Pulled) -> bool:
        del at
        return self._next == key_step and not pulled.done


KEY_STEPS: Final[Mapping[Mode, Callable[[], KeySteps]]] = {"Sync": _SyncKeySteps, "Async": _AsyncKeySteps}
"""The class of each update mode."""
