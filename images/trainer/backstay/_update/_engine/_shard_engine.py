"""The state of one shard on its device, and the update of it.

Blocks of elementwise programs are updated one by one, so that the first can be sent while the later ones compute. A
whole group is one computation. Everything is dispatched asynchronously. Parameters and optimizer state are donated, so
an update changes them in place. While any view of a block exists, JAX copies the block first, so views never change.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import jax
import numpy as np

from ...errors import CheckpointError
from .._array_specs import STATE, array_specs
from .._average import averages
from .._codecs import BlockWire, Codec, Encoded
from .._partition import Block, Partition
from .._rules import ElementwiseProgram, Group, Rule, WholeProgram, key_impl
from .._snapshot import Entry, Snapshot
from .._tree import arrays
from ._kernels import FUSED, Kernels, Mean, SumNode, enable_x64, kernels_of

Array = np.ndarray[Any, np.dtype[Any]]

_LEARNING_RATE = "hyperparams.learning_rate"


class ShardEngine:
    """One shard's parameters, model state and optimizer state, and their updates.

    Not more than one thread may call `apply`, `skip`, `snapshot` and `sum_of_squares`; `block` and `ready` may be
    called from any thread.
    """

    _lock: threading.Lock  # held while arrays are replaced
    _shared: list[jax.Array]
    _wanted: tuple[int, ...]  # the uniform scalars that the blocks need
    _place: dict[int, int]  # of those among them
    _shared_place: dict[int, int]  # of the shared states
    _codecs: Mapping[int, Codec | None]  # by block: what updates encode it with

    def __init__(self, partition: Partition, shard: int, rule: Rule, params: Any, *, version: int = 0) -> None:
        """Start from parameters and a fresh optimizer state.

        Args:
            partition: a partition of `rule.tree`.
            shard: the shard of the partition to hold.
            rule: `analyse(optimizer, tree)`.
            params: what `init` returned, parameters or ``(params, state)``; only this shard's part is kept. A leaf
                that is not in `needs` may be a `jax.ShapeDtypeStruct`.
            version: the number of updates that are in `params`.

        Raises:
            TreeError: `params` has other leaves than the partition.
        """
        self._prepare(partition, shard, rule, version)
        leaves = arrays(params, partition.tree)
        wanted = self._states
        tree = partition.tree.unflatten(leaves)
        initial = dict(zip(wanted, rule.initial_state(tree, wanted), strict=True))
        self._load(_Whole(rule, leaves, initial).read)

    @classmethod
    def needs(cls, partition: Partition, shard: int, rule: Rule) -> frozenset[int]:
        """Returns the leaves of the tree from which a shard's first state is made, by index. Arguments as in the
        constructor.

        They are the leaves of which it holds a part, and those that the optimizer's state begins with.
        """
        engine = cls.__new__(cls)
        engine._prepare(partition, shard, rule, 0)
        pieces = (piece.leaf for block in engine._layout.blocks for piece in block.pieces)
        whole = (leaf for index in engine._layout.groups for leaf in rule.groups[index].leaves)
        return frozenset((*pieces, *whole, *rule.initial_inputs(engine._states)))

    @property
    def _states(self) -> list[int]:
        """The leaves of the optimizer's state of which this shard holds a part, by index."""
        return sorted({*self._rule.shared, *(state for group in self._held for state in group.states)})

    @classmethod
    def restore(
        cls,
        partition: Partition,
        shard: int,
        rule: Rule,
        read: Callable[[str, int, int], Array],
        version: int,
    ) -> ShardEngine:
        """Start from a checkpoint, which may be of another number of shards.

        Args:
            partition, shard, rule: as in the constructor. `Rule.constants` are the rule's and not the checkpoint's.
            read: ``read(key, start, stop)`` gives elements ``start:stop`` of the flattened array `key` of
                `array_specs(rule)`, 1-D, of its dtype.
            version: the checkpoint's version.

        Raises:
            CheckpointError: `read` gives another size or dtype.
        """
        engine = cls.__new__(cls)
        engine._prepare(partition, shard, rule, version)
        constants = _Whole(rule, [], dict(zip(rule.constants, rule.initial_state((), rule.constants), strict=True)))
        engine._load(lambda *part: constants.read(*part) if part[0] in constants else read(*part))
        return engine

    @property
    def version(self) -> int:
        """The number of updates, skipped ones included."""
        return self._version

    @property
    def learning_rate(self) -> float | None:
        """The one that `optax.inject_hyperparams` keeps in the optimizer's state, or None if the state has none.

        https://optax.readthedocs.io/en/latest/api/optimizer_schedules.html#optax.inject_hyperparams
        """
        for place, index in enumerate(self._rule.shared):
            if self._rule.states[index].path.endswith(_LEARNING_RATE):
                with contextlib.suppress(RuntimeError):  # an update replaces the state meanwhile
                    return float(np.asarray(self._shared[place]))
        return None

    @property
    def has_average(self) -> bool:
        """Whether the optimizer keeps a moving average of the parameters: see `average`."""
        return bool(self._averages)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self._layout.blocks

    def compile(
        self,
        contributions: Sequence[int] = (1,),
        *,
        weighted: bool = False,
        clipped: bool = False,
        wires: Sequence[BlockWire] | None = None,
        parameters: Sequence[BlockWire] | None = None,
    ) -> None:
        """Compile what `apply` will run, before the first gradient has arrived.

        Args:
            contributions: how many gradients an update may have.
            weighted: whether updates may have weights other than 1.
            clipped: whether updates may have clip factors other than 1; compiles `sum_of_squares` too.
            wires: how each block of a contribution travels; None: as an array.
            parameters: how each block is sent to workers: updates encode it (`encoded`). None: they do not.
        """
        self._codecs = {} if parameters is None else {b: wire.codec for b, wire in enumerate(parameters)}
        plain = [np.zeros(block.size, block.dtype) for block in self._layout.blocks]
        encoded = plain if wires is None else [wire.zero() for wire in wires]
        done: set[object] = set()
        if max(contributions, default=0) > FUSED:
            self._warm_fold(encoded)
        # More contributions than that are one, their mean, where an update is computed.
        for count in sorted({count if count <= FUSED else 0 for count in contributions}):
            for factor in (1.0, 0.5) if clipped else (1.0,):
                for weight in (1.0, 0.5) if weighted and count else (1.0,):
                    mean = Mean.of([weight] * max(1, count), max(1, count), factor)
                    self._warm(mean, done, clipped, encoded if count else [_device(value) for value in plain])

    def apply(
        self,
        gradients: Sequence[Sequence[Any]],
        *,
        weights: Sequence[float] | None = None,
        divisor: float = 1,
        clip_factor: float = 1.0,
    ) -> None:
        """Dispatch one update and return; the version grows by one.

        The optimizer gets ``clip_factor * (w0 * g0 + w1 * g1 + ...) / divisor``, summed in that order, in float32 for
        narrower floats. Where no weight or factor differs from 1, nothing is multiplied. Blocks of the model state
        become their weighted mean, see `state_mean`.

        Args:
            gradients: ``gradients[k][b]``, contribution k in order of rank, block b of this shard: 1-D of the block's
                dtype and size, or `Encoded`. 64-byte-aligned memory is used where it lies: it must stay unchanged
                until `ready(b)`; other memory is copied.
            weights: one weight for each contribution; None: all are 1.
            divisor: usually the number of contributions.
            clip_factor: what the function `clip_factor` returns, or 1.
        """
        mean = Mean.of(weights if weights is not None else [1.0] * len(gradients), divisor, clip_factor)
        self._check(gradients, mean)
        if mean.count > FUSED:
            gradients, mean = [self._folded(gradients, mean)], Mean.of([1.0], 1, clip_factor)
        shared = self._shared
        with self._lock:
            self._shared, scalars = self._kernels.advance(shared, self._wanted)
            for index, block in enumerate(self._layout.blocks):
                if (stretch := self._stretches.get(index)) is None or gradients[0][index] is None:
                    continue
                program = self._rule.programs[block.rule]
                assert not isinstance(program, WholeProgram)
                uniform = [scalars[self._place[number]] for number in program.uniform]
                values = tuple(contribution[index] for contribution in gradients)
                update = self._kernels.stretch(block.rule, mean, self._codecs.get(index))
                stretch.param, stretch.states, stretch.sent = update(
                    stretch.param, stretch.states, values, uniform, self._scalars(block, mean)
                )
            for whole in self._wholes:
                if any(gradients[0][index] is None for index in whole.blocks):
                    continue
                own = tuple(tuple(contribution[index] for contribution in gradients) for index in whole.blocks)
                needed = [shared[self._shared_place[index]] for index in self._kernels.shared(whole.group.program)]
                whole.params, whole.states = self._kernels.whole(whole.group.program, mean)(
                    whole.params, whole.states, own, needed, mean.scalars(np.dtype(np.float64))
                )
            self._version += 1

    def skip(self) -> None:
        """The version grows by one; nothing else changes."""
        self._version += 1

    def ready(self, b: int) -> None:
        """Wait until block `b` of the last update is computed: its gradients' memory is free again."""
        self._param(b).block_until_ready()

    def block(self, b: int) -> Array:
        """Block `b` of the current version, when it is computed.

        Returns:
            1-D, read-only. It aliases the shard's memory and yet never changes: the next `apply` copies a block of
            which a view is still held, so drop views early.
        """
        while True:
            param = self._param(b)
            try:
                param.block_until_ready()
            except RuntimeError:
                if not param.is_deleted():
                    raise
                continue  # another update began meanwhile
            with self._lock:
                if not param.is_deleted():
                    return _view(param)

    def encoded(self, b: int) -> Encoded | None:
        """Block `b` as the last update encoded it, computed or not, or None if it did not, or it was taken."""
        if (stretch := self._stretches.get(b)) is None:
            return None
        sent, stretch.sent = stretch.sent, None
        return sent

    def average(self, b: int) -> Array:
        """Returns the average of the parameters of block `b` at the current version, in the block's dtype.

        A block of the model state has no average, so this returns the state. Call it only after the last update.
        Call it only if `has_average`.
        """
        block = self._layout.blocks[b]
        if not block.trained:
            return self.block(b)
        state = self._averages[block.pieces[0].leaf]
        if (stretch := self._stretches.get(b)) is not None:
            # All leaves of a block have the same program, and so their averages have the same place.
            place = self._group_of[block.pieces[0].leaf].states.index(state)
            value = stretch.states[place]
        else:
            whole, _ = self._where[b]
            value = whole.states[whole.group.states.index(state)]
        return np.asarray(value).reshape(-1).astype(block.dtype)

    def mean(self, gradients: Sequence[Sequence[Any]], *, weights: Sequence[float], divisor: float) -> list[Any]:
        """Dispatch the mean of the gradients, block by block; its inputs must not change before it is computed.

        `apply` of it alone is an update that another engine can repeat bit for bit.
        """
        how = Mean.of(weights, divisor, 1.0)
        self._check(gradients, how)
        if how.count > FUSED:
            return self._folded(gradients, how)
        return [
            None
            if gradients[0][index] is None
            else (self._kernels.mean(how) if block.trained else self._kernels.state(how))(
                tuple(contribution[index] for contribution in gradients), self._scalars(block, how)
            )
            for index, block in enumerate(self._layout.blocks)
        ]

    def nodes(self, contribution: Sequence[Any], weight: float) -> list[SumNode | None]:
        """Returns a contribution as `add` takes it; its memory must not change until the sum is computed."""
        return [None if value is None else SumNode(_device(value), (weight,)) for value in contribution]

    def add(self, sums: Sequence[Sequence[SumNode | None]]) -> list[SumNode | None]:
        """Returns the sum of 2 to 4 contributions or sums, block by block, which waits until it is computed.

        Sums that are added are void afterwards: their memory is used again.
        """
        added = [
            None if nodes[0] is None else self._kernels.add(cast("list[SumNode]", nodes), trained=block.trained)
            for block, *nodes in zip(self._layout.blocks, *sums, strict=True)
        ]
        for array in jax.tree_util.tree_leaves([node.value for node in added if node is not None]):
            array.block_until_ready()
        return added

    def finish(self, total: Sequence[SumNode | None], divisor: float) -> list[Any]:
        """Returns the mean of the contributions in a sum; see `mean`."""
        return [
            None if node is None else self._kernels.finish(node, divisor, trained=block.trained)
            for block, node in zip(self._layout.blocks, total, strict=True)
        ]

    def sum_of_squares(
        self, gradients: Sequence[Sequence[Any]], weights: Sequence[float] | None = None, divisor: float = 1
    ) -> float:
        """Returns the sum of squares of the mean gradient over this shard, in float64; see `apply` for the arguments.
        The model state is not a part of it."""
        mean = Mean.of(weights if weights is not None else [1.0] * len(gradients), divisor, 1.0)
        self._check(gradients, mean)
        if mean.count > FUSED:
            gradients, mean = [self._folded(gradients, mean)], Mean.of([1.0], 1, 1.0)
        with enable_x64():
            parts = [
                self._kernels.squares(mean)(
                    tuple(contribution[index] for contribution in gradients), mean.scalars(block.dtype)
                )
                for index, block in enumerate(self._layout.blocks)
                if block.trained and gradients[0][index] is not None
            ]
        return math.fsum(float(part) for part in parts)

    def snapshot(self, *, whole: bool = False) -> Snapshot:
        """Everything at the current version. The entries are views that never change: writing them may take its time,
        and the updates meanwhile copy only what is still held. `whole`: with the state that is the same
        on all shards, which otherwise only shard 0 includes."""
        entries: list[Entry] = []
        for index, block in enumerate(self._layout.blocks):
            if (stretch := self._stretches.get(index)) is not None:
                values = [_view(stretch.param), *map(_view, stretch.states)]
                for piece in block.pieces:
                    for key, value in zip(self._keys(self._group_of[piece.leaf]), values, strict=True):
                        part = value[piece.offset : piece.offset + piece.size]
                        entries.append(Entry(key, piece.start, piece.stop, part))
        for held in self._wholes:
            values = [_view(value) for value in (*held.params, *held.states)]
            entries += [_entry(key, value) for key, value in zip(self._keys(held.group), values, strict=True)]
        if self._layout.shard == 0 or whole:
            keys = [STATE + self._rule.states[index].path for index in self._rule.shared]
            entries += [_entry(key, _view(value)) for key, value in zip(keys, self._shared, strict=True)]
        return Snapshot(self._version, tuple(entry for entry in entries if entry.stop > entry.start))

    # -- inside

    def _prepare(self, partition: Partition, shard: int, rule: Rule, version: int) -> None:
        self._layout = partition.shards[shard]
        self._rule = rule
        self._kernels: Kernels = kernels_of(rule)
        self._version = version
        self._shared = []
        self._codecs = {}
        self._averages = averages(rule)
        self._lock = threading.Lock()
        self._group_of = {leaf: group for group in rule.groups for leaf in group.leaves}
        self._stretches: dict[int, _Stretch] = {}
        self._wholes: list[_WholeGroup] = []
        self._where: dict[int, tuple[_WholeGroup, int]] = {}  # block -> its group and place in it
        blocks = self._layout.blocks
        leaves = {piece.leaf for block in blocks for piece in block.pieces}
        whole = [rule.groups[index] for index in self._layout.groups]
        cut = {leaf for leaf in leaves if self._group_of[leaf].elementwise}
        self._held = [*whole, *(self._group_of[leaf] for leaf in sorted(cut))]
        programs = {block.rule for block in blocks}
        uniform = {
            number
            for program in (rule.programs[index] for index in programs)
            if isinstance(program, ElementwiseProgram)
            for number in program.uniform
        }
        self._wanted = tuple(sorted(uniform))
        self._place = {number: place for place, number in enumerate(self._wanted)}
        self._shared_place = {state: place for place, state in enumerate(rule.shared)}

    def _load(self, read: Callable[[str, int, int], Array]) -> None:
        specs = {spec.key: spec for spec in array_specs(self._rule)}

        def values(key: str, start: int, stop: int) -> Array:
            spec = specs[key]
            value = np.asarray(read(key, start, stop)) if stop > start else np.empty(0, spec.dtype)
            if value.shape != (stop - start,) or value.dtype != spec.dtype:
                raise CheckpointError(
                    f"array {key}, elements {start}:{stop}, is {value.dtype}{list(value.shape)}: must be "
                    f"{spec.dtype}[{stop - start}]"
                )
            return value

        at = {}
        for index, block in enumerate(self._layout.blocks):
            if isinstance(self._rule.programs[block.rule], WholeProgram):
                at[block.pieces[0].leaf] = index
                continue
            columns = zip(
                *(
                    [values(key, piece.start, piece.stop) for key in self._keys(self._group_of[piece.leaf])]
                    for piece in block.pieces
                ),
                strict=True,
            )
            param, *states = [_own(np.concatenate(column)) for column in columns]
            self._stretches[index] = _Stretch(param, states)
        for number in self._layout.groups:
            group = self._rule.groups[number]
            # An empty leaf has no block; its gradient is empty too.
            own = tuple(at[leaf] for leaf in group.leaves if leaf in at)
            loaded = []
            for key in self._keys(group):
                value = values(key, 0, specs[key].size).reshape(specs[key].shape)
                loaded.append(_own(value))
            count = len(group.leaves)
            states = [self._typed(value, index) for value, index in zip(loaded[count:], group.states, strict=True)]
            whole = _WholeGroup(group, own, loaded[:count], states)
            self._wholes.append(whole)
            for place, leaf in enumerate(group.leaves):
                if leaf in at:
                    self._where[at[leaf]] = (whole, place)
        for index in self._rule.shared:
            spec = specs[STATE + self._rule.states[index].path]
            value = values(spec.key, 0, spec.size).reshape(spec.shape)
            self._shared.append(self._typed(_own(value), index))

    def _typed(self, value: jax.Array, state: int) -> jax.Array:
        spec = self._rule.states[state]
        return jax.random.wrap_key_data(value, impl=key_impl(spec)) if spec.is_key else value

    def _keys(self, group: Group) -> list[str]:
        leaves = [self._rule.tree.leaves[leaf].key for leaf in group.leaves]
        return leaves + [STATE + self._rule.states[state].path for state in group.states]

    def _param(self, index: int) -> Any:
        if index in self._stretches:
            return self._stretches[index].param
        whole, place = self._where[index]
        return whole.params[place]

    def _scalars(self, block: Block, mean: Mean) -> tuple[Any, ...]:
        return mean.scalars(block.dtype) if block.trained else mean.state_scalars(block.dtype)

    def _check(self, gradients: Sequence[Sequence[Any]], mean: Mean) -> None:
        if len(gradients) != mean.count:
            raise ValueError(f"{len(gradients)} gradients and {mean.count} weights: must be the same number")
        for rank, contribution in enumerate(gradients):
            if len(contribution) != len(self._layout.blocks):
                raise ValueError(
                    f"contribution {rank} has {len(contribution)} blocks: shard {self._layout.shard} has "
                    f"{len(self._layout.blocks)}"
                )
            for index, (value, block) in enumerate(zip(contribution, self._layout.blocks, strict=True)):
                if value is None and gradients[0][index] is None:
                    continue
                if value is None or value.shape != (block.size,) or value.dtype != block.dtype:
                    raise ValueError(
                        f"contribution {rank}, block {index} is {_kind(value)}: must be {block.dtype}[{block.size}]"
                    )

    def _folded(self, gradients: Sequence[Sequence[Any]], mean: Mean) -> list[Any]:
        """Returns the mean of many contributions, block by block; see `Kernels.folded`."""
        return [
            None
            if gradients[0][index] is None
            else self._kernels.folded(
                [_device(contribution[index]) for contribution in gradients],
                mean.weights,
                mean.divisor,
                trained=block.trained,
            )
            for index, block in enumerate(self._layout.blocks)
        ]

    def _warm_fold(self, zeros: Sequence[Any]) -> None:
        done: set[object] = set()
        for block, zero in zip(self._layout.blocks, zeros, strict=True):
            kind = (block.size, block.dtype, block.trained, type(zero))
            if kind not in done:
                done.add(kind)
                # Sums of contributions, of sums, and of both; the last one is a contribution alone.
                count = FUSED * FUSED + 1
                self._kernels.folded([_device(zero)] * count, [1.0] * count, count, trained=block.trained)

    def _warm(self, mean: Mean, done: set[object], clipped: bool, zeros: Sequence[Any]) -> None:
        """Run each distinct executable once, on zeros."""
        _, scalars = self._kernels.advance(self._shared, self._wanted)
        for index, block in enumerate(self._layout.blocks):
            kind = type(zeros[index])
            zero = zeros[index]
            squares = ("squares", mean.form, block.dtype, block.size, kind)
            if clipped and block.trained and squares not in done:
                done.add(squares)
                with enable_x64():
                    self._kernels.squares(mean)((zero,) * mean.count, mean.scalars(block.dtype))
            codec = self._codecs.get(index)
            key = (block.rule, mean.form, block.dtype, block.size, kind, codec)
            if key in done or (stretch := self._stretches.get(index)) is None:
                continue
            done.add(key)
            program = self._rule.programs[block.rule]
            assert not isinstance(program, WholeProgram)
            uniform = [scalars[self._place[number]] for number in program.uniform]
            fresh = [_own(np.zeros(block.size, value.dtype)) for value in (stretch.param, *stretch.states)]
            self._kernels.stretch(block.rule, mean, codec)(
                fresh[0], fresh[1:], (zero,) * mean.count, uniform, self._scalars(block, mean)
            )
        for whole in self._wholes:
            if (group := (whole.group.program, mean.form, *(type(zeros[index]) for index in whole.blocks))) in done:
                continue
            done.add(group)
            own = tuple((zeros[index],) * mean.count for index in whole.blocks)
            needed = [self._shared[self._shared_place[index]] for index in self._kernels.shared(whole.group.program)]
            params, states = jax.tree_util.tree_map(_own, (whole.params, whole.states))
            self._kernels.whole(whole.group.program, mean)(
                params, states, own, needed, mean.scalars(np.dtype(np.float64))
            )


