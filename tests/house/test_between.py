"""A file that processes may share is written by `between.put`, so that a reader finds all of it.

The rule is for each write, except in folders whose tests read and damage files themselves, and in the text of each
script. A script cannot import `put`: it writes a file named `part`, and renames it.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from between import put
from sources import nodes_in, nodes_of

ROOT = Path(__file__).parents[2]
OF_CLUSTER = ROOT / "operator" / "backstay_cluster" / "tests"
FILES = sorted(path for folder in (ROOT / "tests", OF_CLUSTER) for path in folder.rglob("*.py"))
IN_ONE_PROCESS = ("checkpoint", "codecs", "coordination", "data", "plan", "prose", "spec", "trainer_math")
COPIES = {"copy", "copy2", "copyfile", "move"}
HARMLESS = re.compile(r"part\b|\blog\b|output|/dev/|kernel")
"""In the words for a file that is renamed when it is whole, that a process writes, or that is none."""


def parsed(source: str) -> list[ast.AST]:
    return nodes_in(ast.parse(source))


def writes(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yields the lines that write a file in place."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(attr="savez" | "savez_compressed"), args=[place, *_]):
                pass
            case ast.Call(func=ast.Attribute(attr="open", value=place), args=[ast.Constant(value=str(mode))]):
                if not set(mode) & set("wx"):
                    continue
            case ast.Call(func=ast.Name("open"), args=[place, ast.Constant(value=str(mode)), *_]):
                if not set(mode) & set("wx"):
                    continue
            case ast.Call(func=ast.Attribute(value=ast.Name("shutil"), attr=name), args=[_, place, *_]):
                if name not in COPIES:
                    continue
            case ast.Attribute(attr="write_text" | "write_bytes", value=place):
                pass
            case _:
                continue
        if not HARMLESS.search(ast.unparse(place)):
            yield node.lineno


def writes_in_scripts(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yields the lines of texts that are scripts, and write a file in place."""
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import " in node.value:
            try:
                found = list(writes(parsed(textwrap.dedent(node.value))))
            except SyntaxError:
                continue
            yield from (node.lineno for _ in found)


def has_processes(path: Path) -> bool:
    return OF_CLUSTER in path.parents or path.relative_to(ROOT).parts[1] not in IN_ONE_PROCESS


def test_files_that_processes_share_are_written_atomically() -> None:
    scripts = [(path, writes_in_scripts(nodes_of(path))) for path in FILES if path != Path(__file__)]
    direct = [(path, writes(nodes_of(path))) for path in FILES if has_processes(path)]
    assert len(direct) > 100
    found = [f"{path.relative_to(ROOT)}:{line}" for path, lines in scripts + direct for line in lines]
    assert found == [], "use between.put, or in a script write to a file with the suffix .part, and rename it"


WAYS = (
    "path.write_text('1')",
    "(folder / 'at').write_bytes(b'1')",
    "np.savez(path, x=x)",
    "path.open('w').write('1')",
    "open(path, 'w').write('1')",
    "json.dump(x, path.open('x'))",
    "shutil.copy(other, path)",
    "write = path.write_text",
)


@pytest.mark.parametrize("way", WAYS)
def test_a_write_in_place_is_found(way: str) -> None:
    assert list(writes(parsed(way))) == [1]
    assert list(writes(parsed(f"for each in folder:\n    job.start(); {way}\n"))) == [2]
    assert list(writes_in_scripts(parsed(f"x = {'import os' + chr(10) + way!r}"))) == [1]
    assert list(writes_in_scripts(parsed(f"x = {chr(10) + '    import os' + chr(10) + '    ' + way!r}"))) == [1]


@pytest.mark.parametrize("way", [way.replace("path", "part") for way in WAYS if "path" in way])
def test_a_file_that_is_renamed_is_not_found(way: str) -> None:
    assert not list(writes(parsed(way)))
    assert not list(
        writes(parsed("path.open('rb')\npath.open()\nopen('/dev/null', 'w')\nlog.open('wb')\nput(path, '1')"))
    )


def test_a_reader_of_a_put_file_finds_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, "old")
    with path.open() as before:
        put(path, "new and longer")
        assert before.read() == "old"
    put(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
