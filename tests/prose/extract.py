"""Extracts the prose of source files: docstrings, comments, messages, help texts and names.

`lint.py` checks each paragraph, and reports the line of the source file on which the paragraph begins.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from sources import comments_in, nodes_in

# A comment that controls a tool, and section titles of a docstring in Google's style.
_DIRECTIVE = re.compile(r"^(noqa|type:|pragma|fmt:|mypy:|ruff:|!|-\*-|isort|syntax=|@@|\{\{)")
_SECTION = re.compile(r"^(Args|Arguments|Returns|Raises|Yields|Attributes|Example|Examples|Note|Notes|Fields):$")
_ENTRY = re.compile(r"^(\*?\*?[A-Za-z_][\w.\[\], |]*?)( \(.*?\))?: +(?=\S)")
_WORDS = re.compile(r"[A-Za-z]{2,}")
_NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_USUAL = {"err", "err_r", "err_w"}  # variables for standard error
_NO_VALUE = {"None", "NoReturn", "Never"}
_OTHER_DOCSTRING = re.compile(r"property|setter|contextmanager|fixture|command|overload")
_HASH_SUFFIXES = {".yaml", ".yml", ".toml", ".sh", ".ini", ".cfg"}
_HASH_NAMES = {"Makefile", "Dockerfile"}


@dataclass(frozen=True)
class Paragraph:
    """One paragraph of prose.

    Attributes:
        line: line of the source file where the paragraph begins, from 1.
        text: the paragraph as Markdown, on one line.
        part: ``summary`` for the first paragraph of a docstring, ``value`` for that of a function that returns a
            value, ``body`` for a later one, ``entry`` for an entry of `Args`, else empty.
    """

    line: int
    text: str
    part: str = ""


def paragraphs(path: Path) -> list[Paragraph]:
    """Returns the prose of one source file, in order of line.

    Raises:
        ValueError: no extractor exists for this kind of file.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        nodes = nodes_in(ast.parse(text))
        found = [*_docstrings(nodes), *_python_comments(text), *_names(nodes)]
        if "tests" not in path.parts:
            found += _messages(nodes)
    elif path.suffix in _HASH_SUFFIXES or path.name in _HASH_NAMES:
        found = list(_comments(text, "#"))
    elif path.suffix == ".proto":
        found = list(_comments(text, "//"))
    else:
        raise ValueError(
            f"{path}: no extractor for this kind of file; there is one for Python, YAML, TOML, shell, protobuf"
        )
    return sorted(found, key=lambda paragraph: paragraph.line)


def _is_prose(text: str) -> bool:
    return len(_WORDS.findall(text)) >= 2


def _joined(lines: list[str], line: int, part: str = "") -> Iterator[Paragraph]:
    text = " ".join(one.strip() for one in lines if one.strip())
    if _is_prose(text):
        yield Paragraph(line, text, part)


def _docstrings(nodes: Sequence[ast.AST]) -> Iterator[Paragraph]:
    """Docstrings of modules, classes and functions, and strings below an attribute."""
    of_values = {id(node.body[0]) for node in nodes if _returns_value(node)}
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            part = "value" if id(node) in of_values else "summary"
            yield from _docstring(node.value.value, node.value.lineno, part)


def _returns_value(node: ast.AST) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Returns whether a node is a function that returns or yields a value. A property is described as an attribute, a
    context manager as an object, and the docstring of a command is its help text."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.returns is None:
        return False
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    return ast.unparse(node.returns) not in _NO_VALUE and not _OTHER_DOCSTRING.search(decorators)


def _docstring(text: str, first: int, part: str) -> Iterator[Paragraph]:
    """Paragraphs of one docstring: an entry of `Args` and an item of a list are paragraphs; examples are left out."""
    head, _, tail = text.partition("\n")
    lines = [head, *textwrap.dedent(tail).splitlines()]
    begin, collected, literal = first, [], False
    for number, line in enumerate(lines, first):
        stripped = line.strip()
        indented = line.startswith("    ")
        if literal and (indented or not stripped):
            continue
        literal = stripped.endswith("::") or stripped.startswith((">>>", "```"))
        starts = not stripped or bool(_SECTION.match(stripped)) or stripped.startswith(("* ", "- "))
        entry = bool(_ENTRY.match(stripped)) and indented
        if starts or entry:
            yield from _joined(collected, begin, part)
            begin, collected, part = number, [], "entry" if entry else ""
        if stripped and not _SECTION.match(stripped) and not stripped.startswith(">>>"):
            if not collected:
                begin = number
                part = part or ("" if indented else "body")
            text_of_line = stripped.removeprefix("* ").removeprefix("- ")
            collected.append(_ENTRY.sub("", text_of_line) if indented and (starts or entry) else text_of_line)
    yield from _joined(collected, begin, part)


def _python_comments(text: str) -> Iterator[Paragraph]:
    collected: list[str] = []
    begin = 0
    for row, comment, own_line in comments_in(text):
        words = comment.lstrip("#").strip()
        words = re.sub(r"\s*#\s*noqa.*$", "", words)
        if _DIRECTIVE.match(words):
            words = words.partition("  # ")[2] or (words.partition("  ")[2] if words.startswith("noqa") else "")
        if collected and not (own_line and row == begin + len(collected)):
            yield from _joined(collected, begin)
            collected = []
        if not collected:
            begin = row
        collected.append(words)
        if not own_line or not words:
            yield from _joined(collected, begin)
            collected = []
    yield from _joined(collected, begin)


def _messages(nodes: Sequence[ast.AST]) -> Iterator[Paragraph]:
    """String literals of at least three words that are not docstrings; a replacement field becomes the word `value`."""
    skipped: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped.update(id(part) for part in node.values)
    for node in nodes:
        if id(node) in skipped:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = [str(part.value) if isinstance(part, ast.Constant) else "`value`" for part in node.values]
            literal = "".join(parts)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            literal = node.value
        else:
            continue
        if len(re.findall(r"(?<![\w./-])[A-Za-z][a-z']*(?![\w/-])", literal)) >= 3 and " " in literal.strip():
            for paragraph in re.split(r"\n\s*\n", literal):
                yield from _joined(paragraph.splitlines(), node.lineno)


def _names(nodes: Sequence[ast.AST]) -> Iterator[Paragraph]:
    """Yields names that the file defines for functions, classes, parameters and variables, split into words."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in _USUAL:
            words = " ".join(_NAME_PARTS.findall(node.id)).lower()
            if words:
                yield Paragraph(node.lineno, f"Name: {words}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
            if not isinstance(node, ast.ClassDef):
                arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                names += [argument.arg for argument in arguments]
            for name in names:
                words = " ".join(_NAME_PARTS.findall(name)).lower()
                if words:
                    yield Paragraph(node.lineno, f"Name: {words}.")


def _comments(text: str, mark: str) -> Iterator[Paragraph]:
    """Comments of a file whose comments begin with `mark`; adjacent lines are one paragraph."""
    collected: list[str] = []
    begin = 0
    for number, line in enumerate(text.splitlines(), 1):
        own, found = re.match(rf"^\s*{mark}+(.*)$", line), re.search(rf"(?:^|\s){mark} (.*)$", line)
        words = own.group(1).strip() if own else ""
        if own and words and not _DIRECTIVE.match(words):
            if not collected:
                begin = number
            collected.append(words)
            continue
        yield from _joined(collected, begin)
        collected = []
        if not own and found and not _DIRECTIVE.match(found.group(1)):
            yield from _joined([found.group(1)], number)
    yield from _joined(collected, begin)
