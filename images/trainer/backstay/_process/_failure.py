"""Describes an exception of the script for the pod's termination message, with its place and a short traceback."""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import PeerLost, StorageError

__all__ = ["Failure", "describe", "is_ours", "is_script", "printed"]

_PACKAGE: Final = Path(__file__).resolve().parents[1]
_LIBRARIES: Final = (
    str(_PACKAGE) + os.sep,
    *(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib")),
)
_PACKAGES: Final = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_FRAME: Final = re.compile(r'^\s*File "([^"]+)", line (\d+)', re.MULTILINE)
_RAISED: Final = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")
_TRACEBACK_CHARS: Final = 1800
# Of a longer text the rest is in the log: the frames, which are before the text, must stay in the traceback.
_TEXT_CHARS: Final = 500
# A missing folder or a missing right stays missing; every other error of I/O may end.
_LASTING: Final = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


@dataclass(frozen=True)
class Failure:
    """An exception, as a termination message describes it.

    Attributes:
        reason: the exception's type, such as ``KeyError``.
        message: the exception's text; its type if the text is empty.
        at: ``file:line`` of the innermost frame that belongs to the script; empty where there is none.
        traceback: Python's traceback without the frames of libraries, at most 1,800 characters, its end kept. The
            text of the exception is cut after 500.
        transient: whether the same call may succeed later. This is so if the exception, or one that caused it, is an
            error of I/O, of the network or of memory.
    """

    reason: str
    message: str
    at: str
    traceback: str
    transient: bool

    def fields(self) -> dict[str, Any]:
        """Returns the fields of a termination message."""
        fields: dict[str, Any] = {"reason": self.reason, "message": self.message, "traceback": self.traceback}
        if self.at:
            fields["at"] = self.at
        if self.transient:
            fields["transient"] = True
        return fields


def describe(error: BaseException) -> Failure:
    """Returns the failure for an exception, with Python's traceback and the paths of the script."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [(frame.filename, frame.lineno) for frame in frames if is_script(frame.filename)]
    reason, message = type(error).__name__, _text(error) + _folder_of(error)
    if found := _raised_in_callback(str(error)):
        reason, message, place = found
        places.append(place)
    return Failure(
        reason=reason,
        message=message,
        at=f"{_short(places[-1][0])}:{places[-1][1]}" if places else "",
        traceback=_bounded("".join(_lines(error))),
        transient=any(_is_transient(each) for each in _chain(error)),
    )


def _raised_in_callback(text: str) -> tuple[str, str, tuple[str, int | None]] | None:
    """Type, message, and (file, line) of an exception of the script in a callback of JAX, such as `jax.pure_callback`.

    The runtime raises another error there, whose text has the traceback of the callback.
    """
    _, begin, trace = text.partition("Traceback (most recent call last):")
    own = [found for found in _FRAME.finditer(trace) if is_script(found[1])]
    frames = list(_FRAME.finditer(trace))
    # The first such line: the text of the exception may have several lines.
    after = trace[frames[-1].end() :].splitlines()[1:] if frames else []
    raised = next((found for line in after if (found := _RAISED.match(line))), None)
    if not begin or not own or raised is None:
        return None
    name, message = raised[1].rpartition(".")[2], raised[2] or raised[1]
    return name, message, (own[-1][1], int(own[-1][2]))


def _text(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _folder_of(error: BaseException) -> str:
    """Returns the current folder, if the error is that a relative path does not exist."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str | os.PathLike):
        return ""
    if os.path.isabs(error.filename):  # noqa: PTH117  # it may be bytes in a path-like object
        return ""
    with contextlib.suppress(OSError):
        return f"; the current folder is {Path.cwd()}"
    return ""


def printed(error: BaseException) -> str:
    """Returns the traceback as Python prints it, without the frames of Backstay and JAX between those of the script.

    An exception that was raised while no line of the script ran keeps all its frames: it may be a defect of Backstay.
    """
    found = traceback.TracebackException.from_exception(error)
    seen: set[int] = set()
    todo: list[traceback.TracebackException | None] = [found]
    hidden = 0
    while todo:
        each = todo.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        todo += [each.__cause__, each.__context__, *(each.exceptions or ())]
        if any(is_script(frame.filename) for frame in each.stack):
            kept = [frame for frame in each.stack if not _is_machinery(frame.filename)]
            hidden += len(each.stack) - len(kept)
            each.stack = traceback.StackSummary.from_list(kept)
    note = f"(the traceback is shown without the frames of Backstay and JAX: {hidden})\n" if hidden else ""
    return note + "".join(found.format())


def _lines(error: BaseException) -> Iterator[str]:
    """Yields a traceback as from `traceback.format_exception`, without frames of libraries, notes, and earlier
    exceptions."""
    shown = [
        traceback.FrameSummary(_short(frame.filename), frame.lineno, frame.name, line=frame.line)
        for frame in traceback.extract_tb(error.__traceback__)
        if is_script(frame.filename)
    ]
    if shown:
        yield "Traceback (most recent call last):\n"
        yield from traceback.StackSummary.from_list(shown).format()
    for line in traceback.format_exception_only(type(error), error)[
        : 1 if not isinstance(error, SyntaxError) else None
    ]:
        yield line if len(line) <= _TEXT_CHARS else f"{line[:_TEXT_CHARS]}...\n"


def _bounded(text: str) -> str:
    text = text.rstrip("\n")
    return text if len(text) <= _TRACEBACK_CHARS else "...\n" + text[-(_TRACEBACK_CHARS - 4) :]


def is_script(filename: str) -> bool:
    """Returns whether a file of Python belongs to the script, and not to Backstay or a library."""
    if filename.startswith("<"):
        return filename == "<string>"
    path = str(Path(filename).absolute())
    return not path.startswith(_LIBRARIES) and not any(part in path for part in _PACKAGES)


def is_ours(filename: str) -> bool:
    """Returns whether a file of Python belongs to Backstay."""
    return str(Path(filename).absolute()).startswith(str(_PACKAGE) + os.sep)


def _is_machinery(filename: str) -> bool:
    path = str(Path(filename).absolute())
    return is_ours(filename) or any(f"{part}jax{os.sep}" in path for part in _PACKAGES)


def _short(filename: str) -> str:
    """Relative to the working directory, which has a job's files; so it is the same in every pod."""
    path = str(Path(filename).absolute())
    folder = str(Path.cwd()) + os.sep
    return path[len(folder) :] if path.startswith(folder) else filename


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, MemoryError | PeerLost | StorageError | TimeoutError):
        return True
    return isinstance(error, OSError) and not isinstance(error, _LASTING)
