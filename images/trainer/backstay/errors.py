"""Everything that Backstay raises on purpose, as one tree.

* `BackstayError`
    * `ConfigurationError` -- an argument, a function of the script or the environment is invalid; also a `ValueError`
        * `TreeError` -- the parameters are not a pytree of arrays that can be trained
        * `BatchesEnded` -- `batches` raised StopIteration
        * `EmptyBatch` -- `batches` returned a batch without rows
        * `OptimizerError` -- the servers cannot compute the optimizer on their shards
    * `CheckpointError` -- a checkpoint cannot be written or read, or belongs to other parameters
        * `CheckpointInUse` -- another run writes into the folder
        * `CheckpointOfAnotherJob` -- the checkpoints in the folder belong to another job or another seed
        * `CheckpointFolderUnusable` -- this process cannot write or read the folder
        * `StorageError` -- the storage of checkpoints fails; another attempt may succeed
    * `Refused` -- a server refused a call, and would refuse it again
        * `Superseded` -- a newer incarnation of this pod runs, and this one must stop
    * `PeerLost` -- a connection broke or timed out; another connection may succeed
        * `WaitedTooLong` -- no connection succeeded within the limit
    * `JobFailed` -- the job as a whole has failed
"""

from __future__ import annotations

__all__ = [
    "BackstayError",
    "BatchesEnded",
    "CheckpointError",
    "CheckpointFolderUnusable",
    "CheckpointInUse",
    "CheckpointOfAnotherJob",
    "ConfigurationError",
    "EmptyBatch",
    "JobFailed",
    "OptimizerError",
    "PeerLost",
    "Refused",
    "StorageError",
    "Superseded",
    "TreeError",
    "WaitedTooLong",
]


class BackstayError(Exception):
    """The root of the tree."""


class ConfigurationError(BackstayError, ValueError):
    """An argument, a function of the script or the environment is invalid; the message names a valid one."""


class TreeError(ConfigurationError):
    """The parameters are not a pytree of arrays that can be trained; the message names the leaf."""


class OptimizerError(ConfigurationError):
    """The optimizer's update mixes values of different shards, or has a form that shards cannot compute."""


class BatchesEnded(ConfigurationError):  # noqa: N818  # as in "StopIteration"
    """`batches` raised StopIteration, although it must return a batch for every key. A job fails immediately, at any
    step."""


class EmptyBatch(ConfigurationError):  # noqa: N818
    """`batches` returned a batch whose arrays have 0 rows. A job fails immediately, at any step, because the same key
    has the same batch again."""


class CheckpointError(BackstayError):
    """A checkpoint cannot be written or read, is damaged, or belongs to other parameters."""


class CheckpointInUse(CheckpointError):  # noqa: N818
    """Another run writes checkpoints into the folder; the message names it. A folder has one writer at a time."""


class CheckpointOfAnotherJob(CheckpointError):  # noqa: N818
    """The checkpoints in the folder belong to another job or another seed; the message names both."""


class CheckpointFolderUnusable(CheckpointError):  # noqa: N818
    """This process cannot write or read the checkpoint folder; the message names the path, the uid and the cause."""


class StorageError(CheckpointError):
    """The storage of checkpoints fails at present. Its checkpoints may be complete, and another attempt may succeed."""


class Refused(BackstayError):  # noqa: N818  # as in "connection refused"
    """A server refused a call permanently. `code` is a name such as ``INVALID_ARGUMENT``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Superseded(Refused):
    """A newer incarnation of this pod runs; this one must stop."""


class PeerLost(BackstayError):  # noqa: N818
    """A connection broke or timed out; another connection may succeed."""


class WaitedTooLong(PeerLost):
    """No connection succeeded within the limit."""


class JobFailed(BackstayError):  # noqa: N818
    """The job has failed. `reason` is one CamelCase word, such as ``NonFiniteGradients``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    @classmethod
    def from_text(cls, text: str) -> JobFailed:
        """Returns the failure of another pod, from its message ``reason: text``."""
        reason, colon, message = text.partition(": ")
        return cls(reason, message) if colon and reason.isalnum() else cls("JobFailed", text)
