"""The places of a running job: which pod of each counts, whether it lives, and what comes after it (O2, O4).

For each place the newest incarnation on record is the one that counts. Its pod lives, or is dead, or is not seen:

- dead: it is counted once, by the very status that records the next incarnation, or (while the place backs off) its
  `notBefore`;
- not seen, though on record: it was deleted behind our back, or the operator died between writing the status and
  creating it. A live GET tells; if it is not there it is dead, and the next incarnation takes its place, because a pod
  that was force-deleted may still run somewhere. For the counters, what this operator has seen tells the two apart,
  and after its restart the condition PodsCreated;
- not seen because the API server refused it: the same incarnation is tried again.

With standbys a shard has two pods of incarnations of its own. `status.active` says which one serves, and that is the
one that counts; a newer one is its standby. When the one that serves dies and the standby runs, the standby serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from backstay_spec import budgets, contract, names, status
from backstay_spec.actions import Death, DeletePod, LookUpPod
from backstay_spec.causes import (
    Blocked,
    Cause,
    Obstacle,
    Verdict,
    obstacle_of,
    outcome_of,
    refusal_obstacle,
    terminated_state,
    verdict_of,
)
from backstay_spec.events import warning
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Observed, Progress
from backstay_spec.plan_draft import Draft
from backstay_spec.plan_pods import PodView, created_at, ended_at, has_worked, silent_since, unready_since
from backstay_spec.types import TrainingJob

REFUSED_RETRY: Final = timedelta(seconds=5)
LOOK_UP_RETRY: Final = timedelta(seconds=5)
# A worker that exits 0 may be the first sign that the job is done; this long the servers have to say so.
EXIT_VERDICT: Final = timedelta(seconds=10)
# The container of a hung pod ignores SIGTERM; nothing is gained by waiting for it.
STALLED_GRACE: Final = 1
# A server that is not Ready any more and has answered nobody for so long is hung.
SILENT: Final = timedelta(seconds=10)
UNHEARD: Final = timedelta(seconds=60)
NOT_JOINED: Final = "it runs, but has not joined the others: does the script hang before backstay.train?"


@dataclass(frozen=True, slots=True)
class Birth:
    """A pod to create."""

    slot: Slot
    incarnation: int
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Hindered:
    """A place whose pod does not start, and since when."""

    slot: Slot
    obstacle: Obstacle
    since: datetime


def desired_slots(job: TrainingJob) -> list[Slot]:
    """The places that a running job has, servers first."""
    spec = job.spec
    slots = [Slot(contract.ROLE_SERVER, i) for i in range(spec.parameter_servers.replicas)]
    slots += [Slot(contract.ROLE_WORKER, i) for i in range(spec.workers.replicas)]
    if spec.evaluator is not None:
        slots.append(Slot(contract.ROLE_EVALUATOR, 0))
    return slots


def record_seen(draft: Draft) -> None:
    """Never fall behind what exists: a status that was lost (a job restored from a backup) must not reuse a token."""
    for slot, pods in draft.pods.items():
        newest = pods[-1].incarnation
        if newest > draft.incarnations.get(slot.key, 0):
            draft.incarnations[slot.key] = newest


def recorded_incarnation(draft: Draft, slot: Slot) -> int:
    """The incarnation on record that counts: the newest one, or of servers with standbys the one that serves."""
    return draft.active.get(slot.key) or draft.incarnations.get(slot.key, 0)


def newest_pod(draft: Draft, slot: Slot) -> PodView | None:
    """The pod of the incarnation on record that counts, if it is seen."""
    recorded = recorded_incarnation(draft, slot)
    return next((p for p in draft.pods.get(slot, ()) if p.incarnation == recorded), None)


def serving_incarnation(draft: Draft, shard: int) -> int:
    """The incarnation that a shard's Service selects; 1 before there was any."""
    return max(1, recorded_incarnation(draft, Slot(contract.ROLE_SERVER, shard)))


