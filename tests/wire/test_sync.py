"""Several workers and several shards have one version everywhere, even with slow workers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from backstay._transport._streams._interfaces import Bytes, PartPush, Pulled
from backstay._transport._tensors._client import Push, ShardedClient
from backstay._update import ALL, Selection
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import GradientInfo, Part, RejectReason

Make = Callable[..., Any]


class Quorum:
    """The smallest valid coordinator, which takes the first `quorum` ranks whose gradient every shard has staged."""

    def __init__(self, kit: SimpleNamespace, shards: Sequence[Any], quorum: int) -> None:
        self._kit, self._shards, self._quorum = kit, shards, quorum
        self._lock = threading.Lock()
        self._where: dict[bytes, set[int]] = {}
        self._complete: dict[int, list[Any]] = {}
        self._decided = 0
        for shard in shards:
            shard.coordination.decide = partial(self.staged, shard.layout.shard)

    def staged(self, number: int, staged: Any) -> None:
        with self._lock:
            where = self._where.setdefault(staged.id.SerializeToString(), set())
            where.add(number)
            if len(where) < len(self._shards) or staged.id.version != self._decided:
                return
            complete = self._complete.setdefault(staged.id.version, [])
            complete.append(staged.id)
            if len(complete) < self._quorum:
                return
            self._decided += 1
            decision = self._kit.commit(staged.id.version, sorted(complete, key=lambda g: g.rank))
            for shard in self._shards:
                shard.runtime.deliver(decision)


def worker(kit: SimpleNamespace, shards: Sequence[Any], client: ShardedClient, rank: int, steps: int) -> list[Any]:
    """Push `rank + 1` everywhere until `steps` updates are made; returns (version, parameters, outcome) of each."""
    version, seen = 0, []
    for attempt in itertools.count():
        if version >= steps:
            return seen
        into = [shard.buffers() for shard in shards]
        push = Push(
            kit.gid(rank, version, attempt=attempt), [shard.gradient(rank + 1.0) for shard in shards], GradientInfo
        )
        pulled = client.exchange_all(push, 0, into)
        flat = np.concatenate([buffer.view(np.float32) for blocks in into for buffer in blocks])
        assert (flat == flat[0]).all(), "the shards' parameters are of different versions"
        seen.append((pulled.version, float(flat[0]), pulled.outcome))
        version = pulled.version
    return seen


def test_two_workers_in_sync(kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any) -> None:
    """T1: every update is the mean of both, on both shards, at every version."""
    shards = [make_shard((300_000, 5), number=0, serve=True), make_shard((9,), number=1, serve=True)]
    Quorum(kit, shards, 2)
    clients = [dial(*shards, rank=rank) for rank in range(2)]
    running = [background(lambda r=rank: worker(kit, shards, clients[r], r, 6)) for rank in range(2)]
    for future in running:
        assert future.result(kit.wait) == [(v + 1, 1.5 * (v + 1), 0) for v in range(6)]
    for shard in shards:
        assert shard.engine.applied == [[1.0, 2.0]] * 6
        assert shard.coordination.of("lost") == []


def test_backups_that_are_late_see_one_version(
    kit: SimpleNamespace, make_shard: Make, dial: Make, background: Any
) -> None:
    """T1, T2: three workers race, two make an update. Each gets whole versions, and all shards agree."""
    shards = [make_shard((200_000,), number=0, serve=True), make_shard((100_000,), number=1, serve=True)]
    Quorum(kit, shards, 2)
    clients = [dial(*shards, rank=rank) for rank in range(3)]
    running = [background(lambda r=rank: worker(kit, shards, clients[r], r, 8)) for rank in range(3)]
    # The last worker alone at the end waits for no other: the other two have made its version.
    results = [future.result(kit.wait) for future in running]
    first, second = (shard.engine.applied for shard in shards)
    assert first == second
    assert len(first) == 8
    assert all(len(update) == 2 for update in first)
    totals = np.cumsum([np.mean(update) for update in first])
    for seen in results:
        assert [version for version, _, _ in seen] == sorted(version for version, _, _ in seen)
        for version, value, _ in seen:
            assert value == pytest.approx(totals[version - 1])


class Scripted:
    """A `DataClient` that answers with given versions, and writes them into the buffers."""

    def __init__(self, shard: int, versions: list[int | Exception], term: int = 1) -> None:
        self.shard = shard
        self.term = term
        self.versions = versions
        self.asked: list[tuple[bool, int]] = []
        self.cancelled: str | None = None
        self.closed = False
        self.about: dict[int, tuple[RejectReason, int]] = {}  # by version: the outcome and the next key step

    def splits(self, part: Part) -> bool:
        del part
        return False

    def exchange(
        self, push: PartPush | None, min_version: int, into: Sequence[Bytes], wanted: Selection = ALL
    ) -> Pulled:
        self.asked.append((push is not None, min_version))
        version = self.versions.pop(0)
        if isinstance(version, Exception):
            raise version
        for block in into:
            block[:] = version
        outcome = RejectReason.LATE if push is not None and self.shard == 1 else RejectReason.REJECT_UNSPECIFIED
        outcome, next_key_step = self.about.get(version, (outcome, self.shard))
        return Pulled(self.term, version, 10 + version, outcome, next_key_step=next_key_step)

    def cancel(self, why: str) -> None:
        self.cancelled = why

    def close(self) -> None:
        self.closed = True


def push(kit: SimpleNamespace, shards: int) -> Push:
    return Push(kit.gid(), [[np.zeros(4, np.uint8)]] * shards, GradientInfo)


def buffers(shards: int) -> list[list[np.ndarray]]:
    return [[np.zeros(4, np.uint8)] for _ in range(shards)]


def test_shards_that_are_behind_are_asked_again(kit: SimpleNamespace) -> None:
    """T1: a late worker continues with one version of all shards: the highest of their answers."""
    clients = [Scripted(0, [5, 7]), Scripted(1, [6, 7]), Scripted(2, [4, 6, 7])]
    sharded = ShardedClient(clients, "Sync")
    into = buffers(3)
    pulled = sharded.exchange_all(push(kit, 3), 0, into)
    assert (pulled.version, pulled.world, pulled.outcome) == (7, 17, RejectReason.LATE)
    assert [int(blocks[0][0]) for blocks in into] == [7, 7, 7]
    assert clients[0].asked == [(True, 0), (False, 6)]
    assert clients[2].asked == [(True, 0), (False, 6), (False, 7)]
    assert clients[1].asked == [(True, 0), (False, 7)]
    sharded.close()
    assert all(client.closed for client in clients)


def test_t4_without_a_push_the_outcome_is_that_of_the_newest_update() -> None:
    """Shard 0 answers first about an older update, which was skipped."""
    clients = [Scripted(0, [5, 6]), Scripted(1, [6])]
    found = {5: (RejectReason.SKIPPED, 5), 6: (RejectReason.REJECT_UNSPECIFIED, 6)}
    for client in clients:
        client.about = found
    sharded = ShardedClient(clients, "Sync")
    pulled = sharded.exchange_all(None, 0, buffers(2))
    assert (pulled.version, pulled.outcome, pulled.next_key_step) == (6, *found[6])
    sharded.close()


def test_async_takes_what_there_is_and_names_the_lowest(kit: SimpleNamespace) -> None:
    """T5."""
    clients = [Scripted(0, [5]), Scripted(1, [9])]
    sharded = ShardedClient(clients, "Async")
    pulled = sharded.exchange_all(push(kit, 2), 0, buffers(2))
    assert (pulled.version, pulled.world, pulled.next_key_step) == (5, 19, 1)
    sharded.close()


@pytest.mark.parametrize("lost", [0, 1])
def test_one_lost_shard_ends_the_wait_for_the_others(kit: SimpleNamespace, lost: int) -> None:
    """T8: the others may wait for an update that never comes."""
    clients = [Scripted(shard, [PeerLost("gone") if shard == lost else 1]) for shard in range(2)]
    sharded = ShardedClient(clients, "Sync")
    with pytest.raises(PeerLost, match="gone"):
        sharded.exchange_all(push(kit, 2), 0, buffers(2))
    assert clients[1 - lost].cancelled == f"the stream to shard {lost} failed"
    sharded.close()


def test_shards_in_different_terms_are_a_lost_peer(kit: SimpleNamespace) -> None:
    """T6."""
    sharded = ShardedClient([Scripted(0, [3]), Scripted(1, [3], term=2)], "Sync")
    with pytest.raises(PeerLost, match=r"terms \[1, 2\]"):
        sharded.exchange_all(push(kit, 2), 0, buffers(2))
    sharded.close()
