"""Divides the parameters into fragments, which workers that make local steps exchange in turn."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigurationError
from ._tree import TreeSpec

__all__ = ["fragments_of", "layer_of"]


def layer_of(path: str) -> str:
    """The layer of a leaf: its path up to the first number, or without its last part.

    Such as ``blocks.3`` of ``blocks.3.qkv``, and ``dense`` of ``dense.kernel``.
    """
    parts = path.split(".")
    for index, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: index + 1])
    return ".".join(parts[:-1] or parts)


def fragments_of(tree: TreeSpec, count: int) -> tuple[int | None, ...]:
    """The fragment of each leaf; None for model state, which belongs to every exchange.

    Layers stay whole. The largest layer first, each goes to the fragment that has the fewest bytes.

    Args:
        tree: of the model.
        count: how many fragments, at least 1.

    Raises:
        ConfigurationError: the model has fewer layers than fragments.
    """
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
