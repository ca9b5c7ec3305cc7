"""Which server's account of the history counts, after servers were replaced, and when only a new term helps.

With standbys, a decision takes two steps: first every shard's standby holds the mean that the decision names, then the
commit is sent. So any successor can finish what a shard received as a commit, and what no shard received can be taken
back. docs/internals/standby.md has the argument.
"""

from __future__ import annotations

from backstay_rpc.control_pb2 import Commit, Contribution, GradientInfo

from ._decisions import Decision, Redone, Restart
from ._history import History
from ._state import CoordinatorState, Rules

__all__ = ["Succession"]


class Succession:
    """The servers of all shards as the coordinator has seen them, and what it took over from its predecessor."""

    def __init__(self, rules: Rules, history: History) -> None:
        self._rules, self._history = rules, history
        self._servers: dict[int, int] = {}  # incarnations, by shard
        self._prepared: tuple[Contribution, ...] = ()
        self._infos: tuple[GradientInfo, ...] = ()
        self._ahead = 0  # the newest version of this term that a worker has, if a new term begins for that reason
        self._above = 0  # the newest term that any shard was told to begin
        self._accounted = history.state.version  # updates up to this version were lost before, or are in `redone`
        self._outrun = False

    def resume(
        self, prepared: tuple[Contribution, ...], infos: tuple[GradientInfo, ...], checkpoint_at: tuple[int, int]
    ) -> None:
        """Continue for a coordinator that is gone.

        Args:
            prepared: the gradients whose mean shard 0 holds for the next version.
            infos: of `prepared`, in that order.
            checkpoint_at: (term, version) of the newest whole checkpoint.
        """
        self._prepared, self._infos = prepared, infos
        # The history went further than what this server held as a standby.
        self._outrun = checkpoint_at > (self._history.state.term, self._history.state.version)

    @property
    def newest_term(self) -> int:
        """The newest term that was ever begun, as far as any server has reported."""
        return max(self._history.state.term, self._above)

    @property
    def all_connected(self) -> bool:
        """Whether every shard's server has connected to this coordinator."""
        return len(self._servers) == self._rules.shards

    def connected(self, shard: int, incarnation: int, term: int) -> bool:
        """A server connected, which was told of `term`. Returns whether it replaces one that was connected before."""
        before, self._servers[shard] = self._servers.get(shard, incarnation), incarnation
        self._above = max(self._above, term)
        return incarnation > before

    def start(self) -> list[Decision]:
        """Call once, before anything else."""
        return self.lose(0) if self._outrun else []

    def decided(self) -> None:
        """A decision of this coordinator follows: what its predecessor had prepared is over."""
        self._prepared = ()

    def begin(self, state: CoordinatorState) -> bool:
        """A new term is to begin at `state`. Returns False if its number is taken: then nothing changes."""
        if state.term <= self._above:
            return False
        reached = max(self._history.state.version, self._ahead)
        state.redone = self._history.state.redone + max(0, reached - state.version)
        self._accounted, self._ahead = max(self._accounted, reached), 0
        self._prepared = ()
        return True

    def lose(self, shard: int) -> list[Decision]:
        """A shard has lost its part of the history."""
        self._history.lost = True
        return [Restart(shard)]

    def adopts(self, last: Commit | None) -> tuple[GradientInfo, ...] | None:
        """Whether the newest commit that a shard received becomes the next of this history: the infos of its
        contributions, as far as they are known; None: it does not."""
        state = self._history.state
        if (
            last is None
            or not self._prepared
            or (last.term, last.version) != (state.term, state.version)
            or tuple(last.contributions) != self._prepared
        ):
            return None
        self._prepared = ()
        return self._infos

    def lives_on(self, term: int, version: int) -> bool:
        """Whether a shard at (term, version) is past where this term began, or was told of a newer one.

        It continued under a coordinator that stored nothing, or whose successor was not told of the term that it
        began: only a term above that can follow (T6).
        """
        start = self._history.start
        return self._above > self._history.state.term or (term, version) > (start.term, start.version)

    def worker_at(self, term: int, version: int) -> list[Decision]:
        """A worker that joins has parameters of (term, version), with which it lost its servers.

        What it has beyond the history here was lost with an earlier coordinator, and is made again. With standbys, a
        coordinator that is behind a worker in its own term has missed a part of the history: a new term begins.
        """
        state = self._history.state
        ahead = term == state.term and version > state.version
        if term == state.term and not ahead:
            return []
        if not self._rules.replicates or not ahead:
            return self._redo(version)
        if self._prepared and version == state.version + 1:
            return []  # a shard sent it that much, and will report the commit
        self._ahead = max(self._ahead, version)
        return [] if self._history.lost else self.lose(0)

    def _redo(self, version: int) -> list[Decision]:
        """Count the updates up to `version` as lost; those that were counted already are not counted again."""
        lost = version - max(self._accounted, self._history.start.version)
        if lost <= 0:
            return []
        self._accounted = version
        self._history.state.redone += lost
        return [Redone(lost)]
