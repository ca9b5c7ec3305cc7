"""The calls to the servers of one job: the pods that are called, and the settings that they get (O8)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from backstay_operator.progress import PolledServer, Round, address_of, health_of
from backstay_operator.record import record_id, record_of
from backstay_operator.slim import Json
from backstay_rpc import control_pb2
from backstay_spec import contract
from backstay_spec.grace import grace_seconds
from backstay_spec.names import Slot
from backstay_spec.planner.pods import PodView, own_pods
from backstay_spec.types import TrainingJobSpec

__all__ = ["round_of"]

_MOST_WITNESSES: Final = 4


def round_of(
    spec: TrainingJobSpec,
    status: Mapping[str, Any],
    uid: str,
    pods: Callable[[], Sequence[Json]],
    *,
    token: str,
    job_seconds: Callable[[], Iterable[float]],
) -> Round | None:
    """Returns the calls to a job's servers, or None if no server can be called.

    Args:
        spec, status, uid: the job.
        pods: returns the known pods of the job.
        token: the job's token.
        job_seconds: see `Round`.
    """
    # Of shards with standbys, the incarnation that serves, not the newest: a server with an older one stops.
    active: Mapping[str, int] = status.get("active") or {}
    incarnations: Mapping[str, int] = {**(status.get("incarnations") or {}), **active}
    found = own_pods(pods(), uid)
    servers = [
        server
        for view, ip in _running(found, contract.ROLE_SERVER, deleting=bool(active))
        if (server := _server(view, ip, serves=incarnations.get(view.slot.key) == view.incarnation)).serves or active
    ]
    if not servers:
        return None
    stored, grace = spec.checkpoint, grace_seconds(spec.update.grace)
    return Round(
        servers=servers,
        token=token,
        world=spec.workers.replicas,
        incarnations=incarnations,
        checkpoint=control_pb2.CheckpointSettings(
            every_steps=stored.every_steps or 0, every_seconds=stored.every_seconds, keep=stored.keep
        ),
        stall_seconds=spec.workers.stall_seconds,
        grace=control_pb2.Grace(seconds=grace or 0.0, auto=grace is None),
        record=lambda: record_of(status),
        record_id=record_id(status),
        job_seconds=job_seconds,
        workers={
            view.uid: health_of(ip)
            for view, ip in itertools.islice(_running(found, contract.ROLE_WORKER), _MOST_WITNESSES)
        },
        worker=lambda rank, incarnation: _worker(own_pods(pods(), uid), rank, incarnation),
    )


def _server(view: PodView, ip: str, *, serves: bool) -> PolledServer:
    return PolledServer(view.slot.index, view.incarnation, view.uid, address_of(ip), serves, health_of(ip))


def _worker(found: Mapping[Slot, Sequence[PodView]], rank: int, incarnation: int) -> tuple[str, str] | None:
    """Returns the uid and the health URL of one running worker's pod."""
    for view, ip in _running(found, contract.ROLE_WORKER):
        if (view.slot.index, view.incarnation) == (rank, incarnation):
            return view.uid, health_of(ip)
    return None


def _running(
    found: Mapping[Slot, Sequence[PodView]], role: str, *, deleting: bool = False
) -> Iterator[tuple[PodView, str]]:
    """Yields the running pods of a role, each with its address; `deleting`: also pods that are being deleted."""
    for slot, views in found.items():
        for view in (each.first for each in views) if slot.role == role else ():
            status = view.raw.get("status") or {}
            if status.get("phase") == "Running" and status.get("podIP") and (deleting or not view.deleting):
                yield view, status["podIP"]
