"""A container that is stopped while its process is being started, and what it gets of the node's GPUs."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from backstay_cluster.kubelet.container import ContainerProcess, Reserved
from backstay_cluster.kubelet.node import Machine, NodeFacts, PodNode, Pool
from backstay_cluster.kubelet.preload import without_gpu
from backstay_cluster.kubelet.runtime import Process
from backstay_cluster.kubelet.status import ContainerRecord


class Starting:
    """A runtime whose processes start when the test lets them, and end by SIGTERM."""

    def __init__(self) -> None:
        self.begun, self.let, self.signals = asyncio.Event(), asyncio.Event(), list[int]()
        self.environ: dict[str, str] = {}

    async def start(self, container: str, argv: Sequence[str], environ: dict[str, str], *_: Any) -> Process:
        self.environ = environ
        self.begun.set()
        await self.let.wait()
        return Process(container, 1, asyncio.get_running_loop().create_future())

    def kill(self, process: Process, number: int, *, group: bool = False) -> None:
        self.signals.append(number)
        process.exited.set_result(128 + number)


async def stopped_while_it_starts(
    folder: Path, image: dict[str, str] | None = None, gpus: Sequence[str] = (), env: Sequence[Any] = ()
) -> Starting:
    """Returns the runtime of a container with these GPUs and variables, after its end."""
    runtime, events = Starting(), SimpleNamespace(record=lambda *_, **__: None)
    facts = NodeFacts.of("node", "127.0.0.1", {})
    machine = Machine(runtime, image or {}, without_gpu=without_gpu([str(folder)]))
    node = PodNode(SimpleNamespace(), events, facts, machine, folder, Pool(()))
    pod = {"metadata": {"name": "p", "namespace": "default", "uid": "1"}, "spec": {}}
    spec = {"name": "main", "image": "x", "command": ["python"], "env": list(env)}
    reserved = Reserved(folder / "main", "127.0.0.1", gpus)
    container = ContainerProcess(node, pod, spec, ContainerRecord("main", "x"), lambda: None, reserved)
    running = asyncio.create_task(container.run({}, "Never"))
    await runtime.begun.wait()
    container.stop(5.0)
    runtime.let.set()
    await running
    return runtime


async def test_it_has_its_grace_period_as_any_other(tmp_path: Path) -> None:
    runtime = await stopped_while_it_starts(tmp_path)
    assert runtime.signals == [signal.SIGTERM]


@pytest.mark.parametrize(
    ("gpus", "env", "platforms"),
    [
        ((), [], "cpu"),
        ((), [{"name": "JAX_PLATFORMS", "value": "tpu"}], "tpu"),
        (("0", "2"), [], "cuda"),
    ],
)
async def test_without_a_gpu_jax_looks_for_none(
    tmp_path: Path, gpus: Sequence[str], env: Sequence[Any], platforms: str
) -> None:
    """JAX fails where it finds NVIDIA's driver, and may use no device. The node's variable is the user's."""
    assert without_gpu([str(tmp_path / "no-device")]) == {}
    runtime = await stopped_while_it_starts(tmp_path, {"JAX_PLATFORMS": "cuda"}, gpus, env)
    assert runtime.environ["JAX_PLATFORMS"] == platforms
    assert runtime.environ["CUDA_VISIBLE_DEVICES"] == ",".join(gpus)
