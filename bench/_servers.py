"""Answers the operator's calls for the servers of all jobs of `jobs.py`, at one address, in its own process."""

from __future__ import annotations

import asyncio
import sys

import grpc
import grpc.aio

from backstay_rpc import control_pb2, control_pb2_grpc
from backstay_spec import contract
from backstay_spec.job_report import JobReport

_REPORT = JobReport(step=100, term=1, examples_per_second=1000.0).encoded()


class Trains(control_pb2_grpc.ControlServicer):
    """Answers that every server trains and that every worker has contributed."""

    async def Progress(  # noqa: N802  gRPC's name
        self, request: control_pb2.ProgressRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ProgressReply:
        """Returns the answer of the server that the request is for."""
        ranks = {
            int(slot.rpartition("-")[2]): incarnation
            for slot, incarnation in request.incarnations.items()
            if slot.startswith(contract.ROLE_WORKER)
        }
        return control_pb2.ProgressReply(
            incarnation=request.expected_incarnation,
            term=1,
            step=100,
            world=request.world,
            report=_REPORT,
            contributed=ranks,
            beating=ranks,
        )


async def main(address: str) -> None:
    """Serve until the parent closes standard input."""
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServicer_to_server(Trains(), server)
    server.add_insecure_port(f"{address}:{contract.PORT_CONTROL}")
    await server.start()
    print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
