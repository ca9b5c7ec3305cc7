"""All that is known of the cluster: one overlay for each watched resource, and what is told of its changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from backstay_operator.metrics import Metrics
from backstay_operator.overlay import Overlay, Seen, version_of
from backstay_operator.rights import JOBS, Resource
from backstay_operator.slim import SLIM, Json
from backstay_operator.watching import INDEXED, JobKey, job_key, own_key
from backstay_spec.causes import terminated_state

log = logging.getLogger(__name__)


class Cluster:
    """The overlays, fed by the watch and by our own writes.

    Args:
        clock: seconds, monotonic.
        metrics: counts events.
        changed: is told which job to look at again.
    """

    def __init__(self, clock: Callable[[], float], metrics: Metrics, changed: Callable[[JobKey], None]) -> None:
        self._clock = clock
        self._metrics = metrics
        self._changed = changed
        self.overlays: dict[Resource, Overlay[JobKey, Json]] = {resource: Overlay(clock) for resource in INDEXED}
        self.synced = False  # Kopf shows no event before all its first lists are in the indexes
        self.relisted: Callable[[], None] = lambda: None
        self.ended: Callable[[JobKey, Mapping[str, Any]], None] = lambda *_: None

    # What the watch calls.

    def attach(self, resource: Resource, index: Mapping[JobKey, Iterable[Seen[Json]]]) -> None:
        """Kopf has started, with this index."""
        self.overlays[resource].attach(index)
        self._metrics.moved[resource.plural] = self._clock()

    def event(self, resource: Resource, key: JobKey, raw: Mapping[str, Any], deleted: bool, listed: bool) -> None:
        """The watch showed an object."""
        self.synced = True
        self._metrics.watch_moved(resource.plural)
        metadata = raw["metadata"]
        self.overlays[resource].shown(key, metadata["uid"], version_of(metadata), deleted=deleted)
        if resource != JOBS and (deleted or _has_ended(raw)):
            self.ended(key, raw)
        if listed:
            self.relisted()
        self._changed(key)

    # What is known.

    def job(self, key: JobKey) -> Json | None:
        """The TrainingJob, or None when there is none, or when it is being deleted."""
        found = self.overlays[JOBS].view(key)
        # Two of one name: the older one's deletion has not been shown yet.
        newest = max(found, key=lambda seen: seen.version, default=None)
        if newest is None or newest.value["metadata"].get("deletionTimestamp"):
            return None
        return newest.value

    def objects(self, resource: Resource, key: JobKey) -> tuple[Json, ...]:
        """The objects of one kind that say they belong to a job."""
        return tuple(seen.value for seen in self.overlays[resource].view(key))

    def jobs(self) -> set[JobKey]:
        """Every job that is known."""
        return self.overlays[JOBS].keys()

    # What we did.

    def wrote(self, resource: Resource, answer: Mapping[str, Any]) -> None:
        """The API server answered a write, or a live GET, with this object."""
        key = own_key(answer) if resource == JOBS else job_key(answer)
        if key is not None:
            self.overlays[resource].wrote(key, Seen.of(answer, SLIM[resource](answer)))

    def removed(self, resource: Resource, key: JobKey, uid: str) -> None:
        """This object is no more."""
        self.overlays[resource].removed(key, uid)

    # How the watches fare.

    def owed(self) -> float:
        """For how many seconds a watch that owes us a write of ours has shown nothing at all; 0 when none is owed.

        A watch that moves is not dead, however late it is: with a slow API server, or after a pause of the operator, it
        catches up, and a restart would only begin anew.
        """
        silent = [0.0]
        for resource, overlay in self.overlays.items():
            since = overlay.owed_since()
            if since is not None:
                silent.append(self._clock() - max(since, self._metrics.moved.get(resource.plural, since)))
        return max(silent)

    def behind(self) -> float:
        """For how many seconds the watches have not shown our oldest write; 0 when they have shown all of them."""
        now = self._clock()
        waits = (overlay.owed_since() for overlay in self.overlays.values())
        return max((now - since for since in waits if since is not None), default=0.0)

    def pardon(self) -> None:
        """The API server was away: count what is owed from now."""
        for overlay in self.overlays.values():
            overlay.pardon()


def _has_ended(raw: Mapping[str, Any]) -> bool:
    ended = (raw.get("status") or {}).get("phase") in ("Failed", "Succeeded")
    return ended or bool(raw["metadata"].get("deletionTimestamp")) or terminated_state(raw) is not None
