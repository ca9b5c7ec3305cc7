"""The interfaces between the worker loop, the shard and the transport, as Protocols and plain values.

Each of them depends only on this module. So a test, a benchmark or another transport can replace any of them. The
vocabulary is that of `backstay_rpc.control_pb2`. `_coordination._shard_messages` has the messages between a shard and
the coordinator. No clock, no I/O, no JAX here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from backstay_rpc.control_pb2 import Frame, GradientId, GradientInfo, Hello, Part, Peer, RejectReason
from backstay_rpc.refusals import RefusalCode

from ..._update import ALL

if TYPE_CHECKING:
    from ..._update import Selection, ShardWire

__all__ = [
    "PLACED",
    "Answer",
    "BlockLike",
    "Bytes",
    "CheckpointHook",
    "DataClient",
    "Engine",
    "FrameStream",
    "Incoming",
    "LayoutLike",
    "PartPush",
    "Place",
    "Pulled",
    "Refusal",
    "ServerStream",
    "ShardPort",
    "flow_of",
]

Bytes: TypeAlias = NDArray[np.uint8]


class Refusal(Exception):  # noqa: N818  # it is what happened
    """A server refuses a stream or a call: the stream ends with the frame `Refused`, the call with a status.

    Attributes:
        code: the reason, from the list of refusals.
        message: names the object, what is invalid, and what would be valid.
    """

    def __init__(self, code: RefusalCode, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class BlockLike(Protocol):
    """The part of `_partition.Block` that matters here, with `size` elements of `dtype`."""

    @property
    def dtype(self) -> np.dtype: ...
    @property
    def size(self) -> int: ...


class LayoutLike(Protocol):
    """The part of `_partition.ShardLayout` that matters here."""

    @property
    def shard(self) -> int: ...
    @property
    def blocks(self) -> Sequence[BlockLike]: ...


class Engine(Protocol):
    """The state of one shard on the device, as far as the shard uses it; one thread at a time."""

    @property
    def version(self) -> int: ...
    @property
    def has_average(self) -> bool: ...
    def apply(
        self,
        gradients: Sequence[Sequence[np.ndarray]],
        *,
        weights: Sequence[float],
        divisor: float,
        clip_factor: float = 1.0,
    ) -> None: ...
    def skip(self) -> None: ...
    def block(self, b: int) -> np.ndarray: ...
    def encoded(self, b: int) -> Any: ...
    def average(self, b: int) -> np.ndarray: ...
    def sum_of_squares(
        self, gradients: Sequence[Sequence[np.ndarray]], *, weights: Sequence[float], divisor: float
    ) -> float: ...
    def snapshot(self, *, whole: bool = False) -> object: ...
    def mean(self, gradients: Sequence[Sequence[np.ndarray]], *, weights: Sequence[float], divisor: float) -> Any: ...
    def nodes(self, contribution: Sequence[Any], weight: float) -> Any: ...
    def add(self, sums: Sequence[Any]) -> Any: ...
    def finish(self, total: Any, divisor: float) -> Any: ...


CheckpointHook: TypeAlias = Callable[[object, int, int], None]
"""`hook(engine.snapshot(), term, version)`, called by the shard's apply thread before the next update. The hook hands
the work to another thread and returns."""


# ---- The transport ----


Place: TypeAlias = Callable[[Frame, int], "Sequence[Bytes] | None"]

PLACED: Final[Bytes] = np.empty(0, np.uint8)
"""Stands for a body that was received into the memory of `place`."""


class FrameStream(Protocol):
    """One end of a data stream, with frames that have an optional body, in order, both ways at the same time.

    Used by one thread at a time. It does not interpret the frames.
    """

    def read(self, place: Place | None = None) -> tuple[Frame, Bytes | None] | None:
        """Returns the next frame; None when the other end closed or vanished (a server cannot distinguish these).

        Args:
            place: called with a frame and the size of its body, before the body is received. It returns the pieces of
                memory, of that size together, where the body belongs, or None. Its exceptions are passed on, and the
                body is dropped.

        Returns:
            The frame, and its body: `PLACED`, or memory that is valid until the next call. None: it has no body.

        Raises:
            PeerLost: client end: the stream broke, the server ended it with an error, or `cancel` was called.
            Refusal: server end: bytes that are not a frame.
        """
        ...

    def write(self, frame: Frame, *body: np.ndarray) -> None:
        """Sends a frame; blocks while the other end does not keep up.

        Args:
            body: its pieces, one after another, which are not used after the call.

        Raises:
            PeerLost: the stream is broken.
        """
        ...

    def alive(self) -> bool:
        """False once the other end is known to be disconnected. Never blocks."""
        ...


class ServerStream(FrameStream, Protocol):
    """The server's end of a data stream. Any thread may call these methods. Only `post` waits, for a bounded time."""

    def received(self) -> int | None:
        """Returns the bytes that have arrived since the stream began, or None if the system does not report them."""
        ...

    def cut(self) -> None:
        """Ends the stream: `read` and `write` of another thread return."""
        ...

    def post(self, frame: Frame) -> None:
        """Sends a frame without a body. Waits at most 1 s until the system has room for all of it.

        Raises:
            PeerLost: the stream is broken, or the other end does not read.
        """
        ...

    def keep_alive(self) -> None:
        """The stream ends when the other end's node has not answered for about 10 s. Raises as `post`."""
        ...


