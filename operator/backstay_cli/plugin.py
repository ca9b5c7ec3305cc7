"""Provides the commands about jobs as a plugin of kubectl (`kubectl backstay`).

https://kubernetes.io/docs/tasks/extend-kubectl/kubectl-plugins/
"""

from __future__ import annotations

import typer

from backstay_cli.cluster_commands import add_commands
from backstay_cli.program import run_app

__all__ = ["app", "main"]

app = typer.Typer(
    name="kubectl backstay",
    help="Show TrainingJobs: their progress, their logs, which pods died, and what each death cost.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    add_completion=False,
)
add_commands(app, embedded=False)


def main() -> None:
    """The entry point of `kubectl-backstay`."""
    run_app(app, "kubectl backstay")


if __name__ == "__main__":
    main()
