"""How a bad spec is refused: every mistake at once, each with its path, what is wrong and what would be right."""

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
        message: what is wrong with it and what would be right, to be read after the path.
    """

    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class SpecErrors(ValueError):  # noqa: N818  # it holds errors, in the plural
    """A TrainingJob that is refused; `errors` has everything that is wrong with it: at least one, sorted by path."""

    def __init__(self, errors: Iterable[SpecError]) -> None:
        self.errors: tuple[SpecError, ...] = tuple(sorted(set(errors)))
        if not self.errors:
            raise ValueError("SpecErrors without an error")
        super().__init__("\n".join(map(str, self.errors)))
