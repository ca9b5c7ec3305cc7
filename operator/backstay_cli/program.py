"""How a command begins and ends: exit statuses, refusals, and an output that cannot be written."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Final, NoReturn

import typer

from backstay_cli import interrupts

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "OK", "is_of_output", "refuse", "run_app"]

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

_OF_OUTPUT: Final = {errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG}


def refuse(message: str) -> NoReturn:
    """Print an error and end the command, because its input is invalid.

    Raises:
        typer.Exit: the input is invalid; the exit status is 2.
    """
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(BAD_INPUT)


def is_of_output(error: BaseException) -> bool:
    """Whether writing to a file or a pipe failed, such as ``| head`` that has ended, or a full disk."""
    if isinstance(error, BrokenPipeError):
        return True
    return isinstance(error, OSError) and error.errno in _OF_OUTPUT and error.filename is None


def run_app(app: typer.Typer, name: str | None = None) -> None:
    """Run the command that the arguments of this process name; ends the process.

    A character that the terminal's encoding does not have is printed as ``?``. If the output cannot be written, the
    exit status is 1, with an error unless the reader of a pipe has ended.

    Args:
        name: the program's name in its help; None: the name with which it was started.
    """
    interrupts.restore()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    out = sys.stdout
    try:
        try:
            app(prog_name=name)
        finally:
            out.flush()
    except OSError as error:
        if not is_of_output(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the interpreter writes the rest at its end
        if not isinstance(error, BrokenPipeError):
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)
