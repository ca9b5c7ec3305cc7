"""The errors of the client. One more is `ApiRequestError`, for a refusal of the API server."""

from __future__ import annotations

__all__ = [
    "BadInput",
    "ClusterUnreachable",
    "JobDeleted",
    "JobExists",
    "MissingPackage",
    "NoResult",
    "SweepFailed",
    "SweepInUse",
    "TrainingFailed",
]


class BadInput(Exception):  # noqa: N818  # nothing failed in this program
    """The input cannot be run; the message has the error and the valid values."""


class JobExists(Exception):  # noqa: N818
    """The namespace has a TrainingJob of this name already."""


class JobDeleted(Exception):  # noqa: N818
    """The TrainingJob was deleted, possibly by another person, and another one may have its name now."""


class TrainingFailed(Exception):  # noqa: N818
    """The TrainingJob failed. The message has the reason, and ends with the exception of the script, if there was one.

    Attributes:
        reason: one CamelCase word, such as ``NonFiniteGradients``.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ClusterUnreachable(Exception):  # noqa: N818
    """The API server has not answered for some time. The job may still run."""


class NoResult(Exception):  # noqa: N818
    """The job has stored nothing that this machine can read."""


class SweepFailed(Exception):  # noqa: N818
    """The trials of a sweep cannot succeed: the first ones failed, or the objective does not exist."""


class SweepInUse(Exception):  # noqa: N818
    """Another process runs the sweep now."""


class MissingPackage(ImportError):  # noqa: N818
    """A function needs a package that is not installed; the message has the command that installs it."""
