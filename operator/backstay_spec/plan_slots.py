"""The places of a running job: which pod of each counts, whether it lives, and what comes after it (O2, O4).

For each place the newest incarnation on record is the one that counts. Its pod lives, or is dead, or is not seen:

- dead: it is counted once, by the very status that records the next incarnation, or (while the place backs off) its
  `notBefore`;
- not seen, though on record: it was deleted behind our back, or the operator died between writing the status and
  creating it. A live GET tells; if it is not there it is dead, and the next incarnation takes its place, because a pod
  that was force-deleted may still run somewhere. For the counters, what this operator has seen tells the two apart,
  and after its restart the condition PodsCreated;
- not seen because the API server refused it: the same incarnation is tried again.

What a shard's standby changes in this is in `plan_standbys`.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from backstay_spec import budgets, contract, status
from backstay_spec.actions import DeletePod
from backstay_spec.causes import (
    Blocked,
    Cause,
    Obstacle,
    Verdict,
    obstacle_of,
    refusal_obstacle,
    verdict_of,
)
from backstay_spec.names import Slot
from backstay_spec.observed import Progress
from backstay_spec.plan_draft import Draft
from backstay_spec.plan_places import (
    SILENT,
    SILENT_WORKER,
    STALLED_GRACE,
    UNHEARD,
    Hindered,
    Places,
    newest_pod,
    recorded_incarnation,
)
from backstay_spec.plan_pods import PodView, created_at, has_worked, ready_since, silent_since, unready_since
from backstay_spec.plan_standbys import GONE, Standbys
from backstay_spec.types import TrainingJob

LOST: Final = "it has been out of touch with a server"
SILENCE: Final = "no server has heard it"
NOT_JOINED: Final = "it runs, but has not joined the others: does the script hang before backstay.train?"


def desired_slots(job: TrainingJob) -> list[Slot]:
    """The places that a running job has, servers first."""
    spec = job.spec
    slots = [Slot(contract.ROLE_SERVER, i) for i in range(spec.parameter_servers.replicas)]
    slots += [Slot(contract.ROLE_WORKER, i) for i in range(spec.workers.replicas)]
    if spec.evaluator is not None:
        slots.append(Slot(contract.ROLE_EVALUATOR, 0))
    return slots


class Slots:
    """Judges the places of one job, one after the other; what it decides is in `places` and in the draft."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.draft, self.job, self.progress = places.draft, places.job, places.progress
        self.standbys = Standbys(places) if places.job.spec.parameter_servers.standbys else None
        if self.standbys is None:
            self.draft.active.clear()

    def judge(self, slot: Slot) -> None:
        """Decide about one place that the job has."""
        draft, places = self.draft, self.places
        followed = self.standbys if slot.role == contract.ROLE_SERVER else None
        if followed is not None and followed.promote(slot):
            return
        recorded = recorded_incarnation(draft, slot)
        pod = newest_pod(draft, slot)
        waits = draft.waits(slot.key)
        outlived = places.outlived_suspension(slot)
        refused = pod is None and places.refusal(slot, recorded) is not None
        if pod is not None and pod.alive and waits is None and not outlived:
            self._judge_living(slot, pod)
        elif not places.can_create:
            # Whatever died is judged when it can be replaced: the two go into one status.
            return
        elif recorded == 0 or outlived or (not places.was_desired(slot) and not refused):
            self._bear(slot, None)
        elif waits is not None:
            self._judge_waiting(slot, pod, waits)
        elif pod is not None:
            if not places.left_in_order(slot, pod):
                self._die(slot, pod, verdict_of(pod.raw))
        else:
            self._judge_unseen(slot, recorded)
        if followed is not None and not draft.finished():
            followed.judge(slot)

    def _judge_living(self, slot: Slot, pod: PodView) -> None:
        for stalled in self.progress.stalled if self.progress is not None else ():
            if (slot.role, slot.index, pod.incarnation) == (contract.ROLE_WORKER, stalled.rank, stalled.incarnation):
                if self.places.can_create:
                    self.places.end_hung(pod)
                    self._die(slot, pod, Verdict(Cause.STALLED, stalled.reason or "it hangs"))
                return
        if slot.key in self.draft.backoff and has_worked(pod, self.progress):
            del self.draft.backoff[slot.key]
        obstacle = None if pod.ready else obstacle_of(pod.raw)
        if obstacle is None:
            self._judge_silence(slot, pod)
            return
        self.places.hindered.append(Hindered(slot, obstacle, created_at(pod) or self.draft.now))
        if obstacle.blocked.permanent:
            self.draft.fail(obstacle.blocked, f"{slot.text} (pod {pod.name}) cannot start: {obstacle.text}")

    def _judge_silence(self, slot: Slot, pod: PodView) -> None:
        """A pod that runs and never joins, because its script hangs before `train`, must not be waited for for ever
        (T8). Before the first update that ends the job; later a replacement is worth trying."""
        since = silent_since(pod)
        if since is None:
            if slot.role == contract.ROLE_SERVER:
                self._judge_hung_server(slot, pod)
            elif slot.role == contract.ROLE_WORKER:
                self._judge_lost_worker(slot, pod)
            return
        if not self.draft.trained(self.progress):
            self.places.hindered.append(Hindered(slot, Obstacle(Blocked.NOT_JOINED, NOT_JOINED), since))
            return
        deadline = since + timedelta(seconds=self.job.spec.run_policy.pending_deadline_seconds)
        if self.draft.now < deadline:
            self.draft.wake_at(deadline)
        elif self.places.can_create:
            self.places.end_hung(pod)
            self._die(slot, pod, Verdict(Cause.STALLED, NOT_JOINED))

    def _judge_hung_server(self, slot: Slot, pod: PodView) -> None:
        silent = self.places.hung_since(pod)
        if silent is not None and self.places.can_create:
            self.places.end_hung(pod)
            seconds = (self.draft.now - silent).total_seconds()
            text = f"its server has not answered for {seconds:.0f} s"
            self._die(slot, pod, self.places.verdict_of_silence(pod, text))

    def _judge_lost_worker(self, slot: Slot, pod: PodView) -> None:
        """A worker that was Ready and is not any more has lost a server and does not find it again, or hangs. The
        coordinator gives up the workers that it has heard; one that fell silent together with the coordinator before
        was never heard by the new one (T8). The former beats all the while, the latter does not."""
        unready, progress = unready_since(pod), self.progress
        if unready is None or (progress is not None and progress.done):
            return
        since = unready
        for shard in range(self.job.spec.parameter_servers.replicas):
            server = newest_pod(self.draft, Slot(contract.ROLE_SERVER, shard))
            serves = ready_since(server) if server is not None else None
            if serves is None:
                return  # it is the servers that are waited for
            since = max(since, serves)
        patience, what = max(timedelta(seconds=self.job.spec.workers.stall_seconds), UNHEARD), LOST
        if (
            progress is not None
            and 0 in progress.reached
            # What was said soon after says nothing yet: whoever is silent is held for alive for 10 s.
            and progress.taken >= since + SILENT
            and progress.beating.get(slot.index) != pod.incarnation
        ):
            patience, what = SILENT_WORKER, SILENCE
        if self.draft.now >= since + patience:
            if self.places.can_create:
                self.places.end_hung(pod)
                seconds = (self.draft.now - unready).total_seconds()
                self._die(slot, pod, self.places.verdict_of_silence(pod, f"{what} for {seconds:.0f} s"))
            return
        first = since + SILENT_WORKER
        self.draft.wake_at(first if self.draft.now < first else since + patience)

    def _judge_waiting(self, slot: Slot, pod: PodView | None, not_before: datetime) -> None:
        if self.draft.now >= not_before:
            self._bear(slot, None)
            return
        self.draft.wake_at(not_before)
        if pod is not None and pod.alive:
            self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, "Superseded"))

    def _judge_unseen(self, slot: Slot, recorded: int) -> None:
        name = self.places.name(slot, recorded)
        refusal = self.places.refusal(slot, recorded)
        if refusal is not None:
            self.places.refused = True
            obstacle = refusal_obstacle(refusal.reason, refusal.message)
            created = self.draft.conditions.get(status.PODS_CREATED)
            known = created is not None and created.status == "False"
            since = created.last_transition_time if created is not None and known else self.draft.now
            self.places.hindered.append(Hindered(slot, obstacle, since))
            if obstacle.blocked.permanent:
                self.draft.fail(obstacle.blocked, f"{slot.text} (pod {name}) cannot be created: {obstacle.text}")
            else:
                self.places.try_again(slot, recorded, refusal)
        elif name in self.places.observed.missing:
            existed = status.holds(self.draft.conditions, status.PODS_CREATED) or name in self.places.observed.witnessed
            if not existed:
                # It may never have been: the operator can die between the status and the create.
                self._bear(slot, None)
                return
            self.places.count(slot, recorded, name, GONE, charged=False)
            self._bear(slot, GONE.cause)
            self.places.tell(slot, name, GONE, None)
        else:
            self.places.look_up(slot, recorded)

    def _die(self, slot: Slot, pod: PodView, verdict: Verdict) -> None:
        if self.standbys is not None and self.standbys.hand_over(slot, pod.name, verdict):
            return
        wait: datetime | None = None
        if verdict.cause.charged:
            budget = budgets.max_restarts(self.job.spec, slot.role)
            if self.places.spent(slot):
                self.places.count(slot, pod.incarnation, pod.name, verdict, charged=False)
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
                    and not self.draft.trained(self.progress)
                ):
                    self.places.count(slot, pod.incarnation, pod.name, verdict, charged=False)
                    self.draft.fail(
                        "CrashLoop",
                        f"{slot.text} died {backoff.failures} times in a row, and there has been no update yet; the "
                        f"last time (pod {pod.name}): {verdict.cause}: {verdict.text}",
                    )
                    return
                self.draft.backoff[slot.key] = backoff
                wait = backoff.not_before
        self.places.count(slot, pod.incarnation, pod.name, verdict, charged=verdict.cause.charged)
        if wait is None:
            self._bear(slot, verdict.cause)
        else:
            self.draft.wake_at(wait)
        self.places.tell(slot, pod.name, verdict, wait)

    def _bear(self, slot: Slot, cause: Cause | None) -> None:
        incarnation = self.places.bear(slot, cause)
        if self.standbys is not None and slot.role == contract.ROLE_SERVER:
            self.draft.active[slot.key] = incarnation
        self.draft.waited(slot.key)


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
