"""Describes an optimizer as shards compute it, by the leaves that are updated together, and the program for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import optax

from ...errors import OptimizerError
from .._tree import LeafSpec, TreeSpec
from ._advice import factories, together
from ._digest import ProgramDigest, program_digest, structure_digest
from ._elementwise import Expressions, NotElementwiseError
from ._flat import Flat, Slicer, dependencies, evaluate
from ._groups import Split, split
from ._signature import of_flat
from ._trace import StateSpec, Trace, trace


@dataclass(frozen=True)
class Group:
    """Leaves that are updated together, because the update of one reads another.

    Attributes:
        leaves: the numbers of the group's parameter leaves, ascending.
        states: the numbers of the leaves of the optimizer's state that belong to these parameters alone, ascending.
        elementwise: whether the group is one leaf whose elements, with those of its states, may be updated in any
            pieces.
        program: the index in `Rule.programs` of the program that updates the group.
        why: why it is not elementwise; empty if it is.
    """

    leaves: tuple[int, ...]
    states: tuple[int, ...]
    elementwise: bool
    program: int
    why: str = ""


@dataclass(frozen=True)
class ElementwiseProgram:
    """The update of any stretch of elements.

    Attributes:
        expressions: the expressions that `outputs` refer to.
        outputs: expressions of the new parameter, then of the new states.
        uniform: the scalars that `run` wants, computed once for a whole update by `Rule.advance`.
    """

    expressions: Expressions
    outputs: tuple[int, ...]
    uniform: tuple[int, ...]

    def run(self, scalars: Sequence[Any], gradient: Any, param: Any, states: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Returns new parameter and states of one block; all 1-D of one size. To be traced."""
        uniform = dict(zip(self.uniform, scalars, strict=True))
        results = self.expressions.block(self.outputs, uniform, [gradient, param, *states], gradient.shape[0])
        return results[0], results[1:]


