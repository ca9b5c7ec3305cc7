"""The standbys of a running job: when one takes over, and that each shard has one (O2, O3, O4, T6).

A shard with a standby has two pods of incarnations of its own. `status.active` says which one serves; a newer one is
its standby. When the one that serves is dead and a standby runs, the standby serves from the status on that says so:
the Service is patched and the servers are told after that, so an operator that dies in between ends what it began.

A standby that does not hold what its server held is promoted too: it starts from the newest checkpoint, as any other
server would, only sooner. It waits in one case: the server was told to stop, still answers, and is storing a
checkpoint; then that comes first, within the server's grace period.

The job can do without standbys: one that cannot be started fails no job, and a budget that is spent ends only them.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from backstay_spec import budgets, contract, status
from backstay_spec.causes import Cause, Verdict, obstacle_of, outcome_of, verdict_of
from backstay_spec.events import warning
from backstay_spec.names import Slot
from backstay_spec.plan_places import (
    SILENT,
    Hindered,
    Places,
    newest_pod,
    recorded_incarnation,
)
from backstay_spec.plan_pods import PodView, created_at, gone_by, has_worked, silent_since

GONE: Final = Verdict(Cause.VANISHED, "it is gone without a trace")


def backoff_key(slot: Slot) -> str:
    """Where `status.backoff` keeps the record of a shard's standby: ``parameter-server-0/standby``."""
    return f"{slot.key}/standby"


class Standbys:
    """Judges the standbys of one job with `standbys: 1`, shard after shard."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.draft = places.draft

    # Taking over.

    def promote(self, slot: Slot) -> bool:
        """Let the standby serve, if the server that does is dead and the standby runs. True: the shard's server is
        dead, and what to do about that waits for the checkpoint that it is storing."""
        places, draft = self.places, self.draft
        if not places.can_create or slot.key not in draft.active or places.outlived_suspension(slot):
            return False
        serving, name = newest_pod(draft, slot), places.name(slot, draft.active[slot.key])
        if serving is None:
            if name in places.observed.missing:  # else it is looked up first
                self.hand_over(slot, name, GONE)
            return False
        if serving.alive or places.left_in_order(slot, serving) or outcome_of(serving.raw) is not None:
            return False
        if self._stores(slot, serving):
            return True
        self.hand_over(slot, name, verdict_of(serving.raw))
        return False

    def hand_over(self, slot: Slot, name: str, verdict: Verdict) -> bool:
        """Count the server that served, and let the standby serve. False: there is none that can."""
        draft = self.draft
        standby = self._standby_of(slot) if slot.key in draft.active else None
        if standby is None or not standby.alive or not standby.started or self.places.hung_since(standby) is not None:
            return False
        charged = verdict.cause.charged
        counted = draft.waits(slot.key) is not None
        if charged and not counted and self.places.spent(slot):
            return False  # the usual judgement ends the job
        draft.backoff.pop(slot.key, None)
        draft.backoff.pop(backoff_key(slot), None)
        before, draft.active[slot.key] = draft.active[slot.key], standby.incarnation
        if not counted:
            self.places.count(slot, before, name, verdict, charged=charged)
        held = "" if self._in_sync(slot, standby) else " from the newest checkpoint, unless it has caught up since"
        draft.events.append(
            warning(
                verdict.cause,
                f"{slot.text} (pod {name}) died: {verdict.text}; its standby {standby.name} serves{held}",
            )
        )
        return True

    def _stores(self, slot: Slot, serving: PodView) -> bool:
        """Whether a server that was told to stop is to be left its time to store a checkpoint."""
        standby, until = self._standby_of(slot), gone_by(serving)
        progress = self.places.progress
        if serving.ended or until is None or progress is None or self._in_sync(slot, standby):
            return False
        if verdict_of(serving.raw).cause is Cause.NODE_LOST:
            return False
        last = progress.heard.get(serving.uid)
        until = min(until, last + SILENT) if last is not None else self.draft.now
        if self.draft.now >= until:
            return False
        self.draft.wake_at(until)
        return True

    def _standby_of(self, slot: Slot) -> PodView | None:
        """The newest pod of a shard that is newer than the one that serves."""
        pods = self.draft.pods.get(slot, ())
        serving = recorded_incarnation(self.draft, slot)
        return pods[-1] if pods and pods[-1].incarnation > serving else None

    def _in_sync(self, slot: Slot, standby: PodView | None) -> bool:
        """Whether the shard's server said last that this standby holds all that it does."""
        progress = self.places.progress
        return standby is not None and progress is not None and progress.in_sync.get(slot.index) == standby.incarnation

    # Having one.

    def judge(self, slot: Slot) -> None:
        """See to it that a shard whose server lives, or is being made, has a standby."""
        places, draft = self.places, self.draft
        if not places.can_create or slot.key not in draft.active or draft.waits(slot.key) is not None:
            return
        serving, newest = draft.active[slot.key], draft.incarnations.get(slot.key, 0)
        born = {birth.incarnation for birth in places.births if birth.slot == slot}
        if newest <= serving or serving in born:
            self._bear(slot, None)
            return
        if newest in born:
            return
        standby = self._standby_of(slot)
        if (not_before := draft.waits(backoff_key(slot))) is not None:
            if draft.now >= not_before:
                self._bear(slot, None)
            else:
                draft.wake_at(not_before)
        elif standby is not None and standby.incarnation == newest:
            self._judge_seen(slot, standby)
        elif places.name(slot, newest) in places.observed.missing:
            self._bear(slot, None)
        elif (refusal := places.refusal(slot, newest)) is not None:
            places.try_again(slot, newest, refusal)
        else:
            places.look_up(slot, newest)

    def _judge_seen(self, slot: Slot, standby: PodView) -> None:
        places, draft = self.places, self.draft
        if not standby.alive:
            self._lose(slot, standby, verdict_of(standby.raw))
            return
        if has_worked(standby, places.progress):
            draft.backoff.pop(backoff_key(slot), None)
        if (silent := places.hung_since(standby)) is not None:
            seconds = (draft.now - silent).total_seconds()
            places.end_hung(standby)
            self._lose(slot, standby, places.verdict_of_silence(standby, f"it has not answered for {seconds:.0f} s"))
        elif not standby.ready and (obstacle := obstacle_of(standby.raw)) is not None:
            places.hindered.append(Hindered(slot, obstacle, created_at(standby) or draft.now, standby=True))
        elif (since := silent_since(standby)) is not None:
            deadline = since + timedelta(seconds=places.job.spec.run_policy.pending_deadline_seconds)
            if draft.now >= deadline:
                places.end_hung(standby)
                self._lose(slot, standby, Verdict(Cause.STALLED, "it runs, but its server could not fill it"))
            else:
                draft.wake_at(deadline)

    def _lose(self, slot: Slot, standby: PodView, verdict: Verdict) -> None:
        """A standby is charged and replaced as any server; where the budget is spent, training goes on without one."""
        places, draft = self.places, self.draft
        if places.left_in_order(slot, standby):
            return
        charged = verdict.cause.charged
        if charged and places.spent(slot):
            return
        wait: datetime | None = None
        if charged and not has_worked(standby, places.progress):
            backoff = budgets.backed_off(draft.backoff.get(backoff_key(slot)), draft.now)
            draft.backoff[backoff_key(slot)] = backoff
            wait = backoff.not_before
        places.count(slot, standby.incarnation, standby.name, verdict, charged=charged)
        if wait is None:
            self._bear(slot, verdict.cause)
        else:
            draft.wake_at(wait)
        places.tell(slot, standby.name, verdict, wait, standby=True)

    def _bear(self, slot: Slot, cause: Cause | None) -> None:
        self.draft.waited(backoff_key(slot))
        self.places.bear(slot, cause)


