"""Takes the source of a function from a notebook cell, which has no file that could travel.

Such a function travels alone, so it has to import what it uses. Anything else would have to guess which cells it needs.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import symtable
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from backstay_client.errors import BadInput

__all__ = ["MODULE", "names_from_outside", "source_of_cell"]

MODULE = "backstay_cell"
"""The module of the function in the pods."""

_REMEDY = (
    "write the cell to a file (`%%writefile digits.py` in its first line), import the function from there, and "
    "submit it"
)


def source_of_cell(function: Callable[..., Any]) -> bytes:
    """Returns the source of a module that has only this function.

    Raises:
        BadInput: the source is not known, or the function uses names of other cells.
    """
    name = function.__name__
    try:
        text = textwrap.dedent(inspect.getsource(function))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError):
        raise BadInput(
            f"the source of the function {name} is not known, because it was not defined in a file: {_REMEDY}"
        ) from None
    outside = sorted(names_from_outside(tree, name))
    if outside:
        raise BadInput(
            f"the function {name} of a notebook cell uses {_listed(outside)} from outside, and only its own source "
            f"travels. Import or define them inside {name}. Or {_REMEDY}"
        )
    return f"from __future__ import annotations\n\n{text}".encode()


def _listed(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def names_from_outside(tree: ast.Module, own: str) -> set[str]:
    """Returns the global names that a function uses and does not define, without builtins and those in annotations.

    Args:
        tree: the function's source.
        own: the function's name.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    top = symtable.symtable(ast.unparse(tree), own, "exec")
    defined = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    used = {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (symbol.is_global() or table is top)
    }
    written = {
        symbol.get_name()
        for table in _tables(top)
        for symbol in table.get_symbols()
        if symbol.is_declared_global() and symbol.is_assigned()
    }
    return used - defined - written - {own} - set(dir(builtins))


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)
