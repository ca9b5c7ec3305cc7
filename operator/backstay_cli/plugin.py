"""`kubectl backstay`: the commands about jobs, as a plugin of kubectl.

https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
"""

from __future__ import annotations

import typer

from backstay_cli import interrupts
from backstay_cli.cluster_commands import accept_any_character, add_commands

__all__ = ["app", "main"]

app = typer.Typer(
    name="kubectl backstay",
    help="Look at TrainingJobs: what they do, what died and what that cost, and their logs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
add_commands(app, embedded=False)


def main() -> None:
    """The entry point of `kubectl-backstay`."""
    interrupts.restore()
    accept_any_character()
    app(prog_name="kubectl backstay")


if __name__ == "__main__":
    main()
