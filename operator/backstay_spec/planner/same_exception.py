"""Decides whether a job fails immediately because its pods raise the same exception before the first update (O4).

Different slots run the same script. If their pods raise the same exception at the same line, or all end with exit code
0 without training, a retry cannot help. One pod proves nothing, because its node may be the cause. So most slots of a
role, or of the job, must agree; in a role with one slot two incarnations. If only the last line of their logs is known,
each of these slots must have ended so twice. No work is lost, because no update was applied yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta

from backstay_spec import contract, status
from backstay_spec.exceptions import NOT_TRAINED, Raised, raised_by
from backstay_spec.names import Slot
from backstay_spec.planner.effects import JobFailure
from backstay_spec.planner.facts import SKEW, Facts, desired_slots
from backstay_spec.planner.pods import PodView, has_worked

__all__ = ["REASON", "judge", "last_raised"]

REASON = "ScriptFailed"
_PODS = {
    contract.ROLE_SERVER: "parameter server",
    contract.ROLE_WORKER: "worker",
    contract.ROLE_EVALUATOR: "evaluator",
}


def judge(facts: Facts) -> JobFailure | None:
    """Returns the job's failure, if most of its pods, or of a role's, raise the same exception before the first
    update."""
    if facts.trained or facts.done or facts.spec.run_policy.suspend:
        return None
    slots = desired_slots(facts.job)
    last = {slot: found for slot in slots if (found := last_raised(facts, slot))}
    for role in (contract.ROLE_SERVER, contract.ROLE_WORKER):
        of_role = [slot for slot in slots if slot.role == role]
        if failure := _agreed(of_role, last, role):
            return failure
    return _agreed(slots, last, "")


def last_raised(facts: Facts, slot: Slot) -> list[Raised]:
    """Returns the lasting exceptions of a slot's dead pods of this run, newest first; none if its newest pod works."""
    pods = facts.pods.get(slot, ())
    if not pods or pods[-1].ready:
        return []
    # A worker that has lost a server is not Ready, and what ended its predecessors is past.
    if pods[-1].alive and has_worked(pods[-1], None):
        return []
    # A person may suspend a job, correct its spec and resume it within seconds.
    skew = timedelta() if status.SUSPENDED in facts.conditions else SKEW
    dead = [pod for pod in reversed(pods) if pod.ended and not pod.deleting and facts.is_of_this_run(pod, skew)]
    found = [raised_by(pod.raw) for pod in dead]
    lasting = []
    for pod, raised in zip(dead, found, strict=True):
        if raised is None or raised.transient or (raised.type == NOT_TRAINED and _has_served(pod)):
            break
        lasting.append(raised)
    return lasting


def _has_served(pod: PodView) -> bool:
    """Returns whether it is a server that was Ready: its script has called `train`, and its last message is lost
    (O10)."""
    return pod.slot.role == contract.ROLE_SERVER and has_worked(pod, None)


def _agreed(slots: Sequence[Slot], last: Mapping[Slot, Sequence[Raised]], role: str) -> JobFailure | None:
    counts = Counter(last[slot][0].key for slot in slots if slot in last and _is_sure(last[slot]))
    if not counts:
        return None
    key, agreeing = counts.most_common(1)[0]
    raised = next(last[slot][0] for slot in slots if slot in last and last[slot][0].key == key)
    if agreeing >= 2 and 2 * agreeing > len(slots):
        what = f"{_PODS[role]}s" if role else "pods"
        return _failure(raised, f"{agreeing} of {len(slots)} {what}")
    if role and len(slots) == 1 and _is_repeated(last[slots[0]]):
        return _failure(raised, f"the only {_PODS[role]}, twice")
    return None


def _is_sure(found: Sequence[Raised]) -> bool:
    return not found[0].guessed or _is_repeated(found)


def _is_repeated(found: Sequence[Raised]) -> bool:
    return len(found) > 1 and found[0].key == found[1].key


def _failure(raised: Raised, pods: str) -> JobFailure:
    if raised.type == NOT_TRAINED:
        return JobFailure(REASON, f"{raised.text} (seen in {pods})")
    how = "the end of" if raised.guessed else "raised by"
    text = f"{raised.summary}: {how} {pods}, so another attempt would fail too"
    return JobFailure(REASON, text, raised.traceback)
