"""Decides whether an exception of workers is a mistake of the script that no attempt cures, and fails the job (O4).

`same_exception` decides about pods that agree before the first update, and budgets about most crashes. Five cases
cannot end otherwise, however often the workers are replaced:

- `batches` of a worker raised StopIteration, at any time. Its replacement would start the iterator again, on the same
  data;
- `batches` of a worker returned a batch without rows. Its replacement would get the same batch;
- all workers, at least two, raised the same exception at the same line after the first update;
- a server, without which no update is made, raised the same exception three times in a row before it served;
- every update needs every worker, and one of them raised the same exception three times in a row without a contribution
  between. Its replacements compute the same batch, and no update is made without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Final

from backstay_spec import contract
from backstay_spec.exceptions import Raised
from backstay_spec.names import Slot
from backstay_spec.planner import same_exception
from backstay_spec.planner.effects import JobFailure
from backstay_spec.planner.facts import Facts, desired_slots
from backstay_spec.planner.pods import has_worked
from backstay_spec.planner.record import Record

__all__ = ["OF_BATCHES", "judge"]

#: The exceptions of `batches` in one worker that fail the job. The reason of the failure has the same name.
OF_BATCHES: Final = ("BatchesEnded", "EmptyBatch")
_FAILURES: Final = 2


def judge(facts: Facts, record: Record) -> JobFailure | None:
    """Returns the job's failure by a mistake of its script."""
    if facts.done or facts.spec.run_policy.suspend:
        return None
    slots = [slot for slot in desired_slots(facts.job) if slot.role == contract.ROLE_WORKER]
    raised = {slot: found for slot in slots if (found := _exceptions(facts, slot))}
    # One worker is enough, because its own data is invalid.
    for slot, found in raised.items():
        if found[0].type in OF_BATCHES:
            return JobFailure(found[0].type, f"{slot.text}: {found[0].text}", found[0].traceback)
    newest = [found[0] for found in raised.values()]
    if facts.trained and len(newest) == len(slots) > 1 and len({one.key for one in newest}) == 1:
        return _failure(newest[0], f"all {len(slots)} workers after the first update")
    for shard in facts.shards:
        server = Slot(contract.ROLE_SERVER, shard)
        if failure := _cannot_serve(facts, record, server):
            return failure
    for slot, found in raised.items():
        if _cannot_contribute(facts, record, slot, found):
            return _failure(found[0], f"{slot.text} again and again, without a contribution between")
    return None


def _exceptions(facts: Facts, slot: Slot) -> list[Raised]:
    """Returns the exceptions of a slot's dead pods, newest first. An end without one may have another cause."""
    found = same_exception.last_raised(facts, slot)
    return list(itertools.takewhile(lambda raised: not raised.guessed, found))


def _cannot_serve(facts: Facts, record: Record, slot: Slot) -> JobFailure | None:
    """Returns the failure, if at least three pods of a server in a row have raised the same exception before they
    served."""
    pods, backoff = facts.pods.get(slot, ()), record.backoff.get(slot.key)
    found = _exceptions(facts, slot)
    # The newest death is counted too: the same plan that counts it is followed by another one.
    if not facts.trained or backoff is None or backoff.failures <= _FAILURES:
        return None
    if len(found) < 2 or found[0].key != found[1].key or any(has_worked(pod, None) for pod in pods[-2:]):
        return None
    return _failure(found[0], f"{slot.text} again and again, before it served")


def _cannot_contribute(facts: Facts, record: Record, slot: Slot, found: Sequence[Raised]) -> bool:
    """Returns whether every update waits for this worker, and at least three of its pods in a row have raised this."""
    world = facts.spec.workers.replicas
    if facts.spec.update.mode != "Sync" or facts.spec.update.quorum(world) < world:
        return False
    backoff = record.backoff.get(slot.key)
    if backoff is None or backoff.failures < _FAILURES or len(found) < 2 or found[0].key != found[1].key:
        return False
    # Of the dead pods of a slot, the last two are kept. An answer may come after the back-off counted them.
    dead = [pod.incarnation for pod in facts.pods[slot] if pod.ended]
    if not facts.trained:
        # The first crash counts for the back-off only if that pod never worked. `same_exception` decides about the only
        # worker.
        return world > 1 and dead[-1] > _FAILURES
    return facts.progress is not None and facts.progress.contributed.get(slot.index, 0) < dead[-2]


def _failure(raised: Raised, pods: str) -> JobFailure:
    text = f"{raised.summary}: raised by {pods}, so another attempt would fail too"
    return JobFailure(same_exception.REASON, text, raised.traceback)
