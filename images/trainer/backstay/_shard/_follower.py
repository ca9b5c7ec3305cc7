"""The standby's side of replication, which holds the shard's state and applies the same updates as the active
server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backstay_rpc.control_pb2 import (
    Commit,
    Contribution,
    Frame,
    GradientInfo,
    ReplicaArray,
    ReplicaMean,
    ReplicaState,
    Rollback,
)

from .. import _instrument
from .._coordination import CoordinatorState, after
from .._transport import BufferPool, Bytes, Cover, Refusal, Staging, kind_of
from .._update import ShardEngine, ShardWire, array_specs
from ..errors import PeerLost, Refused
from ._operand import PreparedMean
from ._replication import HELD

if TYPE_CHECKING:
    from .._transport import ClientStream
    from .._update import Partition, Rule

__all__ = ["Follower", "HeldState"]


@dataclass
class HeldState:
    """The state of a standby, which is the whole shard as of the last commit that it received.

    Attributes:
        last: the commit that made `engine.version`, if one of this term did.
        prepared: the mean that the next commit may name.
        infos: the infos of the gradients in `last`.
        coordinator, start: the state of the coordinator, and the point at which the term began; only on shard 0.
        checkpoint_at: when the last checkpoint began, on the clock of `time.monotonic`; only on shard 0.
        history: the id of the term's history.
    """

    term: int
    world: int
    offset: int
    engine: ShardEngine
    last: Commit | None
    prepared: PreparedMean | None = None
    infos: tuple[GradientInfo, ...] = ()
    coordinator: CoordinatorState | None = None
    start: Rollback | None = None
    checkpoint_at: float = 0.0
    history: str = ""

    @property
    def contributions(self) -> tuple[Contribution, ...]:
        """The contributions whose mean is in `prepared`, or an empty tuple if there is none."""
        return () if self.prepared is None else self.prepared.contributions


class Follower:
    """Follows an active server, one stream after another, until `take`. One thread calls `follow`, any the rest."""

    def __init__(
        self, partition: Partition, shard: int, rule: Rule, advanced: Callable[[int], None] = lambda version: None
    ) -> None:
        """
        Args:
            advanced: called with each version that is held, in the thread of `follow`.
        """
        self._partition, self._shard, self._rule, self._advanced = partition, shard, rule, advanced
        layout = partition.shards[shard]
        self._wire = ShardWire.exactly(layout.blocks, partition.fragments)
        self._pools: dict[ShardWire, BufferPool] = {}
        self._dtypes = {spec.key: spec.dtype for spec in array_specs(rule)}
        self._lock = threading.Lock()
        self._held: HeldState | None = None
        self._taken = False
        self._staging: Staging | None = None  # the memory of the prepared mean
        self._due: Commit | None = None  # held, and not applied yet
        self._kept: ClientStream | None = None  # open: see `take`

    @property
    def held(self) -> HeldState | None:
        """The state; None until a stream has filled it."""
        return self._held

    def take(self) -> HeldState | None:
        """Stop following, and return the state: this server is the active one now.

        The stream stays open: if the previous server is still alive, its standby must not look dead to it.
        """
        with self._lock:
            self._advance()
            self._taken = True
            return self._held

    def follow(self, stream: ClientStream) -> None:
        """
        Raises:
            PeerLost: the stream ended.
            Refused: the active server refuses.
        """

        staging: Staging | None = None

        def whole(frame: Frame, nbytes: int) -> Sequence[Bytes] | None:
            """A mean in one frame is received into its memory."""
            nonlocal staging
            if kind_of(frame) != "replica" or not frame.replica.mean.whole:
                return None
            staging = self._memory(frame.replica.mean)
            return _whole(staging, nbytes)

        while True:
            staging = None
            frame, body = stream.read(whole)
            if kind_of(frame) == "refused":
                raise Refused(frame.refused.code, frame.refused.message)
            if kind_of(frame) != "replica" or (body is not None and not frame.replica.mean.whole):
                raise PeerLost(f"an active server sends no frame {kind_of(frame)!r} to its standby")
            kind = frame.replica.WhichOneof("kind")
            then: Callable[[], None] | None = None
            if kind == "state":
                change = self._receive_state(stream, frame.replica.state)
            elif kind == "mean":
                change = self._receive_mean(stream, frame.replica.mean, staging)
            elif kind == "commit":
                commit = frame.replica.commit
                change, then = lambda: self._accept(commit), self._apply  # noqa: B023
            elif kind == "alive":
                change = lambda: None  # noqa: E731
            else:
                raise PeerLost(f"a replica's frame {kind!r} cannot arrive here")
            # After the takeover this state serves, and follows no other server.
            with self._lock:
                if self._taken:
                    self._kept = stream
                    return
                change()
            if kind == "state" and self._held is not None:
                _instrument.reach("state", self._held.engine.version)
            elif kind == "commit":
                _instrument.reach("follow", frame.replica.commit.version + 1)
            stream.write(HELD)
            if then is not None:
                then()

    def _receive_state(self, stream: ClientStream, state: ReplicaState) -> Callable[[], None]:
        arrays: dict[tuple[str, int, int], Bytes] = {}
        filled: dict[tuple[str, int, int], int] = {}
        while True:
            frame, body = stream.read()
            kind = frame.replica.WhichOneof("kind") if kind_of(frame) == "replica" else kind_of(frame)
            if kind == "whole":
                break
            if kind != "array" or body is None:
                raise PeerLost(f"a frame {kind!r} cannot arrive inside a state")
            array: ReplicaArray = frame.replica.array
            key = (array.key, array.start, array.stop)
            if array.key not in self._dtypes:
                raise PeerLost(f"the state has an array {array.key} that this job does not have")
            memory = arrays.get(key)
            if memory is None:
                memory = arrays[key] = np.empty((array.stop - array.start) * self._dtypes[array.key].itemsize, np.uint8)
            if array.offset != filled.get(key, 0) or array.offset + body.nbytes > memory.nbytes:
                raise PeerLost(f"the bytes of array {array.key} do not arrive in order")
            memory[array.offset : array.offset + body.nbytes] = body
            filled[key] = array.offset + body.nbytes
        for key, memory in arrays.items():
            if filled.get(key) != memory.nbytes:
                raise PeerLost(f"array {key[0]} arrived incompletely")

        def read(key: str, start: int, stop: int) -> Any:
            try:
                return arrays[key, start, stop].view(self._dtypes[key])
            except KeyError:
                raise PeerLost(f"the state lacks elements {start}:{stop} of array {key}") from None

        engine = ShardEngine.restore(self._partition, self._shard, self._rule, read, state.version)
        coordinator = CoordinatorState.from_json(json.loads(state.coordinator)) if state.coordinator else None
        held = HeldState(
            term=state.term,
            world=state.world,
            offset=state.offset,
            engine=engine,
            last=state.last if state.HasField("last") else None,
            coordinator=coordinator,
            start=state.start if state.HasField("start") else None,
            checkpoint_at=time.monotonic() - state.since_checkpoint,
            history=state.history,
        )

        def change() -> None:
            self._held, self._due = held, None
            self._advanced(held.engine.version)

        return change

    def _memory(self, mean: ReplicaMean) -> Staging:
        """Returns memory for the blocks of a mean gradient that travel."""
        steps = [contribution.id.key_step for contribution in mean.contributions]
        some = self._wire.select(self._wire.selection(steps))
        if some not in self._pools:
            self._pools[some] = BufferPool(some.exact)
        return self._pools[some].take()

    def _receive_mean(self, stream: ClientStream, mean: ReplicaMean, staging: Staging | None) -> Callable[[], None]:
        """Returns what takes over the mean, once it has arrived.

        Args:
            staging: a mean in one frame that has arrived; None: it has no bytes, or its chunks follow.
        """
        if staging is None:
            staging = self._memory(mean)
            if mean.whole:
                _whole(staging, 0)
        cover = Cover([block.nbytes for block in staging.blocks])
        place = cover.place(staging.blocks)
        while not mean.whole:
            frame, body = stream.read(place)
            if kind_of(frame) == "chunk" and body is not None:
                continue  # in its place
            if kind_of(frame) == "replica" and frame.replica.whole and not cover.missing:
                break
            raise PeerLost(f"a frame {kind_of(frame)!r} cannot arrive inside a mean gradient")

        def change() -> None:
            held = self._must_hold("a mean gradient")
            held.prepared = PreparedMean(mean.version, mean.contributions, staging.arrays, mean.infos)
            before, self._staging = self._staging, staging
            if before is not None:
                before.give()

        return change

    def _accept(self, commit: Commit) -> None:
        """A commit is held before it is applied: the active server waits for the answer, and `take` applies it."""
        held = self._must_hold("a commit")
        if (commit.term, commit.version) != (held.term, held.engine.version):
            raise PeerLost(f"the commit of version {commit.version} does not follow version {held.engine.version}")
        if not commit.skip and not (held.prepared and held.prepared.is_of(commit.version, commit.contributions)):
            raise PeerLost(f"the commit of version {commit.version} names gradients whose mean did not arrive")
        self._due = commit

    def _apply(self) -> None:
        with self._lock:
            if self._taken:
                return  # `take` has applied it
            self._advance()
            self._advanced(self._must_hold("a commit").engine.version)
        self._settle()

    def _advance(self) -> None:
        """Apply the commit that is held, if one is."""
        commit, self._due = self._due, None
        if commit is None:
            return
        held = self._must_hold("a commit")
        prepared = held.prepared
        held.infos = () if prepared is None else prepared.infos
        if commit.skip:
            held.engine.skip()
        else:
            assert prepared is not None
            prepared.apply(held.engine, commit.clip_factor)
        held.world, held.offset, held.last, held.prepared = commit.world, commit.offset, commit, None
        if commit.checkpoint:
            held.checkpoint_at = time.monotonic()
        if held.coordinator is not None:
            held.coordinator = after(held.coordinator, commit)

    def _settle(self) -> None:
        """The update is computed, so the memory of its gradient is free again."""
        held, staging = self._held, self._staging
        if held is not None and staging is not None:
            for index in range(len(self._wire.exact)):
                held.engine.ready(index)
            self._staging = None
            staging.give()

    def _must_hold(self, what: str) -> HeldState:
        if self._held is None:
            raise PeerLost(f"{what} arrived before any state")
        return self._held


def _whole(staging: Staging, nbytes: int) -> list[Bytes]:
    """Returns the memory of a mean gradient that arrives in one frame. Raises `PeerLost` if it has another size."""
    try:
        return Cover([block.nbytes for block in staging.blocks]).whole(nbytes, staging.blocks)
    except Refusal as refusal:
        raise PeerLost(refusal.message) from None
