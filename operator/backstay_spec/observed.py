"""Defines the planner's input, which the operator observed, so that `plan` needs no clock, no cluster and no memory.

The operator fills one `Observed` for each job from its indices and from the answers of the job's servers (O8). Its own
writes are laid over the indices. A created object is in it before the watch reports it. A deleted pod has its
deletionTimestamp. Raw manifests are passed unchanged; the planner reads the few fields that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias

from backstay_spec.goodput import SecondsReport
from backstay_spec.job_report import JobReport
from backstay_spec.names import Slot

Manifest: TypeAlias = Mapping[str, Any]

#: Reason of a refusal: the pod was not sent to the API server, because it refused one that must come before it.
HELD: Final = "HeldBack"
#: The same, because the queue must first admit other pods of the job, or still counts an old one.
IN_QUEUE: Final = "PodHeldBack"
UNCOUNTED: Final = frozenset({HELD, IN_QUEUE, "InternalError", "TooManyRequests", "Unauthorized"})
"""The reasons of a refusal that does not count against a pod's time to start. Another pod must come first, or the API
server or a webhook of the cluster does not work now."""
TAKEN: Final = "AlreadyExists"
"""The reason of a refusal if an object of another owner has the name."""


@dataclass(frozen=True, slots=True)
class Stalled:
    """A worker that the servers consider hung, because it sends no heartbeats, or no contribution for too long."""

    rank: int
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A report about a pod that died.

    Attributes:
        slot: the slot, such as ``worker-3``.
        incarnation: the pod's incarnation.
        uri: where the report is.
    """

    slot: str
    incarnation: int
    uri: str


@dataclass(frozen=True, slots=True)
class Progress:
    """The newest answers of a job's servers on the control channel (O8), combined from one round of calls.

    Attributes:
        taken: when the answers came, aware, of the operator's clock.
        reached: the shards whose server answered.
        coordinator: the incarnation of the coordinator that answered; 0: none did.
        report: the state of training that the coordinator reported.
        unreadable: why a part of the coordinator's report could not be read, and was ignored; empty: all could.
        in_sync: shard -> the incarnation of the standby that is in sync, by the last answer of its server.
        worker_seconds: what workers have measured, by rank and incarnation.
        last: the newest term and step that a coordinator reported, in this round or an earlier one.
        step_before_term: the last step that was reported in the term before the current one.
        stalled: the workers that hang.
        contributed: rank -> the incarnation that has handed in a gradient: its crashes do not back off (O4).
        beating: rank -> the incarnation whose heartbeats a server receives.
        death_reports: about pods that died, as far as this coordinator stored them.
        done: the last step's checkpoint is whole, and the pods are leaving.
    """

    taken: datetime
    reached: frozenset[int] = frozenset()
    coordinator: int = 0
    report: JobReport = field(default_factory=JobReport)
    unreadable: str = ""
    in_sync: Mapping[int, int] = field(default_factory=dict)
    stalled: tuple[Stalled, ...] = ()
    contributed: Mapping[int, int] = field(default_factory=dict)
    beating: Mapping[int, int] = field(default_factory=dict)
    worker_seconds: Mapping[tuple[int, int], SecondsReport] = field(default_factory=dict)
    last: tuple[int, int] | None = None
    step_before_term: int | None = None
    death_reports: tuple[StoredReport, ...] = ()
    done: bool = False

    def followed(self, shard: int, serving: int) -> bool:
        """Returns whether the shard's server, of incarnation `serving`, last reported that a standby has its complete
        state."""
        return self.in_sync.get(shard, 0) > serving


@dataclass(frozen=True, slots=True)
class Spent:
    """The seconds of the job's worker pods until now, by `goodput.PARTS`.

    Attributes:
        seconds: the seconds of all pods, and of slots without a pod.
        gone: the seconds of pods that no longer exist, and of slots without a pod.
        until: slots without a pod are counted up to here.
    """

    seconds: Mapping[str, float]
    gone: Mapping[str, float]
    until: datetime


@dataclass(frozen=True, slots=True)
class Updates:
    """The time at which this operator last observed a change of the job's step.

    Attributes:
        step: the newest step.
        at: when it was first seen, aware.
        seconds: seconds between the last two updates; None: not known yet.
        coordinator: the incarnation that reported the step.
        began: when this coordinator reported another step than its first one; None: not yet.
        changed: whether this operator observed another step before.
    """

    step: int
    at: datetime
    seconds: float | None = None
    coordinator: int = 0
    began: datetime | None = None
    changed: bool = False

    def after(self, step: int, at: datetime, coordinator: int = 0) -> Updates:
        """Returns the record after the coordinator of this incarnation reported `step`."""
        same = coordinator == self.coordinator
        began = (self.began or (at if step != self.step else None)) if same else None
        if step == self.step:
            return replace(self, coordinator=coordinator, began=began)
        # After a rollback, the time between two updates is not known again.
        seconds = self.seconds if step < self.step else (at - self.at).total_seconds() / (step - self.step)
        return Updates(step, at, seconds, coordinator, began, changed=True)


