"""Finds the modules of the user's folders that a module imports, directly or through others, without running them."""

from __future__ import annotations

import ast
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["modules_of", "user_folders"]


def user_folders(first: Sequence[Path], path: Sequence[str] | None = None) -> list[Path]:
    """Returns `first` and the folders of `sys.path` that no installed package put there: their modules travel.

    Args:
        first: these folders, in any case.
        path: the folders in which Python finds modules; None: `sys.path`.
    """
    installed = _installed_folders()
    found = [folder.resolve() for folder in first]
    for name in sys.path if path is None else path:
        folder = Path(name or ".").resolve()
        if folder.is_dir() and not is_installed(folder, installed):
            found.append(folder)
    return list(dict.fromkeys(found))


def is_installed(place: Path, installed: Iterable[Path] | None = None) -> bool:
    """Returns whether a file or folder belongs to Python or to an installed package, editable ones included."""
    return any(place.is_relative_to(folder) for folder in (_installed_folders() if installed is None else installed))


def _installed_folders() -> list[Path]:
    """Returns the folders of Python, and those that packages installed as editable put on the path by a ``.pth``
    file."""
    names = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders = [Path(name) for name in [*names, *site.getsitepackages(), site.getusersitepackages()]]
    found = list(folders)
    for folder in folders:
        for file in folder.glob("*.pth"):
            lines = file.read_text(errors="replace").splitlines()
            found += [folder / line.strip() for line in lines if line.strip() and not line.startswith(("#", "import"))]
    # A `.pth` file may name a folder that does not exist, or a root above everything else.
    return [folder.resolve() for folder in found if folder.is_dir() and folder.resolve() != Path(folder.anchor)]


def modules_of(
    name: str, source: bytes, file: Path | None, folders: Sequence[Path], loaded: Mapping[str, ModuleType] | None = None
) -> dict[str, Path | None]:
    """Returns the modules that a module imports, by their names, with their files; the module itself is not among them.

    A package without an `__init__.py` has the file None.

    Args:
        name: the module's name, such as ``models.net``.
        source: its source.
        file: its file; None: it has none.
        folders: what `user_folders` returns.
        loaded: the modules of this process, whose files are certain; None: `sys.modules`.

    Raises:
        SyntaxError: a module is not valid Python.
    """
    loaded = sys.modules if loaded is None else loaded
    is_package = file is not None and file.name == "__init__.py"
    found: dict[str, Path | None] = {}
    waiting = [*_parents(name), *_imported(source, name, is_package=is_package, file=file)]
    while waiting:
        wanted = waiting.pop()
        if wanted in found or wanted == name:
            continue
        place = _place_of(wanted, folders, loaded)
        if place is None:
            continue
        found[wanted] = file = None if place.is_dir() else place
        waiting += _parents(wanted)
        if file is not None:
            waiting += _imported(file.read_bytes(), wanted, is_package=file.name == "__init__.py", file=file)
    parents = {parent for module in (name, *found) for parent in _parents(module)}
    return {**dict.fromkeys(parents - {name}), **found}


def _parents(name: str) -> Iterator[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _place_of(name: str, folders: Sequence[Path], loaded: Mapping[str, ModuleType]) -> Path | None:
    """Returns the file of a module, or the folder of a package without `__init__.py`, or None if it is not the
    user's."""
    file = getattr(loaded.get(name), "__file__", None)
    if isinstance(file, str) and name != "__main__":
        place = Path(file).resolve()
        is_user = place.suffix == ".py" and any(place.is_relative_to(folder) for folder in folders)
        return place if is_user and not is_installed(place) else None
    if _is_installed_package(name.partition(".")[0], folders):
        return None
    for folder in folders:
        place = folder.joinpath(*name.split("."))
        for candidate in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if candidate.is_file():
                return candidate
    for folder in folders:
        place = folder.joinpath(*name.split("."))
        if place.is_dir() and any(place.glob("*.py")):
            return place
    return None


def _is_installed_package(name: str, folders: Sequence[Path]) -> bool:
    """Returns whether a top-level name is that of an installed module. It precedes a folder without an
    `__init__.py`."""
    regular = (path for folder in folders for path in (folder / name / "__init__.py", folder / f"{name}.py"))
    if any(path.is_file() for path in regular):
        return False
    spec = PathFinder.find_spec(name)
    return spec is not None and spec.origin is not None and is_installed(Path(spec.origin).resolve())


def _imported(source: bytes, name: str, *, is_package: bool, file: Path | None) -> Iterator[str]:
    """Yields the names in all import statements of a module, also inside functions; some may not be modules."""
    package = name if is_package else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(source, filename=str(file or name))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".") if package else []
                kept = parts[: len(parts) - (node.level - 1)]
                base = ".".join([*kept, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}" if base else alias.name for alias in node.names if alias.name != "*")
