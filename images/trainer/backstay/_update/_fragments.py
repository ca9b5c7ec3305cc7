"""Divides the parameters into fragments, which workers that make local steps exchange in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ..errors import ConfigurationError
from ._rules import analyse
from ._selection import Selection
from ._tree import TreeSpec

if TYPE_CHECKING:
    import optax

__all__ = ["Turns", "fragments_of", "layer_of"]


def layer_of(path: str) -> str:
    """Returns the layer of a leaf, which is its path up to the first number, or without its last part.

    Such as ``blocks.3`` of ``blocks.3.qkv``, and ``dense`` of ``dense.kernel``.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1] or parts)


def fragments_of(tree: TreeSpec, count: int) -> tuple[int | None, ...]:
    """Returns the fragment of each leaf; None for model state, which belongs to every exchange.

    Layers stay whole. The largest layer first, each goes to the fragment that has the fewest bytes.

    Args:
        tree: the model's tree.
        count: how many fragments, at least 1.

    Raises:
        ConfigurationError: the model has fewer layers than fragments.
    """
    if count == 1:
        return tuple(0 if leaf.trained else None for leaf in tree.leaves)
    sizes: dict[str, int] = {}
    for leaf in tree.leaves:
        if leaf.trained:
            layer = layer_of(leaf.path)
            sizes[layer] = sizes.get(layer, 0) + leaf.nbytes
    if len(sizes) < count:
        raise ConfigurationError(
            f"LocalSteps: fragments is {count}, and the model has {len(sizes)} layers: must be at most {len(sizes)}"
        )
    order = {layer: place for place, layer in enumerate(sizes)}
    loads, chosen = [0] * count, dict[str, int]()
    for layer in sorted(sizes, key=lambda layer: (-sizes[layer], order[layer])):
        # By the number of layers too, so that no fragment stays empty where layers have no elements.
        members: Sequence[int] = list(chosen.values())
        least = min(range(count), key=lambda fragment: (loads[fragment], members.count(fragment), fragment))
        chosen[layer] = least
        loads[least] += sizes[layer]
    return tuple(chosen[layer_of(leaf.path)] if leaf.trained else None for leaf in tree.leaves)


class Turns:
    """Updates of one fragment each, of an optimizer that one process computes over the whole tree.

    An update changes the parameters of its fragment, and the state of the optimizer that belongs to them. State that
    no gradient reaches, such as counters, changes with every update.
    """

    def __init__(self, optimizer: optax.GradientTransformation, tree: TreeSpec, count: int) -> None:
        """
        Args:
            optimizer: the outer one.
            tree: the model's tree.
            count: how many fragments, at least 1.

        Raises:
            ConfigurationError: see `fragments_of`.
            OptimizerError: see `analyse`; only with several fragments.
        """
        self.count = count
        self._leaves = fragments_of(tree, count)
        self._states: list[int | None] = []
        if count > 1:
            rule = analyse(optimizer, tree)
            owners = {state: self._leaves[group.leaves[0]] for group in rule.groups for state in group.states}
            self._states = [owners.get(state) for state in range(len(rule.states))]

    def leaves(self, step: int, new: Sequence[Any], old: Sequence[Any]) -> list[Any]:
        """Returns the new ones of the leaves that update number `step` changes, and the old ones of the others.

        Args:
            new, old: one array for each leaf of the tree's parameters, or no arrays at all.
        """
        own = step % self.count
        of_each = self._leaves[: len(new)]
        return [a if fragment == own else b for fragment, a, b in zip(of_each, new, old, strict=True)]

    def gradients(self, step: int, leaves: Sequence[Any]) -> list[Any]:
        """Returns the gradients of the leaves that update number `step` changes, and zeros for the others.

        Args:
            leaves: one array for each leaf of the tree's parameters.
        """
        own = step % self.count
        of_each = self._leaves[: len(leaves)]
        return [
            leaf if fragment == own else jnp.zeros_like(leaf) for fragment, leaf in zip(of_each, leaves, strict=True)
        ]

    def state(self, step: int, new: Any, old: Any) -> Any:
        """Returns the state of the optimizer after update number `step`."""
        if self.count == 1:
            return new
        own = step % self.count
        flat, treedef = jax.tree_util.tree_flatten(new)
        before = jax.tree_util.tree_leaves(old)
        kept = [a if part in (own, None) else b for part, a, b in zip(self._states, flat, before, strict=True)]
        return jax.tree_util.tree_unflatten(treedef, kept)

    def received(self, step: int) -> Selection | None:
        """Returns the parameters that a worker received before contribution `step`, or None if it requested the
        model."""
        return Selection.of([step - 1], self.count) if step else None
