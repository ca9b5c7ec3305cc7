"""Reads YAML from people safely, with a bounded size of its aliases, and an error for duplicate keys.

PyYAML shares one object between all aliases of an anchor. So reading is cheap, but code that walks, copies or prints
the result visits every alias: a kilobyte of nested aliases becomes gigabytes. Kubernetes' YAML reader refuses such
documents too. Merge keys (``<<``) are read as kubectl reads them (https://yaml.org/type/merge.html). So are plain
scalars: ``1e-3`` is a number, ``y`` a boolean, and ``1:30`` and ``2026-11-28`` are strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterable
from typing import Any, Final

import yaml

__all__ = ["BoundedLoader", "as_yaml", "load_all", "scalars_of_all"]

MAX_NODES: Final = 200_000
MAX_DEPTH: Final = 100
_STRING: Final = "tag:yaml.org,2002:str"
_MERGE: Final = "tag:yaml.org,2002:merge"
_BOOL, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float"))

# How the YAML library of kubectl (sigs.k8s.io/yaml) reads plain scalars, where PyYAML differs. The first match counts.
_KUBECTL: Final = (
    (_BOOL, r"y|Y|yes|Yes|YES|true|True|TRUE|on|On|ON|n|N|no|No|NO|false|False|FALSE|off|Off|OFF", "yYnNtTfFoO"),
    (_INT, r"[-+]?(?:0b[01_]+|0o?[0-7_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)", "-+0123456789"),
    (
        _FLOAT,
        r"[-+]?(?:\.[0-9][0-9_]*|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
)
_WHOLE: Final = 1e21  # from which JSON written by Go has an exponent
_REPLACED: Final = {_BOOL, _INT, _FLOAT, "tag:yaml.org,2002:timestamp"}
_Resolvers = dict[str, list[tuple[str, re.Pattern[str]]]]


_PYYAML: Final[_Resolvers] = yaml.SafeLoader.yaml_implicit_resolvers


def _resolvers() -> _Resolvers:
    found = {first: [each for each in resolvers if each[0] not in _REPLACED] for first, resolvers in _PYYAML.items()}
    for tag, pattern, firsts in _KUBECTL:
        for first in firsts:
            found.setdefault(first, []).append((tag, re.compile(rf"(?:{pattern})\Z")))
    return found


class BoundedLoader(yaml.SafeLoader):
    """Loads YAML like `yaml.SafeLoader`, but refuses duplicate keys, excessive aliasing, and excessive nesting."""

    yaml_implicit_resolvers: _Resolvers = _resolvers()
    bool_values = yaml.SafeLoader.bool_values | {"y": True, "n": False}
    _depth = 0

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Returns a whole number as an `int`, because kubectl converts YAML to JSON, in which 2.0 becomes 2."""
        value = super().construct_yaml_float(node)
        return int(value) if abs(value) < _WHOLE and value.is_integer() else value

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


_BOTH: Final = {
    first: [*_PYYAML.get(first, ()), *BoundedLoader.yaml_implicit_resolvers.get(first, ())]
    for first in {**_PYYAML, **BoundedLoader.yaml_implicit_resolvers}
}


BoundedLoader.add_constructor(_FLOAT, BoundedLoader.construct_yaml_float)


class _Dumper(yaml.SafeDumper):
    """Quotes each string that `BoundedLoader`, kubectl or PyYAML would read as something else."""

    yaml_implicit_resolvers: _Resolvers = _BOTH


def _represent(dumper: _Dumper, text: str) -> yaml.Node:
    # PyYAML writes these line breaks as they are, and reads each as a space.
    style = '"' if any(char in text for char in "\x85\u2028\u2029") else None
    return dumper.represent_scalar(_STRING, text, style=style)


_Dumper.add_representer(str, _represent)


def as_yaml(content: Any) -> str:
    """YAML that kubectl reads as the same content, with the keys of mappings in their order."""
    text: str = yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text


def load_all(text: str | bytes) -> list[Any]:
    """Returns the documents of a YAML stream.

    Args:
        text: the stream; bytes are UTF-8 or UTF-16.

    Raises:
        yaml.YAMLError: the stream is not YAML, or exceeds a bound of `BoundedLoader`.
        ValueError: a number or a timestamp in it is invalid, such as an integer of thousands of digits.
    """
    return list(yaml.load_all(_without_tabs(text), BoundedLoader))  # a SafeLoader


def scalars_of_all(text: str | bytes) -> list[dict[str, str]]:
    """For each document of a YAML stream, its scalars that are not strings, as they are written, by their paths.

    A path is ``spec.args[0]``. Scalars below an alias are left out.

    Raises:
        yaml.YAMLError: as `load_all`.
    """
    return [_scalars(root) for root in yaml.compose_all(_without_tabs(text), BoundedLoader)]


def _without_tabs(text: str | bytes) -> str | bytes:
    """Returns JSON that is indented with tabs, which YAML does not allow, without them; any other text as it is."""
    tab, begins = (b"\t", b"{") if isinstance(text, bytes) else ("\t", "{")
    if tab not in text or not text.lstrip().startswith(begins):  # type: ignore[operator, arg-type]
        return text

    def distinct(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found = list(pairs)
        if len(dict(found)) < len(found):
            raise ValueError("a key is duplicated")
        return dict(found)

    try:
        return json.dumps(json.loads(text, object_pairs_hook=distinct), ensure_ascii=False)
    except (ValueError, RecursionError):
        return text


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
            why = f"it has more than {what}, with its aliases expanded: write less into one document"
            raise yaml.composer.ComposerError(None, None, why, node.start_mark)
        known[id(node)] = count, depth
        return count, depth

    measure(root)
