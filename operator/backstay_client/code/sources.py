"""Collects the source files of a function or a script, and puts them into a ConfigMap."""

from __future__ import annotations

import base64
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from backstay_client.code.cells import MODULE as CELL
from backstay_client.code.cells import source_of_cell
from backstay_client.code.imports import is_installed, modules_of, user_folders
from backstay_client.errors import BadInput
from backstay_client.jobfiles.script_job import job_name, name_of_script

__all__ = ["MOST_BYTES", "SourceFiles", "of_function", "of_script"]

MOST_BYTES: Final = 1 << 20
"""The most bytes of keys and values that a ConfigMap holds, see
https://kubernetes.io/docs/concepts/configuration/configmap/."""

ENTRY: Final = "backstay_entry.py"
_TABLE: Final = "backstay_modules.json"

_MOST_ARGUMENTS: Final = 100_000  # bytes of one argument of a process, which Linux limits to 128 KiB
_KEY: Final = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_SHOWN: Final = 5


@dataclass(frozen=True)
class SourceFiles:
    """The files of a ConfigMap, and how a pod starts them.

    Attributes:
        name: a job's name that was made of the function's or the script's.
        function: the function to call; empty: it is a script.
        files: the content of each file by its key.
        signature: the signature of the function; None: it is a script.
    """

    name: str
    function: str
    files: Mapping[str, bytes]
    signature: inspect.Signature | None = field(default=None, repr=False)

    def command(self, arguments: Mapping[str, Any] | Sequence[str] | None, folder: Path | None = None) -> list[str]:
        """Returns the command of every role.

        Args:
            arguments: the keyword arguments of a function, which JSON can hold. For a script, the words after its name,
                or a mapping of options: ``{"rate": 0.1, "fast": True}`` becomes ``--rate 0.1 --fast``.
            folder: the folder in which it runs; None: that of its files.

        Raises:
            BadInput: the function does not take these arguments, or JSON cannot hold them.
        """
        call: dict[str, Any] = {"folder": str(folder)} if folder is not None else {}
        if self.function:
            call |= {"function": self.function, "args": self._keywords(arguments)}
        else:
            call["args"] = _words(arguments)
        text = json.dumps(call)
        if len(text) > _MOST_ARGUMENTS:
            raise BadInput(
                f"args: they have {len(text):,} bytes, and at most {_MOST_ARGUMENTS:,} are passed: pass the name of a "
                "file or a URI, and read it in the function"
            )
        # The kubelet expands $(NAME) in commands.
        return ["python", ENTRY, text.replace("$(", "$$(")]

    def _keywords(self, arguments: Any) -> dict[str, Any]:
        if arguments is not None and not isinstance(arguments, Mapping):
            raise BadInput(
                f"args: is {type(arguments).__name__}: must be a mapping of the keyword arguments of {self.function}"
            )
        found = {str(name): _plain(f"args[{name!r}]", value) for name, value in (arguments or {}).items()}
        if self.signature is not None:
            try:
                self.signature.bind(**found)
            except TypeError as error:
                valid = ", ".join(self.signature.parameters) or "none"
                raise BadInput(f"args: {self.function}: {error}; its parameters are: {valid}") from None
        return found

    def config_map(self, name: str, namespace: str) -> dict[str, Any]:
        """Returns the ConfigMap.

        Raises:
            BadInput: the files are too large for one.
        """
        size = sum(len(key) + len(content) for key, content in self.files.items())
        if size > MOST_BYTES:
            raise BadInput(self._too_large(size))
        text: dict[str, str] = {}
        binary: dict[str, str] = {}
        for key, content in self.files.items():
            try:
                text[key] = content.decode("utf-8")
            except UnicodeDecodeError:  # its first line names another encoding
                binary[key] = base64.b64encode(content).decode()
        return {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": name, "namespace": namespace},
            "data": text,
            **({"binaryData": binary} if binary else {}),
        }

    def _too_large(self, size: int) -> str:
        largest = sorted(self.files.items(), key=lambda item: -len(item[1]))[:_SHOWN]
        shown = ", ".join(f"{key} ({len(content) / 1024:,.0f} KiB)" for key, content in largest)
        return (
            f"the code of {self.function or self.name} has {size / 1024:,.0f} KiB in {len(self.files)} files, and a "
            f"ConfigMap holds at most {MOST_BYTES >> 10:,} KiB. The largest files are {shown}. Move data out of these "
            "modules into files on a volume or at a URI. Or build an image with the code, and submit a TrainingJob "
            "that names the image and its command"
        )


