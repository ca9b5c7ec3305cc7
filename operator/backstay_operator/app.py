"""Creates and connects the operator's parts, and starts and stops them in order."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Mapping

from backstay_operator.backoff import Backoffs, Curve
from backstay_operator.bus import Bus, Changed, LeadChanged, PodEnded
from backstay_operator.clocks import Clocks
from backstay_operator.cluster import ClusterOverlay
from backstay_operator.collector import ObjectCollector
from backstay_operator.dispatch import Dispatcher, Pauses
from backstay_operator.errors import KubeError
from backstay_operator.events import EventSender
from backstay_operator.execute import Executor
from backstay_operator.health import Health, HealthVerdict
from backstay_operator.known_jobs import KnownJobs
from backstay_operator.kube import Kube
from backstay_operator.leader import Leader, identity, pod_reference
from backstay_operator.metrics import OperatorMetrics
from backstay_operator.progress import Poller
from backstay_operator.reconcile import Reconciler
from backstay_operator.settings import Options
from backstay_operator.slim import SLIM
from backstay_operator.verify import Verifier
from backstay_operator.watching import JobKey, KopfWatch, wait_for_crd
from backstay_spec.observed import PlanSettings

log = logging.getLogger(__name__)

#: Seconds. If the watch has not shown a write after this time, the watch is dead.
WATCH_LIMIT = 60.0

#: Seconds in which the events of one job are collected, unless one of them shows that a pod has ended.
SETTLE = 0.05


class WatchEnded(Exception):  # noqa: N818  what happened
    """Kopf ended. The caller starts all parts again."""


class App:
    """One operator.

    Args:
        options: the command line.
        key: the operator's key, at least 32 bytes.
        environ: the environment, which may contain the pod's name.
        draw: returns a random number in [0, 1), the only source of randomness.
    """

    def __init__(self, options: Options, key: bytes, *, environ: Mapping[str, str], draw: Callable[[], float]) -> None:
        self._options = options
        clocks, self._bus = Clocks(), Bus()
        self.metrics = OperatorMetrics(clocks.seconds)
        self._kube = Kube(options.kubeconfig, observe=self.metrics.request)
        # A separate connection: a renewal must not wait for a free one while hundreds of pods are created.
        self._lease_kube = Kube(options.kubeconfig, observe=self.metrics.request)
        self._leader = Leader(
            self._lease_kube,
            options.lease_namespace,
            identity(environ, draw),
            self._bus,
            clocks=clocks,
            # An owner must be in the same namespace as its dependents.
            owner=pod_reference(environ) if options.lease_namespace == options.operator_namespace else None,
        )
        self.cluster = ClusterOverlay(clocks.seconds, self.metrics, self._bus)
        backoffs: Backoffs[tuple[JobKey, str]] = Backoffs(Curve(first=0.2, most=30.0), draw)
        executor = Executor(
            self._kube,
            self.cluster,
            key,
            self.metrics,
            EventSender(self._kube, self._leader.me, self.metrics, now=clocks.now, draw=draw),
            clocks=clocks,
            backoffs=backoffs,
        )
        # Jobs that lost a pod and were not reconciled since. They come first when this operator acts again.
        self._lost_pods: set[JobKey] = set()
        self._dispatcher: Dispatcher[JobKey] = Dispatcher(
            self._work,
            limit=options.parallel,
            draw=draw,
            failed=self._failed,
            pauses=Pauses(settle=SETTLE),
            behind=self.cluster.behind,
        )
        self._reconciler = Reconciler(
            KnownJobs(self.cluster, clocks),
            executor,
            PlanSettings(options.operator_namespace, options.operator_labels, options.log_format),
            key,
            self.metrics,
            self._bus,
            leads=self._leader.leads,
        )
        self._poller = Poller(self._reconciler.round, self._bus, self.metrics, clocks=clocks, draw=draw)
        self._verifier = Verifier(
            self._kube,
            self.cluster,
            options.namespace,
            self.metrics,
            self._bus,
            every=options.verify_seconds,
        )
        self._collector = ObjectCollector()
        self._watch = KopfWatch(
            options.kubeconfig,
            options.namespace,
            slim=SLIM,
            sink=self.cluster.event,
            indexed=self.cluster.attach,
            lease=lambda lease, deleted: self._leader.deleted(lease) if deleted else self._leader.saw(lease),
            me=self._leader.me,
        )
        self._health = Health(self._page, self.alive, self.ready)
        self._watching = False
        # After the reconciler's subscriptions: the memories are reset before the jobs are reconciled.
        self._bus.subscribe(Changed, self._changed)
        self._bus.subscribe(PodEnded, self._ended)
        self._bus.subscribe(LeadChanged, self._lead)

    async def run(self, stop: asyncio.Event) -> None:
        """Run until `stop` is set, or SIGTERM or SIGINT arrives.

        Raises:
            WatchEnded: Kopf ended, or another part ended unexpectedly.
        """
        loop = asyncio.get_running_loop()
        port = await self._health.start(self._options.bind, self._options.metrics_port)
        log.info("metrics and probes on %s:%s", self._options.bind, port)
        stopping = loop.create_task(stop.wait(), name="stop")
        parts: list[asyncio.Task[None]] = []
        watch: asyncio.Task[None] | None = None
        try:
            on_signals(loop, stop)
            crd = loop.create_task(wait_for_crd(self._kube), name="wait for the CRD")
            parts.append(crd)
            await asyncio.wait([stopping, crd], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                return
            crd.result()
            # Before Kopf starts: when Kopf ends, it cancels every task that was created after it.
            parts.append(loop.create_task(self._leader.run(), name="leader"))
            parts.append(loop.create_task(self._verifier.run(), name="verifier"))
            parts.append(loop.create_task(self._collector.run(), name="collector"))
            parts.append(loop.create_task(self._after_kopf(loop, stop), name="signals"))
            watch = loop.create_task(self._watch.run(), name="kopf")
            self._watching = True
            await asyncio.wait([stopping, watch, *parts[1:4]], return_when=asyncio.FIRST_COMPLETED)
            if not stop.is_set():
                self._raise(watch, parts[1:4])
        finally:
            await self._stop(stopping, parts, watch)

    async def _after_kopf(self, loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
        await self._watch.started.wait()
        on_signals(loop, stop)  # Kopf installed its handlers, but the operator's parts must end before Kopf does

    def _raise(self, watch: asyncio.Task[None], parts: list[asyncio.Task[None]]) -> None:
        for task in (watch, *parts):
            if task.done():
                error = None if task.cancelled() else task.exception()
                if task is watch and error is None:
                    return  # Kopf received a signal before the operator's handlers were installed again
                raise WatchEnded(f"{task.get_name()} ended: {error!r}") from error

    async def _stop(
        self, stopping: asyncio.Task[bool], parts: list[asyncio.Task[None]], watch: asyncio.Task[None] | None
    ) -> None:
        self._watching = False
        await self._dispatcher.close()
        await self._poller.close()
        for task in (stopping, *parts):
            task.cancel()
        await asyncio.gather(stopping, *parts, return_exceptions=True)
        await self._leader.release()
        await self._health.stop()
        if watch is not None:
            self._watch.stop()
            await asyncio.gather(watch, return_exceptions=True)
        await self._kube.close()
        await self._lease_kube.close()

    # The events that order the work.

    def _changed(self, event: Changed) -> None:
        if event.after > 0:
            self._dispatcher.mark_after(event.key, event.after)
        elif self._leader.leads():
            self._dispatcher.mark(event.key)

    def _ended(self, event: PodEnded) -> None:
        self._lost_pods.add(event.key)
        if self._leader.leads():
            self._dispatcher.mark(event.key, urgent=True)

    async def _work(self, key: JobKey) -> float | None:
        if self._leader.leads():
            self._lost_pods.discard(key)
        return await self._reconciler(key)

    def _lead(self, event: LeadChanged) -> None:
        leads = event.leads
        self.metrics.leader.set(1 if leads else 0)
        if not leads:
            self.metrics.job.clear()
        if leads and self.cluster.synced:
            for key in self.cluster.jobs():
                self._dispatcher.mark(key, urgent=key in self._lost_pods)
            self._lost_pods &= self.cluster.jobs()

    def _failed(self, key: JobKey, error: Exception) -> None:
        if isinstance(error, KubeError):
            self.metrics.errors.labels(error.kind).inc()
            log.warning("job %s/%s: %s", *key, error)
        else:
            self.metrics.errors.labels("bug").inc()
            log.error("job %s/%s: a fault in the operator itself", *key, exc_info=error)

    # The probes and the metrics.

    async def _page(self) -> bytes:
        return await self.metrics.page(self.cluster.owed())

    def alive(self) -> HealthVerdict:
        """Returns whether the watch receives events."""
        if not self._leader.reached:
            # A restart cannot repair the API server. When it answers again, the watch gets the full time again.
            self.cluster.restart_clock()
            return HealthVerdict(True, "the API server does not answer; waiting for it")
        behind, owed = self._leader.behind(), self.cluster.owed()
        if behind > WATCH_LIMIT:
            return HealthVerdict(False, f"the watch has not shown the Lease's renewal for {behind:.0f} s")
        if owed > WATCH_LIMIT:
            return HealthVerdict(False, f"the watch has not shown a write of this operator for {owed:.0f} s")
        return HealthVerdict(True, "ok")

    def ready(self) -> HealthVerdict:
        """Returns whether all first lists have been read, and the API server answers."""
        if not self._watching:
            return HealthVerdict(False, "starting, or waiting for the CustomResourceDefinition")
        if not self._leader.seen:
            return HealthVerdict(False, "waiting for the first lists")
        if not self._leader.reached:
            return HealthVerdict(False, "the API server does not answer")
        return HealthVerdict(True, "ok: acting" if self._leader.leads() else "ok: another operator acts")


def on_signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set `stop` on SIGTERM and SIGINT."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # Not the main thread (a test), or the system has no such signals: the caller sets `stop`.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            loop.add_signal_handler(number, stop.set)


async def follow_parent(stop: asyncio.Event, parent: int, period: float = 0.5) -> None:
    """Set `stop` once the process `parent` is no longer the parent of this process, because it ended."""
    while os.getppid() == parent:  # noqa: ASYNC110  no event on every system reports the end of a parent
        await asyncio.sleep(period)
    log.warning("the process that started this operator has ended: stopping")
    stop.set()