@dataclass(frozen=True, slots=True)
class Silence:
    """A server's pod that did not answer the newest calls of this operator.

    A call counts only if the operator held the Lease, sent the call in time, and was neither paused nor late during the
    call. An answer ends the silence, and so does a long pause of the operator.

    Attributes:
        since: when the pod answered last; of one that never did, when it was called first.
        calls: progress calls (1.5 s each, one every 2 s) in a row without an answer.
        long_calls: health requests of 8 s in a row without an answer: a process that is starved answers them late.
    """

    since: datetime
    calls: int = 0
    long_calls: int = 0


@dataclass(frozen=True, slots=True)
class Contact:
    """The result of this operator's newest round of calls to a job's pods.

    Attributes:
        taken: when the round ended, aware.
        answered_at: uid of a server's pod (also a standby's) -> the time of its last answer.
        silent: uid of a server's pod -> its silence; a pod that answered the newest call is not in it.
        reachable: shards whose active server has answered a worker recently, as that worker reports.
        unreachable: shards whose active server leaves a worker's heartbeats unanswered, as that worker reports.
        hung_workers: uids of workers' pods whose heartbeats have stopped, and which left a health request of several
            seconds unanswered.
    """

    taken: datetime
    answered_at: Mapping[str, datetime] = field(default_factory=dict)
    silent: Mapping[str, Silence] = field(default_factory=dict)
    reachable: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()
    hung_workers: frozenset[str] = frozenset()

    def answers(self, uid: str) -> bool:
        """Returns whether the pod answered the newest call."""
        return uid in self.answered_at and uid not in self.silent


@dataclass(frozen=True, slots=True)
class RefusedCreate:
    """The API server's refusal of a create; an object of this job certainly does not exist.

    Attributes:
        reason: `reason` of the Status object, such as ``Invalid``, ``Forbidden``, ``AlreadyExists`` (the name is taken
            by an object of another owner). After ``Invalid`` and ``BadRequest``, another attempt would fail too.
        message: the `message` of the answer.
        at: the time of the refusal; the planner tries again `planner.creating.REFUSED_RETRY` later.
        since: when it was refused for that reason for the first time, before the tries since then; None: at `at`.
    """

    reason: str
    message: str
    at: datetime
    since: datetime | None = None

    def after(self, before: RefusedCreate | None) -> RefusedCreate:
        """Returns the refusal, as the continuation of `before` if both have the same reason."""
        if before is None or before.reason != self.reason:
            return self
        return replace(self, since=before.since or before.at)


@dataclass(frozen=True, slots=True)
class Observed:
    """The known objects of one job, and the answers of its servers.

    Attributes:
        pods, services, network_policies: raw manifests of every object in the job's namespace with the label
            ``backstay.dev/job=<its name>``. The planner ignores those of other owners.
        secret_ensured: this operator process created the job's Secret, or the API server answered 409. Secrets are
            never read (O7).
        secret_at: when it last did so.
        secret_deleted: this operator process deleted the job's Secret, or the API server answered 404.
        progress: the newest answers of the servers; None until there were any.
        contact: the newest round of calls to the servers; None until there was one since this operator took over.
        updates: when the step last changed; None until the coordinator reported a step to this operator.
        spent: the seconds of the worker pods by part; None: no worker pod had a node yet.
        gated: uid of a pod -> until when it had scheduling gates, as far as this operator observed. For a pod that
            has them, this is the time of the observation.
        witnessed: names of pods that this process has observed: if one of them is missing, it did exist.
        vacant: a slot of which this process has observed a living pod, and now observes none -> since when.
        missing: names of recorded pods that a live GET did not find, in answer to `actions.LookUpPod`.
        refused: name of an object -> why its last create was refused; dropped once a create succeeds.
        begun: when this operator first observed the job.
        status_written: when this process last wrote the job's status; None when it did not. Paces what progress
            alone changes (O8).
    """

    pods: tuple[Manifest, ...] = ()
    services: tuple[Manifest, ...] = ()
    network_policies: tuple[Manifest, ...] = ()
    secret_ensured: bool = False
    secret_at: datetime | None = None
    secret_deleted: bool = False
    progress: Progress | None = None
    contact: Contact | None = None
    updates: Updates | None = None
    spent: Spent | None = None
    gated: Mapping[str, datetime] = field(default_factory=dict)
    witnessed: frozenset[str] = frozenset()
    vacant: Mapping[Slot, datetime] = field(default_factory=dict)
    missing: frozenset[str] = frozenset()
    refused: Mapping[str, RefusedCreate] = field(default_factory=dict)
    begun: datetime | None = None
    status_written: datetime | None = None


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The operator's settings that the planner needs.

    Attributes:
        operator_namespace: where the operator runs; its calls pass each job's NetworkPolicy.
        operator_labels: labels that the operator's pods carry there; empty: any pod of that namespace.
        log_format: how pods log, ``text`` or ``json``.
        first_wait: how long a slot waits after the first of several crashes before its pods worked; each further wait
            is twice as long (O4).
    """

    operator_namespace: str
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    log_format: str = "text"
    first_wait: timedelta = timedelta(seconds=1)
