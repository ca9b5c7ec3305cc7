"""Selects the run on this machine that a command means."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from backstay_client.errors import BadInput
from backstay_client.finding.known_runs import KnownRun
from backstay_client.words import shortened

__all__ = ["SelectedRun", "is_path", "select"]

_SHOWN = 5


@dataclass(frozen=True)
class SelectedRun:
    """A run that was selected.

    Attributes:
        others: the number of other runs that have the job.
        by_folder: whether its folder was named, and not a job.
    """

    run: KnownRun
    others: int = 0
    by_folder: bool = False


def select(
    runs: Sequence[KnownRun],
    names: Mapping[Path, Sequence[str]],
    job: str | None,
    here: Path,
    *,
    has_default: bool,
) -> SelectedRun | None:
    """Returns the run that a command means, or None if it means the cluster of the user's kubeconfig.

    The order is: a running run of this folder, the user's kubeconfig, a running run elsewhere, an ended run of this
    folder, an ended run elsewhere. Within each, the newest comes first.

    Args:
        runs: all known runs, the newest first.
        names: the names of the jobs of each run, by its folder; needed only with `job`.
        job: a job's name, or the folder of a run; None: not given.
        here: the folder of the command.
        has_default: whether the user has a kubeconfig.

    Raises:
        BadInput: no run is known or meant, or several running ones are.
    """
    if job is not None:
        if (named := _of_folder(runs, names, job, here)) is not None:
            return SelectedRun(named, by_folder=True)
        runs = [run for run in runs if job in names.get(run.folder, ())]
    live = {run.folder for run in runs if run.lives}
    groups = [
        [run for run in runs if run.folder in live and run.is_of(here)],
        [run for run in runs if run.folder in live and not run.is_of(here)],
        [run for run in runs if run.folder not in live and run.is_of(here)],
        [run for run in runs if run.folder not in live and not run.is_of(here)],
    ]
    for order, group in enumerate(groups):
        # A user with a kubeconfig does not mean a run of another folder.
        if order == 1 and has_default:
            return None
        if not group:
            continue
        if job is None and len(group) > 1 and order < 2:
            raise BadInput(f"name one of the jobs, or the folder of its run: {_listed(group)}")
        return SelectedRun(group[0], len(runs) - 1 if job is not None else 0)
    if job is not None and names:
        known = [run for run in names if names[run]]
        some = "; ".join(f"{', '.join(names[run])} in {shortened(str(run))}" for run in known[:_SHOWN])
        more = f"; {len(known) - _SHOWN} more" if len(known) > _SHOWN else ""
        raise BadInput(f"no run on this machine has a job {job}; there is {some}{more}" if some else _nothing())
    raise BadInput(_nothing())


def _nothing() -> str:
    return (
        "no cluster is known: start one with `backstay run` or `backstay up`, or name a kubeconfig with --kubeconfig "
        "or KUBECONFIG"
    )


def is_path(job: str) -> bool:
    """Returns whether the name of a job is a path, and so means the folder of a run."""
    return os.sep in job or job in {".", ".."}


def _of_folder(runs: Sequence[KnownRun], names: Mapping[Path, Sequence[str]], job: str, here: Path) -> KnownRun | None:
    """Returns the run whose folder `job` is: a path, or the last part of one if no job has this name.

    Raises:
        BadInput: the path is not the folder of a run.
    """
    if is_path(job):
        folder = (here / Path(job).expanduser()).resolve()
        found = next((run for run in runs if run.folder == folder), None)
        if found is None:
            raise BadInput(f"{job} is not the folder of a run on this machine")
        return found
    if any(job in jobs for jobs in names.values()):
        return None
    return next((run for run in runs if run.folder.name == job), None)


def _listed(runs: Sequence[KnownRun]) -> str:
    def parts() -> Iterator[str]:
        for run in runs[:_SHOWN]:
            yield f"{run.job or '`backstay up`'} ({shortened(str(run.folder))})"

    return ", ".join(parts()) + (f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else "")
