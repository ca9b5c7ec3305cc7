"""Protocols of the observers that lifecycles report to. `_report` implements them, and `_pod` connects both.

Neither this room nor one below it imports `_report` (docs/decisions/0080).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from .._coordination import Observer

if TYPE_CHECKING:
    from backstay_rpc.control_pb2 import (
        EvaluatedRequest,
        GradientInfo,
        HeartbeatRequest,
        Peer,
        ProgressReply,
        ProgressRequest,
        Rollback,
        WorkerSeconds,
    )
    from backstay_spec.job_report import CheckpointStatus

    from .._coordination import CoordinatorState
    from .._transport import Pulled
    from .._update import ShardEngine
    from ._worker_protocol import Fate

__all__ = ["JobHistoryObserver", "SecondsObserver", "ServerObserver", "WorkerObserver"]


class SecondsObserver(Protocol):
    """Divides the time of a worker into parts. Each method but the last two ends a part. Thread-safe."""

    def ended(self, part: str) -> None:
        """The time since the previous call belongs to this part, one of `backstay_spec.goodput.MEASURED`."""

    def computed(self) -> None:
        """The time since the previous call is computation of the current contribution."""

    def abandoned(self) -> None:
        """No update will contain the contribution that was computed last, or that is not known."""

    def rolled_back(self, version: int) -> None:
        """The updates from `version` on were discarded."""

    def report(self, saved: int = 0) -> WorkerSeconds:
        """Returns the seconds until now, for a heartbeat; `saved` is the version of the newest complete checkpoint."""

    @property
    def rounded(self) -> list[float]:
        """The seconds until now, for the termination message."""


class WorkerObserver(Protocol):
    """Observes one worker. Only `carried` may be called by several threads."""

    @property
    def seconds(self) -> SecondsObserver:
        """The parts of the time of this process."""

    def measured(self) -> GradientInfo:
        """Returns the fields of a contribution's summary that are measured here, before it is sent."""

    def carried(self, sent: int, received: int) -> None:
        """These bytes of tensors were sent and received."""

    def compiled(self, flops: float | None) -> None:
        """The computation is compiled. `flops` are the operations of one contribution, or None if not known."""

    def computed(self, seconds: float) -> None:
        """A contribution was computed in this time, and its program was compiled before."""

    def began_next(self, wait: Callable[[], object]) -> None:
        """The next contribution was started, and is computed during the exchange of this one.

        Args:
            wait: returns when it is computed; another thread calls it.
        """

    def began_beside(self, wait: Callable[[], object]) -> None:
        """A part of the next contribution is computed during the exchange of this one; `wait`: as in `began_next`."""

    def answered(self, fate: Fate, pulled: Pulled, info: GradientInfo, *, began: float, ended: float) -> None:
        """An exchange ended with an answer.

        Args:
            began, ended: start and end of the exchange, in seconds of `time.monotonic`.
        """

    def lost(self, fate: Fate) -> None:
        """The answer to a contribution was lost, and the contribution is not sent again."""

    def reconnects(self, why: Exception) -> None:
        """The worker connects again."""

    def close(self) -> None:
        """The worker ends."""


