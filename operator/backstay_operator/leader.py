"""Only the holder of a Lease acts. The same Lease is the heartbeat that proves that the watch receives events.

The holder renews the Lease every few seconds, and the new version must come back through Kopf's watch. If the API
server accepts writes, but the watch does not show them, the watch is dead and the liveness probe fails. An operator
that is not the holder expects to observe the holder's renewals in the same way. While the API server does not answer,
nothing is expected, because a restart of the operator cannot repair that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC
from pathlib import Path
from typing import Any, Final

from backstay_operator import errors
from backstay_operator.bus import Bus, LeadChanged
from backstay_operator.clocks import Clocks
from backstay_operator.kube import Kube
from backstay_operator.overlay import version_of
from backstay_operator.rights import LEASE_NAME, LEASES

log = logging.getLogger(__name__)

# How long a Lease is valid without a renewal, and the time between two renewals or reads.
_SECONDS: Final = 15.0
_PERIOD: Final = 4.0


def identity(environ: Mapping[str, str], draw: Callable[[], float]) -> str:
    """Returns a name for this process that no other running process has.

    In a pod it is the pod's name and uid (``BACKSTAY_OPERATOR_POD``), so a restarted container takes over from its dead
    predecessor immediately. Elsewhere it is host, process-id namespace and process id, which show whether a predecessor
    is dead.
    """
    pod = environ.get("BACKSTAY_OPERATOR_POD")
    if pod:
        return pod
    return f"{socket.gethostname()}_{_pid_namespace()}_{os.getpid()}_{int(draw() * 16**8):08x}"


def pod_reference(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the owner reference to the pod of this process (``BACKSTAY_OPERATOR_POD``, name/uid); None outside a
    pod."""
    name, _, uid = environ.get("BACKSTAY_OPERATOR_POD", "").partition("/")
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid} if name and uid else None


def is_dead(holder: str, me: str) -> bool:
    """Returns whether it is certain that `holder` no longer runs. This can be certain only for a process of this
    machine."""
    theirs, mine = holder.split("_"), me.split("_")
    if len(theirs) != 4 or len(mine) != 4 or theirs[:2] != mine[:2] or not theirs[2].isdigit():
        return False
    pid = int(theirs[2])
    if pid == os.getpid():
        return holder != me  # this process has that process id now
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _pid_namespace() -> str:
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "0"


@dataclass
class _LeaseBeat:
    version: int
    at: float