class Slots:
    """Judges the places of one job, one after the other.

    Attributes:
        births: the pods to create, their incarnations recorded in the draft.
        hindered: the places whose pods do not start.
    """

    def __init__(self, draft: Draft, job: TrainingJob, observed: Observed, *, can_create: bool) -> None:
        self.draft = draft
        self.job = job
        self.observed = observed
        self.progress: Progress | None = observed.progress
        self.can_create = can_create
        self.standbys = job.spec.parameter_servers.standbys > 0
        if not self.standbys:
            draft.active.clear()
        self.births: list[Birth] = []
        self.hindered: list[Hindered] = []
        self.refused = False

    def judge(self, slot: Slot) -> None:
        """Decide about one place that the job has."""
        draft = self.draft
        if self.standbys and slot.role == contract.ROLE_SERVER:
            self._promote(slot)
        recorded = recorded_incarnation(draft, slot)
        pod = newest_pod(draft, slot)
        waiting = draft.backoff.get(slot.key)
        backs_off = waiting is not None and waiting.not_before is not None
        outlived = self._outlived_suspension(slot)
        if pod is not None and pod.alive and not backs_off and not outlived:
            self._judge_living(slot, pod)
        elif not self.can_create:
            # Whatever died is judged when it can be replaced: the two go into one status.
            return
        elif recorded == 0 or outlived or (not self._was_desired(slot) and not self._refusal(slot, pod)):
            self._bear(slot, None)
        elif waiting is not None and waiting.not_before is not None:
            self._judge_waiting(slot, pod, waiting.not_before)
        elif pod is not None:
            self._judge_dead(slot, pod)
        else:
            self._judge_unseen(slot, recorded)
        if self.standbys and slot.role == contract.ROLE_SERVER and not draft.finished():
            self._judge_standby(slot)

    def _standby_of(self, slot: Slot) -> PodView | None:
        """The newest pod of a shard that is newer than the one that serves."""
        pods = self.draft.pods.get(slot, ())
        serving = recorded_incarnation(self.draft, slot)
        return pods[-1] if pods and pods[-1].incarnation > serving else None

    def _promote(self, slot: Slot) -> None:
        """Let the standby serve, if the server that does is dead and the standby runs.

        The status that says so is written before the Service is patched and before any server is told, so an operator
        that dies in between ends what it began.
        """
        draft = self.draft
        if not self.can_create or slot.key not in draft.active or self._outlived_suspension(slot):
            return
        serving, name = newest_pod(draft, slot), self._name(slot, draft.active[slot.key])
        if serving is None and name not in self.observed.missing:
            return  # it is looked up first
        if serving is not None and (serving.alive or self._left_in_order(slot, serving)):
            return
        if serving is not None and outcome_of(serving.raw) is not None:
            return  # it has said how the job ends
        gone = Verdict(Cause.VANISHED, "it is gone without a trace")
        self._hand_over(slot, name, gone if serving is None else verdict_of(serving.raw))

    def _hand_over(self, slot: Slot, name: str, verdict: Verdict) -> bool:
        """Count the server that served, and let the standby serve. False: there is none that runs."""
        draft = self.draft
        standby = self._standby_of(slot) if slot.key in draft.active else None
        if standby is None or not standby.alive or not standby.started:
            return False
        charged = verdict.cause.charged
        spent = draft.restarts.get(ROLE_OF_LABEL[slot.role], 0)
        waited = draft.backoff.get(slot.key)
        counted = waited is not None and waited.not_before is not None
        if charged and not counted and spent >= budgets.max_restarts(self.job.spec, slot.role):
            return False  # the usual judgement ends the job
        draft.backoff.pop(slot.key, None)
        before, draft.active[slot.key] = draft.active[slot.key], standby.incarnation
        if not counted:
            self._count(slot, before, name, verdict, charged=charged)
        draft.events.append(
            warning(verdict.cause, f"{slot.text} (pod {name}) died: {verdict.text}; its standby {standby.name} serves")
        )
        return True

    def _judge_standby(self, slot: Slot) -> None:
        """See to it that a shard whose server lives, or is being made, has a standby."""
        draft = self.draft
        if not self.can_create or slot.key not in draft.active:
            return
        waiting = draft.backoff.get(slot.key)
        if waiting is not None and waiting.not_before is not None:
            return
        serving, newest = draft.active[slot.key], draft.incarnations.get(slot.key, 0)
        standby = self._standby_of(slot)
        if newest <= serving or any(birth.slot == slot and birth.incarnation == serving for birth in self.births):
            self._bear_standby(slot, None)
        elif standby is not None and standby.incarnation == newest:
            if not standby.alive:
                self._lose_standby(slot, newest, standby.name, verdict_of(standby.raw))
            elif not standby.ready and (obstacle := obstacle_of(standby.raw)) is not None:
                self.hindered.append(Hindered(slot, obstacle, created_at(standby) or draft.now))
        elif any(birth.slot == slot for birth in self.births):
            return
        elif self._name(slot, newest) in self.observed.missing:
            self._bear_standby(slot, None)
        elif (refusal := self.observed.refused.get(self._name(slot, newest))) is not None:
            if draft.now >= refusal.at + REFUSED_RETRY:
                self.births.append(Birth(slot, newest))
            else:
                draft.wake_at(refusal.at + REFUSED_RETRY)
        else:
            draft.actions.append(LookUpPod(self._name(slot, newest)))
            draft.wake_at(draft.now + LOOK_UP_RETRY)

    def _lose_standby(self, slot: Slot, incarnation: int, name: str, verdict: Verdict) -> None:
        """A standby is charged and replaced as any server; where the budget is spent, training goes on without one."""
        role = ROLE_OF_LABEL[slot.role]
        if self._left_in_order(slot, self.draft.pods[slot][-1]):
            return
        if verdict.cause.charged and self.draft.restarts.get(role, 0) >= budgets.max_restarts(self.job.spec, slot.role):
            return
        self._count(slot, incarnation, name, verdict, charged=verdict.cause.charged)
        self._bear_standby(slot, verdict.cause)
        self._tell(slot, name, verdict, None)

    def _bear_standby(self, slot: Slot, cause: Cause | None) -> None:
        incarnation = self.draft.incarnations[slot.key] + 1
        self.draft.incarnations[slot.key] = incarnation
        self.births.append(Birth(slot, incarnation, cause))

    def _was_desired(self, slot: Slot) -> bool:
        """Whether the last status asked for this place: if not, its old pods were deleted by us, not lost."""
        role = self.draft.old.roles.get(ROLE_OF_LABEL[slot.role])
        return role is not None and slot.index < role.desired

    def _outlived_suspension(self, slot: Slot) -> bool:
        """Whether the job resumes: a pod that still lives was made from a spec that may have been edited since."""
        role = self.draft.old.roles.get(ROLE_OF_LABEL[slot.role])
        return status.SUSPENDED in self.draft.conditions and (role is None or role.desired == 0)

    def _refusal(self, slot: Slot, pod: PodView | None) -> bool:
        return pod is None and self._name(slot, recorded_incarnation(self.draft, slot)) in self.observed.refused

    def _name(self, slot: Slot, incarnation: int) -> str:
        return names.pod_name(self.draft.meta.name, self.draft.meta.uid, slot, incarnation)

    def _judge_living(self, slot: Slot, pod: PodView) -> None:
        for stalled in self.progress.stalled if self.progress is not None else ():
            if (slot.role, slot.index, pod.incarnation) == (contract.ROLE_WORKER, stalled.rank, stalled.incarnation):
                if self.can_create:
                    self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, Cause.STALLED))
                    self._die(slot, pod, Verdict(Cause.STALLED, stalled.reason or "it hangs"))
                return
        if slot.key in self.draft.backoff and has_worked(pod, self.progress):
            del self.draft.backoff[slot.key]
        obstacle = None if pod.ready else obstacle_of(pod.raw)
        if obstacle is None:
            self._judge_silence(slot, pod)
            return
        self.hindered.append(Hindered(slot, obstacle, created_at(pod) or self.draft.now))
        if obstacle.blocked.permanent:
            self.draft.fail(obstacle.blocked, f"{slot.text} (pod {pod.name}) cannot start: {obstacle.text}")

    def _judge_silence(self, slot: Slot, pod: PodView) -> None:
        """A pod that runs and never joins, because its script hangs before `train`, must not be waited for for ever
        (T8). Before the first update that ends the job; later a replacement is worth trying."""
        since = silent_since(pod)
        if since is None:
            if slot.role == contract.ROLE_SERVER:
                self._judge_hung_server(slot, pod)
            return
        step = (
            self.progress.step if self.progress is not None and self.progress.step is not None else self.draft.old.step
        )
        if not step:
            self.hindered.append(Hindered(slot, Obstacle(Blocked.NOT_JOINED, NOT_JOINED), since))
            return
        deadline = since + timedelta(seconds=self.job.spec.run_policy.pending_deadline_seconds)
        if self.draft.now < deadline:
            self.draft.wake_at(deadline)
        elif self.can_create:
            self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, Cause.STALLED))
            self._die(slot, pod, Verdict(Cause.STALLED, NOT_JOINED))

    def _judge_hung_server(self, slot: Slot, pod: PodView) -> None:
        """Two see it from two sides, so that neither a slow network nor a slow disk looks like a hung process: the
        kubelet's probes (no longer Ready) and our own calls (no answer)."""
        unready = unready_since(pod)
        if unready is None:
            return
        last = self.progress.heard.get(slot.index) if self.progress is not None else None
        # An operator that has just started has heard nobody yet.
        deadline = unready + UNHEARD if last is None else last + SILENT
        if self.draft.now < deadline:
            self.draft.wake_at(deadline)
        elif self.can_create:
            self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, Cause.STALLED))
            silent = (self.draft.now - (last or unready)).total_seconds()
            self._die(slot, pod, Verdict(Cause.STALLED, f"its server has not answered for {silent:.0f} s"))

    def _trained(self) -> bool:
        """Whether there was an update, of this run or of one that it goes on from."""
        known = self.progress.step if self.progress is not None and self.progress.step is not None else None
        return bool(known if known is not None else self.draft.old.step)

    def _judge_waiting(self, slot: Slot, pod: PodView | None, not_before: datetime) -> None:
        if self.draft.now >= not_before:
            self._bear(slot, None)
            return
        self.draft.wake_at(not_before)
        if pod is not None and pod.alive:
            self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, "Superseded"))

    def _judge_dead(self, slot: Slot, pod: PodView) -> None:
        if self._left_in_order(slot, pod):
            return
        self._die(slot, pod, verdict_of(pod.raw))

    def _left_in_order(self, slot: Slot, pod: PodView) -> bool:
        """Whether a dead pod is no loss, or may turn out to be none; the latter for a short while only (T8)."""
        done = self.progress is not None and self.progress.done
        state = terminated_state(pod.raw)
        clean = state is not None and state.get("exitCode") == 0 and not pod.deleting
        if slot.role != contract.ROLE_SERVER:
            if done:
                return True
        elif slot.index == 0 or not clean:
            return False
        if not clean:
            return False
        if done:
            return True
        ended = ended_at(pod)
        if ended is None or self.draft.now >= ended + EXIT_VERDICT:
            return False
        # The two times come from two clocks, one of whole seconds: an answer counts when it is clearly younger.
        asked = self.progress is not None and 0 in self.progress.reached
        if asked and self.progress is not None and self.progress.taken > ended + timedelta(seconds=1):
            return False
        self.draft.wake_at(ended + EXIT_VERDICT)
        return True

    def _judge_unseen(self, slot: Slot, recorded: int) -> None:
        name = self._name(slot, recorded)
        refusal = self.observed.refused.get(name)
        if refusal is not None:
            self.refused = True
            obstacle = refusal_obstacle(refusal.reason, refusal.message)
            created = self.draft.conditions.get(status.PODS_CREATED)
            known = created is not None and created.status == "False"
            since = created.last_transition_time if created is not None and known else self.draft.now
            self.hindered.append(Hindered(slot, obstacle, since))
            if obstacle.blocked.permanent:
                self.draft.fail(obstacle.blocked, f"{slot.text} (pod {name}) cannot be created: {obstacle.text}")
            elif self.draft.now >= refusal.at + REFUSED_RETRY:
                self.births.append(Birth(slot, recorded))
            else:
                self.draft.wake_at(refusal.at + REFUSED_RETRY)
        elif name in self.observed.missing:
            existed = status.holds(self.draft.conditions, status.PODS_CREATED) or name in self.observed.witnessed
            if not existed:
                # It may never have been: the operator can die between the status and the create.
                self._bear(slot, None)
                return
            verdict = Verdict(Cause.VANISHED, "it is gone without a trace")
            self._count(slot, recorded, name, verdict, charged=False)
            self._bear(slot, verdict.cause)
            self._tell(slot, name, verdict, None)
        else:
            self.draft.actions.append(LookUpPod(name))
            self.draft.wake_at(self.draft.now + LOOK_UP_RETRY)

    def _die(self, slot: Slot, pod: PodView, verdict: Verdict) -> None:
        if self._hand_over(slot, pod.name, verdict):
            return
        role = ROLE_OF_LABEL[slot.role]
        wait: datetime | None = None
        if verdict.cause.charged:
            spent = self.draft.restarts.get(role, 0)
            budget = budgets.max_restarts(self.job.spec, slot.role)
            if spent >= budget:
                self._count(slot, pod.incarnation, pod.name, verdict, charged=False)
                self.draft.fail(
                    "MaxRestartsExceeded",
                    f"{slot.text} (pod {pod.name}) died ({verdict.cause}: {verdict.text}), and the "
                    f"{budgets.budget_field(slot.role)} of {budget} is used up",
                )
                return
            if has_worked(pod, self.progress):
                self.draft.backoff.pop(slot.key, None)
            else:
                backoff = budgets.backed_off(self.draft.backoff.get(slot.key), self.draft.now)
                if (
                    backoff.failures >= budgets.HOPELESS
                    and slot.role != contract.ROLE_EVALUATOR
                    and not self._trained()
                ):
                    self._count(slot, pod.incarnation, pod.name, verdict, charged=False)
                    self.draft.fail(
                        "CrashLoop",
                        f"{slot.text} died {backoff.failures} times in a row, and there has been no update yet; the "
                        f"last time (pod {pod.name}): {verdict.cause}: {verdict.text}",
                    )
                    return
                self.draft.backoff[slot.key] = backoff
                wait = backoff.not_before
        self._count(slot, pod.incarnation, pod.name, verdict, charged=verdict.cause.charged)
        if wait is None:
            self._bear(slot, verdict.cause)
        else:
            self.draft.wake_at(wait)
        self._tell(slot, pod.name, verdict, wait)

    def _count(self, slot: Slot, incarnation: int, pod: str, verdict: Verdict, *, charged: bool) -> None:
        draft, role = self.draft, ROLE_OF_LABEL[slot.role]
        draft.deaths.append(Death(slot.role, slot.index, incarnation, pod, verdict.cause, charged))
        if charged:
            draft.restarts[role] = draft.restarts.get(role, 0) + 1
        elif not verdict.cause.charged:
            draft.disruptions[role] = draft.disruptions.get(role, 0) + 1

    def _tell(self, slot: Slot, pod: str, verdict: Verdict, wait: datetime | None) -> None:
        if wait is None:
            then = f"replaced by {self._name(slot, self.draft.incarnations[slot.key])}"
        else:
            seconds = max(1, round((wait - self.draft.now).total_seconds()))
            then = f"it did no work, so the next one waits {seconds} s"
        if verdict.cause.charged:
            spent = self.draft.restarts[ROLE_OF_LABEL[slot.role]]
            then += f"; restart {spent} of {budgets.max_restarts(self.job.spec, slot.role)}"
        self.draft.events.append(warning(verdict.cause, f"{slot.text} (pod {pod}) died: {verdict.text}; {then}"))

    def _bear(self, slot: Slot, cause: Cause | None) -> None:
        incarnation = self.draft.incarnations.get(slot.key, 0) + 1
        self.draft.incarnations[slot.key] = incarnation
        if self.standbys and slot.role == contract.ROLE_SERVER:
            self.draft.active[slot.key] = incarnation
        waited = self.draft.backoff.get(slot.key)
        if waited is not None and waited.not_before is not None:
            self.draft.backoff[slot.key] = waited.model_copy(update={"not_before": None})
        self.births.append(Birth(slot, incarnation, cause))


