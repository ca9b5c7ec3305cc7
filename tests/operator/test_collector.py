"""The operator's pauses do not grow with the number of jobs (O5): a collection visits what is new."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from backstay_operator.collector import ObjectCollector


class Node:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as tests/conftest.py has left it
    gc.enable()


def test_what_survived_is_not_visited_again_until_the_full_collection(virtual: Callable[..., Any]) -> None:
    async def story() -> None:
        gc.disable()
        old = Node()
        gone = weakref.ref(old)
        task = asyncio.create_task(ObjectCollector(period=10.0, rounds=3).run())
        await asyncio.sleep(1)
        assert not any(found is old for found in gc.get_objects())  # out of the collector's sight
        del old
        young = weakref.ref(Node())
        await asyncio.sleep(10)
        assert young() is None
        assert gone() is not None
        await asyncio.sleep(20)  # the third round has ended: everything is visited
        assert gone() is None
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert gc.get_freeze_count() == 0

    virtual(story())
