"""The coordinator's state, as plain data for checkpoints and standbys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from backstay_rpc.control_pb2 import Commit
from backstay_spec.runtime import UpdateMode, Weighting

from ..._timeouts import Timeouts
from ._samples import EpochEnded, Samples

Mode: TypeAlias = UpdateMode

__all__ = ["HELD", "CoordinatorState", "Rules", "World", "after", "apply", "count_samples"]


HELD: Final = 8
"""The default of `Rules.held`. With this number, a server computes and transfers at the same time (decision 0029)."""


@dataclass(frozen=True)
class Rules:
    """The settings that stay the same during a job, besides the checkpoint's intervals (`Schedule`).

    Attributes:
        steps: the job ends when this many updates were made.
        backups: as in `backstay_spec.quorum.quorum_of`.
        grace: Sync; how long an update waits for more contributions after its quorum is complete, in seconds; None is
            `Auto`. `Coordinator.set_grace` changes it.
        weighting: Sync; how the contributions of an update are weighted.
        max_non_finite: the job fails after this many updates in a row with a gradient that is not finite.
        max_staleness: Async; None: unlimited.
        clip_norm: upper bound of the mean gradient's norm; None clips nothing.
        stores: the last version is written as a checkpoint before the job is done.
        evaluates: the job waits for an evaluation of the last version.
        replicates: shards have standbys: a commit goes out once each shard's standby holds the mean that it names.
        batches: how many batches each contribution is computed from.
        held: how many contributions a shard holds at the same time, besides `UpdateMode.spare`; with backups at least
            4, because four are added up together.
        timeouts: the coordinator's deadlines.
    """

    mode: Mode
    shards: int
    steps: int
    backups: int | str = 0
    grace: float | None = 0.0
    weighting: Weighting = "Equal"
    max_non_finite: int = 3
    max_staleness: int | None = None
    staleness_damping: bool = False
    clip_norm: float | None = None
    stores: bool = False
    evaluates: bool = False
    replicates: bool = False
    batches: int = 1
    held: int = HELD
    timeouts: Timeouts = field(default_factory=Timeouts)


@dataclass(frozen=True)
class World:
    """The number of ranks in force from `version` on, and their `BatchKey.offset`.

    The update that made `version` is the mean over the ranks of the smaller of this world and the previous one.
    """

    version: int
    world: int
    offset: int = 0


@dataclass
class CoordinatorState:
    """The history so far.

    Attributes:
        term: a part of the history without a rollback; each start from a checkpoint begins a higher term.
        version: the number of updates decided.
        world: the number of ranks in force.
        key_steps: rank -> the next `BatchKey.step`: in Async mode the number of the rank's gradients that were used.
        non_finite_run: how many of the newest updates in a row had a gradient that was not finite.
        redone: updates lost by going back to checkpoints, which were made again.
        worlds: every world of this history, oldest first; the last one is in force.
        history: the id of the history, which the names of its checkpoints carry; empty where nothing is stored.
        last: the version that ends training early; 0: none, `Rules.steps` ends it.
        samples: the account of the current epoch; None where the size of an epoch is unknown.
        batches: `Rules.batches` of this history.
        start_from: what the parameters of version 0 were read from; empty: `init` returned them.
    """

    term: int
    version: int
    world: int
    key_steps: dict[int, int] = field(default_factory=dict)
    non_finite_run: int = 0
    redone: int = 0
    worlds: tuple[World, ...] = ()
    history: str = ""
    start_from: str = ""
    last: int = 0
    samples: Samples | None = None
    batches: int = 1

    def __post_init__(self) -> None:
        if not self.worlds:
            self.worlds = (World(self.version, self.world),)

    @property
    def offset(self) -> int:
        """`BatchKey.offset` of the world in force."""
        return self.worlds[-1].offset

    def copy(self) -> CoordinatorState:
        """Returns a copy that shares no data with this object."""
        return replace(self, key_steps=dict(self.key_steps))

    def to_json(self) -> dict[str, Any]:
        """Returns the content for a manifest."""
        return {
            "term": self.term,
            "version": self.version,
            "world": self.world,
            "keySteps": {str(rank): step for rank, step in sorted(self.key_steps.items())},
            "nonFiniteRun": self.non_finite_run,
            "redone": self.redone,
            "worlds": [{"version": w.version, "world": w.world, "offset": w.offset} for w in self.worlds],
            "history": self.history,
            "startFrom": self.start_from,
            "last": self.last,
            "batches": self.batches,
            **({} if self.samples is None else {"samples": self.samples.to_json()}),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CoordinatorState:
        """Returns the inverse of `to_json`.

        Raises:
            ValueError: a field is missing or is not what `to_json` writes.
        """
        try:
            state = cls(
                term=int(data["term"]),
                version=int(data["version"]),
                world=int(data["world"]),
                key_steps={int(rank): int(step) for rank, step in dict(data["keySteps"]).items()},
                non_finite_run=int(data["nonFiniteRun"]),
                redone=int(data["redone"]),
                worlds=tuple(
                    World(version=int(one["version"]), world=int(one["world"]), offset=int(one["offset"]))
                    for one in data["worlds"]
                ),
                history=str(data.get("history", "")),
                start_from=str(data.get("startFrom", "")),
                last=int(data.get("last", 0)),
                samples=Samples.from_json(data.get("samples")),
                batches=int(data.get("batches", 1)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a coordinator's state: {error!r}") from error
        if state.worlds[-1].world != state.world:
            raise ValueError(f"not a coordinator's state: worlds ends with {state.worlds[-1].world}, not {state.world}")
        return state


def count_samples(state: CoordinatorState, commit: Commit) -> tuple[EpochEnded, ...]:
    """Count the samples of `commit`, whose ranks `state` has counted and whose world is not in force yet.

    Returns:
        The accounts of the epochs that ended with it.
    """
    if state.samples is None:
        return ()
    left_out = 0 if state.samples.sync or commit.world == state.world else left_out_of(state, commit.world)
    state.samples, ended = state.samples.count(
        commit,
        world=state.world,
        offset=state.offset,
        left_out=left_out,
        redone=state.redone,
        batches=state.batches,
    )
    return ended


def left_out_of(state: CoordinatorState, world: int) -> int:
    """Returns the numbers of batches that no rank draws in Async mode when `world` comes in force; see
    `change_world`."""
    before = [state.key_steps.get(rank, 0) for rank in range(state.world)]
    behind = [state.key_steps.get(rank, 0) for rank in range(world)]
    fastest, slowest = max(before), min(behind)
    return state.batches * (sum(fastest + 1 - step for step in before) + sum(step - slowest for step in behind))


def after(state: CoordinatorState, commit: Commit) -> CoordinatorState:
    """Returns the state after the next commit, with which a standby follows and a successor catches up."""
    return apply(state, commit)[0]


def apply(state: CoordinatorState, commit: Commit) -> tuple[CoordinatorState, tuple[EpochEnded, ...]]:
    """Returns the state as in `after`, with the accounts of the epochs that ended with the commit."""
    if (commit.term, commit.version) != (state.term, state.version):
        raise ValueError(
            f"the commit of version {commit.version} in term {commit.term} does not follow version {state.version} "
            f"in term {state.term}"
        )
    new = state.copy()
    new.version += 1
    for contribution in commit.contributions:
        new.key_steps[contribution.id.rank] = contribution.id.key_step + 1
    new.non_finite_run = new.non_finite_run + 1 if commit.skip else 0
    if commit.final:
        new.last = new.version
    ended = count_samples(new, commit)
    if commit.world != new.world:
        new.world = commit.world
        new.worlds = (*new.worlds, World(version=new.version, world=commit.world, offset=commit.offset))
    return new, ended
