"""A container that is stopped while its process is being started."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from backstay_cluster.kubelet.container import ContainerProcess, Reserved
from backstay_cluster.kubelet.node import Machine, NodeFacts, PodNode, Pool
from backstay_cluster.kubelet.runtime import Process
from backstay_cluster.kubelet.status import ContainerRecord


class Starting:
    """A runtime whose processes start when the test lets them, and end by SIGTERM."""

    def __init__(self) -> None:
        self.begun, self.let, self.signals = asyncio.Event(), asyncio.Event(), list[int]()

    async def start(self, container: str, *_: Any) -> Process:
        self.begun.set()
        await self.let.wait()
        return Process(container, 1, asyncio.get_running_loop().create_future())

    def kill(self, process: Process, number: int, *, group: bool = False) -> None:
        self.signals.append(number)
        process.exited.set_result(128 + number)


async def test_it_has_its_grace_period_as_any_other(tmp_path: Path) -> None:
    runtime, events = Starting(), SimpleNamespace(record=lambda *_, **__: None)
    facts = NodeFacts.of("node", "127.0.0.1", {})
    node = PodNode(SimpleNamespace(), events, facts, Machine(runtime, {}), tmp_path, Pool(()))
    pod = {"metadata": {"name": "p", "namespace": "default", "uid": "1"}, "spec": {}}
    spec = {"name": "main", "image": "x", "command": ["python"]}
    reserved = Reserved(tmp_path / "main", "127.0.0.1", ())
    container = ContainerProcess(node, pod, spec, ContainerRecord("main", "x"), lambda: None, reserved)
    running = asyncio.create_task(container.run({}, "Never"))
    await runtime.begun.wait()
    container.stop(5.0)
    runtime.let.set()
    await running
    assert runtime.signals == [signal.SIGTERM]
