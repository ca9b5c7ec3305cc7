"""What a shard and the coordinator say to each other; the same whether they share a process or a stream.

The vocabulary is that of `backstay_rpc.control_pb2`, so that what crosses the network and what does not look alike.
Messages are never changed once they were handed over.
"""

from __future__ import annotations

from typing import Protocol

from backstay_rpc.control_pb2 import Commit, Done, GradientId, Norm, NormRequest, Reject, Save, Staged, Written

__all__ = ["Coordination", "ShardSink"]


class Coordination(Protocol):
    """The coordinator, as a shard sees it. Thread-safe; returns at once.

    A method may call the shard's own `ShardSink` on the same thread before it returns: call it while holding no lock
    that the sink's methods take.
    """

    def staged(self, shard: int, staged: Staged) -> None:
        """The shard holds all of a gradient, its end mark included. Saying it again changes nothing."""

    def lost(self, shard: int, gradient: GradientId) -> None:
        """A gradient's stream ended before its end mark: this shard holds none of it."""

    def norm(self, shard: int, norm: Norm) -> None:
        """The answer to a `NormRequest`."""

    def written(self, shard: int, written: Written) -> None:
        """The shard's files of a version are stored, or could not be (`written.error`)."""

    def applied(self, shard: int, version: int) -> None:
        """The shard reached this version."""

    def failed(self, shard: int, why: str) -> None:
        """The shard cannot go on; the job fails."""


class ShardSink(Protocol):
    """A shard, as the coordinator sees it. Methods only queue: they neither block nor raise.

    They are called one at a time, in the order of the coordinator's decisions. `on_commit` comes in order of version,
    without gaps. The order between `on_commit` and `on_save` is part of the meaning.
    """

    def on_commit(self, commit: Commit) -> None:
        """Apply the gradients that it names, and free everything else that was staged for its version (Sync)."""

    def on_reject(self, reject: Reject) -> None:
        """Answer the stream that waits for this gradient with the reason, and free what was staged of it.

        The shard may not hold the gradient, or only part of it.
        """

    def on_norm_request(self, request: NormRequest) -> None:
        """Answer with the sum of squares of this shard's part of the weighted mean of these gradients."""

    def on_save(self, save: Save) -> None:
        """Write `save.version`, which is the version that the last `on_commit` makes (or the one restored)."""

    def on_done(self, done: Done) -> None:
        """The job is over: after the last commit was applied, or because it failed."""
