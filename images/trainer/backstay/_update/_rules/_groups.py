"""Which leaves an update ties together, by what each output of the trace depends on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ._flat import dependencies
from ._trace import Trace


@dataclass(frozen=True)
class Split:
    """The leaves and states of a trace, divided.

    Attributes:
        groups: (parameter leaves, states that belong to them), both ascending, ordered by first leaf; every
            parameter leaf is in exactly one.
        shared: the states of no group, which no gradient reaches.
        masks: the dependencies of each new value as bits, for every parameter leaf, then every state. Bit i is gradient
            or parameter i, bit (leaves + j) is state j.
    """

    groups: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    shared: tuple[int, ...]
    masks: tuple[int, ...]
    leaves: int

    def pair(self, members: tuple[int, ...]) -> tuple[int, int]:
        """Returns two leaves of a group of which the first one's update depends on the second one, directly if any
        does."""
        for one in members:
            for other in members:
                if one != other and self.masks[one] >> other & 1:
                    return one, other
        return members[0], members[1]


def split(trace: Trace) -> Split:
    """Divide a trace into groups and shared state."""
    leaves, states = len(trace.tree.leaves), len(trace.states)
    bits = [1 << index for index in range(leaves + states)]
    masks = dependencies(trace.flat, [*bits, *bits[:leaves]])
    shared = _shared(masks, leaves, states)
    joined = _Joined(leaves + states)
    shared_mask = sum(bits[leaves + index] for index in shared)
    for node, mask in enumerate(masks):
        if node - leaves not in shared:
            for other in _bits(mask & ~shared_mask):
                joined.join(node, other)
    for index in sorted(shared):  # a constant as large as the one leaf that reads it belongs to that leaf
        owner = _owner(trace, masks, shared, joined, index)
        if owner is not None:
            shared.remove(index)
            joined.join(leaves + index, owner)
    members: dict[int, tuple[list[int], list[int]]] = {}
    for node in range(leaves + states):
        if node < leaves:
            members.setdefault(joined.root(node), ([], []))[0].append(node)
        elif node - leaves not in shared:
            members[joined.root(node)][1].append(node - leaves)
    groups = tuple((tuple(group), tuple(own)) for group, own in members.values())
    return Split(groups, tuple(sorted(shared)), tuple(masks), leaves)


def _shared(masks: list[int], leaves: int, states: int) -> set[int]:
    """Returns the largest set of states whose new values depend on that set alone."""
    shared = set(range(states))
    while True:
        allowed = sum(1 << (leaves + index) for index in shared)
        out = {index for index in shared if masks[leaves + index] & ~allowed}
        if not out:
            return shared
        shared -= out


def _owner(trace: Trace, masks: list[int], shared: set[int], joined: _Joined, index: int) -> int | None:
    leaves = len(trace.tree.leaves)
    bit = 1 << (leaves + index)
    size = 1
    for side in trace.states[index].shape:
        size *= side
    if size <= 1:
        return None
    readers = {node for node, mask in enumerate(masks) if mask & bit and node != leaves + index}
    roots = {joined.root(node) for node in readers if node - leaves not in shared}
    if len(roots) != 1 or any(node - leaves in shared for node in readers):
        return None
    others = masks[leaves + index] & ~bit
    scalars = sum(1 << (leaves + other) for other in shared if trace.states[other].shape == ())
    return roots.pop() if not others & ~scalars else None


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class _Joined:
    """Disjoint sets; a set's root is its smallest member."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

    def root(self, node: int) -> int:
        while self._parent[node] != node:
            self._parent[node] = self._parent[self._parent[node]]
            node = self._parent[node]
        return node

    def join(self, one: int, other: int) -> None:
        one, other = self.root(one), self.root(other)
        self._parent[max(one, other)] = min(one, other)
