"""One operator acts, by a Lease; and that Lease is the heartbeat that proves that our watch moves.

Every few seconds the holder renews the Lease. The new version must come back through Kopf's watch: if the API server
takes our writes and yet the watch does not show them, the watch is dead, and the liveness probe fails. An operator
that is not the holder expects to see the holder's renewals the same way. While the API server itself is away nothing
is expected, because a restart of the operator would not mend that.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from backstay_operator import errors
from backstay_operator.kube import Kube
from backstay_operator.overlay import version_of
from backstay_operator.rights import LEASE_NAME, LEASES

log = logging.getLogger(__name__)


def identity(environ: Mapping[str, str], draw: Callable[[], float]) -> str:
    """A name for this process that no other running process has.

    In a pod it is the pod's name and uid (``BACKSTAY_OPERATOR_POD``), so that a restarted container takes over from its
    dead predecessor at once; elsewhere host, process-id namespace and process id tell whether a predecessor is dead.
    """
    pod = environ.get("BACKSTAY_OPERATOR_POD")
    if pod:
        return pod
    return f"{socket.gethostname()}_{_pid_namespace()}_{os.getpid()}_{int(draw() * 16**8):08x}"


def pod_reference(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """The owner reference to this process' pod (``BACKSTAY_OPERATOR_POD``, name/uid); None outside a pod."""
    name, _, uid = environ.get("BACKSTAY_OPERATOR_POD", "").partition("/")
    return {"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid} if name and uid else None


def is_dead(holder: str, me: str) -> bool:
    """Is it certain that `holder` no longer runs? Only a process of this very machine can be known to be dead."""
    theirs, mine = holder.split("_"), me.split("_")
    if len(theirs) != 4 or len(mine) != 4 or theirs[:2] != mine[:2] or not theirs[2].isdigit():
        return False
    pid = int(theirs[2])
    if pid == os.getpid():
        return holder != me  # the process id is ours now
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
class _Beat:
    version: int
    at: float


class Leader:
    """Holds, or waits for, the operator's Lease.

    The Lease of an operator in a pod is owned by that pod. When a chart is uninstalled, the rights are deleted
    before its container is stopped, so it cannot give the Lease back. Kubernetes then deletes the Lease with the pod,
    and the operator of the next installation acts at once.

    Args:
        kube: the API server.
        namespace: where the Lease is.
        me: this process (see `identity`).
        clock: seconds, monotonic.
        now: the time of day, for people who read the Lease.
        changed: is told when this operator begins (True) or ceases (False) to act.
        owner: the owner reference that the Lease gets, to an object of its own namespace; None: none.
        seconds: how long a Lease holds without being renewed.
        period: how often it is renewed, or looked at.
    """

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        me: str,
        *,
        clock: Callable[[], float],
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
        changed: Callable[[bool], None] = lambda _: None,
        owner: Mapping[str, Any] | None = None,
        seconds: float = 15.0,
        period: float = 4.0,
    ) -> None:
        self._kube = kube
        self.namespace = namespace
        self.me = me
        self._clock = clock
        self._now = now
        self._changed = changed
        self._seconds = seconds
        self._period = period
        self._owner = owner
        self._until: float | None = None  # we act before this
        self._was = False
        self._held: dict[str, Any] | None = None  # the Lease as the last renewal left it
        self._foreign: tuple[str, int, float] | None = None  # holder, version, when we first saw that version
        self._beat: _Beat | None = None
        self._shown = -1
        self._wake = asyncio.Event()
        self._complained = False
        self.reached = False  # did the API server answer the last time?

    def leads(self) -> bool:
        """May this operator act now?"""
        return self._until is not None and self._clock() < self._until

    @property
    def seen(self) -> bool:
        """Has the watch shown the Lease at all? Kopf shows nothing before all its first lists are in."""
        return self._shown >= 0

    def behind(self) -> float:
        """For how many seconds the watch has owed us a version of the Lease, while the API server answered."""
        return 0.0 if self._beat is None else self._clock() - self._beat.at

    def saw(self, lease: Mapping[str, Any]) -> None:
        """The watch showed the Lease."""
        if lease["metadata"].get("namespace") != self.namespace:
            return
        version = version_of(lease["metadata"])
        if self._beat is not None and version >= self._beat.version:
            self._beat = None
        elif self._beat is not None and version > self._shown:
            self._beat.at = self._clock()  # it is late, but it moves
        self._shown = max(self._shown, version)
        if not (lease.get("spec") or {}).get("holderIdentity") and not self.leads():
            self._wake.set()  # it was given back: take it now

    def deleted(self, lease: Mapping[str, Any]) -> None:
        """The watch showed that the Lease was deleted, as it is with its holder's pod: whoever is first holds it now.

        The holder ceases to act until it has made the Lease anew, because another operator may be faster.
        """
        if lease["metadata"].get("namespace") != self.namespace:
            return
        self._held = self._beat = self._until = None
        self._tell()
        self._wake.set()

    async def run(self) -> None:
        """Renew or wait for ever; cancel it to stop."""
        while True:
            self._wake.clear()  # before the step: what wakes us meanwhile is not lost
            await self.step()
            try:
                await asyncio.wait_for(self._wake.wait(), self._period)
            except TimeoutError:
                continue

    async def step(self) -> None:
        """Look at the Lease once, and take or renew it if we may."""
        started = self._clock()
        self._tell()  # it may have run out since the last look: what was not done meanwhile is to be done anew
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
                self._beat.at = self._clock()  # nothing is owed while the API server is away
            lease = None
        if lease is not None:
            version = version_of(lease["metadata"])
            if self._beat is None and version > self._shown:
                self._beat = _Beat(version, self._clock())
            # The Lease may have run out while the API server answered. Triggers of that time were dropped, so the lapse
            # is reported before the renewal ends it.
            self._tell()
            if (lease.get("spec") or {}).get("holderIdentity") == self.me:
                # A third less than the Lease holds for others, so that two clocks that drift never overlap.
                self._until = started + self._seconds * 2 / 3
            else:
                self._until = None
        self._tell()

    async def release(self) -> None:
        """Give the Lease back, so that a successor need not wait for it to run out.

        A Lease that ran out is given back too: others wait for longer than its holder acts.
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
            log.info("the Lease was not given back: %s", error)

    async def _attempt(self) -> dict[str, Any]:
        # A renewal needs no GET: the version of the last one is sent, and a foreign write since then is a Conflict.
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
            spec["leaseDurationSeconds"] = int(self._seconds)
            spec["renewTime"] = self._stamp()
            if self._owner is not None:
                lease["metadata"]["ownerReferences"] = [dict(self._owner)]
            lease = await self._kube.replace(LEASES, self.namespace, LEASE_NAME, lease)
        except errors.Conflict:
            if held is None:
                raise
            return await self._attempt()  # somebody wrote the Lease since the last renewal: read it
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
        # Its own clock is not compared with ours: what counts is for how long *we* saw no change.
        lasts = float(lease["spec"].get("leaseDurationSeconds") or self._seconds)
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
                "leaseDurationSeconds": int(self._seconds),
                "acquireTime": self._stamp(),
                "renewTime": self._stamp(),
                "leaseTransitions": 0,
            },
        }

    def _stamp(self) -> str:
        return self._now().astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    def _tell(self) -> None:
        leads = self.leads()
        if leads != self._was:
            self._was = leads
            log.info("this operator %s now (%s)", "acts" if leads else "does not act", self.me)
            self._changed(leads)
