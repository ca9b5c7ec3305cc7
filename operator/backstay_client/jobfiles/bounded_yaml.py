"""Reads YAML from people safely, with a bounded size of its aliases, and an error for duplicate keys.

PyYAML shares one object between all aliases of an anchor. So reading is cheap, but code that walks, copies or prints
the result visits every alias: a kilobyte of nested aliases becomes gigabytes. Kubernetes' YAML reader refuses such
documents too. Merge keys (``<<``) are read as kubectl reads them (https://yaml.org/type/merge.html).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Final

import yaml

__all__ = ["BoundedLoader", "load_all", "scalars_of_all"]

MAX_NODES: Final = 200_000
MAX_DEPTH: Final = 100
_STRING: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"


class BoundedLoader(yaml.SafeLoader):
    """Loads YAML like `yaml.SafeLoader`, but refuses duplicate keys, excessive aliasing, and excessive nesting."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._depth += 1
        try:
            if self._depth > MAX_DEPTH:
                mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
                raise yaml.composer.ComposerError(None, None, f"nested deeper than {MAX_DEPTH} levels", mark)
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def compose_mapping_node(self, anchor: dict[Any, yaml.Node]) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == _MERGE:
                continue
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is duplicated in one mapping", key_node.start_mark
                )
            seen.add(key)
        return node

    def compose_document(self) -> yaml.Node | None:
        root = super().compose_document()
        if root is not None:
            _expanded_nodes(root)
        return root


def load_all(text: str | bytes) -> list[Any]:
    """The documents of a YAML stream.

    Args:
        text: the stream; bytes are UTF-8 or UTF-16.

    Raises:
        yaml.YAMLError: the stream is not YAML, or exceeds a bound of `BoundedLoader`.
        ValueError: a number or a timestamp in it is invalid, such as an integer of thousands of digits.
    """
    return list(yaml.load_all(text, BoundedLoader))  # a SafeLoader


def scalars_of_all(text: str | bytes) -> list[dict[str, str]]:
    """For each document of a YAML stream, its scalars that are not strings, as they are written, by their paths.

    A path is ``spec.args[0]``. Scalars below an alias are left out.

    Raises:
        yaml.YAMLError: as `load_all`.
    """
    return [_scalars(root) for root in yaml.compose_all(text, BoundedLoader)]


def _scalars(root: yaml.Node | None) -> dict[str, str]:
    found: dict[str, str] = {}
    seen: set[int] = set()

    def visit(node: yaml.Node | None, path: str) -> None:
        if node is None or id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                visit(value, f"{path}.{key.value}" if path else str(key.value))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                visit(value, f"{path}[{number}]")
        elif isinstance(node, yaml.ScalarNode) and node.tag != _STRING:
            found[path] = node.value

    visit(root, "")
    return found


def _expanded_nodes(root: yaml.Node) -> None:
    """Count the nodes below `root`, with each alias expanded.

    Raises:
        yaml.composer.ComposerError: more than `MAX_NODES`, deeper than `MAX_DEPTH`, or an alias inside its own anchor.
    """
    known: dict[int, tuple[int, int]] = {}
    above: set[int] = set()

    def measure(node: yaml.Node) -> tuple[int, int]:
        found = known.get(id(node))
        if found is not None:
            return found
        if id(node) in above:
            raise yaml.composer.ComposerError(None, None, "an alias refers to a node that contains it", node.start_mark)
        if isinstance(node, yaml.MappingNode):
            children = [child for pair in node.value for child in pair]
        elif isinstance(node, yaml.SequenceNode):
            children = list(node.value)
        else:
            children = []
        above.add(id(node))
        measures = [measure(child) for child in children]
        above.remove(id(node))
        count = 1 + sum(nodes for nodes, _ in measures)
        depth = 1 + max((depth for _, depth in measures), default=0)
        if count > MAX_NODES or depth > MAX_DEPTH:
            what = f"{MAX_NODES} nodes" if count > MAX_NODES else f"{MAX_DEPTH} levels"
            why = f"its aliases expand to more than {what}: write them out, or use fewer"
            raise yaml.composer.ComposerError(None, None, why, node.start_mark)
        known[id(node)] = count, depth
        return count, depth

    measure(root)