# ---- The server's side ----


class Incoming(Protocol):
    """A part of a contribution that is being received into staging memory."""

    @property
    def blocks(self) -> Sequence[Bytes]:
        """Writable memory for the encoded form of each block, in bytes."""
        ...

    examine: Callable[[], None] | None
    """Set by the stream that receives it, and called by the shard: counts a check, and ends a stream that is quiet."""

    def check(self) -> None:
        """Raises `Refusal`, `INVALID`, when what was received is not what the codec makes."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """The parameters of one version, while they are being computed.

    Attributes:
        block: waits for a block of this version, regardless of later updates. Raises `Refusal` when the shard stops
            first.
        encoded: the same, as it is sent: an array, or `Encoded`.
        average: returns the moving average of the parameters of a block; None: this is not the last version.
        outcome, next_key_step, done, offset, selection, ask: as in `Pulled`.
    """

    term: int
    version: int
    world: int
    block: Callable[[int], np.ndarray]
    encoded: Callable[[int], Any]
    average: Callable[[int], np.ndarray] | None = None
    outcome: RejectReason = RejectReason.REJECT_UNSPECIFIED
    next_key_step: int = 0
    done: bool = False
    offset: int = 0
    selection: Selection | None = None
    ask: bool = False

    def values(self, selection: Selection) -> Callable[[int], Any]:
        """Returns a function of a block that waits for what is sent of it.

        Raises:
            Refusal: `MOVED`: there is no average.
        """
        match selection.values:
            case "encoded":
                return self.encoded
            case "exact":
                return self.block
            case "average" if self.average is not None:
                return self.average
        raise Refusal(
            RefusalCode.MOVED,
            f"the average of the parameters exists for the last version only, and version {self.version} is not the "
            "last, or training has no average",
        )


class ShardPort(Protocol):
    """A shard, as an interface for data streams (`_shard.ShardRuntime`). Thread-safe. A `Refusal` ends one stream."""

    @property
    def wire(self) -> ShardWire:
        """How its blocks are encoded on the wire."""
        ...

    def fence(self, incarnations: Mapping[str, int]) -> None:
        """Take the newest known incarnations, such as ``{"worker-3": 2}``, and refuse older ones from now on."""
        ...

    def admit(self, hello: Hello) -> None:
        """Raises `Refusal` unless the hello names this shard, incarnation, term and partition."""
        ...

    def begin(self, hello: Hello, part: Part, alive: Callable[[], bool] | None = None) -> Incoming:
        """Allocates staging memory for a part of a contribution. Raises `Refusal`.

        Args:
            alive: waits until there is memory, or until no update can use the part. Raises `PeerLost` when `alive`
                returns False: the peer is gone. None: does not wait.
        """
        ...

    def moved_on(self, incoming: Incoming) -> bool:
        """Returns whether an update can no longer use this part: then answer now. Never blocks."""
        ...

    def complete(self, incoming: Incoming, info: GradientInfo) -> None:
        """The whole part has arrived, and its end mark, which carries `info`."""
        ...

    def lose(self, incoming: Incoming) -> None:
        """The rest of the part will not arrive. Does nothing if the part is complete."""
        ...

    def answer(
        self, incoming: Incoming | None, min_version: int, alive: Callable[[], bool], peer: Peer | None = None
    ) -> Answer | None:
        """Waits for the version that answers a push, or (None) for one of at least `min_version`.

        Args:
            peer: the worker that pulls.

        Returns None when `alive` returns False: the peer is gone. Raises `Refusal` when the shard stops first.
        """
        ...


# ---- The worker's side ----


@dataclass(frozen=True, slots=True)
class PartPush:
    """The part of one contribution for one shard.

    Attributes:
        part: the address of the part.
        blocks: one per block of the shard, in order: a C-contiguous array of the block's size and dtype, or `Encoded`
            where a codec encodes it. Each is read once, right before it is sent, so reading it may wait until it is
            computed. Blocks are sent without a copy: the owner of the memory must not change it while they are
            referenced.
        info: returns what is known of the contribution once it is computed; called after the last block was sent.
        turn: shard 0 must have memory for the contribution before its first block is sent to any shard. The push to
            shard 0 sets the event, and the others wait for it. None: nothing waits.
    """

    part: Part
    blocks: Sequence[Any]
    info: Callable[[], GradientInfo]
    turn: threading.Event | None = None


@dataclass(frozen=True, slots=True)
class Pulled:
    """One shard's answer. The parameters stand in the buffers that the call was given.

    Attributes:
        version: the version of the parameters.
        world: ranks in force at that version.
        outcome: why the previous push was refused; `REJECT_UNSPECIFIED`: it is part of `version` or an earlier one,
            or there was no push. Without a push, of the contribution before `next_key_step`.
        next_key_step: Async: the next `BatchKey.step` of this rank; 0 when the server does not know. Without a push:
            one more than the key step of this worker's contribution in the update that made `version`; 0 when that
            update has none.
        done: the job has ended.
        pushed_at: when the last byte of the push had been handed to the transport, in seconds of `time.monotonic`; 0
            without a push. The transport holds at most two windows (8 MiB) that the server has not received.
        answered_at: when the first frame of the answer had arrived, in seconds of the same clock. The rest of the call
            received the parameters.
        offset: `BatchKey.offset` of that world.
        selection: the parameters that were received after a push; None: the whole model was requested.
        ask: the next push waits until shard 0 has memory for it (`PartPush.turn`).
    """

    term: int
    version: int
    world: int
    outcome: RejectReason = RejectReason.REJECT_UNSPECIFIED
    next_key_step: int = 0
    done: bool = False
    pushed_at: float = 0.0
    answered_at: float = 0.0
    offset: int = 0
    selection: Selection | None = None
    ask: bool = False


class DataClient(Protocol):
    """A worker's or evaluator's stream to one shard; blocking, used by one thread at a time."""

    @property
    def shard(self) -> int: ...

    def exchange(
        self, push: PartPush | None, min_version: int, into: Sequence[Bytes], wanted: Selection = ALL
    ) -> Pulled:
        """Push a part of a contribution (or nothing), and wait for the newest parameters.

        Args:
            push: this shard's part, or None to pull only.
            min_version: used without a push: the least version wanted. With a push the server answers with a version
                higher than the contribution's (Sync), or with the one that the contribution made (Async).
            into: one writable uint8 array per block, of the block's size in bytes. Their content is undefined when an
                error is raised.
            wanted: what to receive without a push; all blocks. With a push, its address selects the answer.

        Raises:
            errors.Refused: the server refuses; the stream has ended. `Superseded`: a newer incarnation of the caller
                lives.
            errors.PeerLost: the stream ended, the shard is shutting down, or `cancel` was called.
            errors.JobFailed: the job has failed.
        """
        ...

    def splits(self, part: Part) -> bool:
        """Returns whether a part of a contribution travels in several frames, so that it waits for memory."""
        ...

    def cancel(self, why: str) -> None:
        """Ends the stream from any thread. A waiting `exchange` raises `PeerLost` with `why`."""
        ...

    def close(self) -> None:
        """Ends the stream. Idempotent."""
        ...


def flow_of(gradient: GradientId) -> str:
    """Returns the note that identifies the spans of one contribution, in the worker and in the servers."""
    return f"{gradient.term}.{gradient.version}.{gradient.rank}.{gradient.incarnation}.{gradient.attempt}"
