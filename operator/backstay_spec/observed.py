"""The planner's input: what the operator has observed, so that `plan` needs no clock, no cluster and no memory.

The operator fills one `Observed` for each job from its indices and from the answers of the job's servers (O8). Its own
writes are laid over the indices. A created object is in it before the watch reports it. A deleted pod has its
deletionTimestamp. Raw manifests are passed unchanged; the planner reads the few fields that it needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, TypeAlias

from backstay_spec.goodput import Report

Manifest: TypeAlias = Mapping[str, Any]

#: Reason of a refusal: the pod was not sent to the API server, because it refused one that must come before it.
HELD: Final = "HeldBack"


@dataclass(frozen=True, slots=True)
class Stalled:
    """A worker that the servers consider hung: it sends no heartbeats, or no contribution for too long."""

    rank: int
    incarnation: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TermStart:
    """Where the coordinator's term began.

    Attributes:
        term: the term.
        step: its first version.
        checkpoint: the URI of that version's checkpoint; empty: the initial parameters.
        redone: updates of the previous term after `step`, as far as this coordinator applied them itself.
        changes: settings that differ from those of the run that stored the checkpoint, as text.
        taken_over: leases of the checkpoint folder that were not renewed, so that this run took the folder over.
    """

    term: int
    step: int
    checkpoint: str = ""
    redone: int = 0
    changes: tuple[str, ...] = ()
    taken_over: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WaitedFor:
    """A rank that updates waited for after all others that they needed.

    Attributes:
        rank: the rank.
        shard: the server that received its contributions much later than the others; None: there was no such server.
        part: the part of the rank's step, a key of `contract.SLOW_PARTS`.
        seconds: added up over the updates.
        updates: the number of updates.
    """

    rank: int
    shard: int | None
    part: str
    seconds: float
    updates: int


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
        in_sync: shard -> the incarnation of the standby that is in sync, by the last answer of its server.
        term, step, loss, examples_per_second, metrics: the values that the coordinator reported; None where its answer
            has none.
        goal_steps: the updates that training ends with.
        local_steps: the number of local steps of each worker between two updates; None: workers make no local steps.
        updates_per_second: the recent rate; None: not known yet.
        waited_for: the ranks that the updates of the last minutes waited for, the longest first.
        waits: what the next update waits for, where it has waited for long.
        ending: after the last update, what the end of the job waits for; empty: there will be updates.
        train_metrics: what `loss` returned beside the loss, mean of the newest update.
        evaluated_step: the version that `metrics` or `evaluation_error` belongs to; None: there was no evaluation.
        evaluation_error: why the newest evaluation returned no metrics; empty when it did.
        untrained_leaves: parameters whose gradient was zero in the first updates of every worker.
        mistakes_of_batches: the reasons of events about `batches`, such as `SameBatches`.
        term_start: where `term` began.
        worker_seconds: what workers have measured, by rank and incarnation.
        redone: updates that rollbacks have discarded so far.
        last: the newest term and step that a coordinator reported, in this round or an earlier one.
        step_before_term: the last step that was reported in the term before `term`.
        world: ranks in force; None while the coordinator has not been reached.
        stalled: the workers that hang.
        contributed: rank -> the incarnation that has handed in a gradient: its crashes do not back off (O4).
        beating: rank -> the incarnation whose heartbeats a server receives.
        checkpoint_step, checkpoint_uri: the newest complete checkpoint.
        checkpoint_error: why the newest attempt at one failed; empty when it did not.
        reports: about pods that died, as far as this coordinator stored them.
        done: the last step's checkpoint is whole, and the pods are leaving.
    """

    taken: datetime
    reached: frozenset[int] = frozenset()
    coordinator: int = 0
    in_sync: Mapping[int, int] = field(default_factory=dict)
    term: int | None = None
    step: int | None = None
    loss: float | None = None
    examples_per_second: float | None = None
    goal_steps: int | None = None
    local_steps: int | None = None
    updates_per_second: float | None = None
    waited_for: tuple[WaitedFor, ...] = ()
    waits: str = ""
    ending: str = ""
    world: int | None = None
    stalled: tuple[Stalled, ...] = ()
    contributed: Mapping[int, int] = field(default_factory=dict)
    beating: Mapping[int, int] = field(default_factory=dict)
    checkpoint_step: int | None = None
    checkpoint_uri: str = ""
    checkpoint_error: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    train_metrics: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[str, float] = field(default_factory=dict)
    evaluated_step: int | None = None
    evaluation_error: str = ""
    untrained_leaves: tuple[str, ...] = ()
    mistakes_of_batches: tuple[str, ...] = ()
    term_start: TermStart | None = None
    worker_seconds: Mapping[tuple[int, int], Report] = field(default_factory=dict)
    redone: int = 0
    last: tuple[int, int] | None = None
    step_before_term: int | None = None
    reports: tuple[StoredReport, ...] = ()
    done: bool = False

    def followed(self, shard: int, serving: int) -> bool:
        """Whether the shard's server, of incarnation `serving`, last reported that a standby has its complete state."""
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
    """

    step: int
    at: datetime
    seconds: float | None = None
    coordinator: int = 0
    began: datetime | None = None

    def after(self, step: int, at: datetime, coordinator: int = 0) -> Updates:
        """The record after the coordinator of this incarnation reported `step`."""
        same = coordinator == self.coordinator
        began = (self.began or (at if step != self.step else None)) if same else None
        if step == self.step:
            return replace(self, coordinator=coordinator, began=began)
        # After a rollback, the time between two updates is not known again.
        seconds = self.seconds if step < self.step else (at - self.at).total_seconds() / (step - self.step)
        return Updates(step, at, seconds, coordinator, began)


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
        """Whether the pod answered the newest call."""
        return uid in self.answered_at and uid not in self.silent


@dataclass(frozen=True, slots=True)
class Refusal:
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

    def after(self, before: Refusal | None) -> Refusal:
        """The refusal, as the continuation of `before` if both have the same reason."""
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
        gated: uid of a pod -> when this operator last observed scheduling gates on it.
        witnessed: names of pods that this process has observed: if one of them is missing, it did exist.
        missing: names of recorded pods that a live GET did not find, in answer to `actions.LookUpPod`.
        refused: name of an object -> why its last create was refused; dropped once a create succeeds.
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
    missing: frozenset[str] = frozenset()
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    status_written: datetime | None = None


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """The operator's settings that the planner needs.

    Attributes:
        operator_namespace: where the operator runs; its calls pass each job's NetworkPolicy.
        operator_labels: labels that the operator's pods carry there; empty: any pod of that namespace.
        log_format: how pods log, ``text`` or ``json``.
    """

    operator_namespace: str
    operator_labels: Mapping[str, str] = field(default_factory=dict)
    log_format: str = "text"
