"""What the tests of the operator share: a clock that jumps, and a Kubernetes API that answers as told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import looptime
import pytest

T = TypeVar("T")


def run_virtual(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run in an event loop whose time jumps to the next timer when there is nothing else to do."""
    with asyncio.Runner(loop_factory=lambda: looptime.new_event_loop(start=0.0)) as runner:
        return runner.run(coroutine)


@pytest.fixture
def virtual() -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return run_virtual
