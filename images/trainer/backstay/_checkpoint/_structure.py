"""A tree of parameters written down as JSON, so that dicts, lists and tuples come back without pickling anything.

Leaves are numbered in JAX's order of flattening. Of any other kind of node only the name is stored: reading it back
needs an example tree (`like`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from ..errors import CheckpointError


def describe_structure(tree: Any) -> dict[str, Any]:
    """Returns the structure of `tree` as JSON, with dicts (string, integer or boolean keys), lists, tuples, None and
    leaves."""
    counter = itertools.count()

    def walk(node: Any) -> dict[str, Any]:
        if node is None:
            return {"none": True}
        if jax.tree_util.all_leaves([node]):
            return {"leaf": next(counter)}
        kind = type(node)
        if kind is dict and all(type(key) in {str, int, bool} for key in node):
            # JAX flattens dicts in sorted order of their keys.
            return {"dict": [[key, walk(node[key])] for key in sorted(node)]}
        if kind is list:
            return {"list": [walk(child) for child in node]}
        if kind is tuple:
            return {"tuple": [walk(child) for child in node]}
        children = jax.tree_util.tree_flatten(node, is_leaf=lambda child: child is not node)[0]
        return {"other": f"{kind.__module__}.{kind.__qualname__}", "children": [walk(child) for child in children]}

    return walk(tree)


def rebuild(structure: dict[str, Any], leaves: Sequence[Any]) -> Any:
    """Returns the tree that `structure` describes, with `leaves`.

    Raises:
        CheckpointError: a node is not a dict, list or tuple, or `structure` is damaged.
    """

    def walk(node: Any) -> Any:
        match node:
            case {"none": True}:
                return None
            case {"leaf": int(index)} if 0 <= index < len(leaves):
                return leaves[index]
            case {"dict": list(items)}:
                return {key: walk(child) for key, child in items}
            case {"list": list(children)}:
                return [walk(child) for child in children]
            case {"tuple": list(children)}:
                return tuple(walk(child) for child in children)
            case {"other": str(name)}:
                raise CheckpointError(
                    f"the checkpoint's parameters contain a {name}, which can be loaded only with `like`: "
                    "call backstay.load(uri, like=init(key)) with a tree of the same structure"
                )
            case _:
                raise CheckpointError(f"the manifest's structure is damaged at {node!r}")

    return walk(structure)


def check_structure(structure: Any, leaves: int) -> None:
    """
    Raises:
        ValueError: `structure` is not what `describe_structure` writes for a tree of `leaves` leaves.
    """
    numbers: list[int] = []

    def walk(node: Any) -> None:
        match node:
            case {"none": True, **rest} if not rest:
                return
            # The file may be damaged or foreign, and True is an int to Python.
            case {"leaf": int(index), **rest} if not rest and type(index) is int:
                numbers.append(index)
            case {"dict": list(items), **rest} if not rest:
                if not all(isinstance(item, list) and len(item) == 2 for item in items):
                    raise ValueError("the structure has a dict that is not a list of pairs")
                keys = [key for key, _ in items]
                if any(type(key) not in (str, int, bool) for key in keys) or len(set(keys)) != len(keys):
                    raise ValueError("the structure has a dict with an invalid key, or with a key twice")
                for _, child in items:
                    walk(child)
            case (
                {"list": list(children), **rest}
                | {"tuple": list(children), **rest}
                | {"other": str(), "children": list(children), **rest}
            ) if not rest:
                for child in children:
                    walk(child)
            case _:
                raise ValueError(f"the structure has an unknown node {node!r:.100}")

    walk(structure)
    if numbers != list(range(leaves)):
        raise ValueError(f"the structure has the leaves {numbers!r:.100}, must have 0 to {leaves - 1} in order")