@dataclass(frozen=True)
class WholeProgram:
    """The update of a group in its true shapes.

    Attributes:
        flat: the program; outputs are the new parameters, then the new states of the group.
        inputs: what each of its inputs is: ``("gradient" | "param" | "state", k-th of the group)``, or
            ``("shared", state leaf)``.
        leaves: how many leaves the group has.
    """

    flat: Flat
    inputs: tuple[tuple[str, int], ...]
    leaves: int

    @property
    def shared(self) -> tuple[int, ...]:
        """The shared state leaves that `run` wants."""
        return tuple(sorted({index for kind, index in self.inputs if kind == "shared"}))

    def run(
        self, shared: Sequence[Any], gradients: Sequence[Any], params: Sequence[Any], states: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns new parameters and states; all in their true shapes. To be traced."""
        sources = {
            "gradient": dict(enumerate(gradients)),
            "param": dict(enumerate(params)),
            "state": dict(enumerate(states)),
            "shared": dict(zip(self.shared, shared, strict=True)),
        }
        results = evaluate(self.flat, [sources[kind][index] for kind, index in self.inputs])
        return results[: self.leaves], results[self.leaves :]


@dataclass(frozen=True)
class StateProgram:
    """Updates the model state, any stretch of which becomes the weighted mean of the contributions.

    Integers and booleans have no mean: they become those of the lowest contributing rank.
    """

    uniform: tuple[int, ...] = ()


Program = ElementwiseProgram | WholeProgram | StateProgram


@dataclass(frozen=True, eq=False)
class Rule:
    """The result of `analyse` for an optimizer on a tree.

    Attributes:
        tree: the model: parameters, and model state if it has one.
        states: the leaves of the optimizer's state.
        treedef: the structure of the state, of which `states` are the leaves.
        groups: every leaf of the model in exactly one, ordered by their first leaf.
        shared: the state leaves that no gradient reaches; every shard keeps and advances a copy.
        constants: the state leaves that no update changes, and that no parameter had a part in, such as the
            hyperparameters of `optax.inject_hyperparams`. They are values of the script. So a checkpoint's values of
            them are not used.
        unread: the state leaves that no update reads, such as the present values of the schedules of
            `optax.inject_hyperparams`.
        programs: what updates groups; groups with the same program are updated in the same way.
        cache: values that users of the rule compile and want to keep as long as the rule.
    """

    tree: TreeSpec
    states: tuple[StateSpec, ...]
    treedef: Any
    groups: tuple[Group, ...]
    shared: tuple[int, ...]
    constants: tuple[int, ...]
    unread: tuple[int, ...]
    programs: tuple[Program, ...]
    _init: Flat  # parameters to states
    _advance: Flat
    _advance_inputs: tuple[int, ...]
    _split: Split
    _made_by: frozenset[str]  # functions of optax
    cache: dict[str, Any] = field(default_factory=dict, repr=False)

    @cached_property
    def structure_digest(self) -> bytes:
        """SHA-256 of the names, shapes and dtypes of parameters and state; equal for all checkpoints of a history."""
        return structure_digest(self.tree, self.states)

    @cached_property
    def program(self) -> ProgramDigest:
        """The computation of the optimizer, its initial state included."""
        return self._program(range(len(self.states)))

    @cached_property
    def updates(self) -> ProgramDigest:
        """The computation of updates from the state of a checkpoint, with `constants` of this script."""
        return self._program(self.constants)

    @cached_property
    def start(self) -> ProgramDigest:
        """The initial values of the states that a checkpoint replaces and an update reads."""
        left_out = {*self.constants, *self.unread}
        init, _ = Slicer(self._init).select([i for i in range(len(self.states)) if i not in left_out])
        return program_digest([init], [], [])

    def _program(self, states: Sequence[int]) -> ProgramDigest:
        """Returns the computation of updates, and of the initial values of some states."""
        whole = [program for program in self.programs if isinstance(program, WholeProgram)]
        blocks = [program for program in self.programs if isinstance(program, ElementwiseProgram)]
        init, _ = Slicer(self._init).select(states)
        layout = [
            [[isinstance(program, WholeProgram) for program in self.programs]],
            [[list(group.leaves), list(group.states), group.program] for group in self.groups],
            [[program.leaves, [list(each) for each in program.inputs]] for program in whole],
            [list(self.shared), list(self._advance_inputs)],
        ]
        if any(isinstance(program, StateProgram) for program in self.programs):
            layout.append([[isinstance(program, StateProgram) for program in self.programs]])
        flats = [init, self._advance, *(program.flat for program in whole)]
        return program_digest(flats, [program.expressions.nodes(program.outputs) for program in blocks], layout)

    @property
    def program_digest(self) -> bytes:
        """The SHA-256 of `program`, which is the same in pods that train together."""
        return self.program.sha256

    def check(self, shards: int) -> None:
        """Refuse what `shards` shards cannot compute as one process would.

        Raises:
            OptimizerError: the job has more than one shard and no frozen part, and all leaves must be updated together.
        """
        if shards == 1 or self.tree.frozen is not None:  # beside a frozen base, one server can hold what trains
            return
        filled = {index for index, leaf in enumerate(self.tree.leaves) if leaf.trained and leaf.size}
        for group in self.groups:
            if len(group.leaves) > 1 and filled <= set(group.leaves):
                raise OptimizerError(self._refusal(group, shards))

    def advance(self, shared: Sequence[Any], wanted: Sequence[int]) -> tuple[list[Any], list[Any]]:
        """Returns the shared states after the update, and the uniform scalars that the update uses. To be traced.

        Args:
            shared: the values of `self.shared`, before the update.
            wanted: expressions, from `ElementwiseProgram.uniform`.
        """
        values = dict(zip(self.shared, shared, strict=True))
        new = evaluate(self._advance, [values[index] for index in self._advance_inputs])
        for program in self.programs:
            if isinstance(program, ElementwiseProgram):
                return new, list(program.expressions.scalars(wanted, values))
        return new, []

    def constants_of(self, wanted: Sequence[int]) -> list[jax.Array] | None:
        """Returns the scalars that `advance` returns, if the program has them as numbers. None if it computes them."""
        for program in self.programs:
            if isinstance(program, ElementwiseProgram):
                written: list[jax.Array] | None = jax.device_put(program.expressions.constants(wanted))
                return written
        return []

    def initial_inputs(self, wanted: Sequence[int]) -> tuple[int, ...]:
        """Returns the leaves of the parameters that `initial_state` reads."""
        return Slicer(self._init).select(wanted)[1]

    def initial_state(self, params: Any, wanted: Sequence[int]) -> list[jax.Array]:
        """Returns the given leaves of ``optimizer.init(params)``, the others not computed."""
        part, used = Slicer(self._init).select(wanted)
        leaves = jax.tree_util.tree_leaves(params)
        # Not jitted, because most leaves are zeros, and each set of leaves would be compiled.
        made = evaluate(part, jax.device_put([leaves[index] for index in used]), traced=False)
        return list(map(jax.device_put, made))

    def _refusal(self, group: Group, shards: int) -> str:
        one, other = self._split.pair(group.leaves)
        first, second = self.tree.leaves[one], self.tree.leaves[other]
        return (
            f"optimizer: leaf {first.path} depends on leaf {second.path} in an update, and so all leaves must be "
            f"computed together; with {shards} shards they are in different processes. {together(self._made_by)}"
        )


def inner_program(optimizer: optax.GradientTransformation, tree: TreeSpec) -> ProgramDigest:
    """Returns the digest of an optimizer that a worker runs by itself, over the whole tree.

    Raises:
        OptimizerError: for the same reasons as `analyse`, except what only several shards cannot compute.
    """
    traced = trace(optimizer, tree.parameters)
    return program_digest([traced.init, traced.flat], [], [])


def analyse(optimizer: optax.GradientTransformation, tree: TreeSpec, traced: Trace | None = None) -> Rule:
    """Find out what an optimizer does to each leaf, by tracing one update over the whole tree's shapes.

    Args:
        optimizer: any `optax.GradientTransformation` whose update needs gradients, its state and parameters only.
        tree: the model; the optimizer gets its parameters only.
        traced: the result of `trace` for both, if it is known.

    Raises:
        OptimizerError: servers cannot compute the optimizer at all. `Rule.check` decides whether several shards can.
    """
    traced = traced or trace(optimizer, tree.parameters)
    parts = split(traced)
    return _Analysis(traced, parts, factories(optimizer)).rule(tree)


class _Analysis:
    def __init__(self, traced: Trace, parts: Split, made_by: frozenset[str]) -> None:
        self.made_by = made_by
        self.trace = traced
        self.parts = parts
        self.slicer = Slicer(traced.flat)
        self.expressions = Expressions()
        self.programs: list[Program] = []
        self.numbers: dict[Any, int] = {}

    def rule(self, tree: TreeSpec) -> Rule:
        leaves = len(self.trace.tree.leaves)
        groups = [self._group(members, states) for members, states in self.parts.groups]
        untrained = range(leaves, len(tree.leaves))
        groups += [Group((leaf,), (), True, self._number("model state", StateProgram())) for leaf in untrained]
        advance, used = self.slicer.select([leaves + index for index in self.parts.shared])
        return Rule(
            tree=tree,
            states=self.trace.states,
            treedef=self.trace.treedef,
            groups=tuple(groups),
            shared=self.parts.shared,
            constants=self._constants(),
            unread=self._unread(),
            programs=tuple(self.programs),
            _init=self.trace.init,
            _advance=advance,
            _advance_inputs=tuple(index - leaves for index in used),
            _split=self.parts,
            _made_by=self.made_by,
        )

    def _constants(self) -> tuple[int, ...]:
        """See `Rule.constants`."""
        flat, init, leaves = self.trace.flat, self.trace.init, len(self.trace.tree.leaves)
        read, origins = dependencies(init, [1] * len(init.inputs)), self.trace.origins
        return tuple(
            index
            for index in range(len(self.trace.states))
            if not read[index] and origins.unchanged(flat.outputs[leaves + index]) == leaves + index
        )

    def _unread(self) -> tuple[int, ...]:
        """See `Rule.unread`."""
        leaves = len(self.trace.tree.leaves)
        _, read = self.slicer.select(range(len(self.trace.flat.outputs)))
        return tuple(sorted(set(range(len(self.trace.states))) - {index - leaves for index in read}))

    def _group(self, members: tuple[int, ...], states: tuple[int, ...]) -> Group:
        count = len(self.trace.tree.leaves)
        flat, used = self.slicer.select([*members, *(count + index for index in states)])
        names = [self._name(position, members, states) for position in used]
        why = f"it is updated together with {len(members) - 1} other leaves"
        if len(members) == 1:
            try:
                outputs = self._elementwise(flat, names, self.trace.tree.leaves[members[0]])
            except NotElementwiseError as error:
                why = str(error)
            else:
                return Group(members, states, True, self._elementwise_number(outputs, members[0], states))
        program = WholeProgram(flat, tuple(names), len(members))
        # The lengths matter too: an input that is not used is in no part of the program.
        key = ("whole", len(members), len(states), program.inputs, of_flat(flat))
        return Group(members, states, False, self._number(key, program), why)

    def _elementwise(self, flat: Flat, names: Sequence[tuple[str, int]], leaf: LeafSpec) -> tuple[int, ...]:
        place = {"gradient": 0, "param": 1}
        inputs = [
            ("shared", index) if kind == "shared" else ("leaf", place[kind] if kind in place else 2 + index)
            for kind, index in names
        ]
        return self.expressions.leaf(flat, inputs, leaf.shape)

    def _elementwise_number(self, outputs: tuple[int, ...], leaf: int, states: tuple[int, ...]) -> int:
        uniform = self.expressions.frontier(outputs)
        dtypes = tuple(self.trace.states[index].dtype for index in states)
        key = ("elementwise", outputs, self.trace.tree.leaves[leaf].dtype, dtypes)
        return self._number(key, ElementwiseProgram(self.expressions, outputs, uniform))

    def _number(self, key: Any, program: Program) -> int:
        number = self.numbers.setdefault(key, len(self.programs))
        if number == len(self.programs):
            self.programs.append(program)
        return number

    def _name(self, position: int, members: tuple[int, ...], states: tuple[int, ...]) -> tuple[str, int]:
        """Returns the role of input `position` of the trace in this group."""
        leaves, all_states = len(self.trace.tree.leaves), len(self.trace.states)
        if position < leaves:
            return ("gradient", members.index(position))
        if position >= leaves + all_states:
            return ("param", members.index(position - leaves - all_states))
        state = position - leaves
        return ("state", states.index(state)) if state in states else ("shared", state)