def describe(places: Places) -> None:
    """The condition StandbysInSync: which shards would lose nothing with their server."""
    draft, progress = places.draft, places.progress
    shards = range(places.job.spec.parameter_servers.replicas)
    if not places.job.spec.parameter_servers.standbys:
        draft.conditions.pop(status.STANDBYS_IN_SYNC, None)
        return
    known = status.STANDBYS_IN_SYNC in draft.conditions
    if progress is None or not progress.reached.issuperset(shards):
        if not known:
            draft.condition(status.STANDBYS_IN_SYNC, False, "Starting", "the servers have not all answered yet")
        return
    serving = {shard: draft.active.get(Slot(contract.ROLE_SERVER, shard).key, 0) for shard in shards}
    behind = [shard for shard in shards if not progress.followed(shard, serving[shard])]
    if not behind:
        draft.condition(status.STANDBYS_IN_SYNC, True, "AllInSync", "each shard's standby holds what its server holds")
        return
    which = ", ".join(str(shard) for shard in behind[:10])
    stuck = next((h for h in places.hindered if h.standby and h.slot.index in behind), None)
    why = f"; {stuck.text}: {stuck.obstacle.text}" if stuck is not None else ""
    spent = " (spec.parameterServers.maxRestarts is used up)" if _given_up(places, behind) else ""
    draft.condition(
        status.STANDBYS_IN_SYNC,
        False,
        stuck.obstacle.blocked if stuck is not None else "BudgetSpent" if spent else "Filling",
        f"without a standby that holds all of it: shard {which}{spent}{why}",
    )


def _given_up(places: Places, behind: list[int]) -> bool:
    """Whether a shard's standby is dead and none comes after it."""
    for shard in behind:
        slot = Slot(contract.ROLE_SERVER, shard)
        pods = places.draft.pods.get(slot, ())
        newest = places.draft.incarnations.get(slot.key, 0)
        serving = places.draft.active.get(slot.key, 0)
        dead = any(pod.incarnation == newest > serving and pod.ended for pod in pods)
        if dead and places.spent(slot) and places.draft.waits(backoff_key(slot)) is None:
            return True
    return False