class ServerObserver(Protocol):
    """Observes one server, and gives the facts that its answers to calls have. Thread-safe."""

    @property
    def job(self) -> JobHistoryObserver | None:
        """The observer of the whole job; None on other shards than 0."""

    # ---- The shard ----

    def term_began(self, term: int, engine: ShardEngine, version: Callable[[], int]) -> None:
        """The shard continues with this engine; `version` returns how many updates are applied."""

    def shard_stored(self, seconds: float, size: int) -> None:
        """This shard's part of a checkpoint, of `size` bytes, was written."""

    def ticked(self, live_workers: int, staged: int, bound: int) -> None:
        """About a second has passed, in the main thread.

        Args:
            staged: the most bytes of contributions in memory in this second; `bound`: the most that may be.
        """

    def folder_lost(self) -> None:
        """The checkpoint folder belongs to another server, or failed: nothing more is recorded there."""

    # ---- Calls ----

    def joined(self) -> None:
        """A pod joined that had not joined before."""

    def beat(self, request: HeartbeatRequest) -> None:
        """A heartbeat of a worker or evaluator."""

    def left(self, peer: Peer) -> None:
        """A worker or evaluator left."""

    def copies(self, rank: int) -> Sequence[bytes]:
        """Returns the spans of this server that the worker `rank` keeps for the next server."""

    def add_spans(self, peer: Peer, spans: bytes) -> None:
        """Another server, or a peer that leaves, sent its spans, a serialized `Spans`."""

    def progress(self, request: ProgressRequest, reply: ProgressReply, version: int) -> None:
        """The operator called; complete the reply with what is recorded. `version` updates are applied."""

    # ---- The end ----

    def stopping(self) -> None:
        """The server received SIGTERM."""

    def ending(self) -> None:
        """The main thread waits for others from now on, and `ticked` is not called."""

    def ended(self, message: Mapping[str, Any]) -> None:
        """The job has ended; this is the termination message."""

    def leaving(self) -> None:
        """The server leaves. Send its spans to shard 0's server now, while the link is open."""

    def close(self) -> None:
        """The server ends, after everything else. A slow folder may cost seconds."""


class JobHistoryObserver(Observer, Protocol):
    """Observes the decisions of the coordinator on shard 0, and gives the facts that answers and manifests have."""

    # ---- The start of a history ----

    def takes_over(self, leases: Sequence[str]) -> None:
        """The server took the checkpoint folder over; these leases were not renewed."""

    def continues(self, changes: Sequence[str], examples: int | None) -> None:
        """The history continues another run.

        Args:
            changes: how the two runs differ, as text.
            examples: number of examples of each contribution of that run; None: unknown.
        """

    def start(
        self,
        state: CoordinatorState,
        checkpoint: str,
        checkpoint_step: int,
        infos: Sequence[GradientInfo] = (),
        checkpoint_time: float = 0.0,
    ) -> None:
        """The history starts here.

        Args:
            checkpoint: the URI of the newest checkpoint; empty: there is none.
            checkpoint_time: when it was stored, in Unix time; 0: unknown.
            infos: about the contributions of the last update, if known.
        """

    def stop_with(self, stop: Callable[[], None]) -> None:
        """Call `stop` when an evaluation ends training early."""

    # ---- Facts ----

    def evaluation(self) -> tuple[int | None, dict[str, float]]:
        """Returns the step and the metrics of the newest evaluation; before the first, None and no metrics."""

    def evaluation_of(self, step: int) -> dict[str, float]:
        """Returns the result of the evaluation of this step; empty if it failed or is not the newest one."""

    def examples(self) -> int | None:
        """Returns the examples of each contribution of the newest update, or None if they differ or there are none."""

    def newest_checkpoint(self) -> CheckpointStatus:
        """Returns the newest complete checkpoint; of step 0 and without a URI before the first."""

    def last_report(self, state: CoordinatorState, start: Rollback | None = None) -> dict[str, Any]:
        """Returns the last report, as rows of the termination message; the arguments are those of `fill`."""

    # ---- Calls ----

    def evaluation_begins(self, request: EvaluatedRequest) -> str:
        """Record that a pod begins an evaluation; returns why it must not begin, or an empty text."""

    def evaluated(self, request: EvaluatedRequest) -> None:
        """The result of an evaluation, by an evaluator or worker 0."""

    def fill(
        self,
        now: float,
        reply: ProgressReply,
        state: CoordinatorState,
        stall_seconds: float,
        start: Rollback | None = None,
    ) -> None:
        """Complete the reply to the operator; `start` is where the term of `state` began."""

    def close(self) -> None:
        """Write the remaining reports, for a limited time."""
