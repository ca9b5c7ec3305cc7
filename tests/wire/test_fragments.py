"""Updates of one fragment, on the standby of a server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import optax
import pytest

from backstay._shard import Follower
from backstay._shard._operand import WHOLE, Gathered, PreparedMean
from backstay._update import (
    Partition,
    Rule,
    ShardEngine,
    ShardWire,
    Wire,
    analyse,
    coded_leaves,
    describe,
    fragments_of,
    partition,
    shard_wires,
)
from backstay.errors import PeerLost
from backstay_rpc.control_pb2 import Commit, Contribution, Frame, GradientId, GradientInfo, ReplicaArray, ReplicaState
from backstay_rpc.control_pb2 import Replica as ReplicaFrame

COUNT = 3


def model() -> Any:
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(30 + 7 * layer, 40)).astype(np.float32) for layer in range(5)]
    return {f"layer{number}": {"w": layer} for number, layer in enumerate(layers)}, {"mean": np.ones(11, np.float32)}


def laid_out() -> tuple[Rule, Partition, ShardWire]:
    tree = describe(model(), has_state=True)
    coded = coded_leaves(tree, Wire())
    rule = analyse(optax.sgd(0.7, momentum=0.9, nesterov=True), tree)
    parts = partition(tree, rule, 1, block_bytes=4096, coded=coded, fragments=fragments_of(tree, COUNT))
    return rule, parts, shard_wires(parts, Wire(), coded)[0]


def gradients(parts: Partition, wire: ShardWire, step: int, rank: int) -> list[Any]:
    rng = np.random.default_rng([step, rank])
    return [
        None if sent.absent else rng.normal(size=block.size).astype(block.dtype)
        for block, sent in zip(parts.shards[0].blocks, wire.select(wire.selection([step])).gradients, strict=True)
    ]


class Script:
    """A stream on which an active server sends these frames."""

    def __init__(self, frames: Iterator[tuple[Frame, Any]]) -> None:
        self._frames = frames

    def read(self, place: Any = None) -> tuple[Frame, Any]:
        found = next(self._frames, None)
        if found is None:
            raise PeerLost("the end of the script")
        frame, body = found
        came = np.concatenate([np.empty(0, np.uint8), *(piece.reshape(-1).view(np.uint8) for piece in body)])
        if not came.nbytes:
            return frame, None
        targets = None if place is None else place(frame, came.nbytes)
        if targets is None:
            return frame, came
        at = 0
        for target in targets:
            target[:] = came[at : at + target.nbytes]
            at += target.nbytes
        return frame, came[:0]

    def write(self, frame: Frame) -> None:
        assert frame.WhichOneof("kind")


@pytest.mark.parametrize("whole", [True, False])
def test_t3_a_standby_repeats_updates_of_fragments_bit_for_bit(whole: bool, monkeypatch: Any) -> None:
    """Whether a mean travels in one frame or in chunks."""
    monkeypatch.setattr("backstay._transport._streams.frames.WHOLE_BYTES", 1 << 20 if whole else 0)
    rule, parts, wire = laid_out()
    engine = ShardEngine(parts, 0, rule, model())

    def frames() -> Iterator[tuple[Frame, Any]]:
        yield Frame(replica=ReplicaFrame(state=ReplicaState(term=1, version=0, world=2))), ()
        for entry in engine.snapshot(whole=True).entries:
            array = ReplicaArray(key=entry.key, start=entry.start, stop=entry.stop)
            yield Frame(replica=ReplicaFrame(array=array)), np.array(entry.value)
        yield WHOLE, ()
        for version in range(COUNT + 2):
            ids = [GradientId(term=1, version=version, rank=rank, key_step=version) for rank in range(2)]
            named = [Contribution(id=one, weight=1.0) for one in ids]
            given = [gradients(parts, wire, version, rank) for rank in range(2)]
            infos = [GradientInfo(finite=True)] * 2
            prepared = PreparedMean.of(engine, version, named, given, infos, 2.0, copy=True)
            yield from prepared.kept().frames()
            prepared.apply(engine, 1.0)
            assert Gathered(version, named, given, 2.0).is_of(version, named)
            commit = Commit(term=1, version=version, contributions=named, world=2, clip_factor=1.0)
            yield Frame(replica=ReplicaFrame(commit=commit)), ()

    follower = Follower(parts, 0, rule)
    with pytest.raises(PeerLost, match="the end of the script"):
        follower.follow(Script(frames()))  # type: ignore[arg-type]
    held = follower.take()
    assert held is not None
    assert held.engine.version == engine.version == COUNT + 2
    theirs = {(entry.key, entry.start): entry.value for entry in held.engine.snapshot(whole=True).entries}
    for entry in engine.snapshot(whole=True).entries:
        assert np.array_equal(theirs[entry.key, entry.start], entry.value)
