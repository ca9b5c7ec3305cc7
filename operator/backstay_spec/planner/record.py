"""Holds the planner's records in the status, which are incarnations, back-off and the counters of the budgets.
Immutable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from backstay_spec import contract
from backstay_spec.causes import Cause
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.planner.pods import PodView
from backstay_spec.types_status import Backoff, Role, TrainingJobStatus

__all__ = ["Record", "standby_key"]


def standby_key(slot: Slot) -> str:
    """Returns the key of a shard's standby in `status.backoff`, such as ``parameter-server-0/standby``."""
    return f"{slot.key}/standby"


@dataclass(frozen=True, slots=True)
class Record:
    """The planner's records. Each method that changes a record returns a new one.

    Attributes:
        incarnations: slot key -> the newest incarnation.
        active: slot key of a shard with standbys -> the incarnation of its active server.
        backoff: slot key, or key of a shard's standby -> its crashes in a row, and the time of its next pod.
        restarts, disruptions: role -> pods replaced after a crash, and after a disruption.
    """

    incarnations: Mapping[str, int]
    active: Mapping[str, int]
    backoff: Mapping[str, Backoff]
    restarts: Mapping[Role, int]
    disruptions: Mapping[Role, int]

    @classmethod
    def of(cls, old: TrainingJobStatus) -> Record:
        """Returns the record in a status."""
        return cls(
            incarnations=old.incarnations,
            active=old.active,
            backoff=old.backoff,
            restarts={role: r.restarts for role, r in old.roles.items()},
            disruptions={role: r.disruptions for role, r in old.roles.items()},
        )

    # Queries.

    def newest(self, slot: Slot) -> int:
        """Returns the newest incarnation of a slot; 0 before the first."""
        return self.incarnations.get(slot.key, 0)

    def current(self, slot: Slot) -> int:
        """Returns the incarnation that fills the slot, which is the newest, or the active server's in a shard with
        standbys."""
        return self.active.get(slot.key) or self.newest(slot)

    def selected(self, shard: int) -> int:
        """Returns the incarnation that a shard's Service selects; 1 before the first pod."""
        return max(1, self.current(Slot(contract.ROLE_SERVER, shard)))

    def waits_until(self, key: str) -> datetime | None:
        """Returns the end of the back-off of a slot, or of a shard's standby, or None if it does not back off.

        During a back-off, the dead pod is counted, and the next one is not recorded yet.
        """
        known = self.backoff.get(key)
        return known.not_before if known is not None else None

    def lacks_room(self, slot: Slot) -> bool:
        """Returns whether only some pods of the slot's rank had room."""
        known = self.backoff.get(slot.key)
        return known is not None and known.no_room_since is not None

    def restarts_of(self, slot: Slot) -> int:
        """Returns how many restarts are charged to the slot's role."""
        return self.restarts.get(ROLE_OF_LABEL[slot.role], 0)

    # Changes.

    def including(self, pods: Mapping[Slot, Sequence[PodView]]) -> Record:
        """Returns the record with the incarnations of existing pods, because a job restored from a backup must not use
        one twice."""
        seen = {slot.key: found[-1].incarnation for slot, found in pods.items()}
        newer = {key: n for key, n in seen.items() if n > self.incarnations.get(key, 0)}
        return replace(self, incarnations={**self.incarnations, **newer}) if newer else self

    def without_standbys(self) -> Record:
        """Returns the record of a job without standbys, where the newest incarnation of each shard is its server."""
        return replace(self, active={}) if self.active else self

    def with_next(self, slot: Slot) -> Record:
        """Returns the record with one more incarnation of the slot."""
        return replace(self, incarnations={**self.incarnations, slot.key: self.newest(slot) + 1})

    def with_active(self, slot: Slot, incarnation: int) -> Record:
        """Returns the record with another active server of the shard."""
        return replace(self, active={**self.active, slot.key: incarnation})

    def with_backoff(self, key: str, backoff: Backoff | None) -> Record:
        """Returns the record with another back-off of a slot, which is None if the slot has no crashes in a row."""
        others = {k: b for k, b in self.backoff.items() if k != key}
        return replace(self, backoff=others if backoff is None else {**others, key: backoff})

    def with_backoff_of(self, keys: Sequence[str]) -> Record:
        """Returns the record with the back-off of these slots only."""
        kept = {key: backoff for key, backoff in self.backoff.items() if key in set(keys)}
        return replace(self, backoff=kept) if len(kept) < len(self.backoff) else self

    def without_wait(self, key: str) -> Record:
        """Returns the record after the next pod is recorded; the number of crashes in a row stays."""
        if self.waits_until(key) is None:
            return self
        return self.with_backoff(key, self.backoff[key].model_copy(update={"not_before": None}))

    def with_death(self, slot: Slot, cause: Cause, *, charged: bool) -> Record:
        """Returns the record with one more death, charged to its role's budget or counted as a disruption."""
        role = ROLE_OF_LABEL[slot.role]
        if charged:
            return replace(self, restarts={**self.restarts, role: self.restarts.get(role, 0) + 1})
        if not cause.charged:
            return replace(self, disruptions={**self.disruptions, role: self.disruptions.get(role, 0) + 1})
        return self
