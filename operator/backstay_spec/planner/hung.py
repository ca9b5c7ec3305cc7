"""Decides whether a running pod is hung (T8), or never joined.

A verdict is `Alive`, or `Hung` with the reason. The wall clock alone proves nothing. Only calls count that this
operator really made in time (`observed.Silence`). So a pause of the operator, or the time in which it was not the
leader, does not count as the silence of a pod. `docs/decisions/0073-silence-and-faults.md` has the reasons.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, TypeAlias

from backstay_spec import contract
from backstay_spec.causes import Cause, Verdict
from backstay_spec.names import Slot
from backstay_spec.observed import Silence
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, is_node_silent, ready_since, unready_since
from backstay_spec.planner.record import Record
from backstay_spec.silence import LOST as LOST_SECONDS
from backstay_spec.silence import MISSED_CALLS, NO_WITNESS_CALLS, worker_silence

__all__ = [
    "STALLED_GRACE",
    "Alive",
    "Hung",
    "Liveness",
    "is_unanswered",
    "judge_server",
    "judge_worker",
    "never_joined",
    "reported_stalled",
]

# A hung container ignores SIGTERM; waiting for it has no use.
STALLED_GRACE: Final = 1
# The time for which the coordinator considers a worker without heartbeats alive.
HEARTBEAT_TIMEOUT: Final = timedelta(seconds=LOST_SECONDS)
# A worker without a heartbeat at any server is not hung sooner: it may have to find another server first.
SEARCH: Final = timedelta(seconds=20)
SHORTEST_STALL: Final = timedelta(seconds=60)

TEXT_LOST: Final = "it has lost the connection to a server"
TEXT_NO_HEARTBEAT: Final = "no server has received a heartbeat from it"


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


Liveness: TypeAlias = Alive | Hung


def judge_server(facts: Facts, record: Record, pod: PodView, who: str) -> Liveness:
    """Returns whether a server's pod, active or standby, is hung.

    The kubelet reports that the pod is not Ready, and the pod does not answer this operator (`is_unanswered`). One more
    fact is needed, in this order: another server answers; only this server is silent, and a worker reports the
    same; or no server answers, and a worker reports the same about this active one. Otherwise the operator, the node or
    the network may be the cause, and the pod has minutes.

    Args:
        who: the subject of the message: ``it``, ``its server``.
    """
    contact = facts.contact
    silence = contact.silent.get(pod.uid) if contact is not None else None
    if contact is None or silence is None or unready_since(pod) is None:
        return Alive()
    if not is_unanswered(silence):
        return Alive()
    is_active = pod.incarnation == record.current(pod.slot)
    if is_active and pod.slot.index in contact.reachable:
        return Alive()  # other processes reach it, and only this operator does not
    text = f"{who} has not answered for {(facts.now - silence.since).total_seconds():.0f} s"
    if any(contact.answers(uid) for uid in contact.answered_at):
        return Hung(_verdict(pod, text))
    if len(contact.silent) == 1 and pod.slot.index in contact.unreachable:
        return Hung(_verdict(pod, text))
    if silence.calls >= NO_WITNESS_CALLS or (is_active and pod.slot.index in contact.unreachable):
        return Hung(Verdict(Cause.UNRESPONSIVE, f"{text}, nor has any other server of the job"))
    return Alive()


def is_unanswered(silence: Silence) -> bool:
    """Returns whether a pod left enough calls unanswered: several short ones, and a long one, which a slow process
    answers; or short ones for minutes."""
    return silence.calls >= MISSED_CALLS and (silence.long_calls >= 1 or silence.calls >= NO_WITNESS_CALLS)


def judge_worker(facts: Facts, record: Record, pod: PodView) -> Liveness:
    """Returns whether a worker that was Ready, and is not Ready now, hangs, or has lost a server and cannot find it
    again.

    The coordinator reports a worker whose heartbeats have stopped. A worker that became silent together with the
    previous coordinator has never sent a heartbeat to the new coordinator (T8). It is silent for at least as long as it
    is not Ready, and a worker that holds the interpreter's lock is silent too.
    """
    unready, progress = unready_since(pod), facts.progress
    if unready is None or facts.done or facts.contact is None:
        return Alive()
    since = unready
    for shard in facts.shards:
        slot = Slot(contract.ROLE_SERVER, shard)
        server = facts.pod(slot, record.current(slot))
        ready = ready_since(server) if server is not None else None
        if ready is None:
            return Alive()  # the worker waits for this server
        since = max(since, ready)
    limit = timedelta(seconds=worker_silence(facts.spec.workers.stall_seconds).limit)
    if (
        progress is not None
        and 0 in progress.reached
        and progress.taken >= since
        and progress.beating.get(pod.slot.index) != pod.incarnation
        and pod.first.uid in facts.contact.hung_workers
        and facts.now >= unready + limit
    ):
        return Hung(_verdict(pod, f"{TEXT_NO_HEARTBEAT} for {(facts.now - unready).total_seconds():.0f} s"))
    patience, what = max(timedelta(seconds=facts.spec.workers.stall_seconds), SHORTEST_STALL), TEXT_LOST
    if (
        progress is not None
        and 0 in progress.reached
        # An earlier report proves nothing: for 10 s the coordinator considers a silent worker alive.
        and progress.taken >= since + HEARTBEAT_TIMEOUT
        and progress.beating.get(pod.slot.index) != pod.incarnation
    ):
        patience, what = max(SEARCH, limit), TEXT_NO_HEARTBEAT
    if facts.now >= since + patience:
        seconds = (facts.now - unready).total_seconds()
        return Hung(_verdict(pod, f"{what} for {seconds:.0f} s"))
    times = (unready + limit, since + max(SEARCH, limit), since + patience)
    return Alive(min(time for time in times if facts.now < time))


def reported_stalled(facts: Facts, pod: PodView) -> Hung | None:
    """Returns whether a server reports that this worker is stalled.

    Heartbeats also stop when the worker, or the server, gets no processor. So the
    worker must also leave a health request of this operator unanswered. A process without enough CPU time answers it
    late.
    """
    for stalled in facts.progress.stalled if facts.progress is not None else ():
        if (pod.slot.role, pod.slot.index, pod.incarnation) != (
            contract.ROLE_WORKER,
            stalled.rank,
            stalled.incarnation,
        ):
            continue
        if stalled.reason.startswith(contract.NO_HEARTBEAT):
            contact = facts.contact
            if contact is None or pod.first.uid not in contact.hung_workers:
                return None
        return Hung(Verdict(Cause.STALLED, stalled.reason or "it hangs"))
    return None


def never_joined(facts: Facts, since: datetime, text: str) -> Liveness:
    """Returns whether a pod that runs since `since` and was never Ready has exceeded its time to join (T8)."""
    deadline = since + timedelta(seconds=facts.spec.run_policy.pending_deadline_seconds)
    return Alive(deadline) if facts.now < deadline else Hung(Verdict(Cause.STALLED, text))


def _verdict(pod: PodView, text: str) -> Verdict:
    """Returns the cause of a hung pod's end, where a lost node is not the pod's fault (O4)."""
    if is_node_silent(pod):
        return Verdict(Cause.NODE_LOST, f"{text}, nor has its node")
    return Verdict(Cause.STALLED, text)