def remove_superfluous(draft: Draft, wanted: set[Slot], progress: Progress | None) -> None:
    """Delete what no longer counts: older incarnations that still run, the dead of before the last one (the last is
    kept for its log), and the pods of places that the job no longer has: a worker's only once the world is smaller,
    highest rank first."""
    for slot in sorted(draft.pods, reverse=True):
        recorded = recorded_incarnation(draft, slot)
        for pod in draft.pods[slot]:
            if pod.deleting:
                continue
            if slot not in wanted:
                if pod.ended or _has_left_world(draft, slot, progress):
                    draft.actions.append(DeletePod(pod.name, pod.uid, None, "Superfluous"))
            elif pod.incarnation < recorded and not pod.terminal:
                if not any(isinstance(a, DeletePod) and a.uid == pod.uid for a in draft.actions):
                    draft.actions.append(DeletePod(pod.name, pod.uid, None, "Superseded"))
            elif pod.incarnation < recorded - 1 or (
                pod.terminal and recorded < pod.incarnation < draft.incarnations.get(slot.key, 0) - 1
            ):
                draft.actions.append(DeletePod(pod.name, pod.uid, None, "Outdated"))


def _has_left_world(draft: Draft, slot: Slot, progress: Progress | None) -> bool:
    if slot.role != contract.ROLE_WORKER:
        return True
    if progress is not None and progress.world is not None:
        return slot.index >= progress.world
    # Nobody has said which world is in force: before training begins nobody misses a rank, later we wait to be told.
    return draft.old.world is None and not status.holds(draft.conditions, status.RUNNING)
