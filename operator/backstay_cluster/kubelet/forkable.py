"""Whether a command line may run in a process that has imported modules already, instead of in a new Python.

It may not run there if the early imports could change what the script does. This is the case for another interpreter,
options of Python, and a variable that an imported module or its C library has read. The same holds for a file
beside the script that replaces one of the modules. It also holds for a script that changes the environment or
`sys.path` before its own imports. A new Python only costs time.
"""

from __future__ import annotations

import ast
import hashlib
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

# Read by the interpreter or the C library when a process starts.
START_NAMES = ("PYTHON", "_PYTHON", "LD_", "LC_", "LANG", "TZ", "HOME", "GLIBC_TUNABLES", "MALLOC_")
SET_BEFORE_IMPORT = frozenset({"dotenv", "environs", "decouple", "gevent", "eventlet"})
SCANNED_FILES, SCANNED_BYTES = 200, 4 << 20
_READING = frozenset({"get", "keys", "items", "values", "copy"})
_WRITING_ONE = frozenset({"setdefault", "pop", "__setitem__", "__delitem__"})
_SYS_IMPORT_STATE = frozenset({"path", "meta_path", "path_hooks", "modules"})


@dataclass(frozen=True)
class Program:
    """The program that a forked process runs.

    Attributes:
        executable: the value of `sys.executable`.
        argv: the command line, as in `sys.orig_argv`.
        path0: the first element of `sys.path`.
        module: the name after `-m`; empty for a script.
        file: the script's `__file__`; empty for a module.
        code: the compiled script; None for a module.
    """

    executable: str
    argv: tuple[str, ...]
    path0: str
    module: str = ""
    file: str = ""
    code: CodeType | None = None


class Sensitive:
    """Names of environment variables that affect imports.

    Args:
        read: names that were read while the modules were imported.
        prefixes: as in `Preload`.
    """

    def __init__(self, read: Iterable[str], prefixes: Iterable[str]) -> None:
        self._read = frozenset(read)
        self._prefixes = (*START_NAMES, *prefixes)

    def __call__(self, name: str) -> bool:
        return name in self._read or name.startswith(self._prefixes)

    def differ(self, imported: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
        """Returns the sensitive names whose values differ between the two environments."""
        names = {*imported, *environ}
        return sorted(name for name in names if imported.get(name) != environ.get(name) and self(name))


def program_of(argv: Sequence[str], environ: Mapping[str, str], python: str) -> Program | None:
    """Returns the script or module that a command line names, in the current directory; None for any other command
    line.

    Args:
        argv: the command line.
        environ: the environment, for `PATH`.
        python: the interpreter that has imported the modules.

    Raises:
        SyntaxError, ValueError: the script cannot be compiled.
    """
    executable = shutil.which(argv[0], path=environ.get("PATH", os.defpath))
    if executable is None or len(argv) < 2:
        return None
    # Two links to one interpreter belong to different environments unless they are in the same folder.
    same_folder = Path(executable).parent.absolute() == Path(python).parent.absolute()
    if not same_folder or os.path.realpath(executable) != os.path.realpath(python):
        return None
    executable = os.path.join(os.path.dirname(python), os.path.basename(executable))  # noqa: PTH118, PTH119, PTH120
    if argv[1] == "-m" and len(argv) > 2 and all(part.isidentifier() for part in argv[2].split(".")):
        return Program(executable, tuple(argv), os.getcwd(), module=argv[2])  # noqa: PTH109
    script = argv[1]
    if script.startswith("-") or not script.endswith(".py") or not Path(script).is_file():
        return None
    if pkgutil.get_importer(script) is not None:  # an archive: Python runs the __main__.py in it
        return None
    file = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)  # noqa: PTH109, PTH117, PTH118
    code = compile(Path(script).read_bytes(), file, "exec", dont_inherit=True)
    path0 = os.path.dirname(os.path.realpath(script))  # noqa: PTH120
    return Program(executable, tuple(argv), path0, file=file, code=code)


