"""Defines the states of a process's right to store manifests, with their term and first manifest (T6, decision 0075).
Pure.

- `Unclaimed`: no term. A start or a rollback leads to `Begun`, a takeover to `TakenOver`.
- `TakenOver`: the newest manifest is not read yet. Once it is, the state is `Begun`.
- `Begun`: the term's first manifest is known. Once its claim is stored, the state is `Claimed`.
- `Claimed`: the only state in which a manifest is stored. A rollback leads to `Begun` with a higher term.
"""

from __future__ import annotations

from dataclasses import dataclass

from .._manifest import Claim, Origin

__all__ = ["Begun", "Claimed", "TakenOver", "Tenure", "Unclaimed"]


@dataclass(frozen=True)
class Unclaimed:
    """This process has begun no term, and writes nothing."""

    term: int = 0
    history: str = ""


@dataclass(frozen=True)
class Begun:
    """A term whose first manifest is known. Its claim is not stored under this process's lease.

    Attributes:
        term: number of the term.
        history: id of the history.
        base: name of the manifest that the term continues from; empty at the initial parameters.
        start_from: place of the initial parameters of a term without `base`; empty if `init` returns them.
    """

    term: int
    history: str
    base: str
    start_from: str = ""

    def claim(self, origin: Origin, lease: int, incarnation: int) -> Claim:
        """Returns the record that excludes manifests of older leases and terms that are newer than `base`."""
        return Claim(
            origin=origin,
            lease=lease,
            term=self.term,
            incarnation=incarnation,
            base=self.base,
            start_from=self.start_from,
        )


@dataclass(frozen=True)
class TakenOver:
    """A term of the previous server that continues here. Its newest manifest is not read yet.

    Attributes:
        term: number of the term.
        history: id of the history.
        up_to: (term, version) that this server held at the takeover. A newer manifest is not in the history, because
            this server does not continue from it.
    """

    term: int
    history: str
    up_to: tuple[int, int]

    def found(self, base: str) -> Begun:
        """Returns the state after the newest manifest up to `up_to` was read. `base` is its name, or empty if there is
        none."""
        return Begun(self.term, self.history, base)


@dataclass(frozen=True)
class Claimed:
    """A term whose claim is stored: this process may store manifests while it holds the lease.

    Attributes:
        begun: the term.
        lease: number of the lease under which the claim was stored.
    """

    begun: Begun
    lease: int

    @property
    def term(self) -> int:
        """Number of the term."""
        return self.begun.term

    @property
    def history(self) -> str:
        """Id of the history."""
        return self.begun.history


Tenure = Unclaimed | TakenOver | Begun | Claimed
