"""Holds the observed state of the cluster in one overlay for each watched resource, and notifies about its changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backstay_operator.bus import Bus, Changed, PodEnded, Relisted
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.overlay import Overlay, Seen, version_of
from backstay_operator.rights import JOBS, PODS, ResourceKind
from backstay_operator.slim import SLIM, Json
from backstay_operator.watching import INDEXED, JobKey, job_key, own_key
from backstay_spec.causes import terminated_state

log = logging.getLogger(__name__)


class ClusterOverlay:
    """The overlays. The watch and the operator's writes update them.

    Args:
        clock: a monotonic clock in seconds.
        metrics: counts events.
        bus: gets `Changed`, `PodEnded` and `Relisted`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        metrics: OperatorMetrics,
        bus: Bus,
    ) -> None:
        self._clock = clock
        self._metrics = metrics
        self._bus = bus
        self.overlays: dict[ResourceKind, Overlay[JobKey, Json]] = {resource: Overlay(clock) for resource in INDEXED}
        self.synced = False  # Kopf shows no event before all its first lists are in the indexes

    # The watch calls these.

    def attach(self, resource: ResourceKind, index: Mapping[JobKey, Iterable[Seen[Json]]]) -> None:
        """Kopf has started, with this index."""
        self.overlays[resource].attach(index)
        self._metrics.moved[resource.plural] = self._clock()

    def event(self, resource: ResourceKind, key: JobKey, raw: Mapping[str, Any], deleted: bool, listed: bool) -> None:
        """The watch showed an object."""
        self.synced = True
        self._metrics.watch_moved(resource.plural)
        metadata = raw["metadata"]
        self.overlays[resource].shown(key, metadata["uid"], version_of(metadata), deleted=deleted)
        if resource == PODS and (deleted or _has_ended(raw)):
            self._bus.send(PodEnded(key, raw))
        if listed:
            self._bus.send(Relisted())
        self._bus.send(Changed(key))

    # The known objects.

    def job(self, key: JobKey) -> Json | None:
        """Returns the TrainingJob; None if it does not exist, or if it is being deleted."""
        found = self.overlays[JOBS].view(key)
        # Two objects of one name: the deletion of the older one has not been shown yet.
        newest = max(found, key=lambda seen: seen.version, default=None)
        if newest is None or newest.value["metadata"].get("deletionTimestamp"):
            return None
        return newest.value

    def objects(self, resource: ResourceKind, key: JobKey) -> tuple[Json, ...]:
        """Returns the objects of one kind that are labelled with a job."""
        return tuple(seen.value for seen in self.overlays[resource].view(key))

    def jobs(self) -> set[JobKey]:
        """Returns every known job."""
        return self.overlays[JOBS].keys()

    # The operator's writes.

    def wrote(self, resource: ResourceKind, answer: Mapping[str, Any]) -> None:
        """The API server answered a write, or a live GET, with this object."""
        key = own_key(answer) if resource == JOBS else job_key(answer)
        if key is not None:
            self.overlays[resource].wrote(key, Seen.of(answer, SLIM[resource](answer)))

    def removed(self, resource: ResourceKind, key: JobKey, uid: str) -> None:
        """Record that an object no longer exists."""
        self.overlays[resource].removed(key, uid)

    # The state of the watches.

    def owed(self) -> float:
        """Returns the seconds without an event from a watch that has not shown one of this operator's writes, or 0 if
        all were shown.

        A watch that shows events is not dead, however late it is. With a slow API server, or after a pause of the
        operator, it catches up. A restart would only begin again.
        """
        silent = [0.0]
        for resource, overlay in self.overlays.items():
            since = overlay.owed_since()
            if since is not None:
                silent.append(self._clock() - max(since, self._metrics.moved.get(resource.plural, since)))
        return max(silent)

    def behind(self) -> float:
        """Returns the seconds for which the watches have not shown the oldest write of this operator, or 0 if all were
        shown."""
        now = self._clock()
        waits = (overlay.owed_since() for overlay in self.overlays.values())
        return max((now - since for since in waits if since is not None), default=0.0)

    def restart_clock(self) -> None:
        """The API server was unavailable: measure the delay of the outstanding writes from now."""
        for overlay in self.overlays.values():
            overlay.restart_clock()


def _has_ended(raw: Mapping[str, Any]) -> bool:
    ended = (raw.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return ended or bool(raw["metadata"].get("deletionTimestamp")) or terminated_state(raw) is not None
