"""Compares the objects that the watches have shown with a list, from time to time.

If Kopf cannot continue a watch, it lists again, and does not report the objects that were deleted in between. Such an
object would stay in its index forever, and a dead pod would never be replaced. So a list of the metadata (500 at a
time, without specs) finds known objects that no longer exist. It is requested some time after each list by Kopf, and
every few minutes.
"""

from __future__ import annotations

import asyncio
import logging

from backstay_operator import errors
from backstay_operator.bus import Bus, Changed, Relisted
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.kube import Kube
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.overlay import version_of
from backstay_operator.rights import JOBS, ResourceKind
from backstay_operator.watching import INDEXED
from backstay_spec import contract

log = logging.getLogger(__name__)


class Verifier:
    """Finds the deletions that no watch reported.

    Args:
        kube: the API server.
        cluster: the known objects.
        namespace: the namespace that is watched; None: all.
        metrics: counts the deletions that were found.
        bus: gets `Changed`, and has `Relisted`.
        every: seconds between two comparisons.
        settle: seconds to wait after a list by Kopf.
    """

    def __init__(
        self,
        kube: Kube,
        cluster: ClusterOverlay,
        namespace: str | None,
        metrics: OperatorMetrics,
        bus: Bus,
        *,
        every: float,
        settle: float = 5.0,
    ) -> None:
        self._kube = kube
        self._cluster = cluster
        self._namespace = namespace
        self._metrics = metrics
        self._bus = bus
        self._every = every
        self._settle = settle
        self._listed = asyncio.Event()
        bus.subscribe(Relisted, lambda _: self._listed.set())

    async def run(self) -> None:
        """Compare forever; cancel it to stop."""
        while True:
            try:
                await asyncio.wait_for(self._listed.wait(), self._every)
                await asyncio.sleep(self._settle)
            except TimeoutError:
                pass
            self._listed.clear()
            try:
                await self.compare()
            except errors.KubeError as error:
                log.warning("the watches could not be compared with a list, and are compared again later: %s", error)
                self._metrics.errors.labels(error.kind).inc()

    async def compare(self) -> list[tuple[ResourceKind, str]]:
        """Compare once. Returns the deleted objects that were found, as (resource, name)."""
        found = []
        for resource in INDEXED:
            selector = "" if resource == JOBS else contract.LABEL_JOB
            listed: dict[str, int] = {}
            version = -1
            async for page, of_list in self._kube.metadata(resource, self._namespace, selector):
                # All pages show the state at the time of the first one.
                version = version if version >= 0 else version_of({"resourceVersion": of_list})
                for item in page:
                    listed[item["metadata"]["uid"]] = version_of(item["metadata"])
            overlay = self._cluster.overlays[resource]
            for key, seen in list(overlay.missing_from(listed, version)):
                log.warning("%s %s/%s was deleted, and no watch reported it", resource.plural, key[0], seen.name)
                self._metrics.ghosts.labels(resource.plural).inc()
                overlay.removed(key, seen.uid)
                found.append((resource, seen.name))
                self._bus.send(Changed(key))
        return found
