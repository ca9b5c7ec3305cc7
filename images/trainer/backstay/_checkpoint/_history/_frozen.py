"""The frozen arrays of a history, which are the same in all its workers (docs/decisions/0098)."""

from __future__ import annotations

import threading

from .._manifest import FrozenRecord

__all__ = ["AgreedFrozen"]


class AgreedFrozen:
    """The first worker decides, or the checkpoint that training continues from. All others must have the same.

    Attributes:
        record: None until it is known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stored = ""
        self.record: FrozenRecord | None = None

    def continues(self, record: FrozenRecord | None, manifest: str) -> None:
        """Training continues from a manifest with this record."""
        with self._lock:
            if record is not None:
                self.record, self._stored = record, manifest

    def join(self, record: FrozenRecord, peer: str) -> str:
        """Returns the reason why a peer with these frozen arrays cannot train, or an empty text if it can.

        Args:
            peer: how the message names it.
        """
        with self._lock:
            if self.record is None:
                self.record = record
                return ""
            why = self.record.difference(record, f"the checkpoint {self._stored}" if self._stored else "this job", peer)
            if not why:
                return ""
            cure = (
                "Training continues with the frozen arrays of its checkpoints only. To train with others, use "
                "another checkpoint.uri, and load what is trained by start_from"
                if self._stored
                else "All workers must read the same arrays: start_from must name the same files in every pod. They "
                "must not change while the job runs. Without start_from, init must return the same values"
            )
            return f"the frozen arrays of {peer} are not those of this job: {why}. {cure}"
