"""Reports all mistakes of an invalid spec together, each with its path, the mistake and the valid values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["SpecError", "SpecErrors"]


@dataclass(frozen=True, order=True)
class SpecError:
    """One mistake.

    Attributes:
        path: the field as a person writes it, such as ``spec.workers.template.spec.containers[0].env[2].name``; empty
            for the object itself.
        message: the mistake and what would be valid, to be read after the path.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecErrors(ValueError):  # noqa: N818  # it holds errors, in the plural
    """A TrainingJob is invalid; `errors` has all mistakes: at least one, sorted by path."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        self.errors: tuple[SpecError, ...] = tuple(sorted(set(errors)))
        if not self.errors:
            raise ValueError("SpecErrors without an error")
        super().__init__("\n".join(map(str, self.errors)))
