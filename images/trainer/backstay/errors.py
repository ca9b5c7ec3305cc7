"""Everything that Backstay raises on purpose, as one tree.

* `BackstayError`
    * `ConfigurationError` -- an argument, a function of the script or the environment is wrong; also a `ValueError`
        * `TreeError` -- the parameters are no tree of arrays that can be trained
        * `OptimizerError` -- the optimizer cannot be computed shard by shard
    * `CheckpointError` -- a checkpoint cannot be written or read, or does not fit
        * `CheckpointInUse` -- another run writes into the folder
        * `CheckpointOfAnotherJob` -- the checkpoints in the folder belong to another job or another seed
        * `CheckpointFolderUnusable` -- this process may not write or read the folder
        * `StorageError` -- the place where checkpoints are errs: trying again may help
    * `Refused` -- a server said no, and would say it again
        * `Superseded` -- a newer incarnation of this pod lives: this one must stop
    * `PeerLost` -- a connection broke or fell silent: connecting again may help
        * `WaitedTooLong` -- it did not help within the limit
    * `JobFailed` -- the job as a whole has failed
"""

from __future__ import annotations

__all__ = [
    "BackstayError",
    "CheckpointError",
    "CheckpointFolderUnusable",
    "CheckpointInUse",
    "CheckpointOfAnotherJob",
    "ConfigurationError",
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
    """Something that the user wrote is wrong; the message says what would be right."""


class TreeError(ConfigurationError):
    """The parameters are no tree of arrays that can be trained; the message names the leaf."""


class OptimizerError(ConfigurationError):
    """The optimizer's update mixes what different shards hold, or has a form that shards cannot compute."""


class CheckpointError(BackstayError):
    """A checkpoint cannot be written or read, is damaged, or belongs to other parameters."""


class CheckpointInUse(CheckpointError):  # noqa: N818
    """Another run writes checkpoints into the folder; the message names it. A folder has one writer at a time."""


class CheckpointOfAnotherJob(CheckpointError):  # noqa: N818
    """The checkpoints in the folder belong to another job or another seed; the message names both."""


class CheckpointFolderUnusable(CheckpointError):  # noqa: N818
    """This process may not write or read the checkpoint folder; the message names the path, the uid and the cause."""


class StorageError(CheckpointError):
    """The place where checkpoints are cannot be read now, which says nothing about what is in it."""


class Refused(BackstayError):  # noqa: N818  # it is what happened, as in "connection refused"
    """A server refused for good. `code` is a gRPC status name such as ``INVALID_ARGUMENT``."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code
        self.message = message


class Superseded(Refused):
    """A newer incarnation of this pod lives; this one must stop."""


class PeerLost(BackstayError):  # noqa: N818
    """A connection broke or fell silent; connecting again may help."""


class WaitedTooLong(PeerLost):
    """Connecting again did not help within the limit."""


class JobFailed(BackstayError):  # noqa: N818
    """The job has failed. `reason` is one CamelCase word, such as ``NonFiniteGradients``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message

    @classmethod
    def told(cls, text: str) -> JobFailed:
        """From the text of another one, as it travels."""
        reason, colon, message = text.partition(": ")
        return cls(reason, message) if colon and reason.isalnum() else cls("JobFailed", text)
