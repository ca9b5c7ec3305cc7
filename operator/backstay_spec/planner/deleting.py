"""Deletes the pods of a view."""

from __future__ import annotations

from collections.abc import Collection

from backstay_spec.actions import DeletePod
from backstay_spec.planner.pods import PodView

__all__ = ["deletions"]


def deletions(
    view: PodView,
    grace_seconds: int | None,
    reason: str,
    deleted: Collection[str] = (),
    *,
    terminal: bool = False,
) -> tuple[DeletePod, ...]:
    """Returns the deletions of the pods of a view that are not being deleted.

    Args:
        grace_seconds, reason: see `DeletePod`.
        deleted: the uids of pods that this plan deletes already.
        terminal: whether pods that have ended are deleted too.
    """
    return tuple(
        DeletePod(pod.name, pod.uid, grace_seconds, reason)
        for pod in view.pods
        if not pod.deleting and (terminal or not pod.terminal) and pod.uid not in deleted
    )
