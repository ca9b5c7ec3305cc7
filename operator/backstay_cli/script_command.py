"""Splits the command line of `backstay run` into options of Backstay, a script, and the script's own arguments.

As with `python` and `torchrun`, all arguments after a script belong to the script. After a YAML file, which takes no
arguments, options of Backstay may follow.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from backstay_cli.program import StrictCommand, refuse
from backstay_client.jobfiles.jobfile import is_script

__all__ = ["ScriptCommand"]


class ScriptCommand(StrictCommand):
    """A command whose first argument is a file, and whose other arguments go to that file if it is a script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse only the options before a script.

        Raises:
            typer.Exit: an option of Backstay follows the script.
        """
        at = self._first_argument(ctx, args)
        if at is None or not is_script(Path(args[at])):
            return super().parse_args(ctx, args)
        before, script, arguments = args[:at], args[at], args[at + 1 :]
        if before[-1:] == ["--"]:
            before = before[:-1]
        if arguments[:1] == ["--"]:
            arguments = arguments[1:]
        else:
            self._refuse_misplaced(ctx, script, arguments)
        return super().parse_args(ctx, [*before, "--", script, *arguments])

    def _first_argument(self, ctx: Any, args: Sequence[str]) -> int | None:
        """Returns the index of the first word that is neither an option nor an option's value, or None if there is
        none."""
        flags = {name: parameter.is_flag for parameter in _options(self, ctx) for name in parameter.opts}
        at = 0
        while at < len(args):
            word = args[at]
            if word == "--":
                return at + 1 if at + 1 < len(args) else None
            if not word.startswith("-") or word == "-":
                return at
            at += 1 if "=" in word or flags.get(word, True) else 2
        return None

    def _refuse_misplaced(self, ctx: Any, script: str, arguments: Iterable[str]) -> None:
        """Refuse an option after the script that Backstay has too: the user has to specify which one is meant."""
        own = {name for parameter in _options(self, ctx) for name in parameter.opts}
        for argument in arguments:
            if argument == "--":
                return
            option = argument.partition("=")[0]
            if option in own:
                refuse(
                    f"{option} follows the script {script}: options of backstay go before the script, as in "
                    f"`backstay run {option} ... {script}`. For an option of the script, put -- after the script, as "
                    f"in `backstay run {script} -- {option} ...`."
                )


def _options(command: StrictCommand, ctx: Any) -> Iterator[Any]:
    return (parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "option")
