"""How a command begins and ends: exit statuses, refusals, and an output that cannot be written."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Any, Final, NoReturn

import typer
from typer.core import TyperCommand

from backstay_cli import interrupts
from backstay_client.words import current_folder

__all__ = ["BAD_INPUT", "FAILED", "INTERRUPTED", "OK", "StrictCommand", "is_of_output", "refuse", "run_app"]

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
    """Returns whether writing to a file or a pipe failed, such as ``| head`` that has ended, or a full disk."""
    if isinstance(error, BrokenPipeError):
        return True
    return isinstance(error, OSError) and error.errno in _OF_OUTPUT and error.filename is None


class StrictCommand(TyperCommand):
    """A command that refuses an option with an empty value, such as ``--checkpoint "$NAME"`` of an unset variable.

    An empty path would be the current folder.
    """

    # The type of `ctx` depends on typer's version: newer ones bring a copy of click.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = self.make_parser(ctx).parse_args(args=list(args))[0]
        for parameter in self.get_params(ctx):
            value = given.get(parameter.name)
            if parameter.param_type_name == "option" and (value == "" or (isinstance(value, list) and "" in value)):
                refuse(f"{parameter.opts[0]} is empty: must have a value")
        return super().parse_args(ctx, args)


def _open_closed() -> None:
    """Open what the caller has closed of the standard streams (``>&-``), as if it were ``/dev/null``.

    Otherwise the next file that this process opens would be its standard output.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # for the life of the process
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


def run_app(app: typer.Typer, name: str | None = None) -> None:
    """Run the command that the arguments of this process name; ends the process.

    A character that the terminal's encoding does not have is printed as ``?``. If the output cannot be written, the
    exit status is 1, with an error unless the reader of a pipe has ended.

    Args:
        name: the program's name in its help; None: the name with which it was started.
    """
    interrupts.restore()
    _open_closed()
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
        if isinstance(error, FileNotFoundError) and current_folder() is None:
            print("error: the current folder was deleted: change to another one", file=sys.stderr)
            sys.exit(BAD_INPUT)
        if not is_of_output(error):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # the interpreter writes the rest at its end
        if not isinstance(error, BrokenPipeError):
            print(f"error: the output cannot be written: {error.strerror}", file=sys.stderr)
        sys.exit(FAILED)
