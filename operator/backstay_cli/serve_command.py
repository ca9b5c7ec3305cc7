"""Starts a script that calls `backstay.serve`, with what its arguments in the environment replace."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from backstay_cli.program import StrictCommand, refuse

__all__ = ["add_serve"]


def add_serve(app: typer.Typer) -> None:
    """Add the command `serve`."""

    @app.command(cls=StrictCommand)
    def serve(
        script: Annotated[Path, typer.Argument(help="A script (.py) that calls backstay.serve.")],
        checkpoint: Annotated[
            str | None, typer.Option(help="The checkpoint folder, or one manifest: a path or any fsspec URI.")
        ] = None,
        name: Annotated[str | None, typer.Option(help="The name of the model in URLs.")] = None,
        step: Annotated[int | None, typer.Option(help="Serve the checkpoint of this step, and do not follow.")] = None,
        follow: Annotated[
            bool | None,
            typer.Option(
                "--follow/--no-follow",
                help="Follow newer checkpoints, or serve the newest one of the start until the end. "
                "[default: --follow, without --step]",
                show_default=False,
            ),
        ] = None,
        port: Annotated[int | None, typer.Option(help="The port of HTTP; 0: any.")] = None,
        grpc_port: Annotated[int | None, typer.Option(help="The port of gRPC; 0: any.")] = None,
        bind: Annotated[str | None, typer.Option(help="The address of both ports.")] = None,
    ) -> None:
        """Answer requests with the model of a script, until SIGTERM or Ctrl-C.

        The options replace arguments of backstay.serve. They are variables of the environment, BACKSTAY_SERVE_*.
        """
        if script.suffix != ".py" or not script.is_file():
            refuse(f"{script} is not a file with the ending .py: give a script that calls backstay.serve")
        if follow and step is not None:
            refuse("--follow and --step exclude each other: with --step, only the checkpoint of that step is served")
        if checkpoint is not None and "://" not in checkpoint:
            checkpoint = str(Path(checkpoint).absolute())
        options = {
            "CHECKPOINT": checkpoint,
            "NAME": name,
            "STEP": step,
            "FOLLOW": None if follow is None else str(follow).lower(),
            "HTTP_PORT": port,
            "GRPC_PORT": grpc_port,
            "BIND": bind,
        }
        given = {f"BACKSTAY_SERVE_{key}": str(value) for key, value in options.items() if value is not None}
        _become(script, given)


def _become(script: Path, variables: dict[str, str]) -> NoReturn:
    # This process becomes the script's: a signal for the command is then one for the server.
    os.execve(sys.executable, [sys.executable, str(script)], {**os.environ, **variables})  # noqa: S606