def of_function(function: Callable[..., Any], loaded: Mapping[str, Any] | None = None) -> SourceFiles:
    """Collects the module of a function, and what it imports from the user's folders.

    A function of an installed package has no files: the image must have the package.

    Args:
        function: a function at the top level of a module.
        loaded: the modules of this process; None: `sys.modules`.

    Raises:
        BadInput: the function cannot be found by its name, or is of a notebook cell and uses names of other cells.
    """
    loaded = sys.modules if loaded is None else loaded
    _refuse_other_callables(function)
    module, name = loaded.get(function.__module__), function.__name__
    if getattr(module, name, None) is not function:
        raise BadInput(
            f"the module {function.__module__} has another object under the name {name}: the function must be at the "
            "top level of a module, where pods import it"
        )
    signature = inspect.signature(function)
    place = getattr(module, "__file__", None)
    if function.__module__ == "__main__" and place is None:
        source = source_of_cell(function)
        files = _packed(CELL, source, None, user_folders([Path.cwd()]))
        return SourceFiles(job_name(name), name, files, signature)
    assert module is not None
    if place is None or Path(place).suffix != ".py":
        raise BadInput(f"the module {function.__module__} of the function {name} has no Python file that could travel")
    file = Path(place).resolve()
    module_name = _name_of_main(module, file) if function.__module__ == "__main__" else function.__module__
    named = name if name not in {"train", "main", "run", "fit"} else module_name.rpartition(".")[2]
    job = name_of_script(file) if named in {"train", "main", "run", "fit"} else job_name(named)
    if is_installed(file):
        return SourceFiles(job, name, _started(module_name, {}), signature)
    depth = module_name.count(".") + (file.name == "__init__.py")
    folders = user_folders([file.parents[depth], Path.cwd()])
    return SourceFiles(job, name, _packed(module_name, file.read_bytes(), file, folders), signature)


def of_script(script: Path) -> SourceFiles:
    """Returns the source files of a script, and what it imports from its folder and the user's other folders.

    Raises:
        BadInput: the script does not exist, or is not valid Python.
    """
    if not script.is_file():
        raise BadInput(f"{script} does not exist or is not a file")
    file = script.resolve()
    module = file.stem if file.stem.isidentifier() else "backstay_script"
    # A pod runs only this script: what this process has imported under the same names does not count.
    files = _packed(module, file.read_bytes(), file, user_folders([file.parent]), loaded={})
    return SourceFiles(name_of_script(script), "", files)


def _refuse_other_callables(function: Any) -> None:
    if not inspect.isfunction(function):
        raise BadInput(
            f"{function!r} is not a function: must be a function at the top level of a module. For arguments use "
            "args={...}, and not functools.partial"
        )
    if "<lambda>" in function.__qualname__ or "." in function.__qualname__:
        raise BadInput(
            f"the function {function.__qualname__} is inside another object, so a pod cannot import it: define it at "
            "the top level of a module. Pass values from outside with args={...}"
        )


def _name_of_main(module: Any, file: Path) -> str:
    """Returns the name under which a pod imports the script of this process."""
    spec = getattr(module, "__spec__", None)
    if spec is not None and isinstance(spec.name, str):  # python -m package.module
        return spec.name
    if not file.stem.isidentifier():
        raise BadInput(f"{file.name} is not the name of a module: rename it to letters, digits and '_'")
    return file.stem


def _packed(
    module: str,
    source: bytes,
    file: Path | None,
    folders: Sequence[Path],
    loaded: Mapping[str, ModuleType] | None = None,
) -> dict[str, bytes]:
    """Returns the files of a module and of the modules that it imports, with the program that starts them."""
    try:
        found = modules_of(module, source, file, folders, loaded)
    except SyntaxError as error:
        raise BadInput(f"{error.filename}, line {error.lineno}: {error.msg}: the code cannot be read") from None
    contents = {module: source, **{name: place.read_bytes() for name, place in found.items() if place is not None}}
    packages = {name for name, place in found.items() if place is not None and place.name == "__init__.py"}
    if file is not None and file.name == "__init__.py":
        packages.add(module)
    keys: dict[str, str | None] = {name: None for name, place in found.items() if place is None}
    files: dict[str, bytes] = {}
    for name, content in contents.items():
        key = "--".join(name.split(".")) + ("--__init__" if name in packages else "") + ".py"
        if _KEY.fullmatch(key) is None or key == ENTRY:
            key = f"module-{len(files)}{'--__init__' if name in packages else ''}.py"
        keys[name] = key
        files[key] = content
    return {**files, **_started(module, keys)}


def _started(main: str, modules: Mapping[str, str | None]) -> dict[str, bytes]:
    """Returns the program that starts the code, and its table of modules."""
    program = Path(__file__).with_name(ENTRY).read_bytes()
    return {ENTRY: program, _TABLE: json.dumps({"main": main, "modules": modules}, indent=1).encode()}


def _plain(name: str, value: Any) -> Any:
    """Returns the value as JSON holds it; a NumPy or JAX scalar as a number.

    Raises:
        BadInput: JSON cannot hold it.
    """
    if not isinstance(value, bool | int | float | str | list | tuple | dict) and getattr(value, "shape", None) == ():
        value = value.item()
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        pass
    else:
        if _has_text_keys(value):
            return value
    raise BadInput(
        f"{name}: is {type(value).__name__}: must be a number, a text, a boolean, None, or lists and mappings with "
        "texts as keys, because it travels as JSON. Pass the name of a file or a URI for anything else"
    )


def _has_text_keys(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _has_text_keys(inner) for key, inner in value.items())
    return not isinstance(value, list | tuple) or all(_has_text_keys(inner) for inner in value)


def _words(arguments: Any) -> list[str]:
    if arguments is None:
        return []
    if isinstance(arguments, str):
        raise BadInput(f"args: is the text {arguments!r}: must be a list of words, or a mapping of options")
    if not isinstance(arguments, Mapping):
        return [str(word) for word in arguments]
    words: list[str] = []
    for name, value in arguments.items():
        option = f"--{str(name).replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, str(_plain(f"args[{name!r}]", value))]
    return words
