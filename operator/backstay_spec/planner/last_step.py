"""Decides the last step of a job that fails, from all that its pods reported.

The newest answer of the servers may be two seconds old, and a short job has none. The messages of pods that ended are
newer: a worker writes the version that it received last, and a server the version of the end.
"""

from __future__ import annotations

from backstay_spec.causes import reached_by
from backstay_spec.planner.facts import Facts

__all__ = ["last_step"]


def last_step(facts: Facts) -> int | None:
    """Returns the largest step of the newest term that a pod of this run reported as applied, or None if none did."""
    old, progress = facts.old, facts.progress
    known: list[tuple[int | None, int]] = []
    if progress is not None and progress.last is not None:
        known.append(progress.last)
    elif progress is not None and progress.report.step is not None:
        known.append((progress.report.term, progress.report.step))
    elif old.step is not None:
        known.append((old.term, old.step))
    of_this_run = (pod for pods in facts.pods.values() for pod in pods if facts.is_of_this_run(pod))
    known += [found for pod in of_this_run if (found := reached_by(pod.raw))]
    # An older term was rolled back. A message without a term belongs to the newest one.
    newest = max((term for term, _ in known if term is not None), default=None)
    return max((step for term, step in known if term in (None, newest)), default=None)
