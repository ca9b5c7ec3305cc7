"""The places of a running job: what is on record for each, what its death costs, and what is to be made (O2, O4).

The judges of single places, `plan_slots` and `plan_standbys`, share one `Places` while a plan is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from backstay_spec import budgets, contract, names, status
from backstay_spec.actions import Death, DeletePod, LookUpPod
from backstay_spec.causes import Cause, Obstacle, Verdict, terminated_state
from backstay_spec.events import warning
from backstay_spec.names import ROLE_OF_LABEL, Slot
from backstay_spec.observed import Observed, Progress, Refusal
from backstay_spec.plan_draft import Draft
from backstay_spec.plan_pods import PodView, ended_at, is_node_silent, unready_since
from backstay_spec.types import TrainingJob

REFUSED_RETRY: Final = timedelta(seconds=5)
LOOK_UP_RETRY: Final = timedelta(seconds=5)
# A worker that exits 0 may be the first sign that the job is done; this long the servers have to say so.
EXIT_VERDICT: Final = timedelta(seconds=10)
# The container of a hung pod ignores SIGTERM; nothing is gained by waiting for it.
STALLED_GRACE: Final = 1
# A server that is not Ready any more and has answered nobody for so long is hung.
SILENT: Final = timedelta(seconds=10)
# The same for a worker that no server hears: it may have to find another server first.
SILENT_WORKER: Final = timedelta(seconds=20)
UNHEARD: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class Birth:
    """A pod to create."""

    slot: Slot
    incarnation: int
    cause: Cause | None = None


@dataclass(frozen=True, slots=True)
class Hindered:
    """A place whose pod does not start, and since when.

    Attributes:
        standby: whether it is a shard's standby, which the job can do without.
    """

    slot: Slot
    obstacle: Obstacle
    since: datetime
    standby: bool = False

    @property
    def text(self) -> str:
        """The place, for people."""
        return f"the standby of {self.slot.text}" if self.standby else self.slot.text


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


class Places:
    """What the judges of one job's places know and decide together.

    Attributes:
        draft, job, observed, progress: what is planned from.
        can_create: whether pods can be made now: the Secret and the Services' addresses are there.
        births: the pods to create, their incarnations recorded in the draft.
        hindered: the places whose pods do not start.
        refused: whether the API server refused a pod.
    """

    def __init__(self, draft: Draft, job: TrainingJob, observed: Observed, *, can_create: bool) -> None:
        self.draft = draft
        self.job = job
        self.observed = observed
        self.progress: Progress | None = observed.progress
        self.can_create = can_create
        self.births: list[Birth] = []
        self.hindered: list[Hindered] = []
        self.refused = False

    # What is on record.

    def name(self, slot: Slot, incarnation: int) -> str:
        """The name of a pod of the place."""
        return names.pod_name(self.draft.meta.name, self.draft.meta.uid, slot, incarnation)

    def was_desired(self, slot: Slot) -> bool:
        """Whether the last status asked for this place: if not, its old pods were deleted by us, not lost."""
        role = self.draft.old.roles.get(ROLE_OF_LABEL[slot.role])
        return role is not None and slot.index < role.desired

    def outlived_suspension(self, slot: Slot) -> bool:
        """Whether the job resumes: a pod that still lives was made from a spec that may have been edited since."""
        role = self.draft.old.roles.get(ROLE_OF_LABEL[slot.role])
        return status.SUSPENDED in self.draft.conditions and (role is None or role.desired == 0)

    def refusal(self, slot: Slot, incarnation: int) -> Refusal | None:
        """How the API server refused the place's pod last, if it did."""
        return self.observed.refused.get(self.name(slot, incarnation))

    # What can be seen of a server.

    def hung_since(self, pod: PodView) -> datetime | None:
        """Since when a server's pod is silent, if it was Ready once and is hung; None for one that is not, or not yet.

        Two see it from two sides, so that neither a slow network nor a slow disk looks like a hung process: the
        kubelet's probes (no longer Ready) and our own calls (no answer). Wakes the planner when it may be so.
        """
        unready = unready_since(pod)
        if unready is None:
            return None
        heard, asked = (self.progress.heard, self.progress.asked) if self.progress is not None else ({}, {})
        if (last := heard.get(pod.uid)) is not None:
            deadline = last + SILENT
        elif (first := asked.get(pod.uid)) is not None:
            deadline = max(first, unready) + SILENT
        else:  # an operator that has just started has asked nobody yet, or nobody answers it
            deadline = unready + UNHEARD
        if self.draft.now >= deadline:
            return last or unready
        self.draft.wake_at(deadline)
        return None

    @staticmethod
    def verdict_of_silence(pod: PodView, text: str) -> Verdict:
        """Why a hung server's pod is given up: a node that is lost is not its fault (O4)."""
        if is_node_silent(pod):
            return Verdict(Cause.NODE_LOST, f"{text}, nor has its node")
        return Verdict(Cause.STALLED, text)

    def left_in_order(self, slot: Slot, pod: PodView) -> bool:
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

    # What a death costs.

    def spent(self, slot: Slot) -> bool:
        """Whether the budget of the place's role is used up."""
        spent = self.draft.restarts.get(ROLE_OF_LABEL[slot.role], 0)
        return spent >= budgets.max_restarts(self.job.spec, slot.role)

    def count(self, slot: Slot, incarnation: int, pod: str, verdict: Verdict, *, charged: bool) -> None:
        """Put a death on its role's account."""
        draft, role = self.draft, ROLE_OF_LABEL[slot.role]
        draft.deaths.append(Death(slot.role, slot.index, incarnation, pod, verdict.cause, charged))
        if charged:
            draft.restarts[role] = draft.restarts.get(role, 0) + 1
        elif not verdict.cause.charged:
            draft.disruptions[role] = draft.disruptions.get(role, 0) + 1

    def tell(self, slot: Slot, pod: str, verdict: Verdict, wait: datetime | None, *, standby: bool = False) -> None:
        """An event: it died, and what comes after it."""
        if wait is None:
            then = f"replaced by {self.name(slot, self.draft.incarnations[slot.key])}"
        else:
            seconds = max(1, round((wait - self.draft.now).total_seconds()))
            then = f"it did no work, so the next one waits {seconds} s"
        if verdict.cause.charged:
            spent = self.draft.restarts[ROLE_OF_LABEL[slot.role]]
            then += f"; restart {spent} of {budgets.max_restarts(self.job.spec, slot.role)}"
        who = f"the standby of {slot.text}" if standby else slot.text
        self.draft.events.append(warning(verdict.cause, f"{who} (pod {pod}) died: {verdict.text}; {then}"))

    # What is made, and what is ended.

    def bear(self, slot: Slot, cause: Cause | None) -> int:
        """A new pod for the place; the incarnation it will have."""
        incarnation = self.draft.incarnations.get(slot.key, 0) + 1
        self.draft.incarnations[slot.key] = incarnation
        self.births.append(Birth(slot, incarnation, cause))
        return incarnation

    def try_again(self, slot: Slot, incarnation: int, refusal: Refusal) -> None:
        """Create a pod that the API server refused, when it is time to."""
        due = refusal.at + REFUSED_RETRY
        if self.draft.now >= due:
            self.births.append(Birth(slot, incarnation))
        else:
            self.draft.wake_at(due)

    def look_up(self, slot: Slot, incarnation: int) -> None:
        """Ask for a recorded pod that is not seen."""
        self.draft.actions.append(LookUpPod(self.name(slot, incarnation)))
        self.draft.wake_at(self.draft.now + LOOK_UP_RETRY)

    def end_hung(self, pod: PodView) -> None:
        """Delete a pod that hangs."""
        self.draft.actions.append(DeletePod(pod.name, pod.uid, STALLED_GRACE, Cause.STALLED))
