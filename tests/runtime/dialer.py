"""Calls a server again and again, as a pod or the operator does. Exits with 3 if that takes a lot of memory.

Tests run it as a separate process.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import grpc

from backstay._transport import ClientStream
from backstay.errors import PeerLost
from backstay_cluster.tests.limits import slack
from backstay_rpc.channels import open_aio_channel, open_channel
from backstay_rpc.control_pb2 import CoordinateRequest, Hello, ProgressRequest
from backstay_rpc.control_pb2_grpc import ControlStub
from backstay_rpc.credentials import Credentials

CALLS, PARALLEL = 60, 4
MEMORY_BYTES = 300 << 20
TOO_MUCH = 3


def memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def control(address: str) -> None:
    channel = open_channel(address)
    with contextlib.suppress(grpc.RpcError):
        ControlStub(channel).Coordinate(CoordinateRequest())  # type: ignore[no-untyped-call]
    channel.close()


def data(address: str) -> None:
    with contextlib.suppress(PeerLost):
        stream = ClientStream(address, Hello(), Credentials("token"))
        try:
            stream.read()
        finally:
            stream.close()


def operator(address: str) -> None:
    async def ask() -> None:
        async with open_aio_channel(address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await ControlStub(channel).Progress(ProgressRequest(), timeout=5 * slack())  # type: ignore[no-untyped-call]

    asyncio.run(ask())


def watch(done: threading.Event) -> None:
    before = memory()
    while not done.wait(0.02):
        if memory() - before > MEMORY_BYTES:
            os._exit(TOO_MUCH)


def main(dial: Callable[[str], None], address: str) -> None:
    done = threading.Event()
    threading.Thread(target=watch, args=(done,), daemon=True).start()

    def some() -> None:
        for _ in range(CALLS // PARALLEL):
            dial(address)

    threads = [threading.Thread(target=some) for _ in range(PARALLEL)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()


main({"control": control, "data": data, "operator": operator}[sys.argv[1]], sys.argv[2])
