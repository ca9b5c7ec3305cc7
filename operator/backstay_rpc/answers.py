"""The answers of a job's servers on the control channel, in the planner's form.

A server may have another version of Backstay, and a stranger may have the token. So a value that is not valid counts as
absent, and the reason is in `Progress.unreadable`: nothing that a server answers may stop the operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

from backstay_rpc import control_pb2
from backstay_spec.events import one_line
from backstay_spec.goodput import LONGEST, SecondsReport
from backstay_spec.job_report import MOST, JobReport
from backstay_spec.observed import Progress, Stalled, StoredReport

__all__ = ["carried", "combine", "urgent"]

_QUOTED: Final = 300  # characters of an error about an answer
_LONGEST_URI: Final = 2_000


def combine(
    replies: Mapping[int, control_pb2.ProgressReply],
    taken: datetime,
) -> Progress | None:
    """Returns the answers of one round, in the planner's form.

    The coordinator (shard 0) reports the state of the whole job. Any shard reports workers that are stalled, that have
    contributed, or that are alive. None if no server answered. Values that are not valid are left out.
    """
    if not replies:
        return None
    stalled: dict[tuple[int, int], str] = {}
    contributed: dict[int, int] = {}
    beating: dict[int, int] = {}
    for _, reply in sorted(replies.items()):
        for worker in reply.stalled:
            stalled.setdefault((worker.rank, worker.incarnation), worker.reason)
        for found, reported in ((contributed, reply.contributed), (beating, reply.beating)):
            for rank, incarnation in reported.items():
                found[rank] = max(incarnation, found.get(rank, 0))
    fields: dict[str, Any] = {}
    coordinator = replies.get(0)
    if coordinator is not None:
        report, unreadable = _report(coordinator)
        fields = {
            "coordinator": coordinator.incarnation,
            "report": report,
            "unreadable": unreadable,
            "worker_seconds": dict(_worker_seconds(coordinator, taken)),
            "death_reports": tuple(
                StoredReport(each.slot, each.incarnation, each.uri)
                for each in coordinator.death_reports
                if len(each.uri) <= _LONGEST_URI
            ),
            "done": coordinator.done,
        }
    return Progress(
        taken=taken,
        reached=frozenset(replies),
        in_sync={shard: reply.standby for shard, reply in sorted(replies.items()) if reply.standby},
        stalled=tuple(Stalled(rank, incarnation, why) for (rank, incarnation), why in sorted(stalled.items())),
        contributed=contributed,
        beating=beating,
        **fields,
    )


def _report(reply: control_pb2.ProgressReply) -> tuple[JobReport, str]:
    """Returns the report of shard 0's server, and why a part of it cannot be read. The second is empty if all of it
    can.

    It has the position of the server, because a standby that takes over has no report yet.
    """
    unreadable = ""
    try:
        report = JobReport.decoded(reply.report) if reply.report else JobReport()
    except ValueError as error:
        report, unreadable = JobReport(), one_line(str(error), _QUOTED)
    term, step, world = reply.term or None, reply.step, reply.world or None
    if max(reply.term, reply.step) > MOST:
        term, unreadable = None, f"term {reply.term} and step {reply.step} are not both in 0 .. 2^63-1"
    # A server that is still loading has no term and no step.
    return report.model_copy(update={"term": term, "step": step if term else None, "world": world}), unreadable


def _worker_seconds(
    reply: control_pb2.ProgressReply, taken: datetime
) -> Iterator[tuple[tuple[int, int], SecondsReport]]:
    for one in reply.worker_seconds:
        seconds = tuple(one.seconds)
        # Written so that a NaN is not valid.
        if one.ago <= LONGEST and all(0 <= value <= LONGEST for value in (*seconds, one.unsaved)):
            at = taken.timestamp() - max(0.0, one.ago)
            yield (one.rank, one.incarnation), SecondsReport(at, seconds, one.unsaved, one.version)


def carried(before: Progress | None, after: Progress) -> Progress:
    """`after`, with the last reported standbys and step of the servers that `after` did not reach."""
    term, step = after.report.term, after.report.step
    here = (term, step) if term is not None and step is not None else None
    if before is None:
        return replace(after, last=here)
    left = {shard: standby for shard, standby in before.in_sync.items() if shard not in after.reached}
    began_now = here is not None and before.last is not None and before.last[0] < here[0]
    return replace(
        after,
        in_sync={**left, **after.in_sync},
        last=here or before.last,
        step_before_term=before.last[1] if began_now and before.last else before.step_before_term,
    )


def urgent(before: Progress | None, after: Progress) -> bool:
    """Returns whether `after` contains news for which a plan is needed now, and not in ten seconds."""
    if before is None:
        return True
    fields = ("reached", "stalled", "contributed", "in_sync", "death_reports", "done")
    rows = ("term", "world", "checkpoint_error", "evaluation_error")
    return any(getattr(before, name) != getattr(after, name) for name in fields) or any(
        getattr(before.report, name) != getattr(after.report, name) for name in rows
    )
