"""The parts of Python files that rules look at, found once and quickly."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_STRING = r'"""(?:\\.|[^\\])*?"""|{}|"(?:\\.|[^"\\\n])*"|{}'.format(r"'''(?:\\.|[^\\])*?'''", r"'(?:\\.|[^'\\\n])*'")
_STRING_OR_COMMENT = re.compile(rf"{_STRING}|(?P<comment>#[^\n]*)", re.DOTALL)


def nodes_in(tree: ast.AST) -> list[ast.AST]:
    """Returns a node and all below it, in the order of `ast.walk`.

    Those without parts are left out: operators, and statements such as `pass`.
    """
    found = [tree]
    for node in found:  # it grows
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                found += [part for part in value if isinstance(part, ast.AST) and part._fields]
            elif isinstance(value, ast.AST) and value._fields:
                found.append(value)
    return found


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """Returns the module of a file and all nodes in it. Tests of one process parse each file once.

    Those of all files take 0.4 GiB.
    """
    nodes = nodes_in(ast.parse(path.read_text(encoding="utf-8")))
    # Collections of garbage would look at all nodes again and again, which took longer than to parse them. This one
    # looks at those of one file, and deletes what tests have left, which would be frozen too.
    gc.collect()
    gc.freeze()
    return nodes


def module_of(path: Path) -> ast.Module:
    module = nodes_of(path)[0]
    assert isinstance(module, ast.Module)
    return module


def comments_in(text: str) -> Iterator[tuple[int, str, bool]]:
    """Yields the line and the text of each comment of a Python file, and whether the comment is alone on the line.

    It is much quicker than `tokenize`, and finds the same: only strings have other marks of comments. In Python 3.11,
    no string has its own mark within.
    """
    line, counted = 1, 0
    for found in _STRING_OR_COMMENT.finditer(text):
        if found["comment"] is not None:
            begin = found.start()
            line, counted = line + text.count("\n", counted, begin), begin
            yield line, found["comment"], not text[text.rfind("\n", 0, begin) + 1 : begin].strip()
