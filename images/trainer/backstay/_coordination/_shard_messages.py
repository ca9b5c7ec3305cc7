"""The messages between a shard and the coordinator; the same in one process and over a stream.

Each message is a value of `backstay_rpc.control_pb2`, and has one type. A `Message` goes to a shard, a `Report` comes
from one. No process changes a message after it has handed it over.
"""

from __future__ import annotations

from typing import Protocol, TypeAlias

from backstay_rpc.control_pb2 import (
    Applied,
    Commit,
    Done,
    Examine,
    Gather,
    Lost,
    Norm,
    NormRequest,
    Occupied,
    Reject,
    Rollback,
    Save,
    ShardFailed,
    Staged,
    Written,
)

__all__ = ["Coordination", "Message", "Report", "ShardSink"]

Message: TypeAlias = Commit | Reject | Gather | NormRequest | Save | Rollback | Done | Examine
"""A message from the coordinator to a shard.

* `Commit`: apply the gradients that it names, and free everything else that was staged for its version (Sync).
* `Reject`: answer the stream that waits for this gradient with the reason, and free what was staged of it. The shard
  may not hold the gradient, or only part of it.
* `Gather`: add up these gradients, which the next commit names. Other shards may get it later.
* `NormRequest`: report the sum of squares of this shard's part of the weighted mean of these gradients.
* `Save`: write `version`, which is the version that the last commit makes, or the one restored.
* `Rollback`: start there, in that term; everything before has ended.
* `Done`: the job has ended, after the last commit was applied or because it failed.
* `Examine`: others wait for the memory that shard 0 gave this gradient. Its stream is checked, and ended if it stops.
"""

Report: TypeAlias = Staged | Lost | Norm | Written | Applied | ShardFailed | Occupied
"""A report from a shard to the coordinator.

* `Staged`: the shard holds all of a gradient, its end mark included. A repeated report changes nothing.
* `Lost`: a gradient's stream ended before its end mark. The shard holds none of it, and will not.
* `Norm`: the answer to a `NormRequest`.
* `Written`: the shard's files of a version are stored, or could not be (`error`).
* `Applied`: the shard reached this version.
* `ShardFailed`: the shard cannot continue. The job fails.
* `Occupied`: shard 0 holds all of these gradients, and other pushes wait for their memory. It is repeated.
"""


class Coordination(Protocol):
    """The coordinator, as an interface for one shard. Thread-safe."""

    def report(self, report: Report) -> None:
        """Returns immediately. It may call the shard's `ShardSink` on the same thread before it returns. Call it while
        holding no lock that the sink takes."""


class ShardSink(Protocol):
    """A shard, as an interface for the coordinator."""

    def deliver(self, message: Message) -> None:
        """Queue a message; neither blocks nor raises.

        Called for one message at a time, in the order of the coordinator's decisions. Commits arrive in order of
        version, without gaps; the order of `Commit` and `Save` has a meaning.
        """
