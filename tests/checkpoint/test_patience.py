"""T8: a pod reads checkpoints again while the storage fails, for a bounded time, and reports damage immediately."""

from __future__ import annotations

import pytest

from backstay._checkpoint import patiently
from backstay.errors import CheckpointError, StorageError


class Storage:
    """A storage whose first reads fail. The waits between them are recorded, and are the only time that passes."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.slept: list[float] = []

    def read(self) -> str:
        if len(self.slept) < self.failures:
            raise StorageError("503 while calling ls")
        return "newest"

    def clock(self) -> float:
        return sum(self.slept)


def test_a_storage_that_works_again_is_read() -> None:
    storage = Storage(4)
    assert patiently(storage.read, clock=storage.clock, sleep=storage.slept.append) == "newest"
    assert storage.slept == [1, 2, 4, 8]


def test_t8_reading_from_a_storage_that_never_answers_ends_with_an_error() -> None:
    storage = Storage(10**6)
    with pytest.raises(StorageError, match="503 while calling ls"):
        patiently(storage.read, seconds=20, clock=storage.clock, sleep=storage.slept.append)
    assert sum(storage.slept) == 20


def test_damage_is_reported_immediately() -> None:
    """Only after an error of the storage does `patiently` try again."""

    def damaged() -> None:
        raise CheckpointError("its SHA-256 is not the manifest's")

    with pytest.raises(CheckpointError, match="SHA-256"):
        patiently(damaged, sleep=lambda seconds: pytest.fail("it waited"))
