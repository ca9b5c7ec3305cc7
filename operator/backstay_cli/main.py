"""Reads arguments, calls `run`, and turns invalid input into exit status 2 (the `backstay` command line)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from backstay_cli.cluster_commands import add_commands
from backstay_cli.program import BAD_INPUT, FAILED, INTERRUPTED, OK, StrictCommand, refuse, run_app
from backstay_cli.script_command import ScriptCommand
from backstay_cli.serve_command import add_serve
from backstay_client.creating import HELD, claims_of
from backstay_client.errors import BadInput
from backstay_client.jobfiles.jobfile import (
    check,
    folder_of,
    is_script,
    load_job,
    localise,
    read_job,
    refuse_unwritable,
    refuse_what_cannot_run,
    relative_checkpoint,
    validated,
    variables_of,
    with_name,
    with_variables,
)
from backstay_client.jobfiles.script_job import ScriptOptions, job_of_script, localise_script
from backstay_client.jobfiles.template_fields import wrong_fields
from backstay_client.view.follow import JobView
from backstay_client.words import shortened
from backstay_spec.advice import advice
from backstay_spec.validation import parse_job

_NAME = "Script only: the job's name. [default: the script's name, or its folder's for train.py and main.py]"

app = typer.Typer(
    name="backstay",
    help="Train JAX models with parameter servers. Training continues when pods die.",
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


@app.command(cls=ScriptCommand)
def run(
    file: Annotated[
        Path, typer.Argument(help="A training script (.py) or a TrainingJob (YAML; - for standard input).")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Script only: the arguments of the script itself.", show_default=False)
    ] = None,
    servers: Annotated[int | None, typer.Option(help="Script only: parameter servers. [default: 1]")] = None,
    standbys: Annotated[
        int | None, typer.Option(help="Script only: standbys of each server, 0 or 1. [default: 0]")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Script only: workers, backups included. [default: 2]")] = None,
    gpus: Annotated[
        int | None, typer.Option(help="Script only: NVIDIA GPUs of each worker's pods. [default: 0]")
    ] = None,
    pods_per_rank: Annotated[
        int | None, typer.Option(help="Script only: pods of each worker, which JAX uses as one. [default: 1]")
    ] = None,
    backups: Annotated[
        str | None,
        typer.Option(help="Script only: backup workers, a number or percents such as 5%. [default: 0]"),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Script only: Sync or Async. [default: Sync]")] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            help="Script only: how long an update waits for backup workers: a duration such as 500ms, or Auto. "
            "[default: 0s]"
        ),
    ] = None,
    gradients: Annotated[
        str | None,
        typer.Option(help="Script only: the encoding of gradients: Exact, BFloat16, Int8 or Int4. [default: Exact]"),
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(help="Script only: the encoding of parameters: Exact or BFloat16. [default: Exact]"),
    ] = None,
    error_feedback: Annotated[
        bool | None,
        typer.Option(
            "--error-feedback/--no-error-feedback",
            help="Script only: workers add the rounding errors of Int8 or Int4 gradients to their next gradients. "
            "[default: only with local steps]",
            show_default=False,
        ),
    ] = None,
    evaluator: Annotated[
        bool,
        typer.Option(
            "--evaluator", help="Script only: a pod that evaluates the newest checkpoint. Needs --checkpoint."
        ),
    ] = False,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="METRIC:Max|Min",
            help="Script only: keep also the checkpoint with the best value of a number that evaluate returns. "
            "accuracy:Max keeps the largest, loss:Min the smallest. Implies --evaluator.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help=_NAME)] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Script only: the checkpoint folder, a path or any fsspec URI.")
    ] = None,
    every_steps: Annotated[
        int | None, typer.Option(help="Script only: updates between two checkpoints. [default: only by time]")
    ] = None,
    every_seconds: Annotated[
        int | None, typer.Option(help="Script only: seconds between two checkpoints, 0: only by steps. [default: 60]")
    ] = None,
    continue_from: Annotated[
        str | None,
        typer.Option(
            help="Script only: SameJob continues checkpoints of this job only; Any starts a new history from any "
            "checkpoint in the folder. [default: SameJob]"
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Environment variable of every pod; NAME without a value passes its current value. May be "
            "repeated. A script also gets the environment of this command, except BACKSTAY_*, KUBERNETES_* and "
            "CUDA_VISIBLE_DEVICES. On a machine with an NVIDIA GPU, JAX_PLATFORMS is cpu in a pod without one.",
        ),
    ] = None,
    preload: Annotated[
        bool,
        typer.Option(help="Fork pods from a process that has imported JAX; --no-preload starts each from scratch."),
    ] = True,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write what each pod did in the job's last minutes to this file, for https://ui.perfetto.dev."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Make two updates, one evaluation and one checkpoint with at least two servers, and print what was "
            "checked. The job's checkpoints are neither read nor written.",
        ),
    ] = False,
    print_job: Annotated[bool, typer.Option("--print-job", help="Print the TrainingJob and do not run it.")] = False,
    output: Annotated[str, typer.Option(help="text, or json: one object on stdout at the end.")] = "text",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and volumes. [default: .backstay/runs/<job>-<time>-<pid>]")
    ] = None,
) -> None:
    """Run a job with servers and workers on this machine, in an embedded cluster, until the job ends.

    Options go before the script. Arguments after the script belong to the script:
    backstay run --workers 4 train.py --lr 0.1

    A script runs in the current folder, as with python. The pods of a TrainingJob run in the YAML file's folder, or
    in spec.workingDir below it.

    Exit status: 0: the job succeeded; 1: the job failed; 2: the input is invalid; 130: interrupted
    or suspended.
    """
    from backstay_cli.run import run_job
    from backstay_client.embedded.run_folder import new_folder
    from backstay_client.jobfiles.bounded_yaml import as_yaml

    if output not in {"text", "json"}:
        refuse(f"--output is {output!r}: must be text or json")
    if dry_run and (output == "json" or trace is not None or data_dir is not None):
        refuse(
            "--dry-run cannot be used with --output json, --trace or --data-dir: its folder is "
            "deleted, unless a check fails"
        )
    options = ScriptOptions(
        servers=servers,
        standbys=standbys,
        workers=workers,
        gpus=gpus,
        pods_per_rank=pods_per_rank,
        backups=backups,
        mode=mode,
        grace=grace,
        gradients=gradients,
        parameters=parameters,
        error_feedback=error_feedback,
        name=name,
        checkpoint=checkpoint,
        every_steps=every_steps,
        every_seconds=every_seconds,
        evaluator=evaluator or None,
        keep_best=keep_best,
        continue_from=continue_from,
    )
    runs_script = is_script(file)
    others: Sequence[dict[str, Any]] = ()
    try:
        variables = variables_of(env or [], os.environ)
        if runs_script:
            job = job_of_script(file, options, arguments or [])
        else:
            loaded = load_job(file)
            job, others = with_name(validated(loaded, file)), loaded.others
            if given := options.given():
                raise BadInput(f"{given[0]} is for a script (.py): {file} is a TrainingJob, which has a field for it")
            if arguments:
                raise BadInput(f"the argument {arguments[0]} is for a script (.py): {file} is a TrainingJob")
        job = with_variables(job, variables)
        if print_job:
            print(as_yaml(job), end="")
            return
        # All that can be refused is refused before the cluster starts. After the training it would cost the result.
        job = localise_script(job, file) if runs_script else localise(job, folder_of(file))
        # This command reads the job after its end, and its cluster ends with the command.
        (job["spec"].get("runPolicy") or {}).pop("ttlSecondsAfterFinished", None)
        check(job, str(file))
        refuse_what_cannot_run(job, file)
        if trace is not None:
            refuse_unwritable(trace, "--trace")
        folder: Path | None = None
        if data_dir is None and not dry_run:
            folder = new_folder(job["metadata"]["name"], option="--data-dir")
    except BadInput as error:
        refuse(str(error))
    for one in others:
        if (one.get("apiVersion"), one.get("kind")) not in HELD:
            name = (one.get("metadata") or {}).get("name", "")
            print(f"note: {file}: the {one.get('kind')} {name} is ignored on this machine", file=sys.stderr)
    if dry_run:
        own = job["spec"].get("parameterServers") or {}
        chosen = servers is not None if runs_script else "replicas" in own
        raise typer.Exit(_dry_run(job, others, user_environment=runs_script, preloaded=preload, chosen=chosen))
    folder = folder or Path(data_dir or "").resolve()
    volumes_in = folder if claims_of(job) and data_dir is None else None
    again = command_again(sys.argv, volumes_in)
    as_json = output == "json"
    try:
        ended = run_job(
            job,
            folder,
            as_json=as_json,
            again=again,
            user_environment=runs_script,
            preloaded=preload,
            trace=trace,
            others=others,
        )
    except BadInput as error:
        refuse(str(error))
    raise typer.Exit(ended)


def _dry_run(
    job: dict[str, Any],
    others: Sequence[dict[str, Any]],
    *,
    user_environment: bool,
    preloaded: bool,
    chosen: bool,
) -> int:
    """Run the job as a dry run; return the exit status."""
    from backstay_cli import dry_run, report
    from backstay_cli.run import run_job
    from backstay_client.embedded.run_folder import new_folder

    try:
        folder = new_folder(f"{job['metadata']['name']}-dry-run")
    except BadInput as error:
        refuse(str(error))
    ends: list[JobView] = []

    def closing(view: JobView, seconds: float, logs: Path) -> Iterator[str]:
        ends.append(view)
        again = dry_run.has_one_server(job) and dry_run.needs_one_server(view)
        return report.lines(view, seconds, logs) if view.phase == "Failed" and not again else iter(())

    def run_once(changed: dict[str, Any]) -> JobView | None:
        status = run_job(
            changed,
            folder,
            as_json=False,
            user_environment=user_environment,
            preloaded=preloaded,
            env=dry_run.ENVIRONMENT,
            others=others,
            lines=closing,
        )
        if status in {INTERRUPTED, BAD_INPUT}:
            raise typer.Exit(status)
        return ends.pop() if ends else None

    try:
        found = dry_run.run_dry(job, folder, run_once, chosen=chosen)
    except BadInput as error:
        refuse(str(error))
    print(f"dry run of {job['metadata']['name']}:")
    for line in dry_run.lines(found):
        print(line)
    failed = any(check.outcome == "failed" for check in found)
    if not failed:
        shutil.rmtree(folder, ignore_errors=True)
    return FAILED if failed else OK


@app.command(cls=StrictCommand)
def up(
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for logs and volumes. [default: .backstay/runs/up-<time>-<pid>]")
    ] = None,
    preload: Annotated[
        bool,
        typer.Option(help="Fork pods from a process that has imported JAX; --no-preload starts each from scratch."),
    ] = True,
) -> None:
    """Keep an embedded cluster with the operator running, for kubectl."""
    from backstay_cli.run import up as keep_up
    from backstay_client.embedded.run_folder import new_folder

    try:
        folder = new_folder("up", option="--data-dir") if data_dir is None else data_dir.resolve()
        ended = keep_up(folder, lambda line: print(line, flush=True), preloaded=preload)
    except BadInput as error:
        refuse(str(error))
    raise typer.Exit(ended)


@app.command(cls=StrictCommand)
def export(
    checkpoint: Annotated[
        str, typer.Argument(help="A checkpoint's manifest, or a job's checkpoint.uri: a folder or any fsspec URI.")
    ],
    out: Annotated[
        str, typer.Argument(help="The output, which must not exist yet: a folder, or a file called *.safetensors.")
    ],
    format: Annotated[  # noqa: A002  # the option is called so
        str, typer.Option(help="safetensors, or orbax, which needs the package orbax-checkpoint.")
    ] = "safetensors",
    whole: Annotated[
        bool, typer.Option("--whole", help="With the frozen arrays, from the place where the job read them.")
    ] = False,
    base: Annotated[
        str | None, typer.Option(help="The place of the frozen arrays, instead of the one of --whole.")
    ] = None,
) -> None:
    """Write the parameters of a checkpoint for other programs.

    Exit status: 0: written; 1: the checkpoint cannot be read, or the output cannot be written; 2: the input is invalid.
    """
    from backstay_cli.export import export_checkpoint

    if format not in {"safetensors", "orbax"}:
        refuse(f"--format is {format!r}: must be safetensors or orbax")
    raise typer.Exit(export_checkpoint(checkpoint, out, format, base or ("" if whole else None)))


@app.command(cls=StrictCommand)
def simulate(
    file: Annotated[
        Path | None, typer.Argument(help="A TrainingJob (YAML; - for standard input).", show_default=False)
    ] = None,
    assume: Annotated[Path | None, typer.Option(help="Assumptions (YAML): times, sizes, rates, failures.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="One assumption, such as step.seconds=0.5; may be repeated.", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many simulations, each with the next seed.")] = 1,
    measured: Annotated[
        Path | None, typer.Option("--from", help="A trace that `backstay trace` wrote: steps are fitted to it.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write the first simulation as a trace for https://ui.perfetto.dev.")
    ] = None,
    print_assumptions: Annotated[
        bool, typer.Option("--print-assumptions", help="Print all assumptions as YAML, and simulate nothing.")
    ] = False,
    output: Annotated[str, typer.Option("--output", "-o", help="text or json.")] = "text",
) -> None:
    """Simulate a job with the real coordinator and the real planner, in simulated time.

    The same seed gives the same result. The result depends on the assumptions: print them with --print-assumptions.

    Exit status: 0: simulated; 2: the job, an assumption or the trace is invalid.
    """
    from backstay_cli import simulate as simulator

    if output not in {"text", "json"}:
        refuse(f"--output is {output!r}: must be text or json")
    try:
        assumed = simulator.assumptions_of(assume, settings or ())
        if print_assumptions:
            print(simulator.default_assumptions(assumed), end="")
            return
        if file is None:
            raise BadInput("name a TrainingJob: backstay simulate job.yaml")
        job = read_job(file)
        if trace is not None:
            refuse_unwritable(trace, "--trace")
        fit = None if measured is None else str(measured)
        found = simulator.simulated(job, assumed, seed=seed, seeds=seeds, fit=fit, trace=trace)
    except BadInput as error:
        refuse(str(error))
    if output == "json":
        print(json.dumps(found, indent=2, sort_keys=True))
        return
    for line in simulator.lines(found):
        print(line)


@app.command(cls=StrictCommand)
def validate(files: Annotated[list[Path], typer.Argument(help="TrainingJobs (YAML).")]) -> None:
    """Check TrainingJobs without running them, and print every mistake with its path and the valid values.

    Unknown fields and values of a wrong type in pod templates and in checkpoint.volume are warnings. A cluster checks
    most other values there only when the operator creates the pods.
    """
    invalid = False
    for file in files:
        try:
            loaded = load_job(file)
            job = validated(loaded, file)
        except BadInput as error:
            print(f"error: {error}", file=sys.stderr)
            invalid = True
            continue
        name = job["metadata"].get("name") or f"{job['metadata'].get('generateName', '')}..."
        print(f"{file}: {name}: valid")
        for text in (*(event.message for event in advice(parse_job(job))), *wrong_fields(job["spec"])):
            print(f"{file}: warning: {text}")
        if (uri := relative_checkpoint(loaded.job)) is not None:
            print(
                f"{file}: note: spec.checkpoint.uri is the relative path {uri!r}, which only `backstay run` accepts "
                f"(as {job['spec']['checkpoint']['uri']}); a cluster needs an absolute path or a URI"
            )
    if invalid:
        raise typer.Exit(BAD_INPUT)


add_commands(app, embedded=True)
add_serve(app)


def command_again(argv: Sequence[str], volumes_in: Path | None) -> str:
    """Returns the command that continues this one.

    Args:
        argv: the arguments of this process.
        volumes_in: the folder with the job's volumes, and so its checkpoints, if a new run would take another one.
    """
    words = ["backstay", *argv[1:]]
    if volumes_in is not None:
        words[2:2] = ["--data-dir", shortened(str(volumes_in))]
    return shlex.join(words)


def main() -> None:
    """The entry point of the `backstay` command."""
    run_app(app)


if __name__ == "__main__":
    main()
