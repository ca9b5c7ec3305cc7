"""Keeps the position of a worker, names its contributions, and interprets answers and errors (T3, T4). Pure.

The worker sends and waits. All answers go through this module, so that tests need no thread, clock or server.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from backstay_rpc.control_pb2 import GradientId, JoinReply, RejectReason
from backstay_rpc.refusals import JOIN_AGAIN

from .._coordination import MODES, OUTCOME_OF, Mode, Outcome
from .._transport import Pulled
from .._update import Selection
from ..errors import PeerLost, Refused, Superseded, WaitedTooLong
from ._key_steps import KEY_STEPS

__all__ = ["AfterLoss", "Exchange", "Fate", "WorkerProtocol", "after_loss", "may_be_result"]


class AfterLoss(enum.StrEnum):
    """The next action of a worker after a call to the servers failed. The value travels between the pods of a rank."""

    JOIN = enum.auto()
    """It joins all servers again. `Exchange.repeats` then decides whether it sends its contribution again."""

    STOP = enum.auto()
    """It leaves, because a pod of its rank received SIGTERM."""

    RAISE = enum.auto()
    """It raises the error of the call, because joining again cannot correct the cause."""


def after_loss(error: PeerLost | Refused, superseded: Superseded | None, *, stopped: bool) -> AfterLoss:
    """Returns what follows a failed call to the servers.

    Args:
        error: the error of the call.
        superseded: the error that heartbeats have received; None: they have not shown that this rank was replaced.
        stopped: whether a pod of the rank has received SIGTERM.

    Raises:
        Superseded: the argument `superseded`, from which the error of the call may follow.
    """
    if superseded is not None:
        raise superseded from error
    if stopped:
        return AfterLoss.STOP
    is_final = isinstance(error, WaitedTooLong) or (isinstance(error, Refused) and error.code not in JOIN_AGAIN)
    return AfterLoss.RAISE if is_final else AfterLoss.JOIN


@dataclass(frozen=True)
class Fate:
    """The end of one contribution, as far as its worker can know it.

    Attributes:
        outcome: the decision about the contribution; None: it is unknown, because a server was lost before it answered,
            or training went back.
        applied_at: a version that has the contribution; None: no update is known to have it.
        residuals: whether the contribution counts as sent, for what a codec has left out. None: it is unknown whether
            one of its attempts was applied.
    """

    outcome: Outcome | None
    applied_at: int | None
    residuals: bool | None

    @property
    def label(self) -> str:
        """The outcome, as a metric names it."""
        return "lost" if self.outcome is None else self.outcome.value


class WorkerProtocol:
    """One rank of a job.

    Attributes:
        term: the term of the newest join; 0: there was none.
        version: the newest version of this term that an answer to a contribution brought; 0: there was none.
    """

    def __init__(self, mode: Mode, rank: int, incarnation: int) -> None:
        self._mode, self._rank, self._incarnation = MODES[mode], rank, incarnation
        self._steps = KEY_STEPS[mode]()
        self._attempts = 0
        self.term, self.version = 0, 0

    def joined(self, reply: JoinReply) -> bool:
        """Shard 0's server has admitted this worker.

        Returns:
            Whether training has gone back: updates that this worker has received are made again.
        """
        back = reply.term > self.term > 0 or reply.version < self.version
        if reply.term != self.term:
            self.version = 0
        self.term = reply.term
        self._steps.joined(reply.key_step)
        return back

    def next(self, version: int) -> int:
        """Returns the key step of a contribution that is computed from the parameters of `version`."""
        return self._steps.next(version)

    def last(self, steps: int) -> int | None:
        """Returns the key step of the last contribution of a training with this many updates, or None if it is not
        known."""
        return self._steps.last(steps)

    def exchange(self, at: Pulled, key_step: int) -> Exchange:
        """Begin to send a contribution that was computed from the answer `at`."""
        return Exchange(self, at, key_step)

    def _identity(self, version: int, key_step: int) -> GradientId:
        self._attempts += 1
        return GradientId(
            term=self.term,
            version=version,
            rank=self._rank,
            key_step=key_step,
            incarnation=self._incarnation,
            attempt=self._attempts,
        )

    def _answered(self, key_step: int, pulled: Pulled) -> None:
        self.version = pulled.version
        self._steps.answered(key_step, pulled)

    def _undecided(self, key_step: int, at: Pulled, pulled: Pulled) -> bool:
        return self._steps.undecided(key_step, at, pulled)

    def _exchanged(self, key_step: int, at: Pulled, pulled: Pulled) -> Iterable[int]:
        return self._mode.exchanged(key_step, at.version, pulled.version)


class Exchange:
    """One contribution, from its first attempt until its fate."""

    def __init__(self, protocol: WorkerProtocol, at: Pulled, key_step: int) -> None:
        self._protocol, self._at, self._key_step = protocol, at, key_step
        self._term = protocol.term
        self._again = False

    def attempt(self) -> GradientId:
        """Returns the name of the next attempt to send the contribution."""
        return self._protocol._identity(self._at.version, self._key_step)

    def answered(self, pulled: Pulled, *, finite: bool) -> Fate:
        """Take the answer of the servers to the newest attempt.

        Args:
            finite: whether the contribution is finite.
        """
        outcome = _outcome_of(pulled, finite=finite)
        self._protocol._answered(self._key_step, pulled)
        # The servers hold a duplicate already: this worker sent it before it connected again.
        applied_at = pulled.version if outcome in {Outcome.APPLIED, Outcome.DUPLICATE} else None
        # The attempt that is late may be the second one, and an update before the newest may have the first one.
        known = not (self._again and pulled.outcome == RejectReason.LATE)
        return Fate(outcome, applied_at, _residuals(pulled) if known else None)

    def repeats(self, pulled: Pulled) -> bool:
        """The answer was lost, and the worker has joined again: whether it sends the contribution again.

        Args:
            pulled: what it received after it had joined.
        """
        repeats = self._same_term and self._protocol._undecided(self._key_step, self._at, pulled)
        self._again = self._again or repeats
        return repeats

    def lost(self, pulled: Pulled, *, finite: Callable[[], bool]) -> Fate:
        """The answer was lost, and the contribution is not sent again.

        Args:
            pulled: as in `repeats`. It has the outcome of this contribution if the newest update is the next one.
            finite: see `answered`; called only if the outcome is known.
        """
        if not (self._same_term and pulled.next_key_step == self._key_step + 1):
            return Fate(None, None, None)
        outcome = _outcome_of(pulled, finite=finite())
        return Fate(outcome, pulled.version if outcome is Outcome.APPLIED else None, _residuals(pulled))

    def exchanged(self, pulled: Pulled) -> Iterable[int] | None:
        """Returns the key steps of the contributions whose fragments the lost answer would have brought, or None in
        another term.

        Args:
            pulled: as in `repeats`.
        """
        return self._protocol._exchanged(self._key_step, self._at, pulled) if self._same_term else None

    @property
    def _same_term(self) -> bool:
        return self._protocol.term == self._term


def may_be_result(received: Selection | None, *, done: bool) -> bool:
    """Returns whether the newest parameters may become the result, after the servers have not sent the exact model.

    Args:
        received: the parameters that the newest answer brought; None: all of them. Memory that received a part of the
            parameters holds an older version of the others.
        done: whether the job has ended, so that the servers have left.
    """
    return done and (received is None or received.whole)


def _outcome_of(pulled: Pulled, *, finite: bool) -> Outcome:
    """Returns the outcome of a contribution, where `Pulled.outcome` is about it."""
    return OUTCOME_OF.get(pulled.outcome, Outcome.APPLIED) if finite else Outcome.NON_FINITE


def _residuals(pulled: Pulled) -> bool | None:
    """See `Fate.residuals`. Of a duplicate it is unknown whether the earlier one was applied."""
    if pulled.outcome == RejectReason.DUPLICATE:
        return None
    return pulled.outcome == RejectReason.REJECT_UNSPECIFIED
