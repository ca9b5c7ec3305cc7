"""The request that the operator sends to each server every 2 s (O8), and that of the pods of a rank that meet."""

from __future__ import annotations

from typing import Any

import grpc
from between import LONG

from backstay_rpc import bearer
from backstay_rpc.control_pb2 import MeetRequest, Peer, ProgressReply, ProgressRequest
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_spec.job_report import JobReport


def progress(job: Any, **fields: Any) -> ProgressReply:
    """Returns the answer of shard 0's server of `job`; `fields` are those of the request."""
    with grpc.insecure_channel(job.control(0)) as channel:
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]
        reply: ProgressReply = stub.Progress(ProgressRequest(**fields), timeout=LONG, metadata=bearer(job.token))
    return reply


def report(job: Any, **fields: Any) -> JobReport:
    """Returns the report in that answer."""
    return JobReport.decoded(progress(job, **fields).report)


def address_of_rank(job: Any, rank: int) -> str:
    """Returns the address that the first pod of a rank has reported, of incarnation 1; an empty text if it has not."""
    with grpc.insecure_channel(job.control(0)) as channel:
        stub = ControlStub(channel)  # type: ignore[no-untyped-call]
        peer = Peer(role="worker", index=rank, incarnation=1, member=1)
        reply = stub.Meet(MeetRequest(peer=peer), timeout=LONG, metadata=bearer(job.token))
    return str(reply.address)
