"""Pushes of one value, and the parameters that come back, for tests of streams."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from backstay._transport._tensors._client import Push
from backstay_rpc.control_pb2 import (
    GradientInfo,
)

Make = Callable[..., Any]
BIG = 1_000_000  # elements: a push that takes several frames
SMALL = 10


def commit_alone(kit: SimpleNamespace, shard: Any) -> Callable[[int, Any], None]:
    """Returns a coordinator that commits each gradient by itself."""
    return lambda staged: shard.runtime.deliver(kit.commit(staged.id.version, [staged.id]))


def push_of(kit: SimpleNamespace, shard: Any, value: float, **more: Any) -> Push:
    return Push(kit.gid(**more), [shard.gradient(value)], lambda: GradientInfo(finite=True, examples=3))


def pulled(client: Any, shard: Any) -> Any:
    """Returns the client once it has pulled, as a worker does before it pushes."""
    client.exchange_all(None, 0, [shard.buffers()])
    return client


def values(shard: Any, buffers: Any) -> list[float]:
    """Returns the elements of received parameters, each of which must be the same within a block."""
    result = []
    for buffer, block in zip(buffers, shard.layout.blocks, strict=True):
        array = buffer.view(block.dtype)
        assert (array == array[0]).all()
        result.append(float(array[0]))
    return result