def shadowed(folder: str, modules: Collection[str]) -> str | None:
    """Returns a name in `folder` that an import would find before one of the `modules`, which are top-level names.

    A program of `Preload.finders` finds `package--module.py` as a module of a package.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return None
    importable = (name for name in names if "." not in name or name.endswith((".py", ".pyc", ".so")))
    return next((name for name in importable if re.split(r"\.|--", name, maxsplit=1)[0] in modules), None)


def unsafe_reason(
    program: Program, sensitive: Callable[[str], bool], finders: Collection[str] = frozenset()
) -> str | None:
    """Returns a place in the program's own files that could run differently after early imports, or None if none was
    found.

    The script is read, and every file in its folder that it imports, directly or indirectly. If the script is one of
    the `finders`, which are digests, every Python file beside it is read instead.
    """
    module = program.module.partition(".")[0]
    todo = _local(module, program.path0) if module else [Path(program.file)]
    seen: set[Path] = set()
    size = 0
    while todo:
        file = todo.pop()
        if file in seen:
            continue
        seen.add(file)
        try:
            text = file.read_bytes()
            size += len(text)
            if len(seen) > SCANNED_FILES or size > SCANNED_BYTES:
                return f"more than {SCANNED_FILES} files or {SCANNED_BYTES} bytes to read"
            if hashlib.sha256(text).hexdigest() in finders:
                todo += file.parent.glob("*.py")
                continue
            tree = ast.parse(text)
        except (OSError, SyntaxError, ValueError) as error:
            return f"{file}: {error}"
        scan = _Scan(sensitive)
        scan.visit(tree)
        if scan.found:
            return f"{file}:{scan.found[0]}"
        for name in scan.imported:
            todo += _local(name, program.path0)
    return None


def _local(name: str, folder: str) -> list[Path]:
    """Returns the files of a top-level module that lies in `folder`."""
    package = Path(folder) / name
    if package.is_dir():
        return list(package.rglob("*.py"))
    return [file for file in [package.with_suffix(".py")] if file.is_file()]


class _Scan(ast.NodeVisitor):
    """Finds changes of the environment and of the import system; collects the top-level names of imports."""

    def __init__(self, sensitive: Callable[[str], bool]) -> None:
        self._sensitive = sensitive
        self._harmless: set[ast.AST] = set()  # nodes that read the environment
        self.imported: set[str] = set()
        self.found: list[str] = []

    def _note(self, node: ast.AST, what: str) -> None:
        self.found.append(f"{getattr(node, 'lineno', 0)}: {what}")

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._see_import(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self._see_import(node, node.module)
            for alias in node.names:
                if node.module == "sys" and alias.name in _SYS_IMPORT_STATE:
                    self._note(node, f"sys.{alias.name}")
                if node.module == "os" and (alias.name in {"putenv", "unsetenv", "*"} or alias.asname):
                    self._note(node, f"from os import {alias.name}")

    def _see_import(self, node: ast.AST, name: str) -> None:
        top = name.partition(".")[0]
        self.imported.add(top)
        if top in SET_BEFORE_IMPORT:
            self._note(node, f"import {top}")

    def visit_Constant(self, node: ast.Constant) -> None:
        # The position does not matter: it may be a key of a dictionary that updates the environment.
        if isinstance(node.value, str) and node.value.isupper() and node.value.isidentifier():
            name = node.value
            if "_" in name and self._sensitive(name):
                self._note(node, name)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if _is_environ(node.value):
            name = node.slice.value if isinstance(node.slice, ast.Constant) else None
            if isinstance(node.ctx, ast.Load) or (isinstance(name, str) and not self._sensitive(name)):
                self._harmless.add(node.value)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func
        if isinstance(function, ast.Attribute) and _is_environ(function.value):
            name = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            writes_other = function.attr in _WRITING_ONE and isinstance(name, str) and not self._sensitive(name)
            if function.attr in _READING or writes_other:
                self._harmless.add(function.value)
        elif isinstance(function, ast.Name) and function.id in {"dict", "sorted", "len", "list"}:
            self._harmless.update(argument for argument in node.args if _is_environ(argument))
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        self._harmless.update(side for side in node.comparators if _is_environ(side))
        self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> None:
        self._harmless.update(
            value for key, value in zip(node.keys, node.values, strict=True) if key is None and _is_environ(value)
        )
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if _is_environ(node) and node not in self._harmless:
            self._note(node, "environ")

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if _is_environ(node) and node not in self._harmless:
            self._note(node, "environ")
        if node.attr in {"putenv", "unsetenv", "addsitedir"}:
            self._note(node, node.attr)
        if isinstance(node.value, ast.Name) and node.value.id == "sys" and node.attr in _SYS_IMPORT_STATE:
            self._note(node, f"sys.{node.attr}")
        self.generic_visit(node)


def _is_environ(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in {"environ", "environb"}) or (
        isinstance(node, ast.Attribute) and node.attr in {"environ", "environb"}
    )
