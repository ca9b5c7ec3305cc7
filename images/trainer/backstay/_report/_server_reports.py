"""Reports one server by its metrics, its pages `/status`, `/curve` and `/trace`, and, on shard 0, the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from backstay_rpc.control_pb2 import HeartbeatRequest, Peer, ProgressReply, ProgressRequest

from .. import _instrument
from .._checkpoint import PosixFolder
from .._coordination import MODES
from ._event_files import EventFiles
from ._job import CurveRecord, JobObserver
from ._learning_rate import LearningRate
from ._reports import FLUSH_REMOTE_SECONDS, FLUSH_SECONDS, Reports
from ._status_page import StatusPage
from ._timeline import Tracing

if TYPE_CHECKING:
    from .._roles import ServerContext
    from .._update import ShardEngine
    from ._http import HttpPort
    from ._metrics import PodMetrics

__all__ = ["ServerReports"]


class ServerReports:
    """A `ServerObserver`. Thread-safe.

    Attributes:
        job: the observer of the whole job; None on other shards than 0.
    """

    def __init__(self, context: ServerContext, metrics: PodMetrics) -> None:
        """On shard 0, reports to the script and TensorBoard begin; nothing is read or written yet."""
        environment = context.environment
        self._own = Peer(role=environment.role, index=environment.index)
        self._metrics = metrics
        self._learning_rate = LearningRate(metrics)
        self.job = None if context.link is not None else _job_observer(context, metrics)
        self._page = StatusPage(self.job)
        self._tracing = Tracing(environment, context.peer, context.store, context.link)
        server = f"{environment.short_uid}-{environment.incarnation}"
        self._curve = None if self.job is None else CurveRecord(self.job.curve, self._tracing.records, server)

    def start(self, port: HttpPort) -> None:
        """Show the pages on this port, and observe the updates of the shard."""
        _instrument.observe("apply", self._metrics.apply_seconds.observe)
        port.status = self._page.page
        if self.job is not None:
            port.curve = self.job.curve.page
        self._tracing.serve(port)

    # ---- The shard ----

    def term_began(self, term: int, engine: ShardEngine, version: Callable[[], int]) -> None:
        """See `ServerObserver`."""
        self._metrics.term.set(term)
        self._learning_rate.watch(engine)
        self._metrics.step.set_function(version)

    def shard_stored(self, seconds: float, size: int) -> None:
        """See `ServerObserver`."""
        self._metrics.checkpoint_seconds.observe(seconds)
        self._metrics.checkpoint_bytes.inc(size)

    def ticked(self, live_workers: int, staged: int, bound: int) -> None:
        """See `ServerObserver`."""
        self._metrics.staged_bytes.set(staged)
        self._metrics.staged_bytes_limit.set(bound)
        self._metrics.live_workers.set(live_workers)
        self._learning_rate.tick()
        self._tracing.tick()
        if self._curve is not None:
            self._curve.tick()

    def folder_lost(self) -> None:
        """See `ServerObserver`."""
        self._tracing.records.lost()

    # ---- Calls ----

    def joined(self) -> None:
        """See `ServerObserver`."""
        self._metrics.joins.inc()

    def beat(self, request: HeartbeatRequest) -> None:
        """See `ServerObserver`."""
        self._page.beat(request)
        self._tracing.add_spans(request.peer, request.spans)
        for spans in request.kept:
            self._tracing.add_spans(self._own, spans)
        if request.HasField("hang_report"):
            self._tracing.black_box.hangs(request.peer, request.hang_report)

    def left(self, peer: Peer) -> None:
        """See `ServerObserver`."""
        self._page.left(peer)

    def copies(self, rank: int) -> list[bytes]:
        """See `ServerObserver`."""
        return self._tracing.copies(rank)

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """See `ServerObserver`."""
        self._tracing.add_spans(peer, spans)

    def progress(self, request: ProgressRequest, reply: ProgressReply, version: int) -> None:
        """See `ServerObserver`."""
        black_box = self._tracing.black_box
        self._tracing.replaced(request.incarnations)
        black_box.record(request.record, request.record_id)
        black_box.spent(request.job_seconds, version)
        black_box.fill(reply)

    # ---- The end ----

    def stopping(self) -> None:
        """See `ServerObserver`. If the main thread hangs, its stack is stored."""
        self._tracing.stopping()

    def ending(self) -> None:
        """See `ServerObserver`."""
        self._tracing.ending()

    def ended(self, message: Mapping[str, Any]) -> None:
        """See `ServerObserver`."""
        self._tracing.black_box.ended(message)

    def leaving(self) -> None:
        """See `ServerObserver`."""
        self._tracing.leaving()

    def close(self) -> None:
        """See `ServerObserver`."""
        if self._curve is not None:
            self._curve.store()
        self._tracing.close()


def _job_observer(context: ServerContext, metrics: PodMetrics) -> JobObserver:
    environment, script = context.environment, context.script
    config, mode = environment.config, MODES[environment.config.mode]
    tree = context.plan.partition.tree
    observer = JobObserver(
        context.peers, metrics, script.steps, script.log_every, tree, batches=script.batches_of_update
    )
    observer.watch_waits(config.shards, lambda ranks: mode.quorum(config.backups, ranks), sync=mode.waits_for_ranks())
    observer.reports = _reports(context)
    return observer


def _reports(context: ServerContext) -> Reports:
    environment, script, store = context.environment, context.script, context.store
    files = None
    if store is not None:
        files = EventFiles(store.folder, f"{environment.job}.{environment.uid or 0}.{environment.incarnation}")
    remote = store is not None and not isinstance(store.folder, PosixFolder)
    seconds = FLUSH_REMOTE_SECONDS if remote else FLUSH_SECONDS
    return Reports(script.on_update, files, script.stop_when, flush_seconds=seconds)