class Leader:
    """Holds the operator's Lease, or waits for it.

    The Lease of an operator in a pod is owned by that pod. When a chart is uninstalled, the rights are deleted before
    the container is stopped, so the container cannot release the Lease. Kubernetes then deletes the Lease with the pod,
    and the operator of the next installation acts immediately.

    Args:
        kube: the API server.
        namespace: the namespace of the Lease.
        me: the identity of this process (see `identity`).
        clocks: the operator's clocks. The time of day is for people who read the Lease.
        bus: gets `LeadChanged`.
        owner: the owner reference of the Lease, to an object of the same namespace; None: no owner.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        me: str,
        bus: Bus,
        *,
        clocks: Clocks,
        owner: Mapping[str, Any] | None = None,
    ) -> None:
        self._kube = kube
        self.namespace = namespace
        self.me = me
        self._clock, self._now = clocks.seconds, clocks.now
        self._bus = bus
        self._owner = owner
        self._until: float | None = None  # this operator acts until this time
        self._was = False
        self._held: dict[str, Any] | None = None  # the Lease after the last renewal
        self._foreign: tuple[str, int, float] | None = None  # holder, version, first time that this version was read
        self._beat: _LeaseBeat | None = None
        self._shown = -1
        self._wake = asyncio.Event()
        self._complained = False
        self.reached = False  # whether the API server answered the last request

    def leads(self) -> bool:
        """Returns whether this operator may act now."""
        return self._until is not None and self._clock() < self._until

    @property
    def seen(self) -> bool:
        """Whether the watch has shown the Lease. Kopf shows no event before all its first lists are complete."""
        return self._shown >= 0

    def behind(self) -> float:
        """Returns the seconds for which the watch has not shown a written version of the Lease while the API server
        answered."""
        return 0.0 if self._beat is None else self._clock() - self._beat.at

    def saw(self, lease: Mapping[str, Any]) -> None:
        """The watch showed the Lease."""
        if lease["metadata"].get("namespace") != self.namespace:
            return
        version = version_of(lease["metadata"])
        if self._beat is not None and version >= self._beat.version:
            self._beat = None
        elif self._beat is not None and version > self._shown:
            self._beat.at = self._clock()  # the watch is late, but it receives events
        self._shown = max(self._shown, version)
        if not (lease.get("spec") or {}).get("holderIdentity") and not self.leads():
            self._wake.set()  # the holder released it: take it now

    def deleted(self, lease: Mapping[str, Any]) -> None:
        """The watch showed that the Lease was deleted, for example with its holder's pod. Any operator may take it now.

        The holder stops acting until it has created the Lease again, because another operator may be faster.
        """
        if lease["metadata"].get("namespace") != self.namespace:
            return
        self._held = self._beat = self._until = None
        self._notify()
        self._wake.set()

    async def run(self) -> None:
        """Renew or wait forever; cancel it to stop."""
        while True:
            self._wake.clear()  # before the step, so that a wake-up during the step is not lost
            await self.step()
            try:
                await asyncio.wait_for(self._wake.wait(), _PERIOD)
            except TimeoutError:
                continue

    async def step(self) -> None:
        """Read the Lease once, and take or renew it if that is allowed."""
        started = self._clock()
        self._notify()  # the Lease may have expired since the last step: dropped work must be done again
        try:
            lease = await self._attempt()
            if self._complained:
                log.info("the API server answers again")
            self.reached, self._complained = True, False
        except errors.Conflict:
            self.reached = True
            lease = None
        except errors.KubeError as error:
            if self.reached or not self._complained:
                log.warning("the Lease %s/%s: %s", self.namespace, LEASE_NAME, error)
                self._complained = True
            self.reached = isinstance(error, errors.Answered) and not isinstance(error, errors.Busy)
            if self._beat is not None and not self.reached:
                self._beat.at = self._clock()  # while the API server does not answer, no event is expected
            lease = None
        if lease is not None:
            version = version_of(lease["metadata"])
            if self._beat is None and version > self._shown:
                self._beat = _LeaseBeat(version, self._clock())
            # The Lease may have expired while the API server answered. Triggers of that time were dropped, so the lapse
            # is reported before the renewal ends it.
            self._notify()
            if (lease.get("spec") or {}).get("holderIdentity") == self.me:
                # One third less than the Lease is valid for others, so that the clocks of two operators may drift.
                self._until = started + _SECONDS * 2 / 3
            else:
                self._until = None
        self._notify()

    async def release(self) -> None:
        """Release the Lease, so that a successor does not wait until it expires.

        An expired Lease is released too: others wait for longer than its holder acts.
        """
        if self._until is None:
            return
        self._until = None
        try:
            lease = await self._kube.get(LEASES, self.namespace, LEASE_NAME)
            if lease["spec"].get("holderIdentity") == self.me:
                lease["spec"]["holderIdentity"] = ""
                await self._kube.replace(LEASES, self.namespace, LEASE_NAME, lease)
        except errors.KubeError as error:
            log.info("the Lease was not released: %s", error)

    async def _attempt(self) -> dict[str, Any]:
        # A renewal needs no GET: it sends the version of the last one, and another client's write since then is a
        # Conflict.
        held, self._held = self._held, None
        try:
            lease = held or await self._kube.get(LEASES, self.namespace, LEASE_NAME)
            spec = lease.setdefault("spec", {})
            holder = spec.get("holderIdentity") or ""
            if holder not in ("", self.me) and not self._expired(lease, holder):
                return lease
            if holder != self.me:
                spec["acquireTime"] = self._stamp()
                spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
            spec["holderIdentity"] = self.me
            spec["leaseDurationSeconds"] = int(_SECONDS)
            spec["renewTime"] = self._stamp()
            if self._owner is not None:
                lease["metadata"]["ownerReferences"] = [dict(self._owner)]
            lease = await self._kube.replace(LEASES, self.namespace, LEASE_NAME, lease)
        except errors.Conflict:
            if held is None:
                raise
            return await self._attempt()  # another client wrote the Lease since the last renewal: read it
        except errors.NotFound:
            lease = await self._kube.create(LEASES, self.namespace, self._fresh())
        self._held = lease
        return lease

    def _expired(self, lease: Mapping[str, Any], holder: str) -> bool:
        if is_dead(holder, self.me):
            return True
        version = version_of(lease["metadata"])
        if self._foreign is None or self._foreign[:2] != (holder, version):
            if self._foreign is None or self._foreign[0] != holder:
                log.info("another operator holds the Lease %s/%s: %s", self.namespace, LEASE_NAME, holder)
            self._foreign = (holder, version, self._clock())
            return False
        # The holder's clock is not compared with this one: only the time without an observed change counts.
        lasts = float(lease["spec"].get("leaseDurationSeconds") or _SECONDS)
        return self._clock() - self._foreign[2] >= lasts

    def _fresh(self) -> dict[str, Any]:
        return {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {
                "name": LEASE_NAME,
                "namespace": self.namespace,
                "labels": {"app.kubernetes.io/name": "backstay", "app.kubernetes.io/component": "operator"},
                **({} if self._owner is None else {"ownerReferences": [dict(self._owner)]}),
            },
            "spec": {
                "holderIdentity": self.me,
                "leaseDurationSeconds": int(_SECONDS),
                "acquireTime": self._stamp(),
                "renewTime": self._stamp(),
                "leaseTransitions": 0,
            },
        }

    def _stamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _notify(self) -> None:
        leads = self.leads()
        if leads != self._was:
            self._was = leads
            log.info("this operator %s now (%s)", "acts" if leads else "does not act", self.me)
            self._bus.send(LeadChanged(leads))
