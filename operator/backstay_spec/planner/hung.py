"""Policy: whether a pod that runs is hung (T8), or never joined.

A verdict is `Alive`, or `Hung` with the reason. The kubelet's probes and the control channel see a pod from two sides,
so that neither a slow network nor a slow disk looks like a hung process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from backstay_spec import contract
from backstay_spec.causes import Cause, Verdict
from backstay_spec.names import Slot
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, is_node_silent, ready_since, unready_since
from backstay_spec.planner.record import Record

__all__ = [
    "SILENT",
    "STALLED_GRACE",
    "Alive",
    "Hung",
    "Silence",
    "judge_server",
    "judge_worker",
    "never_joined",
    "reported_stalled",
]

# A hung container ignores SIGTERM; nothing is gained by waiting for it.
STALLED_GRACE: Final = 1
# A server that is no longer Ready and has answered no call for so long is hung.
SILENT: Final = timedelta(seconds=10)
# The same for a worker whose heartbeats no server receives: it may have to find another server first.
SILENT_WORKER: Final = timedelta(seconds=20)
UNANSWERED: Final = timedelta(seconds=60)

LOST: Final = "it has been out of touch with a server"
NO_HEARTBEAT: Final = "no server has received a heartbeat of it"


@dataclass(frozen=True, slots=True)
class Alive:
    """The pod is not hung.

    Attributes:
        check_at: judge again at this time at the latest; None: no need.
    """

    check_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Hung:
    """The pod is hung; `verdict` is the cause of its end."""

    verdict: Verdict


Silence: TypeAlias = Alive | Hung


def judge_server(facts: Facts, pod: PodView, who: str) -> Silence:
    """Whether a server's pod, active or standby, is hung.

    Args:
        who: the subject of the message: ``it``, ``its server``.
    """
    unready = unready_since(pod)
    if unready is None:
        return Alive()
    progress = facts.progress
    heard, asked = (progress.heard, progress.asked) if progress is not None else ({}, {})
    if (last := heard.get(pod.uid)) is not None:
        deadline = last + SILENT
    elif (first := asked.get(pod.uid)) is not None:
        deadline = max(first, unready) + SILENT
    else:  # an operator that has just started has called no server yet, or no server answers it
        deadline = unready + UNANSWERED
    if facts.now < deadline:
        return Alive(deadline)
    seconds = (facts.now - (last or unready)).total_seconds()
    return Hung(_verdict(pod, f"{who} has not answered for {seconds:.0f} s"))


def judge_worker(facts: Facts, record: Record, pod: PodView) -> Silence:
    """Whether a worker that was Ready and no longer is hangs, or has lost a server and cannot find it again.

    The coordinator reports a worker that it has had heartbeats of. A worker that fell silent together with the previous
    coordinator has never sent one to the new coordinator (T8).
    """
    unready, progress = unready_since(pod), facts.progress
    if unready is None or facts.done:
        return Alive()
    since = unready
    for shard in facts.shards:
        slot = Slot(contract.ROLE_SERVER, shard)
        server = facts.pod(slot, record.current(slot))
        ready = ready_since(server) if server is not None else None
        if ready is None:
            return Alive()  # the worker waits for this server
        since = max(since, ready)
    patience, what = max(timedelta(seconds=facts.spec.workers.stall_seconds), UNANSWERED), LOST
    if (
        progress is not None
        and 0 in progress.reached
        # An earlier report proves nothing: the coordinator considers a silent worker alive for 10 s.
        and progress.taken >= since + SILENT
        and progress.beating.get(pod.slot.index) != pod.incarnation
    ):
        patience, what = SILENT_WORKER, NO_HEARTBEAT
    if facts.now >= since + patience:
        seconds = (facts.now - unready).total_seconds()
        return Hung(_verdict(pod, f"{what} for {seconds:.0f} s"))
    first = since + SILENT_WORKER
    return Alive(first if facts.now < first else since + patience)


def reported_stalled(facts: Facts, pod: PodView) -> Hung | None:
    """Whether a server reports that this worker is stalled."""
    for stalled in facts.progress.stalled if facts.progress is not None else ():
        if (pod.slot.role, pod.slot.index, pod.incarnation) == (
            contract.ROLE_WORKER,
            stalled.rank,
            stalled.incarnation,
        ):
            return Hung(Verdict(Cause.STALLED, stalled.reason or "it hangs"))
    return None


def never_joined(facts: Facts, since: datetime, text: str) -> Silence:
    """Whether a pod that runs since `since` and was never Ready has used up its time to join (T8)."""
    deadline = since + timedelta(seconds=facts.spec.run_policy.pending_deadline_seconds)
    return Alive(deadline) if facts.now < deadline else Hung(Verdict(Cause.STALLED, text))


def _verdict(pod: PodView, text: str) -> Verdict:
    """The cause of a hung pod's end: a lost node is not the pod's fault (O4)."""
    if is_node_silent(pod):
        return Verdict(Cause.NODE_LOST, f"{text}, nor has its node")
    return Verdict(Cause.STALLED, text)