@dataclass
class _Stretch:
    param: jax.Array
    states: list[jax.Array]
    sent: Encoded | None = None


@dataclass
class _WholeGroup:
    group: Group
    blocks: tuple[int, ...]
    params: list[jax.Array]
    states: list[jax.Array]


class _Whole:
    """`read` of whole arrays in memory; `leaves` may be empty, and those that are only described cannot be read."""

    def __init__(
        self, rule: Rule, leaves: Sequence[Array | jax.ShapeDtypeStruct], states: Mapping[int, jax.Array]
    ) -> None:
        self._rule = rule
        self._flat: dict[str, Array] = {
            spec.key: leaf.reshape(-1)
            for spec, leaf in zip(rule.tree.leaves[: len(leaves)], leaves, strict=True)
            if not isinstance(leaf, jax.ShapeDtypeStruct)
        }
        self._flat |= {STATE + rule.states[index].path: _view(value) for index, value in states.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._flat

    def read(self, key: str, start: int, stop: int) -> Array:
        return self._flat[key][start:stop]


def _entry(key: str, value: Array) -> Entry:
    return Entry(key, 0, value.size, value)


def _kind(value: Any) -> str:
    return "missing" if value is None else f"{value.dtype}{list(value.shape)}"


def _device(value: Any) -> Any:
    """Returns an array or `Encoded` on the device. Aligned memory is used without a copy."""
    return jax.device_put(value, may_alias=True)


def _own(value: Array | jax.Array) -> jax.Array:
    """Returns a copy on the device, in memory that JAX owns and may donate. `value` is read before it returns.

    `jax.numpy.array` would compile a program for each size.
    """
    copied: jax.Array = jax.device_put(_device(value), may_alias=False)
    return copied.block_until_ready()


def _view(value: jax.Array) -> Array:
    """Returns a flat read-only host view (a copy on other devices than the CPU)."""
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    view = np.asarray(value).reshape(-1)
    view.flags.writeable = False
    return view
