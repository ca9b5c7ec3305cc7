"""The `backstay` command line: reads arguments, calls `run`, turns mistakes into exit status 2."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from backstay_cli.jobfile import BadInput, check, folder_of, job_of_script, localise, read_job

BAD_INPUT = 2

app = typer.Typer(
    name="backstay",
    help="Train JAX models with parameter servers that keep going when pods die.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(value: bool) -> None:
    if value:
        print(f"backstay {metadata.version('backstay')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


@app.command()
def run(
    file: Annotated[Path, typer.Argument(help="A TrainingJob (YAML; - for one piped in), or a training script (.py).")],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.", show_default=False)
    ] = None,
    servers: Annotated[int | None, typer.Option(help="Script only: parameter servers. [default: 1]")] = None,
    workers: Annotated[int | None, typer.Option(help="Script only: worker pods in all. [default: 2]")] = None,
    backups: Annotated[
        str | None, typer.Option(help="Script only: of them, backups: a number or percents such as 5%. [default: 0]")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Script only: Sync or Async. [default: Sync]")] = None,
    name: Annotated[str | None, typer.Option(help="Script only: the job's name.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Script only: where checkpoints go, a folder or any fsspec URI.")
    ] = None,
    print_job: Annotated[bool, typer.Option("--print-job", help="Print the TrainingJob and do not run it.")] = False,
    output: Annotated[str, typer.Option(help="text, or json: one object on stdout at the end.")] = "text",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and volumes. [default: .backstay/runs/<job>-<time>]")
    ] = None,
) -> None:
    """Run a job on an embedded cluster on this machine, with servers and workers, and wait for its end.

    Exit status: 0 the job Succeeded, 1 it Failed, 2 the input is wrong, 130 interrupted.
    """
    from backstay_cli.run import as_yaml, new_folder, run_job

    if output not in {"text", "json"}:
        _refuse(f"--output is {output!r}: must be text or json")
    given: dict[str, Any] = {
        "--servers": servers, "--workers": workers, "--backups": backups, "--mode": mode, "--name": name,
        "--checkpoint": checkpoint,
    }  # fmt: skip
    try:
        if file.suffix == ".py":
            job = job_of_script(
                file,
                servers=1 if servers is None else servers,
                workers=2 if workers is None else workers,
                backups="0" if backups is None else backups,
                mode="Sync" if mode is None else mode,
                name=name,
                checkpoint=checkpoint,
                arguments=tuple(arguments or ()),
            )
        else:
            extra = [option for option, value in given.items() if value is not None] + (arguments or [])
            if extra:
                raise BadInput(f"{extra[0]} goes with a script (.py) only: {file} says it itself")
            job = read_job(file)
        if print_job:
            print(as_yaml(job), end="")
            return
        job = localise(job, folder_of(file))
        check(job, str(file))
    except BadInput as error:
        _refuse(str(error))
    folder = new_folder(job["metadata"]["name"]) if data_dir is None else data_dir.resolve()
    raise typer.Exit(run_job(job, folder, as_json=output == "json"))


@app.command()
def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and volumes. [default: .backstay/runs/up-<time>]")
    ] = None,
) -> None:
    """Keep an embedded cluster with the operator running, for kubectl."""
    from backstay_cli.run import new_folder
    from backstay_cli.run import up as keep_up

    folder = new_folder("up") if data_dir is None else data_dir.resolve()
    raise typer.Exit(keep_up(folder, lambda line: print(line, flush=True)))


@app.command()
def validate(files: Annotated[list[Path], typer.Argument(help="TrainingJobs (YAML).")]) -> None:
    """Check TrainingJobs without running them: every mistake with its path and what would be right."""
    wrong = False
    for file in files:
        try:
            job = read_job(file)
        except BadInput as error:
            print(f"error: {error}", file=sys.stderr)
            wrong = True
        else:
            print(f"{file}: {job['metadata'].get('name', 'a TrainingJob')} is right")
    if wrong:
        raise typer.Exit(BAD_INPUT)


def _refuse(message: str) -> Any:
    print(f"error: {message}", file=sys.stderr)
    raise typer.Exit(BAD_INPUT)


def main() -> None:
    """The entry point of the `backstay` command."""
    app()


if __name__ == "__main__":
    main()
