"""Which server's version of the history counts after servers were replaced, and when a new term must begin.

With standbys, a decision takes two steps. First every shard's standby holds the mean that the decision names. Then the
commit is sent. So any successor can finish a commit that a shard received. A decision that no shard received as a
commit can be withdrawn. docs/internals/standby.md has the argument.
"""

from __future__ import annotations

from backstay_rpc.control_pb2 import Commit, Contribution, GradientInfo

from ._decisions import Decision, Redone, Restart
from ._history import UpdateHistory
from ._state import CoordinatorState, Rules

__all__ = ["Succession"]


class Succession:
    """The servers of all shards that connected to the coordinator, and the state that it took over."""

    def __init__(self, rules: Rules, history: UpdateHistory) -> None:
        self._rules, self._history = rules, history
        self._servers: dict[int, int] = {}  # incarnations, by shard
        self._prepared: tuple[Contribution, ...] = ()
        self._infos: tuple[GradientInfo, ...] = ()
        self._ahead = 0  # the newest version at a worker, if a new term begins for that reason
        self._above = 0  # the newest term that any shard received
        self._accounted = history.state.version  # updates up to this version were lost earlier, or are in `redone`
        self._outrun = False

    def resume(
        self, prepared: tuple[Contribution, ...], infos: tuple[GradientInfo, ...], checkpoint_at: tuple[int, int]
    ) -> None:
        """Continue for a coordinator that ended.

        Args:
            prepared: the gradients whose mean shard 0 holds for the next version.
            infos: the infos of the contributions in `prepared`, in the same order.
            checkpoint_at: (term, version) of the newest complete checkpoint.
        """
        self._prepared, self._infos = prepared, infos
        # The history is longer than the part that this server held as a standby.
        self._outrun = checkpoint_at > (self._history.state.term, self._history.state.version)

    @property
    def replicates(self) -> bool:
        """Whether shards have standbys."""
        return self._rules.replicates

    @property
    def newest_term(self) -> int:
        """The newest term that was ever begun, as far as any server has reported."""
        return max(self._history.state.term, self._above)

    @property
    def all_connected(self) -> bool:
        """Whether every shard's server has connected to this coordinator."""
        return len(self._servers) == self._rules.shards

    def connected(self, shard: int, incarnation: int, term: int) -> bool:
        """Record a connected server, which had received `term`. Returns whether it replaces another one."""
        before, self._servers[shard] = self._servers.get(shard, incarnation), incarnation
        self._above = max(self._above, term)
        return incarnation > before

    def start(self) -> list[Decision]:
        """Call once, before anything else."""
        return self.lose(0) if self._outrun else []

    def decided(self) -> None:
        """Record that the next update is decided: what the previous coordinator had prepared for it counts no more."""
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
        """Begin again, because a shard has lost its part of the history."""
        self._history.lost = True
        return [Restart(shard)]

    def adopts(self, last: Commit | None) -> tuple[GradientInfo, ...] | None:
        """Returns the infos of the contributions of `last`, as far as they are known.

        `last` is the newest commit that a shard received. Returns None if it does not become the next of this history.
        """
        state = self._history.state
        if (
            last is None
            or not self._prepared
            or (last.term, last.version) != (state.term, state.version)
            or tuple(last.contributions) != self._prepared
        ):
            return None
        return self._infos

    def has_continued(self, term: int, version: int) -> bool:
        """Returns whether a shard at (term, version) is past where this term began, or has received a newer term.

        The shard continued under a coordinator that stored nothing, or whose successor does not have the term that
        this coordinator began. Only a higher term can follow (T6).
        """
        start = self._history.start
        return self._above > self._history.state.term or (term, version) > (start.term, start.version)

    def worker_at(self, term: int, version: int) -> list[Decision]:
        """Record that a worker that joins has parameters of (term, version), from before it lost its servers.

        Updates that the worker has and this history lacks were lost with an earlier coordinator, and are made again.
        With standbys, a worker that is ahead, or has a newer term, shows that a part of the history is missing here.
        Then a new term begins.
        """
        state = self._history.state
        if term == state.term and version <= state.version:
            return []
        if not self._rules.replicates or term < state.term:
            return self._redo(version)
        if term > state.term:
            self._above, self._ahead = max(self._above, term), max(self._ahead, version)
            return [] if self._history.lost else self.lose(0)
        # Another shard sent that version, and will report its commit.
        if self._prepared and version == state.version + 1 and self._rules.shards > 1:
            return []
        self._ahead = max(self._ahead, version)
        return [] if self._history.lost else self.lose(0)

    def _redo(self, version: int) -> list[Decision]:
        """Count the updates up to `version` as lost, unless they are counted already."""
        lost = version - max(self._accounted, self._history.start.version)
        if lost <= 0:
            return []
        self._accounted = version
        self._history.state.redone += lost
        return [Redone(lost)]
