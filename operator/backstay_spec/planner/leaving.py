"""Decides whether a pod ended in order, because training is complete."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from backstay_spec import contract, end_of_job
from backstay_spec.causes import outcome_of, terminated_state
from backstay_spec.contract import AFTER_TRAINING_FAILED, TRAINED
from backstay_spec.names import Slot
from backstay_spec.planner.facts import Facts
from backstay_spec.planner.pods import PodView, ended_at

__all__ = ["Leaving", "judge"]

# A worker with exit code 0 may be the first sign that the job is complete; the servers must confirm it in this time.
EXIT_VERDICT: Final = timedelta(seconds=end_of_job.EXIT_VERDICT)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Whether the pod ended in order.

    Attributes:
        in_order: whether the pod ended in order, or may have. It is then not replaced.
        check_at: the servers must confirm it by then; None: it is certain.
    """

    in_order: bool
    check_at: datetime | None = None


def judge(facts: Facts, pod: PodView) -> Leaving:
    """Returns whether a dead pod needs no replacement, or may need none; the latter only for a short time (T8)."""
    state = terminated_state(pod.raw)
    clean = state is not None and state.get("exitCode") == 0 and not pod.deleting
    if pod.slot == Slot(contract.ROLE_WORKER, 0):
        found = outcome_of(pod.raw)
        if found is not None and found.result in (TRAINED, AFTER_TRAINING_FAILED):
            return Leaving(True)
        if facts.done and not clean:
            return Leaving(False)  # it died before it had the result
    if pod.slot.role != contract.ROLE_SERVER:
        if facts.done:
            return Leaving(True)
    elif pod.slot.index == 0:
        return Leaving(False)
    if not clean or facts.done:
        return Leaving(clean)
    ended, progress = ended_at(pod), facts.progress
    if ended is None or facts.now >= ended + EXIT_VERDICT:
        return Leaving(False)
    # The two times come from two clocks, one of them in whole seconds: an answer must be clearly newer.
    if progress is not None and 0 in progress.reached and progress.taken > ended + timedelta(seconds=1):
        return Leaving(False)
    return Leaving(True, ended + EXIT_VERDICT)
